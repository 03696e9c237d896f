"""The report's tool graphs: what a server calls itself can be written."""

from __future__ import annotations

import networkx as nx

from launch.quickstart.report import tool_graphs
from synthesis.core.records import CodeExecution, ToolServer


def test_tools_are_listed_with_those_that_come_next(tmp_path) -> None:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([("<b>", "rare", 1), ("<b>", "often", 2), ("often", "rare", 1)])
    nx.write_graphml(graph, tmp_path / "server.graphml")
    servers = [ToolServer("server", "two\nlines \x1b\ud800", "", "facts", "en", [], CodeExecution(""))]
    ((title, steps),) = tool_graphs([tmp_path / "server.graphml"], servers)
    assert steps == {"<b>": "often (2), rare (1)", "rare": "", "often": "rare (1)"}
    assert title.encode() and "\n" not in title and "\x1b" not in title
