"""Registries: what is read, what is kept in one normal form, what is rejected, and that nothing is lost between."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from copy import deepcopy
from functools import reduce
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processor_time import at_most

from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import EmulatedExecution, StdioExecution, ToolServer
from synthesis.core.schemas import object_schema
from synthesis.core.stages import Journal
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import Executor
from synthesis.servers.collect import ServerDocument, ServerSource, fact_documents
from synthesis.servers.duplicates import normalize_all, with_own_ids
from synthesis.servers.normalize import normalize
from synthesis.servers.registry import read_registries
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.pipeline import synthesize

REGISTRY = Path(__file__).parents[4] / "shared" / "data" / "mcp_registry.jsonl.gz"
real = pytest.mark.skipif(not REGISTRY.exists(), reason="the crawled registry is not beside the checkout")


def function(name="look_up", description="Look up a thing by its key.", **properties) -> dict:
    parameters = {"type": "object", "properties": properties or {"key": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path


def one(path: Path) -> ServerDocument:
    read = read_registries([path])
    assert read.read == 1 and not read.rejected, read.rejected
    return read.documents[0]


def rejected(path: Path) -> dict[str, str]:
    """Place → reason; every record is either a document or rejected with a line of detail."""
    read = read_registries([path])
    assert read.read == len(read.documents) + len(read.rejected)
    assert all(record.detail and "\n" not in record.detail for record in read.rejected)
    return {record.place: record.reason for record in read.rejected}


# ---------------------------------------------------------------------------------------------------------------------
# The real registry


@real
def test_the_whole_registry_is_accounted_for_and_quick():
    with at_most(60):
        read = read_registries([REGISTRY])
        servers = normalize_all(read.documents)
    assert read.read == 1_704 == len(read.documents) + len(read.rejected)
    assert read.reasons() == {"not_connected": 1_000, "no_tools": 1, "other_language": 15}
    assert [done.server_id for done in servers] == [document.id for document in with_own_ids(read.documents)]
    kept = [server for done in servers for server in done.servers]
    reasons = sum((done.reasons() for done in servers), Counter())
    tools = sum(len(server.tools) for server in kept)
    assert tools + reasons.total() == sum(done.read for done in servers) == 4_889
    for done, document in zip(servers, read.documents, strict=True):
        kept_tools = sum(len(server.tools) for server in done.servers)
        assert done.read == len(document.tools) == len(done.rejected) + kept_tools
        assert all(tool.reason and tool.detail for tool in done.rejected)
    for server in kept:
        assert len({tool.name for tool in server.tools}) == len(server.tools) >= 3
        assert isinstance(server.execution, EmulatedExecution) and server.domain and server.title
        for tool in server.tools:
            jsonschema.Draft202012Validator.check_schema(tool.parameters, format_checker=None)
            assert object_schema(tool.parameters) == tool.parameters  # the normal form of a normal form is itself
    assert len(kept) > 250 and tools > 3_000
    assert {server.language for server in kept} == {"en", "zh"} and len({server.domain for server in kept}) > 20
    assert msgspec.json.decode(msgspec.json.encode(kept), type=list[ToolServer]) == kept


@real
def test_the_registry_crawled_twice_gives_the_same_servers(tmp_path):
    again = tmp_path / "again.jsonl"
    again.write_bytes(gzip.decompress(REGISTRY.read_bytes()))
    once = normalize_all(read_registries([REGISTRY]).documents[:150])
    documents = read_registries([REGISTRY]).documents[:150] + read_registries([again]).documents[:150]
    twice = normalize_all(documents)
    kept = [server for done in once for server in done.servers]
    assert [server for done in twice for server in done.servers] == kept
    copies = sum((done.reasons() for done in twice[150:]), Counter())
    assert copies["duplicate_server"] >= sum(len(server.tools) for server in kept)
    assert len({done.server_id.casefold() for done in twice}) == 300


# ---------------------------------------------------------------------------------------------------------------------
# Forms


def smithery(name="Weather", tools=None, **response) -> dict:
    tools = [{"name": "get", "description": "Get a thing.", "input_schema": {}}] if tools is None else tools
    return {
        "labels": {"primary_label": "Weather"},
        "metadata": {
            "server_name": name,
            "original_file": f"../crawler/smithery/@me_{name.lower()}.json",
            "remote_server_response": {"is_success": True, "tools": tools, **response},
            "server_info_crawled": {"overview": f"All about {name}."},
        },
    }


def test_a_smithery_row(tmp_path):
    document = one(write(tmp_path / "dump.jsonl", smithery()))
    assert (document.id, document.title, document.domain) == ("me_weather", "Weather", "Weather")
    assert document.description == "All about Weather." and document.language == "en"
    assert [tool["name"] for tool in document.tools] == ["get"] and document.execution == EmulatedExecution()


def test_bad_rows_are_rejected_and_the_others_read(tmp_path):
    rows = [
        json.dumps(smithery("One")),
        "{not json",
        "[" * 5_000,
        '"a text"',
        "17",
        json.dumps({"some": "other form"}),
        json.dumps(smithery("Two", tools=[], is_success=False, error="unhandled errors\nin a TaskGroup")),
        json.dumps(smithery("Three", tools=[])),
        json.dumps(smithery("Four", tools={"a": 1})),
        json.dumps({"metadata": {"remote_server_response": None}, "labels": 3}),
        json.dumps({"swagger": "2.0", "paths": {}}),
        json.dumps({"openapi": "3.0.0", "paths": ["/a"]}),
        json.dumps({"api_list": "none", "tool_name": 3}),
        "",
        json.dumps(smithery("Last")),
    ]
    path = tmp_path / "dump.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode() + b'\n"\xff\xfe"\n'))
    assert rejected(path) == {
        "dump.jsonl.gz:2": "not_json",
        "dump.jsonl.gz:3": "not_json",
        "dump.jsonl.gz:4": "unknown_form",
        "dump.jsonl.gz:5": "unknown_form",
        "dump.jsonl.gz:6": "unknown_form",
        "dump.jsonl.gz:7": "not_connected",
        "dump.jsonl.gz:8": "no_tools",
        "dump.jsonl.gz:9": "unknown_form",
        "dump.jsonl.gz:10": "unknown_form",
        "dump.jsonl.gz:11": "no_tools",
        "dump.jsonl.gz:12": "unknown_form",
        "dump.jsonl.gz:13": "unknown_form",
        "dump.jsonl.gz:16": "not_json",
    }
    assert [document.title for document in read_registries([path]).documents] == ["One", "Last"]


def test_files_that_cannot_be_read_are_rejected(tmp_path):
    whole = gzip.compress("\n".join(json.dumps(smithery(f"S{i}")) for i in range(2_000)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "no_gzip.jsonl.gz").write_bytes(b"{}")
    (tmp_path / "empty").mkdir()
    good = write(tmp_path / "good.json", [function()])
    read = read_registries([tmp_path / "gone.json", tmp_path / "cut.jsonl.gz", tmp_path / "no_gzip.jsonl.gz",
                            tmp_path / "empty", good])  # fmt: skip
    assert read.read == len(read.documents) + len(read.rejected)
    assert read.reasons()["registry_unreadable"] == 4 and read.documents[-1].id == "good"
    assert len(read.documents) > 100  # what came before the cut counts
    assert "correct `tools`" in read.rejected[0].detail


def test_lists_of_tools_in_both_forms_and_servers_as_such(tmp_path):
    bare = function()["function"]
    write(tmp_path / "a.json", "\ufeff" + json.dumps([function(), bare]))
    write(tmp_path / "b.jsonl", "\n".join(json.dumps([function(f"f{i}")]) for i in range(2)))
    write(tmp_path / "c.json", {"name": "Küche & Co", "description": "Rezepte", "domain": "food", "tools": [bare]})
    mcp = {"name": "t", "description": "d", "inputSchema": {"type": "object"}}
    write(tmp_path / "d.json", [{"tools": [mcp]}, smithery("In a list")])
    write(tmp_path / "notes.txt", "not a registry")
    documents = {document.id: document for document in read_registries([tmp_path]).documents}
    assert list(documents) == ["a", "b_1", "b_2", "k_che_co", "d_1", "me_in_a_list".replace(" ", "_")]
    assert documents["k_che_co"].title == "Küche & Co" and documents["k_che_co"].domain == "food"
    assert documents["a"].domain == "other"
    assert normalize(documents["a"], min_tools=1).reasons() == {"duplicate_name": 1}


def test_the_language_comes_from_the_words(tmp_path):
    chinese = function(description="根据城市名称查询当前的天气情况和温度。")
    path = write(
        tmp_path / "mixed.json", [{"name": "天气服务", "tools": [chinese]}, {"name": "W", "tools": [function()]}]
    )
    assert [document.language for document in read_registries([path]).documents] == ["zh", "en"]
    english = read_registries([path], languages=["en"])
    assert [document.title for document in english.documents] == ["W"]
    assert english.reasons() == {"other_language": 1} and english.read == 2
    assert normalize(read_registries([path]).documents[0], min_tools=1).server is not None


RAPIDAPI = {
    "tool_name": "Stock Prices",
    "tool_description": "Prices of shares, by symbol and day.",
    "category": "Finance",
    "api_list": [
        {
            "name": "Daily Price",
            "description": "The price of a share on one day.",
            "method": "GET",
            "required_parameters": [
                {"name": "symbol", "type": "STRING", "description": "e.g. IBM", "default": "IBM"},
                {"name": "day", "type": "DATE (YYYY-MM-DD)", "description": "", "default": ""},
            ],
            "optional_parameters": [{"name": "adjusted", "type": "BOOLEAN"}, {"name": "limit", "type": "NUMBER"}],
        },
        {"name": "List", "description": "All the symbols there are.", "required_parameters": None},
        "nonsense",
    ],
}


def test_a_rapidapi_document(tmp_path):
    document = one(write(tmp_path / "stock.json", RAPIDAPI))
    assert (document.id, document.domain) == ("stock_prices", "Finance")
    done = normalize(document, min_tools=2)
    assert [tool.name for tool in done.server.tools] == ["Daily_Price", "List"] and done.reasons() == {"bad_name": 1}
    assert done.server.tools[0].parameters == {
        "type": "object",
        "properties": {
            "symbol": {"type": "string", "description": "e.g. IBM", "examples": ["IBM"]},
            "day": {"type": "string"},
            "adjusted": {"type": "boolean"},
            "limit": {"type": "number"},
        },
        "required": ["symbol", "day"],
    }


OPENAPI = """
openapi: 3.0.3
info: {title: Pet shop, description: "Sells pets of all kinds.", version: 2020-01-01}
paths:
  /pets/{id}:
    parameters:
      - {$ref: '#/components/parameters/Id'}
      - {name: X-Key, in: header, required: true, schema: {type: string}}
    get:
      summary: One pet
      description: All that is known about a pet
      parameters: [{name: since, in: query, schema: {type: string, nullable: true, default: 2020-01-01}}]
      responses: {200: {description: ok}}
    post:
      operationId: changePet
      summary: Change what is known about a pet
      requestBody:
        required: true
        content:
          application/json; charset=utf-8: {schema: {$ref: '#/components/schemas/Change'}}
  /pets:
    post:
      operationId: addPets
      summary: Add many pets at once
      requestBody:
        content: {application/json: {schema: {type: array, items: {$ref: '#/components/schemas/Pet'}}}}
    put: {operationId: upload, summary: Upload a picture, requestBody: {required: true, content: {image/png: {}}}}
    delete: {operationId: lost, summary: Lose a reference, parameters: [{$ref: 'other.yaml#/x'}]}
    patch: {operationId: tree, summary: Write a tree, requestBody: {content: {application/json: {schema:
      {$ref: '#/components/schemas/Tree'}}}}}
    head: nonsense
  /loop: {$ref: '#/paths/~1loop'}
