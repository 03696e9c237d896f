"""No text that others wrote becomes a special token of Qwen3, wherever in a conversation or environment it stands."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_world import make_environment
from tokenizers import AddedToken, Tokenizer

from astra_jax.rollout.episode import EpisodeConfig, make_task
from astra_jax.sft.data import DataConfig, tokenise
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chatml import QWEN3
from synthesis.core.records import CodeTool, Message, ToolCall, ToolEnvironment, ToolSpec, Trajectory

# The added tokens of Qwen3's tokenizer (ids 151643 to 151668), in its order.
TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>",
    "</think>",
]  # fmt: skip
INNOCENT = "A WORD"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A small one that has all of Qwen3's added tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    ChatTokenizer.train(['The capital of Norway is Oslo. {}[]"\\n'] * 3, 400, folder)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.add_special_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    own.save(str(folder / "tokenizer.json"))
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module")
def special(tokenizer: ChatTokenizer) -> frozenset[int]:
    ids = [tokenizer.encode(token) for token in TOKENS]
    assert all(len(one) == 1 for one in ids)
    return frozenset(one for (one,) in ids)


def trajectory(text: str) -> Trajectory:
    """One that has the text in every field that is shown."""
    tool = ToolSpec(f"f{text}", f"Says {text}.", schema(text))
    call = ToolCall(f"call_{text}", f"f{text}", {f"a{text}": f"x{text}", "b": [{text: text}, [text]], "c": 1})
    return Trajectory(
        id="t", task_id="t", server_id="s", domain="d", language="en", tools=[tool], injected_failures=0, scores={},
        reward=1.0,
        messages=[
            Message("system", f"Be {text} brief."),
            Message("user", f"What {text}?"),
            Message("assistant", f"So {text}.", f"Hm {text}.", [call, call]),
            Message("tool", f'{{"is": "{text}"}}', tool_call_id=f"call_{text}", name=f"f{text}"),
            Message("tool", text),
            Message("system", text),
            Message("user", text),
            Message("assistant", f"And {text}", f"{text}{text}"),
        ],
    )  # fmt: skip


def schema(text: str) -> dict[str, Any]:
    """A schema that has the text in every place where a text may be."""
    return {
        "type": "object",
        "title": text,
        "description": text,
        "properties": {
            f"a{text}": {"type": "string", "description": text, "enum": [text], "default": text, "examples": [text]},
            "b": {"anyOf": [{"const": text}, {"items": {"pattern": text, "format": text, "x-words": {text: text}}}]},
        },
        "required": [f"a{text}"],
    }


def environment(text: str) -> ToolEnvironment:
    own = make_environment()
    tools = [
        CodeTool(ToolSpec(f"{tool.spec.name}{text}", f"Says {text}.", schema(text)), tool.code) for tool in own.tools
    ]
    new = dict(zip([tool.spec.name for tool in own.tools], tools, strict=True))
    calls = [msgspec.structs.replace(call, tool=new[call.tool].spec.name) for call in own.reference_calls]
    other = CodeTool(ToolSpec(f"other{text}", text, schema(text)), "")
    return msgspec.structs.replace(
        own, question=f"What {text}?", tools=tools, reference_calls=calls, distractors={"low": [other]}
    )


def counted(ids: Any, special: frozenset[int]) -> list[int]:
    return [one for one in ids if one in special]


@pytest.mark.parametrize("tag", TOKENS)
def test_a_trajectory_has_the_renderers_tags_alone(tokenizer: ChatTokenizer, special: frozenset[int], tag: str) -> None:
    assert tokenizer.encode(tag)[0] in special and len(tokenizer.encode(f"a{tag}b")) > 2
    for keep, thinking in product([True, False], [True, False]):
        if tag == "</think>" and not thinking:
            continue  # in content without reasoning: as the template has it, what stands before is thought
        config = DataConfig(seq_len=100_000, keep_reasoning=keep, thinking=thinking, split_at_user_turns=False)
        wanted = tokenise(trajectory(INNOCENT), tokenizer, config)
        made = tokenise(trajectory(tag), tokenizer, config)
        assert counted(made.tokens, special) == counted(wanted.tokens, special) != []
        # What is trained has its tags where it had them too.
        trained = [counted(one.tokens[one.loss_mask == 1], special) for one in (made, wanted)]
        assert trained[0] == trained[1] != []
    # The same as one text, which is how a template's output is tokenised.
    texts = ["".join(one.text for one in QWEN3.render(t.messages, t.tools)) for t in map(trajectory, (tag, INNOCENT))]
    hostile, innocent = (counted(tokenizer.encode(text), special) for text in texts)
    assert hostile == innocent


@pytest.mark.parametrize("tag", TOKENS)
def test_a_rollout_has_the_renderers_tags_alone(tokenizer: ChatTokenizer, special: frozenset[int], tag: str) -> None:
    config = EpisodeConfig(max_prompt_tokens=100_000)
    made, wanted = (make_task(environment(text), tokenizer, config, seed=3).prompt_ids for text in (tag, INNOCENT))
    assert counted(made, special) == counted(wanted, special) != []
    outputs = [tag, f'{{"a": "{tag}"}}', f"<|im_{tag}", f"{tag[:-1]}"]
    results = tokenizer.encode(QWEN3.tool_results_text(outputs))
    assert counted(results, special) == counted(tokenizer.encode(QWEN3.tool_results_text([INNOCENT] * 4)), special)


halves = ["<", "|", ">", "/", "im_start", "im_end", "think", "tool_call", "x"]
pieces = st.lists(st.sampled_from(halves + TOKENS), max_size=6)


@given(pieces.map("".join))
def test_no_text_joins_what_stands_around_it_to_a_tag(
    tokenizer: ChatTokenizer, special: frozenset[int], text: str
) -> None:
    """Half a tag at the end of a field, and the other half at the beginning of the next."""
    fields = trajectory(text)
    if "</think>" in text:  # in a content without reasoning the template reads it
        return
    config = DataConfig(seq_len=100_000, keep_reasoning=True, split_at_user_turns=False)
    made, wanted = (tokenise(one, tokenizer, config).tokens for one in (fields, trajectory(INNOCENT)))
    assert counted(made, special) == counted(wanted, special)
