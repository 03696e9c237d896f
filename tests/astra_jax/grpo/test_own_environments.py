"""GRPO on environments that are no records: the manual's ten lines, and what is masked and counted."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from own_objects_world import Guessed
from rollout_world import ScriptedSampler, call, make_environment, tiny_model
from selection import by_day
from sft_world import starting

from astra_jax.base.errors import InputError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.environments import check_environments, select_environments
from astra_jax.grpo.journal import Journals
from astra_jax.grpo.rollouts import MaskedShareError, Rollouts
from astra_jax.grpo.train import train
from astra_jax.rollout import sessions
from astra_jax.rollout.episode import Episode, EpisodeConfig, episode_stats, make_task, run_episode
from astra_jax.rollout.sampler import RequestFailed
from astra_jax.rollout.sessions import Masked
from astra_jax.run.metrics import read_metrics
from synthesis.core.environment import ToolAnswer, ToolsUnavailable
from synthesis.core.own_objects import OwnEnvironment, own_environments
from synthesis.core.references import referred
from synthesis.core.rewards import rewards_of

PAGE = (Path(__file__).parents[3] / "docs" / "own_environments.md").read_text(encoding="utf-8")
EPISODE = EpisodeConfig(max_turns=4, max_prompt_tokens=1_500, max_response_tokens=400, reward="score")


@pytest.fixture
def warehouse(tmp_path, monkeypatch):
    """The manual's module, as it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    example, _, reward = blocks
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 10
    (tmp_path / "warehouse.py").write_text(f"{example}\n\n{reward}")
    monkeypatch.syspath_prepend(tmp_path)
    yield own_environments(referred("warehouse:warehouses"), "warehouse:warehouses")
    sys.modules.pop("warehouse")
    rewards_of.cache_clear()


async def play(environment, tokenizer, *turns: str, config=EPISODE, **options) -> Episode:
    policy = ScriptedSampler(tokenizer, lambda session, turn, seed: turns[turn])
    task = make_task(environment, tokenizer, config, seed=0)
    episode = await run_episode(policy, None, task, tokenizer, config, seed=0, session="s", **options)
    assert policy.seen == {}, "the session was released"
    return episode


def test_the_manuals_example_is_tested_without_a_model(warehouse, tmp_path) -> None:
    tested = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", tested]
    said = subprocess.run(command, env=path, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.splitlines() == re.findall(r"  # (.*)", tested)


@pytest.mark.slow
async def test_the_manuals_example_is_trained_on(warehouse, chat_tokenizer, tmp_path) -> None:
    """Half of the episodes look and answer rightly; the others do not look."""
    written = re.findall(r"--config\.grpo\.episode\.reward=(\S+)", PAGE)
    assert "score:1,format:0.1,warehouse:brief:0.1" in written and set(written) >= {"score"}

    asked: dict[str, str] = {}

    def script(session: str, turn: int, seed: int) -> str:
        if seed % 2:
            return "Seven or forty, I think."
        answer = "There are 40 bolts." if asked[session] == "bolts" else "There are 7 nuts."
        return [call("stock_of", item="bolts"), call("stock_of", item="nuts"), answer][turn]

    class Reader(ScriptedSampler):
        async def generate(self, token_ids, sampling, *, session=""):
            question = "How many bolts are" in chat_tokenizer.decode(list(token_ids))
            asked[session] = "bolts" if question else "nuts"
            return await super().generate(token_ids, sampling, session=session)

    model = tiny_model(chat_tokenizer.vocab_size, 2_048)
    config = GRPOConfig(
        steps=1, batch_size=2, group_size=4, learning_rate=1e-2, concurrent_groups=4, row_buckets=(512, 2_000),
        micro_batch_size=2, weight_decay=0.0,
        episode=EpisodeConfig(
            max_turns=4, max_prompt_tokens=1_500, max_response_tokens=400,
            reward="score:1,format:0.1,warehouse:brief:0.1",
        ),
    )  # fmt: skip
    params = model.init(jax.random.key(0))
    result = await train(
        config, model, starting(params), warehouse, chat_tokenizer, None, tmp_path / "run",
        policy=Reader(chat_tokenizer, script), progress=False,
    )  # fmt: skip
    assert result.steps == 1
    [row] = read_metrics(tmp_path / "run" / "metrics")
    assert 0 < row["rollout/reward_score"] < 1 and row["rollout/reward_format"] == row["rollout/reward_score"]
    assert row["rollout/reward_warehouse.brief"] == 1 and row["filling/masked_episodes"] == 0
    assert row["rollout/reward"] == pytest.approx(1.1 * row["rollout/reward_score"] + 0.1)
    assert 0 < row["train/reward"] < 1.2
    assert "rollout/recall" not in row, "there are no sub-tasks"
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(params), strict=True))


