"""The trajectory pipeline, into four datasets.

Stages: collect → propose → verify → tasks → augment → score → interact → user → judge.

summary = await synthesize(TrajectoriesConfig(), executor=Executor(teacher, pool), journal=journal,
                           out_dir=out, workdir=work, seed=0)
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import networkx as nx
import numpy as np

from astra_jax.base.errors import InputError
from astra_jax.base.progress import log_above_progress
from synthesis.core.records import Language, Task, ToolChain, ToolServer, Trajectory
from synthesis.core.stages import Journal, rng_for
from synthesis.core.stored import Concat, Records
from synthesis.pipeline.executors import Executor, check_spoken
from synthesis.pipeline.languages import PACKAGED_LANGUAGES
from synthesis.pipeline.pipeline_run import PipelineRun, Summary, digests_of_files
from synthesis.pipeline.preview import Preview
from synthesis.pipeline.stage_keys import StageSpec, digest_of
from synthesis.servers.collect import ServerDocument, collect, default_sources, fact_documents, source_key
from synthesis.servers.duplicates import check_allowed, normalize_all
from synthesis.servers.normalize import raw_name, served
from synthesis.servers.registry import read_registries
from synthesis.servers.tool_sources import read_tools
from synthesis.trajectories import compat, statistics, tool_graph
from synthesis.trajectories.behaviours import score_any, write_any
from synthesis.trajectories.config import DEMO, TrajectoriesConfig
from synthesis.trajectories.context import TrajectoryContext, open_context
from synthesis.trajectories.groups import crosses, grouped
from synthesis.trajectories.interact import interact
from synthesis.trajectories.judge import judge
from synthesis.trajectories.personas import PERSONAS, Persona, read_personas
from synthesis.trajectories.runs import AgentRun
from synthesis.trajectories.task_sampler import TaskSampler, sample_tasks, servers_without_tasks, wanted_tasks
from synthesis.trajectories.tasks import TaskSeed, augment_task, repeated_tasks
from synthesis.trajectories.todo_fixture import is_todo_server, todo_documents
from synthesis.trajectories.users import judge_user

_log = logging.getLogger(__name__)

_NAMED = 8
"""Servers that are named in a line of the sources."""
_ASKED = ("attempts", "partition", "informative_joins")
"""Settings of every request for a chain or a task."""


def _id_of(record: ToolChain | Task | TaskSeed | Trajectory) -> str:
    return record.id


def _task_of(run: AgentRun) -> str:
    return run.task.id


def _proposal_of(asked: tuple[ToolServer, int]) -> str:
    server, repeat = asked
    return f"{server.id} {repeat}"


COLLECT = StageSpec("collect", ServerDocument, source_key, label="collect tool documents", stops_run=False)
PROPOSE = StageSpec(
    "propose", tool_graph.Proposals, _proposal_of, ("pairs", "attempts", "partition"), label="propose tasks and chains"
)
"""Its requests have no partition, but the journals of earlier versions name it."""
VERIFY = StageSpec("verify", ToolChain, _id_of, ("operators", "votes", *_ASKED), _id_of, "verify chains")
TASKS = StageSpec("tasks", Task, _id_of, _ASKED, _id_of, "write tasks")
TALKS = StageSpec("tasks", Task, _id_of, ("user_turns", "policies", *_ASKED), _id_of, "write conversations")
AUGMENT = StageSpec("augment", Task, _id_of, ("augmentations", *_ASKED), _id_of, "vary tasks")
SCORE = StageSpec("score", Task, _id_of, ("thresholds", "attempts"), _id_of, "score tasks")
INTERACT = StageSpec(
    "interact", AgentRun, _id_of, ("failures", "max_turns", "max_tokens", "system_prompt", "attempts"), _task_of,
    "run agents", undeclared=compat.UNDECLARED["interact"],
)  # fmt: skip
USER = StageSpec("user", AgentRun, _task_of, ("attempts",), _task_of, "judge users")
JUDGE = StageSpec(
    "judge", Trajectory, _task_of, ("reward_threshold", "final_answer_threshold", "attempts", "license"), _id_of,
    "judge trajectories", undeclared=compat.UNDECLARED["judge"],
)  # fmt: skip
STAGES = (COLLECT, PROPOSE, VERIFY, TASKS, TALKS, AUGMENT, SCORE, INTERACT, USER, JUDGE)
"""A new stage also needs an entry in `forecast.expected` and in `launch/viewer/cards.py`."""


async def synthesize(
    config: TrajectoriesConfig,
    *,
    executor: Executor,
    journal: Journal,
    out_dir: Path,
    workdir: Path,
    seed: int,
    replace: bool = False,
    preview: Preview | None = None,
) -> Summary:
    """Run the pipeline. A run that was killed resumes from its journal and ends with the same bytes.

    A finished run resumes too if more trajectories are wanted; the existing ones stay.

    Args:
        executor: teacher, sandbox and embedder of the stages; where sandbox work runs changes no byte.
        journal: of any configuration and seed: what is in it is found by what it was made of.
        out_dir: gets `servers`, `chains`, `tasks`, `trajectories` and `graphs`.
        workdir: where MCP servers run.
        replace: overwrite datasets in `out_dir` that have another seed, setting or teacher.
        preview: see `PipelineRun`.

    Raises:
        InputError: `out_dir` has such datasets and `replace` is False; the teacher does not speak a wanted language; or
            no server or chain is left.
    """
    check_spoken(config.languages, by_rules=executor.by_rules)
    async with open_context(executor, config=config, workdir=workdir, seed=seed) as context:
        return await _Run(config, executor, context, journal, out_dir, seed, preview).run(replace)


class _Run:
    """One run; the methods are its stages, in order."""

    def __init__(
        self,
        config: TrajectoriesConfig,
        executor: Executor,
        context: TrajectoryContext,
        journal: Journal,
        out_dir: Path,
        seed: int,
        preview: Preview | None,
    ) -> None:
        self.config, self.out_dir, self.seed = config, out_dir, seed
        self.by_rules = executor.by_rules
        if not (self.by_rules or config.tools or config.sources or config.fact_servers):
            raise InputError(
                "tools: none are given for the teacher's model. Give yours, --config.tools='[\"mcp.json\"]', or the "
                f"packaged servers, --config.tools='[\"{DEMO}\"]'"
            )
        self.tools = read_tools(config.own_tools)
        named = [one for one in config.own_tools if one not in self.tools.digests]
        files = digests_of_files([*named, *([config.personas] if config.personas else [])]) | self.tools.digests
        self.pipeline = PipelineRun(
            executor, context, journal, out_dir, config=config, concurrency=config.concurrency, seed=seed,
            stages=STAGES, files=files, preview=preview,
        )  # fmt: skip
        self.personas_digest = files.get(config.personas, "")
        self.servers: dict[str, ToolServer] = {}
        self.built_in: set[str] = set()
        """Ids of the packaged servers."""
        self._digests: dict[str, str] = {}
        self.tools_read = 0
        self.tools_changed: Counter[str] = Counter()
        self.personas: dict[Language, Sequence[str | Persona]] = {**PERSONAS}
        if config.personas:
            self.personas.update(read_personas(config.personas))

    async def run(self, replace: bool) -> Summary:
        config = self.config
        self.pipeline.claim("trajectories", replace=replace, read=compat.settings_of_card)
        write = self.pipeline.write
        documents = await self.collect()
        self.normalize(documents)
        servers = list(self.servers.values())
        numbers = {
            **statistics.server_statistics(servers), "tools_read": self.tools_read,
            "tools_changed": dict(sorted(self.tools_changed.items())),
        }  # fmt: skip
        write("servers", ToolServer, servers, numbers)
        candidates = await self.chains()
        seeds, chains = await self.draw(candidates)
        write("chains", ToolChain, chains, statistics.chain_statistics(chains, len(candidates), seeds))
        tasks = await self.tasks(seeds)
        write("tasks", Task, tasks, statistics.task_statistics(tasks, self.servers))
        runs = await self.judge_users(await self.interact(tasks))
        trajectories = (await self.judge(runs))[: config.trajectories]
        numbers = statistics.trajectory_statistics(trajectories, self.servers)
        failed = self.pipeline.summary.rejected["judge"].get("judge_failed", 0)
        numbers["all_runs"] = statistics.run_statistics(runs, failed)
        numbers["rejected_for"] = statistics.whose_faults(self.pipeline.summary.rejected)
        write("trajectories", Trajectory, trajectories, numbers)
        return self.pipeline.summary

    # -----------------------------------------------------------------------------------------------------------------

    async def collect(self) -> list[ServerDocument]:
        config = self.config
        languages = [language for language, weight in config.languages.items() if weight]
        if any(language not in PACKAGED_LANGUAGES for language in languages) and "en" not in languages:
            languages.append("en")  # see `task_seeds`
        demo = config.uses_demo(by_rules=self.by_rules)
        packaged = default_sources(languages) if demo and (config.sources is None or DEMO in config.tools) else []
        sources = [*packaged, *(config.sources or ()), *self.tools.servers]
        if twice := [id for id, number in Counter(one.id for one in sources).items() if number > 1]:
            raise InputError(f"tools: two servers have the id {twice[0]!r}; leave one of them out, or rename it")
        stored = await self.pipeline.stage(
            COLLECT, collect, sources, concurrency=config.collect_concurrency,
            bound=lambda source: self.tools.own.get(source.id, ""),
        )  # fmt: skip
        rejected = self.tools.rejected
        collected = [msgspec.structs.replace(one, rejected=rejected.get(one.id, one.rejected)) for one in stored]
        left_out = [one for document in collected for one in document.left_out]
        examples = {one.reason: f"{one.name}: {one.detail}" for one in left_out}
        if left_out:
            self.pipeline.reject("collect", Counter(one.reason for one in left_out), examples)
        wanted = () if config.fact_servers is None and not demo else config.fact_servers
        facts = fact_documents(languages, only=wanted, emulated=config.emulated_servers) if wanted != () else []
        registries = read_registries(self.tools.documents, languages=languages)
        if self.tools.documents:
            _log.info("tools: %d of %d documents read", len(registries.documents), registries.read)
        details: dict[str, str] = {}
        for record in registries.rejected:
            details.setdefault(record.reason, f"{record.place}: {record.detail}")
        self.pipeline.reject("tools", registries.reasons(), details)
        # What runs comes first: of servers that are there twice, the first is kept.
        todo_servers = todo_documents(languages) if config.uses_todo_server(by_rules=self.by_rules) else []
        self.built_in = {one.id for one in packaged} | {one.id for one in [*facts, *todo_servers]}
        return [*collected, *facts, *registries.documents, *todo_servers]

    def normalize(self, documents: Sequence[ServerDocument]) -> None:
        check_allowed(documents, self.config.allowed_tools)
        # Functions and operations were named by the user, which permits their calls.
        own = {one.id: [raw_name(tool) for tool in one.tools] for one in documents if one.id in self.tools.own}
        reasons: Counter[str] = Counter()
        details: dict[str, str] = {}
        examples: dict[str, str] = {}
        config = self.config
        for done in normalize_all(
            documents, min_tools=config.min_tools, max_tools=config.max_tools, max_tokens=config.max_tokens,
            read_only=config.read_only, allowed_tools={**config.allowed_tools, **own},
            similarity=config.server_similarity,
        ):  # fmt: skip
            reasons += done.reasons()
            self.tools_read += done.read
            for tool in done.rejected:
                details.setdefault(tool.reason, f"{done.server_id}.{tool.name}: {tool.detail}")
            self.tools_changed.update(tool.change for tool in done.changed)
            for one in done.changed:
                if one.change not in examples:
                    examples[one.change] = f"{done.server_id}.{one.name}: {one.detail}"
            self.servers |= {server.id: server for server in done.servers}
        self.pipeline.summary.details["tools_changed"] = examples
        for id, (reason, detail) in servers_without_tasks(config, self._askable()).items():
            reasons[reason] += len(self.servers.pop(id).tools)
            details.setdefault(reason, detail)
        self.pipeline.reject("normalize", reasons, details)
        if not self._askable():
            rejected, known = self.pipeline.summary.rejected, self.pipeline.summary.details
            why = [
                f"{count:,} {reason} ({known[stage][reason]:.200})"
                for stage in ("collect", "tools", "normalize")
                for reason, count in rejected.get(stage, {}).items()
            ]
            raise InputError(f"no tool server is left of {len(documents):,}: {'; '.join(why) or 'none has tools'}")
        self.say_sources()
        self.pipeline.note_sources(offer for server in self.servers.values() if (offer := served(server)))
        self.pipeline.licenses |= {server.license or self.config.license for server in self.servers.values()}
        if config.several_servers:
            alone = self._askable()
            groups = grouped(alone, config, self.seed)
            if not groups:
                raise InputError(
                    f"several_servers is {config.several_servers}, and no two of {len(alone)} servers are of one "
                    f"language and have {config.max_tools} tools at most; add some, or set it to 0"
                )
            self.servers |= {group.id: group for group in groups}

    def _askable(self) -> list[ToolServer]:
        """Return the servers without the to-do server, about which only tasks of their own are written."""
        return [server for server in self.servers.values() if not is_todo_server(server.id)]

    def say_sources(self) -> None:
        """Print the servers that tasks can be about, before the teacher is asked."""
        own = [one for one in self.servers.values() if re.sub(r"\.\d+$", "", one.id) not in self.built_in]
        packaged = [one for one in self.servers.values() if one not in own]
        for name, servers in (("own servers", own), ("built-in servers", packaged)):
            tools = [f"{one.id} ({len(one.tools)})" for one in servers[:_NAMED]]
            more = [f"{len(servers) - _NAMED:,} more"] if len(servers) > _NAMED else []
            count = f"{len(servers):,} with {sum(len(one.tools) for one in servers):,} tools: "
            log_above_progress(f"{name}: {count + ', '.join([*tools, *more]) if servers else 'none'}")
        spoken = {one.language for one in self.servers.values()}
        lacking = [name for name, weight in self.config.languages.items() if weight and name not in spoken]
        if silent := [name for name in lacking if name in PACKAGED_LANGUAGES]:
            log_above_progress(f"languages: no server is documented in {', '.join(silent)}; no task is in it")

    async def chains(self) -> list[ToolChain]:
        """Return all chains that can be sampled; none of them is verified."""
        config = self.config
        servers = self._askable()
        asked = [(server, repeat) for server in servers for repeat in range(config.proposals)]
        answered = await self.pipeline.stage(PROPOSE, tool_graph.propose, asked)
        by_server: dict[str, list[list[str]]] = defaultdict(list)
        for proposals in answered:
            by_server[proposals.server_id] += [pair.chain for pair in proposals.pairs]
        candidates: list[ToolChain] = []
        unknown: Counter[str] = Counter()
        for server in servers:
            names = [tool.name for tool in server.tools]
            graph: nx.DiGraph = tool_graph.transition_graph(names, by_server[server.id])
            unknown += tool_graph.unknown_tools(names, by_server[server.id])
            tool_graph.write_graphml(graph, self.out_dir / "graphs" / f"{server.id}.graphml")
            walks = tool_graph.random_walks(
                graph, config.walks, min_length=config.min_length, max_length=config.max_length,
                acyclic=config.acyclic, rng=rng_for(self.seed, "walks", server.id),
            )  # fmt: skip
            walks = {walk: weight for walk, weight in walks.items() if crosses(server, walk)}
            candidates += tool_graph.chains_of(server, walks)
        if unknown:  # left out of the graph; the rest of their proposals counts
            names = [name for name, _ in unknown.most_common(5)]
            self.pipeline.reject("graph", Counter(unknown_tool=unknown.total()), {"unknown_tool": ", ".join(names)})
        return candidates

    async def draw(self, candidates: Sequence[ToolChain]) -> tuple[list[TaskSeed], list[ToolChain]]:
        """Return the subjects of the original tasks, and the chains verified for them."""
        config = self.config
        check = partial(tool_graph.verify, servers=self.servers)

        async def verify(chains: Sequence[ToolChain]) -> Sequence[ToolChain]:
            return await self.pipeline.stage(VERIFY, check, chains, bound=lambda chain: self.digest(chain.server_id))

        sampler = TaskSampler(config, list(self.servers.values()), candidates, self.seed)
        for name in sorted(sampler.impossible):
            needs = "the built-in to-do server" if name == "confirmation" else "a second server"
            log_above_progress(f"behaviours: {name} needs {needs}; ordinary tasks take its share")
        wanted = wanted_tasks(config)
        seeds, chains = await sample_tasks(sampler, wanted, {chain.id: chain for chain in candidates}, verify)
        if len(seeds) < wanted:
            self.pipeline.reject("draw", Counter(no_chain=wanted - len(seeds)), {"no_chain": "every chain failed"})
        return seeds, chains

    async def tasks(self, seeds: Sequence[TaskSeed]) -> Records[Task]:
        config = self.config
        write = partial(write_any, servers=self.servers, personas=self.personas)
        plain = [one for one in seeds if not one.behaviour]
        alone = await self.pipeline.stage(TASKS, write, plain, bound=lambda one: self.digest(one.server_id))
        talks = await self.pipeline.stage(
            TALKS, write, [one for one in seeds if one.behaviour],
            bound=lambda one: self.digest(one.server_id) + self.personas_digest,
        )  # fmt: skip
        written = _by_number(alone, talks)

        def drawn(task: Task) -> bool:
            return rng_for(self.seed, "augmented", task.id).random() < config.augmented

        chosen = written.filter(lambda task: not task.dialogue and config.augmentations and drawn(task))
        vary = partial(augment_task, servers=self.servers, personas=self.personas)
        varied = await self.pipeline.stage(
            AUGMENT, vary, chosen, bound=lambda task: self.digest(task.server_id) + self.personas_digest
        )
        # Each variation follows its original, so that more tasks extend the order of fewer. Servers, modes and
        # variations were sampled for each task alone, so a cut takes from all alike.
        every = _by_number(written, varied)
        repeated = repeated_tasks(every, config.near_duplicate)
        unique = every.filter(lambda task: task.id not in repeated)
        example = {"near_duplicate": next(iter(repeated.values()))} if repeated else {}
        self.pipeline.reject("duplicates", Counter(near_duplicate=len(repeated)) if repeated else Counter(), example)
        rate = partial(score_any, servers=self.servers)
        scored = await self.pipeline.stage(SCORE, rate, unique, bound=lambda task: self.digest(task.server_id))
        return scored[: math.ceil(config.trajectories * (1 + config.oversample_ratio / 2))]

    def digest(self, server_id: str) -> str:
        """Return the digest of a server's record and of a group's members; it is part of the key of their stages."""
        if server_id not in self._digests:
            server = self.servers[server_id]
            others = [self.servers[id] for id in server.servers if id != server_id]
            self._digests[server_id] = digest_of([server, *others] if others else server)
        return self._digests[server_id]

    async def interact(self, tasks: Records[Task]) -> Records[AgentRun]:
        run = partial(interact, servers=self.servers)
        return await self.pipeline.stage(INTERACT, run, tasks, bound=lambda task: self.digest(task.server_id))

    async def judge_users(self, runs: Records[AgentRun]) -> Records[AgentRun]:
        """Return the runs whose simulated user, if there is one, kept to its goals."""
        check = partial(judge_user, servers=self.servers)
        with_user = runs.filter(lambda run: run.ended)
        kept = await self.pipeline.stage(USER, check, with_user, bound=lambda run: self.digest(run.task.server_id))
        ids = {run.task.id for run in kept}
        return runs.filter(lambda run: not run.ended or run.task.id in ids)

    async def judge(self, runs: Records[AgentRun]) -> Records[Trajectory]:
        rate = partial(judge, servers=self.servers)
        return await self.pipeline.stage(JUDGE, rate, runs, bound=lambda run: self.digest(run.task.server_id))


def _by_number(*parts: Records[Task]) -> Records[Task]:
    """Yield tasks in the order of the numbers in their ids; equal numbers in the order of the parts."""
    every = Concat(parts)
    numbers = np.fromiter((int(task.family.rpartition("-")[2]) for task in every), np.int64, len(every))
    return every.select(map(int, np.argsort(numbers, kind="stable")))
