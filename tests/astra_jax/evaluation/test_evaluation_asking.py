"""A harness's process asks something while it works on a call: a model's completion, for one that has no network."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from astra_jax.evaluation import harness
from astra_jax.evaluation.harness import WorkerFailed, WorkerProgram
from synthesis.core.stages import Transient

PROGRAM = """
import os, sys
sys.path.insert(0, {workers!r})
import serving
from confined import Confined, Died

def talk(words):
    return [serving.ask("shout", word=word) for word in words]

def carelessly():
    try:
        serving.ask("nobody")
    except Exception:
        pass
    open({trace!r}, "w").close()

def locked(words):
    confined = Confined(lambda: {{"talk": talk}})
    said = confined.call("talk", words=words)
    confined.close()
    return said

def half():
    os.write(serving._heard.fileno(), b'{{"result": {{"reward": 1.0, "mess')
    os._exit(1)

def lethal():
    confined = Confined(lambda: {{"die": lambda: os.abort() if serving.ask("shout", word="so") == "SO" else None}})
    try:
        return confined.call("die")
    except Died as died:
        return str(died)

serving.serve(sys.argv[1], lambda: {{"talk": talk, "locked": locked, "carelessly": carelessly, "half": half,
                                    "lethal": lethal}})
"""


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncIterator[WorkerProgram]:
    program = folder / "program.py"
    workers_folder = str(Path(harness.__file__).parent / "workers")
    program.write_text(PROGRAM.format(workers=workers_folder, trace=str(folder / "trace")))
    workers = WorkerProgram(Path(sys.executable), str(program), log=folder / "log")
    try:
        await workers.start()
        yield workers
    finally:
        await workers.close()


async def shout(word: str) -> str:
    return word.upper()


@pytest.mark.parametrize("method", ["talk", "locked"])
async def test_what_is_asked_is_answered_in_turn(method: str, tmp_path: Path) -> None:
    async with started(tmp_path) as workers, workers.open({"shout": shout}) as worker:
        assert await worker.call(method, words=["one", "two", "ü"]) == ["ONE", "TWO", "Ü"]
        assert await worker.call(method, words=[]) == []


async def test_a_failure_to_answer_is_the_callers(tmp_path: Path) -> None:
    async def fail(word: str) -> str:
        raise Transient(f"no model says {word}")

    async with started(tmp_path) as workers:
        with pytest.raises(Transient, match="no model says one"):
            async with workers.open({"shout": fail}) as worker:
                await worker.call("locked", words=["one"])
        async with workers.open({"shout": shout}) as worker:  # the program is none the worse for it
            assert await worker.call("talk", words=["one"]) == ["ONE"]


async def test_a_process_that_dies_while_it_answers_has_not_answered(tmp_path: Path) -> None:
    async with started(tmp_path) as workers, workers.open() as worker:
        with pytest.raises(WorkerFailed, match="half: its process ended without an answer"):
            await worker.call("half")


async def test_what_nobody_answers_ends_the_process_even_a_careless_one(tmp_path: Path) -> None:
    async with started(tmp_path) as workers:
        with pytest.raises(WorkerFailed, match="asked for 'nobody', which nobody answers"):
            async with workers.open() as worker:
                await worker.call("carelessly")
        async with workers.open({"shout": shout}) as worker:
            assert "die ended the process with SIG" in await worker.call("lethal")
    assert not (tmp_path / "trace").exists()