async def test_an_episode_of_an_object(warehouse, chat_tokenizer) -> None:
    bolts = warehouse[0]
    wrong = call("stock_of", item=7) + call("no_such_tool") + call("stock_of", item="bolts")
    episode = await play(bolts, chat_tokenizer, wrong, "40 of them.")
    assert [one.outcome for one in episode.calls] == ["invalid_arguments", "unknown_tool", "ok"]
    assert episode.calls[2].output == "40" and episode.reward == 1.0 and episode.score.needed == 0
    config = EpisodeConfig(max_turns=4, reward="warehouse:brief,format:0.5")
    judged = await play(bolts, chat_tokenizer, wrong, "40 of them.", config=config)
    assert judged.score.parts == {"warehouse.brief": 0.5, "format": pytest.approx(1 / 3)}
    assert judged.reward == pytest.approx(0.5 + 0.5 / 3)
    assert episode_stats([episode, judged])["reward_format"] == pytest.approx(1 / 3)


async def test_what_fails_is_masked_and_told_apart(warehouse, chat_tokenizer) -> None:
    bolts, said = warehouse[0], (call("stock_of", item="bolts"), "40.")
    for score, reason in (
        (lambda episode: 2.0, "gave 2.0, which is not from 0 to 1"),
        (lambda episode: sys.exit(0), "raised SystemExit: 0"),
    ):
        judged = type(bolts.subject)("bolts", 40)
        judged.score = score
        episode = await play(OwnEnvironment(judged), chat_tokenizer, *said)
        assert episode.is_masked and episode.finish == "masked" and episode.turns == 2
        assert episode.masked == Masked("reward_failed", f"reward score {reason}")
        assert episode.unscored == episode.masked.message

    class Away:
        id, subject, answer = "away", None, None
        prompt, tools = bolts.prompt, bolts.tools

        async def begin(self):
            raise ToolsUnavailable("the server is away")

    never = await play(Away(), chat_tokenizer, *said)
    assert never.is_masked and never.turns == 0 and never.token_ids == list(never.token_ids[: never.prompt_tokens])
    assert never.masked == Masked("environment_not_begun", "an episode of away is masked: the server is away")
    with pytest.raises(InputError, match="away cannot be started: the server is away"):
        await check_environments([Away()], chat_tokenizer, None, EPISODE)