components:
  parameters:
    Id: {name: id, in: path, required: true, description: Which pet,
         schema: {type: integer, minimum: 0, exclusiveMinimum: true}}
  schemas:
    Pet:
      type: object
      required: [name, id]
      properties: {name: {type: string, example: Rex}, id: {type: integer, readOnly: true}}
    Change:
      allOf:
        - {$ref: '#/components/schemas/Pet'}
        - {type: object, properties: {tags: {type: array, items: {type: string}}}, required: [tags]}
    Tree: {type: object, properties: {children: {type: array, items: {$ref: '#/components/schemas/Tree'}}}}
"""


def test_an_openapi_document(tmp_path):
    document = one(write(tmp_path / "pets.yaml", OPENAPI))
    done = normalize(document, min_tools=1)
    assert (document.id, document.title) == ("pet_shop", "Pet shop")
    assert {tool.name: tool.reason for tool in done.rejected} == {
        "upload": "unsupported_body",
        "lost": "foreign_reference",
        "head_pets": "unknown_form",
        "/loop": "recursive_schema",
    }
    tools = {tool.name: tool for tool in done.server.tools}
    assert len(tools) + len(done.rejected) == done.read == 8
    assert [(one.name, one.change) for one in done.changed if one.name == "tree"] == [("tree", "recursive_schema")]
    identity = {"type": "integer", "exclusiveMinimum": 0, "description": "Which pet"}
    assert tools["get_pets_id"].description == "One pet. All that is known about a pet."
    assert tools["get_pets_id"].parameters == {
        "type": "object",
        "properties": {"id": identity, "since": {"type": ["string", "null"], "default": "2020-01-01"}},
        "required": ["id"],
    }
    assert tools["changePet"].parameters == {
        "type": "object",
        "properties": {
            "id": identity,
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["id", "name", "tags"],
    }
    pet = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert tools["addPets"].parameters["properties"] == {"body": {"type": "array", "items": pet}}


# ---------------------------------------------------------------------------------------------------------------------
# Files


YAML_1_2 = """
openapi: 3.0
info: {title: Switches}
paths:
  /switch:
    post:
      operationId: setSwitch
      summary: Set a switch in a country.
      requestBody:
        required: true
        content:
          application/json:
            schema:
              type: object
              required: [on, 404]
              properties:
                on: {type: string, enum: [on, off, yes, NO, y]}
                404: {type: string, enum: [10:00, 0755, 09, 1_000, 1.10, 1e3, 0x1F, 2020-01-01, 12, 1.0], default: 1.0}
                null: {type: integer, minimum: 0x0F, maximum: 1e3, default: 0o17}
                free: {enum: [01, 1.50, no]}
                flag: {type: boolean, default: false, example: ~}
