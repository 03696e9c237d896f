"""Episodes against the real sandbox: tokens, masks, calls, ends, and what is never scored."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import msgspec
import numpy as np
import pytest
from rollout_world import ScriptedSampler, call, make_environment, table_tool

from astra_jax.base.errors import InputError
from astra_jax.evaluation.episodes import EvalConfig, evaluate
from astra_jax.grpo.environments import check_environments
from astra_jax.rollout.episode import Episode, EpisodeConfig, episode_stats, make_task, run_episode
from astra_jax.rollout.sampler import Completion, RequestFailed
from astra_jax.tokenizer import ChatTokenizer
from sandbox import CallResult, Outcome
from synthesis.core.chatml import QWEN3
from synthesis.core.records import Answer, CodeTool, ToolEnvironment

CONFIG = EpisodeConfig(max_turns=4, max_prompt_tokens=4_000, max_response_tokens=2_000)


async def play(turns, pool, environment, tokenizer, config=CONFIG) -> Episode:
    policy = ScriptedSampler(tokenizer, lambda session, turn, seed: turns[turn])
    task = make_task(environment, tokenizer, config, seed=3)
    episode = await run_episode(policy, pool, task, tokenizer, config, seed=1, session="s")
    assert policy.seen == {}, "the session was released"
    assert len(episode.token_ids) == len(episode.loss_mask) == len(episode.logprobs)
    assert episode.token_ids[: episode.prompt_tokens] == list(task.prompt_ids)
    assert all((p != 0) == bool(m) for p, m in zip(episode.logprobs, episode.loss_mask, strict=True))
    return episode


async def test_solved_episode(pool, environment, chat_tokenizer):
    turns = [
        "<think>\nFirst the capital.\n</think>\n\nLet me look.\n" + call("capital_of", country="France"),
        call("population_of", city="Paris"),
        "<think>\n\n</think>\n\n2102650 people.",
    ]
    episode = await play(turns, pool, environment, chat_tokenizer)
    assert (episode.finish, episode.turns, episode.reward) == ("answered", 3, pytest.approx(1, abs=1e-5))
    assert [c.solved for c in episode.calls] == [[1], [2]]
    assert [c.output for c in episode.calls] == ['{"capital_of":"Paris"}', '{"population_of":2102650}']
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert episode.versions == [0] * len(episode.token_ids) and episode.sampled_by == [0]
    # The tokens that were appended turn by turn are what rendering the whole conversation gives.
    task = make_task(environment, chat_tokenizer, CONFIG, seed=3)
    segments = QWEN3.render(episode.messages, list(task.tools.values()), keep_reasoning=True)
    assert chat_tokenizer.decode(episode.token_ids) == "".join(s.text for s in segments).removesuffix("\n")
    # Exactly what the policy said is trained on.
    said = [t for t, m in zip(episode.token_ids, episode.loss_mask, strict=True) if m]
    assert said == [t for turn in turns for t in chat_tokenizer.encode(turn + "<|im_end|>")]


async def test_a_turn_ends_with_each_token_that_serving_stops_at(pool, environment, chat_tokenizer):
    """`<|endoftext|>` behind a call stays as it was sampled; the format's own token closes the turn, untrained."""
    ends, texts = chat_tokenizer.end_ids, [call("capital_of", country="France"), "2102650."]
    assert ends == (chat_tokenizer.eos_id, chat_tokenizer.pad_id)

    class Sampler(ScriptedSampler):
        async def generate(self, token_ids, sampling, *, session=""):
            assert sampling.stop_ids == ends
            new = chat_tokenizer.encode(texts[self.turns.get(session, 0)] + "<|endoftext|>And 2 more.<|im_end|>")
            new = new[: next(i for i, token in enumerate(new) if token in sampling.stop_ids) + 1]
            self.turns[session] = self.turns.get(session, 0) + 1
            return Completion(new, [-1.0] * len(new), [0] * len(new), "stop")

    task = make_task(environment, chat_tokenizer, CONFIG, seed=3)
    policy, turns = Sampler(chat_tokenizer, lambda session, turn, seed: ""), []
    options = dict(seed=1, session="s", on_turn=turns.append)
    episode = await run_episode(policy, pool, task, chat_tokenizer, CONFIG, **options)
    assert turns == [[0] * len(chat_tokenizer.encode(texts[0] + "<|endoftext|>"))], "the turn that it continues after"
    assert (episode.finish, episode.turns, episode.messages[-1].content) == ("answered", 2, "2102650.")
    said = [t for t, mask in zip(episode.token_ids, episode.loss_mask, strict=True) if mask]
    assert said == [t for text in texts for t in chat_tokenizer.encode(text + "<|endoftext|>")]
    shown = chat_tokenizer.decode(episode.token_ids[episode.prompt_tokens :])
    first = QWEN3.tool_results_text(['{"capital_of":"Paris"}'])
    assert shown == f"{texts[0]}<|endoftext|><|im_end|>{first}{texts[1]}<|endoftext|>"