async def test_what_a_call_does_is_scored_and_never_masked(warehouse, chat_tokenizer, caplog) -> None:
    """A policy chooses the arguments: it must not escape its reward by them."""
    kind: Any = type(warehouse[0].subject)
    said = (call("stock_of", item="bolts"), call("stock_of", item="nuts"), "40.")

    class Odd(kind):
        def stock_of(self, item: str) -> object:
            """Something that is no JSON."""
            return object()

    odd = await play(OwnEnvironment(Odd("bolts", 40)), chat_tokenizer, *said)
    assert [one.outcome for one in odd.calls] == ["tool_error"] * 2 and odd.reward == 1.0

    class Hangs(kind):
        call_seconds = 0.2

        def stock_of(self, item: str) -> bool:
            """Never comes back, and holds the interpreter."""
            return bool(re.match("(a+)+$", "a" * 50 + "b"))

    class Ends(kind):
        def stock_of(self, item: str) -> bool:
            """Never comes back either."""
            os._exit(0)

    for environment, reason in (
        (Hangs("bolts", 40), "stock_of did not answer in 0.2 s"),
        (Ends("bolts", 40), "stock_of ended its process (exit code 0)"),
    ):
        config = EpisodeConfig(max_turns=4, reward="score,format:0.5")
        ended = await play(OwnEnvironment(environment), chat_tokenizer, *said, config=config)
        assert [one.outcome for one in ended.calls] == ["environment_died"] * 2
        assert ended.calls[1].output == f'{{"error":"{reason}; the environment is gone"}}'
        assert not ended.is_masked and ended.score.parts == {"score": 0.0, "format": 1.0}
        assert f"scores 0: {reason}" in caplog.text
        assert episode_stats([ended, odd])["dead_environments"] == 0.5


class Foreign:
    """An environment of somebody's with sessions of its own, which does `what` at `when`."""

    id, subject, answer = "foreign", None, None

    def __init__(self, like, when: str, what) -> None:
        self.prompt, self.tools = like.prompt, like.tools
        self.when, self.what, self.seen = when, what, []

    async def do(self, when: str) -> None:
        if when == self.when:
            await self.what()

    async def begin(self):
        await self.do("begin")
        return self

    async def call(self, tool, arguments):
        await self.do("call")
        arguments.clear()
        return ToolAnswer("40")

    async def score(self, episode) -> float:
        await self.do("score")
        self.seen.append([one.arguments for one in episode.calls])
        episode.calls.clear()
        return 1.0

    async def close(self) -> None:
        await self.do("close")


def throws(error: BaseException):
    async def throw() -> None:
        raise error

    return throw