"""


def test_yaml_is_read_by_the_rules_of_yaml_1_2(tmp_path):
    (tool,) = normalize(one(write(tmp_path / "a.yaml", YAML_1_2)), min_tools=1).server.tools
    properties = tool.parameters["properties"]
    assert properties["on"]["enum"] == ["on", "off", "yes", "NO", "y"] and tool.parameters["required"] == ["on", "404"]
    assert properties["404"] == {
        "type": "string", "default": "1.0",
        "enum": ["10:00", "0755", "09", "1_000", "1.10", "1e3", "0x1F", "2020-01-01", "12", "1.0"],
    }  # fmt: skip
    assert properties["null"] == {"type": "integer", "minimum": 15, "maximum": 1000.0, "default": 15}
    assert properties["free"] == {"enum": ["01", 1.5, "no"]}
    assert properties["flag"] == {"type": "boolean", "default": False}
    assert object_schema(tool.parameters) == tool.parameters


def test_values_under_a_type_stay_as_yaml_has_them_written(tmp_path):
    text = (
        "- name: f\n  description: Look up a thing.\n  parameters:\n    type: object\n    properties:\n"
        "      a: {type: string, enum: [True, FALSE, no, 1.10, null], default: True}\n"
        "      b: {type: boolean, default: True}\n"
    )
    (tool,) = normalize(one(write(tmp_path / "a.yaml", text)), min_tools=1).server.tools
    assert tool.parameters["properties"]["a"]["enum"] == ["True", "FALSE", "no", "1.10", None]
    assert [one["default"] for one in tool.parameters["properties"].values()] == ["True", True]


def test_yaml_merges_and_names_that_are_there_twice(tmp_path):
    base = "x: &base {name: a, description: Gets it now.}\n"
    merged = one(write(tmp_path / "a.yaml", base + "tools:\n- {<<: *base, name: b}\n- {<<: [*base], name: c}\n"))
    assert [(tool["name"], tool["description"]) for tool in merged.tools] == [
        ("b", "Gets it now."), ("c", "Gets it now.")
    ]  # fmt: skip
    write(tmp_path / "b.yaml", "tools: []\ninfo: 1\ntools: []\n")
    write(tmp_path / "c.json", '{"tools": [], "info": 1, "tools": []}')
    write(tmp_path / "d.yaml", "? [a]\n: b\n")
    for name, place in (("b.yaml", "line 3"), ("c.json", "'tools'"), ("d.yaml", "line 1")):
        (rejection,) = read_registries([tmp_path / name]).rejected
        assert rejection.reason == "not_json" and place in rejection.detail


SERVER = {"name": "Wetter", "tools": [function(description="Looks up the weather — 天气 — there.")]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.yaml", "a.jsonl.gz"])
def test_encodings_of_unicode_are_read(tmp_path, encoding, name):
    text = json.dumps(SERVER, ensure_ascii=False)
    data = (f"{text}\n{text}\n" if "jsonl" in name else text).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    read = read_registries([tmp_path / name])
    assert not read.rejected and len(read.documents) == 1 + ("jsonl" in name)
    assert all(document.tools == SERVER["tools"] for document in read.documents)


def test_files_that_are_almost_json_are_read_or_say_where_they_are_not(tmp_path):
    comments = '// a "comment\n{"tools": [/* {"name": "x"} */ {"name": "a", "description": "http://x.org, }",}, ],}'
    assert one(write(tmp_path / "a.json", comments)).tools == [{"name": "a", "description": "http://x.org, }"}]
    assert one(write(tmp_path / "a.jsonc", comments)).tools[0]["name"] == "a"
    lines = "\n".join(json.dumps(function(f"f{i}")) for i in range(3))
    assert [tool["function"]["name"] for tool in one(write(tmp_path / "b.json", lines)).tools] == ["f0", "f1", "f2"]
    assert len(one(write(tmp_path / "b.jsonl", lines)).tools) == 3  # a tool a line is one server
    (tmp_path / "c.json").write_bytes(json.dumps(SERVER, ensure_ascii=False).encode("gbk", "replace"))
    write(tmp_path / "d.json", json.dumps(SERVER)[:-9])
    write(tmp_path / "e.json", json.dumps(SERVER).replace("u5929", "ud800"))
    for name, said in (("c.json", "is not utf-8"), ("d.json", "column"), ("e.json", "half of a surrogate pair")):
        (rejection,) = read_registries([tmp_path / name]).rejected
        assert rejection.reason == "not_json" and said in rejection.detail
    nan = [json.loads(json.dumps(function("a", x={"type": "number", "default": float("nan")}))), function("b")]
    done = normalize(one(write(tmp_path / "f.json", nan)), min_tools=1)
    assert done.reasons() == {"invalid_schema": 1} and len(done.server.tools) == 1  # the others are kept


def test_records_of_vendors_and_data_sets(tmp_path):
    """JSON-RPC's answer to tools/list, OpenAI's functions, BFCL, Gemini, Bedrock, name spaces, xLAM and Hermes."""
    bare = function()["function"]
    for number, record in enumerate(
        [
            {"jsonrpc": "2.0", "id": 1, "result": {"tools": [bare]}},
            {"functions": [bare]},
            {"id": "simple_0", "question": [], "function": [bare]},
            {"tools": [{"functionDeclarations": [bare]}]},
            {"functionDeclarations": [bare]},
            {"toolConfig": {"tools": [{"toolSpec": {**bare, "inputSchema": {"json": bare["parameters"]}}}]}},
            {"tools": [{"type": "namespace", "name": "crm", "description": "Of clients.", "tools": [bare]}]},
            {"id": 7, "query": "?", "answers": "[]", "tools": json.dumps([bare])},
            {"tools": [json.dumps(function())]},
            function(),
            bare,
        ]
    ):
        done = normalize(one(write(tmp_path / f"r{number}.json", record)), min_tools=1)
        assert [tool.name for tool in done.server.tools] == ["look_up"] and not done.rejected, record


# ---------------------------------------------------------------------------------------------------------------------
# Normalising and duplicates


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["string", "a", "#/properties/a", "天"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "anyOf", "allOf", "oneOf", "required", "$ref", "enum", "a", "b", "not",
                 "additionalProperties", "minimum", "exclusiveMinimum", "pattern", "default", "function", "name",
                 "description", "parameters", "readOnly", "prefixItems", "patternProperties"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        JSON
        | JSON.map(
            lambda schema: function(parameters=0) | {"function": {**function()["function"], "parameters": schema}}
        ),
        max_size=4,
    )
)
def test_whatever_a_document_holds_is_kept_or_rejected(tools):
    document = ServerDocument("any", "Any", "", "other", "en", tools, EmulatedExecution())
    (done,) = normalize_all([document], min_tools=1)
    kept = done.server.tools if done.server else []
    assert len(kept) + len(done.rejected) == done.read == len(tools)
    for tool in kept:
        jsonschema.Draft202012Validator.check_schema(tool.parameters, format_checker=None)
        assert object_schema(tool.parameters) == tool.parameters
        assert msgspec.json.decode(msgspec.json.encode(tool.parameters)) == tool.parameters


def places(value, way=()):
    """All ways into a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*way, key)
        yield from places(inner, (*way, key))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_whatever_stands_at_any_place_of_a_record(tmp_path_factory, data):
    """A record of each form, two of whose values are anything at all."""
    forms = [json.loads(json.dumps(yaml.safe_load(OPENAPI), default=str)), smithery(), RAPIDAPI, [function()]]
    record = deepcopy(forms[data.draw(st.integers(0, 3))])
    for _ in range(2):
        every = list(places(record))
        *way, last = every[data.draw(st.integers(0, len(every) - 1))]
        holder = reduce(lambda value, key: value[key], way, record)
        holder[last] = data.draw(JSON | st.lists(JSON, max_size=2))
    read = read_registries([write(tmp_path_factory.getbasetemp() / "any.json", record)])
    assert read.read == len(read.documents) + len(read.rejected)
    assert all(one.reason and one.detail and "\n" not in one.detail for one in read.rejected)
    for done in normalize_all(read.documents, min_tools=1):
        assert done.read == len(done.rejected) + len(done.server.tools if done.server else [])


