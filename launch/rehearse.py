"""Sample conversations from a model itself, which SFT mixes in to keep general chat ability.

    astra rehearse --weights=FOLDER --to=DATASET
    astra sft --weights=FOLDER --data=DATASET --rehearsal=DATASET --workdir=DIR ...

The model of --weights writes user requests and answers them, at temperature 1 on the embedded engine. No other data is
needed, nor a list of questions. Use the weights that SFT starts from. The share of these conversations in SFT is
--config.sft.data.self_generated_ratio.

Run the same command again after an interruption: finished conversations are in a journal next to --to, and are not
sampled again.
"""

from __future__ import annotations

from astra_jax.base.settings import Count, Length, Slots
from astra_jax.base.terminal import say
from launch.flags import cli, policies, shared, targets
from launch.flags.numbers import number_flag

policies.require_weights()

_CONVERSATIONS = number_flag(
    "conversations", 1_000, Count, "Number of conversations to sample; unusable ones are excluded, with the reason."
)
_REQUEST = number_flag(
    "max_request_tokens",
    128,
    Length,
    "Maximum tokens of a sampled user request; conversations with a longer one are excluded.",
)
_ANSWER = number_flag(
    "max_answer_tokens",
    256,
    Length,
    "Maximum tokens of a sampled answer; a longer one is cut, and its end is not trained on.",
)
_SEED = shared.seed("requests and answers")
_SLOTS = number_flag("slots", 16, Slots, "Sequences that decode at the same time: conversations.")


def main() -> None:
    import asyncio

    say(asyncio.run(_rehearse()))


async def _rehearse() -> str:
    from dataclasses import asdict

    from astra_jax.rollout.engine.cache_memory import check_cache_fits
    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.rollout.engine.slots import EngineConfig
    from astra_jax.sft.rehearsal import RehearsalConfig, longest, rehearse
    from synthesis.core.datasets import write_dataset
    from synthesis.core.records import Trajectory
    from synthesis.core.stages import Journal
    from synthesis.core.workdir import locked_target

    target = targets.folder()
    config = RehearsalConfig(
        conversations=_CONVERSATIONS.value,
        max_request_tokens=_REQUEST.value,
        max_answer_tokens=_ANSWER.value,
        concurrency=_SLOTS.value,
        seed=_SEED.value,
    )
    model, tokenizer = policies.read()
    length = longest(tokenizer, config)
    model.check_length(length, "--max_request_tokens + --max_answer_tokens and what opens them")
    check_cache_fits(
        model,
        _SLOTS.value,
        length,
        policies.mesh(),
        settings="--slots, --max_request_tokens or --max_answer_tokens",
    )
    settings = {"dtype": model.dtype, **asdict(config)}
    for name in ("concurrency", "conversations"):  # a conversation does not depend on them
        del settings[name]
    run = policies.run_name("rehearsal", settings, tokenizer.vocabulary_digest)
    with locked_target(target):
        params = policies.load(model)
        with Journal(targets.journal(target)) as journal:
            async with Engine(params, model, EngineConfig(slots=_SLOTS.value, max_length=length)) as engine:
                drawn = await rehearse(engine, tokenizer, config, journal=journal, run=run)
        how = {"policy": policies.name(), "settings": settings, "rejected": dict(drawn.rejected)}
        write_dataset(target, Trajectory, drawn.outputs, card={"made_by": "launch.rehearse", "rehearsal": how})
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(drawn.rejected.items()))
    unfinished = sum(one.unfinished is True for one in drawn.outputs)
    return (
        f"{target}: {len(drawn.outputs)} conversations, {unfinished} of them broken off at the limit"
        f"{left and f'; left out: {left}'}"
    )


if __name__ == "__main__":
    cli.with_cpu_environment("launch.rehearse", large=True)
    cli.run(main, again="what is drawn is not drawn again")