@pytest.mark.parametrize(
    "error",
    [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(),
     BaseExceptionGroup("g", [SystemExit(1)]), TimeoutError("own"), OSError("gone")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_whatever_foreign_sessions_raise_ends_their_episode_alone(
    warehouse, chat_tokenizer, error, caplog
) -> None:
    said, name = (call("stock_of", item="bolts"), "40."), type(error).__name__
    for when in ("begin", "call", "score", "close"):
        caplog.clear()
        episode = await play(Foreign(warehouse[0], when, throws(error)), chat_tokenizer, *said)
        assert episode.is_masked == (when != "close")
        assert f"{when} raised {name}" in caplog.text or f"stock_of raised {name}" in caplog.text
        assert bool(episode.unscored) == (when == "score")
    assert asyncio.current_task().cancelling() == 0


async def test_what_foreign_code_does_to_its_arguments_changes_no_record(warehouse, chat_tokenizer) -> None:
    foreign = Foreign(warehouse[0], "never", None)
    episode = await play(foreign, chat_tokenizer, call("stock_of", item="bolts"), "40.")
    assert episode.calls[0].arguments == {"item": "bolts"} and foreign.seen == [[{"item": "bolts"}]]
    assert episode.messages[-3].tool_calls[0].arguments == {"item": "bolts"}


async def test_what_hangs_as_an_episode_begins_or_ends_is_given_up(
    warehouse, chat_tokenizer, monkeypatch, caplog
) -> None:
    """The run waited for it for ever, and said nothing."""
    forever = asyncio.Event().wait
    monkeypatch.setattr(sessions, "MOST_SECONDS", 0.05)
    ended = await play(Foreign(warehouse[0], "close", forever), chat_tokenizer, "40.")
    assert not ended.is_masked and "close did not end in 0.05 s" in caplog.text
    never = await play(Foreign(warehouse[0], "begin", forever), chat_tokenizer, "40.")
    assert never.is_masked and never.turns == 0
    assert "an episode of foreign has not begun after 0.05 s" in caplog.text
    assert "an episode of foreign is masked: begin did not end in 1.2 s" in caplog.text
    with pytest.raises(InputError, match=r"foreign cannot be started: begin did not end in 1\.2 s"):
        await check_environments([Foreign(warehouse[0], "begin", forever)], chat_tokenizer, None, EPISODE)
    late = await play(Foreign(warehouse[0], "call", forever), chat_tokenizer, call("stock_of", item="bolts"), "40.")
    assert not late.is_masked and late.reward == 0.0 and late.calls[0].outcome == "environment_died"


async def test_a_start_refuses_what_cannot_be_judged(warehouse, chat_tokenizer) -> None:
    await check_environments(warehouse, chat_tokenizer, None, EPISODE)
    with pytest.raises(InputError, match="reward f1 counts sub-tasks"):
        await check_environments(warehouse, chat_tokenizer, None, EpisodeConfig())
    with pytest.raises(InputError, match="has no recorded solve rate"):
        select_environments(warehouse, GRPOConfig(solve_rates=(0.1, 0.9)))
    with pytest.raises(InputError, match="warehouse has no terse; it has Warehouse, warehouses, brief .*warehouse.py"):
        await check_environments(warehouse, chat_tokenizer, None, EpisodeConfig(reward="warehouse:terse"))


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda self, episode: None, "reward score gave None, which is not a number"),
        (lambda self, episode: 0.5 * episode.calls[-1].arguments["pieces"], "reward score raised IndexError"),
        (lambda self, episode: 1.5, "reward score gave 1.5, which is not from 0 to 1"),
        (lambda self, episode: sys.exit(0), "reward score raised SystemExit: 0"),
    ],
)
async def test_a_start_refuses_a_score_that_cannot_judge_silence(warehouse, chat_tokenizer, score, message) -> None:
    class Faulty(type(warehouse[0].subject)):
        pass

    Faulty.score = score
    environment = OwnEnvironment(Faulty("bolts", 40))
    with pytest.raises(InputError, match=f"environment Faulty-.*: {message}.*of an episode without calls"):
        await check_environments([environment], chat_tokenizer, None, EPISODE)
    await check_environments([environment], chat_tokenizer, None, EpisodeConfig(reward="format"))


async def test_sums_that_miss_the_bounds_by_rounding_are_scores(warehouse, chat_tokenizer) -> None:
    for sum_, score in ((1 + 2e-16, 1.0), (0.3 - 3 * 0.1, 0.0)):
        Rounded = type("Rounded", (type(warehouse[0].subject),), {"score": lambda self, episode, sum_=sum_: sum_})
        episode = await play(OwnEnvironment(Rounded("bolts", 40)), chat_tokenizer, "40.")
        assert not episode.is_masked and episode.reward == score


async def test_records_and_objects_in_one_run(warehouse, pool, chat_tokenizer) -> None:
    """`score` is F1 of the ones and what the others say."""
    mixed = [make_environment(), *warehouse]
    config = EpisodeConfig(max_turns=4, max_prompt_tokens=1_500, distractors_per_band=0, reward="score")
    await check_environments(mixed, chat_tokenizer, pool, config)
    policy = ScriptedSampler(chat_tokenizer, lambda *given: [call("capital_of", country="France"), "40."][given[1]])
    task = make_task(mixed[0], chat_tokenizer, config, seed=0)
    episode = await run_episode(policy, pool, task, chat_tokenizer, config, seed=0, session="s")
    assert episode.reward == episode.score.f1 > 0 and episode.score.parts == {"score": episode.reward}


class Looking(ScriptedSampler):
    """Looks in every other episode; guesses rightly or wrongly in the others. Requests of `lost` episodes fail."""

    def __init__(self, tokenizer, lost: int = 0) -> None:
        def script(session: str, turn: int, seed: int) -> str:
            if seed % 2:
                return [call("stock_of", item="bolts"), "40"][turn]
            return "40" if seed % 4 else "7"

        super().__init__(tokenizer, script)
        self.lost = lost

    async def generate(self, token_ids, sampling, *, session=""):
        if self.lost and not self.turns.get(session):
            self.lost -= 1
            raise RequestFailed("the server closed the connection")
        return await super().generate(token_ids, sampling, session=session)