def doubled(levels: int) -> list:
    """Ten to the power of `levels` values, in the memory of a few lists; YAML writes it so, with aliases."""
    value: list = ["x"] * 10
    for _ in range(levels - 1):
        value = [value] * 10
    return value


@pytest.mark.slow
def test_aliases_of_aliases_are_rejected_in_bounded_work(tmp_path):
    """Nine levels are 400 bytes of YAML: what is quoted of them must not be written out first."""
    plain = json.loads(json.dumps(yaml.safe_load(OPENAPI), default=str))
    bomb, file = doubled(9), tmp_path / "bomb.yaml"
    with at_most(60):  # what is written out takes all memory first
        for form in (plain, smithery(), RAPIDAPI, [function()], {"tools": 1}):
            for *way, last in places(form):
                record = deepcopy(form)
                reduce(lambda value, key: value[key], way, record)[last] = bomb
                file.write_text(yaml.safe_dump(record))
                read = read_registries([file])
                assert read.read == len(read.documents) + len(read.rejected)
                for done in normalize_all(read.documents, min_tools=1):
                    assert done.read == len(done.rejected) + len(done.server.tools if done.server else [])
    file.write_text(yaml.safe_dump({"tools": {"a": bomb}}))
    (rejection,) = read_registries([file]).rejected
    assert rejection.reason == "unknown_form" and "`tools` is a list, found {'a': [" in rejection.detail


