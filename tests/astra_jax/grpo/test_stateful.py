"""GRPO on environments with worlds: episodes are scored by the state that they leave, and train a policy."""

from __future__ import annotations

import jax
import msgspec
import pytest
from rollout_world import ScriptedSampler, call, make_environment, tiny_model
from sft_world import starting
from state_world import CALLS, CODE, PAID, bank

from astra_jax.base.errors import InputError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.environments import check_environments
from astra_jax.grpo.train import train
from astra_jax.rollout.episode import Episode, EpisodeConfig, FinishedTurn, episode_stats, make_task, run_episode
from astra_jax.rollout.tool_calls import ResumeMismatch
from astra_jax.run.metrics import read_metrics

EPISODE = EpisodeConfig(max_turns=4, max_prompt_tokens=1_500, max_response_tokens=500, distractors_per_band=0)
RIGHT = [call(name, **given) for name, given in CALLS]
DAMAGE = call("transfer", **{**PAID, "amount": 7})


def says(*turns: str):
    return lambda session, turn, seed: turns[turn] if turn < len(turns) else "Done."


async def episode(pool, tokenizer, *turns: str, environment=None) -> Episode:
    task = make_task(environment or bank(), tokenizer, EPISODE, seed=0)
    policy = ScriptedSampler(tokenizer, says(*turns))
    return await run_episode(policy, pool, task, tokenizer, EPISODE, seed=0, session="s")


async def test_an_episode_is_scored_by_the_state_it_leaves(pool, chat_tokenizer):
    good = await episode(pool, chat_tokenizer, "".join(RIGHT[:2]), RIGHT[2])
    assert good.reward == pytest.approx(1.0, abs=1e-5) and good.score.harm == 0
    reading = await episode(pool, chat_tokenizer, "".join(RIGHT[:2]))
    assert reading.reward == pytest.approx(0.8, abs=1e-5)
    harm = await episode(pool, chat_tokenizer, "".join(RIGHT[:2]), RIGHT[2], DAMAGE)
    assert harm.reward == pytest.approx(6 / 8, abs=1e-5) and harm.score.harm == 1
    stats = episode_stats([good, reading, harm])
    assert stats["harm"] == pytest.approx(1 / 3) and stats["unevaluated_checks"] == 0
    assert harm.score.f1 == pytest.approx(harm.reward, abs=1e-5)


async def test_guesses_that_are_stored_and_read_back_earn_nothing(pool, chat_tokenizer):
    """`STATE` keeps the text of a failed payment's memo, which a look-up then lists."""
    code = CODE.replace(
        '    for one in (source, target):\n',
        '    if amount == 0:\n        STATE["transfers"][source] = {"source": source, "target": "", "amount": 0}\n'
        "        return {}\n    for one in (source, target):\n",
    ).replace('    raise ValueError(f"nobody', '    if owner == "memos":\n        return list(STATE["transfers"])\n'
              '    raise ValueError(f"nobody')  # fmt: skip
    asked = bank(code=code)
    store = call("transfer", source="A70, A71, A72", target="", amount=0)
    read = call("find_account", owner="memos")
    for turns in ((store, read), (store + read,)):
        made = await episode(pool, chat_tokenizer, *turns, environment=asked)
        assert "A70, A71, A72" in made.calls[1].output and [one.solved for one in made.calls] == [[], []]
    # A look-up after honest calls counts.
    made = await episode(pool, chat_tokenizer, RIGHT[2], RIGHT[0] + RIGHT[1], environment=asked)
    assert [one.solved for one in made.calls] == [[], [1], [2]]


async def test_calls_of_one_turn_come_in_their_order(pool, chat_tokenizer):
    twice = call("transfer", **{**PAID, "amount": 200})
    made = await episode(pool, chat_tokenizer, twice + call("find_account", owner="Ada") + twice)
    assert [one.ok for one in made.calls] == [True, True, False]
    assert '"balance":100' in made.calls[1].output and "has only 100" in made.calls[2].output


async def test_what_a_world_cannot_be_trained_on_is_refused_at_the_start(pool, chat_tokenizer):
    await check_environments([bank(), make_environment()], chat_tokenizer, pool, EPISODE)
    never = bank(check="def check(before, after):\n    return False")
    with pytest.raises(InputError, match=r"sub-questions \[3\] unsolved"):
        await check_environments([never], chat_tokenizer, pool, EPISODE)
    blamed = bank()
    blamed = msgspec.structs.replace(blamed, world=msgspec.structs.replace(blamed.world, changes=[]))
    with pytest.raises(InputError, match="1 rows otherwise"):
        await check_environments([blamed], chat_tokenizer, pool, EPISODE)


async def test_an_open_episode_of_a_world_goes_on_from_its_calls(pool, chat_tokenizer):
    """The state is made anew by the calls, which must come to the same."""
    spoken = ["".join(RIGHT[:2]), RIGHT[2]]
    task = make_task(bank(), chat_tokenizer, EPISODE, seed=0)
    turns: list[FinishedTurn] = []

    async def keep(place: int, turn: FinishedTurn) -> None:
        assert place == len(turns)
        turns.append(turn)

    async def run(said, **options) -> Episode:
        policy = ScriptedSampler(chat_tokenizer, says(*said))
        given = policy, pool, task, chat_tokenizer, EPISODE
        return await run_episode(*given, seed=0, session="s", **options)

    whole = await run(spoken, on_turn=keep)
    assert len(turns) == 2 and whole.reward == pytest.approx(1.0, abs=1e-5)
    for taken in (1, 2):
        assert await run(spoken[taken:], taken=turns[:taken]) == whole
    other = msgspec.structs.replace(turns[1].calls[0], output='{"paid":true}')
    for wrong in (
        [turns[0], msgspec.structs.replace(turns[1], calls=[other])],
        [turns[1]],
        [msgspec.structs.replace(turns[0], calls=turns[0].calls[:1])],
        [msgspec.structs.replace(turns[0], logprobs=[])],
        [msgspec.structs.replace(turns[0], observation=[0] * 500)],
    ):
        with pytest.raises(ResumeMismatch):
            await run([], taken=wrong)


@pytest.mark.slow
async def test_a_batch_of_worlds_is_trained_on(pool, chat_tokenizer, tmp_path):
    """Half of the episodes pay, half only look; some do damage."""

    def script(session: str, turn: int, seed: int) -> str:
        turns = ["".join(RIGHT[:2]), *([RIGHT[2]] if seed % 2 else []), *([DAMAGE] if seed % 3 == 0 else [])]
        return turns[turn] if turn < len(turns) else "Done."

    model = tiny_model(chat_tokenizer.vocab_size, 2_048)
    config = GRPOConfig(
        steps=2, batch_size=2, group_size=4, learning_rate=1e-2, concurrent_groups=4, episode=EPISODE,
        row_buckets=(512, 2_000), micro_batch_size=2, weight_decay=0.0, checkpoint_every=2,
    )  # fmt: skip
    environments = [bank(), bank(id="other")]
    params = model.init(jax.random.key(0))
    result = await train(
        config, model, starting(params), environments, chat_tokenizer, pool, tmp_path,
        policy=ScriptedSampler(chat_tokenizer, script), progress=False,
    )  # fmt: skip
    assert result.steps == 2
    first, *_ = read_metrics(tmp_path / "metrics")
    assert 0.5 < first["rollout/reward"] < 1 and first["rollout/harm"] > 0
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(params), strict=True))
