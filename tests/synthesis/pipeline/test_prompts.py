"""The prompt files: the same ones in both languages, and each renders from what its stage really gives it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_dataset
from synthesis.core.records import Language, Task, ToolEnvironment, Trajectory
from synthesis.core.stages import Journal
from synthesis.environments import pipeline as environments
from synthesis.environments import teacher_answers as of_environments
from synthesis.environments.config import EnvironmentsConfig
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.languages import language_of
from synthesis.pipeline.prompts import PROMPTS, render_prompt
from synthesis.pipeline.structured_output import prompt_name
from synthesis.trajectories import pipeline as trajectories
from synthesis.trajectories import teacher_answers as of_trajectories
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.teacher_answers import EmulatedResult

ALL = {prompt_name(one) for one in (*of_trajectories.ANSWERS, *of_environments.ANSWERS)}
OF_THE_TEACHER = {"_as_json", "_refused"}
"""What the teacher itself puts behind a prompt."""
CODE = re.compile(r"{{.*?}}|{%.*?%}", re.DOTALL)
CHINESE = re.compile(r"[\u4e00-\u9fff]")
FULL_WIDTH = re.compile(r"[\u3000-\u303f\uff00-\uffef]")


def sources(language: str) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in (PROMPTS / language).iterdir()}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_request_has_a_file_and_each_file_a_request(language: str) -> None:
    found = sources(language)
    shared = {name for name in found if name.startswith("_")}
    assert found.keys() - shared == ALL
    included = {name for text in found.values() for name in re.findall(r"{% include \"(.+?)\.jinja\" %}", text)}
    assert included == {f"{language}/{name}" for name in shared - OF_THE_TEACHER}


@pytest.mark.parametrize("name", sorted(sources("en")))
def test_both_languages_say_it_of_the_same_things(name: str) -> None:
    """The same variables under the same conditions; and each file is in its language, but for names and examples."""
    english, chinese = sources("en")[name], sources("zh")[name]
    literal = re.compile(r'"[^"]*"')
    conditions = [
        [literal.sub('""', code) for code in CODE.findall(text) if "if " in code or "for " in code or "include" in code]
        for text in (english, chinese)
    ]
    assert conditions[0] == conditions[1]
    shown = [sorted({literal.sub('""', code) for code in CODE.findall(text)}) for text in (english, chinese)]
    assert shown[0] == shown[1]
    words, characters = CODE.sub("", english), CODE.sub("", chinese)
    assert not CHINESE.search(words) and not FULL_WIDTH.search(words)
    if words.strip():
        assert len(CHINESE.findall(characters)) >= 4
        assert not re.search(r"\b[A-Za-z]+(?: [A-Za-z]+){3}", characters)  # a sentence that was not translated


class Reading(OfflineTeacher):
    """Answers by rules, and renders the prompt that an endpoint would be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, str] = {}

    async def ask(self, answer: Any, variables: Mapping[str, Any], *, language: Language, seed: int) -> Any:
        text = render_prompt(answer, variables, language)  # an undefined variable raises
        assert "{{" not in text and "{%" not in text and "Undefined" not in text and "object at 0x" not in text
        for message in variables.get("messages", ()):
            assert message.content in text and message.tool_call_id in text and message.reasoning in text
            assert all(f"{call.id}" in text and call.name in text for call in message.tool_calls)
        for tool in variables["server"].tools if "server" in variables and answer is not EmulatedResult else ():
            assert tool.name in text and tool.description in text
        # All are told what a stage says of their answer.
        assert "feedback" in variables, answer
        if "feedback" in variables:
            told = render_prompt(answer, {**variables, "feedback": "Not that one."}, language)
            assert told.startswith(text.rstrip()) and told.rstrip().endswith("Not that one.")
        self.asked[f"{language}/{prompt_name(answer)}"] = text
        return await super().ask(answer, variables, language=language, seed=seed)

    def check(self, language: str, names: set[str]) -> None:
        assert set(self.asked) == {f"{language}/{name}" for name in names}
        for name, text in self.asked.items():
            assert bool(CHINESE.search(text)) == (language == "zh"), name


@pytest.mark.parametrize("language", ["en", "zh"])
async def test_trajectories_of_one_language_alone(tmp_path: Path, language: Language) -> None:
    """Real MCP servers, the sandbox and the emulator; everything that is asked and made is in that language."""
    config = TrajectoriesConfig(
        trajectories=24, languages={language: 1.0}, fact_servers=("elements", "colors"), emulated_servers=("colors",),
        mcp_share=0.2, min_tools=2, proposals=2, walks=12,
        behaviours={"missing_parameter": 0.1, "confirmation": 0.1, "dialogue": 0.2},
    )  # fmt: skip
    teacher = Reading()
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(tmp_path / "journal.sqlite") as journal:
            summary = await trajectories.synthesize(
                config,
                executor=Executor(teacher, pool),
                journal=journal,
                out_dir=tmp_path,
                workdir=tmp_path,
                seed=2,
            )
    made = read_dataset(tmp_path / "trajectories", Trajectory)
    assert len(made) == 24 and {one.language for one in made} == {language}
    assert summary.statistics["trajectories"]["languages"] == {language: 24}
    assert len(summary.statistics["trajectories"]["execution_shares"]) == 3
    for one in made:
        said = [message.content for message in one.messages if message.role in ("user", "assistant")]
        assert {language_of(text) for text in said if text} == {language}
        assert {language_of(tool.description) for tool in one.tools} <= {"en", language}  # MCP servers are English
    assert {task.language for task in read_dataset(tmp_path / "tasks", Task)} == {language}
    teacher.check(language, {prompt_name(one) for one in of_trajectories.ANSWERS})


@pytest.mark.parametrize("language", ["en", "zh"])
async def test_environments_of_one_language_alone(tmp_path: Path, language: Language) -> None:
    teacher = Reading()
    config = EnvironmentsConfig(count=12, languages={language: 1.0}, hardened_share=0.5, held_out_fraction=0.0)
    worlds = EnvironmentsConfig(count=2, languages={language: 1.0}, held_out_fraction=0.0, stateful_share=1.0)
    again = EnvironmentsConfig(
        count=3, languages={language: 1.0}, held_out_fraction=0.0, tools_of=str(tmp_path / "first" / "train")
    )
    async with SandboxPool(SandboxConfig()) as pool:
        # The offline teacher's worlds are English; what it would be told in Chinese is rendered below.
        third = [("third", worlds)] if language == "en" else []
        for folder, one in (("first", config), ("second", again), *third):
            with Journal(tmp_path / f"{folder}.sqlite") as journal:
                await environments.synthesize(
                    one, executor=Executor(teacher, pool), journal=journal, out_dir=tmp_path / folder, seed=1
                )
            made = read_dataset(tmp_path / folder / "train", ToolEnvironment)
            assert made and {one.language for one in made} == {language}
            assert {language_of(one.question) for one in made} == {language}
    asked = set(of_environments.ANSWERS)
    if language == "zh":
        asked.remove(of_environments.WorldAnswer)
        text = render_prompt(of_environments.WorldAnswer, {"domain": "图书馆", "feedback": ""}, "zh")
        assert "图书馆" in text and "{{" not in text
    teacher.check(language, {prompt_name(one) for one in asked})
