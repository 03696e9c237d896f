"""Solve rates: what scripted policies of known strength get, what the journal keeps, what GRPO chooses by them."""

from __future__ import annotations

import dataclasses

import jax
import msgspec
import pytest
from rollout_world import ScriptedSampler, call, make_environment, tiny_model
from sft_world import starting

from astra_jax.base.errors import InputError
from astra_jax.evaluation.episodes import EvalConfig
from astra_jax.evaluation.solve_rates import Measured, SolveRate, as_rate, measure, rated, recorded, statistics
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.environments import select_environments
from astra_jax.grpo.groups import GroupSampler
from astra_jax.grpo.train import train
from astra_jax.rollout.episode import EpisodeConfig
from sandbox import CallResult, Outcome
from synthesis.core.datasets import write_dataset
from synthesis.core.environment import fingerprint, kind_of, solve_rate_of
from synthesis.core.own_objects import OwnEnvironment
from synthesis.core.records import Difficulty, ToolEnvironment
from synthesis.core.stages import Journal

EPISODE = EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1)
GRPO = GRPOConfig(
    batch_size=2, group_size=2, max_groups_per_step=8, episode=EPISODE, row_buckets=(800,), concurrent_groups=2
)
ALL = call("capital_of", country="France") + "\n" + call("population_of", city="Paris")
WORLD = [make_environment("always"), make_environment("half"), make_environment("never"), make_environment("part")]


def by_name(session: str, turn: int, seed: int) -> str:
    """`evaluate.half.3`: solved in every second episode; `part` is half solved by half of what it takes: F1 2/3."""
    _, name, number = session.split(".")
    solves = {"always": True, "half": int(number) % 2 == 0, "never": False, "part": True}[name]
    return "I do not know." if turn or not solves else call("capital_of", country="France") if name == "part" else ALL


class Counting(ScriptedSampler):
    """Counts episodes by environment; `dies_after` so many."""

    dies_after = 10**9

    async def generate(self, token_ids, sampling, *, session=""):
        self.started = getattr(self, "started", [])
        if session not in self.started:
            if len(self.started) == self.dies_after:
                raise ConnectionError("the machine is gone")
            self.started.append(session)
        return await super().generate(token_ids, sampling, session=session)


class BrokenFor:
    """A sandbox that fails on calls with this argument."""

    def __init__(self, pool, argument: str) -> None:
        self.pool, self.argument = pool, argument

    async def call(self, code, function, arguments, *, seed=0):
        if self.argument not in arguments.values():
            return await self.pool.call(code, function, arguments, seed=seed)
        broken = next(o for o in Outcome if CallResult(o, None, "", "", 0.0, 0.0, "").is_infrastructure)
        return CallResult(broken, None, "", "gone", 0.0, 0.0, "")


async def measured(policy, pool, tokenizer, path, environments=WORLD, episodes=4, run="a") -> list[Measured]:
    config = EvalConfig(episodes_per_environment=episodes, episode=EPISODE, concurrency=2)
    with Journal(path) as journal:
        return await measure(
            policy, environments, tokenizer, pool, config=config, journal=journal, run=run, progress=False
        )


async def test_known_policies_get_their_known_rates(pool, chat_tokenizer, tmp_path):
    found = await measured(ScriptedSampler(chat_tokenizer, by_name), pool, chat_tokenizer, tmp_path / "journal")
    assert [one.solve_rate for one in found] == [1.0, 0.5, 0.0, pytest.approx(2 / 3, abs=1e-5)]
    assert [len(one.rewards) for one in found] == [4] * 4
    assert statistics(found) == {
        "mean": pytest.approx((1 + 0.5 + 0 + 2 / 3) / 4, abs=1e-5),
        "histogram": [1, 0, 0, 0, 0, 1, 1, 0, 0, 1],
        "never_solved": 1,
        "always_solved": 1,
        "unscored": 0,
        "masked_episodes": 0,
    }


def test_tenths_are_exact():
    tenths = [Measured([i / 10], 0) for i in range(11)]
    assert statistics(tenths)["histogram"] == [1] * 9 + [2]
    none = statistics([Measured([], 3)])
    assert (none["mean"], none["unscored"], none["masked_episodes"]) == (None, 1, 3)


