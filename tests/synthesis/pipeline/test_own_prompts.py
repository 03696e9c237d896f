"""A user's own prompts: which stand for the package's, and which are refused before anything is asked."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from astra_jax.base.errors import InputError
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.pipeline.prompts import packaged, read_prompts
from synthesis.pipeline.teacher import OpenAITeacher
from synthesis.trajectories.teacher_answers import ChainTask, ServerTask

OWN = "Mine: {{ server.title }}{{ server.description }}{{ server.tools }}{{ chain }}{{ feedback }}"


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_an_own_prompt_stands_for_the_packages_in_its_language_alone(tmp_path: Path) -> None:
    prompts = pickle.loads(pickle.dumps(read_prompts(write(tmp_path, "de/chain_task.jinja", OWN))))
    server = {"title": "T", "description": "D", "tools": []}
    asked = {"server": server, "chain": ["a"], "feedback": ""}
    assert prompts.render(ChainTask, asked, "de") == "Mine: TD[]['a']"
    assert prompts.render(ChainTask, asked, "en") == packaged().render(ChainTask, asked, "en")
    # Where a language has some files of its own, the others are English ones that say what to write in.
    more = {"server": server, "tool_count": 1, "feedback": ""}
    assert prompts.render(ServerTask, more, "de") == packaged().render(ServerTask, more, "de")
    assert "German" in prompts.render(ServerTask, more, "de")


def test_own_prompts_are_another_teacher(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path, "en/chain_task.jinja", OWN))
    teacher = OpenAITeacher(OpenAITeacherConfig("http://x/v1", "m"), prompts=prompts)
    assert teacher.description["prompts"] == prompts.digest != packaged().digest
    assert read_prompts(write(tmp_path / "b", "en/chain_task.jinja", OWN)).digest == prompts.digest


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("en/chain_tusk.jinja", OWN, "there is no prompt 'en/chain_tusk.jinja'; write LANGUAGE/NAME.jinja"),
        ("xx/chain_task.jinja", OWN, "there is no prompt 'xx/chain_task.jinja'"),
        ("chain_task.jinja", OWN, "there is no prompt 'chain_task.jinja'"),
        ("en/chain_task.jinja", OWN + "{{ mood }}", "asks for mood, which it is not given; there are chain, feedback"),
        ("en/chain_task.jinja", OWN.replace("chain", "server"), "leaves out chain, which en/chain_task.jinja has"),
        ("en/chain_task.jinja", OWN.replace("{{ feedback }}", ""), "leaves out feedback"),
        ("en/chain_task.jinja", OWN + "{% if %}", "is not a template of jinja"),
        ("en/chain_task.jinja", OWN + "{% include 'nowhere' %}", "is not a template of jinja"),
    ],
)
def test_a_prompt_that_cannot_serve_is_refused_by_name(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        read_prompts(write(tmp_path, name, text))
    assert said in str(refused.value) and str(tmp_path / name) in str(refused.value)


def test_a_folder_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no prompts; give files such as"):
        read_prompts(tmp_path / "nowhere")
