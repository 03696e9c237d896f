"""Supervised fine-tuning of a Qwen3 on trajectories.

    python -m launch.sft --config=sft:14b --weights=DIR --data=DATASET --workdir=DIR --mesh=fsdp=8

--data is a dataset of trajectories, as the synthesis writes them; --held_out another, whose loss is logged and whose
questions samples answer. They and --workdir are folders, or in a bucket: gs://BUCKET/FOLDER. Settings are changed with
--config.NAME=VALUE, for example --config.sft.learning_rate=1e-5. Run the same command again after an interruption: it
goes on from its last checkpoint. SIGTERM saves and ends with 0.

    --data.preview=3         print three examples, what is trained on in colour, and stop
    --profile_steps=10:12    write a trace of these steps to WORKDIR/profile
    --bench=20               so many steps on made-up data; a row of figures in WORKDIR/bench.jsonl

On several hosts run the same command on each, with --multihost on TPUs, or with --coordinator, --hosts and --host;
--workdir is a folder that all of them see, or a bucket's. The model is in WORKDIR/checkpoints; launch.convert makes a
Hugging Face folder of it.
"""

from __future__ import annotations

import contextlib

from absl import flags

from launch.flags import cli, models
from launch.flags.numbers import number_flag
from sandbox.settings import CountOrZero
from synthesis.core.terminal import say

flags.adopt_module_key_flags(models)

_DATA = flags.DEFINE_string("data", None, "Dataset of trajectories to train on; not with --bench.")
_HELD_OUT = flags.DEFINE_string("held_out", None, "Dataset whose loss is logged every eval_every steps.")
_PREVIEW = number_flag("data.preview", 0, CountOrZero, "Print so many examples and stop.")
_BENCH = number_flag("bench", 0, CountOrZero, "So many steps on made-up data.")


def main() -> None:
    from functools import partial
    from pathlib import Path

    import jax

    from astra_jax.models.hf_checkpoint import copy_tokenizer
    from astra_jax.run import compilation_cache
    from astra_jax.run.hosts import is_first
    from astra_jax.run.record import write_run_record
    from astra_jax.sft import bench, preview
    from astra_jax.sft import train as sft
    from astra_jax.tokenizer import ChatTokenizer
    from synthesis.core.datasets import check_dataset
    from synthesis.core.records import Trajectory

    config = cli.overridden(models.config("sft"))
    if not _DATA.value and not _BENCH.value:
        raise cli.UsageError("--data is missing; give a dataset of trajectories, or --bench=STEPS")
    if _PREVIEW.value and _DATA.value:
        tokenizer = ChatTokenizer.load(models.tokenizer_folder())
        preview.show(_DATA.value, tokenizer, config.sft.data, _PREVIEW.value)
        return
    profile = models.profiled_steps()
    if _BENCH.value:
        cli.local_folder(models.WORKDIR)
    with contextlib.ExitStack() as stack:
        stack.enter_context(models.hosts())
        for dataset in (_DATA.value, _HELD_OUT.value):
            if dataset:
                check_dataset(dataset, Trajectory)
        tokenizer = models.checked(config.model)
        workdir = models.workdir()
        stack.enter_context(models.held(workdir))
        mesh = models.mesh()
        compilation_cache.keep_programs(workdir / compilation_cache.FOLDER)
        start = partial(models.load, config.model, mesh)
        if is_first():
            write_run_record(workdir, config)
            copy_tokenizer(models.tokenizer_folder(), workdir / "checkpoints")
        if _BENCH.value:
            row = bench.run(config.sft, config.model, start, tokenizer, Path(workdir), mesh, steps=_BENCH.value)
            if is_first():
                say(row)
            return
        assert _DATA.value is not None
        arguments = (config.sft, config.model, start, _DATA.value, tokenizer, workdir)
        result = sft.train(*arguments, held_out=_HELD_OUT.value, mesh=mesh, profile=profile)
        if is_first():
            stats = result.stats
            say(
                f"{workdir / 'checkpoints'}: {result.steps} steps, {result.stopped}, loss {result.final_loss:.4f}; "
                f"{len(stats.lengths)} conversations, {stats.cut} cut, {sum(stats.dropped.values())} dropped; "
                f"{jax.default_backend()}"
            )


if __name__ == "__main__":
    cli.with_cpu_environment("launch.sft")
    cli.run(
        main, again="it goes on from its last checkpoint", settings=lambda: models.config("sft", example="sft:0.6b")
    )
