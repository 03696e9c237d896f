"""Measurements of `benchmarks.growth`, each point in a separate process; prints a line of JSON.

step SHAPE      an SFT step of a `Shape` with rows, tokens and devices (JSON): seconds, processor seconds, bytes
sandbox N       calls a second with N callers
environments N  environments a minute, proven here (0) or on N CPUs of Ray
cluster N       proofs a second that keep N machines' cores busy for TASK seconds each
start FOLDER T  seconds from T (of time.time) to the first step of a run that resumes there
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

STEPS = 5
SECONDS = 2.0
"""Duration of the calls' measurement."""
ENVIRONMENTS = 100
TASK = 0.05
"""Seconds that a proof takes of a core."""
VOCABULARY = 1_024


def step(text: str) -> dict[str, float]:
    """Medians of a step, and what its compiled program needs on a device: arguments (the state), and temporaries."""
    import jax
    import jax.numpy as jnp

    from astra_jax.mesh import make_mesh
    from astra_jax.models.flops import flops_per_token
    from astra_jax.models.qwen3.presets import Qwen3Config
    from astra_jax.sft.config import SFTConfig
    from astra_jax.sft.data import DataConfig
    from astra_jax.sft.step import abstract_arguments, train_step

    shape = json.loads(text)
    rows, tokens, devices = (shape.pop(name) for name in ("rows", "tokens", "devices"))
    model = Qwen3Config(**shape, tie_embeddings=True)
    config = SFTConfig(data=DataConfig(seq_len=tokens), batch_size=rows, micro_batch_size=rows)
    mesh = make_mesh(fsdp=devices) if devices > 1 else None
    abstract = abstract_arguments(model, config, 1000, mesh)
    compiled = train_step.lower(*abstract, model=model, config=config, steps=1000, mesh=mesh).compile()
    params, opt_state, batch = jax.tree.map(lambda one: jnp.ones(one.shape, one.dtype, device=one.sharding), abstract)
    seconds, processor = [], []
    for _ in range(STEPS + 1):
        params, opt_state = jax.block_until_ready((params, opt_state))
        began = time.perf_counter(), time.process_time()
        params, opt_state, metrics = compiled(params, opt_state, batch)
        jax.block_until_ready((params, opt_state, metrics))
        seconds.append(time.perf_counter() - began[0])
        processor.append(time.process_time() - began[1])
    memory = compiled.memory_analysis()
    return {
        "seconds": statistics.median(seconds[1:]),
        "processor_seconds": statistics.median(processor[1:]),
        "state_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "flops": flops_per_token(model, tokens)[0] * tokens * rows,
    }


async def sandboxed(callers: int) -> dict[str, float]:
    """Calls a second of a small tool."""
    from sandbox import SandboxConfig, SandboxPool

    calls = 0
    code = "def double(x):\n    return 2 * x\n"
    async with SandboxPool(SandboxConfig()) as pool:

        async def caller(until: float) -> None:
            nonlocal calls
            while time.perf_counter() < until:
                assert (await pool.call(code, "double", {"x": 21})).value == 42
                calls += 1

        await caller(time.perf_counter() + 0.1)  # the slot is there
        calls, began = 0, time.perf_counter()
        await asyncio.gather(*(caller(began + SECONDS) for _ in range(callers)))
        return {"calls_per_second": calls / (time.perf_counter() - began)}


