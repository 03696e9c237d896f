"""The released ASTRA-RL record: out and in again, and what is wrong with it. Real sandbox, offline teacher."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from environments_world import CONFIG, Rules

from sandbox import Limits, SandboxConfig, SandboxPool
from synthesis.astra_format.records import answer_text, parse, spec_of
from synthesis.astra_format.rl import (
    AstraRecord,
    Imported,
    SearchConfig,
    defects,
    import_dataset,
    import_record,
    read_records,
    write_records,
)
from synthesis.core.datasets import read_dataset
from synthesis.core.matching import match
from synthesis.core.records import Answer, ToolEnvironment
from synthesis.core.reward import solved_by, sub_tasks_by_tool
from synthesis.core.stages import Journal, Rejected
from synthesis.environments import dependency_graph
from synthesis.environments.pipeline import synthesize
from synthesis.environments.statistics import statistics_of
from synthesis.environments.verify import solve
from synthesis.pipeline.executors import Executor

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(limits=Limits(cpu_seconds=1))) as opened:  # one test spins
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environments(pool: SandboxPool, tmp_path_factory: pytest.TempPathFactory) -> list[ToolEnvironment]:
    path = tmp_path_factory.mktemp("environments")
    config = dataclasses.replace(CONFIG, count=24, languages={"en": 0.5, "zh": 0.5}, max_hops=3)
    with Journal(path / "journal.sqlite") as journal:
        await synthesize(config, executor=Executor(Rules(), pool), journal=journal, out_dir=path, seed=3)
    made = [one for split in ("train", "held_out") for one in read_dataset(path / split, ToolEnvironment)]
    assert len(made) >= 20 and {one.language for one in made} == {"en", "zh"}
    assert any(len(subs) > 1 for one in made for subs in sub_tasks_by_tool(one).values())
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def imported(
    pool: SandboxPool, environments: list[ToolEnvironment], tmp_path_factory: pytest.TempPathFactory
) -> Imported:
    path = tmp_path_factory.mktemp("records")
    assert write_records(path / "rl.jsonl", environments, seed=0) == len(environments)
    with Journal(path / "journal.sqlite") as journal:
        return await import_dataset(path / "rl.jsonl", pool, journal)


# ---------------------------------------------------------------------------------------------------------------------
# Out and in again


async def test_every_environment_comes_back(environments: list[ToolEnvironment], imported: Imported) -> None:
    assert not imported.rejected and not imported.defects and imported.rows == len(environments)
    assert [one.id for one in imported.records] == [f"astra-rl-{row}" for row in range(len(environments))]
    for before, after in zip(environments, imported.records, strict=True):
        assert (after.question, after.language, after.mode) == (before.question, before.language, "imported")
        assert _tools(after.tools) == _tools(before.tools)
        irrelevant = [_tools(tool for band in one.distractors.values() for tool in band) for one in (before, after)]
        assert irrelevant[0] == irrelevant[1]
        assert set(after.distractors) <= {"medium"}
        answers = [
            {tool: sorted(answer_text(sub.answer) for sub in subs) for tool, subs in sub_tasks_by_tool(one).items()}
            for one in (before, after)
        ]
        assert answers[0] == answers[1]


async def test_the_data_flow_is_found_again(environments: list[ToolEnvironment], imported: Imported) -> None:
    pairs = list(zip(environments, imported.records, strict=True))
    for _, after in pairs:
        levels = dependency_graph.hops(dependency_graph.graph_of(after.sub_questions))
        assert {step.id: step.hop for step in after.sub_questions} == levels
        assert [call.sub_question for call in after.reference_calls] == [step.id for step in after.sub_questions]
        assert all(step.question.endswith(")") for step in after.sub_questions)
    same_calls = [_calls(before) == _calls(after) for before, after in pairs]
    same_structure = [before.structure == after.structure for before, after in pairs]
    # A question may have two ways to an answer; which of them was meant is not in the record.
    assert sum(same_calls) >= 0.9 * len(pairs) and sum(same_structure) >= 0.9 * len(pairs)


async def test_imported_environments_reward_the_same(
    pool: SandboxPool, environments: list[ToolEnvironment], imported: Imported
) -> None:
    for before, after in zip(environments, imported.records, strict=True):
        assert len(await solve(after, pool)) == len(before.reference_calls)
        tasks = [sub_tasks_by_tool(one) for one in (before, after)]
        for call in [*before.reference_calls, *after.reference_calls]:
            counts = [len(solved_by(task, call.tool, call.output)) for task in tasks]
            assert counts[0] == counts[1] >= 1
        steps = {step.id: step for step in after.sub_questions}
        assert all(call.rule == match(call.output, steps[call.sub_question].answer) for call in after.reference_calls)
    assert statistics_of(imported.records)["samples"] == len(environments)


def _tools(tools: Any) -> list[tuple[str, str, bytes]]:
    return sorted((one.spec.name, one.code, msgspec.json.encode(one.spec, order="sorted")) for one in tools)


def _calls(environment: ToolEnvironment) -> list[tuple[str, str]]:
    return sorted((call.tool, str(call.arguments)) for call in environment.reference_calls)


async def test_an_import_goes_on_from_its_journal(
    pool: SandboxPool, environments: list[ToolEnvironment], tmp_path: Path
) -> None:
    write_records(tmp_path / "rl.jsonl", environments[:2], seed=0)

    class Closed:
        async def call(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("all rows are in the journal")

    with Journal(tmp_path / "journal.sqlite") as journal:
        first = await import_dataset(tmp_path / "rl.jsonl", pool, journal)
        assert await import_dataset(tmp_path / "rl.jsonl", Closed(), journal) == first  # type: ignore[arg-type]


async def test_the_same_seed_gives_the_same_file(environments: list[ToolEnvironment], tmp_path: Path) -> None:
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        write_records(tmp_path / f"{name}.jsonl", environments, seed)
    texts = {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    # Needed tools do not stand first in every record.
    records = read_records(tmp_path / "a.jsonl")
    assert any(spec_of(one.schemas[0]).name not in one.answers for one in records)


# ---------------------------------------------------------------------------------------------------------------------
# Hand-written records

PRICES = '''"""Prices."""
PRICES = {"wireless mouse": 24.5, "USB hub": 31}


def get_price(item):
    if item not in PRICES:
        raise ValueError(f"unknown item: {item}")
    return {"price": PRICES[item], "currency": "USD"}
'''
ORDER = """import random


