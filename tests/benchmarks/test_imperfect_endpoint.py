"""The audit of stored trajectories finds each fault again from the record alone, and nothing in a good one."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from benchmark_world import program

from synthesis.core.records import Message, ToolCall, ToolSpec, Trajectory

audit = program("benchmarks.imperfect_endpoint")
TOOL = ToolSpec("find_amber", "Finds it.", {"type": "object", "properties": {}})
GOOD = Trajectory(
    "t", "t", "s", "d", "en", [TOOL],
    [
        Message("user", "Which amber record has the item 12 of the depot in Arles, please?"),
        Message("assistant", "", "I look it up.", [ToolCall("call_1", "find_amber", {})]),
        Message("tool", '{"record":7}', tool_call_id="call_1"), Message("assistant", "The record is 7."),
    ],
    0, {}, 1.0, needs=["find_amber"],
)  # fmt: skip
CHINESE = "请在月底之前告诉我这件物品的记录，分公司的同事正在等它的编号。"


def with_message(index: int, message: Message) -> Trajectory:
    messages = list(GOOD.messages)
    messages[index] = message
    return msgspec.structs.replace(GOOD, messages=messages)


@pytest.mark.parametrize(
    ("trajectory", "found"),
    [
        (GOOD, []),
        (with_message(0, Message("user", CHINESE)), ["question in another language"]),
        (with_message(3, Message("assistant", CHINESE)), ["answer or result in another language"]),
        (with_message(2, Message("tool", CHINESE)), ["answer or result in another language"]),
        (with_message(0, Message("user", "Use find_amber for the item 12 of Arles.")), ["question names a tool"]),
        (with_message(1, Message("assistant", "", "", [ToolCall("call_1", "find_birch", {})])),
         ["call of a tool that is not there", "a needed tool was not called"]),
        (with_message(3, Message("assistant", "<think>The record is 7.")), ["markup in an answer"]),
        (with_message(3, Message("assistant", "It is 7.<|im_end|>")), ["markup in an answer", "half an answer"]),
        (with_message(3, Message("assistant", "The rec")), ["half an answer"]),
        (msgspec.structs.replace(GOOD, messages=[GOOD.messages[0], GOOD.messages[3]], needs=None), ["no call"]),
        (msgspec.structs.replace(GOOD, messages=[GOOD.messages[0], GOOD.messages[3]], needs=[]), []),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_again(trajectory: Trajectory, found: list[str]) -> None:
    assert audit.faults(trajectory) == found


def test_the_model_spoils_what_it_says_in_its_shares() -> None:
    model = audit.ImperfectModel()
    prompt = "in this order: find_amber → find_birch"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
    for seed in range(2_000):
        model.message("chain_task", body, random.Random(seed))
    for name, share in (("body", 0.15), ("refusal", 0.03), ("chinese", 0.15), ("names a tool", 0.1)):
        assert abs(model.spoilt[name] / 2_000 - share) < 0.03, name


def test_the_agents_errors_are_those_that_the_audit_finds() -> None:
    """Every spoilt final answer has a fault, and no other one has."""
    model = audit.ImperfectModel()
    question = {"role": "user", "content": "I need the amber of item 12."}
    body = {"messages": [question, {"role": "tool", "content": '{"record":7}'}]}
    for seed in range(1_000):
        before = model.spoilt.total()
        said = Message("assistant", model.message("agent", body, random.Random(seed))["content"])
        assert bool(audit.faults(with_message(3, said))) == (model.spoilt.total() > before), said.content
    assert abs(model.spoilt["markup"] / 1_000 - 0.1) < 0.03 and abs(model.spoilt["half"] / 1_000 - 0.05) < 0.03
