"""Fine-tune a model on trajectories (supervised fine-tuning, SFT).

    astra sft --weights=Qwen/Qwen3-4B --data=train.jsonl --held_out=5% --workdir=runs/sft
    astra sft --weights=DIR --data=DATASET --workdir=DIR --config=sft:14b --mesh=fsdp=8

Without --config (sft:auto) the model is that of --weights, and row length, batch size, micro-batch size and learning
rate are chosen for your data and devices. Without --mesh all devices of all hosts are used. Each choice is printed with
its reason before step 1. A preset such as sft:14b has the paper's settings. Change settings with --config.NAME=VALUE,
for example --config.sft.learning_rate=1e-5.

--data is a dataset of trajectories that synthesis wrote, a .jsonl or .parquet file of conversations, or hub:ORG/NAME.
--held_out is a dataset whose loss is logged, and whose questions the text samples answer; or a share of --data, which
is then not trained on. --rehearsal is a dataset of conversations without tools that are mixed in, so that the model
keeps its general chat ability (astra rehearse).
--weights is a folder, or a model's name on the Hub, for example Qwen/Qwen3-0.6B. Datasets and --workdir may be in a
bucket: gs://BUCKET/FOLDER.

Run the same command again after an interruption: it resumes from its last checkpoint. SIGTERM saves a checkpoint and
exits with 0. The model is in WORKDIR/checkpoints; astra convert makes a Hugging Face folder of it.

    --preview=3              print three examples with trained tokens in color, and the table of the run, and stop
    --profile_steps=10:12    write a trace of these steps to WORKDIR/profile

With several hosts run the same command on each, with --multihost on TPUs, or with --coordinator, --hosts and
--host_index. --workdir must be a folder that all hosts can read, or in a bucket.
"""

from __future__ import annotations

import contextlib
import dataclasses

from absl import flags

from astra_jax.base.settings import Count
from astra_jax.base.terminal import say
from launch.flags import auto, cli, data, metrics, models
from launch.flags.numbers import number_flag

_PREVIEW = number_flag(
    "preview", None, Count, "Show this many records, and stop; with trained tokens in color and the table of the run."
)


def main() -> int:
    from functools import partial

    import jax

    from astra_jax.run import compilation_cache
    from astra_jax.run.hosts import is_first
    from astra_jax.run.model_card import trained_on
    from astra_jax.run.record import write_run_record
    from astra_jax.sft import preview
    from astra_jax.sft import train as sft

    config = models.settings("sft")
    if _PREVIEW.value:
        shown, held_out, rehearsal = data.datasets(config.sft.data.seed)
        tokenizer = models.load_tokenizer()
        if models.is_auto():
            config = auto.previewed(config, shown, tokenizer)
        preview.show(shown, tokenizer, config.sft.data, _PREVIEW.value)
        say(preview.summary(config.sft, shown, tokenizer, rehearsal=rehearsal, held_out=held_out))
        return 0
    profile = models.profiled_steps()
    with contextlib.ExitStack() as stack:
        stack.enter_context(models.hosts())
        stack.enter_context(metrics.shown(first=models.is_first_host))
        dataset, held_out, rehearsal = data.datasets(config.sft.data.seed)
        tokenizer, model = models.checked(config.model)
        config = dataclasses.replace(config, model=model, sft=models.with_added_tokens(config.sft, tokenizer))
        workdir = models.workdir()
        stack.enter_context(models.held(workdir))
        row = partial(auto.sft_row, config, dataset, tokenizer, workdir, is_open=models.is_auto())
        mesh = models.mesh_or_default(config.model, config.sft, row)
        if models.is_auto():
            config = auto.sft_settings(config, dataset, rehearsal, tokenizer, workdir, mesh)
            config = dataclasses.replace(config, sft=models.with_added_tokens(config.sft, tokenizer))
        compilation_cache.keep_programs(workdir / compilation_cache.FOLDER)
        start = partial(models.load, config.sft, config.model, mesh)
        if is_first():
            write_run_record(workdir, config)
            models.complete(tokenizer, workdir)
        arguments = (config.sft, config.model, start, dataset, tokenizer, workdir)
        origin = models.origin(config.sft, config.model)
        result = sft.train(
            *arguments,
            held_out=held_out,
            rehearsal=rehearsal,
            origin=origin,
            mesh=mesh,
            profile=profile,
            hooks=models.hooks(),
        )
        if is_first():
            used = {"data": dataset, "rehearsal": rehearsal, "held out": held_out}
            datasets = [trained_on(role, one) for role, one in used.items() if one]
            models.write_card(workdir, "SFT", config, datasets, result.summary)
            stats = result.stats
            evaluated = [row["eval/loss"] for row in result.history if "eval/loss" in row]
            of_held_out = f", held-out loss {evaluated[-1]:.4f}" if evaluated else ""
            say(
                f"{workdir / 'checkpoints'}: {result.steps} steps{models.skipped(result.skipped)}, {result.stopped}, "
                f"loss {result.final_loss:.4f}{of_held_out}; "
                f"{len(stats.lengths)} examples, {stats.cut} cut, {sum(stats.dropped.values())} dropped; "
                f"{jax.default_backend()}"
            )
            if result.stopped == "finished":
                run = models.WORKDIR.value
                say(f"next: astra serve --weights={run}, or astra convert --from_orbax={run} --to_hf=MODEL")
        return models.ended(result.stopped)


if __name__ == "__main__":
    flags.set_default(models.CONFIG, "sft:auto")
    cli.with_cpu_environment("launch.sft", large=True)
    cli.run(
        main, again="it goes on from its last checkpoint", settings=lambda: models.config("sft", example="sft:0.6b")
    )
