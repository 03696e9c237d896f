"""The setting `tools`: what each entry is is found from the entry; Python functions run for real, in a process."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from launch.flags import cli
from synthesis.core.records import HttpExecution, StdioExecution, ToolCall
from synthesis.offline.teacher import OfflineTeacher
from synthesis.servers.collect import collect, fact_documents
from synthesis.servers.function_server import function_tools
from synthesis.servers.mcp_client import McpConnections
from synthesis.servers.normalize import normalize, raw_name
from synthesis.servers.registry import read_registries
from synthesis.servers.tool_sources import read_tools
from synthesis.trajectories.compat import settings_of_card
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import ToolExecutor

MODULE = '''
"""Prices of a shop.

More words.
"""
import asyncio, os
from dataclasses import dataclass
from typing import Annotated, Literal
from mcp.server.mcpserver import Context
from pydantic import Field
print("words of a module on its way in")

@dataclass
class Price:
    amount: float
    currency: str

Item = Annotated[str, Field(description="As the shop names it.")]

def price_of(item: Item, currency: Literal["EUR", "USD"] = "EUR") -> Price:
    "Look up what an item costs."
    print("words among the messages", end="")
    if item == "dragon":
        raise KeyError("no dragon is sold")
    return Price(4.5, currency)

async def where() -> str:
    "Say where the function runs, and with which secret."
    await asyncio.sleep(0)
    return os.getcwd() + " " + os.environ.get("SHOP_SECRET", "none")

def count(items: list[str]) -> list[int]:
    "Count the letters of each item."
    return [len(one) for one in items]

def untyped(code, filter: str | None = None):
    "Return what the function was given."
    return [code, filter]

async def steps(number: int):
    "Count to a number."
    for one in range(number):
        yield one

def leave(code: Annotated[int, Field(alias="exit code")], copy: str = "x") -> None:
    "End the program with a code."
    raise SystemExit(f"{code} {copy}")

def free(**named: int) -> str:
    "Take names that nobody knows."

def with_context(city: str, context: Context) -> str:
    "Take a city and the server's context."

def placed(city: str, /) -> str:
    "Take a city without its name."

tools = [price_of, where, count, untyped, steps, leave]
undocumented = lambda x: x
nothing = []
'''
OPENAPI = {
    "openapi": "3.1.0", "info": {"title": "Pets", "version": "1"}, "servers": [{"url": "https://pets.example"}],
    "paths": {"/pets": {"get": {"operationId": "listPets", "summary": "List all pets of the shop."}}},
}  # fmt: skip


@pytest.fixture
def shop(tmp_path, monkeypatch) -> Path:
    (tmp_path / "my_shop.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_shop", raising=False)
    return tmp_path


def written(folder: Path, name: str, value: object) -> str:
    (folder / name).write_text(json.dumps(value))
    return str(folder / name)


async def test_functions_run_for_real_in_a_process_of_their_own(shop, monkeypatch):
    monkeypatch.setenv("SHOP_SECRET", "sesame")
    sources = read_tools(["my_shop:tools"])
    (source,) = sources.servers
    assert (source.id, source.title, source.description) == ("my_shop_tools", "my_shop:tools", "Prices of a shop.")
    async with McpConnections(cwd=shop / "mcp") as connections:
        (document,) = await collect(source, SimpleNamespace(connections=connections))
        server = normalize(document, allowed=[raw_name(tool) for tool in document.tools]).server
        executor = ToolExecutor(sandbox=None, connections=connections, teacher=OfflineTeacher(), seed=0)

        async def called(name: str, **arguments: object) -> tuple[str, str]:
            result = await executor.mcp(server, server.execution, ToolCall("1", name, arguments))
            return result.content, result.error

        assert await called("price_of", item="bolt") == ('{"amount":4.5,"currency":"EUR"}', "")
        assert await called("price_of", item="dragon") == ('{"error":"KeyError: \'no dragon is sold\'"}', "tool_error")
        assert await called("count", items=["a", "abc"]) == ("[1,3]", "")
        assert await called("untyped", code=7, filter="null") == ('[7,"null"]', "")
        assert await called("untyped", code="7", filter='{"a": 1}') == ('["7","{\\"a\\": 1}"]', "")
        left = '{"error":"SystemExit: 3 y"}'
        assert await called("leave", **{"exit code": 3, "copy": "y"}) == (left, "tool_error")
        assert await called("steps", number=2) == ("[0,1]", "")
        assert await called("where") == (f"{os.getcwd()} sesame", "")
        assert "Input should be 'EUR' or 'USD'" in (await called("price_of", item="bolt", currency="XXX"))[0]
    record = msgspec.json.encode(server).decode()
    assert "sesame" not in record and str(shop) not in record
    price = server.tools[0].parameters
    assert price["properties"]["item"] == {"type": "string", "description": "As the shop names it."}
    assert price["properties"]["currency"]["enum"] == ["EUR", "USD"] and price["required"] == ["item"]


def test_functions_are_known_by_their_files(shop):
    before = read_tools(["my_shop:tools"])
    assert before.digests == read_tools(["my_shop:tools"]).digests == {"my_shop:tools": before.own["my_shop_tools"]}
    (shop / "my_shop.py").write_text(MODULE.replace("4.5", "5.5"))
    assert read_tools(["my_shop:tools"]).digests != before.digests
    assert len(read_tools(["my_shop.py:price_of"]).servers) == 1


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("my_shop:gone", "my_shop has no gone; it has .*price_of"),
        ("no_such_module:tools", "no_such_module cannot be imported"),
        ("my_shop:undocumented", "<lambda> has no docstring"),
        ("my_shop:nothing", "my_shop:nothing holds no functions"),
        ("my_shop:free", "free: parameter '\\*\\*named: int' cannot be given by name"),
        ("my_shop:with_context", "with_context: parameter 'context' is MCP's Context"),
        ("my_shop:placed", "placed: parameter 'city: str' cannot be given by name"),
        ("my_shop:Price", "Price is a type; give functions"),
    ],
)
def test_what_is_no_function_is_refused_by_name(shop, reference, message):
    with pytest.raises(InputError, match=message):
        function_tools(reference)


def test_what_the_process_of_functions_refuses_is_refused(shop):
    with pytest.raises(InputError, match="tools: .*my_shop has no gone; it has .*price_of"):
        read_tools(["my_shop:gone"])


async def test_langchain_tools_are_tools(shop):
    pytest.importorskip("langchain_core")
    (shop / "chained.py").write_text(
        "from langchain_core.tools import tool\n"
        "@tool\ndef add(first: int, second: int) -> int:\n    'Add two numbers.'\n    return first + second\n"
        "tools = [add]\n"
    )
    (source,) = read_tools(["chained:tools"]).servers
    async with McpConnections(cwd=shop) as connections:
        (document,) = await collect(source, SimpleNamespace(connections=connections))
        assert await (await connections.get(source.execution)).call("add", {"first": 2, "second": 3}) == ("5", True)
    (spec,) = normalize(document, min_tools=1, read_only=False).server.tools
    assert (spec.name, spec.description, spec.parameters["required"]) == (
        "add",
        "Add two numbers.",
        ["first", "second"],
    )


def test_langchain_tools_have_the_parameters_that_a_model_gives(shop):
    pytest.importorskip("langchain_core")
    (shop / "chained.py").write_text(
        "from typing import Annotated\nfrom langchain_core.tools import BaseTool, InjectedToolArg, Tool, tool\n"
        "one_text = Tool(name='ask', func=str, description='Ask a question in one text.')\n"
        "@tool\ndef of_user(query: str, user: Annotated[str, InjectedToolArg]) -> str:\n    'Search as a user.'\n"
        "class Own(BaseTool):\n    name: str = 'own'\n    description: str = 'Look up a city.'\n"
        "    def _run(self, city: str, days: int = 3) -> str:\n        return city\n"
        "own = Own()\n"
    )
    (ask,) = function_tools("chained:one_text")
    assert ask.document.input_schema["properties"] == {"tool_input": {"type": "string"}}
    (own,) = function_tools("chained:own")
    assert own.document.input_schema["required"] == ["city"] and "days" in own.document.input_schema["properties"]
    with pytest.raises(InputError, match="of_user: 'user' is injected, and nothing injects it here"):
        function_tools("chained:of_user")


def test_entries_are_told_apart_by_their_content(shop):
    clients = written(shop, "mcp.json", {"mcpServers": {"clock": {"command": "uvx", "args": ["mcp-server-time"]}}})
    code = written(shop, "code.json", {"servers": {"web": {"type": "http", "url": "http://x/mcp"}}, "inputs": []})
    listed = written(
        shop,
        "server.json",
        {"name": "io.x/y", "packages": [{"registryType": "npm", "identifier": "y", "version": "1"}]},
    )
    pets = written(shop, "pets.json", OPENAPI)
    tools = written(shop, "list.json", [{"type": "function", "function": {"name": "f"}}])
    found = read_tools([pets, clients, "my_shop:tools", code, tools, listed, str(shop), str(shop / "gone.json")])
    assert [one.id for one in found.servers] == ["my_shop_tools", "clock", "web", "io_x_y"]
    assert found.servers[1].execution == StdioExecution(["uvx", "mcp-server-time"])
    assert found.servers[2].execution == HttpExecution("http://x/mcp")
    assert found.documents == [pets, tools, str(shop), str(shop / "gone.json")]
    wrong = written(shop, "wrong.json", {"mcpServers": {"clock": {"command": "x", "env": {"KEY": "written out"}}}})
    with pytest.raises(InputError, match=r"^tools: .*wrong\.json: clock: env\.KEY is written out"):
        read_tools([wrong])


class _Site(BaseHTTPRequestHandler):
    def do_GET(self):
        status = 405 if self.path == "/mcp" else 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(OPENAPI).encode() if status == 200 else b"")

    def log_message(self, *words):
        pass


def test_a_document_at_a_url(shop):
    site = HTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{site.server_port}"
    try:
        (entry,) = read_tools([f"{url}/v1/schema"]).documents
        (document,) = read_registries([entry]).documents
        assert document.title == "Pets" and [raw_name(tool) for tool in document.tools] == ["listPets"]
        with pytest.raises(InputError, match=r"/mcp is not a document \(HTTP 405.*\"mcpServers\""):
            read_tools([f"{url}/mcp"])
    finally:
        site.shutdown()
        site.server_close()
    with pytest.raises(InputError, match="gone cannot be read"):
        read_tools([f"{url}/gone"])


@pytest.mark.parametrize(
    ("name", "today"),
    [
        ("servers", "tools"),
        ("registries", "tools"),
        ("surplus", "oversample_ratio"),
        ("conducts", "behaviours"),
        ("licence", "license"),
    ],
)
def test_former_names_are_refused_with_todays(tmp_path, name, today):
    with pytest.raises(cli.UsageError, match=f"--config.{name}: this setting is called --config.{today} now"):
        cli.overridden(TrajectoriesConfig(), [(name, '["x.json"]')])
    (tmp_path / "mine.py").write_text(
        f"from synthesis.trajectories.config import TrajectoriesConfig\nCONFIG = TrajectoriesConfig({name}=('x',))\n"
    )
    with pytest.raises(cli.UsageError, match=f"'{name}'; this setting is called {today} now"):
        cli.load_config(str(tmp_path / "mine.py"), "trajectories")


def test_an_empty_list_of_fact_servers_is_none():
    assert fact_documents(["en"], only=[]) == []
    assert len(fact_documents(["en"])) > 5
    with pytest.raises(SettingError, match="fact_servers"):
        TrajectoriesConfig(fact_servers=("dragons",))


def test_tools_of_ones_own_stand_in_place_of_the_packaged_ones():
    packaged, own = TrajectoriesConfig(), TrajectoriesConfig(tools=("mcp.json",))
    assert (packaged.has_own_tools, packaged.running_share) == (False, 0.05)
    assert (own.has_own_tools, own.running_share) == (True, None)
    assert dataclasses.replace(own, mcp_share=0.3).running_share == 0.3
    assert not TrajectoriesConfig(sources=()).has_own_tools
    # Without tools the offline teacher uses the packaged ones, and a model uses none.
    assert [packaged.uses_demo(by_rules=one) for one in (True, False)] == [True, False]
    assert [own.uses_demo(by_rules=one) for one in (True, False)] == [False, False]
    both = TrajectoriesConfig(tools=("mcp.json", "demo"))
    assert both.uses_demo(by_rules=False) and both.uses_todo_server(by_rules=False)
    assert (both.own_tools, both.running_share) == (("mcp.json",), None)
    assert not own.uses_todo_server(by_rules=False)
    assert dataclasses.replace(own, behaviours={"confirmation": 0.1}).uses_todo_server(by_rules=False)


def test_a_card_of_former_names_is_read_in_todays():
    packaged = {"servers": [], "registries": [], "fact_servers": [], "mcp_share": 0.05, "sources": None}
    assert settings_of_card(packaged).items() >= {"tools": [], "fact_servers": None, "mcp_share": None}.items()
    mixed = settings_of_card({**packaged, "registries": ["r.json"]})
    assert mixed["tools"] == ["r.json"] and "countries" in mixed["fact_servers"] and mixed["mcp_share"] == 0.05
    assert mixed["sources"] == "the packaged ones" and settings_of_card({"tools": []}) == {"tools": []}
