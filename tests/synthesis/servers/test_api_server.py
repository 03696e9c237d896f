"""Operations of OpenAPI documents are called for real: encoded as the document says, within bounds, without leaks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from astra_jax.base.errors import InputError
from synthesis.core.records import ToolCall
from synthesis.core.stages import Transient
from synthesis.offline.teacher import OfflineTeacher
from synthesis.servers.api_server import api_tools
from synthesis.servers.collect import collect
from synthesis.servers.mcp_client import McpConnections
from synthesis.servers.normalize import normalize, raw_name
from synthesis.servers.openapi import openapi_tools
from synthesis.servers.openapi_calls import ApiRequest, BadArgument, operation_of, request_of
from synthesis.servers.tool_sources import read_tools
from synthesis.trajectories.execution import ToolExecutor

TEXT = {"schema": {"type": "string"}}
TEXTS = {"schema": {"type": "array", "items": {"type": "string"}}}
OBJECT = {"schema": {"type": "object", "properties": {"r": {"type": "integer"}, "g": {"type": "string"}}}}


def document(paths: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"openapi": "3.1.0", "info": {"title": "Pets", "version": "1"}, "paths": paths, **more}


def operation(path: str, *parameters: dict[str, Any], method: str = "get", **more: Any) -> Any:
    whole = document({path: {method: {"operationId": "op", "parameters": list(parameters), **more}}})
    (tool,), _ = openapi_tools(whole)
    return operation_of(tool, whole)


def at(place: str, name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "in": place, **more}


@pytest.mark.parametrize(
    ("parameter", "value", "path"),
    [
        (TEXT, "a b/c?d#é", "/x/a%20b%2Fc%3Fd%23%C3%A9"),
        (TEXTS, ["a", "b,c"], "/x/a,b%2Cc"),
        (OBJECT, {"r": 1, "g": "x"}, "/x/r,1,g,x"),
        ({**OBJECT, "explode": True}, {"r": 1, "g": "x"}, "/x/r=1,g=x"),
        ({**TEXT, "style": "label"}, "a", "/x/.a"),
        ({**TEXTS, "style": "label", "explode": True}, ["a", "b"], "/x/.a.b"),
        ({**TEXT, "style": "matrix"}, "a", "/x/;id=a"),
        ({**TEXTS, "style": "matrix"}, ["a", "b"], "/x/;id=a,b"),
        ({**TEXTS, "style": "matrix", "explode": True}, ["a", "b"], "/x/;id=a;id=b"),
        ({**OBJECT, "style": "matrix"}, {"r": 1, "g": "x"}, "/x/;id=r,1,g,x"),
        ({**OBJECT, "style": "matrix", "explode": True}, {"r": 1, "g": "x"}, "/x/;r=1;g=x"),
        ({"schema": {"type": "boolean"}}, True, "/x/true"),
    ],
    ids=str,
)
def test_path_parameters_have_their_style(parameter, value, path):
    assert request_of(operation("/x/{id}", at("path", "id", required=True, **parameter)), {"id": value}).path == path


@pytest.mark.parametrize("value", ["", ".", "..", None])
def test_arguments_lead_to_no_other_path(value):
    with pytest.raises(BadArgument, match="^id is"):
        request_of(operation("/users/{id}/keys", at("path", "id", required=True, **TEXT)), {"id": value})


@pytest.mark.parametrize(
    ("parameter", "value", "query"),
    [
        (TEXT, "a&b=c d", "q=a%26b%3Dc%20d"),
        (TEXTS, ["a", "b"], "q=a&q=b"),
        ({**TEXTS, "explode": False}, ["a", "b,c"], "q=a,b%2Cc"),
        ({**TEXTS, "style": "spaceDelimited", "explode": False}, ["a", "b"], "q=a%20b"),
        ({**TEXTS, "style": "pipeDelimited", "explode": False}, ["a", "b"], "q=a%7Cb"),
        (OBJECT, {"r": 1, "g": "x"}, "r=1&g=x"),
        ({**OBJECT, "explode": False}, {"r": 1, "g": "x"}, "q=r,1,g,x"),
        ({**OBJECT, "style": "deepObject"}, {"r": 1, "g": "x"}, "q[r]=1&q[g]=x"),
        ({**TEXT, "allowReserved": True}, "a/b:c&d", "q=a/b:c%26d"),
        ({"content": {"application/json": OBJECT}}, {"r": 1}, "q=%7B%22r%22%3A1%7D"),
        (TEXT, None, ""),
    ],
    ids=str,
)
def test_query_parameters_have_their_style(parameter, value, query):
    assert request_of(operation("/x", at("query", "q", **parameter)), {"q": value}).query == query


def test_bodies_have_the_arguments_that_are_left():
    fields = {"type": "object", "properties": {"name": {"type": "string"}, "body": {"type": "string"}}}
    about = {"requestBody": {"content": {"application/json": {"schema": fields}}}}
    made = operation("/x/{id}", at("path", "id", required=True, **TEXT), method="post", **about)
    assert request_of(made, {"id": "1", "name": "n", "body": "b"}).body == {"name": "n", "body": "b"}
    whole = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "array"}}}}}
    made = operation("/x", method="post", **whole)
    assert (made.whole_body, request_of(made, {"body": [1]}).body) == ("body", [1])
    free = {"requestBody": {"required": True, "content": {"*/*": {"schema": {**fields, "additionalProperties": {}}}}}}
    made = operation("/x/{id+}", method="post", **free)
    assert request_of(made, {"id": "1", "other": 2}) == ApiRequest("/x/1", "", {"other": 2})
    form = {"requestBody": {"content": {"application/x-www-form-urlencoded": {"schema": fields}}}}
    assert operation("/x", method="post", **form).media == "application/x-www-form-urlencoded"


# ---------------------------------------------------------------------------------------------------------------------
# Against a service

TOKEN = "sesame-open-sesame"
DESCRIBED = {"description": "Do what the name says it does."}
PATHS = {
    "/pets/{id}": {"get": {"operationId": "getPet", **DESCRIBED, "parameters": [
        at("path", "id", required=True, **TEXT), at("query", "fields", **TEXTS)]}},
    "/pets": {
        "get": {"operationId": "listPets", **DESCRIBED},
        "post": {"operationId": "createPet", **DESCRIBED, "requestBody": {"content": {"application/json": {
            "schema": {"type": "object", "properties": {"name": {"type": "string"}}}}}}},
        "delete": {"operationId": "deletePets", **DESCRIBED},
    },
    "/versioned": {"get": {"operationId": "versioned", **DESCRIBED,
                           "parameters": [at("header", "X-Version", required=True, **TEXT)]}},
    "/status/{code}": {"get": {"operationId": "status", **DESCRIBED,
                               "parameters": [at("path", "code", required=True, **TEXT)]}},
}  # fmt: skip


class Service(ThreadingHTTPServer):
    """Answers what a path says; `seen` has what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.elsewhere = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path, dict(self.headers), body))
        code = self.path.rpartition("/")[2].partition("?")[0]
        headers, said = {"Content-Type": "application/json"}, json.dumps({"path": self.path}).encode()
        status = int(code) if code.isdecimal() and "/status/" in self.path else 200
        if status == 429 and sum("/status/429" in one[1] for one in self.server.seen) == 2:
            status = 200
        if status == 404:
            said = f'{{"error": "no pet for {self.headers.get("Authorization")}"}}'.encode()
        if code == "image":
            headers["Content-Type"], said = "image/png", b"\x89PNG"
        if code == "large":
            said = b"x" * (9 << 20)
        if code == "here":
            status, headers["Location"] = 307, "/v1/pets"
        if code == "away":
            status, headers["Location"] = 302, self.server.elsewhere
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(said)), "Retry-After": "0"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(said)

    do_POST = do_DELETE = do_GET

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def configured(folder: Any, **api: Any) -> str:
    (folder / "pets.json").write_text(json.dumps(document(PATHS, servers=[{"url": "https://elsewhere.example"}])))
    settings = {"document": "pets.json", "requests_per_minute": 1e5, "timeout_seconds": 10, **api}
    (folder / "apis.json").write_text(json.dumps({"apis": {"pets": settings}}))
    return str(folder / "apis.json")


