"""The configuration of trajectory synthesis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from astra_jax.base.settings import Amount, Bound, Count, OneOf, Seconds, SettingError, Settings, Share
from synthesis.core.records import Behaviour, Language, TaskScores
from synthesis.pipeline.demo import fact_server_ids
from synthesis.pipeline.own_stages import OwnStages
from synthesis.pipeline.partition import Partition
from synthesis.pipeline.stage_keys import Before, Free, Grows
from synthesis.servers.collect import ServerSource, default_sources
from synthesis.trajectories.execution import Failures

Augmentation = Literal["diverse", "complicate", "persona"]
OPERATORS = ("vote", "back_translation")
"""Verification operators: functions in `tool_graph.py`."""

PACKAGED_MCP_SHARE = 0.05
"""Share of the tasks for the packaged MCP servers, time and git, which have few tools."""


def _operators() -> tuple[str, ...]:
    return OPERATORS


@dataclass(frozen=True)
class TrajectoriesConfig(Settings):
    """Settings of trajectory synthesis: number, servers and filters.

    Attributes:
        trajectories: how many are wanted; what is above is cut, what filters take beyond `oversample_ratio` is missing.
        oversample_ratio: share of tasks made beyond `trajectories`, to make up for what the filters reject.
        languages: weights by ISO 639-1 code; the default is the paper's share (71.2 % English). Others than `en` and
            `zh` want a teacher behind an endpoint; where no server is documented in one, its tasks are about servers
            that are in English.
        tools: where tools come from; each entry is told apart by what it is. Files of MCP servers (`mcp.json`,
            `server.json`); Python functions or LangChain tools (`my_module:my_tools`, `FILE.py:my_tools`); files,
            folders and URLs of tool documents, whose calls the emulator answers: OpenAPI 2 and 3, Smithery-style dumps,
            RapidAPI documents, lists of tools in any vendor's form; `.json`, `.jsonl` or `.yaml`, also with `.gz`.
        sources: running MCP servers, written out here; None: without `tools` the packaged ones, time and git. Servers
            that cannot be reached are left out with a reason.
        mcp_share: share of the tasks for running servers; None: 0.05 with the packaged tools alone; with `tools` or
            `sources` all servers are equally likely (see `server_weights`).
        server_weights: by server id, how often tasks are about it, relative to the others' 1. The parts of a server
            that was split (`ID.1`, `ID.2`) each have its weight, unless they are named themselves.
        fact_servers: ids of the packaged fact servers to take; an empty list: none; None: all without `tools` or
            `sources`, and none with them.
        emulated_servers: fact servers of which only the document is taken; the emulator answers their calls.
        partition: entities and structures held out for evaluation; a rule-based teacher leaves them alone.
        min_tools: servers with fewer tools are dropped. The paper's value is 3; the time server has 2.
        max_tools: servers with more tools are split by topic (tags, paths, names); the default is what OpenAI's
            interface takes in one request.
        server_similarity: least share of common tools (Jaccard, 0 to 1) that makes two servers of one language the
            same; the first is kept. Above 1: only exact duplicates are dropped.
        read_only: take of MCP servers only tools that they declare read-only: concurrent runs share the servers, and
            what a server does not declare may write.
        allowed_tools: by the id of a source, tools of it, as the server names them, that are taken whatever it
            declares.
        informative_joins: of the offline teacher: join no relations whose values are nearly all the same (nine tenths),
            and ask nothing of which a hop can be skipped.
        proposals: independent answers per server whose chains are counted.
        pairs: task-chain pairs asked for in one answer.
        walks: random walks per server.
        min_length: shortest chain; 1 makes each tool a chain of its own.
        max_length: longest chain (paper: 5).
        acyclic: no tool twice in a chain.
        operators: verification operators in order, by their names in `OPERATORS`; a chain must pass all.
        votes: votes of the first, tries of the second.
        attempts: how often the teacher is asked, with the problem as feedback, before a record is rejected.
        stop_after: records of a stage after which the run stops if less than one in a hundred is accepted.
        server_tasks: share of the tasks that are made from the server alone, without a chain.
        tool_counts: numbers of different tools of such tasks.
        several_servers: share of the tasks whose tools are of several servers, with a chain that crosses them or
            without one, as of other tasks. The paper has none (section 2.1.1).
        groups: of how many groups of servers those are, in each language; a group is offered to the agent whole.
        group_sizes: numbers of servers in a group.
        behaviours: shares of the original tasks that teach something beside calling tools, by its name
            (`core.records.Behaviour`); the rest are requests that are served. Their conversations have no variation.
            Empty: none. The defaults are ours, 22 % in all: the paper has no such data, and its SFT loses 14 points
            in BFCL's Missing Functions.
        user_turns: most messages of the user in a conversation of several; 2 at least.
        policies: share of the conversations of the behaviour `dialogue` whose agent has a policy that forbids one of
            the things that the user wants.
        augmentations: modes that variations are drawn from.
        augmented: share of original tasks that get a variation.
        license: of tool documents, on cards and records, where a document does not name its own.
        personas: file of personas, see `personas.read_personas`; empty, or none in a task's language: built-in ones.
        near_duplicate: least similarity of the words of two tasks of a server at which the later one is dropped.
        thresholds: least scores of a task (1 to 5).
        failures: injection of failures (paper: 20 % of calls).
        max_turns: most assistant turns of a run, after each message of the user.
        max_tokens: most tokens that a run may show the agent in one turn, tools included, as `interact` estimates
            them; the original cuts the conversation there, we reject it. Tool documents of a server take half of it at
            most: longer servers are split by topic, a longer tool is rejected (`document_too_long`).
        system_prompt: of the agent; no system message when empty.
        reward_threshold: least mean of the seven axes.
        final_answer_threshold: least score of the axis `final_answer`.
        mcp_timeout_seconds: for starting or connecting to an MCP server, and for each request.
        collect_concurrency: MCP servers started or connected to at a time.
        concurrency: records in work at a time.
        own_stages: by a stage's name, functions of your own that take its records before the next stage
            (docs/extending.md).
    """

    trajectories: Grows[Count] = 3_000
    oversample_ratio: Grows[Annotated[float, Bound(least=0, most=1_000)]] = 0.3
    languages: Mapping[Language, Amount] = field(default_factory=lambda: {"en": 0.712, "zh": 0.288})
    tools: tuple[str, ...] = ()
    sources: tuple[ServerSource, ...] | None = None
    mcp_share: Share | None = None
    server_weights: Mapping[str, Annotated[float, Bound(above=0, most=1e12)]] = field(default_factory=dict)
    fact_servers: tuple[Annotated[str, OneOf(fact_server_ids)], ...] | None = None
    emulated_servers: tuple[Annotated[str, OneOf(fact_server_ids)], ...] = ("http",)
    partition: Partition | None = None
    min_tools: Count = 3
    max_tools: Count = 128
    server_similarity: Annotated[float, Bound(above=0, most=2)] = 0.7
    read_only: bool = True
    allowed_tools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    informative_joins: Annotated[bool, Before(False)] = True
    proposals: Count = 8
    pairs: Count = 6
    walks: Count = 60
    min_length: Count = 1
    max_length: Count = 3
    acyclic: bool = True
    operators: tuple[Annotated[str, OneOf(_operators)], ...] = ("vote", "back_translation")
    votes: Count = 3
    attempts: Count = 3
    stop_after: Free[Count] = 50
    server_tasks: Share = 0.4
    tool_counts: tuple[Count, ...] = (1, 2, 3)
    several_servers: Share = 0.0
    groups: Count = 24
    group_sizes: tuple[Annotated[int, Bound(least=2, most=16)], ...] = (2, 3)
    behaviours: Annotated[Mapping[Behaviour, Share], Before({})] = field(
        default_factory=lambda: {
            "missing_tool": 0.03, "irrelevant_tools": 0.02, "missing_parameter": 0.03, "infeasible": 0.01,
            "refused": 0.01, "confirmation": 0.02, "done": 0.02, "dialogue": 0.06,
            "later_tool": 0.02,
        }
    )  # fmt: skip
    user_turns: Annotated[int, Bound(least=2, most=20)] = 5
    policies: Annotated[Share, Before(0.0)] = 0.3
    augmentations: tuple[Augmentation, ...] = ("diverse", "complicate", "persona")
    augmented: Share = 0.5
    license: str = ""
    personas: str = ""
    near_duplicate: Annotated[float, Bound(above=0, most=1)] = 0.8
    thresholds: TaskScores = TaskScores(question_quality=4, scenario_realism=3, tool_necessity=3)
    failures: Failures = Failures()
    max_turns: Count = 12
    max_tokens: Count = 58_000
    system_prompt: str = ""
    reward_threshold: Share = 0.8
    final_answer_threshold: Share = 0.75
    mcp_timeout_seconds: Free[Seconds] = 20.0
    collect_concurrency: Free[Count] = 4
    concurrency: Free[Count] = 32
    own_stages: OwnStages = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tools < self.min_tools:
            raise SettingError(f"min_tools {self.min_tools}, max_tools {self.max_tools}: need min <= max")
        ids = [source.id for source in self.sources or ()]
        if repeated := [one for one in ids if ids.count(one) > 1]:
            raise SettingError(f"sources: the id {repeated[0]!r} is used twice; give each server its own")
        if self.allowed_tools and not self.tools:  # which are read when a run starts
            ids = ids or [source.id for source in default_sources(list(self.languages))]
            if unknown := [one for one in self.allowed_tools if one not in ids]:
                raise SettingError(f"allowed_tools: no source has the id {unknown[0]!r}; there are {', '.join(ids)}")
        if self.max_length < self.min_length:
            raise SettingError(f"min_length {self.min_length}, max_length {self.max_length}: need min <= max")
        for name in self.operators:
            if self.operators.count(name) > 1:
                # One verdict for each name: the second would hide the first.
                raise SettingError(f"operators: {name!r} stands there twice; name it once and raise `votes`")
        if not any(self.languages.values()):
            raise SettingError(f"languages: {dict(self.languages)} has no weight above 0; give one at least")
        if (whole := sum(self.behaviours.values())) > 1 + 1e-9:
            raise SettingError(
                f"behaviours: {dict(self.behaviours)} are {whole:.3f} of the tasks; lower some, to 1 at most"
            )
        for name in ("tool_counts", "group_sizes", "augmentations"):
            if not getattr(self, name):
                raise SettingError(f"{name}: empty, and drawn from; name at least one")

    @property
    def has_own_tools(self) -> bool:
        """Return whether the user named tools; they replace the packaged ones."""
        return bool(self.tools or self.sources)

    def weight_of(self, server_id: str) -> float:
        """Return how often tasks are about a server, relative to the others' 1."""
        weights = self.server_weights
        return weights.get(server_id, weights.get(re.sub(r"\.\d+$", "", server_id), 1.0))

    @property
    def running_share(self) -> float | None:
        """Return the share of tasks for running servers; None: no server is more likely than another."""
        return PACKAGED_MCP_SHARE if self.mcp_share is None and not self.has_own_tools else self.mcp_share
