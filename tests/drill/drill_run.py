"""A small GRPO run on two hosts with servers, sandboxes and a synthesis job beside it, whose parts fail by a plan.

All are programs as users start them: the trainer's hosts by `launch/recipes/until_done.sh`, sandboxes by
`astra sandbox_server`; rollout servers are `drill_server.py` or vLLM, and the synthesis works by itself or on Ray.
Whatever ends is started again, a job's hosts all together, as a cluster does. `drill_checks.py` looks at what is left
on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
from drill_faults import ENDPOINT, HOSTS, MEETING, SANDBOXES, SERVERS, SYNTHESIS, Planned
from drill_parts import ROOT, UNTIL_DONE, Member, Wire
from drill_server import MODEL
from flaky_endpoint import Flaky
from programs_world import as_users
from rollout_world import CAPITAL, DISTRACTORS, POPULATION, make_environment
from secrets_world import planted, variables
from vllm_world import OF_THE_PLUGIN, PLUGIN, PLUGINS, QUIET, VLLM, ZYGOTE, serving_flags

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.run.metrics import read_metrics
from astra_jax.tokenizer import ChatTokenizer
from launch.flags.children import free_ports
from synthesis.core.chatml import QWEN3
from synthesis.core.datasets import write_dataset
from synthesis.core.records import Message, ToolCall, ToolEnvironment

UPDATE_GROUPS, GROUP_SIZE = 2, 3
_FOR_EVER = 1_000_000
_CONFIG = """
from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import EpisodeConfig
from configs.training import GRPORun

EPISODE = EpisodeConfig(
    max_turns=4, max_prompt_tokens=700, max_response_tokens=324, distractors_per_band=1, %(episode)s
)
CONFIG = GRPORun(%(model)s, GRPOConfig(
    steps=%(steps)s, batch_size=%(batch)s, group_size=%(group)s, concurrent_groups=3, learning_rate=1e-3,
    episode=EPISODE, row_buckets=(1024,), micro_batch_size=2, checkpoint_every=3, episodes_every=0, dump_batches=True,
))
"""
DEADLINES = {
    "host_deadline": 6,
    "host_step_deadline": 60,
    "rendezvous_deadline": 60,
    "rollout_stall_seconds": 4,
    "rollout_sync_seconds": 10,
    "rollout_patience_seconds": 30,
    "rollout_timeout_seconds": 60,
}
"""Flags, in seconds."""
OF_VLLM_DEADLINES = DEADLINES | {
    "rollout_stall_seconds": 15,
    "rollout_sync_seconds": 30,
    "rollout_patience_seconds": 240,
    "rollout_timeout_seconds": 120,
}
"""Where the servers are real: they take half a minute to start on a machine that has all of this to do."""
PATIENT = ["--host_deadline=120", "--rendezvous_deadline=300", "--rollout_stall_seconds=120"]
"""When nobody fails any more, a busy machine is not to be taken for one that hangs."""
LONGEST_END = 3 * 60.0
"""Seconds within which hosts end by themselves when one of them has; the longest of those deadlines, thrice."""
RESTART_SECONDS = 1.0
LATENCY = 0.2
"""Seconds to an answer of the synthesis' endpoint, which it asks 16 things at once, and for each record some three."""
SYNTHESIS_SECONDS = 300.0
"""Within which it is done when there are no faults any more."""


@dataclass(frozen=True)
class JobEnd:
    """How a life of the trainer ended.

    Attributes:
        codes: of each host, as `until_done.sh` says them; None: it had to be killed.
        excused: hosts whose end is the drill's own doing: killed, stopped, or told.
        said: by each, in that life.
        full: whether the disk of one was full.
        at: seconds since the beginning.
    """

    codes: list[int | None]
    excused: list[bool]
    told: bool
    full: bool
    said: list[str]
    seconds: float
    at: float


@dataclass
class Drill:
    """What a drill came to.

    Attributes:
        folder: of all of it; `run` is the workdir.
        real: servers are vLLM, and the synthesis is on Ray.
        ends: of each life of the trainer.
        records: of the synthesis.
        steps: that the run has, but for one more that a single host has made of it.
        moved: how that host ended.
        restarts: of each part.
        seconds: of wall time.
    """

    folder: Path
    async_steps: int
    records: int
    real: bool = False
    ends: list[JobEnd] = field(default_factory=list)
    steps: int = 0
    moved: int | None = None
    restarts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def workdir(self) -> Path:
        return self.folder / "run"

    @property
    def config(self) -> list[str]:
        """The flags of `astra grpo` that say what is trained."""
        world = self.folder / "world"
        return [
            f"--config={world / 'config.py'}",
            f"--weights={world / 'serve'}",
            "--mesh=data=-1",
            f"--config.grpo.async_rollouts={str(self.async_steps > 0).lower()}",
            f"--config.grpo.max_off_policy_steps={self.async_steps or 1}",
        ]


