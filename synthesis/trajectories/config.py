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
from synthesis.pipeline.partition import WORKSPACE, Partition
from synthesis.pipeline.stage_keys import Before, Free, Grows
from synthesis.servers.collect import ServerSource, default_sources
from synthesis.trajectories.execution import Failures

Augmentation = Literal["diverse", "complicate", "persona"]
OPERATORS = ("vote", "back_translation")
"""Verification operators: functions in `tool_graph.py`."""

DEMO = "demo"
"""Entry of `tools` that means the packaged servers."""
PACKAGED_MCP_SHARE = 0.05
"""Share of the tasks for the packaged MCP servers, time and git, which have few tools."""


def _operators() -> tuple[str, ...]:
    return OPERATORS


def _default_behaviours() -> Mapping[Behaviour, float]:
    return {
        "missing_tool": 0.03, "irrelevant_tools": 0.02, "missing_parameter": 0.03, "infeasible": 0.01, "refused": 0.01,
        "confirmation": 0.02, "done": 0.02, "dialogue": 0.06, "later_tool": 0.02,
    }  # fmt: skip


@dataclass(frozen=True)
class TrajectoriesConfig(Settings):
    """Settings of trajectory synthesis: number, servers and filters.

    Attributes:
        trajectories: number of trajectories to store. Extra ones are cut. There are fewer if filters reject more than
            `oversample_ratio` allows for.
        oversample_ratio: share of additional tasks, to make up for tasks that the filters reject. Raise it if a run
            stores too few.
        languages: weights by ISO 639-1 code. The default is the paper's share (71.2 % English). Languages other than
            `en` and `zh` need a teacher behind an endpoint. A language without servers documented in it has tasks about
            English servers.
        tools: sources of tools, each recognized by its content. MCP servers: `mcp.json` or `server.json`. Python
            functions or LangChain tools: `my_module:my_tools` or `FILE.py:my_tools`. Tool documents, whose calls the
            emulator answers: files, folders and URLs with OpenAPI 2 and 3, Smithery-style dumps, RapidAPI documents, or
            lists of tools in any vendor's form, as `.json`, `.jsonl` or `.yaml`, also with `.gz`. `demo`: all packaged
            servers. Empty: with the offline teacher the packaged servers.
        sources: running MCP servers, as records. None: the packaged time and git servers, where `tools` is empty or
            names `demo`, and a model is not the teacher. Servers that cannot be reached are skipped, with the reason.
        mcp_share: share of the tasks that are about running servers. None: 0.05 with the packaged tools alone; with
            `tools` or `sources` all servers are equally likely (see `server_weights`). At 0 and 1 the other servers are
            left out.
        server_weights: how often tasks are about a server, by its id, relative to 1 for the others. The parts of a
            split server (`ID.1`, `ID.2`) each get its weight, unless they are named.
        fact_servers: ids of the packaged fact servers to use. Empty: none. None: all of them, but none with your own
            `tools` or `sources`, unless `tools` names `demo`.
        emulated_servers: ids of fact servers of which only the document is used; the emulator answers their calls.
        partition: entities and look-ups that are held out for evaluation. The offline teacher does not use them; a
            model does not know them. The default is that of environments (`partition_salt` and the settings beside it):
            no training task makes a call that a held-out environment asks for. None: nothing is held out.
        min_tools: fewest tools of a server; servers with fewer are dropped. The paper's value is 3. Use 2 or 1 for
            small servers of your own.
        max_tools: most tools of a server; larger servers are split by topic (tags, paths, names). The default is the
            limit of OpenAI's API for one request.
        server_similarity: least share of common tools (Jaccard, 0 to 1) at which two servers of one language are
            duplicates; the first is kept. Above 1: only exact duplicates are dropped.
        read_only: use only those tools of MCP servers that they declare read-only. Concurrent runs share the servers,
            and any other tool may write.
        allowed_tools: tools to use although their server does not declare them read-only, by the id of the source, as
            the server names them.
        informative_joins: for the offline teacher: join no relations of which nine tenths of the values are the same,
            and ask no question in which a hop can be skipped.
        proposals: independent answers of the teacher for each server, whose proposed chains are counted.
        pairs: task-chain pairs that one such answer contains.
        walks: random walks on the tool graph of each server. More find more chains.
        min_length: shortest chain, in tools; 1 makes each tool a chain by itself.
        max_length: longest chain, in tools (paper: 5).
        acyclic: use each tool at most once in a chain.
        operators: checks of a chain, in order: `vote` and `back_translation`. A chain must pass all. Empty: no check.
        votes: number of votes of the operator `vote`, and of tries of `back_translation`.
        attempts: how often the teacher is asked for a record, with the previous fault in the prompt, before the record
            is rejected.
        stop_after: number of records of a stage after which the run stops if less than one in a hundred is accepted. 0:
            never stop.
        server_tasks: share of the tasks that are generated from a server without a chain.
        tool_counts: numbers of different tools in tasks without a chain, of which one is sampled for each task.
        several_servers: share of the tasks that use tools of several servers, with a chain across them or without one.
            Ours: 0, since the paper has none (section 2.1.1).
        groups: number of groups of servers for such tasks, in each language. The agent is offered all tools of a group.
        group_sizes: numbers of servers in a group, of which one is sampled for each group.
        behaviours: shares of the original tasks that teach a behavior other than calling tools, by its name
            (`core.records.Behaviour`), such as asking for a missing value. These tasks get no variations. Empty: none.
            The defaults are ours, 22 % in all: the paper has no such data, and its SFT loses 14 points in BFCL's
            Missing Functions. `confirmation` uses a packaged to-do server. With your own tools only shares of your own
            include it.
        user_turns: most user messages in a conversation of the behavior `dialogue`; at least 2.
        policies: share of the conversations of the behavior `dialogue` in which the agent's policy forbids one of the
            user's wishes.
        augmentations: kinds of variations to sample from.
        augmented: share of original tasks that get a variation.
        license: license of tool documents that do not name their own, for cards and records.
        personas: file of personas, see `personas.read_personas`. Empty, or none in the language of a task: the packaged
            ones.
        near_duplicate: least similarity of the words of two tasks of a server, 0 to 1, at which the later task is
            dropped.
        thresholds: least scores of a task, 1 to 5. Raise them for fewer and better tasks.
        failures: injected failures of calls (paper: 20 % of calls).
        max_turns: maximum assistant turns of a run after each user message.
        max_tokens: maximum tokens that the agent sees in one turn, tools included, as estimated by `interact`. The
            original cuts a longer conversation; ours is rejected. The tool documents of a server may take half of it:
            longer servers are split by topic, and a longer tool is rejected (`document_too_long`).
        system_prompt: system prompt of the agent. Empty: no system message.
        reward_threshold: least mean of the seven reward axes, 0 to 1, for a run to be accepted.
        final_answer_threshold: least score of the axis `final_answer`, 0 to 1, for a run to be accepted.
        mcp_timeout_seconds: time limit, in seconds, to start or connect to an MCP server, and of each request.
        collect_concurrency: MCP servers that are started or connected to at the same time.
        concurrency: records processed at the same time.
        own_stages: your own functions, by the name of the stage after which they take its records
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
    partition: Partition | None = WORKSPACE
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
    behaviours: Annotated[Mapping[Behaviour, Share], Before({})] = field(default_factory=_default_behaviours)
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
                raise SettingError(f"operators: {name!r} is listed twice; list it once and raise `votes`")
        if not any(self.languages.values()):
            raise SettingError(f"languages: {dict(self.languages)} has no weight above 0; give one at least")
        if (whole := sum(self.behaviours.values())) > 1 + 1e-9:
            raise SettingError(
                f"behaviours: {dict(self.behaviours)} are {whole:.3f} of the tasks; lower some, to 1 at most"
            )
        for name in ("tool_counts", "group_sizes", "augmentations"):
            if not getattr(self, name):
                raise SettingError(f"{name}: empty; give at least one value to sample from")

    @property
    def own_tools(self) -> tuple[str, ...]:
        """Return the entries of `tools` that name the user's tools."""
        return tuple(one for one in self.tools if one != DEMO)

    @property
    def has_own_tools(self) -> bool:
        """Return whether the user named tools; they replace the packaged ones."""
        return bool(self.own_tools or self.sources)

    def uses_demo(self, *, by_rules: bool) -> bool:
        """Return whether the packaged servers are used.

        Args:
            by_rules: the offline teacher answers, which knows no other servers.
        """
        return DEMO in self.tools or (by_rules and not self.has_own_tools)

    def uses_todo_server(self, *, by_rules: bool) -> bool:
        """Return whether the packaged to-do server is used: by default as the other packaged servers."""
        share = self.behaviours.get("confirmation", 0.0)
        return share > 0 and (self.uses_demo(by_rules=by_rules) or self.behaviours != _default_behaviours())

    def weight_of(self, server_id: str) -> float:
        """Return how often tasks are about a server, relative to the others' 1."""
        weights = self.server_weights
        return weights.get(server_id, weights.get(re.sub(r"\.\d+$", "", server_id), 1.0))

    @property
    def running_share(self) -> float | None:
        """Return the share of tasks for running servers; None: no server is more likely than another."""
        return PACKAGED_MCP_SHARE if self.mcp_share is None and not self.has_own_tools else self.mcp_share
