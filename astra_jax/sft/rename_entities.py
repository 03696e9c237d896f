"""Entity renaming: an augmentation that teaches a small model to copy instead of to remember.

A trajectory that looks up the capital of Japan teaches just as much when Japan is called Rilu, as long as the question,
the arguments, the tool outputs and the answer all call it so. A model that sees a new name each time can only solve the
task by copying, which is what held-out entities need. A large pretrained model copies already; a tiny one, trained from
scratch on a few thousand conversations, would learn the names by heart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from sandbox.protocol import check_nesting
from synthesis.core.records import Message, Trajectory
from synthesis.core.tool_results import value_text

_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnprstvwz"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def rename_entities(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    """The same conversation with its entities renamed throughout.

    An entity is an argument of a call that the user or an earlier tool output spelled out, or a string or an integer in
    a tool's JSON output. Tool names, argument names, and argument values that nobody spelled out (enum choices) stay. A
    new name has the old one's shape: letters become letters of the same case, digits digits, everything else stays.
    Names can be spoken, as real ones can; codes, which are all capitals, are any letters.

    Args:
        trajectory: any; it is returned as it is when it has no entities.
        rng: the source of the new names.
    """
    names = sorted(_entities(trajectory.messages), key=lambda name: (-len(name), name))
    if not names:
        return trajectory
    new = {name: _same_shape(name, rng) for name in names}
    # Longest first, and whole words only: "Niger" inside "Nigeria" is not that entity.
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
        # Only the values of a JSON output are entities; its keys are the tool's. It is spelled as rollouts spell it.
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
    # Sentences are not entities, and a single letter would be renamed all over the text.
    return {value for value in found if _is_name(value)}


def _is_name(text: str) -> bool:
    return text.isdigit() or (2 <= len(text) <= 40 and len(text.split()) <= 5 and re.search(r"\w", text) is not None)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _names(value: Any) -> Iterator[str]:
    """The strings and the integers in a JSON value, as they are spelled."""
    if isinstance(value, str) or _is_integer(value):
        yield str(value)
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _names(item)


def _json(text: str) -> Any:
    """The document, or None: not every tool answers in JSON."""
    try:
        document = check_nesting(json.loads(text))
    except (ValueError, RecursionError):  # the latter: of a text that is nested too deep
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
            leading = not made and len(name) > 1  # a number does not begin with 0
            made.append(str(rng.integers(1 if leading else 0, 10)))
        else:
            made.append(character)
    return "".join(made)
