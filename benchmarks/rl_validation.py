"""Compare the simulation with a real GRPO run of a tiny model, on rollout servers whose latencies are sleeps.

The run is the product: `astra_jax.grpo.train`, its batches, the policy over HTTP, the sandbox, publishing, syncs,
updates. Only the servers' sampling is given: turns of given lengths, each token of which takes a given time, whatever
the load. Other durations are read from the run's own metrics (update, publish, sync) and from its policy (the overhead
of a turn), and given to the simulation.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from aiohttp import web

from astra_jax.grpo import train as grpo
from astra_jax.grpo.config import GRPOConfig
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.rollout.sampler import Completion, Sampling
from astra_jax.rollout.vllm.publishing import Publisher
from astra_jax.rollout.vllm.sampler import VLLMConfig, VLLMSampler
from astra_jax.tokenizer import ChatTokenizer
from benchmarks import rows
from benchmarks.simulated_fleet import ServerSpeed, SimulatedRun, SimulatedTurn, SimulatedWork, simulated
from sandbox import SandboxConfig, SandboxPool
from synthesis.core.chatml import QWEN3
from synthesis.core.records import Message

sys.path.append(str(rows.ROOT / "tests" / "worlds"))
from emulated_rollouts import EmulatedServer, spans  # noqa: E402
from rollout_world import CAPITAL, DISTRACTORS, POPULATION, call, make_environment, tiny_model  # noqa: E402

SERVERS, BATCH, GROUP, UPDATES, SIMULATED = 2, 6, 2, 20, 400
LENGTHS = (40, 80)
"""Lengths of a turn, in tokens."""
GOES_ON, MOST_CALLS = 0.6, 3
"""Share of turns that call a tool, of the turns before an episode's last possible one."""
EPISODE = EpisodeConfig(max_turns=4, max_prompt_tokens=700, max_response_tokens=700, distractors_per_band=1)


class SleepingServer(EmulatedServer):
    """Server that samples turns of given lengths, each token in a given time, whatever the load."""

    def __init__(self, tokenizer: ChatTokenizer, token_seconds: float) -> None:
        super().__init__()
        self._tokenizer, self._token_seconds = tokenizer, token_seconds
        self._filler = tokenizer.encode(" is" * LENGTHS[1])
        (self._response,) = tokenizer.encode("<tool_response>")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not (body := await request.json()):
            return web.json_response({}, status=400)
        begun, draws = self.version, random.Random(body["sampling_params"]["seed"])
        calls = body["token_ids"].count(self._response) < MOST_CALLS and draws.random() < GOES_ON
        tail = self._tokenizer.encode((call("capital_of", country="France") if calls else ".") + "<|im_end|>")
        drawn = [*self._filler[: max(0, draws.randint(*LENGTHS) - len(tail))], *tail]
        await asyncio.sleep(len(drawn) * self._token_seconds)
        first = len(drawn) // 2
        choice = {
            "token_ids": drawn,
            "logprobs": {"content": [{"logprob": -1.0}] * len(drawn)},
            "weight_versions": spans([begun] * first + [self.version] * (len(drawn) - first)),
            "finish_reason": "stop",
        }
        return web.json_response({"choices": [choice]})


