"""Sampling of the subject of each original task: a server and a chain, which is then verified.

With a model as teacher, verification is the largest cost, and few of the possible chains are ever used. So only sampled
chains are verified, each once. If a chain fails, its task samples another.
"""

from __future__ import annotations

import math
import random
import re
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import get_args

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.progress import log_above_progress
from synthesis.core.records import Behaviour, Language, McpExecution, ToolChain, ToolServer
from synthesis.core.stages import rng_for
from synthesis.pipeline.languages import PACKAGED_LANGUAGES
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.groups import is_group
from synthesis.trajectories.tasks import TaskSeed
from synthesis.trajectories.todo_fixture import is_todo_server, todo_server_id
from synthesis.trajectories.tool_graph import chain_id

Verify = Callable[[Sequence[ToolChain]], Awaitable[Sequence[ToolChain]]]
"""Return the chains that pass, with their verdicts."""


def servers_without_tasks(config: TrajectoriesConfig, servers: Sequence[ToolServer]) -> dict[str, tuple[str, str]]:
    """Return the servers that no task can be about, as {id: (reason, detail)}; the teacher need not be asked of them.

    The reasons are `other_language` and `share_of_tasks_is_0` (see `mcp_share`).
    """
    languages = {name for name, weight in config.languages.items() if weight}
    spoken = {server.language for server in servers}
    if any(name not in PACKAGED_LANGUAGES and name not in spoken for name in languages):
        languages.add("en")  # see `TaskSampler`
    found: dict[str, tuple[str, str]] = {}
    wanted = [server for server in servers if server.language in languages]
    for server in servers:
        if server.language not in languages:
            what = f"{server.id} is documented in {server.language}; give {server.language} a weight in languages"
            found[server.id] = ("other_language", what)
    share = config.running_share
    if share not in (0, 1) or config.several_servers:  # a group takes servers of both kinds
        return found
    for language in languages:
        of_language = [server for server in wanted if server.language == language]
        used = [one for one in of_language if isinstance(one.execution, McpExecution) == bool(share)]
        for server in of_language if used else ():
            if server not in used:
                found[server.id] = ("share_of_tasks_is_0", f"{server.id}: mcp_share is {share:g}")
    return found


