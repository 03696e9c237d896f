"""GRPO on environments that are no records: the manual's ten lines, and what is masked and counted."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import jax
import pytest
from rollout_world import ScriptedPolicy, call, make_environment, tiny_model
from sft_world import starting

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.environments import check_environments, select_environments
from astra_jax.grpo.train import train
from astra_jax.rollout import sessions
from astra_jax.rollout.episode import Episode, EpisodeConfig, FinishedTurn, episode_stats, make_task, run_episode
from astra_jax.run.metrics import read_metrics
from synthesis.core.environment import ToolsUnavailable
from synthesis.core.own_objects import OwnEnvironment, own_environments
from synthesis.core.references import referred
from synthesis.core.refusals import InputError
from synthesis.core.rewards import rewards_of

PAGE = (Path(__file__).parents[3] / "docs" / "own_environments.md").read_text(encoding="utf-8")
EPISODE = EpisodeConfig(max_turns=4, max_prompt_tokens=1_500, max_response_tokens=400, reward="score")


@pytest.fixture
def warehouse(tmp_path, monkeypatch):
    """The manual's module, as it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2 and sum(bool(line.strip()) for line in blocks[0].splitlines()) <= 10
    (tmp_path / "warehouse.py").write_text("\n\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    yield own_environments(referred("warehouse:warehouses"), "warehouse:warehouses")
    sys.modules.pop("warehouse")
    rewards_of.cache_clear()


async def play(environment, tokenizer, *turns: str, config=EPISODE, **options) -> Episode:
    policy = ScriptedPolicy(tokenizer, lambda session, turn, seed: turns[turn])
    task = make_task(environment, tokenizer, config, seed=0)
    episode = await run_episode(policy, None, task, tokenizer, config, seed=0, session="s", **options)
    assert policy.seen == {}, "the session was released"
    return episode


@pytest.mark.slow
async def test_the_manuals_example_is_trained_on(warehouse, chat_tokenizer, tmp_path) -> None:
    """Half of the episodes look and answer rightly; the others do not look."""
    written = re.findall(r"--config\.grpo\.episode\.reward=(\S+)", PAGE)
    assert "score:1,format:0.1,warehouse:brief:0.1" in written and set(written) >= {"score"}

    def script(session: str, turn: int, seed: int) -> str:
        if seed % 2:
            return "Seven, I think."
        return [call("stock_of", item="bolts"), call("stock_of", item="nuts"), "There are 40 bolts or 7 nuts."][turn]

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
        policy=ScriptedPolicy(chat_tokenizer, script), progress=False,
    )  # fmt: skip
    assert result.steps == 1
    [row] = read_metrics(tmp_path / "run" / "metrics")
    assert 0 < row["rollout/reward_score"] < 1 and row["rollout/reward_format"] == 1
    assert row["rollout/reward_warehouse.brief"] == 1 and row["filling/unscored_episodes"] == 0
    assert row["rollout/reward"] == pytest.approx(row["rollout/reward_score"] + 0.2)
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
    bolts.subject.score = lambda episode: 2.0
    episode = await play(bolts, chat_tokenizer, *said)
    assert episode.voided and episode.finish == "voided" and episode.turns == 2
    assert episode.unscored == "reward score gave 2.0, which is not from 0 to 1"

    class Broken(type(bolts.subject)):
        def stock_of(self, item: str) -> set:
            """Something that is no JSON."""
            return object()

    dead = await play(OwnEnvironment(Broken("bolts", 1)), chat_tokenizer, *said)
    assert dead.voided and not dead.unscored and dead.turns == 1

    class Hangs(type(bolts.subject)):
        async def stock_of(self, item: str) -> int:
            """Never comes back."""
            return await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sessions, "MOST_SECONDS", 0.01)
        hung = await play(OwnEnvironment(Hangs("bolts", 1)), chat_tokenizer, *said)
    assert hung.voided and hung.calls[0].output == '{"error":"stock_of did not end in 0.01 s"}'

    class Away:
        id, subject, answer = "away", None, None
        prompt, tools = bolts.prompt, bolts.tools

        async def begin(self):
            raise ToolsUnavailable("the server is away")

    never = await play(Away(), chat_tokenizer, *said)
    assert never.voided and never.turns == 0 and never.token_ids == list(never.token_ids[: never.prompt_tokens])
    with pytest.raises(InputError, match="away cannot be begun: the server is away"):
        await check_environments([Away()], chat_tokenizer, None, EPISODE)


