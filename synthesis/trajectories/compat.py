"""Cards and journals of earlier versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from synthesis.pipeline.demo import fact_server_ids
from synthesis.trajectories.config import PACKAGED_MCP_SHARE

UNDECLARED: Mapping[str, Mapping[str, Any]] = {"interact": {"attempts": 3}, "judge": {"license": ""}}
"""By stage: settings that early versions did not declare, with the value that their runs had."""


def settings_of_card(then: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the settings on a card into today's names: `tools` was `servers` and `registries`, which were added to
    the packaged tools."""
    if "tools" in then or not then:
        return then
    tools = [*then.get("servers", []), *then.get("registries", [])]
    has_own = bool(tools or then.get("sources"))
    facts, share = then.get("fact_servers", []), then.get("mcp_share", PACKAGED_MCP_SHARE)
    return {
        **then,
        "tools": tools,
        "fact_servers": facts or (list(fact_server_ids()) if has_own else None),
        "mcp_share": None if share == PACKAGED_MCP_SHARE and not has_own else share,
        **({"sources": "the packaged ones"} if tools and then.get("sources") is None else {}),
    }