def place_order(item):
    return {"transaction": f"TX{random.randint(10**8, 10**9)}", "item": item}
"""


def schema(name: str, required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {
        one: {"type": kind} if isinstance(kind, str) else kind for one, kind in {**required, **optional}.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": f"The tool {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


PRICE = schema("get_price", {"item": "string"})


def record(
    question: str, schemas: list[Any], code: dict[str, str], answers: dict[str, list[Any]], row: int = 7
) -> AstraRecord:
    given = {
        "prompt": [{"role": "user", "content": question}],
        "tool_schema": json.dumps(schemas),
        "tool_dict": json.dumps(code),
        "sub_qa_dict": answers,
    }
    return parse(json.dumps(given).encode(), row, "rl.jsonl")


QUESTION = "How much is a wireless mouse?"


def price(*answers: Any, code: str = PRICES, schemas: Any = (PRICE,), tool: str = "get_price") -> AstraRecord:
    """A record of one tool, changed in places."""
    return record(QUESTION, list(schemas), {"get_price": code}, {tool: list(answers)} if answers else {})


RIGHT = price("24.5")
ORDERING = schema("place_order", {"item": "string"})


async def test_a_right_record(pool: SandboxPool) -> None:
    assert defects(RIGHT) == []
    one = await import_record(RIGHT, pool)
    (call,) = one.reference_calls
    assert (one.id, one.split, one.structure, one.signature) == ("astra-rl-7", "train", "single_hop", "get_price")
    assert call.arguments == {"item": "wireless mouse"} and call.output == {"price": 24.5, "currency": "USD"}
    assert call.rule == "number" and one.answer == Answer(["24.5"]) and one.entities == ["wireless mouse"]
    assert one.sub_questions[0].question == "The tool get_price. get_price(item='wireless mouse')"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (price("24.5", schemas=[PRICE, PRICE]), ["colliding_names"]),
        (price("24.5", schemas=[PRICE, ORDERING]), ["missing_tool"]),
        (price("24.5", tool="place_order"), ["missing_tool"]),
        (price("24.5", schemas=[]), ["missing_tool"]),
        (
            record(QUESTION, [PRICE], {"get_price": PRICES, "place_order": ORDER}, {"get_price": [24.5]}),
            ["missing_tool"],
        ),
        (price("24.5", code="def get_price(item:"), ["bad_code"]),
        (price("24.5", code=ORDER), ["bad_code"]),
        (price(), ["no_answers"]),
        (price("24.5", " "), ["empty_answer"]),
        (record(QUESTION, [PRICE], {"get_price": PRICES}, {"get_price": []}), ["empty_answer"]),
        (price("24.5", schemas=[PRICE, {"name": "no way"}]), ["bad_schema"]),
        (price("24.5", schemas=[PRICE, {"name": "x", "parameters": {"required": ["y"]}}]), ["bad_schema"]),
        (price("24.5", schemas=[PRICE, {"name": "x", "parameters": {"type": "dict"}}]), ["bad_schema"]),
        (price("24.5", schemas=[PRICE, 3]), ["bad_schema"]),
        (
            price("24.5", schemas=[{"name": "get_price", "parameters": {"properties": {"item": {"$ref": "#/x"}}}}]),
            ["bad_schema"],
        ),
        (price(" ", schemas=[PRICE, PRICE, ORDERING]), ["colliding_names", "missing_tool", "empty_answer"]),
    ],
)
async def test_defects_that_show_without_running(pool: SandboxPool, given: AstraRecord, names: list[str]) -> None:
    found = defects(given)
    assert [one.name for one in found] == names and all(one.detail for one in found)
    with pytest.raises(Rejected) as rejection:
        await import_record(given, pool)
    assert rejection.value.reason == names[0] and rejection.value.detail == found[0].detail


@pytest.mark.parametrize(
    ("given", "reason", "detail"),
    [
        # The release's own: the answer is what a random generator said once.
        (
            record(QUESTION, [ORDERING], {"place_order": ORDER}, {"place_order": ["TX5"]}),
            "unreachable_answer",
            "no call of place_order that was tried gives 'TX5'.*nondeterministic",
        ),
        (price("25.1"), "unreachable_answer", r"get_price that was tried gives 25.1 \(\d+ calls"),
        (
            price("24.5", code="def get_price(item):\n    return {'price': 24.5}\n"),
            "ignores_arguments",
            "other calls of get_price that were tried give 24.5 too",
        ),
        (
            price("24.5", code=PRICES.replace('raise ValueError(f"unknown item: {item}")', "item = 'wireless mouse'")),
            "ignores_arguments",
            "zzqx",
        ),
        (
            price("24.5", code=PRICES.replace("(item)", "(item='wireless mouse')")),
            "ignores_arguments",
            r"get_price\(\)",
        ),
        (
            price("24.5", code="import random\n" + PRICES.replace('"USD"}', '"USD", "stock": random.random()}')),
            "nondeterministic",
            "get_price",
        ),
        (price("24.5", code="import socket\n" + PRICES), "needs_network", "socket"),
        # The tool only repeats what it is given: who makes the call has the answer already.
        (price("cheap", code="def get_price(item):\n    return item\n"), "unreachable_answer", "cheap"),
        (price("24.5", "24.50"), "shared_call", "stands for another answer"),
        (
            record(
                "Ask.",
                [schema("first", {"x": "string"}), schema("second", {"x": "string"})],
                {
                    "first": "def first(x):\n    return {'qqa': 'blue stone'}[x]\n",
                    "second": "def second(x):\n    return {'blue stone': 'qqa'}[x]\n",
                },
                {"first": ["blue stone"], "second": ["qqa"]},
            ),
            "cyclic",
            "first, second",
        ),
    ],
)
async def test_records_that_do_not_hold(pool: SandboxPool, given: AstraRecord, reason: str, detail: str) -> None:
    assert defects(given) == []
    with pytest.raises(Rejected, match=detail) as rejection:
        await import_record(given, pool)
    assert rejection.value.reason == reason


async def test_arithmetic_on_numbers_of_the_question_is_found(pool: SandboxPool) -> None:
    given = record(
        "I buy 3 chairs at 129.5 dollars each and have a voucher of 50 dollars. What do I pay?",
        [
            schema("pay", {"count": "integer", "price": "number", "voucher": "number"}),
            schema("total", {"values": {"type": "array", "items": {"type": "number"}}}),
            schema("calculate", {"expression": "string"}),
        ],
        {
            "pay": "def pay(count, price, voucher):\n    return {'pay': count * price - voucher}\n",
            "total": "def total(values):\n    return {'total': sum(values)}\n",
            "calculate": "def calculate(expression):\n    return {'value': eval(expression)}\n",
        },
        {"pay": ["338.5"]},
    )
    one = await import_record(given, pool)
    assert one.reference_calls[0].arguments == {"count": 3, "price": 129.5, "voucher": 50}
    assert [tool.spec.name for tool in one.distractors["medium"]] == ["total", "calculate"]
    code = {name: given.code[name] for name in ("total", "calculate")}
    answers = {"total": [27], "calculate": ["119"]}
    sums = await import_record(record("Add 4, 8 and 15; what is 17 * (3 + 4)?", given.schemas[1:], code, answers), pool)
    assert [call.arguments for call in sums.reference_calls] == [{"values": [4, 8, 15]}, {"expression": "17 * (3 + 4)"}]
    assert sums.structure == "parallel_single_hop"


async def test_a_chain_is_found_through_outputs(pool: SandboxPool) -> None:
    """The second call needs an id that is in the first one's output and is no gold answer."""
    given = record(
        "张三的订单状态是什么？",
        [schema("order_status", {"order_id": "string"}), schema("find_customer", {"name": "string"})],
        {
            "find_customer": "def find_customer(name):\n    people = {'张三': ('金卡', 77), '李四': ('银卡', 1)}\n"
            "    level, number = people[name]\n    return {'level': level, 'order': f'A-{number}'}\n",
            "order_status": "def order_status(order_id):\n    kind, number = order_id.split('-')\n"
            "    return {'status': {77: '已发货', 1: '已取消'}[int(number)]}\n",
        },
        {"order_status": ["已发货"], "find_customer": ["金卡"]},
    )
    one = await import_record(given, pool)
    assert (one.language, one.structure, one.signature) == ("zh", "multi_hop", "find_customer>order_status")
    assert [call.arguments for call in one.reference_calls] == [{"name": "张三"}, {"order_id": "A-77"}]
    assert [step.depends_on for step in one.sub_questions] == [[], [1]]


