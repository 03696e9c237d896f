"""Run one task of a domain in tau2-bench's environment, through the harness's own `run_task`, and score it.

    TAU2_DATA_DIR=TREE/data PYTHONPATH=TREE/src python tau2_bench.py SOCKET DOMAIN...

The program is the same for v0.2.0 and v1.0.1, whose `run_task` and `generate` have the same interface. Every completion
of the harness passes through `_Models.complete`. It sends the request to the endpoint of its role, counts those of the
scored model, and separates the model's own faults from those of the infrastructure. The harness does not: it ends a run
at either (v0.2.0), or leaves both out of its mean (v1.0.1).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

# Before the harness: litellm would ask GitHub for a price list, and the harness would log every step.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from loguru import logger  # noqa: E402

logger.remove()

import litellm  # noqa: E402
from serving import Methods, ask, serve  # noqa: E402
from tau2.config import DEFAULT_LLM_ARGS_USER, DEFAULT_MAX_ERRORS, DEFAULT_MAX_STEPS  # noqa: E402
from tau2.data_model.simulation import NLAssertionCheck  # noqa: E402
from tau2.environment.environment import Environment  # noqa: E402
from tau2.evaluator import evaluator_nl_assertions  # noqa: E402
from tau2.metrics.agent_metrics import is_successful  # noqa: E402
from tau2.registry import registry  # noqa: E402
from tau2.run import run_task  # noqa: E402
from tau2.utils import llm_utils  # noqa: E402

AGENT, USER, JUDGE = "agent", "user", "judge"
CALL_SECONDS = 10
"""CPU time of one tool call. The tools read small tables; `calculate` evaluates arithmetic, `9**9**9` included."""
RETRIES = 8
"""Retries of an unanswered request (429, 5xx, a dropped connection), with the client's own back-off: half a minute."""

ENDS = {None, "", "stop", "length", "tool_calls", "function_call"}
"""Finish reasons of a complete answer, in litellm's words for all servers; an answer that a filter ended is not one."""
PREMATURE = {"max_steps", "too_many_errors", "agent_error"}
"""Ends of a run that the harness scores with 0 and that are the agent's fault; its other ends before a stop are not."""


def _complete(served: dict[str, Any], messages: list[dict[str, Any]], timeout: float, **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{served['model']}",
        api_base=served["url"],
        api_key=served["key"],
        messages=messages,
        timeout=timeout,
        **fields,
    )


class Infrastructure(Exception):
    """The infrastructure failed, which says nothing about the scored model."""


class Fault(Exception):
    """The scored model's answer cannot be used.

    Attributes:
        finish: why the run ends.
    """

    def __init__(self, finish: str, what: str) -> None:
        super().__init__(what)
        self.finish = finish


class _Models:
    """Endpoints of a task's roles.

    Args:
        served: `url`, `model` and `key` by role. For the agent also `request`, its sampling fields, and `limit`, the
            field that limits a completion.
        timeout: time limit of one request, in seconds.
    """

    def __init__(self, served: dict[str, dict[str, Any]], timeout: float) -> None:
        self._served, self._timeout = served, timeout
        self.steps = self.calls = self.prompt_tokens = self.completion_tokens = 0
        self.messages: list[dict[str, Any]] = []  # as the scored model was last shown them, and its answer

    def complete(
        self, model: str, messages: list[dict[str, Any]], tools: Any = None, tool_choice: Any = None, **harness: Any
    ) -> Any:
        """Return a completion; the harness calls it instead of litellm's `completion`. `model` is the role."""
        if model not in self._served:
            raise Infrastructure(f"the harness asks {model!r}, which is none of {sorted(self._served)}")
        served = self._served[model]
        asked = {"messages": messages, "tools": tools, "tool_choice": tool_choice, "max_retries": RETRIES}
        if model == AGENT:
            self.messages = [dict(message) for message in messages]
            # In the body as they are: litellm drops what it believes that a model of this name does not take.
            harness = {"extra_body": dict(served["request"])}
        harness.pop("num_retries", None)  # at once, and also of what is refused
        while True:
            try:
                response = _complete(served, timeout=self._timeout, **asked, **harness)
                message, end = response.choices[0].message, response.choices[0].finish_reason
                break
            except litellm.BadRequestError as error:
                if model != AGENT:
                    raise Infrastructure(f"{model}: {error}") from None
                _make_room(harness["extra_body"], served["limit"], str(error))
            except Exception as error:
                raise Infrastructure(f"{model}: {type(error).__name__}: {error}") from None
        if end not in ENDS:
            raise Infrastructure(f"{model}: an answer ended by {end!r}")
        if model == AGENT:
            self._count(response, message)
        if problem := _problem(message) if model != JUDGE else _misjudged(message.content):
            if model == AGENT:
                raise Fault(*problem)
            raise Infrastructure(f"{model}: {problem[1]}")
        return response

    def _count(self, response: Any, message: Any) -> None:
        usage = response.get("usage")
        self.steps += 1
        self.calls += len(message.tool_calls or [])
        self.prompt_tokens += getattr(usage, "prompt_tokens", 0) or 0
        self.completion_tokens += getattr(usage, "completion_tokens", 0) or 0
        answer: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
        if reasoning := getattr(message, "reasoning_content", None):
            answer["reasoning_content"] = reasoning  # for people: the harness shows the model none of it again
        if message.tool_calls:
            answer["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
                for call in message.tool_calls
            ]
        self.messages.append(answer)


