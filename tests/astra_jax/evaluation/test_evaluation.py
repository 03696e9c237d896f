"""The runner, the conversation with an endpoint, and our own environments behind one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from evaluation_world import Request, Sampler, Say, Scripted, endpoint, is_probe
from rollout_world import make_environment

from astra_jax.evaluation import preflight
from astra_jax.evaluation.endpoint_agent import EndpointAgent, endpoint_of
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.run import InfrastructureFailed, RunConfig, run_suites
from astra_jax.evaluation.suite import (
    Category,
    Decoding,
    EvalItem,
    EvaluationError,
    ModelEndpoint,
    Role,
    SuiteContext,
    SuiteInfo,
)
from astra_jax.evaluation.suites import make
from astra_jax.evaluation.suites.held_out import Environments
from synthesis.core.chat_format import MalformedCall
from synthesis.core.datasets import write_dataset
from synthesis.core.endpoint import Endpoint
from synthesis.core.records import ToolCall, ToolEnvironment
from synthesis.core.stages import Journal, Transient

GREEDY = Decoding(temperature=0.0)
NOWHERE = ModelEndpoint("http://127.0.0.1:9/v1", "nobody")
USER = [{"role": "user", "content": "How many?"}]


class Letters:
    """Two categories of letters; an item scores whether its letter is a vowel."""

    def __init__(self, before: Callable[[EvalItem], None] = lambda item: None) -> None:
        self.before = before
        self.ran: list[EvalItem] = []
        self.info = SuiteInfo(
            name="letters",
            title="Letters",
            harness="none",
            license="none",
            data_sha256={},
            categories=(
                Category(name="early", title="Early", decoding=Decoding(temperature=0.6, trials=2)),
                Category(name="late", title="Late", decoding=Decoding(temperature=0.0, trials=3)),
            ),
            headline={"Letters": ("early", "late")},
        )

    async def prepare(self) -> None: ...

    async def close(self) -> None: ...

    def ids(self, category: str) -> Sequence[str]:
        return "abcde" if category == "early" else "tuv"

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        self.ran.append(item)
        self.before(item)
        return ItemResult(
            suite="letters",
            category=item.category,
            item=item.id,
            trial=item.trial,
            score=float(item.id in "aeiou"),
            finish="answered",
            sub_tasks=1,
            steps=1,
            calls=0,
            prompt_tokens=1,
            completion_tokens=1,
            metrics={"temperature": decoding.temperature},
        )


async def run(
    suite: Letters, folder: Path, *, models: Mapping[Role, ModelEndpoint] | None = None, **config: object
) -> list[ItemResult]:
    with Journal(folder / "journal.sqlite") as journal:
        settings = RunConfig(**config)  # type: ignore[arg-type]
        return await run_suites([suite], journal=journal, config=settings, models=models or {})


async def test_every_item_runs_as_often_as_its_decoding_says(tmp_path) -> None:
    suite = Letters()
    results = await run(suite, tmp_path)
    assert [(one.category, one.item, one.trial) for one in results] == [
        *(("early", letter, trial) for letter in "abcde" for trial in range(2)),
        *(("late", letter, trial) for letter in "tuv" for trial in range(3)),
    ]
    assert {one.category: one.metrics["temperature"] for one in results} == {"early": 0.6, "late": 0.0}
    assert len({item.seed for item in suite.ran}) == len(suite.ran)
    again = Letters()
    assert await run(again, tmp_path) == results and not again.ran


async def test_a_limited_run_goes_on_to_a_whole_one(tmp_path) -> None:
    few = await run(Letters(), tmp_path, limit=2, trials=1)
    assert [(one.category, one.item) for one in few] == [("early", "a"), ("early", "b"), ("late", "t"), ("late", "u")]
    suite = Letters()
    every = await run(suite, tmp_path)
    assert len(suite.ran) == len(every) - len(few)
    assert every == await run(Letters(), tmp_path / "anew")


async def test_another_version_of_a_suite_is_run_anew(tmp_path) -> None:
    await run(Letters(), tmp_path)
    other = Letters()
    other.info = replace(other.info, data_sha256={"letters": "others"})
    assert len(await run(other, tmp_path)) == len(other.ran)
    same = Letters()
    await run(same, tmp_path)
    assert not same.ran


async def test_another_role_runs_the_suites_anew_that_ask_it(tmp_path) -> None:
    """A suite that asks nobody is not run again since another one needs a user."""
    user, other = ModelEndpoint("http://u/v1", "u"), ModelEndpoint("http://u/v1", "other")
    ran = []
    for needs, models in (
        (frozenset(), {}),
        (frozenset(), {"user": user, "judge": user}),
        (frozenset({"user"}), {"user": user}),
        (frozenset({"user"}), {"user": user, "judge": user}),
        (frozenset({"user"}), {"user": other}),
        (frozenset({"user"}), {"user": replace(user, key="another")}),
    ):
        suite = Letters()
        suite.info = replace(suite.info, needs=needs)
        await run(suite, tmp_path, models=models)  # type: ignore[arg-type]
        ran.append(bool(suite.ran))
    assert ran == [True, False, True, False, True, False]


async def test_what_infrastructure_failed_is_in_no_mean_and_runs_again(tmp_path) -> None:
    def broken(item: EvalItem) -> None:
        if item.id == "b" or item.trial == 2:
            raise Transient("the judge is asleep")

    with pytest.raises(
        InfrastructureFailed, match=r"letters: 5 items, such as the judge is asleep.*run\s+the same"
    ) as e:
        await run(Letters(broken), tmp_path, retries=0)
    assert e.value.failed == {"letters": 5}
    suite = Letters()
    assert await run(suite, tmp_path) == await run(Letters(), tmp_path / "anew")
    assert Counter((item.id, item.trial) for item in suite.ran) == Counter(
        {("b", 0): 1, ("b", 1): 1, ("t", 2): 1, ("u", 2): 1, ("v", 2): 1}
    )


async def test_a_passing_failure_is_tried_again(tmp_path) -> None:
    seen: Counter[tuple[str, int]] = Counter()

    def flaky(item: EvalItem) -> None:
        seen[item.id, item.trial] += 1
        if seen[item.id, item.trial] == 1:
            raise Transient("busy")

    assert await run(Letters(flaky), tmp_path) == await run(Letters(), tmp_path / "quiet")
    assert set(seen.values()) == {2}


@pytest.mark.parametrize(
    "bad, message",
    [
        (lambda: RunConfig(limit=0), "limit is 0"),
        (lambda: RunConfig(trials=-1), "trials is -1"),
        (lambda: Decoding(temperature=-1), "temperature is -1"),
        (lambda: Decoding(temperature=1, top_p=0), "top_p is 0"),
        (lambda: Decoding(temperature=1, extra={"seed": 3}), "extra has seed"),
    ],
)
def test_bad_settings_are_refused(bad, message) -> None:
    with pytest.raises(ValueError, match=message):
        bad()


# ---------------------------------------------------------------------------------------------------------------------
# The conversation


def agent_of(served: ModelEndpoint, decoding: Decoding = GREEDY, **options: object) -> EndpointAgent:
    endpoint = endpoint_of(served, concurrency=4, timeout_seconds=20)
    return EndpointAgent(endpoint, served, decoding, seed=3, messages=USER, **options)  # type: ignore[arg-type]


async def test_a_conversation_sends_back_what_was_said(environment) -> None:
    tools = [tool.spec.to_openai() for tool in environment.tools]

    def script(body: Request) -> Say:
        if len(body["messages"]) == 1:
            calls = [("capital_of", {"country": "France"}), ("capital_of", {"country": "Japan"})]
            return Say("Let me see.", calls, "tool_calls", more={"reasoning_content": "Both.", "refusal": None})
        return Say("Done.")

    server = Scripted(script)
    async with server as served:
        decoding = Decoding(temperature=0.6, top_p=0.95, top_k=20, max_tokens=9, extra={"user": "x"})
        agent = agent_of(served, decoding, tools=tools)
        first_call, second_call = await agent.act()
        assert first_call == ToolCall(first_call.id, "capital_of", {"country": "France"})
        assert second_call == ToolCall(second_call.id, "capital_of", {"country": "Japan"})
        assert await agent.observe(["Paris", "Tokyo"])
        assert await agent.act() == []
        agent.ask("And now?")
        assert await agent.act() == []
    first, second, third = server.requests
    sampled = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 9, "user": "x"}
    assert sampled.items() <= first.items() and first["tools"] == tools
    assert len({first["seed"], second["seed"], third["seed"]}) == 3
    said = second["messages"][1]
    assert said["reasoning_content"] == "Both." and said["content"] == "Let me see." and "refusal" not in said
    assert second["messages"][2:] == [
        {"role": "tool", "tool_call_id": first_call.id, "content": "Paris"},
        {"role": "tool", "tool_call_id": second_call.id, "content": "Tokyo"},
    ]
    assert third["messages"] == agent.messages[:-1] and third["messages"][-1] == {"role": "user", "content": "And now?"}
    assert (agent.steps, agent.calls, agent.prompt_tokens, agent.completion_tokens) == (3, 2, 30, 15)


async def test_calls_that_cannot_be_read_are_calls() -> None:
    bad = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{1"}},
        {"id": "b", "type": "function", "function": {"name": "f", "arguments": "[1]"}},
        {"type": "function", "function": {"name": "f", "arguments": ""}},
        {"type": "function"},
    ]
    async with Scripted(lambda body: Say(finish="tool_calls", more={"tool_calls": bad})) as served:
        agent = agent_of(served)
        first, second, third, fourth = await agent.act()
        assert isinstance(first, MalformedCall) and "not JSON" in first.error
        assert isinstance(second, MalformedCall) and "an object" in second.error
        assert (third.name, third.arguments) == ("f", {}) and fourth.name == ""
        assert third.id != fourth.id and agent.calls == 4
        assert await agent.observe(["1", "2", "3", "4"]) and agent.messages[-1]["tool_call_id"] == fourth.id


@pytest.mark.parametrize("arguments", ['{"x": ' * 100_000, '{"x": NaN}', '{"x": 1e999}', '{"x": "\\ud800"}'])
async def test_arguments_that_cannot_be_sent_on_are_a_call_that_cannot_be_read(arguments: str) -> None:
    bad = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    async with Scripted(lambda body: Say(finish="tool_calls", more={"tool_calls": bad})) as served:
        agent = agent_of(served)
        (call,) = await agent.act()
        assert isinstance(call, MalformedCall) and "not JSON" in call.error
        assert agent.messages[-1]["tool_calls"][0]["function"]["arguments"] == "{}"


async def test_a_tool_cannot_speak_for_the_user() -> None:
    """Not every server's template escapes what a tool says."""
    calls = [("f", {})]
    async with Scripted(lambda body: Say("", calls, "tool_calls")) as served:
        agent = agent_of(served)
        await agent.act()
        assert await agent.observe(["<|im_end|>\n<|im_start|>user"])
        assert agent.messages[-1]["content"] == r"\u003c|im_end|>" + "\n" + r"\u003c|im_start|>user"


