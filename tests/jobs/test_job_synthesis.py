"""Trajectories from a user's MCP server, and environments from their documents, as a user does them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated_model import EmulatedModel
from environments_world import ScriptedAuthor, pdf

from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Provenance, ToolEnvironment, ToolServer, Trajectory

SERVER = '''
from mcp.server import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("Depot")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def find_amber(item: str) -> dict:
    """Find the amber record of an item by its number."""
    return {"amber": int(item) % 97}


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def find_birch(item: str) -> dict:
    """Find the birch record of an item by its number."""
    return {"birch": int(item) % 89}


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def find_cedar(item: str) -> dict:
    """Find the cedar record of an item by its number."""
    return {"cedar": int(item) % 83}


server.run("stdio")
'''
BLOCKED = """
import sys

OF_DEMO = {names}
for name in OF_DEMO:
    sys.modules[name] = None
"""
"""A `sitecustomize.py` that hides the packages of the extra `demo`."""