async def test_outputs_are_tokenised_in_another_thread_than_the_loops(pool, environment, chat_tokenizer, monkeypatch):
    real, threads = ChatTokenizer.encode_segments, set()

    def encode(self, segments, **options):
        if any(segment.text.startswith("\n<|im_start|>user\n<tool_response>") for segment in segments):
            threads.add(threading.get_ident())
        return real(self, segments, **options)

    monkeypatch.setattr(ChatTokenizer, "encode_segments", encode)
    await play([call("capital_of", country="France"), "Done."], pool, environment, chat_tokenizer)
    assert threads and threading.get_ident() not in threads


async def test_calls_of_one_turn(pool, environment, chat_tokenizer):
    both = call("population_of", city="Paris") + "\n" + call("capital_of", country="France")
    episode = await play([both, "Done."], pool, environment, chat_tokenizer)
    assert [c.name for c in episode.calls] == ["population_of", "capital_of"]
    assert episode.score.solved == 2 and episode.turns == 2


async def test_wrong_calls_become_observations_and_count(pool, environment, chat_tokenizer):
    turns = [
        "\n".join(
            [
                '<tool_call>\n{"name": "capital_of", "arguments": \n</tool_call>',
                call("no_such_tool", x=1),
                call("capital_of", nation="France"),
            ]
        ),
        call("capital_of", country=7) + "\n" + call("capital_of"),
        call("capital_of", country="Atlantis") + "\n" + call("capital_of", country="France"),
        "Paris.",
    ]
    episode = await play(turns, pool, environment, chat_tokenizer)
    assert [c.outcome for c in episode.calls] == [
        "malformed", "unknown_tool", *["invalid_arguments"] * 3, "tool_error", "ok",
    ]  # fmt: skip
    assert all('"error"' in c.output for c in episode.calls[:-1])
    assert "Atlantis" in episode.calls[5].output
    score = episode.score
    assert (score.solved, score.calls, score.recall) == (1, 7, 0.5)
    assert score.value == pytest.approx(2 * 0.5 * (1 / 7) / (0.5 + 1 / 7), abs=1e-5)
    observations = [m.content for m in episode.messages if m.role == "tool"]
    assert observations == [c.output for c in episode.calls]


async def test_an_irrelevant_tool_runs_but_solves_nothing(pool, environment, chat_tokenizer):
    episode = await play([call("mayor_of", city="Paris"), "Anne."], pool, environment, chat_tokenizer)
    assert episode.calls[0].ok and episode.reward == 0 and episode.score.calls == 1


def echoing(environment: ToolEnvironment) -> ToolEnvironment:
    """The same with tools that repeat their argument, and raise no error for one that they do not know."""
    tools = []
    for tool in environment.tools:
        name, (parameter,) = tool.spec.name, tool.spec.parameters["properties"]
        code = tool.code.replace("raise ValueError('unknown ", f"return {{'{parameter}': {parameter}}} #")
        code = code.replace("return {'" + name, f"return {{'{parameter}': {parameter}, '{name}")
        tools.append(msgspec.structs.replace(tool, code=code))
    return msgspec.structs.replace(environment, tools=tools)


async def test_a_policy_that_passes_lists_of_guesses_earns_nothing(pool, environment, chat_tokenizer):
    asked = echoing(environment)
    await check_environments([asked], chat_tokenizer, pool, CONFIG)
    right = call("capital_of", country="France") + call("population_of", city="Paris")
    honest = await play([right, "Done."], pool, asked, chat_tokenizer)
    assert honest.reward == pytest.approx(1, abs=1e-5) and '"city":"Paris"' in honest.calls[1].output
    cities, people = "London, Rome, Paris, Oslo", ", ".join(str(2_102_000 + 50 * n) for n in range(40))
    listed = call("capital_of", country=cities) + call("population_of", city=people)
    for guesses in (listed, call("capital_of", country="Paris") + call("population_of", city="2102650")):
        guessed = await play([guesses, "2102650"], pool, asked, chat_tokenizer)
        assert [one.ok for one in guessed.calls] == [True, True] and [one.solved for one in guessed.calls] == [[], []]
        assert (guessed.reward, guessed.score.recall, guessed.score.precision) == (0, 0, 0)


