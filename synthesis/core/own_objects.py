"""An environment of one's own, as an object: its public methods are the tools, `score` judges.

    class Warehouse:
        question = "How many bolts are in the warehouse?"

        def stock_of(self, item: str) -> int:
            "How many pieces of an item are in the warehouse."
            return {"bolt": 40, "nut": 7}[item]

        def score(self, episode) -> float:
            return float(episode.says(40))

Beside `question` it may have `system` (a system message), `id` and `answer` (the expected final answer). `language` is
the ISO 639-1 code of the final answer's language, by default English; `call_seconds` limits a call. Every episode runs
in its own process with a copy of the object (`own_workers.py`). So a method may keep state anywhere, and a call that
hangs is killed. The methods have the rights of the user who started the run. Their arguments are whatever a model
wrote, checked against the annotations, converted to them, and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from astra_jax.base.errors import InputError
from synthesis.core.environment import (
    Environment,
    EnvironmentDied,
    EnvironmentSession,
    PlayedEpisode,
    ToolAnswer,
    expected_answer,
)
from synthesis.core.object_tools import ObjectTools, object_tools
from synthesis.core.own_process import Known, listed, named
from synthesis.core.own_workers import OwnCodeError, OwnWorker, OwnWorkers, WorkerDied, share_of
from synthesis.core.records import Message, ToolSpec
from synthesis.core.references import is_reference

CALL_SECONDS: Final = 60.0
"""For a call of an object's method. A model may write arguments that never come to an end."""
_LONGEST_CODE: Final = 3
_USES: Final = {
    "system": "It is the system message",
    "id": "It names the environment",
    "language": "It is the ISO 639-1 code of the final answer's language",
    "kind": "It names a kind of task in reports",
}
_log = logging.getLogger(__name__)


class OwnEnvironment:
    """An object as an `Environment`.

    Args:
        workers: the processes of the list that it is in; None: it has them for itself.
        position: in that list.

    Attributes:
        left_out: public callables that are not offered as tools, with the reason.
        call_seconds: for a call.

    Raises:
        InputError: it is not one: says what is missing, or which method cannot be a tool, and why.
    """

    def __init__(self, subject: Any, workers: OwnWorkers | None = None, position: int = 0) -> None:
        kind = type(subject).__name__
        if inspect.isclass(subject):
            name = subject.__name__
            raise InputError(f"environment {name} is a class; write an object of it, such as {name}()")
        question = _attribute(subject, "question", None)
        if not (isinstance(question, str) and question.strip()):
            raise InputError(f"environment {kind}: give it `question`, the text that an episode begins with")
        score = _attribute(subject, "score", None)
        if not (callable(score) and _takes(score, 1)):
            raise InputError(f"environment {kind}: give it `score(self, episode)`, which returns a number from 0 to 1")
        close = _attribute(subject, "close", None)
        if callable(close) and not _takes(close, 0):
            raise InputError(f"environment {kind}: `close` ends an episode and is called without arguments; rename it")
        system, answer = _text(subject, "system", ""), _attribute(subject, "answer", None)
        self.subject = subject
        self.prompt: Sequence[Message] = [
            *([Message("system", system)] if system else []),
            Message("user", question),
        ]
        name = hashlib.sha256(f"{system}\0{question}".encode()).hexdigest()[:12]
        self.id = _text(subject, "id", "", of=str | int) or f"{kind}-{name}"
        self.language = _text(subject, "language", "en")
        if not (self.language.isalpha() and self.language.islower() and len(self.language) <= _LONGEST_CODE):
            raise InputError(
                f"environment {kind}: `language` is {self.language!r:.80}; write an ISO 639-1 code such as 'de'"
            )
        self.kind = _text(subject, "kind", "") or kind
        try:
            self.answer = None if answer is None else expected_answer(answer)
        except InputError as error:
            raise InputError(f"environment {kind}: `answer`: {error}") from error
        self.call_seconds = _attribute(subject, "call_seconds", CALL_SECONDS)
        if not (isinstance(self.call_seconds, int | float) and 0 < self.call_seconds < float("inf")):
            raise InputError(f"environment {kind}: call_seconds is {self.call_seconds!r:.80}; give seconds above 0")
        found = _tools(subject)
        self.tools: Sequence[ToolSpec] = found.specs
        self.left_out = found.left_out
        self._has_close = callable(close)
        self.workers, self._position = workers or OwnWorkers([subject]), position

    async def begin(self) -> EnvironmentSession:
        """Start an episode, in a process with a copy of the object."""
        worker = await self.workers.open()
        return _OwnSession(worker, self._position, self.call_seconds, has_close=self._has_close)


