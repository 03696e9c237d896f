"""The configuration of trajectory synthesis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from synthesis.core.records import Language, TaskScores
from synthesis.pipeline.partition import Partition
from synthesis.servers.collect import ServerSource
from synthesis.trajectories.execution import Failures

Augmentation = Literal["diverse", "complicate", "persona"]
OPERATORS = ("vote", "back_translation")
"""Verification operators: functions in `tool_graph.py`."""


@dataclass(frozen=True)
class TrajectoriesConfig:
    """How many trajectories, from which servers, how strictly filtered.

    Attributes:
        trajectories: how many are wanted; what is above is cut, what filters take beyond `surplus` is missing.
        surplus: share of tasks made beyond `trajectories`, to make up for what the filters reject.
        languages: weights; the default is the paper's share (71.2 % English).
        sources: running MCP servers to collect from, over stdio or streamable HTTP; None: the installed ones, time and
            git. Those that cannot be reached are left out with a reason.
        registries: files or folders of documents of servers that do not run: the emulator answers their calls. What
            they are is found from their content: Smithery-style dumps, OpenAPI 3, RapidAPI documents, lists of tools in
            OpenAI's form; as `.jsonl`, `.json` or `.yaml`, also with `.gz` (`synthesis.servers.registry`).
        mcp_share: share of the tasks for MCP servers.
        server_weights: by server id, how often tasks are about it, relative to the others' 1.
        fact_servers: ids of the fact servers to take; empty: all.
        emulated_servers: fact servers of which only the document is taken; the emulator answers their calls.
        partition: entities and structures held out for evaluation; a rule-based teacher leaves them alone.
        min_tools: servers with fewer tools are dropped. The paper's value is 3; the time server has 2.
        max_tools: servers with more tools are dropped; the default is what OpenAI's interface takes in one request.
        server_similarity: least share of common tools (Jaccard, 0 to 1) that makes two servers of one language the
            same; the first is kept. Above 1: only exact duplicates are dropped.
        read_only: drop tools of MCP servers that change state: concurrent runs share the servers.
        proposals: independent answers per server whose chains are counted.
        pairs: task-chain pairs asked for in one answer.
        walks: random walks per server.
        min_length: shortest chain; 1 makes each tool a chain of its own.
        max_length: longest chain (paper: 5).
        acyclic: no tool twice in a chain.
        operators: verification operators in order, by their names in `OPERATORS`; a chain must pass all.
        votes: votes of the first, tries of the second.
        attempts: how often the teacher is asked, with the problem as feedback, before a record is rejected.
        server_tasks: share of the tasks that are made from the server alone, without a chain.
        tool_counts: numbers of different tools of such tasks.
        augmentations: modes that variations are drawn from.
        augmented: share of original tasks that get a variation.
        personas: file of personas, see `personas.read_personas`; empty, or none in a task's language: built-in ones.
        near_duplicate: least similarity of the words of two tasks of a server at which the later one is dropped.
        thresholds: least scores of a task (1 to 5).
        failures: injection of failures (paper: 20 % of calls).
        max_turns: most assistant turns of a run.
        max_tokens: most tokens that a run may show the agent in one turn, tools included, as `interact` estimates
            them; the original cuts the conversation there, we reject it.
        system_prompt: of the agent; no system message when empty.
        reward_threshold: least mean of the seven axes.
        final_answer_threshold: least score of the axis `final_answer`.
        mcp_timeout_seconds: for starting or connecting to an MCP server, and for each request.
        collect_concurrency: MCP servers started or connected to at a time.
        concurrency: records in work at a time.
    """

    trajectories: int = 3_000
    surplus: float = 0.3
    languages: Mapping[Language, float] = field(default_factory=lambda: {"en": 0.712, "zh": 0.288})
    sources: tuple[ServerSource, ...] | None = None
    registries: tuple[str, ...] = ()
    mcp_share: float = 0.05
    server_weights: Mapping[str, float] = field(default_factory=dict)
    fact_servers: tuple[str, ...] = ()
    emulated_servers: tuple[str, ...] = ("http",)
    partition: Partition | None = None
    min_tools: int = 3
    max_tools: int = 128
    server_similarity: float = 0.7
    read_only: bool = True
    proposals: int = 8
    pairs: int = 6
    walks: int = 60
    min_length: int = 1
    max_length: int = 3
    acyclic: bool = True
    operators: tuple[str, ...] = ("vote", "back_translation")
    votes: int = 3
    attempts: int = 3
    server_tasks: float = 0.4
    tool_counts: tuple[int, ...] = (1, 2, 3)
    augmentations: tuple[Augmentation, ...] = ("diverse", "complicate", "persona")
    augmented: float = 0.5
    personas: str = ""
    near_duplicate: float = 0.8
    thresholds: TaskScores = TaskScores(question_quality=4, scenario_realism=3, tool_necessity=3)
    failures: Failures = Failures()
    max_turns: int = 12
    max_tokens: int = 58_000
    system_prompt: str = ""
    reward_threshold: float = 0.8
    final_answer_threshold: float = 0.75
    mcp_timeout_seconds: float = 20.0
    collect_concurrency: int = 4
    concurrency: int = 32

    def __post_init__(self) -> None:
        if self.trajectories < 1:
            raise ValueError(f"trajectories: {self.trajectories} is not positive; ask for at least 1")
        for name in ("mcp_timeout_seconds", "collect_concurrency", "server_similarity"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive; give more than 0")
        if self.max_tools < self.min_tools:
            raise ValueError(f"min_tools {self.min_tools}, max_tools {self.max_tools}: need min <= max")
        ids = [source.id for source in self.sources or ()]
        if repeated := [one for one in ids if ids.count(one) > 1]:
            raise ValueError(f"sources: the id {repeated[0]!r} is used twice; give each server its own")
        for name in ("mcp_share", "server_tasks", "augmented"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not a share; use 0 to 1")
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(f"min_length {self.min_length}, max_length {self.max_length}: need 1 <= min <= max")
        for name in self.operators:
            if name not in OPERATORS:
                raise ValueError(f"operators: unknown {name!r}; use {', '.join(OPERATORS)}")
            if self.operators.count(name) > 1:
                # One verdict for each name: the second would hide the first.
                raise ValueError(f"operators: {name!r} stands there twice; name it once and raise `votes`")
        if not 0 < self.near_duplicate <= 1:
            raise ValueError(f"near_duplicate: {self.near_duplicate} is no similarity; use a number above 0, up to 1")
        for name in ("votes", "attempts", "max_turns", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive; use at least 1")
        if self.server_weights and min(self.server_weights.values()) <= 0:
            raise ValueError(f"server_weights: {dict(self.server_weights)} has one that is not positive")
        if not self.languages:
            raise ValueError("languages: empty; give at least one of en, zh")