WEATHER = """
DATA = {("Oslo", "2026-01-05"): {"high": -3, "low": -9}, ("Bergen", "2026-01-05"): {"high": 4, "low": 1},
        ("Oslo", "2026-01-06"): {"high": -1, "low": -5}}


def weather(city, date, kind, unit="C"):
    value = DATA[city.strip().title(), date][kind]
    value = value if unit == "C" else value * 1.8 + 32
    return {"status": "ok", "text": f"The {kind} in {city} on {date} is {value} {unit}."}
"""


async def test_several_parameters_and_one_tool_for_two_answers(pool: SandboxPool) -> None:
    weather = schema(
        "weather",
        {"city": "string", "date": {"type": "string"}, "kind": {"type": "string", "enum": ["high", "low"]}},
        unit={"type": "string", "default": "C"},
    )
    question = "How cold will it get in Oslo and how warm in Bergen on 5 January 2026?"
    one = await import_record(record(question, [weather], {"weather": WEATHER}, {"weather": ["-9", "4"]}), pool)
    assert [call.arguments for call in one.reference_calls] == [
        {"city": "Oslo", "date": "2026-01-05", "kind": "low"},
        {"city": "Bergen", "date": "2026-01-05", "kind": "high"},
    ]


async def test_the_search_is_bounded(pool: SandboxPool) -> None:
    calls: list[int] = []

    class Counting:
        async def call(self, code: str, function: str, arguments: Any, **more: Any) -> Any:
            calls.append(len(arguments.get("calls", [1])))
            return await pool.call(code, function, arguments, **more)

    given = record(QUESTION + " 1 2 3 4 5 6 7 8 9", [PRICE], {"get_price": PRICES}, {"get_price": ["no"]})
    with pytest.raises(Rejected, match=r"unreachable_answer.* \(5 calls"):
        await import_record(given, Counting(), SearchConfig(calls_per_answer=5))  # type: ignore[arg-type]
    assert sum(calls) <= 5 + 2  # and one that is validated
    with pytest.raises(ValueError, match="calls_per_answer is 0"):
        SearchConfig(calls_per_answer=0)