async def test_what_is_finished_is_not_run_again(pool, chat_tokenizer, tmp_path):
    """And what was interrupted gives what an uninterrupted run gives."""
    whole = await measured(ScriptedSampler(chat_tokenizer, by_name), pool, chat_tokenizer, tmp_path / "whole")
    first, second, third = (Counting(chat_tokenizer, by_name) for _ in range(3))
    first.dies_after = 11
    with pytest.raises(ConnectionError, match="the machine is gone"):
        await measured(first, pool, chat_tokenizer, tmp_path / "journal")
    assert await measured(second, pool, chat_tokenizer, tmp_path / "journal") == whole
    again = {session.split(".")[1] for session in second.started}
    assert "always" not in again and "part" in again
    assert await measured(third, pool, chat_tokenizer, tmp_path / "journal") == whole and not hasattr(third, "started")
    await measured(third, pool, chat_tokenizer, tmp_path / "journal", run="b")
    assert len(third.started) == 16, "another run's results are not taken"


async def test_what_infrastructure_voids_has_no_rate_and_is_tried_again(pool, chat_tokenizer, tmp_path):
    environments = [make_environment("a"), make_environment("b", "Japan")]

    def script(session: str, turn: int, seed: int) -> str:
        return "Done." if turn else call("capital_of", country="Japan" if ".b." in session else "France")

    broken = BrokenFor(pool, "Japan")
    arguments = (chat_tokenizer, tmp_path / "journal", environments)
    masked = await measured(ScriptedSampler(chat_tokenizer, script), broken, *arguments)
    assert [one.solve_rate for one in masked] == [pytest.approx(2 / 3, abs=1e-5), None]
    assert statistics(masked)["unscored"] == 1 and statistics(masked)["masked_episodes"] == 4
    assert statistics(masked)["mean"] == masked[0].solve_rate, "masked ones are in no mean"
    policy = Counting(chat_tokenizer, script)
    repeated = await measured(policy, pool, *arguments)
    assert repeated[0] == masked[0] and repeated[1].solve_rate == repeated[0].solve_rate and len(policy.started) == 4
    with pytest.raises(ValueError, match="no episode has a reward, all 4 are masked: 4 times the environment"):
        await measured(ScriptedSampler(chat_tokenizer, script), broken, *arguments[:2], environments[1:], run="c")


async def test_what_cannot_be_measured_is_refused(pool, chat_tokenizer, tmp_path):
    policy = ScriptedSampler(chat_tokenizer, by_name)
    with pytest.raises(ValueError, match="no environment to measure"):
        await measured(policy, pool, chat_tokenizer, tmp_path / "journal", [])
    with pytest.raises(ValueError, match="2 environments have the id 'half'; ids must be unique"):
        await measured(policy, pool, chat_tokenizer, tmp_path / "journal", [*WORLD, WORLD[1]])


def test_a_record_keeps_all_but_its_rate():
    old = make_environment()
    new = recorded(old, Measured([1.0, 0.0], 1), "sft@40")
    assert new.difficulty == Difficulty(2, 0.0, 0.0, 0.5, "sft@40")
    assert msgspec.structs.replace(new, difficulty=None) == old
    known = msgspec.structs.replace(old, difficulty=Difficulty(5, 0.25, 0.75, 0.1, "before"))
    assert recorded(known, Measured([], 4), "sft@40").difficulty == Difficulty(5, 0.25, 0.75, None, "sft@40")
    first, second = old.sub_questions
    third = msgspec.structs.replace(second, id=3)
    parallel = msgspec.structs.replace(old, sub_questions=[first, second, third])
    difficulty = recorded(parallel, Measured([1.0], 0), "").difficulty
    assert (difficulty.hops, difficulty.parallel_share) == (2, pytest.approx(2 / 3, abs=1e-4))


# ------------------------------------------------------------------------------------------------------- curricula


def rated_records(rates: dict[str, float | None]) -> list[ToolEnvironment]:
    return [
        recorded(make_environment(name), Measured([] if rate is None else [rate], 0), "p")
        for name, rate in rates.items()
    ]


def chosen(rates: dict[str, float | None], **settings) -> list[str]:
    return [one.id for one in select_environments(rated_records(rates), dataclasses.replace(GRPO, **settings))]


def test_environments_are_chosen_by_their_solve_rates():
    rates = {"a": 0.0, "b": 0.1, "c": 0.5, "d": 0.9, "e": 1.0}
    assert chosen(rates, solve_rates=(0.1, 0.9)) == ["b", "c", "d"]
    assert chosen(rates, solve_rates=(0.0, 1.0)) == chosen(rates) == list(rates)
    assert chosen({"a": None}) == ["a"], "nothing needs it"
    for settings in ({"solve_rates": (0.1, 0.9)}, {"order": "easy_first"}):
        (name,) = settings
        with pytest.raises(ValueError, match=rf"{name} is .* environment b has no .* \(1 of 2 .*`astra difficulty`"):
            chosen({"a": 0.5, "b": None}, **settings)
        with pytest.raises(ValueError, match="environment france has no recorded solve rate"):
            select_environments([make_environment()], dataclasses.replace(GRPO, **settings))
    with pytest.raises(ValueError, match=r"the 2 go from 0 to 0.2; .*`astra difficulty`"):
        chosen({"a": 0.0, "b": 0.2}, solve_rates=(0.3, 0.9))
    for wrong in ((0.9, 0.1), (-0.1, 1.0), (0.0, 1.1)):
        with pytest.raises(ValueError, match=r"solve_rates(\[\d\])? is .*; use .* from 0 to 1"):
            dataclasses.replace(GRPO, solve_rates=wrong)


