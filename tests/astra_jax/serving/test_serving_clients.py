"""Agents' libraries against the server, unchanged: each asks the model, calls two tools as it says, and is answered.

Their packages are no part of `test` (660 MB); ASTRA_CLIENTS=DIR says where an environment with them is, or is to be
made. The model says what a script makes of the prompt; where a request asks for a form, each of its tokens is looked up
in what the grammar lets follow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving_world import Scripted, serving
from sft_world import make_tokenizer

from synthesis.core.chatml import QWEN3

PACKAGES = ["openai-agents", "pydantic-ai-slim[openai]", "litellm", "inspect-ai"]
TOOLS = '''
import asyncio, json, sys
url, called = sys.argv[1], []

def capital_of(country: str) -> str:
    """The capital of a country.

    Args:
        country: its name.
    """
    called.append(("capital_of", country))
    return {"Peru": "Lima"}[country]

def people_in(city: str, year: int) -> int:
    """How many people live in a city.

    Args:
        city: its name.
        year: when.
    """
    called.append(("people_in", city, year))
    return 10_000_000

ASKED = "How many people live in the capital of Peru?"
'''
TOLD = '\nprint(json.dumps({"answer": str(answer), "called": called}))\n'
AGENTS = """
from openai import AsyncOpenAI
from agents import Agent, ModelSettings, OpenAI{kind}Model, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel

class Answer(BaseModel):
    city: str
    people: int

set_tracing_disabled(True)
model = OpenAI{kind}Model(model="tiny", openai_client=AsyncOpenAI(base_url=url, api_key="none"))
agent = Agent(name="a", instructions="As JSON.", model=model, output_type=Answer, tools=[
    function_tool(capital_of), function_tool(people_in)])
async def main():
    stream = Runner.run_streamed(agent, ASKED)
    async for _ in stream.stream_events():
        pass
    assert isinstance(stream.final_output, Answer)
    return stream.final_output.model_dump_json()
answer = asyncio.run(main())
"""
PYDANTIC = """
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAI{kind}Model
from pydantic_ai.providers.openai import OpenAIProvider

class Answer(BaseModel):
    city: str
    people: int

model = OpenAI{kind}Model("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
agent = Agent(model, instructions="As JSON.", output_type=NativeOutput(Answer), tools=[capital_of, people_in])
answer = agent.run_sync(ASKED).output.model_dump_json()
"""
CLIENTS = {
    "openai-agents": AGENTS.format(kind="Responses"),
    "openai-agents-chat": AGENTS.format(kind="ChatCompletions"),
    "pydantic-ai": PYDANTIC.format(kind="Chat"),
    "pydantic-ai-responses": PYDANTIC.format(kind="Responses"),
    "litellm": """
import litellm
from litellm.utils import function_to_dict
tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": fields,
          "required": [*fields]}}} for name, fields in (("capital_of", {"country": {"type": "string"}}),
          ("people_in", {"city": {"type": "string"}, "year": {"type": "integer"}}))]
messages = [{"role": "user", "content": ASKED}]
for choice in ("required", "auto", "auto"):
    got = litellm.completion(model="openai/tiny", base_url=url, api_key="none", messages=messages, tools=tools,
                             tool_choice=choice, parallel_tool_calls=False, top_p=0.95, presence_penalty=0.5)
    message = got.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        result = globals()[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
answer = message.content
""",
    "inspect-ai": """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

capital, people = capital_of, people_in

@tool
def capital_of():
    async def execute(country: str) -> str:
        '''The capital of a country.

        Args:
            country: its name.
        '''
        return capital(country)
    return execute

@tool
def people_in():
    async def execute(city: str, year: int) -> int:
        '''How many people live in a city.

        Args:
            city: its name.
            year: when.
        '''
        return people(city, year)
    return execute

task = Task(dataset=[Sample(input=ASKED, target="10000000")], scorer=includes(),
            solver=[use_tools(capital_of(), people_in()), generate()])
log, = eval(task, model="openai-api/local/tiny", model_base_url=url, model_args={"api_key": "none"}, display="none")
assert log.status == "success", log.error
assert log.results.scores[0].metrics["accuracy"].value == 1
answer = log.samples[0].output.completion
""",
}


@pytest.fixture(scope="module")
def python() -> Path:
    if not (kept := os.environ.get("ASTRA_CLIENTS")):
        pytest.skip(f"ASTRA_CLIENTS=DIR says where {', '.join(PACKAGES)} are, or are to be installed")
    python = Path(kept).absolute() / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", kept], check=True, timeout=120)
        if subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], capture_output=True).returncode:
            pytest.skip("the packages could not be installed from PyPI")
    return python


def says(prompt: str) -> str:
    results = prompt.count("<tool_response>\n")
    if results == 0:
        return "<think>\nThe capital first.\n</think>\n\n" + QWEN3.call_frame.text("capital_of", '{"country": "Peru"}')
    if results == 1:
        return QWEN3.call_frame.text("people_in", '{"city": "Lima", "year": 2020}')
    return '{"city": "Lima", "people": 10000000}' if "As JSON." in prompt else "In Lima live 10000000 people."


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_a_task_with_two_tools(tmp_path: Path, python: Path, name: str) -> None:
    tokenizer = make_tokenizer(tmp_path)
    policy = Scripted(tokenizer, says)
    with serving(lambda: policy, tokenizer) as server:
        code = TOOLS + CLIENTS[name] + TOLD
        environment = {**os.environ, "LOCAL_API_KEY": "none", "OPENAI_API_KEY": "none", "PYTHONPATH": ""}
        command = [python, "-c", code, f"{server.url}/v1"]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-3_000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["called"] == [["capital_of", "Peru"], ["people_in", "Lima", 2020]]
    assert "Lima" in told["answer"] and "10000000" in told["answer"]
    formed = [sampling.constraint is not None for sampling in policy.samplings]
    assert len(formed) == 3 and any(formed)  # strict functions, a type of answer, a call that is required
