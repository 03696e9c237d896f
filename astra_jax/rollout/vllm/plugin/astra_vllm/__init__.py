"""vLLM plugin: a running server loads a trainer's weights, from an Orbax checkpoint or from the trainer's memory.

    ASTRA_SYNC_ROOT=/policy ASTRA_SYNC_KEY_FILE=FILE VLLM_PLUGINS=astra,astra_sync vllm serve DIR --load-format dummy \
        --weight-transfer-config '{"backend": "astra"}' --enable-scale-out --logprobs-mode processed_logprobs \
        --api-key KEY

    POST /v1/policy/sync     {"item": "/policy/12/params", "version": "12"}, with the key in X-Astra-Sync-Key
    GET  /v1/policy/version

Needs tensorstore, neither jax nor orbax. `access.py` decides who may load what. `checkpoint.py` reads files,
`stream.py` reads what a trainer serves (`wire.py`), and `layout.py` compares either with the model.

`endpoint.py` (in the API process) checks the weights and puts them into shared memory (`memory.py`). `handover.py` has
the workers copy them: by `engine.py` on CPUs and GPUs, by `tpu.py` on TPUs, where `digest.py` verifies it. `seeds.py`
fixes a crash of vLLM's CPU engine.
"""
