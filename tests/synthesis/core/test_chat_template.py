"""A model folder's own chat template is rendered: it is one of the formats that are trained, or it is refused."""

from __future__ import annotations

import json

import pytest
from etils import epath
from template_world import PLAIN_CHATML, template

from synthesis.core.chat_template import FoundFormat, TemplateError, format_of
from synthesis.core.chatml import QWEN2_5, QWEN3, QWEN3_INSTRUCT, ChatML
from synthesis.core.records import Message, ToolSpec

WEATHER = ToolSpec("weather", "天气 of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
TALK = [Message("user", "Weather in Oslo?"), Message("assistant", "Rain."), Message("user", "Sure?")]


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
    assert format_of(folder) == FoundFormat(QWEN3, has_template=False)


# The default template of the first leaves tools out, and its `tool_use` writes them.
PLAIN = PLAIN_CHATML.partition("\n")[2]
WITH_TOOLS = template("qwen3_instruct_2507")


@pytest.mark.parametrize("layout", ["list", "folder", "folder with a default", "folder before the configuration"])
def test_named_templates_are_chosen_as_transformers_chooses_them(folder, layout: str) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    templates = {"default": PLAIN, "tool_use": WITH_TOOLS, "rag": "{{ 1 / 0 }}"}
    more = folder / "additional_chat_templates"
    if layout == "list":
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    else:
        more.mkdir()
        for name in ("tool_use", "rag"):
            (more / f"{name}.jinja").write_text(templates[name])
        (folder / "chat_template.jinja").write_text("{{ 1 / 0 }}" if "default" in layout else PLAIN)
        if "default" in layout:  # which goes before the file
            (more / "default.jinja").write_text(PLAIN)
        if "configuration" in layout:
            config["chat_template"] = [{"name": "tool_use", "template": "{{ 1 / 0 }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = format_of(folder).format
    hf = PreTrainedTokenizerFast.from_pretrained(str(folder))
    for tools in ([], [WEATHER]):
        ours = "".join(one.text for one in found.render(TALK, tools, add_generation_prompt=True))
        theirs = hf.apply_chat_template(
            [{"role": one.role, "content": one.content} for one in TALK],
            tools=[one.to_openai() for one in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert ours == theirs and ("# Tools" in ours) == bool(tools)


def test_a_folder_of_named_templates_without_a_default_is_refused(folder) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template("qwen3")}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    with pytest.raises(TemplateError, match=r"\(rag\) none is called 'default'"):
        format_of(folder)


@pytest.mark.parametrize("decoder", [True, False], ids=["with added_tokens_decoder", "without"])
def test_tokens_that_a_template_names_are_read_where_transformers_reads_them(folder, decoder: bool) -> None:
    """In `special_tokens_map.json`, unless `tokenizer_config.json` lists the added tokens."""
    ends = {"ours": "<|im_end|>", "wrong": "<|endoftext|>"}
    config = {"eos_token": ends["ours" if decoder else "wrong"]} | ({"added_tokens_decoder": {}} if decoder else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = {"eos_token": {"content": ends["wrong" if decoder else "ours"], "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    (folder / "chat_template.jinja").write_text(template("qwen2_5").replace("<|im_end|>\\n'", "' + eos_token + '\\n'"))
    assert "eos_token" in (folder / "chat_template.jinja").read_text()
    assert format_of(folder) == FoundFormat(QWEN2_5)


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
        ("x" * 300_000, "not a text of at most"),
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
        ('{"chat_template": 3}', "'default' is not a text"),
        ('{"chat_template": [{"name": "rag", "template": "x"}]}', r"\(rag\) none is called 'default'"),
    ],
)
def test_a_broken_configuration_is_refused(folder, config: str, message: str) -> None:
    (folder / "tokenizer_config.json").write_text(config)
    with pytest.raises(TemplateError, match=message):
        format_of(folder)
