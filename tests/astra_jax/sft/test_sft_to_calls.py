"""From SFT to calls: what is trained on is what a rollout asks for, also of a model that gained the tokens of calls."""

from __future__ import annotations

import json
from pathlib import Path

from plain_world import ADDED, make_folder
from rollout_world import make_environment

from astra_jax.rollout.episode import EpisodeConfig, make_task, offered_tools
from astra_jax.sft.data import DataConfig, tokenise
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.records import Message, ToolCall, ToolEnvironment, Trajectory

EPISODE = EpisodeConfig(max_prompt_tokens=900, max_response_tokens=300, distractors_per_band=0)


def reference(environment: ToolEnvironment) -> Trajectory:
    """The environment's own calls, with what they return, and its answer."""
    tools = [tool.spec for tool in offered_tools(environment, EPISODE, seed=0).values()]
    messages = [Message("user", environment.question)]
    for i, one in enumerate(environment.reference_calls):
        messages += [
            Message("assistant", "", tool_calls=[ToolCall(f"call_{i}", one.tool, one.arguments)]),
            Message("tool", json.dumps(one.output, separators=(",", ":")), tool_call_id=f"call_{i}", name=one.tool),
        ]
    messages.append(Message("assistant", f"The answer is {environment.answer.value}."))
    return Trajectory(environment.id, environment.id, "facts", "geography", "en", tools, messages, 0, {}, 1.0)


def test_what_is_trained_on_begins_with_the_prompt_of_a_rollout(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(make_folder(tmp_path))
    for environment in (make_environment("france", "France"), make_environment("japan", "Japan")):
        prompt = list(make_task(environment, tokenizer, EPISODE, seed=0).prompt_ids)
        made = tokenise(reference(environment), tokenizer, DataConfig(seq_len=1_200))
        assert made.tokens[: len(prompt)].tolist() == prompt
        assert not made.loss_mask[: len(prompt)].any() and made.loss_mask[len(prompt)]
        assert made.tokens[len(prompt)] == tokenizer.encode(ADDED[0])[0]
