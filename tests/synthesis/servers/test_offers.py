"""Resources and prompts of running servers: listed in their records and before a run; none is fine, an error is not."""

from __future__ import annotations

import sys
import textwrap
from types import SimpleNamespace

import msgspec
import pytest

from launch.viewer.preview_page import rendered
from sandbox import SandboxConfig, SandboxPool
from synthesis.core.records import EmulatedExecution, ServedPrompt, ServedResource, StdioExecution, ToolServer
from synthesis.core.stages import Journal
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.executors import Executor
from synthesis.pipeline.preview import Preview
from synthesis.servers.collect import ServerDocument, ServerSource, collect, default_sources
from synthesis.servers.mcp_client import McpConnections
from synthesis.servers.normalize import normalize, served
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.forecast import expected
from synthesis.trajectories.pipeline import synthesize

SERVER = textwrap.dedent(
    """
    import asyncio, sys
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp.shared.exceptions import MCPError
    from mcp.types import (
        ListPromptsResult, ListResourcesResult, ListResourceTemplatesResult, ListToolsResult, Prompt, PromptArgument,
        Resource, ResourceTemplate, Tool, ToolAnnotations,
    )

    KIND = sys.argv[1]

    async def list_tools(context, parameters):
        reads = ToolAnnotations(read_only_hint=True)
        about = {"description": "A tool of this server.", "input_schema": {"type": "object"}, "annotations": reads}
        return ListToolsResult(tools=[Tool(name=f"tool_{n}", **about) for n in range(3)])

    async def list_resources(context, parameters):
        page = int(parameters.cursor) if parameters is not None and parameters.cursor else 0
        if KIND == "failing":
            raise MCPError(code=-32603, message="the disk is gone")
        if KIND == "unknown":
            raise MCPError(code=-32601, message="Method not found")
        if KIND == "many":
            return ListResourcesResult(resources=[Resource(name=f"r{n}", uri=f"file:///{n}") for n in range(1200)])
        here = [Resource(name=f"page {page}", uri=f"file:///{page}.txt", description=" Of\\nall. ",
                         mime_type="text/plain")]
        after = "0" if KIND == "endless" else None if page else "1"
        return ListResourcesResult(resources=here, next_cursor=after)

    async def list_templates(context, parameters):
        if KIND == "unknown":
            raise MCPError(code=-32601, message="Method not found")
        any_one = ResourceTemplate(name="any", uri_template="file:///{n}")
        return ListResourceTemplatesResult(resource_templates=[any_one])

    async def list_prompts(context, parameters):
        asks = [PromptArgument(name="topic", required=True), PromptArgument(name="tone")]
        greet = Prompt(name="greet", description="Greets.", arguments=asks)
        return ListPromptsResult(prompts=[greet, Prompt(name="x")])

    async def main():
        offers = {} if KIND == "none" else {
            "on_list_resources": list_resources, "on_list_resource_templates": list_templates,
            "on_list_prompts": list_prompts,
        }
        server = Server("offers", on_list_tools=list_tools, **offers)
        async with stdio_server() as streams:
            await server.run(*streams, server.create_initialization_options())

    asyncio.run(main())
    """
)
RESOURCES = [
    ServedResource("page 0", "file:///0.txt", "Of all.", "text/plain"),
    ServedResource("page 1", "file:///1.txt", "Of all.", "text/plain"),
    ServedResource("any", "file:///{n}"),
]
PROMPTS = [ServedPrompt("greet", "Greets.", ["topic", "tone"]), ServedPrompt("x")]


def source(folder, kind: str) -> ServerSource:
    (folder / "offers.py").write_text(SERVER)
    command = [sys.executable, str(folder / "offers.py"), kind]
    return ServerSource("own", "Own", "A server.", "test", "en", StdioExecution(command))


async def collected(folder, kind: str) -> ServerDocument:
    async with McpConnections(cwd=folder, timeout_seconds=120) as connections:
        (document,) = await collect(source(folder, kind), SimpleNamespace(connections=connections))
    return document


async def test_what_a_server_offers_is_in_its_record(tmp_path):
    document = await collected(tmp_path, "all")
    assert (document.resources, document.prompts) == (RESOURCES, PROMPTS)
    record = normalize(document).server
    assert (record.resources, record.prompts) == (RESOURCES, PROMPTS)
    assert msgspec.json.decode(msgspec.json.encode(record), type=ToolServer) == record
    assert (
        served(record)
        == "own: 3 tools (tool_0, tool_1, tool_2); 3 resources (page 0, page 1, any); 2 prompts (greet, x)"
    )
    assert served(msgspec.structs.replace(record, execution=EmulatedExecution())) == ""


@pytest.mark.parametrize(("kind", "prompts"), [("none", 0), ("unknown", 2)])
async def test_a_server_that_offers_none_or_does_not_know_the_request_has_none(tmp_path, kind, prompts):
    document = await collected(tmp_path, kind)
    assert document.resources == [] and len(document.prompts) == prompts and len(document.tools) == 3
    record = msgspec.to_builtins(normalize(document).server)
    assert "resources" not in record and ("prompts" in record) == bool(prompts)


@pytest.mark.parametrize(
    ("kind", "reason", "detail", "resources"),
    [
        ("failing", "resources_unavailable", "resources/list failed: MCPError: the disk is gone", 0),
        ("endless", "incomplete_list", "the pages of resources/list do not end; 1 entries were read", 2),
    ],
)
async def test_a_server_that_fails_at_its_resources_keeps_its_tools(tmp_path, kind, reason, detail, resources):
    document = await collected(tmp_path, kind)
    assert (len(document.tools), len(document.resources), len(document.prompts)) == (3, resources, 2)
    (problem,) = document.left_out
    assert problem.reason == reason and detail in problem.detail


async def test_of_very_many_the_first_are_kept(tmp_path):
    document = await collected(tmp_path, "many")
    assert document.left_out[0].detail == "201 beyond the first 1000 are left out"
    assert len(document.resources) == 1_000 and document.resources[999].name == "r999"
    assert served(normalize(document).server).count("r4, …)") == 1


async def test_a_preview_shows_what_running_servers_offer(tmp_path):
    config = TrajectoriesConfig(
        trajectories=2, sources=(source(tmp_path, "all"), default_sources(["en"])[1]), fact_servers=("numbers",),
        languages={"en": 1.0}, behaviours={}, walks=5, proposals=1, mcp_share=0.01, mcp_timeout_seconds=120.0,
    )  # fmt: skip
    seen = Preview(2)
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(tmp_path / "journal.sqlite") as journal:
            await synthesize(
                config, executor=Executor(OfflineTeacher(), pool), journal=journal, out_dir=tmp_path / "out",
                workdir=tmp_path, seed=0, preview=seen,
            )  # fmt: skip
    assert len(seen.source_notes) == 2 and seen.source_notes[0].endswith("2 prompts (greet, x)")
    assert seen.source_notes[1].startswith("mcp_git: ") and "resources" not in seen.source_notes[1]
    page = rendered(seen, seen.forecast(lambda rates, inputs: expected(config, rates, inputs), concurrency=1))
    assert "Servers that run" in page and "3 resources (page 0, page 1, any)" in page
