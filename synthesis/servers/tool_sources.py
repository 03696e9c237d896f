"""Where tools come from: the setting `tools` of trajectories, whose entries are told apart by what they are.

- a file of MCP servers (`mcp.json`, or `server.json` of the official registry): `synthesis.servers.configured`;
- Python functions, `my_module:my_tools` or `FILE.py:my_tools`: `synthesis.servers.function_server`;
- any other file, folder or URL: documents of tools, OpenAPI among them: `synthesis.servers.registry`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from synthesis.core.files import read_unpacked
from synthesis.core.mirror import fetched
from synthesis.core.records import StdioExecution
from synthesis.core.references import FORM, is_reference
from synthesis.core.refusals import InputError
from synthesis.core.typed import decode_any_json
from synthesis.servers.collect import ServerSource
from synthesis.servers.configured import is_configuration, read_sources, source_of
from synthesis.servers.mcp_client import FUNCTION_SERVER, find_command, own_environment

_SECONDS = 120.0
"""For the modules of functions to be imported."""


@dataclass
class ToolSources:
    """What the entries of `tools` stand for.

    Attributes:
        servers: running MCP servers, and one for each entry of Python functions.
        functions: digests of the functions' files, by the id of their server.
        documents: files, folders and URLs of tools that do not run.
        digests: of the functions' files, by the entry of `tools`.
    """

    servers: list[ServerSource] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)
    documents: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


def read_tools(entries: Iterable[str]) -> ToolSources:
    """Tell the entries apart, in their order; functions are imported, in a process of their own, and described.

    Raises:
        InputError: an entry names nothing, or what it names cannot be used; says which and why.
    """
    result = ToolSources()
    configured: list[str] = []
    for entry in entries:
        try:
            if _is_function(entry):
                source, digest = _functions(entry)
                result.servers.append(source)
                result.functions[source.id] = result.digests[entry] = digest
            elif is_configuration(_value(fetched(entry))):
                configured.append(entry)
            else:
                result.documents.append(entry)
        except InputError as error:
            raise InputError(f"tools: {error}") from error
    try:
        result.servers += read_sources(configured)
    except InputError as error:
        raise InputError(f"tools: {error}") from error
    return result


def _is_function(entry: str) -> bool:
    return is_reference(entry) and not Path(entry).exists()


def _value(path: Path) -> Any:
    """The JSON value of a file that may be a configuration; None of any other."""
    if path.suffix.lower() not in (".json", "") or not path.is_file():
        return None
    try:
        return decode_any_json(read_unpacked(path))
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError, InputError):
        return None  # whoever reads its documents says what is wrong


def _functions(reference: str) -> tuple[ServerSource, str]:
    """The server of functions, and the digest of their files.

    Raises:
        InputError: they cannot be imported, or one of them cannot be a tool.
    """
    command = [find_command(FUNCTION_SERVER[0]) or "python", *FUNCTION_SERVER[1:], reference, "--describe"]
    try:
        done = subprocess.run(command, env=own_environment(), capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"{reference}: importing it took more than {_SECONDS:g} s") from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise InputError(f"{lines[-1]:.500}; write {FORM}, of a list of functions or of LangChain tools")
    described: Mapping[str, str] = json.loads(done.stdout.splitlines()[-1])
    execution = StdioExecution([*FUNCTION_SERVER, reference])
    return source_of(reference, reference, described["description"], execution), described["digest"]
