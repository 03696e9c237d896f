"""Rules of the audit: each finds its fault in one record, and nothing in the record beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from sandbox import SandboxConfig, SandboxPool
from synthesis.audit import text_claims as texts
from synthesis.audit.findings import RULES
from synthesis.audit.replay import Runner
from synthesis.audit.report import AuditedData, AuditReport, audit
from synthesis.core.datasets import write_dataset
from synthesis.core.records import (
    Answer,
    CallError,
    CodeExecution,
    CodeTool,
    Message,
    ReferenceCall,
    StateChange,
    SubQuestion,
    ToolCall,
    ToolEnvironment,
    ToolServer,
    ToolSpec,
    Trajectory,
    World,
)

one_loop = pytest.mark.asyncio(loop_scope="module")

CODE = """
RIVERS = {"Danube": 2850, "Rhine": 1233}
def length_of_river(river, unit="km"):
    if river not in RIVERS:
        raise ValueError("unknown river")
    return {"length": RIVERS[river], "unit": unit}
"""
RIVER = ToolSpec(
    "length_of_river",
    "Look up the length of a river.",
    {
        "type": "object",
        "properties": {"river": {"type": "string"}, "unit": {"type": "string", "enum": ["km", "mi"]}},
        "required": ["river"],
        "additionalProperties": False,
    },
)
LENGTH = '{"length":2850,"unit":"km"}'
LONGER = '{"length":2900,"unit":"km"}'
QUESTION = "How long is the Danube?"


def made(number: int, name: str = "length_of_river", **arguments: Any) -> Message:
    return Message("assistant", "", "I look it up.", [ToolCall(f"call_{number}", name, arguments)])


def gave(number: int, text: str = LENGTH) -> Message:
    return Message("tool", text, tool_call_id=f"call_{number}")


def said(text: str) -> Message:
    return Message("assistant", text)


def asked(text: str = QUESTION) -> Message:
    return Message("user", text)


def conversation(*messages: Message, **more: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "id": "one", "task_id": "one", "server_id": "rivers", "domain": "geography", "language": "en",
        "tools": [RIVER], "messages": list(messages), "injected_failures": 0, "scores": {}, "reward": None,
    }  # fmt: skip
    return Trajectory(**(fields | more))


GOOD = (asked(), made(1, river="Danube"), gave(1), said("The Danube is 2,850 km long."))
TIMEOUT = gave(1, '{"error":"timeout"}')
ZH = "多瑙河有多长？"

CONVERSATIONS: dict[str, tuple[Trajectory, Trajectory]] = {
    "unknown_tool": (
        conversation(asked(), made(1, "depth_of_river", river="Danube"), gave(1), said("It is 2850 km.")),
        conversation(
            asked(), made(1, "depth_of_river", river="Danube"), gave(1, "unknown tool"), made(2, river="Danube"),
            gave(2), said("It is 2850 km."), errors=[CallError("call_1", "unknown_tool")],
        ),
    ),
    "invalid_arguments": (
        conversation(asked(), made(1, name_of_river="Danube"), gave(1), said("It is 2850 km.")),
        conversation(
            asked(), made(1, name_of_river="Danube").weighed(0), gave(1, "error: river is missing"),
            made(2, river="Danube", unit="km"), gave(2), said("It is 2850 km."),
        ),
    ),
    "bad_schema": (
        conversation(asked("Hello"), said("Hello!"), tools=[ToolSpec("river", "A river.", {"type": "objet"})]),
        conversation(asked("Hello"), said("Hello!"), tools=[ToolSpec("river", "A river.", {})]),
    ),
    "missing_result": (
        conversation(asked(), made(1, river="Danube"), made(2, river="Danube"), gave(2), said("It is 2850 km.")),
        conversation(asked(), made(1, river="Danube")),  # as examples of single calls end
    ),
    "argument_from_nowhere": (
        conversation(asked("How long is it?"), made(1, river="Volga"), gave(1), said("It is 2850 km.")),
        conversation(asked("How long is the DANUBE in miles?"), made(1, river="Danube", unit="mi"), gave(1),
                     said("It is 2850.")),
    ),
    "repeated_call": (
        conversation(*GOOD[:3], made(2, river="Danube"), gave(2), said("It is 2850 km.")),
        conversation(
            asked(), made(1, river="Danube"), TIMEOUT, made(2, river="Danube"), gave(2), said("It is 2850 km.")
        ),
    ),
    "contradictory_results": (
        conversation(*GOOD[:3], made(2, river="Danube"), gave(2, LONGER), said("It is 2850 km.")),
        conversation(
            asked("How long is it, and after the update of the Danube?"), made(1, river="Danube"), gave(1),
            made(2, "update_river", river="Danube"), gave(2, "done"), made(3, river="Danube"),
            gave(3, LONGER), said("It was 2850 km and is 2900 km."),
            tools=[RIVER, ToolSpec("update_river", "Measure a river.", RIVER.parameters)],
        ),
    ),
    "unsupported_claim": (
        conversation(*GOOD[:3], said("The Danube is 2,850 km long and ends in Odessa.")),
        conversation(*GOOD[:3], said("**Length:** the DANUBE is 2.85 thousand km long (about 2,850).")),
    ),
    "success_after_failure": (
        conversation(asked(), made(1, river="Danube"), TIMEOUT, said("Your request is done.")),
        conversation(asked(), made(1, river="Danube"), TIMEOUT, said("I could not find it: the service timed out.")),
    ),
    "refusal_after_success": (
        conversation(*GOOD[:3], said("I am unable to look that up.")),
        conversation(asked(), made(1, river="Danube"), gave(1, "[]"), said("I am unable to find it.")),
    ),
    "template_tokens": (
        conversation(*GOOD[:3], said("It is 2850 km.<|im_end|>")),
        conversation(*GOOD[:3], said("It is 2850 km, so x < |y| and f(x) -> y.")),
    ),
    "talk_of_simulation": (
        conversation(*GOOD[:3], said("In this simulated task it is 2850 km.")),
        conversation(
            asked("Simulate it: how long is the Danube?"), *GOOD[1:3], said("Simulate it as a line of 2850 km.")
        ),
    ),
    "wrong_language": (
        conversation(*GOOD[:3], said("The length of the river is 2850 km."), language="zh"),
        conversation(asked("Danube有多长？"), *GOOD[1:3], said("Danube长2850公里。"), language="zh"),
    ),
    "foreign_words": (
        conversation(asked("请问 please tell me Danube有多长？"), *GOOD[1:3], said("它长2850公里。"), language="zh"),
        conversation(asked("Danube有多长？"), *GOOD[1:3], said("它长2850公里（length_of_river）。"), language="zh"),
    ),
}  # fmt: skip
"""Rule → a record with the fault, and one without."""


def step(**more: Any) -> SubQuestion:
    fields: dict[str, Any] = {
        "id": 1, "question": QUESTION, "answer": Answer(2850), "depends_on": [], "hop": 1, "needs_tool": True,
        "intent": "length",
    }  # fmt: skip
    return SubQuestion(**(fields | more))


REFERENCE = ReferenceCall(1, "length_of_river", {"river": "Danube"}, {"length": 2850, "unit": "km"})


def environment(**more: Any) -> ToolEnvironment:
    fields: dict[str, Any] = {
        "id": "one", "language": "en", "domain": "geography", "structure": "single_hop", "question": QUESTION,
        "answer": Answer(2850), "sub_questions": [step()], "tools": [CodeTool(RIVER, CODE)],
        "reference_calls": [REFERENCE], "distractors": {}, "entities": ["Danube"], "signature": "length",
        "split": "train",
    }  # fmt: skip
    return ToolEnvironment(**(fields | more))


def call(**more: Any) -> ReferenceCall:
    return msgspec.structs.replace(REFERENCE, **more)


WORLD_CODE = """
def add(name):
    STATE["guests"][name] = {"seats": 2}
    return name
