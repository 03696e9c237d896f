"""A chat completions endpoint over HTTP that plays the whole trajectory track: author, agent, emulator and judges.

It knows the servers of `write_registry` alone. Answers depend on the request only: the same request, the same answer.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

WORDS = ("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "inlet", "jetty", "knoll", "larch")
PLACES = ("Arles", "Bruges", "Cadiz", "Delft", "Evora", "Fano", "Ghent", "Hove", "Imola", "Jena", "Kotor", "Lille")
SERVERS = 3
PER_SERVER = 4


def write_registry(path: Path) -> Path:
    """Documents of servers with four tools each: one finds the amber of an item, another the birch …"""
    rows = []
    for server in range(SERVERS):
        words = WORDS[server * PER_SERVER : (server + 1) * PER_SERVER]
        tools = [
            {
                "name": f"find_{word}",
                "description": f"Find the {word} record of an item by its number.",
                "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
            }
            for word in words
        ]
        row = {"id": f"server-{server}", "name": f"Depot {server}", "description": "Records.", "tools": tools}
        rows.append(row | ({} if server else {"license": {"spdx_id": "CC0-1.0"}}))
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


class EmulatedModel:
    """Serves on loopback; `async with` gives the address.

    Args:
        memory: share of the tasks whose agent answers at once, from memory.
        bad_chains: share of the chains that no voter holds for sensible.

    Attributes:
        requests: all bodies, in order.
        kinds: how often what was asked for; the agent's turns are `agent`.
        refuse: status to answer a kind with, once it is set.
        tokens: of all requests and answers, a quarter of their characters.
    """

    def __init__(self, *, memory: float = 0.0, bad_chains: float = 0.25) -> None:
        self.memory, self.bad_chains = memory, bad_chains
        self.requests: list[dict[str, Any]] = []
        self.kinds: Counter[str] = Counter()
        self.refuse: dict[str, int] = {}
        self.tokens = 0

    async def __aenter__(self) -> str:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        kind = kind_of(body)
        self.requests.append(body)
        self.kinds[kind] += 1
        if kind in self.refuse:
            return web.json_response({"error": {"message": "refused"}}, status=self.refuse[kind])
        rng = random.Random(hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest())
        message = {"role": "assistant", **self.message(kind, body, rng)}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": len(json.dumps(body)) // 4, "completion_tokens": len(json.dumps(message)) // 4}
        self.tokens += sum(usage.values())
        choices = [{"index": 0, "message": message, "finish_reason": finish}]
        return web.json_response({"id": "x", "object": "chat.completion", "choices": choices, "usage": usage})

    def message(self, kind: str, body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """What the model writes."""
        if kind == "agent":
            return self.agent(body["messages"], rng)
        answer: Callable[[str, random.Random], Any] | None = getattr(self, f"_{kind}", None)
        if answer is None:
            return {"content": "Yes."}
        return {"content": json.dumps(answer(body["messages"][-1]["content"], rng))}

    def agent(self, messages: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
        """It calls what the request is about, one after the other, and says what the last result was."""
        [question] = [one["content"] for one in messages if one["role"] == "user"]
        results = [one["content"] for one in messages if one["role"] == "tool"]
        wanted = words_of(question)
        drawn = random.Random(question).random()
        if drawn >= self.memory and len(results) < len(wanted):
            arguments = json.dumps({"item": re.findall(r"item (\d+)", question)[0]})
            call = {"name": f"find_{wanted[len(results)]}", "arguments": arguments}
            return {
                "content": None,
                "reasoning_content": f"I look up the {wanted[len(results)]}.",
                "tool_calls": [{"id": f"chatcmpl-{rng.random()}", "type": "function", "function": call}],
            }
        return {
            "content": f"It is {results[-1] if results else 'as I remember it'}.",
            "reasoning_content": "I have it.",
        }

    # -----------------------------------------------------------------------------------------------------------------

    def _probe(self, prompt: str, rng: random.Random) -> Any:
        return {"remarks": [], "value": 1, "rating": 1, "verdict": "yes", "aliases": []}

    def _task_chain_proposals(self, prompt: str, rng: random.Random) -> Any:
        tools, count = _tools(prompt), int(re.findall(r"List (\d+) different", prompt)[0])
        return {"pairs": [{"task": "Look.", "chain": rng.sample(tools, rng.randint(1, 3))} for _ in range(count)]}

    def _chain_vote(self, prompt: str, rng: random.Random) -> Any:
        valid = random.Random(">".join(_chain(prompt))).random() >= self.bad_chains
        return {"reason": "So it is.", "user_query": "Look.", "valid": valid}

    def _back_translated_query(self, prompt: str, rng: random.Random) -> Any:
        return {"reason": "So.", "query": _question(_chain(prompt), rng), "meaningful": True}

    def _back_translated_chain(self, prompt: str, rng: random.Random) -> Any:
        words = words_of(re.findall(r"^Request: (.*)$", prompt, re.M)[0])
        return {"plan": "So.", "chain": [f"find_{word}" for word in words]}

    def _chain_task(self, prompt: str, rng: random.Random) -> Any:
        return {"analysis": "So.", "question": _question(_chain(prompt), rng)}

    def _server_task(self, prompt: str, rng: random.Random) -> Any:
        count = int(re.findall(r"exactly (\d+) different", prompt)[0])
        tools = rng.sample(_tools(prompt), count)
        return {"analysis": "So.", "tools": tools, "question": _question(tools, rng)}

    def _task_variation(self, prompt: str, rng: random.Random) -> Any:
        tools = re.findall(r"^It needs these tools: (.*)$", prompt, re.M)[0].split(", ")
        return {"analysis": "So.", "question": _question(tools, rng)}

    def _task_rating(self, prompt: str, rng: random.Random) -> Any:
        return {"reason": "Good.", "question_quality": 5, "scenario_realism": 4, "tool_necessity": 5}

    def _emulated_result(self, prompt: str, rng: random.Random) -> Any:
        return {"reasoning": "So.", "result": json.dumps({"record": rng.randrange(10**6)}), "is_error": False}

    def _query_understanding_score(self, prompt: str, rng: random.Random) -> Any:
        return {"reason": "Right.", "verdict": "yes"}

    _query_planning_score = _tool_understanding_score = _tool_planning_score = _query_understanding_score

    def _conciseness_score(self, prompt: str, rng: random.Random) -> Any:
        ids = re.findall(r"^  call (\S+): ", prompt, re.M)
        return {"calls": [{"call_id": id, "reason": "It is needed.", "necessary": True} for id in ids]}

    def _final_answer_score(self, prompt: str, rng: random.Random) -> Any:
        return {"reason": "Right.", "solves": "yes", "faithful": "yes"}


def kind_of(body: dict[str, Any]) -> str:
    """What a request asks for: the name of its answer's schema, or `agent`."""
    if "tools" in body:
        return "agent"
    return str(body.get("response_format", {}).get("json_schema", {}).get("name", ""))


def words_of(question: str) -> list[str]:
    """Which records a question asks for, in order."""
    return [word for word in re.findall(r"[a-z]+", question) if word in WORDS]


def _tools(prompt: str) -> list[str]:
    return re.findall(r"^- (\w+): ", prompt, re.M)


def _chain(prompt: str) -> list[str]:
    return re.findall(r"(?:^Chain|in this order): (.*)$", prompt, re.M)[0].split(" → ")


def _question(tools: list[str], rng: random.Random) -> str:
    words = " and then the ".join(tool.removeprefix("find_") for tool in tools)
    first, second, third = rng.sample(PLACES, 3)
    return (
        f"For the {first} depot I need the {words} of item {rng.randrange(10**8)}, before {rng.randrange(1, 29)} May, "
        f"since {second} office {rng.randrange(10**4)} asked {third} clerk {rng.randrange(10**4)} about it."
    )
