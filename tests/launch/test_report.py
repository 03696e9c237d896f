"""The report's pictures: what a server calls itself, and its tools, is only text."""

from __future__ import annotations

import html
import xml.etree.ElementTree as ET

import networkx as nx
import pytest

from launch.quickstart.report import tool_graphs
from synthesis.core.records import CodeExecution, ToolServer

HOSTILE = [
    "$x{$",
    r"$\frac{1}{$ \undefined",
    "</script></svg><script>alert(1)</script>",
    "{{ 7 * 7 }} {% raw %}",
    "_hidden & <b>",
    "\x1b[2J\u202ereversed\x00\ud800",
    "北京 🙂",
    "two\nlines",
]


@pytest.mark.parametrize("title", HOSTILE)
def test_any_title_and_any_tool_s_name_is_drawn_as_it_is(tmp_path, title) -> None:
    graph = nx.DiGraph()
    graph.add_edge(title.replace("\x1b", "").replace("\x00", "").replace("\ud800", ""), "$y^{$", weight=2)
    nx.write_graphml(graph, tmp_path / "server.graphml")
    servers = [ToolServer("server", title, "", "facts", "en", [], CodeExecution(""))]
    ((named, drawn),) = tool_graphs([tmp_path / "server.graphml"], servers)
    assert "<script" not in drawn and drawn.count("</svg>") == 1
    drawing = ET.fromstring(drawn)
    texts = {one.text or "".join(one.itertext()) for one in drawing.iter() if one.tag == "title"}
    assert "$y^{$" in texts and len(drawing.findall("path")) == 1
    assert "2 names, 1 arrows" in drawing.attrib["aria-label"]
    if title.isprintable():
        assert html.unescape(title) in texts and named == title
