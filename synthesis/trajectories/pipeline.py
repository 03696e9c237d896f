"""The trajectory pipeline: collect → normalise → graph → chains → tasks → interact → reward, into four datasets.

summary = await synthesize(TrajectoriesConfig(), executor=LocalExecutor(teacher, pool), journal=journal,
                           out_dir=out, workdir=work, seed=0)
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import networkx as nx

from synthesis.core.records import Language, McpExecution, Task, ToolChain, ToolServer, Trajectory
from synthesis.core.refusals import InputError
from synthesis.core.stages import Journal, rng_for
from synthesis.pipeline.executors import Executor, Workers
from synthesis.pipeline.track import Summary, Track
from synthesis.servers.collect import ServerDocument, collect, default_sources, fact_documents, source_key
from synthesis.servers.duplicates import normalize_all
from synthesis.servers.registry import read_registries
from synthesis.trajectories import statistics, tool_graph
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.context import TrajectoryContext, open_context
from synthesis.trajectories.interact import AgentRun, interact
from synthesis.trajectories.judge import judge
from synthesis.trajectories.personas import PERSONAS, Persona, read_personas
from synthesis.trajectories.tasks import TaskSeed, augment_task, repeated_tasks, score_task, write_task

_log = logging.getLogger(__name__)


async def synthesize(
    config: TrajectoriesConfig,
    *,
    executor: Executor,
    journal: Journal,
    out_dir: Path,
    workdir: Path,
    seed: int,
) -> Summary:
    """Run the pipeline. A run that was killed goes on from its journal and ends with the same bytes.

    Args:
        executor: where its stages are worked on, with which teacher and sandbox; changes no byte.
        journal: of this config and seed only.
        out_dir: gets `servers`, `chains`, `tasks`, `trajectories` and `graphs`.
        workdir: where MCP servers run.
    """
    make_context = partial(open_context, config=config, workdir=workdir, seed=seed)
    async with executor.workers(make_context) as workers:
        return await _Run(config, workers, journal, out_dir, seed).run()


class _Run:
    """One run; the methods are the stages, in order."""

    def __init__(
        self,
        config: TrajectoriesConfig,
        workers: Workers[TrajectoryContext],
        journal: Journal,
        out_dir: Path,
        seed: int,
    ) -> None:
        self.config, self.out_dir, self.seed = config, out_dir, seed
        self.track = Track(workers, journal, out_dir, config=config, concurrency=config.concurrency, seed=seed)
        self.servers: dict[str, ToolServer] = {}
        self.tools_read = 0
        self.personas: dict[Language, Sequence[str | Persona]] = {**PERSONAS}
        if config.personas:
            self.personas.update(read_personas(config.personas))

    async def run(self) -> Summary:
        config = self.config
        write = self.track.write
        documents = await self.collect()
        self.normalize(documents)
        servers = list(self.servers.values())
        figures = {**statistics.server_statistics(servers), "tools_read": self.tools_read}
        write("servers", ToolServer, servers, figures)
        chains = await self.chains()
        write("chains", ToolChain, chains, statistics.chain_statistics(chains))
        tasks = await self.tasks(chains)
        write("tasks", Task, tasks, statistics.task_statistics(tasks))
        runs = await self.interact(tasks)
        trajectories = (await self.judge(runs))[: config.trajectories]
        figures = statistics.trajectory_statistics(trajectories, self.servers)
        failed = self.track.summary.rejected["judge"].get("judge_failed", 0)
        figures["all_runs"] = statistics.run_statistics(runs, failed)
        write("trajectories", Trajectory, trajectories, figures)
        return self.track.summary

    # -----------------------------------------------------------------------------------------------------------------

    async def collect(self) -> list[ServerDocument]:
        config = self.config
        languages = list(config.languages)
        sources = default_sources(languages) if config.sources is None else list(config.sources)
        collected = await self.track.stage(
            "collect", collect, sources, key=source_key, out=ServerDocument, label="collect tool documents",
            concurrency=config.collect_concurrency,
        )  # fmt: skip
        facts = fact_documents(languages, only=config.fact_servers, emulated=config.emulated_servers)
        registries = read_registries(config.registries, languages=languages)
        if config.registries:
            _log.info("registries: %d of %d servers read", len(registries.documents), registries.read)
        details: dict[str, str] = {}
        for record in registries.rejected:
            details.setdefault(record.reason, f"{record.place}: {record.detail}")
        self.track.reject("registries", registries.reasons(), details)
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
            raise InputError(
                f"no tool server is left of {len(documents)}: {dict(reasons)}; lower min_tools or add some"
            )
        self.track.reject("normalize", reasons, details)

    async def chains(self) -> list[ToolChain]:
        config = self.config
        asked = [(server, repeat) for server in self.servers.values() for repeat in range(config.proposals)]
        answered = await self.track.stage(
            "propose", tool_graph.propose, asked, key=lambda item: f"{item[0].id} {item[1]}", out=tool_graph.Proposals,
            label="propose tasks and chains",
        )  # fmt: skip
        by_server: dict[str, list[list[str]]] = defaultdict(list)
        for proposals in answered:
            by_server[proposals.server_id] += [pair.chain for pair in proposals.pairs]
        candidates: list[ToolChain] = []
        unknown: Counter[str] = Counter()
        for server in self.servers.values():
            names = [tool.name for tool in server.tools]
            graph: nx.DiGraph = tool_graph.transition_graph(names, by_server[server.id])
            unknown += tool_graph.unknown_tools(names, by_server[server.id])
            tool_graph.write_graphml(graph, self.out_dir / "graphs" / f"{server.id}.graphml")
            walks = tool_graph.random_walks(
                graph, config.walks, min_length=config.min_length, max_length=config.max_length,
                acyclic=config.acyclic, rng=rng_for(self.seed, "walks", server.id),
            )  # fmt: skip
            candidates += tool_graph.chains_of(server, walks)
        if unknown:  # left out of the graph; the rest of their proposals counts
            names = [name for name, _ in unknown.most_common(5)]
            self.track.reject("graph", Counter(unknown_tool=unknown.total()), {"unknown_tool": ", ".join(names)})
        verify = partial(tool_graph.verify, servers=self.servers)
        return await self.track.stage(
            "verify", verify, candidates, key=lambda chain: chain.id, out=ToolChain, label="verify chains"
        )

    async def tasks(self, chains: Sequence[ToolChain]) -> list[Task]:
        config = self.config
        seeds = task_seeds(config, list(self.servers.values()), chains, self.seed)
        write = partial(write_task, servers=self.servers)
        written = await self.track.stage("tasks", write, seeds, key=lambda one: one.id, out=Task, label="write tasks")
        chosen = [
            task
            for task in written
            if config.augmentations and rng_for(self.seed, "augmented", task.id).random() < config.augmented
        ]
        vary = partial(augment_task, servers=self.servers, personas=self.personas)
        varied = await self.track.stage("augment", vary, chosen, key=_id_of, out=Task, label="vary tasks")
        every = written + varied
        repeated = repeated_tasks(every, config.near_duplicate)
        unique = [task for task in every if task.id not in repeated]
        example = {"near_duplicate": next(iter(repeated.values()))} if repeated else {}
        self.track.reject("duplicates", Counter(near_duplicate=len(repeated)) if repeated else Counter(), example)
        rate = partial(score_task, servers=self.servers)
        scored = await self.track.stage("score", rate, unique, key=_id_of, out=Task, label="score tasks")
        # In a seeded order, so that a cut takes from all servers, modes and variations alike.
        rng_for(self.seed, "task_order").shuffle(scored)
        return scored[: math.ceil(config.trajectories * (1 + config.surplus / 2))]

    async def interact(self, tasks: Sequence[Task]) -> list[AgentRun]:
        run = partial(interact, servers=self.servers)
        return await self.track.stage("interact", run, tasks, key=_id_of, out=AgentRun, label="run agents")

    async def judge(self, runs: Sequence[AgentRun]) -> list[Trajectory]:
        rate = partial(judge, servers=self.servers)
        return await self.track.stage(
            "judge", rate, runs, key=lambda run: run.task.id, out=Trajectory, label="judge trajectories"
        )


def _id_of(task: Task) -> str:
    return task.id


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
        raise InputError("no chain passed verification; allow more walks or fewer operators")
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