async def test_what_hangs_as_an_episode_begins_or_ends_is_given_up(
    warehouse, chat_tokenizer, monkeypatch, caplog
) -> None:
    """The run waited for it for ever, and said nothing."""
    bolts = warehouse[0]

    class HangsAtLast(type(bolts.subject)):
        def score(self, episode) -> float:
            monkeypatch.setattr(sessions, "MOST_SECONDS", 0.01)  # of what comes behind it
            return 1.0

        async def close(self) -> None:
            await asyncio.Event().wait()

    class HangsAtFirst:
        id, subject, answer = "away", None, None
        prompt, tools = bolts.prompt, bolts.tools

        async def begin(self):
            await asyncio.Event().wait()

    with caplog.at_level("WARNING"):
        ended = await play(OwnEnvironment(HangsAtLast("bolts", 40)), chat_tokenizer, "40.")
        assert not ended.voided and "close did not end in 0.01 s" in caplog.text
        never = await play(HangsAtFirst(), chat_tokenizer, "40.")
    assert never.voided and never.turns == 0
    assert "an episode of away has not begun after 0.01 s" in caplog.text
    assert "an episode of away is masked: begin did not end in 0.24 s" in caplog.text
    with pytest.raises(InputError, match=r"away cannot be begun: begin did not end in 0\.24 s"):
        await check_environments([HangsAtFirst()], chat_tokenizer, None, EPISODE)


async def test_a_start_refuses_what_cannot_be_judged(warehouse, chat_tokenizer) -> None:
    await check_environments(warehouse, chat_tokenizer, None, EPISODE)
    with pytest.raises(InputError, match="reward f1 counts sub-tasks"):
        await check_environments(warehouse, chat_tokenizer, None, EpisodeConfig())
    with pytest.raises(InputError, match="has no recorded solve rate"):
        select_environments(warehouse, GRPOConfig(solve_rates=(0.1, 0.9)))
    with pytest.raises(InputError, match="warehouse has no terse; it has Warehouse, warehouses, brief"):
        await check_environments(warehouse, chat_tokenizer, None, EpisodeConfig(reward="warehouse:terse"))


async def test_an_open_episode_goes_on_by_its_calls(warehouse, chat_tokenizer) -> None:
    turns: list[FinishedTurn] = []

    async def keep(place: int, turn: FinishedTurn) -> None:
        turns.append(turn)

    said = call("stock_of", item="bolts"), "40."
    whole = await play(warehouse[0], chat_tokenizer, *said, on_turn=keep)
    assert await play(warehouse[0], chat_tokenizer, *said[1:], taken=turns) == whole


async def test_records_and_objects_in_one_run(warehouse, pool, chat_tokenizer) -> None:
    """`score` is F1 of the ones and what the others say."""
    mixed = [make_environment(), *warehouse]
    config = EpisodeConfig(max_turns=4, max_prompt_tokens=1_500, distractors_per_band=0, reward="score")
    await check_environments(mixed, chat_tokenizer, pool, config)
    policy = ScriptedPolicy(chat_tokenizer, lambda *given: [call("capital_of", country="France"), "40."][given[1]])
    task = make_task(mixed[0], chat_tokenizer, config, seed=0)
    episode = await run_episode(policy, pool, task, chat_tokenizer, config, seed=0, session="s")
    assert episode.reward == episode.score.f1 > 0 and episode.score.parts == {"score": episode.reward}
