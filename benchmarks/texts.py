"""Training data of benchmarks: made-up words, and conversations of them in the paper's shape.

python -m benchmarks.texts --to=DATA --conversations=1000    # a dataset for launch.sft
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags

from astra_jax.base.settings import Count
from astra_jax.base.terminal import say
from launch.flags import cli
from launch.flags.numbers import number_flag
from synthesis.core.datasets import write_dataset
from synthesis.core.records import Message, ToolCall, ToolSpec, Trajectory

CALLS = (2, 3, 4, 4, 5, 5, 6, 6)
"""Tool calls of a conversation, one a turn. The means are 4.4 calls and 10.8 messages; the paper's dataset has 4.4 and
10.6."""
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in ("a", "e", "i", "o", "u", "ai", "or")]


def words() -> list[str]:
    """5,000 made-up words of two to four syllables: enough different ones that no tokenizer has all of them cached."""
    rng = random.Random(0)
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4))) for _ in range(5_000)]


def conversations(words: Sequence[str], *, size: float = 1.0) -> Iterator[Trajectory]:
    """Yield endless conversations of random words with tool calls, always the same ones; `size` scales their texts."""
    rng = random.Random(0)

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=max(1, round(size * count))))

    spec = ToolSpec("look_up", "Looks a thing up.", {"type": "object", "properties": {"thing": {"type": "string"}}})
    for index in itertools.count():
        messages = [Message("user", text(40))]
        for i in range(rng.choice(CALLS)):
            call = ToolCall(f"call_{i}", "look_up", {"thing": text(3)})
            messages.append(Message("assistant", "", reasoning=text(60), tool_calls=[call]))
            messages.append(Message("tool", text(100), tool_call_id=call.id, name="look_up"))
        messages.append(Message("assistant", text(80)))
        name = f"made_up_{index}"
        yield Trajectory(name, name, "made_up", "none", "en", [spec], messages, 0, {}, 1.0)


def main() -> None:
    made = itertools.islice(conversations(words()), _CONVERSATIONS.value)
    write_dataset(Path(_TO.value), Trajectory, made, card={"made_by": "benchmarks.texts"})
    say(f"{_TO.value}: {_CONVERSATIONS.value:,} conversations")


if __name__ == "__main__":
    _TO = flags.DEFINE_string("to", None, "Dataset to write.", required=True)
    _CONVERSATIONS = number_flag("conversations", 1_000, Count, "To make up.")
    cli.run(main)
