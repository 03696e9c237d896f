"""A vLLM plugin: a running server takes over a trainer's weights, straight from an Orbax checkpoint or from its memory.

    ASTRA_SYNC_ROOT=/policy ASTRA_SYNC_KEY_FILE=FILE VLLM_PLUGINS=astra,astra_sync vllm serve DIR --load-format dummy \
        --weight-transfer-config '{"backend": "astra"}' --enable-scale-out --logprobs-mode processed_logprobs \
        --api-key KEY

    POST /v1/policy/sync     {"item": "/policy/12/params", "version": "12"}, with the key in X-Astra-Sync-Key
    GET  /v1/policy/version

Needs tensorstore, neither jax nor orbax. `access.py` says who may have what loaded, `checkpoint.py`
reads files, `stream.py` what a trainer serves (`wire.py`), and `layout.py` compares either with the model.
`endpoint.py` (in the API process) has all of it checked and put into shared memory (`memory.py`),
`handover.py` has the workers take it from there: with `engine.py` on CPUs and GPUs, with `tpu.py` on TPUs, where
`digest.py` tells whether they did. `seeds.py` mends what vLLM's engine on CPUs dies of.
"""