def broken():
    return []
"""
CHECK = "def check(before, after):\n    return 'Ann' in after['guests'] and 'Ann' not in before['guests']"


def world(*, check: str = CHECK, listed: Mapping[str, Any] | None = None, output: str = "Ann") -> ToolEnvironment:
    change = StateChange("guests", "Ann", None, {"seats": 2} if listed is None else dict(listed))
    spec = ToolSpec("add", "Add a guest.", {"type": "object", "properties": {"name": {"type": "string"}}})
    return environment(
        question="Please add Ann.", answer=Answer(True), sub_questions=[step(answer=Answer(True), check=check)],
        tools=[CodeTool(spec, "")], reference_calls=[ReferenceCall(1, "add", {"name": "Ann"}, output)],
        world=World({"guests": {"seats": "integer"}}, {"guests": {}}, WORLD_CODE, [change]),
    )  # fmt: skip


LEAKY = 'def length_of_river(river):\n    return {"length": 2850, "unit": "km"}'
ENVIRONMENTS: dict[str, tuple[ToolEnvironment, ToolEnvironment]] = {
    "call_not_reproduced": (environment(reference_calls=[call(output={"length": 2850, "unit": "mi"})]), environment()),
    "answer_for_nonsense": (environment(tools=[CodeTool(RIVER, LEAKY)]), environment()),
    "missing_reference": (
        environment(reference_calls=[], answer=Answer("km")),
        environment(sub_questions=[step(needs_tool=False)], reference_calls=[]),
    ),
    "bad_graph": (
        environment(sub_questions=[step(hop=2)]),
        environment(sub_questions=[step(), step(id=2, hop=2, depends_on=[1], needs_tool=False)]),
    ),
    "answer_not_in_result": (
        environment(sub_questions=[step(answer=Answer(2851))]),
        environment(sub_questions=[step(answer=Answer(2851, tolerance=1.0))], answer=Answer("2,850")),
    ),
    "unsupported_answer": (
        environment(answer=Answer(["2850", "1233"])),
        environment(
            sub_questions=[step(), step(id=2, answer=Answer(1233))], answer=Answer(1617),  # the difference
            reference_calls=[
                REFERENCE,
                call(sub_question=2, arguments={"river": "Rhine"}, output={"length": 1233, "unit": "km"}),
            ],
            question="How much longer is the Danube than the Rhine?",
        ),
    ),
    "question_has_answer": (environment(question="How long is the Danube, with 2850 km?"), environment()),
    "argument_from_nowhere": (environment(question="How long is the longest river?"), environment()),
    "state_not_reached": (world(check="def check(before, after):\n    return False"), world()),
    "unlisted_change": (world(listed={"seats": 3}), world()),
}  # fmt: skip


async def audited(folder: Any, *records: Any, pool: SandboxPool, servers: Any = None, **limits: float) -> AuditReport:
    """The report of one dataset of these records."""
    kind = type(records[0])
    write_dataset(folder / "data", kind, records, card={})
    return await audit([AuditedData("data", folder / "data", kind)], servers or {}, Runner(pool), limits)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    async with SandboxPool(SandboxConfig(max_slots=4)) as opened:
        yield opened


def faults(report: AuditReport) -> set[str]:
    return {one.rule for one in report.findings}


@one_loop
@pytest.mark.parametrize(("rule", "records"), [*CONVERSATIONS.items(), *ENVIRONMENTS.items()])
async def test_a_rule_finds_its_fault_and_leaves_sound_records_alone(rule, records, pool, tmp_path) -> None:
    wrong, right = records
    report = await audited(tmp_path, wrong, pool=pool)
    assert rule in faults(report)
    assert rule in {one.name for one in report.failing}
    assert faults(await audited(tmp_path, right, pool=pool)) == set()


def test_every_rule_has_a_case_here_and_a_line_in_the_manual() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "trajectories.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` | {rule.about} | {rule.limit:.0%} |" in manual for name, rule in RULES.items())
    several = {"exact_duplicate", "near_duplicate", "duplicate_id", "wrong_split", "unreadable_row"}
    several |= {"leaked_call", "leaked_question", "leaked_entity"}
    assert CONVERSATIONS.keys() | ENVIRONMENTS.keys() | several == RULES.keys()


@one_loop
async def test_calls_of_trajectories_run_again_where_their_code_is_stored(pool, tmp_path) -> None:
    server = ToolServer("rivers", "Rivers", "Rivers.", "geography", "en", [RIVER], CodeExecution(CODE))
    wrong = conversation(asked("And the Rhine?"), made(1, river="Rhine"), gave(1), said("It is 2850 km."), id="two")
    report = await audited(tmp_path, conversation(*GOOD), wrong, pool=pool, servers={"rivers": server})
    assert [(one.rule, one.record) for one in report.findings] == [("call_not_reproduced", "two")]
    assert "1233" in report.findings[0].detail and "2850" in report.findings[0].detail
    foreign = await audited(tmp_path, conversation(*GOOD, server_id="other"), pool=pool)
    assert not foreign.failing
    [rule] = [one for one in foreign.rules if one.name == "call_not_reproduced"]
    assert rule.checked == 0 and sum(rule.left_out.values()) == 1, "what could not be checked is counted"


@one_loop
async def test_duplicates_and_leaks(pool, tmp_path) -> None:
    nearly = "How long is the river Danube, if I may ask you that now?"
    train = [
        environment(id="a"), environment(id="b"), environment(id="c", question=nearly),
        environment(id="d", question=f"{nearly} Please"),
    ]  # fmt: skip
    held = [environment(id="x", split="held_out"), environment(id="y", split="train")]
    for name, records in (("train", train), ("held_out", held)):
        write_dataset(tmp_path / name, ToolEnvironment, records, card={})
    sources = [
        AuditedData("train", tmp_path / "train", ToolEnvironment),
        AuditedData("held", tmp_path / "held_out", ToolEnvironment, held_out=True),
    ]
    report = await audit(sources, {}, None, {"exact_duplicate": 1})
    found = {(one.rule, one.record) for one in report.findings}
    assert {("exact_duplicate", "b"), ("near_duplicate", "d"), ("wrong_split", "y")} <= found
    assert {(rule, "x") for rule in ("leaked_call", "leaked_question", "leaked_entity")} <= found
    names = {one.name for one in report.failing}
    assert "exact_duplicate" not in names and {"near_duplicate", "leaked_call"} <= names
    assert json.loads(json.dumps(report.as_json()))["datasets"][1]["split"] == "held out"
    shape = {row.name: row for row in report.shape["train"]}
    assert shape["share of exact and near duplicates (0.5)"].value == 0.5
    assert shape["share of the largest domain"].meets is False


@pytest.mark.parametrize(
    ("written", "held", "is_held"),
    [
        ("2,850", "2850", True), ("2.85", "2850000 tons", True), ("12.3", "0.1234", True),
        ("14", "two p.m., 2", False), ("2", "it is 14:30", True), ("3", "three rivers", True),
        ("1 234", "1234", True), ("7", "70", False),
        ("5", "五", True), ("3.1", "3.14159", True), ("3.2", "3.14159", False),
    ],
)  # fmt: skip
def test_numbers_are_compared_as_people_write_them(written: str, held: str, is_held: bool) -> None:
    assert texts.is_held(written, texts.held_numbers(held)) is is_held


@one_loop
async def test_hostile_records_are_read(pool, tmp_path) -> None:
    """Nothing is fetched, nothing overflows, and each fault is a finding."""
    schema = {"type": "object", "properties": {"river": {"$ref": "http://127.0.0.1:9/schema"}}}
    deep = json.loads('{"a":' * 300 + "1" + "}" * 300)
    arguments = {"river": "²³ 9" + "9" * 400, "depth": 10**30, "more": deep, "large": 1e308}
    record = conversation(
        asked("²" * 9000), Message("assistant", "", "", [ToolCall("call_1", "length_of_river", arguments)]),
        gave(1, '{"status": 404, "x": ' + "9" * 400 + "}"), said("1" * 500 + " " + "A " * 500),
        tools=[ToolSpec("length_of_river", "", schema), ToolSpec("odd", "", {"type": "object", "required": "all"})],
    )  # fmt: skip
    found = faults(await audited(tmp_path, record, pool=pool))
    assert {"invalid_arguments", "bad_schema", "argument_from_nowhere"} <= found


def test_similar_questions_are_found_exactly() -> None:
    questions = [f"What is the {kind} of {place}?" for kind in ("capital", "area in km") for place in "abcdefgh"]
    questions += ["多瑙河的长度是多少公里？", "莱茵河的长度是多少公里？"]
    sets = [texts.shingles(one) for one in questions]
    expected = {
        number
        for number in range(len(sets))
        if any(len(sets[number] & other) >= 0.5 * len(sets[number] | other) for other in sets[:number])
    }
    assert {number for number, _, _ in texts.near_pairs(questions)} == expected and len(questions) - 1 in expected