async def test_operations_are_called(tmp_path, monkeypatch, service):
    monkeypatch.setenv("PETS_TOKEN", TOKEN)
    (tmp_path / "key").write_text(f"{TOKEN}-2\nother lines")
    file = configured(
        tmp_path, url=f"{service.url}/v1", operations=["createPet"],
        headers={"Authorization": "Bearer ${PETS_TOKEN}"}, query={"key": f"${{file:{tmp_path / 'key'}}}"},
    )  # fmt: skip
    sources = read_tools([file])
    (source,) = sources.servers
    assert [(one.name, one.reason) for one in sources.rejected[source.id]] == [
        ("deletePets", "changes_state"), ("versioned", "header_missing"),
    ]  # fmt: skip
    async with McpConnections(cwd=tmp_path) as connections:
        (read,) = await collect(source, SimpleNamespace(connections=connections))
        server = normalize(read, allowed=[raw_name(tool) for tool in read.tools]).server
        assert [tool.name for tool in server.tools] == ["getPet", "listPets", "createPet", "status"]
        executor = ToolExecutor(sandbox=None, connections=connections, teacher=OfflineTeacher(), seed=0)

        async def called(tool: str, **arguments: object) -> tuple[str, bool]:
            result = await executor.mcp(server, server.execution, ToolCall("1", tool, arguments))
            assert TOKEN not in result.content
            return result.content, result.ok

        key = f"key={TOKEN}-2"
        shown = '{"path":"/v1/pets/a%20b?fields=x&fields=y&key=[key]"}'
        assert await called("getPet", id="a b", fields=["x", "y"]) == (shown, True)
        assert service.seen[-1][:2] == ("GET", f"/v1/pets/a%20b?fields=x&fields=y&{key}")
        assert service.seen[-1][2]["Authorization"] == f"Bearer {TOKEN}"
        assert (await called("createPet", name="Rex"))[1]
        assert service.seen[-1][0] == "POST" and json.loads(service.seen[-1][3]) == {"name": "Rex"}
        text, ok = await called("status", code="404")
        assert not ok and text == r'{"error":"HTTP 404 Not Found: {\"error\": \"no pet for Bearer [key]\"}"}'
        assert (await called("status", code="429"))[1]  # asked again after a while
        assert await called("getPet", id="image") == ("[not shown: image/png, 4 bytes]", True)
        assert await called("getPet", id="large") == (
            '{"error":"the answer has more than 8 MiB; ask for less"}', False
        )  # fmt: skip
        assert (await called("getPet", id="here"))[1] and service.seen[-1][1].startswith("/v1/pets")
        with Service() as other:
            threading.Thread(target=other.serve_forever, daemon=True).start()
            service.elsewhere = f"{other.url}/steal"
            text, ok = await called("getPet", id="away")
            assert not ok and "leads to another host, and is not followed" in text and other.seen == []
            other.shutdown()
        for code in ("401", "503"):
            with pytest.raises(Transient, match=f"HTTP {code}"):
                await called("status", code=code)
        service.shutdown()
        service.server_close()
        with pytest.raises(Transient, match="was not answered: GET /pets:"):
            await called("listPets")
    assert TOKEN not in msgspec.json.encode(server).decode()


