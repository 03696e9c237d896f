"""What tau2-bench's worker makes of an endpoint's refusals and endings, with stand-ins for the harness and its client.

The worker is the real one, in a process of its own; `test_evaluation_tau2.py` has the real harness, where it is there.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from astra_jax.evaluation.endpoint_agent import endpoint_of
from astra_jax.evaluation.harness import WorkerFailed, WorkerProgram
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Decoding, EvalItem, EvaluationError, ModelEndpoint, SuiteContext
from astra_jax.evaluation.suites.tau2 import Tau2
from synthesis.core.stages import Transient

CLIENT = """
from types import SimpleNamespace as Of
class BadRequestError(Exception): pass
def completion(model, messages, extra_body, **fields):
    limit, context = extra_body.get("max_tokens") or extra_body.get("max_completion_tokens"), 32_768
    kind, prompt = extra_body["user"], int(extra_body["prompt"])
    if kind == "vague":
        raise BadRequestError("400 max_tokens and the messages exceed the context window")
    if kind == "choosy":
        raise BadRequestError("400 temperature must be 1")
    if prompt + (limit or 0) > context:
        raise BadRequestError(
            f"400 This model's maximum context length is {context} tokens. However, you requested {prompt + limit} "
            f"tokens ({prompt} in the messages, {limit} in the completion)."
        )
    message = Of(content=f"{limit} tokens", tool_calls=None, reasoning_content=None)
    return Of(choices=[Of(message=message, finish_reason=kind)], get=lambda name: None)
"""
HARNESS = {
    "loguru.py": "class logger:\n    remove = staticmethod(lambda: None)",
    "litellm.py": CLIENT,
    "tau2/__init__.py": "",
    "tau2/config.py": "DEFAULT_LLM_ARGS_USER = {}\nDEFAULT_MAX_ERRORS = DEFAULT_MAX_STEPS = 1",
    "tau2/data_model/simulation.py": "class NLAssertionCheck: pass",
    "tau2/environment/environment.py": "class Environment:\n    get_response = None",
    "tau2/evaluator/__init__.py": "from . import evaluator_nl_assertions",
    "tau2/evaluator/evaluator_nl_assertions.py": "",
    "tau2/metrics/agent_metrics.py": "is_successful = bool",
    "tau2/utils/__init__.py": "from . import llm_utils",
    "tau2/utils/llm_utils.py": "completion = None",
    "tau2/registry.py": """
from types import SimpleNamespace as Of
task = Of(id="0", evaluation_criteria=Of(reward_basis=[], nl_assertions=[]))
registry = Of(get_tasks_loader=lambda domain: lambda: [task])
""",
    "tau2/run.py": """
from types import SimpleNamespace as Of
from tau2.utils import llm_utils
def run_task(llm_agent, **settings):
    llm_utils.completion(llm_agent, [{"role": "user", "content": "Hello."}])
    return Of(termination_reason="user_stop", reward_info=Of(reward=1.0, reward_breakdown={}), messages=[])
""",
}


@pytest.fixture
async def suite(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Tau2]:
    for name, text in HARNESS.items():
        file = tmp_path / "stand_ins" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    served = ModelEndpoint("http://127.0.0.1:9/v1", "m", limit=getattr(request, "param", "max_tokens"))
    endpoint = endpoint_of(served, concurrency=1, timeout_seconds=5)
    models = {"user": served, "judge": served}
    made = Tau2(
        SuiteContext(policy=served, endpoint=endpoint, models=models, harnesses=tmp_path, sources={}, logs=tmp_path)
    )
    workers = WorkerProgram(
        Path(sys.executable),
        "tau2_bench.py",
        ["retail"],
        env={"PYTHONPATH": str(tmp_path / "stand_ins")},
        log=tmp_path / "log",
    )
    made._workers = workers
    try:
        await workers.start()
        yield made
    finally:
        await made.close()
        await endpoint.close()


async def run(suite: Tau2, kind: str, *, prompt: int = 1200, max_tokens: int | None = None) -> ItemResult:
    decoding = Decoding(temperature=0.0, max_tokens=max_tokens, extra={"user": kind, "prompt": prompt})
    return await suite.run(EvalItem("retail", "0", 0, 1), decoding)


@pytest.mark.parametrize("suite", ["max_tokens", "max_completion_tokens"], indirect=True)
async def test_a_limit_above_the_context_becomes_what_fits_there_too(suite: Tau2) -> None:
    result = await run(suite, "stop", max_tokens=40_000)
    assert (result.score, result.finish, result.messages[-1]["content"]) == (1.0, "user_stop", "31568 tokens")
    result = await run(suite, "stop", max_tokens=40_000, prompt=33_000)
    assert (result.score, result.finish, result.steps) == (0.0, "token_limit", 0)


async def test_refusals_that_are_not_the_models_are_told_apart(suite: Tau2) -> None:
    with pytest.raises(EvaluationError, match="--max_tokens=40 "):
        await run(suite, "vague", max_tokens=40)
    with pytest.raises(Transient, match="temperature must be 1"):
        await run(suite, "choosy", max_tokens=40)
    assert (await run(suite, "vague")).finish == "token_limit"  # nobody asked for more than fits


async def test_what_the_server_ended_is_no_answer(suite: Tau2) -> None:
    assert (await run(suite, "length")).score == 1.0
    for end in ("abort", "content_filter"):
        with pytest.raises(WorkerFailed, match=f"Infrastructure: agent: an answer ended by '{end}'"):
            await run(suite, end)
