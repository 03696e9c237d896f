"""The clients' side of `benchmarks.serving_clients`: one client's checks, in an environment with its packages alone.

    python serving_clients_side.py CLIENT URL FOLDER

`FOLDER` is the served model's, for harnesses that tokenise. The last line is JSON: the client's version, and what came
of each check: `yes`, or the error.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKS = ("chat", "stream", "tools", "structured", "history", "efforts", "harness")
"""`tools`: a call that is executed and answered; `history`: the client's own messages sent again, of all its APIs;
`efforts`: `reasoning_effort` and, where the client has it, `verbosity`; `harness`: a task of an evaluation harness."""
MODEL = "tiny"
ASKED = "Which country has the capital?"
LIMITS: dict[str, Any] = {"temperature": 1, "seed": 1}
MOST = 300
STOP: dict[str, Any] = {"stop": ["b", "d", "k", "v", "z"]}
"""Ends random text soon, and is in no call and no answer of a given form. The Responses API has no such field; there it
is sent as vLLM's."""
COUNTRIES = ("Peru", "Kenya")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"country": {"type": "string", "enum": list(COUNTRIES)}},
    "required": ["country"],
    "additionalProperties": False,
}
FUNCTION = {"name": "capital_of", "description": "The capital of a country.", "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}

Checks = dict[str, Callable[[], object]]


def capital_of(country: str) -> str:
    """The capital of a country."""
    return dict(zip(COUNTRIES, ("Lima", "Nairobi"), strict=True))[country]


def answer_type() -> Any:
    """A type that even random weights fill in within a few tokens."""
    from typing import Literal

    from pydantic import BaseModel

    class Answer(BaseModel, extra="forbid"):  # type: ignore[call-arg]
        is_capital: bool
        country: Literal["Peru", "Kenya"]

    return Answer


def openai_checks(url: str, folder: str) -> Checks:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    question: list[Any] = [{"role": "user", "content": ASKED}]
    item_tool: Any = {"type": "function", "strict": True, **FUNCTION}

    def chat(**more: Any) -> Any:
        return client.chat.completions.create(
            **{"model": MODEL, "messages": question, "max_tokens": MOST, **LIMITS, **more}
        )

    def respond(**more: Any) -> Any:
        options = {"model": MODEL, "input": question, "max_output_tokens": MOST, "extra_body": STOP}
        return client.responses.create(**{**options, **more})

    def stream() -> None:
        options: Any = {"model": MODEL, "messages": question, "max_tokens": MOST, **STOP, **LIMITS}
        with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as events:
            assert {event.type for event in events} >= {"chunk", "content.delta"}
            assert events.get_final_completion().usage
        with client.responses.stream(model=MODEL, input=question, extra_body=STOP) as items:
            assert [event.type for event in items][-1] == "response.completed"
            assert items.get_final_response().output

    def tools() -> None:
        messages, forced = list(question), {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        message = chat(**forced).choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            result = capital_of(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert chat(messages=messages, tools=[TOOL], tool_choice="none").choices[0].message.content
        items, calls = list(question), respond(**{**forced, "tools": [item_tool]}).output
        items += calls
        for call in calls:
            if call.type == "function_call":
                result = capital_of(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        assert len(items) > 2 and respond(input=items, tools=[item_tool]).output

    def structured() -> None:
        parsed = client.chat.completions.parse(
            model=MODEL, messages=question, response_format=answer_type(), max_tokens=MOST, **LIMITS
        )
        assert parsed.choices[0].message.parsed.country in COUNTRIES
        again = client.responses.parse(model=MODEL, input=question, text_format=answer_type(), max_output_tokens=MOST)
        assert again.output_parsed.country in COUNTRIES

    def history() -> None:
        message = chat(max_tokens=30).choices[0].message
        for kept in (message, message.model_dump(), message.model_dump(exclude_none=True)):
            chat(messages=[*question, kept, *question], max_tokens=2)
        items = respond(max_output_tokens=30).output
        for kept in (items, [item.model_dump() for item in items], [item.to_dict() for item in items]):
            respond(input=[*question, *kept, *question], max_output_tokens=16)

    def efforts() -> None:
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=question, max_tokens=2, reasoning_effort="low", verbosity="low"
        )
        assert "verbosity" in answer.headers["Astra-Ignored-Fields"]
        respond(reasoning={"effort": "high", "summary": "auto"}, text={"verbosity": "low"}, max_output_tokens=16)

    return {
        "chat": lambda: (chat(), respond()),
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "history": history,
        "efforts": efforts,
    }


def agents_checks(url: str, folder: str) -> Checks:
    import agents
    from openai import AsyncOpenAI
    from openai.types.shared import Reasoning

    agents.set_tracing_disabled(True)
    called: list[str] = []

    @agents.function_tool
    def capital(is_peru: bool) -> str:
        """The capital of a country."""
        called.append("x")
        return "Lima" if is_peru else "Nairobi"

    def agent(kind: Any, settings: dict[str, Any] | None = None, **more: Any) -> Any:
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)  # of this event loop
        model = kind(model=MODEL, openai_client=client)
        chosen = agents.ModelSettings(max_tokens=MOST, temperature=1, extra_body=STOP, **(settings or {}))
        return agents.Agent(name="a", instructions="Be brief.", model=model, model_settings=chosen, **more)

    def each(work: Callable[[Any], Any]) -> Callable[[], object]:
        async def all_of() -> None:
            for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
                await work(kind)

        return lambda: asyncio.run(all_of())

    async def stream(kind: Any) -> None:
        running = agents.Runner.run_streamed(agent(kind), ASKED)
        async for _ in running.stream_events():
            pass
        assert isinstance(running.final_output, str)

    async def tools(kind: Any) -> None:
        before = len(called)
        settings = {"tool_choice": "required", "parallel_tool_calls": False}
        result = await agents.Runner.run(agent(kind, settings, tools=[capital]), ASKED, max_turns=5)
        assert len(called) > before and isinstance(result.final_output, str)

    async def structured(kind: Any) -> None:
        result = await agents.Runner.run(agent(kind, output_type=answer_type()), ASKED)
        assert result.final_output.country in COUNTRIES

    async def history(kind: Any) -> None:
        first = await agents.Runner.run(agent(kind), ASKED)
        again: list[Any] = [*first.to_input_list(), {"role": "user", "content": "And?"}]
        await agents.Runner.run(agent(kind), again)

    async def efforts(kind: Any) -> None:
        settings = {"reasoning": Reasoning(effort="low"), "verbosity": "low", "truncation": "auto"}
        await agents.Runner.run(agent(kind, settings), ASKED)

    return {
        "chat": each(lambda kind: agents.Runner.run(agent(kind), ASKED)),
        "stream": each(stream),
        "tools": each(tools),
        "structured": each(structured),
        "history": each(history),
        "efforts": each(efforts),
    }


def litellm_checks(url: str, folder: str) -> Checks:
    import litellm

    question: list[Any] = [{"role": "user", "content": ASKED}]

    def chat(prefix: str = "openai", **more: Any) -> Any:
        options = {"messages": question, "base_url": url, "api_key": "none", "max_tokens": MOST, "num_retries": 0}
        return litellm.completion(**{"model": f"{prefix}/{MODEL}", **options, **LIMITS, **more})

    def stream() -> None:
        chunks = list(chat(stream=True, stream_options={"include_usage": True}, max_tokens=40))
        assert litellm.stream_chunk_builder(chunks).usage.completion_tokens

    def tools() -> None:
        # `hosted_vllm` leaves `additionalProperties` out of schemas, and random weights then add names without end.
        message = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message
        call = message.tool_calls[0]
        result = capital_of(**json.loads(call.function.arguments))
        messages = [*question, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        for prefix in ("openai", "hosted_vllm"):
            chat(prefix, messages=messages, tools=[TOOL])

    def structured() -> None:
        said = chat(response_format=answer_type()).choices[0].message.content
        assert answer_type().model_validate_json(said)

    def history() -> None:
        message = chat(max_tokens=30).choices[0].message
        for kept in (message, message.model_dump(), message.model_dump(exclude_none=True)):
            chat(messages=[*question, kept, *question], max_tokens=2)

    return {
        "chat": lambda: (chat(), chat("hosted_vllm"), litellm.responses(
            model=f"openai/{MODEL}", input=ASKED, max_output_tokens=20, api_base=url, api_key="none")),
        "stream": stream,
        "tools": tools,
        "structured": structured,
        "history": history,
        "efforts": lambda: [chat("hosted_vllm", reasoning_effort=one, max_tokens=2) for one in ("none", "low", "high")],
    }  # fmt: skip


def langchain_checks(url: str, folder: str) -> Checks:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    tool = StructuredTool.from_function(capital_of, args_schema=SCHEMA)

    def model(is_responses: bool, **more: Any) -> Any:
        options = {"temperature": 1, "max_tokens": MOST, "max_retries": 0, "stream_usage": True, **more}
        return ChatOpenAI(model=MODEL, base_url=url, api_key="none", use_responses_api=is_responses, **options)

    def each(work: Callable[[bool], object]) -> Callable[[], object]:
        return lambda: [work(is_responses) for is_responses in (False, True)]

    def tools(is_responses: bool) -> None:
        bound = model(is_responses).bind_tools([tool], tool_choice="any", parallel_tool_calls=False)
        message = bound.invoke(ASKED)
        call = message.tool_calls[0]
        result = ToolMessage(tool.invoke(call["args"]), tool_call_id=call["id"])
        model(is_responses).bind_tools([tool]).invoke([HumanMessage(ASKED), message, result])

    def structured(is_responses: bool) -> None:
        for method in ("json_schema", "function_calling"):
            found = model(is_responses).with_structured_output(answer_type(), method=method).invoke(ASKED)
            assert found.country in COUNTRIES

    def history(is_responses: bool) -> None:
        said = model(is_responses).invoke(ASKED)
        model(is_responses).invoke([HumanMessage(ASKED), said, HumanMessage("And?")])

    return {
        "chat": each(lambda is_responses: model(is_responses).invoke(ASKED)),
        "stream": each(lambda is_responses: list(model(is_responses).stream(ASKED))),
        "tools": each(tools),
        "structured": each(structured),
        "history": each(history),
        "efforts": each(
            lambda is_responses: model(is_responses, reasoning_effort="low", verbosity="low").invoke(ASKED)
        ),
    }


def pydantic_checks(url: str, folder: str) -> Checks:
    from openai import AsyncOpenAI
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    called: list[bool] = []

    def capital(is_peru: bool) -> str:
        """The capital of a country."""
        called.append(is_peru)
        return "Lima" if is_peru else "Nairobi"

    def agent(kind: Any, **more: Any) -> Any:
        settings = {"max_tokens": MOST, "parallel_tool_calls": False, "extra_body": STOP, **LIMITS}
        settings |= more.pop("settings", {})
        provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=url, api_key="none"))  # of this event loop
        return Agent(kind(MODEL, provider=provider), model_settings=settings, retries=5, **more)

    def each(work: Callable[[Any], object]) -> Callable[[], object]:
        return lambda: [work(kind) for kind in (OpenAIChatModel, OpenAIResponsesModel)]

    def stream(kind: Any) -> None:
        async def whole() -> str:
            async with agent(kind).run_stream(ASKED) as result:
                return str(await result.get_output())

        assert asyncio.run(whole())

    def tools(kind: Any) -> None:
        before = len(called)
        for seed in range(10):  # the model chooses between its tool and the answer
            agent(kind, output_type=answer_type(), tools=[capital], settings={"seed": seed}).run_sync(ASKED)
            if len(called) > before:
                return
        raise AssertionError("the tool was never called")

    def history(kind: Any) -> None:
        first = agent(kind).run_sync(ASKED)
        agent(kind).run_sync("And?", message_history=first.all_messages())

    def efforts(kind: Any) -> None:
        agent(kind, settings={"openai_reasoning_effort": "low", "openai_text_verbosity": "low"}).run_sync(ASKED)

    return {
        "chat": each(lambda kind: agent(kind).run_sync(ASKED)),
        "stream": each(stream),
        "tools": each(tools),
        "structured": each(lambda kind: agent(kind, output_type=NativeOutput(answer_type())).run_sync(ASKED)),
        "history": each(history),
        "efforts": each(efforts),
    }


def inspect_checks(url: str, folder: str) -> Checks:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool
    from inspect_ai.util import json_schema

    called: list[bool] = []

    @tool
    def capital() -> Any:
        async def execute(is_peru: bool) -> str:
            """The capital of a country.

            Args:
                is_peru: or Kenya.
            """
            called.append(is_peru)
            return "Lima" if is_peru else "Nairobi"

        return execute

    def run(solver: Any, **config: Any) -> Any:
        for is_responses in (False, True):
            model = get_model(
                f"openai-api/local/{MODEL}",
                base_url=url,
                api_key="none",
                responses_api=is_responses,
                config=GenerateConfig(max_tokens=MOST, temperature=1, max_retries=0, **config),
                memoize=False,
            )
            task = Task(dataset=[Sample(input=ASKED, target="Lima")], solver=solver, scorer=includes())
            (log,) = eval(task, model=model, display="none", log_dir="logs")
            assert log.status == "success", log.error
        return log

    def tools() -> None:
        run([use_tools(capital(), tool_choice="any"), generate()], parallel_tool_calls=False)
        assert len(called) >= 2

    def structured() -> None:
        log = run([generate()], response_schema=ResponseSchema(name="answer", json_schema=json_schema(answer_type())))
        assert answer_type().model_validate_json(log.samples[0].output.completion)

    return {
        "chat": lambda: run([generate()]),
        "tools": tools,
        "structured": structured,
        "history": lambda: run([generate(), generate()], reasoning_history="all"),
        "efforts": lambda: run([generate()], reasoning_effort="low", verbosity="low"),
    }


def instructor_checks(url: str, folder: str) -> Checks:
    import instructor
    import openai

    question: list[Any] = [{"role": "user", "content": ASKED}]
    options: dict[str, Any] = {"model": MODEL, "messages": question, "max_tokens": MOST, "max_retries": 0, **LIMITS}

    def client(mode: str) -> Any:
        return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode[mode])

    def structured() -> None:
        for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
            assert client(mode).chat.completions.create(response_model=answer_type(), **options).country in COUNTRIES

    def history() -> None:
        found, whole = client("JSON_SCHEMA").chat.completions.create_with_completion(
            response_model=answer_type(), **options
        )
        messages = [*question, whole.choices[0].message.model_dump(), {"role": "user", "content": f"{found} Again."}]
        client("TOOLS").chat.completions.create(response_model=answer_type(), **{**options, "messages": messages})

    return {
        "chat": lambda: client("TOOLS").chat.completions.create(response_model=None, **options),
        "stream": lambda: list(
            client("TOOLS").chat.completions.create_partial(response_model=answer_type(), **options)
        ),
        "structured": structured,
        "history": history,
        "efforts": lambda: client("TOOLS").chat.completions.create(
            response_model=answer_type(), reasoning_effort="low", **options
        ),
    }


CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: questions.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """
task: local_written
dataset_path: json
dataset_kwargs: {data_files: {test: questions.json}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def lm_eval_checks(url: str, folder: str) -> Checks:
    def harness() -> None:
        questions = [
            {"question": ASKED, "choices": ["Lima is", "Nairobi is", "none"], "label": i % 3} for i in range(6)
        ]
        Path("questions.json").write_text(json.dumps(questions))
        Path("choice.yaml").write_text(CHOICE)
        Path("written.yaml").write_text(WRITTEN)
        shared = f"model={MODEL},max_length=2000,num_concurrent=2,max_retries=1,tokenizer={folder}"
        shared += ",tokenizer_backend=huggingface"
        for kind, path, tasks, more in (
            ("local-completions", "completions", "local_choice,local_written", ["--batch_size=3"]),
            ("local-chat-completions", "chat/completions", "local_written", ["--apply_chat_template"]),
        ):
            command = [
                sys.executable,
                "-m",
                "lm_eval",
                "run",
                f"--model={kind}",
                "--include_path=.",
                f"--tasks={tasks}",
            ]
            command += [f"--model_args={shared},base_url={url}/{path}", "--output_path=out", *more]
            ended = subprocess.run(command, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stderr[-800:]
            found = json.loads(max(Path("out").rglob("results*.json"), key=lambda one: one.stat().st_mtime).read_text())
            assert set(found["results"]) == set(tasks.split(",")), found["results"]

    return {"harness": harness}


CLIENTS: dict[str, tuple[Callable[[str, str], Checks], str]] = {
    "openai": (openai_checks, "openai"),
    "openai-agents": (agents_checks, "openai-agents"),
    "litellm": (litellm_checks, "litellm"),
    "langchain-openai": (langchain_checks, "langchain-openai"),
    "pydantic-ai": (pydantic_checks, "pydantic-ai-slim"),
    "inspect-ai": (inspect_checks, "inspect-ai"),
    "instructor": (instructor_checks, "instructor"),
    "lm-eval": (lm_eval_checks, "lm-eval"),
}


def main() -> None:
    client, url, folder = sys.argv[1:]
    make, package = CLIENTS[client]
    results = {}
    for name, check in make(url, folder).items():
        try:
            check()
            results[name] = "yes"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:800]
    print(json.dumps({"version": importlib.metadata.version(package), "checks": results}))


if __name__ == "__main__":
    main()