def test_yaml_that_holds_itself_is_rejected(tmp_path):
    file = tmp_path / "loop.yaml"
    file.write_text("tools: &tools\n- name: add\n  parameters: *tools\n")
    (rejection,) = read_registries([file]).rejected
    assert rejection.reason == "not_json" and "nested too deeply" in rejection.detail


def test_required_parameters_that_are_no_names(tmp_path):
    body = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", {"b": 1}]}
    content = {"required": True, "content": {"application/json": {"schema": body}}}
    operation = {"operationId": "put_a", "description": "Put one thing there.", "requestBody": content}
    document = one(write(tmp_path / "a.json", {"openapi": "3.0.0", "paths": {"/a": {"put": operation}}}))
    assert normalize(document, min_tools=1).reasons() == {"invalid_schema": 1}


def documents(*tool_lists, language="en") -> list[ServerDocument]:
    return [
        ServerDocument(f"s{i}", "S", "", "other", language, list(tools), EmulatedExecution())
        for i, tools in enumerate(tool_lists)
    ]


def test_servers_that_are_there_twice():
    tools = [function(f"f{i}", f"Does the thing number {i}.") for i in range(5)]
    reworded = [function(f"F{i}", f"Works on thing number {i}.") for i in range(4)]
    other = [function(f"f{i}", "Does it otherwise.", **{f"x{i}": {"type": "string"}}) for i in range(5)]
    servers = documents(tools, tools[::-1], reworded, other, tools[:3]) + documents(tools, language="zh")
    found = [next(iter(done.reasons()), "kept") for done in normalize_all(servers)]
    assert found == ["kept", "duplicate_server", "near_duplicate_server", "kept", "kept", "kept"]
    exact = [done.server is not None for done in normalize_all(servers, similarity=1.1)]
    assert exact == [True, False, True, True, True, True]
    assert [one.id for one in with_own_ids(servers)] == ["s0", "s1", "s2", "s3", "s4", "s0_2"]