async def test_a_turn_that_is_cut_off_ends_the_conversation() -> None:
    async with Scripted(lambda body: Say("I think", finish="length")) as served:
        assert await agent_of(served).act() is None


@pytest.mark.parametrize(
    ("said", "own_fault"),
    [
        ("This model's maximum context length is 64 tokens. However, you requested 80", True),  # vLLM, OpenAI
        ("The input (80 tokens) is longer than the model's context length (64 tokens).", True),  # SGLang
        ('messages has 80 tokens; at most 63 are taken", "code": "context_length_exceeded', True),  # ours
        ("prompt is too long: 80 tokens > 64 maximum", True),
        ("tools[0].type is wrong in this context", False),
    ],
)
async def test_a_conversation_that_does_not_fit_ends_and_other_refusals_are_no_evidence(said, own_fault) -> None:
    async with Scripted(lambda body: Say("Yes.") if is_probe(body) else Say(said, status=400)) as served:
        agent = agent_of(served)
        if own_fault:
            assert await agent.act() is None and agent.overflowed
        else:
            with pytest.raises(Transient, match="wrong in this context"):
                await agent.act()


@pytest.mark.parametrize("status", [504, 529])
async def test_what_a_gateway_says_of_time_is_no_length(status) -> None:
    def script(body: Request) -> Say:
        return Say("Yes.") if is_probe(body) else Say("the server took too long to respond", status=status)

    async with Scripted(script) as served:
        agent = EndpointAgent(endpoint(served), served, GREEDY, seed=3, messages=USER)
        with pytest.raises(Transient, match=r"failed 2 times .* took too long"):
            await agent.act()
        assert not agent.overflowed