@pytest.mark.parametrize(
    ("api", "message"),
    [
        ({"headers": {"X-Key": "${NO_SUCH_KEY}"}, "url": "https://x"}, r"headers.X-Key: \$\{NO_SUCH_KEY\} is not set"),
        ({"headers": {"X-Key": "word"}}, 'sent only to an address that you name; add "url": "https://elsewhere.exa'),
        ({"operations": ["feedPets"]}, "operations: there is no 'feedPets'; there are getPet, listPets"),
        ({"document": "gone.json"}, "document: .*gone.json"),
        ({"document": "apis.json"}, "apis.json is not an OpenAPI document"),
        ({"url": "ftp://x"}, "url is 'ftp://x'; give the API's base URL"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"base": "https://x"}, "unknown field `base`"),
    ],
    ids=str,
)
def test_what_cannot_be_called_is_refused_by_name(tmp_path, api, message):
    with pytest.raises(InputError, match=message):
        api_tools(configured(tmp_path, **api), "pets")


def test_secrets_may_change_and_documents_may_not(tmp_path, monkeypatch):
    file = configured(tmp_path, headers={"X-Key": "${PETS_KEY}"}, url="https://x")
    monkeypatch.setenv("PETS_KEY", "first-secret")
    before = api_tools(file, "pets").made_of
    monkeypatch.setenv("PETS_KEY", "second-secret")
    assert api_tools(file, "pets").made_of == before and b"secret" not in before
    assert api_tools(configured(tmp_path, url="https://y"), "pets").made_of != before