SUGGESTS = """import difflib
ROWS = {'France': 'Paris', 'Iceland': 'Reykjavik'}
def capital_of(country):
    if country in ROWS:
        return {'capital': ROWS[country], 'meant': []}
    return {'capital': None, 'meant': difflib.get_close_matches(country, ROWS.values())}
"""


async def test_a_tool_that_suggests_the_rest_of_a_guess_is_refused_at_the_start(pool, environment, chat_tokenizer):
    step = msgspec.structs.replace(environment.sub_questions[0], answer=Answer("Reykjavik"))
    made = msgspec.structs.replace(environment.reference_calls[0], arguments={"country": "Iceland"})
    asked = msgspec.structs.replace(
        environment,
        sub_questions=[step],
        reference_calls=[made],
        tools=[msgspec.structs.replace(environment.tools[0], code=SUGGESTS)],
    )
    with pytest.raises(InputError, match=r"environment france: .* called with the guess {'country': 'Reykj'}, gives"):
        await check_environments([asked], chat_tokenizer, pool, CONFIG)


async def test_ends(pool, environment, chat_tokenizer):
    again = call("capital_of", country="France")
    episode = await play([again] * 9, pool, environment, chat_tokenizer)
    assert (episode.finish, episode.turns, len(episode.calls)) == ("turn_limit", 4, 4)
    assert episode.token_ids[-1] == chat_tokenizer.eos_id, "nobody reads the last observation, so it is not appended"

    config = EpisodeConfig(max_turns=4, max_prompt_tokens=4_000, max_response_tokens=60)
    episode = await play(["so " * 500], pool, environment, chat_tokenizer, config)
    assert (episode.finish, episode.reward) == ("token_limit", 0)
    assert len(episode.token_ids) - episode.prompt_tokens == 60

    config = EpisodeConfig(max_turns=9, max_prompt_tokens=4_000, max_response_tokens=100, max_output_chars=9)
    episode = await play([again] * 9, pool, environment, chat_tokenizer, config)
    assert episode.finish == "token_limit" and episode.score.recall == 0.5
    assert len(episode.token_ids) - episode.prompt_tokens <= 100
    assert episode.calls[0].output == '{"capital... [truncated, 13 more characters]'


async def test_rendering_costs_as_much_as_is_new(pool, environment, chat_tokenizer):
    """128 turns, over 70,000 tokens: what is tokenized in a turn is what the turn adds, early and late."""

    class Counting:
        """The tokenizer, and how many tokens went through it since it was last asked."""

        eos_id, end_ids, format = chat_tokenizer.eos_id, chat_tokenizer.end_ids, chat_tokenizer.format

        def __init__(self) -> None:
            self.tokens = 0

        def encode(self, text: str) -> list[int]:
            ids = chat_tokenizer.encode(text)
            self.tokens += len(ids)
            return ids

        def decode(self, ids) -> str:
            self.tokens += len(ids)
            return chat_tokenizer.decode(ids)

        def encode_segments(self, segments):
            return chat_tokenizer.encode_segments(segments)

    turns, counting = 128, Counting()
    said = "<think>\n" + "I wonder. " * 100 + "\n</think>\n\n" + call("capital_of", country="France")
    lengths, costs, seconds = [], [], []

    class Sampler(ScriptedSampler):
        async def generate(self, token_ids, sampling, *, session=""):
            lengths.append(len(token_ids))
            costs.append(counting.tokens)
            seconds.append(time.process_time())
            return await super().generate(token_ids, sampling, session=session)

    config = EpisodeConfig(max_turns=turns, max_prompt_tokens=4_000, max_response_tokens=200_000)
    task = make_task(environment, chat_tokenizer, config, seed=3)
    policy = Sampler(chat_tokenizer, lambda session, turn, seed: said)
    episode = await run_episode(policy, pool, task, counting, config, seed=1, session="s")
    assert episode.turns == turns == len(lengths) and len(episode.token_ids) > 70_000
    new, cost = np.diff(lengths), np.diff(costs)
    np.testing.assert_array_equal(cost, new - 1)  # all but the stop token, each once
    took = np.diff(seconds)
    assert np.median(took[-32:]) < 3 * np.median(took[:32]), "with the copies of the script and of the sandbox"