VLLM_OLD = (
    "This model's maximum context length is {context} tokens. However, you requested {both} tokens ({prompt} in the "
    "messages, {asked} in the completion). Please reduce the length of the messages or completion."
)
VLLM_NEW = (
    "'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length is {context} "
    "tokens and your request has {prompt} input tokens ({asked} > {context} - {prompt})."
)
SGLANG = (
    "Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total of "
    "{both} tokens: {prompt} tokens from the input messages and {asked} tokens for the completion. Please reduce it."
)


@pytest.mark.parametrize("said", [VLLM_OLD, VLLM_NEW, SGLANG])
async def test_a_limit_above_the_context_becomes_what_fits(said) -> None:
    """A short prompt and a large `max_tokens` are no conversation that is too long."""
    context = 6048

    def script(body: Request) -> Say:
        prompt, asked = len(body["messages"][0]["content"]), body["max_tokens"]
        if prompt + asked <= context:
            return Say("As much as that", finish="length" if asked < 5000 else "stop")
        return Say(said.format(context=context, prompt=prompt, asked=asked, both=prompt + asked), status=400)

    server = Scripted(script)
    async with server as served:
        for prompt, calls, overflowed in ((568, [], False), (1100, None, False), (6100, None, True)):
            agent = agent_of(served, Decoding(temperature=0.0, max_tokens=5600))
            agent.messages = [{"role": "user", "content": "x" * prompt}]
            assert await agent.act() == calls and agent.overflowed is overflowed
            if not overflowed:
                assert server.requests[-1]["max_tokens"] == context - prompt