def test_openapi_documents_of_many_operations_are_split_by_tag(tmp_path):
    def operation(topic: str, number: int, **more) -> dict:
        return {"get": {"operationId": f"{topic}{number}", "summary": f"Get the thing {number} there.", **more}}

    tagged = {f"/x/{topic}{i}": operation(topic, i, tags=[topic]) for i in range(9) for topic in ("pets", "orders")}
    by_path = {f"/v1/{topic}/{i}": operation(topic, i) for topic in ("users", "keys") for i in range(9)}
    few = {f"/x/few{i}": operation("few", i, tags=[f"few {i}"]) for i in range(4)}
    document = one(write(tmp_path / "a.json", {"openapi": "3.1.0", "info": {"title": "Shop"},
                                               "paths": {**tagged, **by_path, **few, "x-note": {}}}))  # fmt: skip
    (done,) = normalize_all([document], max_tools=12)
    assert [server.title.removeprefix("Shop: ") for server in done.servers] == [
        "pets", "orders", "users", "keys", "few 0, few 1, few 2, few 3"
    ]  # fmt: skip
    assert sum(len(server.tools) for server in done.servers) == done.read == 40 and not done.rejected
    assert len({server.id for server in done.servers}) == 5
    assert len(normalize_all([document], max_tools=40)[0].servers) == 1


SWAGGER = """
swagger: 2.0
info: {title: Pet shop}
paths:
  /pets/{id}:
    post:
      operationId: changePet
      summary: Change what is known about a pet
      parameters:
        - {name: id, in: path, required: true, type: integer, format: int64}
        - {name: tags, in: query, type: array, items: {type: string, enum: [a, b]}, collectionFormat: csv}
        - {name: body, in: body, required: true, schema: {$ref: '#/definitions/Pet'}}
    put:
      operationId: sendForm
      summary: Send a form about a pet
      parameters:
        - {name: note, in: formData, type: string, required: true, x-nullable: true}
        - {name: picture, in: formData, type: file}
    patch: {operationId: sendFile, summary: Send a picture there, parameters: [{name: picture, in: formData,
      type: file, required: true}]}
definitions:
  Pet: {type: object, required: [name], properties: {name: {type: string}}}
"""


def test_swagger_2_documents(tmp_path):
    done = normalize(one(write(tmp_path / "pets.yaml", SWAGGER)), min_tools=1)
    form, pet = done.server.tools
    assert pet.parameters == {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "format": "int64"},
            "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
            "name": {"type": "string"},
        },
        "required": ["id", "name"],
    }
    # The picture may be left out, and no parameter declares the path's id.
    assert form.parameters["properties"] == {"note": {"type": ["string", "null"]}, "id": {"type": "string"}}
    assert done.reasons() == {"unsupported_body": 1} and {one.change for one in done.changed} == {
        "path_parameter_added",
        "body_left_out",
    }


def test_operations_of_one_id_are_two_tools(tmp_path):
    paths = {f"/{x}": {"get": {"operationId": "getIt", "summary": f"Get the {x} there."}} for x in ("a", "b")}
    done = normalize(one(write(tmp_path / "a.json", {"openapi": "3.0.0", "paths": paths})), min_tools=1)
    assert [tool.name for tool in done.server.tools] == ["getIt", "get_b"]


def test_references_with_encoded_signs_are_followed(tmp_path):
    paths = {
        "/a/{id}": {"get": {"summary": "Get the thing there.", "parameters": [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}]}},
        "/b/{id}": {"get": {"summary": "Get the other thing.", "parameters": [
            {"$ref": "#/paths/~1a~1%7Bid%7D/get/parameters/0"}]}},
    }  # fmt: skip
    done = normalize(one(write(tmp_path / "a.json", {"openapi": "3.0.0", "paths": paths})), min_tools=1)
    assert [tool.parameters["properties"] for tool in done.server.tools] == [{"id": {"type": "integer"}}] * 2


@pytest.mark.parametrize(
    ("listed", "reason", "change"),
    [
        ({"required_parameters": [{"name": 5, "type": "NUMBER"}]}, "no_schema", ""),
        ({"required_parameters": {"a": "STRING"}}, "no_schema", ""),
        ({"required_parameters": [{"name": "a"}], "optional_parameters": [{"name": "a"}]}, "", "parameter_named_twice"),
        ({"required_parameters": None, "optional_parameters": ""}, "", ""),
    ],
    ids=str,
)
def test_parameters_of_rapidapi_are_kept_or_reject_their_tool(tmp_path, listed, reason, change):
    record = {"tool_name": "T", "api_list": [{"name": "get", "description": "Look up a thing.", **listed}]}
    done = normalize(one(write(tmp_path / "a.json", record)), min_tools=1)
    assert list(done.reasons()) == ([reason] if reason else [])
    assert [one.change for one in done.changed] == ([change] if change else [])