async def environments(cpus: int) -> dict[str, float]:
    """Environments a minute, Ray's start not counted."""
    from sandbox import SandboxConfig, SandboxPool
    from synthesis.core.stages import Journal
    from synthesis.environments.config import EnvironmentsConfig
    from synthesis.environments.pipeline import synthesize
    from synthesis.offline.teacher import OfflineTeacher
    from synthesis.pipeline.executors import Executor
    from synthesis.pipeline.ray_cluster import RayCluster

    config = EnvironmentsConfig(count=ENVIRONMENTS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        journal = stack.enter_context(Journal(folder / "journal.sqlite"))
        run = partial(synthesize, config, journal=journal, out_dir=folder, seed=0)
        sandbox: Any = partial(SandboxPool, SandboxConfig())
        async with RayCluster(sandbox=sandbox, count=cpus) if cpus else sandbox() as opened:
            if cpus:
                await asyncio.gather(*(opened.run(rest, 1.0) for _ in range(cpus)))  # all its sandboxes are open
            began = time.perf_counter()
            made = await run(executor=Executor(OfflineTeacher(), opened))
        return {"environments_per_minute": 60 * sum(made.counts.values()) / (time.perf_counter() - began)}


async def rest(seconds: float, sandbox: object) -> None:
    """Work that a core of another machine would do."""
    await asyncio.sleep(seconds)


async def cluster(cpus: int) -> dict[str, float]:
    """Proofs a second that this process hands out, and what each costs it."""
    from synthesis.pipeline.ray_cluster import RayCluster

    async with RayCluster(sandbox=nullcontext, count=cpus) as opened:  # type: ignore[arg-type]
        await asyncio.gather(*(opened.run(rest, 1.0) for _ in range(cpus)))
        count = int(SECONDS / TASK * cpus)
        began, processor = time.perf_counter(), time.process_time()
        await asyncio.gather(*(opened.run(rest, TASK) for _ in range(count)))
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
    return {"proofs_per_second": count / seconds, "processor_ms_a_proof": 1000 * processor / count}


def start(folder: str, since: str) -> dict[str, float]:
    """Trains one step more, and is stopped as a cluster stops runs: saved."""
    import jax

    from astra_jax.models.qwen3.presets import Qwen3Config
    from astra_jax.run.compilation_cache import keep_programs
    from astra_jax.run.hooks import Hook
    from astra_jax.sft.config import SFTConfig
    from astra_jax.sft.data import DataConfig
    from astra_jax.sft.train import train
    from astra_jax.tokenizer import ChatTokenizer
    from benchmarks.shapes import SHAPES
    from benchmarks.texts import conversations, words
    from synthesis.core.chatml import QWEN3
    from synthesis.core.datasets import write_dataset
    from synthesis.core.records import Trajectory

    imported = time.time()
    workdir = Path(folder)
    if not (workdir / "data").exists():
        made = list(itertools.islice(conversations(words(), size=0.05), 200))
        write_dataset(workdir / "data", Trajectory, made, card={"made_by": "benchmarks.growth"})
        texts = ["".join(segment.text for segment in QWEN3.render(one.messages, one.tools)) for one in made]
        ChatTokenizer.train(texts, VOCABULARY, workdir / "tokenizer")
    tokenizer = ChatTokenizer.load(workdir / "tokenizer")
    keep_programs(workdir / "compiled")
    sizes = vars(SHAPES["1m"]) | {"vocab_size": tokenizer.vocab_size}
    model = Qwen3Config(**sizes, tie_embeddings=True)
    config = SFTConfig(data=DataConfig(seq_len=2_048), batch_size=2, steps=10, checkpoint_every=100, log_every=1)
    first: dict[str, float] = {}

    class Clock(Hook):
        def after_update(self, run: Any, state: Any, batch: Any, row: Any) -> None:
            first.setdefault("seconds", time.time() - float(since))
            os.kill(os.getpid(), signal.SIGTERM)

    train(config, model, lambda: model.init(jax.random.key(0)), workdir / "data", tokenizer, workdir / "run",
          progress=False, hooks=[Clock()])  # fmt: skip
    return {"seconds": first["seconds"], "import_seconds": imported - float(since)}


if __name__ == "__main__":
    from benchmarks import growth_side  # under its own name, by which Ray's workers find it

    match sys.argv[1:]:
        case ["step", shape]:
            measured = step(shape)
        case ["sandbox", callers]:
            measured = asyncio.run(sandboxed(int(callers)))
        case ["environments", cpus]:
            measured = asyncio.run(growth_side.environments(int(cpus)))
        case ["cluster", cpus]:
            measured = asyncio.run(growth_side.cluster(int(cpus)))
        case ["start", folder, since]:
            measured = start(folder, since)
        case _:
            raise SystemExit(__doc__)
    print(json.dumps(measured), flush=True)