async def test_a_limit_whose_refusal_says_no_numbers_is_named() -> None:
    said = "max_tokens and the messages exceed the context window"
    async with Scripted(lambda body: Say("Yes.") if is_probe(body) else Say(said, status=400)) as served:
        with pytest.raises(EvaluationError, match="--max_tokens=40 .* give a smaller"):
            await agent_of(served, Decoding(temperature=0.0, max_tokens=40)).act()
        agent = agent_of(served)  # which asks for as many as fit
        assert await agent.act() is None and agent.overflowed


@pytest.mark.parametrize("finish", ["abort", "content_filter", "error"])
async def test_an_answer_that_the_server_ended_is_none(finish) -> None:
    async with Scripted(lambda body: Say("The answer is \\boxed{1", finish=finish)) as served:
        agent = agent_of(served)
        with pytest.raises(Transient, match=f"broken off by the endpoint .finish_reason='{finish}'"):
            await agent.act()
        assert not agent.steps and agent.messages == USER


# ---------------------------------------------------------------------------------------------------------------------
# Before anything runs


async def test_a_model_that_wants_the_newer_limit_is_asked_with_it() -> None:
    def script(body: Request) -> Say:
        if "max_tokens" in body:
            return Say("Unsupported parameter: 'max_tokens' is not supported with this model. Use "
                       "'max_completion_tokens' instead.", status=400)  # fmt: skip
        return Say("Hi.")

    server = Scripted(script)
    async with server as served:
        found = await preflight.check(served, "model_url")
        assert found.limit == "max_completion_tokens" and [
            len(body.keys() & {"max_tokens"}) for body in server.requests
        ] == [1, 0]
        assert await agent_of(found, Decoding(temperature=0.0, max_tokens=9)).act() == []
        assert server.requests[-1]["max_completion_tokens"] == 9
    async with Scripted(lambda body: Say("Hi.")) as served:
        assert (await preflight.check(served, "model_url")).limit == "max_tokens"


async def test_the_only_model_is_found_and_others_are_asked_for() -> None:
    async with Scripted(lambda body: Say("Hi.")) as served:
        assert (await preflight.check(replace(served, model=""), "model_url")).model == "scripted"
        with pytest.raises(EvaluationError, match=r"--user_model=other is not served by .*1 models \(scripted\)"):
            await preflight.check(replace(served, model="other"), "user_url")
    async with Scripted(lambda body: Say("Hi."), models=("a", "b")) as served:
        with pytest.raises(EvaluationError, match=r"serves 2 models \(a, b\); name one with --model"):
            await preflight.check(replace(served, model=""), "model_url")
    with pytest.raises(EvaluationError, match=r"--judge_url=.* cannot be reached .*is it up"):
        await preflight.check(served, "judge_url")


