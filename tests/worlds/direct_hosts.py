"""A trainer's host that serves weights from its memory: one process of `jax.distributed`, of two devices.

    python direct_hosts.py PORT INDEX COUNT KEY

For each line that it reads it publishes the next update, `weights(1)` first, and says where.
"""

from __future__ import annotations

import sys

import jax
import numpy as np

from astra_jax.mesh import make_mesh
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.vllm.direct import DirectPublisher

MODEL = Qwen3Config(
    vocab_size=512,
    d_model=64,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    head_dim=8,
    d_ff=64,
    tie_embeddings=False,
)
RUN = "several"


def weights(update: int) -> dict:
    """The same to the bit in whichever process."""
    rng = np.random.default_rng(update)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), MODEL.abstract_params())


def placed(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """What of it belongs on this process's devices."""
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def main(port: str, index: str, count: str, key: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(index))
    mesh = make_mesh(fsdp=int(count), tensor=2)
    publisher = DirectPublisher(MODEL, key=key, run=RUN if index == "0" else "", host="127.0.0.1", dtype="float32")
    for update, _ in enumerate(iter(sys.stdin.readline, ""), 1):
        params = jax.tree.map(placed, weights(update), MODEL.param_shardings(mesh))
        item = publisher.publish(params, update)
        publisher.wait()
        print(item, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
