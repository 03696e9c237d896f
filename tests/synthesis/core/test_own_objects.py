"""Objects of a user's as environments: tools from methods, a process for each episode, refusals by name."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import datetime
import enum
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from astra_jax.base.errors import InputError
from synthesis.core.environment import EnvironmentDied, ToolAnswer, fingerprint
from synthesis.core.own_objects import OwnEnvironment, own_environments
from synthesis.core.own_workers import OwnCodeError
from synthesis.core.records import Answer
from synthesis.core.references import referred
from synthesis.core.rewards import played
from synthesis.core.tool_schemas import argument_error, check_schema

ROOT = Path(__file__).parents[3]


class Shelf:
    """An environment with state."""

    system = "Be brief."
    question = "Put two bolts on the shelf."
    answer = 2
    taken: dict[str, int] = {}

    def __init__(self) -> None:
        self.items: list[str] = []

    def put(self, item: str, count: int = 1, *, where: Literal["left", "right"] = "left") -> int:
        """Put an item on the shelf."""
        if count < 1:
            raise ValueError("a count is at least 1\nsecond line")
        self.items += [item] * count
        return len(self.items)

    async def look(self, depth: int | None = None, tags: list[str] = ()) -> dict:  # noqa: B006
        """What is on the shelf."""
        return {"items": self.items}

    def thread(self) -> set:
        """Something that is no JSON value."""
        return threading.current_thread()

    def take(self, item: str, before: list[str] = []) -> list:  # noqa: B006
        """Take an item off, and say so in places that all episodes would share in one process."""
        before.append(item)
        self.taken[item] = self.taken.get(item, 0) + 1
        return [before, self.taken]

    def _hidden(self) -> None: ...

    def score(self, episode) -> float:
        return len(self.items) / 2


async def test_public_methods_are_tools() -> None:
    shelf = OwnEnvironment(Shelf())
    assert [one.role for one in shelf.prompt] == ["system", "user"] and shelf.answer.value == 2
    assert [tool.name for tool in shelf.tools] == ["put", "look", "thread", "take"]
    put, look, *_ = shelf.tools
    assert put.description == "Put an item on the shelf." and put.parameters["required"] == ["item"]
    assert put.parameters["properties"]["where"] == {"type": "string", "enum": ["left", "right"]}
    assert look.parameters["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    for tool in shelf.tools:
        check_schema(tool.parameters)
    assert argument_error(put.parameters, {"item": "bolt", "where": "up"})
    assert not argument_error(look.parameters, {"depth": None})


async def test_each_episode_has_a_copy_of_its_own() -> None:
    environment = OwnEnvironment(Shelf())
    one, other = await environment.begin(), await environment.begin()
    assert await one.call("put", {"item": "bolt"}) == ToolAnswer("1")
    assert await one.call("put", {"item": "bolt"}) == ToolAnswer("2")
    assert await one.call("look", {}) == ToolAnswer('{"items":["bolt","bolt"]}')
    assert await other.call("look", {}) == ToolAnswer('{"items":[]}')
    assert await one.call("put", {"item": "x", "count": 0}) == ToolAnswer("ValueError: a count is at least 1", ok=False)
    refused = await one.call("thread", {})
    assert not refused.ok and "thread returned what JSON cannot hold: it is a _MainThread, which" in refused.text
    for session in (one, other):  # neither class attributes nor default arguments are shared
        assert await session.call("take", {"item": "nut"}) == ToolAnswer('[["nut"],{"nut":1}]')
    episode = played(environment, environment.prompt, [], "answered")
    assert isinstance(episode.environment, Shelf)
    assert (await one.score(episode), await other.score(episode)) == (1.0, 0.0)
    await one.close()
    await other.close()
    assert environment.subject.items == [] and Shelf.taken == {}


def variant(**changes) -> type:
    return type("Variant", (Shelf,), changes)


def undocumented(self): ...


def star(self, *items: str):
    """Many."""


def unannotated(self, item):
    """One."""


def odd(self, item: threading.Lock):
    """One."""


def generator(self, item: str):
    """One by one."""
    yield item


def without_self(item: str) -> int:
    """One."""
    return 1


def without_parameters() -> int:
    """One."""
    return 1


def undefined(self, day: Dag) -> int:  # type: ignore[name-defined]  # noqa: F821
    """One."""
    return 1


def array(self, pieces: np.ndarray) -> int:
    """One."""
    return 1


def later(self, item: str) -> Frame:  # type: ignore[name-defined]  # noqa: F821
    """One."""
    return 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"system": without_self}, "Variant: `system` is a method; rename it. It is the system message"),
        ({"id": later}, "Variant: `id` is a method; rename it"),
        ({"id": ["a"]}, r"Variant: `id` is \['a'\]; write a text"),
        ({"language": later}, "Variant: `language` is a method"),
        ({"language": "de-DE"}, "Variant: `language` is 'de-DE'; write an ISO 639-1 code such as 'de'"),
        ({"language": "German"}, "Variant: `language` is 'German'"),
        ({"kind": 5}, "Variant: `kind` is 5; write a text"),
        ({"answer": later}, "Variant: `answer`: the expected answer is the method later; give a number, text"),
        ({"answer": float("nan")}, "Variant: `answer`: the expected answer is nan"),
        ({"answer": {"a": 1}}, "Variant: `answer`: the expected answer is {'a': 1}"),
        ({"score": lambda self: 1.0}, r"Variant: give it `score\(self, episode\)`"),
        ({"close": undefined}, "Variant: `close` ends an episode and is called without arguments; rename it"),
        ({"tool": without_self}, "tool: item receives the object; write `self` before it, or use @staticmethod"),
        ({"tool": without_parameters}, "tool: its parameters cannot be read .*the first one of a method is `self`"),
        ({"tool": undefined}, "tool: day is annotated with 'Dag'; use str, .*name 'Dag' is not defined"),
        ({"tool": array}, "tool: pieces is annotated with ndarray; use str, [^(]*TypedDict$"),
        ({"question": ""}, "Variant: give it `question`"),
        ({"score": None}, r"Variant: give it `score\(self, episode\)`"),
        ({"tool": undocumented}, "tool has no docstring"),
        ({"tool": star}, "leave out \\*"),
        ({"tool": unannotated}, "tool: item is annotated with nothing; use str, int"),
        ({"tool": odd}, "tool: item is annotated with"),
        ({"tool": generator}, "tool yields its results one by one; return a list"),
        ({"call_seconds": 0}, "call_seconds is 0; give seconds above 0"),
        ({"__reduce__": lambda self: 1 / 0}, "cannot be copied to the process of its episode .ZeroDivisionError"),
        ({"question": property(lambda self: sys.exit(0))}, "Variant: question raised SystemExit: 0"),
        ({"score": property(lambda self: next(iter([])))}, "Variant: score raised StopIteration"),
    ],
)
def test_what_is_none_is_refused(changes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        OwnEnvironment(variant(**changes)())


async def test_values_of_numpy_are_expected_answers() -> None:
    environment = OwnEnvironment(variant(answer=np.int64(2), kind="shelf", id=7, language="de")())
    assert environment.answer.value == 2 and type(environment.answer.value) is int and environment.id == "7"
    episode = played(
        environment, [*environment.prompt, dataclasses_replaced(environment.prompt[0], "Es sind 2.")], [], "answered"
    )
    for value in (2, np.int64(2), np.float32(2), Decimal(2), Answer(np.int64(2)), [np.int64(2)], {2}):
        assert episode.says(value), value
    assert not episode.says(np.int64(3)) and not episode.says(np.bool_(True))
    for value in (None, object(), float("inf"), {"a": 1}):
        with pytest.raises(InputError, match="the expected answer is .*; give a number, text, truth value or list"):
            episode.says(value)


def test_a_return_annotation_may_be_of_something_that_is_not_there() -> None:
    assert "tool" in [one.name for one in OwnEnvironment(variant(tool=later)()).tools]


@pytest.mark.parametrize("found", [None, "warehouse", {"one": Shelf()}, os, [Shelf], (Shelf,)])
def test_what_holds_no_objects_is_refused_by_its_name(found) -> None:
    said = "environment Shelf is a class; write an object of it, such as Shelf"
    if not isinstance(found, list | tuple):
        said = "my_module:it is (None|a str|a dict|a module); name an object with a `question`, or a list of such"
    with pytest.raises(InputError, match=said):
        own_environments(found, "my_module:it")


def test_a_name_may_stand_for_one_for_several_or_for_what_makes_them() -> None:
    def several():
        return (variant(question=f"Put {n} bolts there.")() for n in range(3))

    assert len(own_environments(several, "m:several")) == 3
    assert len(own_environments(Shelf, "m:Shelf")) == len(own_environments(Shelf(), "m:shelf")) == 1
    ready = own_environments(Shelf(), "m:shelf")
    assert own_environments(ready, "m:ready") == ready  # what is an environment already stays as it is
    with pytest.raises(InputError, match="holds no environments"):
        own_environments([], "m:none")
    with pytest.raises(InputError, match="two environments have the id"):
        own_environments([Shelf(), Shelf()], "m:twice")
    with pytest.raises(InputError, match="environment int: give it `question`"):
        own_environments(7, "m:seven")
    with pytest.raises(InputError, match="m:leaves raised SystemExit: 0"):
        own_environments(lambda: sys.exit(0), "m:leaves")
    with pytest.raises(InputError, match="m:cancelled raised CancelledError"):
        own_environments((stop for stop in [asyncio.CancelledError()] if raised(stop)), "m:cancelled")


def raised(error: BaseException) -> bool:
    raise error


def test_a_run_that_goes_on_knows_another_environment() -> None:
    one, same, other = OwnEnvironment(Shelf()), OwnEnvironment(Shelf()), OwnEnvironment(variant(question="Else?")())
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)


# ---------------------------------------------------------------------------------------------------------------------
# Tools


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Box:
    width: int
    name: str = "box"


def bare(function):
    class Wrapped:
        def __init__(self) -> None:
            functools.update_wrapper(self, function)

        def __get__(self, subject, kind):
            return functools.partial(function, subject)

    return Wrapped()


def counted(function):
    @functools.wraps(function)
    def call(*args, **named):
        return function(*args, **named)

    return call


class Answering:
    """Answer."""

    def __call__(self, number: int) -> int:
        return number


class Undocumented:
    def __call__(self, number: int) -> int:
        return number


Undocumented.__call__.__doc__ = None


class Many:
    """Methods of all kinds."""

    question = "Which?"

    def __init__(self) -> None:
        self.dynamic = lambda x: x

    def plain(self, number: int = 1) -> int:
        """Plain."""
        return number

    @staticmethod
    def static(number: int) -> int:
        """Static."""
        return number

    @classmethod
    def of_class(cls, number: int) -> str:
        """Of the class."""
        return f"{cls.__name__}{number}"

    @functools.lru_cache  # noqa: B019
    def cached(self, number: int) -> int:
        """Cached."""
        return number

    @counted
    def wrapped(self, number: int) -> int:
        """Wrapped."""
        return number

    @bare
    def replaced(self, number: int) -> int:
        """Replaced."""
        return number

    of_two = functools.partialmethod(plain, 2)
    instance = Answering()
    bare_instance = Undocumented()

    class Nested:
        """A class."""

    @property
    def computed(self):
        raise AssertionError("a property is not read to look for tools")

    def score(self, episode) -> float:
        return 1.0


async def test_every_public_callable_is_offered_or_named(caplog) -> None:
    with caplog.at_level("WARNING"):
        [environment] = own_environments([Many(), variant(question="Else?")()][:1], "m:many")
    names = ["plain", "static", "of_class", "cached", "wrapped", "replaced", "of_two", "instance"]
    assert [tool.name for tool in environment.tools] == names
    assert [tool.description for tool in environment.tools][-2:] == ["Plain.", "Answer."]
    assert environment.tools[-2].parameters["properties"] == {}
    assert "Many.bare_instance is not offered as a tool: it is a Undocumented without a docstring" in caplog.text
    assert "Many.Nested is not offered as a tool: it is a class" in caplog.text
    assert "Many.dynamic is not offered as a tool: it is set on the object; write a method in the class" in caplog.text
    assert "computed" not in caplog.text
    session = await environment.begin()
    for name in names:
        answer = await session.call(name, {} if name == "of_two" else {"number": 2})
        assert answer == ToolAnswer('"Many2"' if name == "of_class" else "2"), name
    await session.close()


async def test_arguments_are_converted_as_annotated() -> None:
    class Typed:
        question = "Which?"

        def show(
            self,
            number: int = 0,
            share: float = 0.0,
            day: datetime.date | None = None,
            colour: Colour = Colour.RED,
            box: Box | None = None,
            boxes: list[Box] = [],  # noqa: B006
            names: dict[int, str] = {},  # noqa: B006
            pair: tuple[int, str] | None = None,
            unique: set[int] = set(),  # noqa: B006
            choice: Literal["a", 1, None] = None,
            anything: Any = None,
        ) -> str:
            """Show one."""
            given = {name: value for name, value in locals().items() if name != "self"}
            return "; ".join(f"{name}={value!r}" for name, value in given.items() if value not in (None, [], {}, set()))

        def score(self, episode) -> float:
            return 0.0

    environment = OwnEnvironment(Typed())
    [tool] = environment.tools
    check_schema(tool.parameters)
    session = await environment.begin()
    sent = {
        "number": 3.0, "share": 1, "day": "2024-02-29", "colour": "blue", "box": {"width": 2.0},
        "boxes": [{"width": 1, "name": "x"}], "names": {"1": "a"}, "pair": [1, "b"], "unique": [2], "choice": "a",
        "anything": {"k": [1]},
    }  # fmt: skip
    assert not argument_error(tool.parameters, sent)
    assert (await session.call("show", sent)).text.strip('"') == (
        "number=3; share=1.0; day=datetime.date(2024, 2, 29); colour=<Colour.BLUE: 'blue'>; "
        "box=Box(width=2, name='box'); boxes=[Box(width=1, name='x')]; names={1: 'a'}; pair=(1, 'b'); unique={2}; "
        "choice='a'; anything={'k': [1]}"
    )
    for wrong in ({"number": True}, {"number": 2.5}, {"colour": "green"}, {"pair": [1]}, {"box": {"width": "x"}}):
        assert argument_error(tool.parameters, wrong), wrong
    for fits, message in (({"names": {"x": "a"}}, "names.x"), ({"day": "2024-02-30"}, "day: ")):
        assert not argument_error(tool.parameters, fits)
        answer = await session.call("show", fits)
        assert not answer.ok and answer.text.startswith(f"invalid arguments: {message}")
    await session.close()


# ---------------------------------------------------------------------------------------------------------------------
# Processes


class Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Rough:
    """Does what foreign code does."""

    question = "What happens?"
    call_seconds = 30.0

    def fail(self, how: str) -> int:
        """Raise something."""
        kinds = {
            "exit": SystemExit(0), "stop": StopIteration("none"), "interrupt": KeyboardInterrupt(),
            "generator": GeneratorExit(), "cancelled": asyncio.CancelledError(), "memory": MemoryError(),
            "group": BaseExceptionGroup("both", [SystemExit(1)]), "unsayable": Unsayable(),
            "surrogate": ValueError("\ud800"),
        }  # fmt: skip
        raise kinds[how]

    async def fail_later(self, how: str) -> int:
        """Raise something in a coroutine."""
        await asyncio.sleep(0)
        return self.fail(how)

    def end(self, how: str) -> int:
        """End the process."""
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return ctypes.string_at(0)

    def find(self, pattern: str, text: str) -> bool:
        """Search with a pattern of the model's, which holds the interpreter for as long as it takes."""
        return bool(re.match(pattern, text))

    def process(self) -> list[int]:
        """The process, and one that it has started."""
        return [os.getpid(), subprocess.Popen(["sleep", "600"]).pid]

    def say(self, text: str) -> None:
        """Print something."""
        print(text)

    def score(self, episode) -> float:
        if episode.answer == "leave":
            sys.exit(0)
        if episode.answer == "die":
            os._exit(0)
        return {"many": "many", "none": None, "text": "0.5", "bytes": b"1"}.get(episode.answer, 0.5)

    def close(self) -> None:
        if hasattr(self, "stays"):
            sys.exit(0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def until(condition) -> None:
    """Wait for what comes by itself, with a deadline."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_whatever_foreign_code_raises_is_its_own_error() -> None:
    environment = OwnEnvironment(Rough())
    session = await environment.begin()
    said = {
        "exit": "SystemExit: 0", "stop": "StopIteration: none", "interrupt": "KeyboardInterrupt",
        "generator": "GeneratorExit", "cancelled": "CancelledError", "memory": "MemoryError",
        "group": "BaseExceptionGroup: both (1 sub-exception)", "unsayable": "Unsayable", "surrogate": "ValueError: ?",
    }  # fmt: skip
    for how, text in said.items():
        assert await session.call("fail", {"how": how}) == ToolAnswer(text, ok=False)
    said["stop"] = "RuntimeError: coroutine raised StopIteration"
    for how, text in said.items():
        assert await session.call("fail_later", {"how": how}) == ToolAnswer(text, ok=False)
    for answer, message in (
        ("leave", "raised SystemExit: 0"),
        ("many", "gave 'many', which is not a number"),
        ("none", "gave None, which is not a number"),
        ("text", "gave '0.5', which is not a number"),
        ("bytes", "gave b'1', which is not a number"),
        ("die", "ended its process .exit code 0"),
    ):
        messages = [*environment.prompt, dataclasses_replaced(environment.prompt[0], answer)]
        with pytest.raises(OwnCodeError, match=message):
            await session.score(played(environment, messages, [], "answered"))
    environment.subject.stays = True
    leaving = await OwnEnvironment(environment.subject).begin()
    with pytest.raises(OwnCodeError, match="raised SystemExit: 0"):
        await leaving.close()


def dataclasses_replaced(message, content: str):
    return type(message)("assistant", content)


async def test_a_call_that_hangs_or_ends_its_process_ends_one_environment_alone() -> None:
    environment = OwnEnvironment(Rough())
    healthy, hanging, *dying = [await environment.begin() for _ in range(5)]
    hanging._call_seconds = 0.2  # type: ignore[attr-defined]
    for session, how, message in zip(
        dying, ("exit", "kill", "fault"), ("exit code 3", "SIGKILL", "SIGSEGV"), strict=True
    ):
        with pytest.raises(EnvironmentDied, match=f"end ended its process .{message}"):
            await session.call("end", {"how": how})
    pid, child = map(int, (await hanging.call("process", {})).text.strip("[]").split(","))
    assert is_running(pid) and is_running(child)
    with pytest.raises(EnvironmentDied, match=r"find did not answer in 0\.2 s"):
        await hanging.call("find", {"pattern": "(a+)+$", "text": "a" * 50 + "b"})
    with pytest.raises(EnvironmentDied, match=r"find did not answer in 0\.2 s"):
        await hanging.call("process", {})
    episode = played(environment, environment.prompt, [], "answered")
    with pytest.raises(EnvironmentDied):  # not OwnCodeError, which would mask it
        await hanging.score(episode)
    await until(lambda: not (is_running(pid) or is_running(child)))
    assert (await healthy.call("find", {"pattern": "a", "text": "a"})).text == "true"
    assert await healthy.score(episode) == 0.5
    for session in (healthy, hanging, *dying):
        await session.close()


async def test_a_call_that_nobody_waits_for_any_more_is_killed() -> None:
    session = await OwnEnvironment(Rough()).begin()
    pid = int((await session.call("process", {})).text.strip("[]").split(",")[0])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await session.call("find", {"pattern": "(a+)+$", "text": "a" * 50 + "b"})
    await until(lambda: not is_running(pid))
    await session.close()


async def test_what_it_prints_is_shown_but_not_without_end(capsys) -> None:
    session = await OwnEnvironment(Rough()).begin()
    await session.call("say", {"text": "to the log"})
    await session.call("say", {"text": "\n".join(["x" * 1000] * 200)})
    await session.close()
    printed = ""

    def is_shown() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return printed.count("x" * 1000) >= 60

    await until(is_shown)
    assert "own code: to the log" in printed and len(printed) < 80_000


@pytest.mark.slow
def test_processes_end_with_the_trainer(tmp_path) -> None:
    program = f"""
import asyncio, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from test_own_objects import OwnEnvironment, Rough
async def main():
    session = await OwnEnvironment(Rough()).begin()
    print((await session.call("process", {{}})).text, flush=True)
    await session.call("find", {{"pattern": "(a+)+$", "text": "a" * 50 + "b"}})
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        pids = [int(pid) for pid in trainer.stdout.readline().strip("[]\n").split(",")]
        assert all(map(is_running, pids))
        trainer.kill()
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


async def test_locks_and_caches_of_local_classes_are_copied() -> None:
    held = threading.Lock()
    held.acquire()

    class Locked:
        question = "Is it free?"
        lock, ready, inner = held, threading.Event(), threading.RLock()

        @functools.lru_cache(maxsize=3)  # noqa: B019
        def free(self) -> list:
            """Whether a lock is free."""
            with self.inner:
                return [self.lock.acquire(blocking=False), self.ready.is_set(), type(self).free.cache_parameters()]

        def score(self, episode) -> float:
            return 0.0

    session = await OwnEnvironment(Locked()).begin()
    assert (await session.call("free", {})).text == '[true,false,{"maxsize":3,"typed":false}]'
    await session.close()


async def test_what_cannot_be_pickled_is_imported_by_its_name(tmp_path, monkeypatch) -> None:
    module = """
import random
class Reads:
    def __init__(self, number):
        self.question, self.file = f"What is line {number}?", open(__file__, "rb")
    def line(self) -> str:
        "The first line."
        return self.file.readline()
    def score(self, episode):
        return 0.25
reads = [Reads(1), Reads(2)]
differ = [Reads(random.random())]
"""
    (tmp_path / "reads.py").write_text(module.lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reads", raising=False)
    for name in ("reads:reads", f"{tmp_path}/reads.py:reads"):
        found = own_environments(referred(name), name)
        session = await found[1].begin()
        assert (await session.call("line", {})).text == '"import random\\n"'
        assert await session.score(played(found[1], found[1].prompt, [], "answered")) == 0.25
        await session.close()
    with pytest.raises(InputError, match="Reads: it cannot be copied .*TypeError.*--environments=my_module:my_name"):
        OwnEnvironment(referred("reads:reads")[0])
    [differs] = own_environments(referred("reads:differ"), "reads:differ")
    with pytest.raises(Exception, match="reads:differ gives other environments each time"):
        await differs.begin()


async def test_a_class_of_a_file_is_found_there(tmp_path) -> None:
    (tmp_path / "one.py").write_text(
        "class One:\n    question = '?'\n    def tool(self) -> str:\n        'A tool.'\n        return __file__\n"
        "    def score(self, episode):\n        return 1\n"
    )
    [environment] = own_environments(referred(f"{tmp_path}/one.py:One"), f"{tmp_path}/one.py:One")
    session = await environment.begin()
    assert (await session.call("tool", {})).text == f'"{tmp_path}/one.py"'
    await session.close()