def rollouts_of(policy, tokenizer, environment, folder: Path | None = None, **settings) -> Rollouts:
    config = GRPOConfig(
        batch_size=2, group_size=8, concurrent_groups=2, episode=EPISODE, row_buckets=(2_000,), steps=4, **settings
    )
    journals = None if folder is None else Journals(folder, run="r", identity="i")
    return Rollouts(policy, None, [environment], tokenizer, config, journals)


async def batch_of(rollouts: Rollouts):
    try:
        await rollouts.set_version(0, "w")
        await rollouts.fill(0)
        return rollouts.take()
    finally:
        await rollouts.close()


@pytest.mark.parametrize("async_rollouts", by_day([False, True], False))
async def test_a_run_whose_episodes_are_masked_by_what_they_did_is_stopped(
    chat_tokenizer, async_rollouts: bool
) -> None:
    """Left are the episodes that did not look: no fair sample of the policy's."""
    environment = OwnEnvironment(Guessed("unscored"))
    options = {"async_rollouts": async_rollouts}
    with pytest.raises(MaskedShareError) as stopped:
        await batch_of(rollouts_of(Looking(chat_tokenizer), chat_tokenizer, environment, **options))
    said = str(stopped.value)
    assert re.search(
        r"update 0: \d+ of \d+ sampled episodes are masked, more than max_masked_share \(0.2\): \d+ rew", said
    )
    assert "reward_failed (reward score raised KeyError: 'no such row')" in said and "--config.grpo.max_masked" in said
    batch = await batch_of(
        rollouts_of(Looking(chat_tokenizer), chat_tokenizer, environment, max_masked_share=1.0, **options)
    )
    counts = batch.filling.counts
    assert counts["masked_reward_failed"] == counts["masked_episodes"] > 4 and counts["masked_share"] > 0.2


@pytest.mark.parametrize("async_rollouts", by_day([False, True], True))
async def test_a_few_masked_episodes_are_counted_and_stop_nothing(
    chat_tokenizer, tmp_path, capsys, async_rollouts: bool
) -> None:
    environment, options = OwnEnvironment(Guessed("scored")), {"async_rollouts": async_rollouts}
    policy = Looking(chat_tokenizer, lost=3)
    batch = await batch_of(rollouts_of(policy, chat_tokenizer, environment, tmp_path, **options))
    assert batch.filling.counts["masked_request_failed"] == 3
    shown = capsys.readouterr().err
    assert "episodes are masked: 3 request_failed (environment " in shown and "closed the connection" in shown
    # The process after a kill finds the batch in the journal, with what was masked of it.
    again = await batch_of(rollouts_of(Looking(chat_tokenizer), chat_tokenizer, environment, tmp_path, **options))
    assert again.filling.counts["masked_request_failed"] == 3 and again.groups == batch.groups


async def test_what_is_mended_goes_on_with_the_episodes_that_were_scored(chat_tokenizer, tmp_path) -> None:
    """The stopped batch is none: its scored episodes are taken, its masked ones are played again."""
    environment = OwnEnvironment(Guessed("scored"))
    with pytest.raises(MaskedShareError, match="request_failed"):
        await batch_of(rollouts_of(Looking(chat_tokenizer, lost=9), chat_tokenizer, environment, tmp_path))
    batch = await batch_of(rollouts_of(Looking(chat_tokenizer), chat_tokenizer, environment, tmp_path))
    counts = batch.filling.counts
    assert counts["masked_episodes"] == 0 and counts["journal_episodes"] >= 7
    assert all(len(group.episodes) == 8 for group in batch.groups)
