"""An environment of one's own, as the manual writes it down, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astra_jax.base.errors import InputError
from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_dataset
from synthesis.core.records import ToolEnvironment
from synthesis.core.reward import MadeCall, score
from synthesis.environments.own import OwnStep, own_environment

ROOT = Path(__file__).parents[3]
CODE = '''
def double(n: int, by: float = 2.0):
    """Twice a number."""
    return {"result": n * by}

def _own(x): ...
'''


def test_the_manuals_example_is_an_environment(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    example = page.partition("## One of your own")[2].partition("```python\n")[2].partition("```")[0]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", example]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    [one] = read_dataset(tmp_path / "mine", ToolEnvironment)
    assert one.structure == "parallel_multi_hop" and [step.hop for step in one.sub_questions] == [1, 1, 2]
    assert one.tools[0].spec.parameters["properties"] == {"item": {"type": "string"}}
    calls = [MadeCall(made.tool, True, made.output) for made in one.reference_calls]
    assert score(one, calls, epsilon=0.0).value == 1.0 and score(one, calls[:1]).value < 1.0


@pytest.fixture
async def pool():
    async with SandboxPool(SandboxConfig()) as opened:
        yield opened


@pytest.mark.parametrize(
    ("steps", "changed", "message"),
    [
        (
            [OwnStep("Twice 4?", 9, "double", {"n": 4})],
            {"answer": 9},
            r"wrong_answer: step 1: double\(n=4\) gave .*8.*, not 9",
        ),
        ([OwnStep("Twice 4?", 8, "triple", {"n": 4})], {}, "no_such_tool: step 1 calls 'triple'; the code has double"),
        ([OwnStep("Twice 4?", 8, "double", {"m": 4})], {}, "wrong_answer: step 1: .*tool_error"),
        ([OwnStep("Twice 4?", 8, "double", {"n": 4}, after=(2,))], {}, "bad_ids"),
        ([OwnStep("Twice 4?", 8, "double", {"n": 4})], {"answer": 10}, "orphan_sub_question: nothing uses"),
        (
            [OwnStep("Twice 4?", 8, "double", {"n": 4})],
            {"code": "def double(n):\n  return 8\n"},
            "annotated with nothing",
        ),
        ([OwnStep("Twice 4?", 8, "double", {"n": 4})], {"code": "def double("}, "bad_code: it is no Python module"),
        # Python takes what the schema refuses, as an episode does.
        (
            [OwnStep("Twice 4?", "44", "double", {"n": "4"})],
            {"code": CODE.replace("n * by", "n * 2"), "answer": "44"},
            "bad_call: step 1: double: argument 'n': .*not of type 'integer'; annotate the function as it is called",
        ),
        ([], {}, "no_sub_questions"),
    ],
)
async def test_what_is_none_is_refused_with_what_is_wrong(pool, steps, changed: dict[str, Any], message: str) -> None:
    given = {"question": "How much is twice 4?", "answer": 8, "code": CODE, **changed}
    with pytest.raises(InputError, match=message):
        await own_environment(steps=steps, sandbox=pool, **given)


async def test_one_step_is_enough(pool) -> None:
    one = await own_environment("Twice 4?", 8, [OwnStep("Twice 4?", 8, "double", {"n": 4})], code=CODE, sandbox=pool)
    assert one.structure == "single_hop" and [tool.spec.name for tool in one.tools] == ["double"]
    assert one.tools[0].spec.parameters["required"] == ["n"]


ECHO = """
ROWS = {"France": "Paris", "Iceland": "Reykjavik"}

def capital_of(country: str):
    return {"country": country, "capital": ROWS.get(country)MORE}
"""


async def test_a_tool_that_repeats_its_argument_earns_nothing_by_it(pool) -> None:
    steps = [OwnStep("What is the capital of Iceland?", "Reykjavik", "capital_of", {"country": "Iceland"})]
    given: dict[str, Any] = {"question": "What is the capital of Iceland?", "answer": "Reykjavik", "steps": steps}
    one = await own_environment(code=ECHO.replace("MORE", ""), sandbox=pool, **given)
    cities = "Oslo, Rome, Reykjavik"
    guessed = MadeCall("capital_of", True, {"country": cities, "capital": None}, {"country": cities})
    assert score(one, [guessed]).value == 0.0
    suggests = ", 'near': [one for one in ROWS.values() if one.startswith(country)]"
    refused = r"ignores_arguments: step 1: capital_of\(country='Reykj'\) returned .*guesses"
    with pytest.raises(InputError, match=refused):
        await own_environment(code=ECHO.replace("MORE", suggests), sandbox=pool, **given)
