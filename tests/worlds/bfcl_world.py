"""Policies for BFCL that know the reference."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation_world import Request, Sampler, Say

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
Reference = Mapping[str, Sequence[Sequence[str]]]


def reference(package: Path) -> Reference:
    """Calls of reference of all entries, by id and turn."""
    files = [package / "data" / "possible_answer" / f"BFCL_v4_multi_turn_{category}.json" for category in CATEGORIES]
    entries = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {entry["id"]: entry["ground_truth"] for entry in entries}


def turn_of(request: Request) -> int:
    """Which of the user's turns it is, from 0."""
    return sum(message["role"] == "user" for message in request["messages"]) - 1


def steps_of(request: Request) -> int:
    """Steps that the model has made in this turn."""
    roles = [message["role"] for message in request["messages"]]
    return roles[len(roles) - roles[::-1].index("user") :].count("assistant")


def call_of(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A call of reference, which is Python, as a model would make it. Arguments by position get their names.

    The reference of miss_func_49 calls a function two turns before it is offered, by names.
    """
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    name = node.func.id
    names = [tool["function"]["parameters"]["properties"] for tool in tools if tool["function"]["name"] == name]
    assert names or not node.args
    arguments = dict(zip(names[0] if names else (), map(ast.literal_eval, node.args), strict=False))
    return name, arguments | {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}


def gold(known: Reference) -> Sampler:
    """Makes all calls of a turn in one step, then says that it is done."""

    def policy(request: Request) -> Say:
        texts = known[request["user"]][turn_of(request)]
        if not texts or steps_of(request):
            return Say("Done.")
        return Say(calls=[call_of(text, request["tools"]) for text in texts])

    return policy
