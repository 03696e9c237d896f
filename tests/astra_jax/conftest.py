"""Fixtures of the rollout tests, made of what is in `rollout_world.py`, and the processor that all tests have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from rollout_world import CAPITAL, DISTRACTORS, POPULATION, make_environment

from astra_jax.cpu import programs
from astra_jax.tokenizer import ChatTokenizer
from sandbox import SandboxConfig, SandboxPool
from synthesis.core.chatml import QWEN3
from synthesis.core.records import Message, ToolCall, ToolEnvironment

jax.config.update("jax_num_cpu_devices", 8)  # for the tests of meshes; all others run on the first


@pytest.fixture(scope="module", autouse=True)
def quick_bfloat16() -> Iterator[None]:
    """A processor that multiplies bfloat16 faster than float32, whichever this is: tests read the programs of bfloat16
    models, which on others are float32's (`models/test_bfloat16_on_cpus.py`)."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(programs, "_slow_bfloat16", lambda: False)
        yield


@pytest.fixture(scope="session")
def environment() -> ToolEnvironment:
    return make_environment()


@pytest.fixture(scope="session")
def chat_tokenizer_dir(tmp_path_factory, environment) -> Path:
    messages = [
        Message("user", environment.question),
        Message("assistant", "", tool_calls=[ToolCall("call_0", "capital_of", {"country": "France"})]),
        Message("tool", '{"capital_of":"Paris"}'),
        Message("assistant", "The answer is 2102650."),
    ]
    specs = [tool.spec for tool in (CAPITAL, POPULATION, *DISTRACTORS["high"], *DISTRACTORS["low"])]
    text = "".join(segment.text for segment in QWEN3.render(messages, specs))
    folder = tmp_path_factory.mktemp("tokenizer")
    ChatTokenizer.train([text] * 4, 512, folder)
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(chat_tokenizer_dir) -> ChatTokenizer:
    return ChatTokenizer.load(chat_tokenizer_dir)


@pytest.fixture
async def pool():
    async with SandboxPool(SandboxConfig()) as started:
        yield started