class TimedPolicy(VLLMSampler):
    """Notes what a turn takes beside its tokens: the request's own time, and the episode's until the next one."""

    def __init__(self, *arguments: Any, token_seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._token_seconds = token_seconds
        self._ended: dict[str, float] = {}
        self.requests: list[float] = []
        self.pauses: list[float] = []
        self.lengths: list[int] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """See `Sampler.generate`."""
        begun = time.perf_counter()
        if session in self._ended:
            self.pauses.append(begun - self._ended[session])
        completion = await super().generate(token_ids, sampling, session=session)
        self._ended[session] = time.perf_counter()
        tokens = len(completion.token_ids)
        self.requests.append(max(0.0, self._ended[session] - begun - tokens * self._token_seconds))
        self.lengths.append(tokens)
        return completion


def _tokenizer(folder: Path) -> ChatTokenizer:
    specs = [tool.spec for tool in (CAPITAL, POPULATION, *DISTRACTORS["high"], *DISTRACTORS["low"])]
    messages = [Message("user", make_environment().question), Message("assistant", "It is."), Message("tool", "{}")]
    text = "".join(segment.text for segment in QWEN3.render(messages, specs))
    return ChatTokenizer.train([text] * 4, 512, folder)


async def _real(folder: Path, async_steps: int, token_seconds: float) -> tuple[list[dict[str, float]], TimedPolicy]:
    """The rows of a real run, and its policy."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer(folder / "tokenizer")
    model = tiny_model(tokenizer.vocab_size, 2048)
    config = GRPOConfig(
        steps=UPDATES, batch_size=BATCH, group_size=GROUP, micro_batch_size=1, row_buckets=(1400,), episode=EPISODE,
        checkpoint_every=1_000, episodes_every=0, async_rollouts=async_steps > 0,
        max_off_policy_steps=async_steps or 1,
    )  # fmt: skip
    servers = [SleepingServer(tokenizer, token_seconds) for _ in range(SERVERS)]
    try:
        for server in servers:
            server.config = model.to_hf()
            server.described = {"vocab_size": model.vocab_size}
            await server.start()
        options = VLLMConfig(
            tuple(server.url for server in servers), max_off_policy_steps=async_steps, answer_seconds=60.0
        )
        publisher = Publisher(folder / "policy", model, dtype="float32")
        async with SandboxPool(SandboxConfig()) as pool:
            policy = TimedPolicy(options, publisher, vocabulary="", max_length=1400, token_seconds=token_seconds)
            async with policy:
                environments = [make_environment(f"e{i}") for i in range(4)]
                start = lambda: model.init(jax.random.key(0))  # noqa: E731
                arguments = (config, model, start, environments, tokenizer, pool, folder / "run")
                result = await grpo.train(*arguments, policy=policy, progress=False)
        return result.history, policy
    finally:
        for server in servers:
            await server.stop()


def _turns(draws: random.Random, policy: TimedPolicy) -> list[SimulatedTurn]:
    """An episode, of lengths and delays that the real run had; a group waits for its slowest, so no mean would do."""
    calls = 0
    while calls < MOST_CALLS and draws.random() < GOES_ON:
        calls += 1
    turns = []
    for place in range(calls + 1):
        beside = draws.choice(policy.requests) + (draws.choice(policy.pauses) if place < calls else 0.0)
        turns.append(SimulatedTurn(draws.choice(policy.lengths), beside, int(place < calls)))
    return turns


def validated(folder: Path, *, async_steps: int, token_seconds: float = 0.02) -> dict[str, Any]:
    """A row: what both come to, and by how much they differ."""
    history, policy = asyncio.run(_real(folder, async_steps, token_seconds))
    steady = history[1 + async_steps :]

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in steady)

    parts = {name: mean(f"seconds/{name}") for name in ("wait", "update", "publish", "sync", "step")}
    rest = parts["step"] - sum(parts[name] for name in ("wait", "update", "publish", "sync"))
    sampled = sum(row["filling/groups_sampled"] for row in history)
    valid = sum(row["filling/valid_share"] * row["filling/groups_sampled"] for row in history) / sampled
    beside = (sum(policy.requests) + sum(policy.pauses)) / len(policy.requests)
    speed = ServerSpeed(
        lambda sequences, cached: token_seconds, 0.0, 10**6, read_seconds=parts["sync"], recomputes=False
    )
    config, updates = GRPOConfig(), random.Random(0)
    work = SimulatedWork(lambda draws: _turns(draws, policy), EPISODE.max_prompt_tokens, 700, None, GROUP, BATCH)
    run = SimulatedRun(
        work, [speed] * SERVERS, lambda tokens: updates.choice(steady)["seconds/update"] + rest, parts["publish"],
        sandboxes=10_000, async_steps=async_steps, updates=SIMULATED, concurrent_groups=config.concurrent_groups,
        oversample=config.oversample,
    )  # fmt: skip
    outcome = simulated(run)
    found = {"step_seconds": outcome.mean("step"), "mean_age": outcome.mean("age")}
    real = {"step_seconds": parts["step"], "mean_age": mean("filling/mean_age")}
    return {
        "case": "validation",
        "async_steps": async_steps,
        "updates": len(steady),
        "real": {name: round(value, 3) for name, value in real.items()},
        "simulated": {name: round(value, 3) for name, value in found.items()},
        "step_error": round(found["step_seconds"] / real["step_seconds"] - 1, 4),
        "age_error": round(found["mean_age"] - real["mean_age"], 3),
        "fed": {name: round(value, 3) for name, value in (parts | {"rest": rest, "beside_a_turn": beside}).items()},
        "valid_share": round(valid, 3),
    }