class TaskSampler:
    """Sampler of task subjects. The samples of a task depend on the seed and its number only: more tasks change none.

    Args:
        chains: of the servers, not verified; a server without chains is never sampled.

    Raises:
        InputError: no server has a chain in a wanted language.
    """

    def __init__(
        self, config: TrajectoriesConfig, servers: Sequence[ToolServer], chains: Sequence[ToolChain], seed: int
    ) -> None:
        self._config, self._seed = config, seed
        self._chains: dict[str, dict[int, list[ToolChain]]] = defaultdict(lambda: defaultdict(list))
        for one in chains:
            self._chains[one.server_id][len(one.tools)].append(one)
        self._todo_servers = {server.id for server in servers if is_todo_server(server.id)}
        self._groups: dict[Language, list[ToolServer]] = defaultdict(list)
        self._pools: dict[tuple[Language, bool], list[ToolServer]] = defaultdict(list)
        for server in servers:
            if is_group(server):
                self._groups[server.language].append(server)
            elif server.id in self._chains:
                self._pools[server.language, isinstance(server.execution, McpExecution)].append(server)
        known = {re.sub(r"\.\d+$", "", one.id) for one in servers} | {one.id for one in servers}
        if unknown := sorted(config.server_weights.keys() - known):
            log_above_progress(
                f"--config.server_weights names {', '.join(unknown):.300}: no tasks can be about a server of that id; "
                f"there are {', '.join(sorted(one.id for one in servers if not is_group(one))):.1000}"
            )
        for language in config.languages:
            if language not in PACKAGED_LANGUAGES and not self._pools.keys() & {(language, False), (language, True)}:
                # Few servers are documented in it; its people use those that are in English.
                for mcp in (False, True):
                    if ("en", mcp) in self._pools:
                        self._pools[language, mcp] = self._pools["en", mcp]
                        self._groups[language] = self._groups["en"]
        self._languages: list[Language] = [
            name for name in config.languages if (name, False) in self._pools or (name, True) in self._pools
        ]
        if not any(config.languages[name] for name in self._languages):
            raise InputError("no server has a chain that a task could be about; allow more walks, or shorter chains")
        needs: dict[Behaviour, bool] = {
            "confirmation": bool(self._todo_servers),
            "irrelevant_tools": self._has_others(),
        }
        self.impossible = {name for name, has in needs.items() if not has and config.behaviours.get(name)}
        """Behaviours that no server is there for; their tasks are ordinary ones."""

    def candidates(self, index: int) -> Iterator[TaskSeed]:
        """Yield the subject of task `index`, then a replacement each time that the chain of the previous one fails.

        The server is sampled by weight, then the length, then a chain of that length. A server without chains left is
        replaced. The behaviour is sampled first, with a generator of its own, then whether the task is over several
        servers. So the other tasks stay the same for all shares.
        """
        config = self._config
        if behaviour := self._behaviour(index):
            yield from self._of_behaviour(index, behaviour)
            return
        if rng_for(self._seed, "several", index).random() < config.several_servers:
            yield from self._of_group(index)
            return
        rng = rng_for(self._seed, "task_seed", index)
        language = rng.choices(self._languages, [config.languages[name] for name in self._languages])[0]
        pool = self._pool(language, rng)
        id = f"task-{self._seed}-{index:06d}"
        alone: bool | None = None
        while pool:
            server = self._drawn(pool, rng)
            if alone is None:
                alone = rng.random() < config.server_tasks
            if alone:
                count = min(rng.choice(config.tool_counts), len(server.tools))
                yield TaskSeed(id, server.id, language, [], count)
                return
            for chain in self._chains_of(server, rng):
                yield TaskSeed(id, server.id, language, chain, 0)
            pool.remove(server)

    def _of_group(self, index: int) -> Iterator[TaskSeed]:
        """Yield the subjects of a task over several servers: a group, and a chain that crosses it or none."""
        config, rng = self._config, rng_for(self._seed, "several_seed", index)
        languages = [name for name in self._languages if self._groups[name] and config.languages[name]]
        if not languages:
            return
        language = rng.choices(languages, [config.languages[name] for name in languages])[0]
        id, pool = f"task-{self._seed}-{index:06d}", list(self._groups[language])
        alone = rng.random() < config.server_tasks
        while pool and not alone:
            group = rng.choice(pool)
            for chain in self._chains_of(group, rng):
                yield TaskSeed(id, group.id, language, chain, 0)
            pool.remove(group)
        # Where no chain crosses, two servers are asked for what does not depend on each other.
        group = rng.choice(self._groups[language])
        yield TaskSeed(id, group.id, language, [], min(max(2, rng.choice(config.tool_counts)), len(group.tools)))

    def _pool(self, language: Language, rng: random.Random) -> list[ToolServer]:
        """Return the servers that a task in a language may be about: running servers or others, by their shares."""
        number, share = rng.random(), self._config.running_share
        documents, running = (self._pools.get((language, runs), []) for runs in (False, True))
        if share is None:
            return [*documents, *running]
        return list((running or documents) if number < share else (documents or running))

    def _drawn(self, pool: Sequence[ToolServer], rng: random.Random) -> ToolServer:
        return rng.choices(pool, [self._config.weight_of(one.id) for one in pool])[0]

    def _chains_of(self, server: ToolServer, rng: random.Random) -> Iterator[list[str]]:
        lengths = {length: list(chains) for length, chains in self._chains[server.id].items()}
        while lengths:
            left = lengths[length := rng.choice(sorted(lengths))]
            yield left.pop(rng.randrange(len(left))).tools
            if not left:
                del lengths[length]

    def _behaviour(self, index: int) -> Behaviour | None:
        drawn = rng_for(self._seed, "conduct", index).random()
        for behaviour in get_args(Behaviour):
            drawn -= self._config.behaviours.get(behaviour, 0.0)
            if drawn < 0:
                found: Behaviour = behaviour
                return None if found in self.impossible else found
        return None

    def _has_others(self) -> bool:
        """Return whether some task can offer the tools of another server."""
        return any(self._others(one, language) for (language, _), pool in self._pools.items() for one in pool)

    def _of_behaviour(self, index: int, behaviour: Behaviour) -> Iterator[TaskSeed]:
        """Yield the subjects of a task that teaches something beside calling tools.

        A task about a write uses the to-do server. A task with irrelevant tools uses one server, and shows the agent
        another server's tools. Any other task uses a chain.
        """
        config, rng = self._config, rng_for(self._seed, "conduct_seed", index)
        language = rng.choices(self._languages, [config.languages[name] for name in self._languages])[0]
        id = f"task-{self._seed}-{index:06d}"
        if behaviour == "confirmation":
            if (todo_server := todo_server_id(language)) in self._todo_servers:
                yield TaskSeed(id, todo_server, language, [], 0, behaviour)
            return
        pool = self._pool(language, rng)
        while pool:
            server = self._drawn(pool, rng)
            others = [one for one in self._others(server, language) if behaviour == "irrelevant_tools"]
            if behaviour == "irrelevant_tools" and not others:
                return
            offered = self._drawn(others, rng).id if others else msgspec.UNSET
            for chain in self._chains_of(server, rng):
                yield TaskSeed(id, server.id, language, chain, 0, behaviour, offered)
            pool.remove(server)

    def _others(self, server: ToolServer, language: Language) -> list[ToolServer]:
        """Return the servers of the language that share no tool name with `server`."""
        names = {tool.name for tool in server.tools}
        every = [*self._pools.get((language, False), ()), *self._pools.get((language, True), ())]
        return [one for one in every if one.id != server.id and names.isdisjoint(tool.name for tool in one.tools)]


