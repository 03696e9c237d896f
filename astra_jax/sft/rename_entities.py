"""Entity renaming: an augmentation that teaches a small model to copy names instead of memorising them.

A trajectory about the capital of Japan is as useful if Japan is called Rilu. The question, arguments, tool outputs and
answer must all use the new name. With a new name each time, the model can solve the task only by copying, which
held-out entities require. A large pretrained model copies already. A tiny model trained from scratch on a few thousand
conversations would memorise the names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from astra_jax.base.nesting import check_nesting
from synthesis.core.records import Message, Trajectory
from synthesis.core.tool_results import value_text

_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnprstvwz"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def rename_entities(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    """Return the conversation with its entities renamed consistently.

    An entity is a call argument that the user or an earlier tool output contains, or a string or integer in a tool's
    JSON output. Tool names, argument names and other argument values (enum choices) stay. A new name has the old one's
    shape: letters become letters of the same case, digits become digits, and the rest stays. Names are pronounceable;
    codes, which are all capitals, have arbitrary letters.

    Args:
        trajectory: any; returned unchanged if it has no entities.
        rng: the source of the new names.
    """
    names = sorted(_entities(trajectory.messages), key=lambda name: (-len(name), name))
    if not names:
        return trajectory
    new = {name: _same_shape(name, rng) for name in names}
    # Longest first, and whole words only: "Niger" in "Nigeria" is not a match.
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in names))

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: new[match[0]], value)
        if _is_integer(value):
            return int(new.get(str(value), value))
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        return [renamed(item) for item in value] if isinstance(value, list) else value

    messages = [_rename_message(message, renamed) for message in trajectory.messages]
    return msgspec.structs.replace(trajectory, messages=messages)


def _rename_message(message: Message, renamed: Any) -> Message:
    content = message.content
    if message.role == "tool":
        # Only values of a JSON output are entities, not its keys. It is formatted as in rollouts.
        document = _json(content)
        content = renamed(content) if document is None else value_text(renamed(document))
    else:
        content = renamed(content)
    calls = [msgspec.structs.replace(call, arguments=renamed(call.arguments)) for call in message.tool_calls]
    return msgspec.structs.replace(message, content=content, reasoning=renamed(message.reasoning), tool_calls=calls)


def _entities(messages: list[Message]) -> set[str]:
    spelled_out = ""
    found: set[str] = set()
    for message in messages:
        if message.role in ("user", "tool"):
            spelled_out += "\n" + message.content
        if message.role == "tool" and (document := _json(message.content)) is not None:
            found.update(_names(document))
        for call in message.tool_calls:
            for value in _names(call.arguments):
                if re.search(rf"(?<!\w){re.escape(value)}(?!\w)", spelled_out):
                    found.add(value)
    # Sentences are excluded, and single letters too, since they occur everywhere.
    return {value for value in found if _is_name(value)}


def _is_name(text: str) -> bool:
    return text.isdigit() or (2 <= len(text) <= 40 and len(text.split()) <= 5 and re.search(r"\w", text) is not None)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _names(value: Any) -> Iterator[str]:
    """Yield the strings and integers in a JSON value, in their written form."""
    if isinstance(value, str) or _is_integer(value):
        yield str(value)
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _names(item)


def _json(text: str) -> Any:
    """Return the parsed JSON container, or None for other outputs."""
    try:
        document = check_nesting(json.loads(text))
    except (ValueError, RecursionError):  # RecursionError: the text is nested too deep
        return None
    return document if isinstance(document, dict | list) else None


def _same_shape(name: str, rng: np.random.Generator) -> str:
    made: list[str] = []
    vowel_next = bool(rng.integers(2))
    for character in name:
        if character.isascii() and character.isalpha():
            letters = _LETTERS if name.isupper() else _VOWELS if vowel_next else _CONSONANTS
            letter = str(rng.choice(list(letters)))
            vowel_next = not vowel_next
            made.append(letter.upper() if character.isupper() else letter)
        elif character.isascii() and character.isdigit():
            leading = not made and len(name) > 1  # a number does not start with 0
            made.append(str(rng.integers(1 if leading else 0, 10)))
        else:
            made.append(character)
    return "".join(made)
