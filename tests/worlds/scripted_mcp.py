"""MCP servers over stdio that say what a test has them say, behind the handshake that is the same for all of them."""

from __future__ import annotations

import textwrap
from pathlib import Path

_REQUESTS = '''
import json, sys

def requests():
    """Each request and what its answer begins with; that of `initialize` is whole."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        answer = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "scripted", "version": "1"}
            answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        yield message, answer
'''


def write_server(file: Path, script: str) -> None:
    """Write a server's program: `script` goes through `requests()` and prints each answer as a line of JSON."""
    file.write_text(_REQUESTS + textwrap.dedent(script), encoding="utf-8")
