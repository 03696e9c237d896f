"""A world in small: two tables, tools that read and write them, a task that wants a transfer."""

from __future__ import annotations

from typing import Any

from synthesis.core.records import (
    Answer,
    CodeTool,
    ReferenceCall,
    StateChange,
    SubQuestion,
    ToolEnvironment,
    ToolSpec,
    World,
)
from synthesis.core.reward import Grade, MadeCall
from synthesis.core.worlds import EpisodeCalls

CODE = """
def find_account(owner):
    for id, row in STATE["accounts"].items():
        if row["owner"] == owner:
            return {"account": id, "balance": row["balance"]}
    raise ValueError(f"nobody is called {owner}")

def transfer(source, target, amount):
    for one in (source, target):
        if one not in STATE["accounts"]:
            raise ValueError(f"there is no account {one}")
    if amount <= 0:
        raise ValueError("the amount must be more than 0")
    if source == target:
        raise ValueError("the accounts must be two")
    if STATE["accounts"][source]["balance"] < amount:
        raise ValueError(f"account {source} has only {STATE['accounts'][source]['balance']}")
    STATE["accounts"][source]["balance"] -= amount
    STATE["accounts"][target]["balance"] += amount
    id = f"T{len(STATE['transfers']) + 1}"
    STATE["transfers"][id] = {"source": source, "target": target, "amount": amount}
    return {"transfer": id}

def broken():
    found = []
    if sum(row["balance"] for row in STATE["accounts"].values()) != 600:
        found.append("money is neither made nor lost")
    if any(row["balance"] < 0 for row in STATE["accounts"].values()):
        found.append("no account is overdrawn")
    return found
"""
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "accounts": {
        "A71": {"owner": "Ada", "balance": 300},
        "A13": {"owner": "Bo", "balance": 100},
        "A40": {"owner": "Cy", "balance": 200},
    },
    "transfers": {},
}
PAID = {"source": "A71", "target": "A13", "amount": 50}
CHECK = f"""
def check(before, after):
    new = [row for id, row in after["transfers"].items() if id not in before["transfers"]]
    return new.count({PAID!r}) == 1
"""
STRING, AMOUNT = {"type": "string"}, {"type": "integer"}


def tool(name: str, code: str = "", **properties: dict[str, str]) -> CodeTool:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return CodeTool(ToolSpec(name, f"{name.replace('_', ' ').capitalize()} at the bank.", schema), code)


FIND = tool("find_account", owner=STRING)
TRANSFER = tool("transfer", source=STRING, target=STRING, amount=AMOUNT)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("find_account", {"owner": "Ada"}),
    ("find_account", {"owner": "Bo"}),
    ("transfer", PAID),
]
OTHERS: dict[int, dict[str, Any]] = {
    1: {"owner": "Cy"},
    2: {"owner": "Cy"},
    3: {"source": "A40", "target": "A71", "amount": 50},
}


def bank(check: str = CHECK, code: str = CODE, id: str = "bank", **more: Any) -> ToolEnvironment:
    """Ada owes Bo 50."""
    world = World(
        tables={
            "accounts": {"owner": "string", "balance": "integer"},
            "transfers": {"source": "string", "target": "string", "amount": "integer"},
        },
        rows=ROWS,
        code=code,
        changes=[
            StateChange("accounts", "A13", {"owner": "Bo", "balance": 100}, {"owner": "Bo", "balance": 150}),
            StateChange("accounts", "A71", {"owner": "Ada", "balance": 300}, {"owner": "Ada", "balance": 250}),
            StateChange("transfers", "T1", None, PAID),
        ],
        open=["accounts.balance"],
    )
    steps = [
        SubQuestion(1, "Which is Ada's account?", Answer("A71"), [], 1, True, "bank.find_account"),
        SubQuestion(2, "Which is Bo's account?", Answer("A13"), [], 1, True, "bank.find_account"),
        SubQuestion(3, "50 go from Ada's to Bo's.", Answer(True), [1, 2], 2, True, "bank.transfer", check),
    ]
    outputs: list[Any] = [{"account": "A71", "balance": 300}, {"account": "A13", "balance": 100}, {"transfer": "T1"}]
    made = zip((1, 2, 3), CALLS, outputs, ("string", "string", "state"), strict=True)
    given: dict[str, Any] = {
        "id": id,
        "language": "en",
        "domain": "bank",
        "structure": "parallel_multi_hop",
        "question": "I am Ada and owe Bo 50. Please pay him.",
        "answer": Answer(True),
        "sub_questions": steps,
        "tools": [FIND, TRANSFER],
        "reference_calls": [ReferenceCall(n, name, given, out, rule) for n, (name, given), out, rule in made],
        "distractors": {},
        "entities": ["Ada", "Bo"],
        "signature": "(bank.find_account&bank.find_account)>bank.transfer",
        "split": "train",
        "mode": "world",
        "world": world,
    }
    return ToolEnvironment(**{**given, **more})


async def played(
    environment: ToolEnvironment, calls: list[tuple[str, dict[str, Any]]], sandbox: Any, **episode: Any
) -> tuple[list[MadeCall], Grade | None]:
    """What an episode's calls returned, and the grade of what they left."""
    tools = {one.spec.name: one for one in environment.tools}
    run = EpisodeCalls(sandbox, environment, **episode)
    results = [await run.call(tools[name], arguments) for name, arguments in calls]
    made = [MadeCall(name, one.ok, one.value) for (name, _), one in zip(calls, results, strict=True)]
    return made, await run.grade()