@pytest.mark.parametrize(
    "extra", ["X = 0 and " + "-" * 10_000 + "1\n", "Y = '" + "[" * 3_000 + "'\n", "Z = 0 and " + "-" * 900 + "1\n"]
)
async def test_what_is_nested_too_deep_costs_its_own_row_alone(pool: SandboxPool, tmp_path: Path, extra: str) -> None:
    """The parser ends with MemoryError, JSON with RecursionError; the whole import ended, as of a bug."""
    good: dict[str, Any] = {
        "prompt": [{"role": "user", "content": QUESTION}],
        "tool_schema": json.dumps([PRICE]),
        "tool_dict": json.dumps({"get_price": PRICES}),
        "sub_qa_dict": json.dumps({"get_price": ["24.5"]}),
    }
    rows = [good, good | {"tool_dict": json.dumps({"get_price": PRICES + extra})}, good]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    with Journal(tmp_path / "journal.sqlite") as journal:
        imported = await import_dataset(file, pool, journal)
    assert {"astra-rl-0", "astra-rl-2"} <= {one.id for one in imported.records}


@pytest.mark.slow
async def test_a_tool_that_never_ends_does_not_hold_the_import(pool: SandboxPool) -> None:
    given = price("1", code="def get_price(item):\n    while True:\n        pass\n")
    with pytest.raises(Rejected, match="unreachable_answer"):
        await import_record(given, pool, SearchConfig(calls_per_answer=16))