def test_easy_first_is_a_function_of_the_position():
    environments = rated_records({"hard": 0.1, "easy": 0.9, "x": 0.5, "y": 0.5, "z": 0.5})

    def order(first: int, **settings) -> list[str]:
        sampler = GroupSampler(None, None, environments, None, EPISODE, group_size=2, seed=3, **settings)
        return [sampler.environment(index).id for index in range(first, 40)]

    ids = order(0, order="easy_first")
    passes = [ids[i : i + 5] for i in range(0, 40, 5)]
    assert all((one[0], one[-1]) == ("easy", "hard") for one in passes)
    assert len({tuple(one) for one in passes}) > 1, "equals are shuffled anew in each pass"
    assert order(13, order="easy_first") == ids[13:]
    assert order(0) == order(0, order="shuffled") != ids


def test_rates_of_environments_that_are_no_records(tmp_path):
    class Door:
        def __init__(self, id: str) -> None:
            self.id, self.question = id, f"Open door {id}."

        def score(self, episode) -> float:
            return 0.0

    doors = [OwnEnvironment(Door(id)) for id in "abcd"]
    rates = [as_rate(door, Measured([rate], 0), "p") for door, rate in zip(doors, (0.1, 0.9, 0.5), strict=False)]
    write_dataset(tmp_path / "rates", SolveRate, [*rates, as_rate(doors[3], Measured([], 2), "p")], card={})
    known = rated(doors, tmp_path / "rates")
    assert [solve_rate_of(one) for one in known] == [0.1, 0.9, 0.5, None]
    assert [(one.id, one.prompt, one.tools, one.subject) for one in known] == [
        (one.id, one.prompt, one.tools, one.subject) for one in doors
    ]
    assert known[0].language == "en" and [kind_of(one) for one in known] == ["Door"] * 4
    assert [one.id for one in select_environments(known[:3], dataclasses.replace(GRPO, solve_rates=(0.2, 0.9)))] == [
        "b", "c"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"environment d has no recorded solve rate \(1 of 4 .* as --difficulty"):
        select_environments(known, dataclasses.replace(GRPO, order="easy_first"))
    sampler = GroupSampler(None, None, known[:3], None, EPISODE, group_size=2, seed=3, order="easy_first")
    assert [sampler.environment(index).id for index in range(3)] == ["b", "c", "a"]
    assert fingerprint(known[0]) != fingerprint(doors[0]), "another order is another run"
    other = Door("a")
    other.question = "Open another door."
    with pytest.raises(InputError, match="1 of 1 environments have changed since they were measured, such as 'a'"):
        rated([OwnEnvironment(other)], tmp_path / "rates")
    with pytest.raises(InputError, match="france is a record of one; leave the flag out"):
        rated([make_environment()], tmp_path / "rates")


async def test_a_filtered_run_samples_only_what_it_keeps(pool, chat_tokenizer, tmp_path):
    rates = {"a": 0.0, "b": 0.5, "c": 0.6, "d": 1.0}
    countries = {"a": "Japan", "b": "France", "c": "France", "d": "Japan"}
    environments = [
        recorded(make_environment(name, countries[name]), Measured([rate], 0), "p") for name, rate in rates.items()
    ]
    model = tiny_model(chat_tokenizer.vocab_size, 1024)
    params = model.init(jax.random.key(0))

    class Reading(ScriptedSampler):
        async def generate(self, token_ids, sampling, *, session=""):
            text = self.tokenizer.decode(list(token_ids))
            asked.append("France" if "capital of France?" in text else "Japan")
            return await super().generate(token_ids, sampling, session=session)

    async def run(config: GRPOConfig, folder: str) -> None:
        policy = Reading(chat_tokenizer, lambda session, turn, seed: "No.")
        result = await train(
            config,
            model,
            starting(params),
            environments,
            chat_tokenizer,
            pool,
            tmp_path / folder,
            policy=policy,
            progress=False,
        )
        assert result.stopped == "exhausted"

    asked: list[str] = []
    await run(GRPO, "all")
    assert set(asked) == {"France", "Japan"}
    asked.clear()
    await run(dataclasses.replace(GRPO, solve_rates=(0.1, 0.9)), "kept")
    assert set(asked) == {"France"} and len(asked) == 16