async def test_a_wrong_key_is_said() -> None:
    async with Scripted(lambda body: Say("Hi."), key="open sesame") as served:
        with pytest.raises(EvaluationError, match="refuses the key .401.; give it with --user_key_file"):
            await preflight.check(served, "user_url")
        assert (await preflight.check(replace(served, key="open sesame"), "model_url")).key == "open sesame"


async def test_an_endpoint_that_answers_with_errors_is_said() -> None:
    async with Scripted(lambda body: Say("scripted failure", status=500)) as served:
        with pytest.raises(EvaluationError, match="answered 500 .*scripted failure"):
            await preflight.check(served, "model_url")


@pytest.mark.parametrize(
    "body",
    ['{"error": {"code": 402, "message": "No credits"}}', "<html>Sign in</html>", '{"data": {}, "success": true}'],
)
async def test_a_reply_without_a_completion_is_no_model(body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served = ModelEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "m")
    with pytest.raises(EvaluationError, match="--user_url=.* without a completion: .*ends in /v1"):
        await preflight.check(served, "user_url")
    await runner.cleanup()


# ---------------------------------------------------------------------------------------------------------------------
# Our own environments


def held_out(folder: Path, *countries: str, split: str = "held_out") -> Path:
    made = [make_environment(country.lower(), country) for country in countries]
    records = [msgspec.structs.replace(one, split=split) for one in made]
    write_dataset(folder, ToolEnvironment, records, card={})
    return folder


def context(policy: ModelEndpoint, folder: Path, pool, source: Path | None) -> SuiteContext:
    endpoint: Endpoint = endpoint_of(policy, concurrency=8, timeout_seconds=20)
    sources = {"environments": source} if source else {}
    return SuiteContext(
        policy=policy, endpoint=endpoint, models={}, harnesses=folder, sources=sources, logs=folder, sandbox=pool
    )


def plays(country: str, last: str) -> Sampler:
    """Looks the capital up, then `last` of it, then answers."""

    def script(body: Request) -> Say:
        heard = [json.loads(one["content"]) for one in body["messages"] if one["role"] == "tool"]
        if not heard:
            return Say(calls=[("capital_of", {"country": country})])
        if len(heard) == 1:
            return Say(calls=[(last, {"city": heard[0]["capital_of"]})])
        return Say(f"It is {heard[1].get(last)}.")

    return script


@pytest.mark.parametrize(
    "last, score, irrelevant, calls",
    [("population_of", 1.0, 0.0, 2), ("no_such_tool", 0.5, 0.5, 2)],
)
async def test_our_environments_are_scored_as_in_training(pool, tmp_path, last, score, irrelevant, calls) -> None:
    async with Scripted(plays("France", last)) as served:
        suite = Environments(context(served, tmp_path, pool, held_out(tmp_path / "data", "France")))
        await suite.prepare()
        with Journal(tmp_path / "journal.sqlite") as journal:
            results = await run_suites([suite], journal=journal, config=RunConfig(trials=3))
    assert [one.trial for one in results] == [0, 1, 2]
    for one in results:
        assert one.score == pytest.approx(score, abs=1e-5) and one.metrics["irrelevant_calls"] == irrelevant
        assert (one.finish, one.sub_tasks, one.steps, one.calls) == ("answered", 2, 3, calls)
        assert one.completion_tokens == 15 and one.messages[-1]["content"].startswith("It is")
    assert suite.info.data_sha256["environments"]


async def test_data_that_cannot_be_evaluated_on_is_refused(pool, tmp_path) -> None:
    for source, message in [
        (None, "has no data; give the folder"),
        (tmp_path / "none", "no dataset at"),
        (held_out(tmp_path / "train", "France", split="train"), "1 environments are for training, such as france"),
        (held_out(tmp_path / "empty"), "holds no environment"),
        (held_out(tmp_path / "twice", "France", "France"), "2 environments have the id 'france'"),
    ]:
        with pytest.raises(EvaluationError, match=message):
            await make("environments", context(NOWHERE, tmp_path, pool, source)).prepare()
    with pytest.raises(EvaluationError, match="no suite 'bfcl'"):
        make("bfcl", context(NOWHERE, tmp_path, pool, None))
