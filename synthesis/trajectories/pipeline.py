"""The trajectory pipeline: collect → normalise → graph → chains → tasks → interact → reward, into four datasets.

summary = await synthesize(TrajectoriesConfig(), executor=LocalExecutor(teacher, pool), journal=journal,
                           out_dir=out, workdir=work, seed=0)
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import networkx as nx

from synthesis.core.datasets import write_dataset
from synthesis.core.records import Language, McpExecution, Task, ToolChain, ToolServer, Trajectory
from synthesis.core.stages import Journal, StageResult, rng_for
from synthesis.pipeline.executors import Executor, Workers, run_on
from synthesis.servers.collect import ServerDocument, default_sources, fact_documents, source_key
from synthesis.servers.duplicates import normalize_all
from synthesis.servers.registry import read_registries
from synthesis.trajectories import stages, statistics, tool_graph
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.interact import AgentRun
from synthesis.trajectories.personas import PERSONAS, Persona, read_personas
from synthesis.trajectories.tasks import TaskSeed, repeated_tasks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrajectoriesSummary:
    """What a run made.

    Attributes:
        counts: records by dataset.
        digests: content digest by dataset.
        rejected: stage → reason → count.
        details: stage → reason → one example.
        statistics: of the trajectories.
        datasets: name → folder.
        graphs: the GraphML files.
    """

    counts: dict[str, int]
    digests: dict[str, str]
    rejected: dict[str, dict[str, int]]
    details: dict[str, dict[str, str]]
    statistics: dict[str, Any]
    datasets: dict[str, Path]
    graphs: list[Path]


async def synthesize(
    config: TrajectoriesConfig,
    *,
    executor: Executor,
    journal: Journal,
    out_dir: Path,
    workdir: Path,
    seed: int,
) -> TrajectoriesSummary:
    """Run the pipeline. A run that was killed goes on from its journal and ends with the same bytes.

    Args:
        executor: where its stages are worked on, with which teacher and sandbox; changes no byte.
        journal: of this config and seed only.
        out_dir: gets `servers`, `chains`, `tasks`, `trajectories` and `graphs`.
        workdir: where MCP servers run.
    """
    make_context = partial(stages.open_context, config=config, workdir=workdir, seed=seed)
    async with executor.workers(make_context) as workers:
        return await _Run(config, workers, journal, out_dir, seed).run()


class _Run:
    """One run; the methods are the stages, in order."""

    def __init__(
        self,
        config: TrajectoriesConfig,
        workers: Workers[stages.TrajectoryContext],
        journal: Journal,
        out_dir: Path,
        seed: int,
    ) -> None:
        self.config, self.workers, self.journal = config, workers, journal
        self.out_dir, self.seed = out_dir, seed
        self.rejected: dict[str, Counter[str]] = {}
        self.details: dict[str, dict[str, str]] = {}
        self.servers: dict[str, ToolServer] = {}
        self.digests: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.tools_read = 0
        self.personas: dict[Language, Sequence[str | Persona]] = {**PERSONAS}
        if config.personas:
            self.personas.update(read_personas(config.personas))

    async def run(self) -> TrajectoriesSummary:
        config = self.config
        documents = await self.collect()
        self.normalize(documents)
        servers = list(self.servers.values())
        figures = {**statistics.server_statistics(servers), "tools_read": self.tools_read}
        self.write("servers", ToolServer, servers, figures)
        chains, graphs = await self.chains()
        self.write("chains", ToolChain, chains, statistics.chain_statistics(chains))
        tasks = await self.tasks(chains)
        self.write("tasks", Task, tasks, statistics.task_statistics(tasks))
        runs = await self.interact(tasks)
        trajectories = (await self.judge(runs))[: config.trajectories]
        figures = statistics.trajectory_statistics(trajectories, self.servers)
        figures["all_runs"] = statistics.run_statistics(runs, self.rejected["judge"]["judge_failed"])
        self.write("trajectories", Trajectory, trajectories, figures)
        return TrajectoriesSummary(
            counts=self.counts,
            digests=self.digests,
            rejected={stage: dict(reasons) for stage, reasons in self.rejected.items()},
            details=self.details,
            statistics=figures,
            datasets={name: self.out_dir / name for name in self.digests},
            graphs=graphs,
        )

    # -----------------------------------------------------------------------------------------------------------------

    def note(self, stage: str, result: StageResult[Any]) -> None:
        self.rejected[stage] = result.rejected
        self.details[stage] = result.details

    def write(self, name: str, kind: type[msgspec.Struct], records: Sequence[Any], figures: Mapping[str, Any]) -> None:
        card = {
            "config": msgspec.to_builtins(asdict(self.config)),
            "seed": self.seed,
            "statistics": figures,
            "rejected": {stage: dict(sorted(reasons.items())) for stage, reasons in self.rejected.items()},
        }
        self.digests[name] = write_dataset(self.out_dir / name, kind, records, card=card)
        self.counts[name] = len(records)

    async def collect(self) -> list[ServerDocument]:
        config = self.config
        languages = list(config.languages)
        sources = default_sources(languages) if config.sources is None else list(config.sources)
        collected = await self.stage(
            "collect", stages.collected, sources, source_key, ServerDocument, "collect tool documents",
            concurrency=config.collect_concurrency,
        )  # fmt: skip
        facts = fact_documents(languages, only=config.fact_servers, emulated=config.emulated_servers)
        registries = read_registries(config.registries, languages=languages)
        if config.registries:
            _log.info("registries: %d of %d servers read", len(registries.documents), registries.read)
        self.rejected["registries"] = registries.reasons()
        self.details["registries"] = {}
        for record in registries.rejected:
            self.details["registries"].setdefault(record.reason, f"{record.place}: {record.detail}")
        # What runs comes first: of servers that are there twice, the first is kept.
        return [*collected, *facts, *registries.documents]

    def normalize(self, documents: Sequence[ServerDocument]) -> None:
        reasons: Counter[str] = Counter()
        details: dict[str, str] = {}
        config = self.config
        for done in normalize_all(
            documents, min_tools=config.min_tools, max_tools=config.max_tools, read_only=config.read_only,
            similarity=config.server_similarity,
        ):  # fmt: skip
            reasons += done.reasons()
            self.tools_read += done.read
            for tool in done.rejected:
                details.setdefault(tool.reason, f"{done.server_id}.{tool.name}: {tool.detail}")
            if done.server is not None:
                self.servers[done.server.id] = done.server
        if not self.servers:
            raise ValueError(
                f"no tool server is left of {len(documents)}: {dict(reasons)}; lower min_tools or add some"
            )
        self.rejected["normalize"], self.details["normalize"] = reasons, details

    async def chains(self) -> tuple[list[ToolChain], list[Path]]:
        config = self.config
        asked = [(server, repeat) for server in self.servers.values() for repeat in range(config.proposals)]
        answered = await self.stage(
            "propose", stages.proposed, asked, lambda item: f"{item[0].id} {item[1]}", tool_graph.Proposals,
            "propose tasks and chains",
        )  # fmt: skip
        by_server: dict[str, list[list[str]]] = defaultdict(list)
        for proposals in answered:
            by_server[proposals.server_id] += [pair.chain for pair in proposals.pairs]
        candidates: list[ToolChain] = []
        files: list[Path] = []
        unknown: Counter[str] = Counter()
        for server in self.servers.values():
            names = [tool.name for tool in server.tools]
            graph: nx.DiGraph = tool_graph.transition_graph(names, by_server[server.id])
            unknown += tool_graph.unknown_tools(names, by_server[server.id])
            files.append(self.out_dir / "graphs" / f"{server.id}.graphml")
            tool_graph.write_graphml(graph, files[-1])
            walks = tool_graph.random_walks(
                graph, config.walks, min_length=config.min_length, max_length=config.max_length,
                acyclic=config.acyclic, rng=rng_for(self.seed, "walks", server.id),
            )  # fmt: skip
            candidates += tool_graph.chains_of(server, walks)
        if unknown:  # left out of the graph; the rest of their proposals counts
            self.rejected["graph"] = Counter({"unknown_tool": unknown.total()})
            self.details["graph"] = {"unknown_tool": ", ".join(name for name, _ in unknown.most_common(5))}
        verified = await self.stage(
            "verify", partial(stages.verified, servers=self.servers), candidates, lambda chain: chain.id, ToolChain,
            "verify chains",
        )  # fmt: skip
        return verified, files

    async def tasks(self, chains: Sequence[ToolChain]) -> list[Task]:
        config = self.config
        seeds = task_seeds(config, list(self.servers.values()), chains, self.seed)
        write = partial(stages.written, servers=self.servers)
        written = await self.stage("tasks", write, seeds, lambda one: one.id, Task, "write tasks")
        chosen = [
            task
            for task in written
            if config.augmentations and rng_for(self.seed, "augmented", task.id).random() < config.augmented
        ]
        vary = partial(stages.varied, servers=self.servers, personas=self.personas)
        varied = await self.stage("augment", vary, chosen, lambda task: task.id, Task, "vary tasks")
        every = written + varied
        repeated = repeated_tasks(every, config.near_duplicate)
        unique = [task for task in every if task.id not in repeated]
        self.rejected["duplicates"], self.details["duplicates"] = Counter(), {}
        if repeated:
            self.rejected["duplicates"]["near_duplicate"] = len(repeated)
            self.details["duplicates"]["near_duplicate"] = next(iter(repeated.values()))
        rate = partial(stages.rated, servers=self.servers)
        scored = await self.stage("score", rate, unique, lambda task: task.id, Task, "score tasks")
        # In a seeded order, so that a cut takes from all servers, modes and variations alike.
        rng_for(self.seed, "task_order").shuffle(scored)
        return scored[: math.ceil(config.trajectories * (1 + config.surplus / 2))]

    async def interact(self, tasks: Sequence[Task]) -> list[AgentRun]:
        run = partial(stages.interacted, servers=self.servers)
        return await self.stage("interact", run, tasks, lambda task: task.id, AgentRun, "run agents")

    async def judge(self, runs: Sequence[AgentRun]) -> list[Trajectory]:
        judge = partial(stages.judged, servers=self.servers)
        return await self.stage("judge", judge, runs, lambda run: run.task.id, Trajectory, "judge trajectories")

    async def stage(
        self, name: str, function: Any, inputs: Sequence[Any], key: Any, out: Any, label: str, *, concurrency: int = 0
    ) -> list[Any]:
        """Run a stage, note its rejections. `concurrency`: instead of the configured one."""
        result: StageResult[Any] = await run_on(
            self.workers, name, function, inputs, key=key, out=out, journal=self.journal,
            concurrency=concurrency or self.config.concurrency, description=label,
        )  # fmt: skip
        self.note(name, result)
        return result.outputs


def task_seeds(
    config: TrajectoriesConfig, servers: Sequence[ToolServer], chains: Sequence[ToolChain], seed: int
) -> list[TaskSeed]:
    """What the original tasks shall be like. Servers are drawn by weight, then lengths, then chains of that length."""
    wanted = math.ceil(config.trajectories * (1 + config.surplus) / (1 + config.augmented))
    by_server: dict[str, dict[int, list[ToolChain]]] = defaultdict(lambda: defaultdict(list))
    for one in chains:
        by_server[one.server_id][len(one.tools)].append(one)
    pools: dict[tuple[Language, bool], list[ToolServer]] = defaultdict(list)
    for server in servers:
        if server.id in by_server:
            pools[server.language, isinstance(server.execution, McpExecution)].append(server)
    languages = [language for language in config.languages if (language, False) in pools or (language, True) in pools]
    if not languages:
        raise ValueError("no chain passed verification; allow more walks or fewer operators")
    seeds: list[TaskSeed] = []
    for index in range(wanted):
        rng = rng_for(seed, "task_seed", index)
        language = rng.choices(languages, [config.languages[name] for name in languages])[0]
        mcp = rng.random() < config.mcp_share
        pool = pools.get((language, mcp)) or pools[language, not mcp]
        server = rng.choices(pool, [config.server_weights.get(one.id, 1.0) for one in pool])[0]
        chain: list[str] = []
        tool_count = 0
        if rng.random() < config.server_tasks:
            tool_count = min(rng.choice(config.tool_counts), len(server.tools))
        else:
            lengths = by_server[server.id]
            chain = rng.choice(lengths[rng.choice(sorted(lengths))]).tools
        seeds.append(TaskSeed(f"task-{seed}-{index:06d}", server.id, language, chain, tool_count))
    return seeds