class _OwnSession:
    def __init__(self, worker: OwnWorker, position: int, call_seconds: float, *, has_close: bool) -> None:
        self._worker, self._position = worker, position
        self._call_seconds, self._has_close = call_seconds, has_close
        self._death = ""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Return what a method returned, as JSON, or what it raised, for the policy to see.

        Raises:
            EnvironmentDied: it did not answer in time, or ended its process; or an earlier call did.
        """
        if self._death:
            raise EnvironmentDied(self._death)
        try:
            given = tool, dict(arguments)
            kind, text = await self._worker.ask("call", self._position, given, seconds=self._call_seconds)
        except WorkerDied as error:
            self._death = f"{tool} {error}; the environment is gone"
            raise EnvironmentDied(self._death) from None
        return ToolAnswer(text, ok=kind == "ok")

    async def score(self, episode: PlayedEpisode) -> float:
        """Return what the object gives; it sees its own state as the episode left it.

        Raises:
            EnvironmentDied: a call has ended its process.
            OwnCodeError: it raised, gave no number, or ended its process.
        """
        if self._death:
            raise EnvironmentDied(self._death)
        shown = dataclasses.replace(episode, environment=Known(self._position))
        return share_of(await self._worker.ask("score", self._position, shown))

    async def close(self) -> None:
        """Call the object's `close`, where it has one, and end the process."""
        try:
            if self._has_close and self._worker.is_alive:
                kind, text = await self._worker.ask("close", self._position, None)
                if kind == "error":
                    raise OwnCodeError(f"raised {text}")
        finally:
            self._worker.kill()


def _attribute(subject: Any, name: str, otherwise: Any) -> Any:
    """Return an attribute of an object of the user's, which may be a property. Raises `InputError`: that raised."""
    try:
        return getattr(subject, name, otherwise)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(f"environment {type(subject).__name__}: {name} raised {named(error)}") from error


def _text(subject: Any, name: str, otherwise: str, *, of: Any = str) -> str:
    """Return an attribute that is a text. Raises `InputError`: it is something else, such as a tool of that name."""
    value = _attribute(subject, name, None)
    if value is None:
        return otherwise
    if not isinstance(value, of):
        found = "a method; rename it" if callable(value) else f"{value!r:.80}; write a text"
        raise InputError(f"environment {type(subject).__name__}: `{name}` is {found}. {_USES[name]}")
    return str(value)


def _takes(function: Any, count: int) -> bool:
    """Return whether a function can be called with so many arguments; True where its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _tools(subject: Any) -> ObjectTools:
    try:
        return object_tools(subject)
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # of a descriptor, or of an annotation's own code
        raise InputError(
            f"environment {type(subject).__name__}: its methods cannot be read ({named(error)})"
        ) from error


def own_environments(found: Any, name: str) -> list[Environment]:
    """Return the environments that a name of the user's stands for: one or several, or a function that makes them.

    Public callables that are not offered as tools are logged, each once.

    Args:
        found: what the name refers to. What has `begin` is an `Environment` already; anything else becomes one.

    Raises:
        InputError: it holds none, or one that cannot be used; or two have one id.
    """
    try:
        subjects = listed(found)
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a function or a generator of the user's raises
        raise InputError(f"{name} raised {named(error)}") from error
    if not subjects:
        raise InputError(f"{name} holds no environments")
    if isinstance(found, str | Mapping) or found is None or inspect.ismodule(found):
        kind = "None" if found is None else f"a {type(found).__name__}"
        raise InputError(f"{name} is {kind}; name an object with a `question`, or a list of such objects")
    objects = [one for one in subjects if not hasattr(one, "begin")]
    workers, positions = OwnWorkers(objects, name if is_reference(name) else ""), itertools.count()
    environments: list[Environment] = [
        one if hasattr(one, "begin") else OwnEnvironment(one, workers, next(positions)) for one in subjects
    ]
    check_ids(environments, name)
    _log_what_is_left_out(environments)
    return environments


def check_ids(environments: Sequence[Environment], name: str) -> None:
    """Raises `InputError`: two environments have one id."""
    seen: set[str] = set()
    for one in environments:
        if one.id in seen:
            raise InputError(f"{name}: two environments have the id {one.id!r:.80}; give each an `id` of its own")
        seen.add(one.id)


def _log_what_is_left_out(environments: Sequence[Environment]) -> None:
    said: set[str] = set()
    for one in environments:
        if not isinstance(one, OwnEnvironment):
            continue
        kind = type(one.subject).__name__
        lines = [f"{kind}.{name} is not offered as a tool: {reason}" for name, reason in one.left_out.items()]
        if not one.tools:
            lines.append(f"{kind} offers no tools; write public methods")
        for line in lines:
            if line not in said:
                said.add(line)
                _log.warning("%s", line)
