"""What people see of a dataset of trajectories: its list, and each one's messages with the results at their calls.

Conversations of other records are arranged here too, once they are `Said`: `evaluated.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from launch.viewer.listing import Page, part
from launch.viewer.listing import arranged as in_order
from synthesis.core.datasets import each_record, read_record
from synthesis.core.records import Message, Trajectory
from synthesis.core.refusals import InputError
from synthesis.core.tool_results import server_text
from synthesis.core.typed import decode_json
from synthesis.trajectories.execution import FAILURES
from synthesis.trajectories.judge import AXES

_SHORT_CHARACTERS, _SHORT_LINES = 600, 14
"""What is longer is folded."""
_PREVIEW = _LINE = 110
TOO_DEEP = "(too deeply nested to be shown)"


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which trajectories to list; what is empty lets all pass.

    Attributes:
        text: in the question, the id, the server's id, the name of a called tool or what the conversation teaches
            beside calling tools, whatever its case.
        reward: the least one.
        failures: `with` or `without` injected failures.
        sort: one of `TRAJECTORY_KEYS`, or with a minus; "": the dataset's order.
    """

    text: str = ""
    domain: str = ""
    language: str = ""
    reward: float | None = None
    failures: str = ""
    sort: str = ""

    def passes(self, entry: TrajectoryEntry) -> bool:
        """Whether a trajectory is one of those."""
        return (
            self.domain in ("", entry.domain)
            and self.language in ("", entry.language)
            and (self.reward is None or (entry.reward is not None and entry.reward >= self.reward))
            and self.failures in ("", "with" if entry.injected_failures else "without")
            and self.text.strip().casefold() in entry.searched
        )


@dataclass(frozen=True)
class TrajectoryEntry:
    """A line of the list. `searched` is the text that a filter looks in; `conduct` what it teaches beside calling
    tools, or ""."""

    id: str
    question: str
    server_id: str
    domain: str
    language: str
    reward: float | None
    injected_failures: int
    calls: int
    searched: str
    conduct: str = ""


TRAJECTORY_KEYS: Mapping[str, Callable[[TrajectoryEntry], Any]] = {
    "question": lambda one: one.question.casefold(),
    "server": lambda one: one.server_id,
    "domain": lambda one: one.domain,
    "calls": lambda one: one.calls,
    "failures": lambda one: one.injected_failures,
    "reward": lambda one: one.reward,
}
"""What the list can be sorted by."""


class Conversations:
    """The trajectories of a dataset, in its order. Only what the list shows is held; a record is read when it is asked
    for, as whole datasets need not fit into memory.

    Attributes:
        domains: those that occur, sorted.
        languages: those that occur, sorted.

    Raises:
        DatasetError: the dataset cannot be read, or is corrupt.
        ValueError: two of them have one id.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._entries: list[TrajectoryEntry] = []
        self._index: dict[str, int] = {}
        for index, one in enumerate(each_record(path, Trajectory)):
            if self._index.setdefault(one.id, index) != index:
                raise InputError(f"two trajectories have the id {one.id!r}; synthesise the dataset again")
            self._entries.append(_entry(one))
        self.domains = sorted({one.domain for one in self._entries})
        self.languages = sorted({one.language for one in self._entries})

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, id: str) -> Trajectory | None:
        """The trajectory of an id, or None.

        Raises:
            DatasetError: the dataset was replaced or removed in the meantime.
        """
        index = self._index.get(id)
        return None if index is None else read_record(self._path, Trajectory, index)

    def chosen(self, wanted: TrajectoryFilter) -> list[TrajectoryEntry]:
        """What passes a filter, in its order."""
        return in_order(filter(wanted.passes, self._entries), wanted.sort, TRAJECTORY_KEYS)

    def page(self, wanted: TrajectoryFilter, number: int, size: int = 50) -> Page[TrajectoryEntry]:
        """Page `number`, from 1, of those; the last one where there are not so many."""
        return part(self.chosen(wanted), number, size)


def _entry(one: Trajectory) -> TrajectoryEntry:
    question = next((message.content for message in one.messages if message.role == "user"), "")
    names = [call.name for message in one.messages for call in message.tool_calls]
    # A line break stands in no form's field: nothing matches across two of these.
    conduct = one.dialogue.conduct.replace("_", " ") if one.dialogue else ""
    searched = "\n".join([question, one.id, one.server_id, conduct, *dict.fromkeys(names)]).casefold()
    return TrajectoryEntry(
        id=one.id,
        question=question,
        server_id=one.server_id,
        domain=one.domain,
        language=one.language,
        reward=one.reward,
        injected_failures=one.injected_failures,
        calls=len(names),
        searched=searched,
        conduct=conduct,
    )


# ---------------------------------------------------------------------------------------------------------------------
# One of them


@dataclass(frozen=True)
class Text:
    """A text as it is shown: JSON is indented; what is long is folded under its beginning.

    Attributes:
        preview: the beginning, on one line; empty where nothing is folded.
        characters: of the text as it is stored.
    """

    text: str
    preview: str
    characters: int


@dataclass(frozen=True)
class Result:
    """What the agent saw of a call.

    Attributes:
        failure: `injected`: a failure was put in the result's place; `perhaps`: it reads like one, and the record
            counts fewer than read so; `error`: any other error; else empty.
        kind: of the failure, or of the injected one that it reads like (`timeout` …).
    """

    text: Text
    failure: str
    kind: str


@dataclass(frozen=True)
class Asked:
    """A call as the model wrote it.

    Attributes:
        arguments: as JSON, on one line where they are short.
        unreadable: they are no JSON object, and `arguments` is what was written instead.
    """

    id: str
    name: str
    arguments: str
    unreadable: bool = False


@dataclass(frozen=True)
class Said:
    """A message, whatever record it is of.

    Attributes:
        role: `tool` is a result; all others are shown as they are.
        call_id: whose result it is; "" where the record does not say.
        name: of the tool whose result it is; "" where the record does not say.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: Sequence[Asked] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Call:
    """A call with its result (None: the record has none)."""

    call: Asked
    result: Result | None


