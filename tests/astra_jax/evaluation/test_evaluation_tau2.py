"""tau2-bench by its own harness, over real HTTP: known players get known figures, and no failure is left out of a mean.

What runs the harness wants checkouts of both versions, named by ASTRA_TAU2_V1 (tag v1.0.1) and ASTRA_TAU2_V0 (v0.2.0);
ASTRA_HARNESSES keeps the environment (350 MB) between runs, ASTRA_TAU2_ITEMS is how many tasks of a domain are run.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from astra_jax.evaluation.endpoint_agent import endpoint_of
from astra_jax.evaluation.harness import fingerprint
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.run import InfrastructureFailed, RunConfig, run_suites
from astra_jax.evaluation.suite import Decoding, EvalItem, EvaluationError, ModelEndpoint, SuiteContext
from astra_jax.evaluation.suites import make
from astra_jax.evaluation.suites import tau2 as suite_module
from astra_jax.evaluation.suites.tau2 import Tau2, Tau2Paper
from synthesis.core.stages import Journal, rng_for

WRITES = ("cancel_", "exchange_", "modify_", "return_")
"""How the tools of retail begin that change its database."""
REFUSED = {"tau2": {"105"}, "tau2_v0_2": {"12", "105"}}
"""Tasks of retail whose only gold write the database refuses: nothing is to be changed in them either."""


def context(tmp_path: Path, url: str = "http://127.0.0.1:9/v1", **changed: Any) -> SuiteContext:
    policy = ModelEndpoint(url, changed.pop("policy", "nobody"))
    roles = changed.pop("roles", {"user": "usersim", "judge": "judge"})
    return SuiteContext(
        policy=policy,
        endpoint=endpoint_of(policy, concurrency=4, timeout_seconds=60),
        models={role: ModelEndpoint(url, model) for role, model in roles.items()},
        harnesses=Path(os.environ.get("ASTRA_HARNESSES") or tmp_path / "harnesses"),
        sources=changed.pop("sources", {}),
        logs=tmp_path / "logs",
    )


# What is said before anything runs.


@pytest.mark.parametrize(
    ("suite", "roles", "missing"),
    [("tau2", {"user": "u"}, "judge"), ("tau2", {"judge": "j"}, "user"), ("tau2_v0_2", {}, "user")],
)
def test_a_missing_role_is_named(tmp_path: Path, suite: str, roles: dict[str, str], missing: str) -> None:
    with pytest.raises(EvaluationError, match=f"{suite} needs a model for the {missing}"):
        make(suite, context(tmp_path, roles=roles))


def test_each_version_declares_what_it_needs(tmp_path: Path) -> None:
    whole, paper = (make(name, context(tmp_path)).info for name in ("tau2", "tau2_v0_2"))
    assert whole.needs == {"user", "judge"} and paper.needs == {"user"}
    for info in (whole, paper):
        assert info.license == "MIT" and info.headline == {"tau2-bench": ("retail", "telecom")}
        assert {(one.decoding.temperature, one.decoding.trials) for one in info.categories} == {(0.0, 4)}


def fake_checkout(folder: Path, version: str) -> Path:
    """Every file that is checked, with other content."""
    for patterns in suite_module._PARTS.values():
        for pattern in patterns:
            file = folder / pattern.replace("**/*", "registry")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}")
    (folder / "pyproject.toml").write_text(f'[project]\nname = "tau2"\nversion = "{version}"\n')
    return folder


@pytest.mark.parametrize("suite", ["tau2", "tau2_v0_2"])
async def test_a_folder_that_is_not_the_pinned_version_is_refused_with_the_commands(tmp_path: Path, suite: str) -> None:
    tag = {"tau2": "v1.0.1", "tau2_v0_2": "v0.2.0"}[suite]
    version = {"tau2": "1.0.1", "tau2_v0_2": "0.2.1-dev"}[suite]
    commands = "git clone https://github.com/sierra-research/tau2-bench && git -C tau2-bench checkout " + tag
    (tmp_path / "empty").mkdir()
    incomplete = fake_checkout(tmp_path / "incomplete", version)
    (incomplete / "data/tau2/domains/retail/tasks.json").unlink()
    cases = {
        "no folder is named": None,
        "is not a checkout": tmp_path / "empty",
        f"is tau2 0.1.0, not tau2 {version}": fake_checkout(tmp_path / "old", "0.1.0"),
        f"is not that of {tag}": fake_checkout(tmp_path / "changed", version),
    }
    for problem, folder in cases.items():
        with pytest.raises(EvaluationError) as error:
            await make(suite, context(tmp_path, sources={suite: folder} if folder else {})).prepare()
        assert problem in str(error.value) and commands in str(error.value)
    with pytest.raises(FileNotFoundError, match="retail/tasks.json"):
        fingerprint(incomplete, suite_module._PARTS["retail"])
    assert not (tmp_path / "harnesses").exists()


def test_a_fingerprint_is_what_git_knows_of_a_commit(tmp_path: Path) -> None:
    for name, content in {"src/b.py": "b\n", "src/deep/a.py": "ä", "src/notes.md": "x", "data.json": "{}"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    blobs = {line.split("\t")[1]: line.split()[1] for line in listed.splitlines()}
    text = "".join(f"{blobs[name]} {name}\n" for name in ("data.json", "src/b.py", "src/deep/a.py"))
    expected = subprocess.run(["sha256sum"], input=text, capture_output=True, text=True, check=True).stdout.split()[0]
    assert fingerprint(tmp_path, ("src/**/*.py", "data.json")) == expected


def test_the_pins_are_exact_and_within_what_the_harness_allows() -> None:
    pins = dict(line.split("==") for line in suite_module._PINS.read_text().split())
    assert len(pins) > 50 and "tau2" not in pins  # PyPI's tau2 is something else
    assert (1, 80, 15) <= tuple(map(int, pins["litellm"].split("."))) < (1, 82, 7)
    assert int(pins["openai"].split(".")[0]) < 3  # from 3 on it takes another HTTP client than litellm hands it


# With the harness.


class Cast:
    """One endpoint that plays everybody, by the model's name; a conversation is known by its seed. A player that gives
    text instead of a message refuses the request with it; one that gives a number fails with that status.

    Attributes:
        tasks: by seed, as the benchmark's file has them.
        requests: of each model.
    """

    def __init__(self) -> None:
        self.tasks: dict[int, dict[str, Any]] = {}
        self.requests: Counter[str] = Counter()
        self._done: dict[int, int] = {}
        self._faults: dict[int, int] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        model, said = body["model"], body["messages"]
        self.requests[model] += 1
        if said[-1]["content"] == "Say yes." and model != "choosy":
            message: dict[str, Any] | str | int = {"content": "yes"}
        else:
            message = PLAYERS[model](self, body)
        if isinstance(message, int):
            return web.Response(status=message)
        if isinstance(message, str):
            return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=400)
        return web.json_response(
            {
                "id": "x", "object": "chat.completion", "created": 0, "model": model,
                "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
            }
        )  # fmt: skip

    def user(self, body: dict[str, Any]) -> dict[str, Any]:
        seed, said = body["seed"], body["messages"]
        if not any(message["role"] == "assistant" for message in said):
            self._done[seed] = 0
            return {"content": "I have a problem."}
        if "FINISHED" in (said[-1]["content"] or ""):
            return {"content": "###STOP###"}
        return self._act(seed, "user") or {"content": "Go on."}

    def gold(self, body: dict[str, Any]) -> dict[str, Any]:
        """The task's actions, in their order; then all that is to be communicated."""
        seed = body["seed"]
        if call := self._act(seed, "assistant"):
            return call
        if self._done[seed] < len(_actions(self.tasks[seed])):
            return {"content": "Now you."}
        return {
            "content": "FINISHED: " + "; ".join(self.tasks[seed]["evaluation_criteria"].get("communicate_info") or [])
        }

    def _act(self, seed: int, who: str) -> dict[str, Any] | None:
        actions, i = _actions(self.tasks[seed]), self._done[seed]
        if i == len(actions) or actions[i].get("requestor", "assistant") != who:
            return None
        self._done[seed] += 1
        return _call(actions[i]["name"], json.dumps(actions[i]["arguments"]))

    def hostile(self, body: dict[str, Any]) -> dict[str, Any]:
        tried = sum(message["role"] == "tool" for message in body["messages"])
        attempts = [
            _call("calculate", json.dumps({"expression": "9**9**9**9"})),
            _call("calculate", json.dumps({"expression": "__import__('os').system('touch left_behind')"})),
            _call("open('left_behind', 'w').write", json.dumps({"s": "x"})),
        ]
        return attempts[tried] if tried < len(attempts) else {"content": "FINISHED"}

    def faulty(self, body: dict[str, Any]) -> dict[str, Any] | str:
        """Another fault in each conversation."""
        self._faults[body["seed"]] = fault = self._faults.get(body["seed"], len(self._faults))
        return [_call("get_user_details", '{"user_id": '), {"content": " "}, "the maximum context length is 8"][fault]

    def judge(self, body: dict[str, Any]) -> dict[str, Any]:
        expected = ast.literal_eval(body["messages"][-1]["content"].split("expectedOutcomes:")[1].strip())
        verdicts = [{"expectedOutcome": one, "reasoning": "as asked", "metExpectation": True} for one in expected]
        return {"content": json.dumps({"results": verdicts})}