def test_parameters_are_read_where_a_tool_has_them():
    given = {"type": "object", "properties": {"a": {}}}
    for empty in ({}, [], {"type": "object", "properties": {}}):
        tool = {"name": "f", "description": "Look up a thing.", "parameters": empty, "inputSchema": given}
        (done,) = normalize_all(documents([tool]), min_tools=1)
        assert done.server.tools[0].parameters == given


QUERY = {"in": "query", "name": "q", "schema": {"type": "string"}}
BODY = {"type": "object", "properties": {"a": {}}, "required": ["a"]}


def operation_tool(tmp_path: Path, path: str, item: dict, **document: object) -> tuple[dict, dict[str, str]]:
    """The parameters of a document's only operation, and what was changed or why it was rejected."""
    record = {"openapi": "3.1.0", "paths": {path: item}, **document}
    done = normalize(one(write(tmp_path / "a.json", record)), min_tools=1)
    named = {change.change: change.detail for change in done.changed}
    named |= {reject.reason: reject.detail for reject in done.rejected}
    return (done.server.tools[0].parameters if done.server else {}), named


@pytest.mark.parametrize(
    ("parameter", "required"),
    [
        (QUERY, []),
        (QUERY | {"required": "true"}, ["q"]),
        (QUERY | {"required": "yes"}, ["q"]),
        (QUERY | {"required": "no"}, []),
        (QUERY | {"name": "q", "schema": None, "content": {"text/plain": {"schema": {"type": "string"}}}}, []),
        ({"$ref": "#/components/parameters/Q", "description": "Words."}, []),
    ],
    ids=str,
)
def test_parameters_of_operations_are_kept(tmp_path, parameter, required):
    get = {"summary": "Look up a thing.", "parameters": [parameter]}
    made, changes = operation_tool(tmp_path, "/a", {"get": get}, components={"parameters": {"Q": QUERY}})
    assert made["properties"]["q"]["type"] == "string" and made.get("required", []) == required and not changes
    assert made["properties"]["q"].get("description") == parameter.get("description")


@pytest.mark.parametrize(
    ("item", "detail"),
    [
        ({"get": {"parameters": [QUERY | {"in": "Query"}]}}, "`in` of 'q' is 'Query'; use one of path, query"),
        ({"get": {"parameters": [{"name": "q"}]}}, "`in` of 'q' is None"),
        ({"get": {"parameters": [QUERY | {"required": "maybe"}]}}, "`required` of 'q' is 'maybe'; write true or false"),
        ({"get": {"parameters": [{"name": "id", "in": "path"}]}}, "parameter 'id' is not in /a, which has none"),
        ({"GET": {}}, "'GET' is not a field of a path; methods are get"),
        ({"additionalOperations": {"LINK": {}}}, "'additionalOperations' is not a field of a path"),
    ],
    ids=str,
)
def test_operations_that_are_not_understood_are_rejected(tmp_path, item, detail):
    made, reasons = operation_tool(tmp_path, "/a", item)
    assert not made and detail in reasons["unknown_form"]


def test_names_in_a_path_are_parameters(tmp_path):
    shared = {"$ref": "#/x-items/A", "parameters": [{"name": "id", "in": "path", "schema": {"type": "integer"}}]}
    document = {"x-items": {"A": {"get": {"summary": "Look up a thing."}}}}
    made, changes = operation_tool(tmp_path, "/a/{id}/b/{name+}?c={c}", shared, **document)
    assert made["properties"] == {"id": {"type": "integer"}, "name": {"type": "string"}}
    assert made["required"] == ["id", "name"] and "has {name}" in changes["path_parameter_added"]


@pytest.mark.parametrize(
    ("kind", "body", "made", "change"),
    [
        ("*/*", {"required": True}, BODY, None),
        ("application/*+json; charset=utf-8", {"required": True}, BODY, None),
        ("application/json", {"required": True}, BODY | {"additionalProperties": {"type": "integer"}}, None),
        ("application/json", {}, BODY, "body_required"),
        ("application/json", {"required": False}, {"type": "object", "properties": {"a": {}}}, "body_not_required"),
    ],
    ids=str,
)
def test_bodies_of_operations_are_kept(tmp_path, kind, body, made, change):
    schema = BODY | {key: value for key, value in made.items() if key == "additionalProperties"}
    post = {"summary": "Store a thing.", "requestBody": {**body, "content": {kind: {"schema": schema}}}}
    found, changes = operation_tool(tmp_path, "/a", {"post": post})
    assert found == made and list(changes) == ([change] if change else [])