@dataclass
class Turn:
    """A message, with its calls; those of one turn were made at the same time.

    Attributes:
        stray: results of no call of the turn.
    """

    message: Said
    calls: list[Call] = field(default_factory=list)
    stray: list[tuple[Said, Result]] = field(default_factory=list)


def turns(trajectory: Trajectory) -> list[Turn]:
    """The conversation of a trajectory."""
    return arranged([_said(message) for message in trajectory.messages], _results(trajectory))


def turns_of_messages(messages: Sequence[Message]) -> list[Turn]:
    """A conversation of which nothing else is known."""
    results = {index: result_of(one.content) for index, one in enumerate(messages) if one.role == "tool"}
    return arranged([_said(message) for message in messages], results)


def arranged(messages: Sequence[Said], results: Mapping[int, Result]) -> list[Turn]:
    """A conversation. A result belongs to a call of the message that it follows: ids may repeat in later turns.

    Args:
        results: of each message whose role is `tool`, by its index.
    """
    shown: list[Turn] = []
    for message, following in _rounds(messages):
        turn = Turn(message)
        left = list(following)
        for call in message.calls:
            own = next((one for one in left if one[1].call_id == call.id), None)
            if own is not None:
                left.remove(own)
            turn.calls.append(Call(call, results[own[0]] if own else None))
        turn.stray = [(one, results[index]) for index, one in left]
        shown.append(turn)
    return shown


def scores(trajectory: Trajectory) -> list[tuple[str, float | None, str]]:
    """(axis, score, reason) of the seven axes in the paper's order, then of others; None: there is no such score."""
    known = trajectory.scores
    missing = [(axis, None, "") for axis in AXES if axis not in known]
    order = {axis: index for index, axis in enumerate(AXES)}
    given = [(axis, one.score, one.reason) for axis, one in known.items()]
    return sorted([*given, *missing], key=lambda one: order.get(one[0], len(order)))


def arguments_text(arguments: dict[str, Any]) -> str:
    """A call's arguments as JSON: on one line where they are short."""
    try:
        line = json.dumps(arguments, ensure_ascii=False)
        return line if len(line) <= _LINE else json.dumps(arguments, ensure_ascii=False, indent=2)
    except RecursionError:
        return TOO_DEEP


def shown_text(text: str) -> Text:
    """See `Text`."""
    structured = len(text) > _LINE and text.lstrip()[:1] in ("{", "[")
    try:
        pretty = msgspec.json.format(text, indent=2) if structured else text
    except (ValueError, RecursionError):  # it is no JSON after all
        pretty = text
    folded = len(pretty) > _SHORT_CHARACTERS or pretty.count("\n") >= _SHORT_LINES
    beginning = " ".join(text[: 2 * _PREVIEW].split())
    preview = f"{beginning[:_PREVIEW]} …" if folded else ""
    return Text(pretty, preview, len(text))


def result_of(text: str, failure: str = "", kind: str = "") -> Result:
    """A result, with what its record says of a failure; else what has the executor's form of an error is one."""
    return Result(shown_text(text), failure or ("error" if _is_error(text) else ""), kind)


def _said(message: Message) -> Said:
    calls = [Asked(call.id, call.name, arguments_text(call.arguments)) for call in message.tool_calls]
    return Said(message.role, message.content, message.reasoning, calls, message.tool_call_id, message.name)


def _rounds(messages: Sequence[Said]) -> Iterator[tuple[Said, list[tuple[int, Said]]]]:
    """Each message that is no result, with the results after it; results at the very start follow an empty message."""
    current: Said | None = None
    following: list[tuple[int, Said]] = []
    for index, message in enumerate(messages):
        if message.role == "tool":
            following.append((index, message))
            continue
        if current is not None or following:
            yield current or Said("assistant", ""), following
        current, following = message, []
    if current is not None or following:
        yield current or Said("assistant", ""), following


def _results(trajectory: Trajectory) -> dict[int, Result]:
    """By the index of the message. Records of older versions say only how many were injected; their texts are known."""
    told = {one.call_id: ("error", one.kind) for one in trajectory.errors}
    told |= {one.call_id: ("injected", one.kind) for one in trajectory.failures}
    tools = {index: message for index, message in enumerate(trajectory.messages) if message.role == "tool"}
    kinds: dict[str, str] = {}
    if len(trajectory.failures) < trajectory.injected_failures:
        kinds = {text: kind for kind, text in FAILURES.items()}
    # What is spelled with spaces there is spelled without today.
    said = {index: server_text(message.content) if kinds else "" for index, message in tools.items()}
    alike = sum(text in kinds for text in said.values())
    injected = "injected" if alike <= trajectory.injected_failures else "perhaps"
    shown = {}
    for index, message in tools.items():
        failure, kind = told.get(message.tool_call_id, ("", kinds.get(said[index], "")))
        shown[index] = result_of(message.content, failure or (injected if kind else ""), kind)
    return shown


def _is_error(text: str) -> bool:
    """Whether a result says that the call failed, in the one way that the executor writes it."""
    try:
        return list(decode_json(text, dict)) == ["error"]
    except (ValueError, RecursionError):
        return False
