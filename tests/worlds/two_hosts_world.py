"""GRPO on two hosts: two real processes of `jax.distributed`, and the same run in one process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils
from programs_world import Programs, Started, programs
from rollout_world import ScriptedSampler, call, make_environment

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.train import train
from astra_jax.mesh import make_mesh
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.rollout.vllm.publishing import Publisher
from astra_jax.rollout.vllm.server import PolicyError
from astra_jax.run.hosts import HostWatch
from astra_jax.tokenizer import ChatTokenizer
from sandbox import SandboxPool

MODEL = Qwen3Config(
    vocab_size=512,
    d_model=64,
    n_layers=1,
    n_heads=8,
    n_kv_heads=4,
    head_dim=8,
    d_ff=64,
    tie_embeddings=True,
    max_positions=1024,
)
CONFIG = GRPOConfig(
    steps=3,
    batch_size=2,
    group_size=4,
    learning_rate=1e-2,
    eps=1e-3,
    concurrent_groups=4,
    episode=EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1),
    row_buckets=(512, 1024),
    micro_batch_size=4,
    checkpoint_every=2,
)


def script(session: str, turn: int, seed: int) -> str:
    return call("capital_of", country="France") if turn == 0 and seed % 2 else f"I say {seed % 7}."


async def run(tokenizer: ChatTokenizer, workdir: Path, mesh, *, fails: int = -1, dies: int = -1, **changes):
    """Train, sampling with a script on the first host; any other's policy must not be asked. All publish.

    While there is a file `hang` in the workdir, some episodes of the third batch never end; `hangs.*` says that they
    are there. `stopped` says why a run ended, and after which step.

    Args:
        fails: the version that no server takes over.
        dies: the version at which the second host is gone.
    """
    publisher = Publisher(workdir / "policy", MODEL, dtype="float32")

    class Sampler(ScriptedSampler):
        async def load_weights(self, params, version):
            if dies == version and jax.process_index() == 1:
                os._exit(9)
            publisher.publish(params, version)
            await asyncio.to_thread(publisher.wait)
            if fails == version and jax.process_index() == 0:
                raise PolicyError(f"no rollout server took version {version} over")
            await super().load_weights(params, version)

        async def generate(self, *arguments, **options):
            assert jax.process_index() == 0, "only the first host samples"
            if self.version == 2 and (workdir / "hang").exists() and options["session"].endswith(".3"):
                (workdir / f"hangs.{os.getpid()}").touch()
                await asyncio.sleep(3600)
            return await super().generate(*arguments, **options)

    params = MODEL.init(jax.random.key(0))
    config = dataclasses.replace(CONFIG, **changes)
    environments = [make_environment("a"), make_environment("b", "Japan"), make_environment("c")]
    policy = Sampler(tokenizer, script)
    async with SandboxPool() as pool:
        result = await train(
            config,
            MODEL,
            lambda: params,
            environments,
            tokenizer,
            pool,
            workdir,
            policy=policy,
            mesh=mesh,
            progress=False,
        )
    publisher.close()
    assert policy.version == result.steps, "every host takes part in publishing"
    if jax.process_index() == 0:
        (workdir / "stopped").write_text(f"{result.stopped} {result.steps}")
    return result


def host(port: str, index: str, tokenizer: str, folder: str, changes: str, watch: str) -> None:
    """One of them, as a program: `params.pickle` has the weights that it ends with."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
    workdir, mesh = Path(folder), make_mesh(fsdp=2, context=2, tensor=2)
    with HostWatch(float(watch)) if float(watch) else contextlib.nullcontext():
        result = asyncio.run(run(ChatTokenizer.load(tokenizer), workdir, mesh, **json.loads(changes)))
    assert jax.process_count() == 2 and not jax.tree.leaves(result.params)[0].is_fully_addressable
    params = multihost_utils.process_allgather(result.params, tiled=True)
    if jax.process_index() == 0:
        (workdir / "params.pickle").write_bytes(pickle.dumps(jax.device_get(params)))


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[Programs]:
    """What starts them."""
    with programs(Path(__file__).stem, folder, PYTHONPATH=os.pathsep.join(sys.path)) as start:
        yield start


@contextlib.contextmanager
def two_hosts(
    start: Programs, tokenizer: Path, workdir: Path, *, watch: float = 0, **changes
) -> Iterator[list[Started]]:
    """Started; killed at the end, if they still run.

    Args:
        watch: seconds of `HostWatch`; 0: nobody watches.
        changes: of `run`.
    """
    port = free_port()
    workdir.mkdir(exist_ok=True)
    arguments = [str(tokenizer), str(workdir), json.dumps(changes), str(watch)]
    started = [start.begin(str(port), str(i), *arguments) for i in range(2)]
    try:
        yield started
    finally:
        for one in started:
            one.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def of_two_hosts(program: str, *arguments: str) -> list[tuple[str, int]]:
    """A program on two hosts, told where they meet and which one it is: what each says on stderr, and its exit code."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(port), str(i), *arguments], stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        return [(one.communicate(timeout=90)[1], one.returncode) for one in started]
    finally:
        for one in started:
            one.kill()


if __name__ == "__main__":
    host(*sys.argv[1:])