def test_forms_without_files_are_bodies(tmp_path):
    def operation(**fields) -> dict:
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        body = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
        return {"summary": f"Send {', '.join(fields)} there.", "requestBody": body}

    file = {"type": "string", "format": "binary"}
    paths = {"/a": {"post": operation(note={"type": "string"})}, "/b": {"post": operation(note={}, file=file)},
             "/c": {"post": operation(files={"type": "array", "items": file})}}  # fmt: skip
    done = normalize(one(write(tmp_path / "a.json", {"openapi": "3.0.0", "paths": paths})), min_tools=1)
    assert [tool.name for tool in done.server.tools] == ["post_a"] and done.reasons() == {"unsupported_body": 2}


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("ja", "ユーザーのメールアドレスをさがします。"),
        ("th", "ค้นหาสภาพอากาศปัจจุบันของเมืองที่ระบุ"),
        ("km", "ស្វែងរកអាកាសធាតុបច្ចុប្បន្ននៃទីក្រុង"),
        ("zh", "查询天气"),
    ],
)
def test_descriptions_in_scripts_without_spaces_are_kept(tmp_path, language, text):
    (document,) = read_registries(
        [write(tmp_path / "a.json", [function(description=text)])], languages=[language]
    ).documents
    done = normalize(document, min_tools=1)
    assert not done.rejected and done.server.tools[0].description == text


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "name": "run", "description": "Runs the code that is written."},
        {"type": "computer_20250124", "name": "computer", "description": "Uses a computer with a screen."},
    ],
    ids=str,
)
def test_tools_of_other_types_without_parameters_are_rejected(tool):
    (done,) = normalize_all(documents([tool]), min_tools=1)
    assert done.reasons() == {"no_schema": 1} and tool["type"] in done.rejected[0].detail
    (done,) = normalize_all(documents([{**tool, "input_schema": BODY}]), min_tools=1)
    assert done.server.tools[0].parameters == BODY


def test_names_that_yaml_reads_as_numbers_are_texts(tmp_path):
    text = (
        "openapi: 3.1.0\npaths:\n  /a:\n    get:\n      operationId: 0755\n      summary: Look up a thing.\n"
        "      parameters: [{name: 404, in: query, schema: {type: [string, null]}}]\n"
    )
    (tool,) = normalize(one(write(tmp_path / "a.yaml", text)), min_tools=1).server.tools
    assert tool.name == "0755" and tool.parameters["properties"] == {"404": {"type": ["string", "null"]}}
    text = "- {name: 7, description: Look up a thing., parameters: {a: {type: str, required: yes}, b: {type: str}}}\n"
    (tool,) = normalize(one(write(tmp_path / "b.yaml", text)), min_tools=1).server.tools
    assert tool.name == "7" and tool.parameters["required"] == ["a"]


@pytest.mark.parametrize("text", ["No description available.", "Description not available", "TODO", "暂无描述"])
def test_placeholders_are_no_descriptions(text):
    (done,) = normalize_all(documents([function(description=text)]), min_tools=1)
    assert done.reasons() == {"vague_description": 1}


# ---------------------------------------------------------------------------------------------------------------------
# In the pipeline


async def test_a_run_goes_on_with_what_is_left(tmp_path):
    """Registries beside fact servers, a missing file, a server that hangs: the card says what was left out and why."""
    registry = tmp_path / "dump.jsonl"
    tools = [{"name": f"thing_{i}", "description": f"Look up the thing number {i}."} for i in range(3)]
    rows = [smithery("Things", tools), smithery("Same things", tools), smithery("Gone", [], is_success=False)]
    registry.write_text("\n".join(map(json.dumps, rows)) + "\n{broken\n")
    hanging = StdioExecution([sys.executable, "-c", "import sys; sys.stdin.read()"])
    config = TrajectoriesConfig(
        trajectories=2,
        languages={"en": 1.0},
        sources=(ServerSource("hangs", "Hangs", "Never answers.", "test", "en", hanging),),
        tools=(str(registry), str(tmp_path / "gone.json")),
        fact_servers=("colors",),
        mcp_share=0,
        proposals=1,
        walks=4,
        max_length=1,
        min_tools=1,
        mcp_timeout_seconds=2,
        server_weights={"colors": 1e6},
        behaviours={},
    )
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(tmp_path / "journal.sqlite") as journal:
            summary = await synthesize(
                config, executor=Executor(OfflineTeacher(), pool), journal=journal, out_dir=tmp_path / "out",
                workdir=tmp_path, seed=1,
            )  # fmt: skip
    servers = {server.id: server for server in read_dataset(tmp_path / "out" / "servers", ToolServer)}
    assert list(servers) == ["colors", "me_things"] and servers["me_things"].execution == EmulatedExecution()
    assert summary.rejected["collect"] == {"mcp_server_unavailable": 1}
    assert summary.rejected["tools"] == {"not_connected": 1, "not_json": 1, "registry_unreadable": 1}
    assert summary.rejected["normalize"]["duplicate_server"] == 3
    card = read_card(tmp_path / "out" / "servers")
    figures, dropped = card["statistics"], card["rejected"]["normalize"]
    assert figures["tools"] + sum(dropped.values()) == figures["tools_read"]
    assert (
        figures["tools_changed"] == {"no_parameters": 3}
        and "me_things" in summary.details["tools_changed"]["no_parameters"]
    )
    assert figures["tools_read"] == 6 + len(fact_documents(["en"], only=["colors"])[0].tools)
    assert "gone.json" in summary.details["tools"]["registry_unreadable"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mcp_timeout_seconds": 0}, "mcp_timeout_seconds is 0; use a number above 0"),
        ({"max_tools": 2}, "min_tools 3, max_tools 2: need min <= max"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        TrajectoriesConfig(**settings)
