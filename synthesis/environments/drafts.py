"""The records between the stages, from a decomposition to an environment."""

from __future__ import annotations

from typing import Any

import msgspec

from synthesis.core.records import CodeTool, Decomposition, Mode, ReferenceCall, World
from synthesis.pipeline.partition import Split


class Draft(msgspec.Struct, frozen=True, rename={"split": "side"}):  # as journals have it
    """A decomposition on its way; `domains` are its sub-questions', in their order."""

    decomposition: Decomposition
    domains: list[str]
    split: Split = "train"
    mode: Mode = "unconditional"


class NeededTool(msgspec.Struct, frozen=True, rename={"negative_arguments": "others"}):  # as journals have it
    """A proven tool of an environment.

    `calls` are its reference calls. `negative_arguments` has arguments for each call that must give another answer. A
    world's tool may have none: a world is offered whole.
    """

    intent: str
    domain: str
    tool: CodeTool
    calls: list[ReferenceCall]
    negative_arguments: list[dict[str, Any]]


class ToolsetDraft(msgspec.Struct, frozen=True):
    """A decomposition with its tools and their world, if they have one; later with its distractors by band.

    `closeness` is the largest cosine similarity of a distractor's document to a needed tool's.
    """

    draft: Draft
    tools: list[NeededTool]
    distractors: dict[str, list[CodeTool]] = {}
    closeness: float = 0.0
    world: World | msgspec.UnsetType = msgspec.UNSET