def make_world(folder: Path, *, real: bool) -> None:
    """Write `config.py`, the model and its tokenizer (`serve`), and `environments`."""
    folder.mkdir(parents=True)
    # Of random weights real servers draw noise: short turns of it, that are right by chance.
    episode = 'max_turn_tokens=24, reward="drill_reward:even"' if real else ""
    sizes = {"steps": _FOR_EVER, "batch": UPDATE_GROUPS, "group": GROUP_SIZE}
    (folder / "config.py").write_text(_CONFIG % {"episode": episode, "model": MODEL, **sizes})
    environments = [make_environment(f"e{i}", "France" if i % 2 else "Japan") for i in range(4)]
    specs = [tool.spec for tool in (CAPITAL, POPULATION, *DISTRACTORS["high"], *DISTRACTORS["low"])]
    call = Message("assistant", "", tool_calls=[ToolCall("call_0", "capital_of", {"country": "France"})])
    segments = QWEN3.render([Message("user", environments[0].question), call], specs)
    tokenizer = ChatTokenizer.train(["".join(segment.text for segment in segments)] * 8, 600, folder / "serve")
    assert tokenizer.vocab_size <= MODEL.vocab_size
    save_hf(MODEL.init(jax.random.key(0)), MODEL, folder / "serve")
    write_dataset(folder / "environments", ToolEnvironment, environments, card={"split": "train"})