PLAYERS: dict[str, Callable[[Cast, dict[str, Any]], dict[str, Any] | str | int]] = {
    "usersim": Cast.user,
    "gold": Cast.gold,
    "idle": lambda cast, body: {"content": "FINISHED"},
    "hostile": Cast.hostile,
    "faulty": Cast.faulty,
    "flaky": lambda cast, body: 503 if cast.requests["flaky"] < 3 else {"content": "FINISHED"},
    "choosy": lambda cast, body: "temperature must be 1",
    "judge": Cast.judge,
    "chatty judge": lambda cast, body: {"content": "Yes, I would say so."},
    "silent judge": lambda cast, body: {"content": '{"results": []}'},
    "mute user": lambda cast, body: {"content": ""},
}


def _actions(task: dict[str, Any]) -> list[dict[str, Any]]:
    return task["evaluation_criteria"].get("actions") or []


def _call(name: str, arguments: str) -> dict[str, Any]:
    call = {"id": f"call_{name[:20]}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"content": None, "tool_calls": [call]}


@pytest.fixture
async def cast() -> AsyncIterator[Cast]:
    cast = Cast()
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", cast.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    cast.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield cast
    await runner.cleanup()


VERSIONS = {"tau2": ("ASTRA_TAU2_V1", Tau2), "tau2_v0_2": ("ASTRA_TAU2_V0", Tau2Paper)}


@pytest.fixture
def tree(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of the version that the test's `suite` names."""
    variable, suite = VERSIONS[request.getfixturevalue("suite")]
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no checkout of tau2-bench {suite.RELEASE.tag}")
    tree = Path(os.environ[variable])
    tasks = "data/tau2/domains/telecom/tasks.json"
    if (tree / tasks).exists():
        return tree
    # A partial snapshot without its largest file: v0.2.0's tasks are those of the split that is run.
    if not os.environ.get("ASTRA_TAU2_V0"):
        pytest.skip(f"{tree / tasks} is missing, and ASTRA_TAU2_V0 names no checkout that could lend its own")
    whole = tmp_path / "tree"
    subprocess.run(["cp", "-rs", f"{tree.absolute()}/", whole], check=True)
    (whole / tasks).symlink_to(Path(os.environ["ASTRA_TAU2_V0"]).absolute() / tasks)
    pinned = dict(suite.RELEASE.sha256)
    pinned["telecom"] = fingerprint(whole, (*suite_module._PARTS["telecom"], suite_module._SPLIT.format("telecom")))
    monkeypatch.setattr(suite, "RELEASE", dataclasses.replace(suite.RELEASE, sha256=pinned))
    return whole


async def evaluate(
    suite: str, tree: Path, cast: Cast, tmp_path: Path, *, policy: str, limit: int, only: str = "", **roles: str
) -> list[ItemResult]:
    """Run the first items of each domain once, or those of one domain."""
    names = {"user": "usersim", "judge": "judge"} | roles
    made = make(suite, context(tmp_path, cast.url, policy=policy, roles=names, sources={suite: tree}))
    try:
        await made.prepare()
        for domain in ("retail", "telecom"):
            tasks = json.loads((tree / f"data/tau2/domains/{domain}/tasks.json").read_text())
            for task in tasks:
                cast.tasks[rng_for(0, suite, domain, task["id"], 0).getrandbits(31)] = task
        if only:
            made.info = dataclasses.replace(  # type: ignore[misc]
                made.info, categories=tuple(one for one in made.info.categories if one.name == only)
            )
        config = RunConfig(limit=limit, trials=1, concurrency=2, retries=0)
        return await run_suites([made], journal=Journal(tmp_path / f"{policy}.sqlite"), config=config)
    finally:
        await made.close()


def by_task(results: list[ItemResult], cast: Cast, domain: str) -> list[tuple[ItemResult, dict[str, Any]]]:
    known = {task["id"]: task for task in cast.tasks.values()}
    return [(result, known[result.item]) for result in results if result.category == domain]


both = pytest.mark.parametrize("suite", ["tau2", "tau2_v0_2"])
LIMIT = int(os.environ.get("ASTRA_TAU2_ITEMS", "24"))


@pytest.mark.slow
@both
async def test_who_does_nothing_is_right_where_nothing_is_to_be_done(
    suite: str, tree: Path, cast: Cast, tmp_path: Path
) -> None:
    results = await evaluate(suite, tree, cast, tmp_path, policy="idle", limit=LIMIT)
    retail = by_task(results, cast, "retail")
    assert len(retail) == LIMIT and len(results) == 2 * LIMIT
    expected = {
        task["id"]
        for _, task in retail
        if task["id"] in REFUSED[suite] or not any(one["name"].startswith(WRITES) for one in _actions(task))
        if suite == "tau2" or not task["evaluation_criteria"].get("communicate_info")
    }
    assert {result.item for result, _ in retail if result.score == 1} == expected
    assert {result.score for result, _ in retail} == {0.0, 1.0}
    print(suite, "idle: retail", sum(one.score for one, _ in retail) / len(retail))
    assert not any(result.score for result, _ in by_task(results, cast, "telecom"))
    for result in results:
        assert (result.finish, result.steps, result.calls, result.completion_tokens) == ("user_stop", 1, 0, 10)
        assert [one["role"] for one in result.messages[-3:]] == ["user", "assistant", "user"]


@pytest.mark.slow
@both
async def test_who_plays_the_gold_actions_is_right(suite: str, tree: Path, cast: Cast, tmp_path: Path) -> None:
    results = await evaluate(suite, tree, cast, tmp_path, policy="gold", limit=LIMIT)
    for domain in ("retail", "telecom"):
        scored = by_task(results, cast, domain)
        wrong = [(result.item, result.finish, result.problem) for result, _ in scored if not result.score]
        print(suite, "gold:", domain, 1 - len(wrong) / len(scored), wrong)
        assert len(scored) == LIMIT and len(wrong) <= 0.05 * LIMIT, wrong
        for result, task in scored:
            own = [one for one in _actions(task) if one.get("requestor", "assistant") == "assistant"]
            assert result.calls == len(own) and result.completion_tokens == 10 * result.steps
    if suite == "tau2":
        asked = sum(
            bool(task["evaluation_criteria"].get("nl_assertions")) for _, task in by_task(results, cast, "retail")
        )
        assert cast.requests["judge"] == asked + 1  # and the question whether it is there
    else:
        assert not cast.requests["judge"]


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["tau2"])
async def test_a_judge_that_answers_badly_fails_the_run(suite: str, tree: Path, cast: Cast, tmp_path: Path) -> None:
    for judge in ("chatty judge", "silent judge"):
        with pytest.raises(InfrastructureFailed, match="judge: ") as failed:
            await evaluate(suite, tree, cast, tmp_path / judge, policy="gold", limit=5, only="retail", judge=judge)
        tasks = json.loads((tree / "data/tau2/domains/retail/tasks.json").read_text())[:5]
        assert failed.value.failed == {suite: sum(bool(one["evaluation_criteria"]["nl_assertions"]) for one in tasks)}


@pytest.mark.slow
@both
async def test_the_models_own_faults_score_nothing_and_those_of_others_fail_the_run(
    suite: str, tree: Path, cast: Cast, tmp_path: Path
) -> None:
    results = await evaluate(suite, tree, cast, tmp_path, policy="faulty", limit=3, only="retail")
    assert {one.finish for one in results} == {"malformed_call", "empty_message", "token_limit"}
    assert not any(one.score or any(one.metrics.values()) for one in results)
    assert all(one.metrics and one.problem and one.messages for one in results)
    with pytest.raises(InfrastructureFailed, match="temperature must be 1"):
        await evaluate(suite, tree, cast, tmp_path, policy="choosy", limit=1, only="retail")
    assert cast.requests["choosy"] == 1  # a refusal is not asked for again
    [result] = await evaluate(suite, tree, cast, tmp_path, policy="flaky", limit=1, only="retail")
    assert (result.finish, result.steps, cast.requests["flaky"]) == ("user_stop", 1, 3)
    with pytest.raises(InfrastructureFailed, match="user: neither text nor a call"):
        await evaluate(suite, tree, cast, tmp_path / "mute", policy="idle", limit=1, only="retail", user="mute user")
    with pytest.raises(EvaluationError, match="the user of .* temperature must be 1"):
        await evaluate(suite, tree, cast, tmp_path, policy="gold", limit=1, user="choosy")


@pytest.mark.slow
@both
async def test_a_hostile_model_leaves_nothing_behind_and_hangs_nothing(
    suite: str, tree: Path, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the worker's too
    [result] = await evaluate(suite, tree, cast, tmp_path, policy="hostile", limit=1, only="retail")
    outputs = [one["content"] for one in result.messages if one["role"] == "tool"]
    assert len(outputs) == 3 and all(output.startswith("Error: ") for output in outputs)
    assert "took more than" in outputs[0] and "Invalid characters" in outputs[1]
    assert (result.finish, result.calls) == ("user_stop", 3)
    assert not list(tmp_path.rglob("left_behind"))


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["tau2"])
async def test_decoding_reaches_the_endpoint_as_it_is(suite: str, tree: Path, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body)
        text = "###STOP###" if len(body["messages"]) > 2 and body["model"] == "org/usersim" else "Hello."
        message = {"role": "assistant", "content": text, "reasoning_content": "Hm."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url, roles = f"http://127.0.0.1:{runner.addresses[0][1]}/v1", {"user": "org/usersim", "judge": "judge"}
    made = make(suite, context(tmp_path, url, policy="gpt-5-mini", roles=roles, sources={suite: tree}))
    try:
        await made.prepare()
        extra = {"chat_template_kwargs": {"enable_thinking": True}}
        decoding = Decoding(temperature=0.6, top_p=0.95, top_k=20, max_tokens=321, extra=extra)
        result = await asyncio.wait_for(made.run(EvalItem("telecom", made.ids("telecom")[0], 0, 77), decoding), 300)
    finally:
        await made.close()
        await runner.cleanup()
    [sent] = [body for body in bodies if body["model"] == "gpt-5-mini"]
    assert decoding.request(77).items() <= sent.items() and sent["tools"]
    users = [body for body in bodies if body["model"] == "org/usersim" and len(body["messages"]) > 1]
    assert all(body["temperature"] == 0 and body["seed"] == 77 and body["tools"] for body in users) and len(users) == 2
    assert (result.finish, result.score, result.prompt_tokens) == ("user_stop", 0.0, 0)
    assert result.messages[-2]["reasoning_content"] == "Hm."