def _make_room(request: dict[str, Any], limit: str, said: str) -> None:
    """Lower the token limit of the next request to what fits.

    Raises `Fault` if nothing fits, or the refusal had another reason; the parent process distinguishes them.
    """
    room = ask("room", said=said, max_tokens=request.get(limit))
    if not room:
        raise Fault("refused" if room is None else "token_limit", said)
    request[limit] = room


def _problem(message: Any) -> tuple[str, str] | None:
    """Return why the harness could not use a message of the agent or the user: it raises if JSON is missing or it is
    empty."""
    for call in message.tool_calls or []:
        try:
            arguments = json.loads(call.function.arguments, parse_constant=_no_json)
        except (TypeError, ValueError, RecursionError) as error:
            return "malformed_call", f"{call.function.name}: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict) or not isinstance(call.function.name, str):
            return "malformed_call", f"{call.function.name}: a call is a name and an object, not {arguments!r:.200}"
    if not message.tool_calls and not (message.content or "").strip():
        return "empty_message", "neither text nor a call"
    return None


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")  # and unequal to itself, where the harness replays the calls


def _misjudged(content: str | None) -> tuple[str, str] | None:
    """Return the fault of a judge's answer, which the harness reads as {"results": [{...}, ...]}."""
    try:
        for one in json.loads(content or "")["results"]:
            NLAssertionCheck(
                nl_assertion=one["expectedOutcome"], met=one["metExpectation"], justification=one["reasoning"]
            )
    except (KeyError, TypeError, ValueError):
        return "", f"an answer that is not what it was asked for: {(content or '')[:200]!r}"
    return None


def _bounded(answer: Any) -> Any:
    """Return `Environment.get_response` with a limit on its CPU time; a call that exceeds it fails like any other."""

    def get_response(self: Environment, message: Any) -> Any:
        signal.setitimer(signal.ITIMER_VIRTUAL, CALL_SECONDS)
        try:
            return answer(self, message)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    return get_response


def _too_slow(*_: object) -> NoReturn:
    raise TimeoutError(f"the call took more than {CALL_SECONDS} s")


def main() -> None:
    socket, *domains = sys.argv[1:]
    # Loaded once, before the forks: a domain's file may hold thousands of tasks.
    tasks = {domain: {task.id: task for task in registry.get_tasks_loader(domain)()} for domain in domains}
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    evaluator_nl_assertions.DEFAULT_LLM_NL_ASSERTIONS = JUDGE
    Environment.get_response = _bounded(Environment.get_response)

    def methods() -> Methods:
        signal.signal(signal.SIGVTALRM, _too_slow)

        def list_tasks(domain: str) -> list[str]:
            return list(tasks[domain])

        def ask(served: dict[str, Any], timeout: float) -> str:
            """Request a short completion; return the error, or "" if the endpoint answers."""
            messages = [{"role": "user", "content": "Say yes."}]
            try:
                reply = _complete(served, messages, timeout)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return "" if reply.choices else "an answer without choices"

        def run(domain: str, task: str, seed: int, models: dict[str, dict[str, Any]], timeout: float) -> dict[str, Any]:
            return _run(domain, tasks[domain][task], seed, _Models(models, timeout))

        return {"tasks": list_tasks, "ask": ask, "run": run}

    serve(socket, methods)


def _run(domain: str, task: Any, seed: int, models: _Models) -> dict[str, Any]:
    """Run a task once. Return the reward, its factors, how it ended, and the scored model's messages."""
    llm_utils.completion = models.complete
    criteria = task.evaluation_criteria
    components = {basis.value.lower(): 0.0 for basis in criteria.reward_basis}
    reward, problem, last = 0.0, "", []
    try:
        done = run_task(
            domain=domain,
            task=task,
            agent="llm_agent",  # never llm_agent_gt, which is told the gold actions
            user="user_simulator",
            llm_agent=AGENT,
            llm_args_agent={},
            llm_user=USER,
            llm_args_user=DEFAULT_LLM_ARGS_USER,
            max_steps=DEFAULT_MAX_STEPS,
            max_errors=DEFAULT_MAX_ERRORS,
            seed=seed,
        )
    except Fault as fault:
        finish, problem = fault.finish, str(fault)
    else:
        finish = getattr(done.termination_reason, "value", done.termination_reason)
        scored = done.reward_info
        if finish not in PREMATURE | {"user_stop", "agent_stop"}:
            raise Infrastructure(f"the harness ended the run with {finish}")
        if finish in PREMATURE:
            problem = "the harness ended the run"
        else:
            asked = len(criteria.nl_assertions or []) if "nl_assertion" in components else 0
            if asked and len(scored.nl_assertions or []) != asked:
                # The harness takes none as all of them.
                raise Infrastructure(f"judge: {len(scored.nl_assertions or [])} verdicts on {asked} assertions")
            components |= {basis.value.lower(): value for basis, value in scored.reward_breakdown.items()}
            reward = float(is_successful(scored.reward))
            problem = ", ".join(f"{name} failed" for name, value in components.items() if value < 1)
        last = [{"role": m.role, "content": m.content or ""} for m in done.messages[-1:] if m.role == "user"]
    return {
        "reward": reward,
        "components": components,
        "finish": finish,
        "problem": problem,
        "steps": models.steps,
        "calls": models.calls,
        "prompt_tokens": models.prompt_tokens,
        "completion_tokens": models.completion_tokens,
        "messages": models.messages + last,
    }


if __name__ == "__main__":
    main()