class Topology:
    """The parts of a drill, and the job of the trainer.

    Args:
        fast: programs are compiled as tests have them, and not as users do.
    """

    def __init__(self, drill: Drill, *, fast: bool) -> None:
        self.drill, self.began = drill, time.monotonic()
        self.members: dict[str, Member] = {}
        self.wires: dict[str, Wire] = {}
        self.synthesized = False
        self._fast, self._endpoint = fast, Flaky(0.05, kinds=Flaky.OF_THE_ENDPOINT, seed=1, latency=LATENCY, stall=1.0)
        self._loops: list[asyncio.Task[None]] = []
        self._old: set[str] = set()
        self._flags: list[str] = []
        self._last = False

    def now(self) -> float:
        return time.monotonic() - self.began

    def _member(self, name: str, *command: str) -> Member:
        environment = {} if self._fast else {"XLA_FLAGS": as_users().get("XLA_FLAGS", "")}
        paths = [ROOT, ROOT / "tests" / "worlds", Path(__file__).parent]
        environment |= {"PYTHONPATH": ":".join(map(str, paths)), "ASTRA_CPU": "set"}
        environment |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"} | variables()
        self.members[name] = Member(name, command, self.drill.folder / "logs" / f"{name}.log", environment)
        return self.members[name]

    async def _wire(self, name: str, to: int) -> int:
        self.wires[name] = Wire(to)
        await self.wires[name].start()
        return self.wires[name].port

    def _server(self, name: str, port: int, sync_key: str) -> None:
        folder = self.drill.folder
        if not self.drill.real:
            program, state = str(Path(__file__).with_name("drill_server.py")), str(folder / f"{name}.state")
            self._member(name, sys.executable, program, str(port), str(folder / "world" / "serve"), state)
            return
        serves = [*serving_flags(folder / "world" / "serve", port), "--load-format=dummy", "--enable-scale-out"]
        python = str(VLLM.with_name("python"))  # whose further processes are forks of it
        member = self._member(name, python, str(ZYGOTE), *serves, OF_THE_PLUGIN)
        root = {"ASTRA_SYNC_ROOT": str(folder / "policy"), "ASTRA_SYNC_KEY_FILE": sync_key}
        member.environment |= QUIET | root | {"VLLM_PLUGINS": PLUGINS, "PYTHONPATH": str(PLUGIN)}

    async def open(self) -> None:
        """Start all but the trainer."""
        folder, world = self.drill.folder, self.drill.folder / "world"
        for name in ("logs", "keys", "policy"):
            (folder / name).mkdir()
        keys = {name: planted(folder / "keys", name) for name in ("api", "sync", "sandbox", "metrics")}
        Path(keys["api"]).write_text(variables()["VLLM_API_KEY"] + "\n")  # which vLLM reads
        ports = free_ports(5)
        urls = {}
        for name, port in zip((*SERVERS, *SANDBOXES), ports[:4], strict=True):
            urls[name] = f"http://127.0.0.1:{await self._wire(name, port)}"
            if name in SERVERS:
                self._server(name, port, keys["sync"])
            else:
                serves = [f"--port={port}", "--drain_seconds=2", f"--key_file={keys['sandbox']}"]
                self._member(name, sys.executable, "-m", "launch.sandbox_server", *serves)
        meeting = await self._wire(MEETING, ports[4])
        deadlines = OF_VLLM_DEADLINES if self.drill.real else DEADLINES
        self._flags = [
            *self.drill.config,
            f"--environments={world / 'environments'}",
            f"--workdir={self.drill.workdir}",
            f"--publish_dir={folder / 'policy'}",
            "--publish_dtype=float32",
            f"--rollout_url={','.join(urls[name] for name in SERVERS)}",
            f"--sandbox_url={','.join(urls[name] for name in SANDBOXES)}",
            f"--rollout_key_file={keys['api']}",
            f"--rollout_sync_key_file={keys['sync']}",
            f"--sandbox_key_file={keys['sandbox']}",
            f"--metrics_key_file={keys['metrics']}",
            "--metrics_port=0",
            *(f"--{name}={seconds}" for name, seconds in deadlines.items()),
        ]
        for index, (name, port) in enumerate(zip(HOSTS, (ports[4], meeting), strict=True)):
            meets = [f"--coordinator=127.0.0.1:{port}", "--hosts=2", f"--host_index={index}"]
            self._member(name, UNTIL_DONE, sys.executable, "-m", "launch.grpo", *self._flags, *meets)
        endpoint = await self._endpoint.__aenter__()
        wired = await self._wire(ENDPOINT, int(endpoint.rsplit(":", 1)[1].split("/")[0]))
        (folder / "synthesis").mkdir()
        program = str(ROOT / "tests" / "worlds" / "chaos_run.py")
        told = [str(folder / "synthesis"), f"http://127.0.0.1:{wired}/v1", "record", str(self.drill.records)]
        self._member(SYNTHESIS, sys.executable, program, *told, *(["ray"] if self.drill.real else []))
        for name in (*SERVERS, *SANDBOXES):
            self._loops.append(asyncio.create_task(self._keep(self.members[name])))
        until = time.monotonic() + (300 if self.drill.real else 120)
        for name in (*SERVERS, *SANDBOXES):
            while " on http" not in self.members[name].said():
                assert time.monotonic() < until, f"{name} does not come: {self.members[name].said()}"
                await asyncio.sleep(0.1)
        # Last, as the faults' time begins: on a slow machine it was over before the servers had come.
        self._loops.append(asyncio.create_task(self._keep(self.members[SYNTHESIS])))

    async def close(self) -> None:
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for member in self.members.values():
            member.end()
        for wire in self.wires.values():
            await wire.stop()
        await self._endpoint.__aexit__()
        self.drill.restarts = {name: member.starts - 1 for name, member in self.members.items()}
        self.drill.seconds = self.now()

    async def _keep(self, member: Member) -> None:
        """Start a part again whenever it ends; the synthesis until it is done."""
        while True:
            member.start(*(["old"] if member.name in self._old else []))
            self._old.discard(member.name)
            while member.runs:
                await asyncio.sleep(0.1)
            if member.name == SYNTHESIS and member.code() == 0:
                self.synthesized = True
                return
            await asyncio.sleep(RESTART_SECONDS)

    # ---------------------------------------------------------------------------------------------------- the trainer

    async def live(self, *more: str) -> JobEnd:
        """Start all hosts, and wait for the end of all."""
        hosts, began = [self.members[name] for name in HOSTS], self.now()
        for host in hosts:
            host.start(*more)
        told: float | None = None
        while all(host.runs for host in hosts):
            if told is None and any(host.told for host in hosts):
                told = self.now()
            assert told is None or self.now() - told < LONGEST_END, f"told to stop at {told:.0f} s, and goes on"
            await asyncio.sleep(0.05)
        until = self.now() + LONGEST_END
        # Who is stopped cannot end; a cluster takes its place away.
        while any(host.runs and not host.stopped for host in hosts) and self.now() < until:
            await asyncio.sleep(0.05)
        excused = [host.killed or host.stopped for host in hosts]
        codes = [None if host.stopped else host.code() for host in hosts]
        for host in hosts:
            host.end()
        end = JobEnd(
            codes,
            excused,
            any(host.told for host in hosts),
            any(host.full for host in hosts),
            [host.said() for host in hosts],
            self.now() - began,
            self.now(),
        )
        self.drill.ends.append(end)
        return end

    async def train(self) -> None:
        """Start the job again and again, until it is told to stop for the last time."""
        while not self._last or 75 not in self.drill.ends[-1].codes:
            await self.live(*(PATIENT if self._last else ()))
            await asyncio.sleep(RESTART_SECONDS)

    # --------------------------------------------------------------------------------------------------------- faults

    async def suffer(self, plan: list[Planned]) -> None:
        """Each fault at its time; returns when all are over."""
        lines = self.drill.folder / "faults.jsonl"
        async with asyncio.TaskGroup() as faults:
            for fault in plan:
                await asyncio.sleep(max(0.0, fault.at - self.now()))
                with lines.open("a") as file:
                    file.write(json.dumps(asdict(fault) | {"now": round(self.now(), 2)}) + "\n")
                faults.create_task(self._one(fault))

    async def _one(self, fault: Planned) -> None:
        part, kind = fault.part, fault.kind
        if kind in ("refused", "silent"):
            self.wires[part].set(kind)  # type: ignore[arg-type]
            await asyncio.sleep(fault.seconds)
            self.wires[part].set("whole")
            return
        member = self.members[part]
        if not member.runs:
            return
        life = member.starts
        match kind:
            case "kill" | "old":
                if kind == "old":
                    self._old.add(part)
                member.kill()
            case "kill_program":
                member.kill_program()
            case "term":
                member.tell()
            case "stop" | "hang":
                member.stop()
                await asyncio.sleep(fault.seconds)
                if member.starts == life:
                    member.resume()
            case "mute":
                member.send(signal.SIGUSR1)
                await asyncio.sleep(fault.seconds)
                if member.starts == life:
                    member.send(signal.SIGUSR2)
            case "full_disk":
                member.fill_disk(True)
                await asyncio.sleep(fault.seconds)
                if member.starts == life:
                    member.fill_disk(False)

    async def finish(self, training: asyncio.Task[None], more: int) -> None:
        """No more faults: the run is told to stop, and then goes on to its end, so many updates later."""
        self._last = True
        while not training.done():
            host = self.members[HOSTS[len(self.drill.ends) % 2]]
            # A host that is told before it takes note of it ends, and is started again.
            if host.runs and not host.told and "GRPO" in host.said() + self.members[HOSTS[0]].said():
                host.tell()
            await asyncio.sleep(0.2)
        await training
        done = [row["step"] for row in read_metrics(self.drill.workdir / "metrics")]
        self.drill.steps = max(done, default=0) + more
        await self.live(*PATIENT, f"--config.grpo.steps={self.drill.steps}")
        # On half of the machines, by the same command.
        alone = self._member("alone", UNTIL_DONE, sys.executable, "-m", "launch.grpo", *self._flags)
        alone.start(*PATIENT, f"--config.grpo.steps={self.drill.steps + 1}")
        self.drill.moved = await alone.ended(2 * LONGEST_END)
        async with asyncio.timeout(SYNTHESIS_SECONDS):
            while not self.synthesized:
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def opened(topology: Topology) -> AsyncIterator[Topology]:
    try:
        await topology.open()
        yield topology
    finally:
        await topology.close()


async def drill(
    folder: Path, seed: int, plan: list[Planned], *, records: int, fast: bool, real: bool = False, more: int = 2
) -> Drill:
    """A whole one. Seeds that are odd have rollouts go on across updates.

    Args:
        plan: its faults.
        records: of the synthesis.
        real: with vLLM, and the synthesis on Ray.
        more: updates after the last of them.
    """
    found = Drill(folder, seed % 2, records, real)
    make_world(folder / "world", real=real)
    (folder / "plan.json").write_text(json.dumps({"seed": seed, "faults": [asdict(fault) for fault in plan]}, indent=1))
    async with opened(Topology(found, fast=fast)) as topology:
        topology.began = time.monotonic()
        training = asyncio.create_task(topology.train())
        await topology.suffer(plan)
        await topology.finish(training, more)
    return found
