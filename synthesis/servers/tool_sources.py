"""Sources of tools: the setting `tools` of trajectories, whose entries are distinguished by their content.

- a file of MCP servers (`mcp.json`, or `server.json` of the official registry): `synthesis.servers.configured`;
- a file of APIs that are called, by their OpenAPI documents: `synthesis.servers.api_server`;
- Python functions, `my_module:my_tools` or `FILE.py:my_tools`: `synthesis.servers.function_server`;
- any other file, folder or URL: documents of tools, OpenAPI among them: `synthesis.servers.registry`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.files import read_unpacked
from astra_jax.base.typed import decode_any_json, decode_json
from synthesis.core.mirror import fetched
from synthesis.core.records import StdioExecution
from synthesis.core.references import is_reference
from synthesis.servers.collect import RejectedTool, ServerSource
from synthesis.servers.configured import is_configuration, read_sources, source_of
from synthesis.servers.mcp_client import API_SERVER, FUNCTION_SERVER, find_command, own_environment

_SECONDS = 120.0
"""For the modules of functions to be imported, and documents of APIs to be read."""


@dataclass
class ToolSources:
    """Servers and documents that the entries of `tools` stand for.

    Attributes:
        servers: running MCP servers, and one for each entry of Python functions and each API.
        own: digests of the content of functions and APIs, by the id of their server; naming them permits their calls.
        rejected: operations of APIs that are no tools, by the id of the API's server.
        documents: files, folders and URLs of tools that do not run.
        digests: of the functions' files, by the entry of `tools`.
    """

    servers: list[ServerSource] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, list[RejectedTool]] = field(default_factory=dict)
    documents: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, command: Sequence[str]) -> str:
        """Add a server of this package's own, which describes its tools; return the digest of what they are made of.

        Raises:
            InputError: it refuses what it was given.
        """
        described = _described(command)
        source = source_of(name, name, described.description, StdioExecution(list(command)))
        self.servers.append(source)
        self.own[source.id] = described.digest
        self.rejected[source.id] = described.rejected
        return described.digest


class _Described(msgspec.Struct, frozen=True):
    description: str
    digest: str
    rejected: list[RejectedTool]


def read_tools(entries: Iterable[str]) -> ToolSources:
    """Classify the entries, in their order. Functions and APIs are described by the process that serves them.

    Raises:
        InputError: an entry names nothing, or what it names cannot be used; says which and why.
    """
    result = ToolSources()
    configured: list[str] = []
    try:
        for entry in entries:
            if is_reference(entry) and not Path(entry).exists():
                result.digests[entry] = result.add(entry, [*FUNCTION_SERVER, entry])
                continue
            value = _value(fetched(entry))
            apis = names_of_apis(value)
            for name in apis:
                result.add(name, [*API_SERVER, entry, name])
            if is_configuration(value):
                configured.append(entry)
            elif not apis:
                result.documents.append(entry)
        result.servers += read_sources(configured)
    except InputError as error:
        raise InputError(f"tools: {error}") from error
    return result


def _value(path: Path) -> Any:
    """Return the JSON value of a file that may be a configuration; None of any other."""
    if path.suffix.lower() not in (".json", "") or not path.is_file():
        return None
    try:
        return decode_any_json(read_unpacked(path))
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError, InputError):
        return None  # the reader of its documents reports the error


def names_of_apis(value: Any) -> list[str]:
    """Return the names of the APIs that a file's content configures; none where it configures none."""
    apis = value.get("apis") if isinstance(value, Mapping) else None
    return [str(name) for name in apis] if isinstance(apis, Mapping) else []


def _described(command: Sequence[str]) -> _Described:
    """Return the tools of one of this package's own servers, as it describes them."""
    started = [find_command(command[0]) or command[0], *command[1:], "--describe"]
    try:
        done = subprocess.run(started, env=own_environment(), capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"{' '.join(command[3:])}: it was not read in {_SECONDS:g} s") from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise InputError(f"{lines[-1] if lines else f'exit code {done.returncode}':.1000}")
    return decode_json(done.stdout.splitlines()[-1], _Described)