class BrokenPool:
    """The sandbox's machine has died."""

    async def call(self, code, function, arguments, *, seed=0):
        infrastructure = next(o for o in Outcome if CallResult(o, None, "", "", 0.0, 0.0, "").is_infrastructure)
        return CallResult(infrastructure, None, "", "gone", 0.0, 0.0, "")


async def test_infrastructure_failures_are_never_scored(environment, chat_tokenizer):
    episode = await play([call("capital_of", country="France")] * 4, BrokenPool(), environment, chat_tokenizer)
    assert episode.is_masked and episode.finish == "masked" and episode.turns == 1
    with pytest.raises(ValueError, match="masked"):
        _ = episode.reward
    assert episode_stats([episode]) == {}


async def test_a_completion_that_is_given_up_voids_its_episode_alone(pool, environment, chat_tokenizer):
    class Failing(ScriptedSampler):
        async def generate(self, token_ids, sampling, *, session=""):
            if self.seen.get(session):
                raise RequestFailed("the model's logits are not finite")
            return await super().generate(token_ids, sampling, session=session)

    policy = Failing(chat_tokenizer, lambda session, turn, seed: call("capital_of", country="France"))
    task = make_task(environment, chat_tokenizer, CONFIG, seed=0)
    episode = await run_episode(policy, pool, task, chat_tokenizer, CONFIG, seed=1, session="s")
    assert episode.is_masked and episode.turns == 1 and len(episode.calls) == 1
    assert policy.seen == {}  # the session is given back


async def test_cancelling_releases_the_session(pool, environment, chat_tokenizer):
    policy = ScriptedSampler(chat_tokenizer, lambda session, turn, seed: call("capital_of", country="France"))
    task = make_task(environment, chat_tokenizer, CONFIG, seed=0)
    running = asyncio.ensure_future(run_episode(policy, pool, task, chat_tokenizer, CONFIG, seed=1, session="s"))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert policy.seen == {}


def test_tasks_are_seeded_and_bounded(environment, chat_tokenizer):
    def names(seed, **changes):
        config = EpisodeConfig(max_prompt_tokens=4_000, **changes)
        return list(make_task(environment, chat_tokenizer, config, seed=seed).tools)

    assert names(1) == names(1)
    orders = {tuple(names(seed, distractors_per_band=1)) for seed in range(20)}
    assert len(orders) > 3
    for order in orders:
        assert {"capital_of", "population_of", "boiling_point"} <= set(order) and len(order) == 4
    assert set(names(1, distractors_per_band=0)) == {"capital_of", "population_of"}
    with pytest.raises(ValueError, match="max_prompt_tokens is 20"):
        make_task(environment, chat_tokenizer, EpisodeConfig(max_prompt_tokens=20), seed=0)


async def test_irrelevant_tools_that_only_some_group_draws_are_looked_at_too(pool, chat_tokenizer) -> None:
    """A run ended at the first group that drew them, and could not go on."""
    config = EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1)
    without = dataclasses.replace(config, distractors_per_band=0)

    def refused(environment: ToolEnvironment, seed: int) -> bool:
        try:
            make_task(environment, chat_tokenizer, config, seed=seed)
        except InputError:
            return True
        return False

    high = [table_tool(f"tool_{letter}", "x", {"a": 1}) for letter in "abcd"]
    long = msgspec.structs.replace(high[3].spec, description="Looks a thing up. " * 30)
    for band, message in (
        ([*high[:3], CodeTool(long, high[3].code)], "environment france: its prompt has .* tokens"),
        ([*high[:3], make_environment().tools[0]], "environment france: two tools have one name"),
    ):
        environment = msgspec.structs.replace(make_environment(), distractors={"high": band})
        assert {refused(environment, seed) for seed in range(20)} == {True, False}
        with pytest.raises(InputError, match=message):
            await check_environments([environment], chat_tokenizer, pool, config)
        with pytest.raises(InputError, match=message):
            await evaluate(None, [environment], chat_tokenizer, pool, config=EvalConfig(episode=config))
        await check_environments([environment], chat_tokenizer, pool, without)