async def sample_tasks(
    sampler: TaskSampler, count: int, chains: Mapping[str, ToolChain], verify: Verify
) -> tuple[list[TaskSeed], list[ToolChain]]:
    """Return the subjects of `count` tasks, and the chains that passed.

    It works in rounds. Each round verifies the chains of all waiting tasks at once, and tasks whose chain failed sample
    another. So each chain is verified once, and nothing depends on the order in which verdicts arrive.

    Args:
        chains: all of them, by id.
        verify: a stage.

    Returns:
        Seeds in the order of their numbers, without the tasks for which no chain passed; and the chains that passed, in
        the order of `chains`, whether used or not.

    Raises:
        InputError: no chain passed.
    """
    waiting: Sequence[int] = range(count)
    found: dict[int, TaskSeed] = {}
    passed: dict[str, ToolChain] = {}
    failed: set[str] = set()

    def chain_of(one: TaskSeed) -> str:
        return chain_id(one.server_id, one.chain) if one.chain else ""

    while waiting:
        asked: set[str] = set()
        left = array("Q")
        for index in waiting:
            # Sampled from the start in each round: a suspended generator takes more memory than its seed.
            one = next((one for one in sampler.candidates(index) if chain_of(one) not in failed), None)
            if one is None:
                continue
            if not one.chain or chain_of(one) in passed:
                found[index] = one
            else:
                asked.add(chain_of(one))
                left.append(index)
        if asked:
            passed |= {one.id: one for one in await verify([one for id, one in chains.items() if id in asked])}
            failed |= asked - passed.keys()
        waiting = left
    if count and not found:
        raise InputError("no chain passed verification; allow more walks or fewer operators")
    return [found[index] for index in sorted(found)], [passed[id] for id in chains if id in passed]


def wanted_tasks(config: TrajectoriesConfig) -> int:
    """Return the number of original tasks to write, so that enough trajectories are left after the filters."""
    varied = config.augmented * max(0.0, 1 - sum(config.behaviours.values()))
    return math.ceil(config.trajectories * (1 + config.oversample_ratio) / (1 + varied))
