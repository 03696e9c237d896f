"""A model folder's own chat template is rendered: it is one of the formats that are trained, or it is refused."""

from __future__ import annotations

import json

import pytest
from etils import epath
from template_world import template

from synthesis.core.chat_template import FoundFormat, TemplateError, format_of
from synthesis.core.chatml import QWEN2_5, QWEN3, QWEN3_INSTRUCT, ChatML


@pytest.fixture
def folder(tmp_path) -> epath.Path:
    return epath.Path(tmp_path)


@pytest.mark.parametrize(
    ("name", "chat_format"),
    [
        ("qwen3", QWEN3),
        ("qwen3_instruct_2507", QWEN3_INSTRUCT),
        ("qwen3_instruct_2507_training", QWEN3_INSTRUCT),
        ("qwen2_5", QWEN2_5),
        ("qwen2_5_training", QWEN2_5),
    ],
)
@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_released_templates_are_told_apart(folder, name: str, chat_format: ChatML, place: str) -> None:
    text = template(name)
    if place == "file":
        (folder / "chat_template.jinja").write_text(text)
        (folder / "tokenizer_config.json").write_text('{"chat_template": "not looked at"}')
    else:
        found = text if place == "config" else [{"name": "default", "template": text}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    assert format_of(folder) == FoundFormat(chat_format)


@pytest.mark.parametrize("content", [None, "{}", '{"chat_template": null}', "[]"])
def test_a_folder_without_one_is_of_qwen3s_format(folder, content) -> None:
    if content is not None:
        (folder / "tokenizer_config.json").write_text(content)
    assert format_of(folder) == FoundFormat(QWEN3)


@pytest.mark.parametrize("name", ["qwen3_training", "qwen3_5_think", "llama3_1", "deepseekv3", "gemma3"])
def test_other_formats_are_refused_with_what_they_write(folder, name: str) -> None:
    (folder / "chat_template.jinja").write_text(template(name))
    with pytest.raises(TemplateError, match=r"chat template .*(the nearest has .*--tokenizer|cannot be rendered)"):
        format_of(folder)


def test_a_change_of_one_character_is_seen(folder) -> None:
    text = template("qwen3")
    for old, new in (
        ("</think>\\n\\n", "</think>\\n"),
        ('", "arguments": ', '", "arguments":'),
        ("# Tools", "# tools"),
    ):
        assert old in text
        (folder / "chat_template.jinja").write_text(text.replace(old, new))
        with pytest.raises(TemplateError, match="is of no format that is trained here"):
            format_of(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for", "cannot be rendered"),
        ("{{ messages.append(1) }}", "cannot be rendered .SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered .SecurityError"),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("x" * 300_000, "no text of at most"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_refused(folder, text: str, message: str) -> None:
    (folder / "chat_template.jinja").write_text(text)
    with pytest.raises(TemplateError, match=message):
        format_of(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"chat_template": ', "cannot be read"),
        ('{"chat_template": 3}', "'default' is no text"),
        ('{"chat_template": [{"name": "rag", "template": "x"}]}', r"\(rag\) none is called 'default'"),
    ],
)
def test_a_broken_configuration_is_refused(folder, config: str, message: str) -> None:
    (folder / "tokenizer_config.json").write_text(config)
    with pytest.raises(TemplateError, match=message):
        format_of(folder)
