"""Hosts that are missing, gone or hung are named: what they say of themselves, and how they meet."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from episodes_world import MODEL, make_episode
from jax.errors import JaxRuntimeError
from two_hosts_world import free_port, of_two_hosts

from astra_jax.base.errors import InputError, UserError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.step import grpo_optimizer, update_step
from astra_jax.rollout.filling import Group
from astra_jax.rollout.vllm.server import Unreachable
from astra_jax.run import hosts
from astra_jax.run.crash_loop import is_fault
from astra_jax.run.hosts import HostLiveness, allgather_exception, heartbeat, wait_with_heartbeat
from astra_jax.run.meeting import MeetingError, meet
from astra_jax.run.optimizers import initial_state
from astra_jax.sft import bench
from astra_jax.sft.config import SFTConfig

# ---------------------------------------------------------------------------------------------------------------- watch


class Told:
    """A roll of three hosts, of which this one is the first: deadlines of 10 and 100 s, by a clock that is told."""

    def __init__(self) -> None:
        self.roll, self.now, self.beats = HostLiveness(0, 3, 10.0, 100.0, 0.0), 0.0, 0

    def hear(
        self, seconds: int, *places: tuple[int, int] | None, states: tuple[str, ...] = ("running",) * 3
    ) -> str | None:
        """So many seconds in which each host says that it is at (marks, pulse), or nothing; the first verdict."""
        for _ in range(seconds):
            self.now += 1
            self.beats += 1
            for host, (place, state) in enumerate(zip(places, states, strict=True)):
                if place is not None:
                    marks, pulse = place
                    said = HostLiveness.beat(self.beats, hosts._Place(marks, marks // 2, pulse and self.beats), state)
                    self.roll.hear(host, said, self.now)
            if (verdict := self.roll.verdict(self.now)) is not None:
                return verdict
        return None


def test_a_host_whose_main_thread_hangs_is_named_by_those_ahead_of_it() -> None:
    told = Told()
    assert told.hear(300, (0, 0), (0, 0), (0, 0)) is None  # weights are being read
    assert told.hear(30, (8, 0), (8, 0), (8, 0)) is None
    assert told.hear(90, (10, 0), (8, 0), (10, 0)) is None
    said = told.hear(30, (10, 0), (8, 0), (10, 0))
    assert said == "host 1 of 3 has been at step 4 for 100 s while others wait at step 5: its main thread hangs"


def test_a_host_that_comes_after_is_not_blamed() -> None:
    told = Told()
    assert told.hear(99, (10, 0), (8, 0), (10, 0)) is None
    assert told.hear(199, (10, 0), (10, 0), (10, 0)) is None
    assert told.hear(99, (12, 0), (10, 0), (10, 0)) is None


def test_rollouts_may_take_long_but_not_hang() -> None:
    """The others wait for the first one's batch: it goes on saying that it is well, or is named."""
    told = Told()
    assert told.hear(1_000, (9, 1), (9, 0), (9, 0)) is None
    frozen = [None, (9, 0), (9, 0)]
    assert told.hear(5, *frozen) is None
    told = Told()
    assert told.hear(5, (9, 1), (9, 0), (9, 0)) is None
    place = hosts._Place(9, 4, 5)

    def beat(seconds: int) -> str | None:
        for _ in range(seconds):
            told.now += 1
            told.beats += 1
            for host, where in enumerate((place, hosts._Place(9, 4), hosts._Place(9, 4))):
                told.roll.hear(host, HostLiveness.beat(told.beats, where, "running"), told.now)
            if (verdict := told.roll.verdict(told.now)) is not None:
                return verdict
        return None

    assert beat(95) is None
    said = beat(10)
    assert said == "host 0 of 3 has not moved for 100 s at step 4, where others wait: its main thread hangs"


def test_a_host_that_has_ended_while_others_go_on_is_named() -> None:
    told = Told()
    assert told.hear(50, (9, 0), (9, 0), (9, 0), states=("running", "running", "ended")) is None
    said = told.hear(200, (11, 0), (11, 0), (9, 0), states=("running", "running", "ended"))
    assert said == "host 2 of 3 has been at step 4 for 100 s while others wait at step 5: has ended there"


def test_all_that_wait_for_one_another_end_some_time() -> None:
    told = Told()
    assert told.hear(200, (9, 0), (9, 0), (9, 0)) is None
    assert "all 3 hosts have waited for one another for 100 s and as long again, at step 4" in str(
        told.hear(10, (9, 0), (9, 0), (9, 0))
    )


def test_an_update_of_hours_is_none_of_them() -> None:
    """Nobody gives signs of its own in it, but the result of each micro-batch takes all hosts a place further."""
    told = Told()
    for micro_batch in range(30):
        places = [(9 + micro_batch, 0)] * 3
        assert told.hear(150, *places) is None
    assert "all 3 hosts have waited for one another" in str(told.hear(100, *places))


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_an_update_tells_of_each_micro_batch(mini_batches: int) -> None:
    """With several mini-batches there is a pass for the old logprobs before."""
    rng = np.random.default_rng(0)
    groups = [Group(i, "e", 0, [make_episode(rng, float(score), 40) for score in (0, 1)]) for i in range(4)]
    rows = {"row_buckets": (64, 74_752), "micro_batch_size": 1, "mini_batches": mini_batches}
    config = GRPOConfig(steps=1, batch_size=4, group_size=2, **rows)
    said, trained = list[int](), list[np.ndarray]()
    state = initial_state(MODEL.init(jax.random.key(0)), grpo_optimizer(config))
    told = {"on_result": lambda: said.append(len(trained)), "on_rows": trained.append}
    update_step(*state, groups, MODEL, config, **told)
    assert len(said) == mini_batches * len(trained) and len(trained) > 4
    assert said[-len(trained) :] == [*range(3, len(trained) + 1), len(trained), len(trained)], "two are under way"


def test_a_host_that_is_gone_or_failed_is_named() -> None:
    assert Told().hear(12, (2, 0), (2, 0), None) == "host 2 of 3 has given no sign of life for 10 s"
    failed = ("running", "failed: InputError: no such file", "running")
    assert Told().hear(1, (2, 0), (2, 0), (2, 0), states=failed) == "host 1 of 3 failed: InputError: no such file"


def test_it_is_watched_until_all_have_ended() -> None:
    told, states = Told(), ("ended", "ended", "failed: ValueError: ended")
    assert told.hear(2, (2, 0), (2, 0), None, states=states) is None and not told.roll.all_ended()
    assert told.hear(2, (2, 0), (2, 0), (2, 0), states=states) is not None and not told.roll.all_ended()
    assert told.hear(2, (2, 0), (2, 0), (2, 0), states=("ended",) * 3) is None and told.roll.all_ended()


async def test_what_is_awaited_shows_that_the_main_thread_is_well(monkeypatch) -> None:
    monkeypatch.setattr(hosts, "_PULSE_SECONDS", 0.01)
    heartbeat(7)
    marks = hosts._place.marks

    async def work() -> str:
        while hosts._place.pulse < 5:
            await asyncio.sleep(0)
        return "done"

    assert await wait_with_heartbeat(work()) == "done" and hosts._place == hosts._Place(marks, 7, 0)
    error = ValueError("it failed")
    assert allgather_exception(error) is error and allgather_exception(None) is None


@pytest.mark.parametrize(
    ("error", "away"),
    [(Unreachable("no server is there"), True), (InputError("no such file"), False), (OSError("it broke"), True)],
)
def test_what_one_host_fails_of_ends_the_others_in_the_same_way(monkeypatch, error: Exception, away: bool) -> None:
    """Whatever starts a run again asks any of them whether that may help."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    said: list[bytes] = []

    def allgather_bytes(value: bytes, most: int) -> list[bytes]:
        said.append(value)
        return [said[0], b""]

    monkeypatch.setattr(hosts, "allgather_bytes", allgather_bytes)
    assert allgather_exception(error) is error
    other = allgather_exception(None)
    assert isinstance(other, UserError) and other.away is away is is_fault(error)
    assert str(other) == f"host 0 of 2 failed: {type(error).__name__}: {error}"


def test_a_bench_on_several_hosts_waits_for_its_data(monkeypatch, tmp_path) -> None:
    """Which the first one writes, and may fail to."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(hosts, "allgather_bytes", lambda value, most: [b"!OSError: the disk is full", value])
    with pytest.raises(UserError, match="host 0 of 2 failed: OSError: the disk is full"):
        bench.run(SFTConfig(), MODEL, lambda: pytest.fail("it trains"), None, tmp_path, None, steps=1)
    assert not list(tmp_path.iterdir())


HUNG = """
import sys, time
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from astra_jax.run.hosts import HostWatch, heartbeat
with HostWatch(3.0, 2.0):
    heartbeat(1)
    if sys.argv[2] == "0":
        heartbeat(2)
    time.sleep(60)
"""


FULL = """
import resource, sys
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from jax.sharding import NamedSharding, PartitionSpec
from astra_jax.mesh import make_mesh
from astra_jax.run.checkpoints import Checkpointer, CheckpointError
from astra_jax.run.hosts import HostWatch, allgather_exception, heartbeat
halves = NamedSharding(make_mesh(fsdp=2), PartitionSpec("fsdp"))
weights = {"w": jax.jit(lambda: jax.random.normal(jax.random.key(0), (512, 512)), out_shardings=halves)()}
checkpointer = Checkpointer(sys.argv[3])
with HostWatch(3.0, 300.0):
    heartbeat(1)
    if sys.argv[2] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
    try:
        checkpointer.save(1, params=weights, state=weights, extra={})
        checkpointer.wait()
    except CheckpointError as error:
        raise allgather_exception(error) from None
"""


DAMAGED = """
import sys
from pathlib import Path
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from astra_jax.mesh import make_mesh
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.hosts import HostWatch, heartbeat
halves = NamedSharding(make_mesh(fsdp=2), PartitionSpec("fsdp"))
def weights(seed):
    return {"w": jax.jit(lambda: jax.random.normal(jax.random.key(seed), (512, 64)), out_shardings=halves)()}
with HostWatch(3.0, 60.0):
    heartbeat(1)
    checkpointer = Checkpointer(sys.argv[3], keep_states=3)
    for step in (1, 2, 3):
        checkpointer.save(step, params=weights(step), state=weights(step + 10), extra={"step": step})
    checkpointer.close()
    if sys.argv[2] == "1":  # what this host wrote, and will read
        for step, kind in ((2, "states"), (3, "params")):
            for file in (Path(sys.argv[3]) / kind / str(step)).rglob("ocdbt.process_1/d/*"):
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    multihost_utils.sync_global_devices("damaged")
    checkpointer = Checkpointer(sys.argv[3], keep_states=3)
    step, params, state, extra = checkpointer.restore_latest((weights(0), weights(0)))
    same = [bool((found["w"] == weights(seed)["w"]).all()) for found, seed in ((params, 1), (state, 11))]
    print("went on from", step, extra, same, file=sys.stderr)
    checkpointer.close()
"""


@pytest.mark.nightly
def test_a_checkpoint_that_one_host_cannot_read_is_left_out_by_all(tmp_path) -> None:
    ended = of_two_hosts(DAMAGED, str(tmp_path))
    said = ("went on from 1 {'step': 1} [True, True]", "step 2 cannot be read: ", "step 3 cannot be read: ")
    assert all(all(one in errors for one in said) and code == 0 for errors, code in ended), ended
    assert "step 3 cannot be read: host 1 of 2 failed: DamagedError: " in ended[0][0]


TOLD = """
import sys
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from astra_jax.run import hosts
hosts._PIECE = 7
for length in (0, 1, 7, 14, 30):
    said = bytes(range(1, 1 + length))
    assert hosts.broadcast_from_host0(said if sys.argv[2] == "0" else b"no") == said, length
"""


@pytest.mark.slow
def test_what_the_first_host_says_comes_in_pieces() -> None:
    """A batch of 2 GiB was too long for one length."""
    ended = of_two_hosts(TOLD)
    assert [code for _, code in ended] == [0, 0], ended


@pytest.mark.slow
def test_two_hosts_of_which_one_hangs_end_with_its_name() -> None:
    ended = of_two_hosts(HUNG)
    said = "error: host 1 of 2 has been at step 1 for 2 s while others wait at step 2: its main thread hangs"
    assert all(said in errors and code == 1 for errors, code in ended), ended


@pytest.mark.nightly
def test_a_disk_that_is_full_on_one_host_ends_both_with_its_name(tmp_path) -> None:
    """It fails in the background, where the other one waits for what it writes."""
    ended = of_two_hosts(FULL, str(tmp_path))
    said = f"CheckpointError: {tmp_path}: a checkpoint could not be written ("
    assert all(said in errors and code for errors, code in ended), ended
    assert f"{said}host 1 of 2: " in ended[0][0], "the other one may go on to where all say what they failed of"


# -------------------------------------------------------------------------------------------------------------- meeting


def met(*calls: Callable[[], None]) -> list[str]:
    """What each of them failed of, or ""; all at once."""

    def one(call: Callable[[], None]) -> str:
        try:
            call()
        except MeetingError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(one, calls))


def coming(
    port: int, count: int, host: int, seconds: float = 20.0, told: list[str] | None = None
) -> Callable[[], None]:
    said = [] if told is None else told
    return lambda: meet(f"localhost:{port}", count, host, seconds, said.append)


def test_hosts_meet_in_any_order_and_the_port_is_free_again() -> None:
    port = free_port()
    assert met(*(coming(port, 4, host) for host in (2, 0, 3, 1))) == [""] * 4
    assert met(*(coming(port, 2, host) for host in (0, 1))) == [""] * 2
    assert met(coming(port, 1, 0)) == [""]


def test_who_does_not_come_is_named_to_all_who_did() -> None:
    port = free_port()
    assert (
        met(*(coming(port, 4, host, 2.0 if host == 0 else 20.0) for host in (0, 2)))
        == ["hosts 1, 3 of 4 did not come within 2 s"] * 2
    )
    assert met(coming(port, 2, 1, 0.5))[0].startswith(
        f"host 0 of 2, at localhost:{port}, did not answer within 0.5 s ("
    )


def test_who_waits_says_so(monkeypatch) -> None:
    monkeypatch.setattr("astra_jax.run.meeting._TELL_SECONDS", 0.1)
    port, told = free_port(), list[str]()
    met(coming(port, 2, 0, 0.5, told))
    assert told and told[0].startswith("waits for host 1 of 2, ")
    met(coming(port, 2, 1, 0.5, told))
    assert told[-1].startswith(f"waits for host 0 of 2, at localhost:{port} (")


def test_hosts_that_do_not_fit_together_are_told(monkeypatch) -> None:
    port = free_port()
    assert (
        met(coming(port, 2, 0), coming(port, 3, 1)) == ["host 1 says that there are 3 hosts, the first one says 2"] * 2
    )
    found = met(coming(port, 3, 0), coming(port, 3, 1), coming(port, 3, 1))
    assert "host 1 is there twice: give each another number" in found
    for address in ("localhost", "localhost:", "localhost:99999", "localhost:port"):
        with pytest.raises(MeetingError, match="write HOST:PORT"):
            meet(address, 2, 0, 1.0, print)


def test_strangers_do_not_count(monkeypatch) -> None:
    """Who connects and says nothing, or something else, or goes again, is none of the hosts."""
    monkeypatch.setattr("astra_jax.run.meeting._HELLO_SECONDS", 0.2)
    port = free_port()

    def stranger(line: bytes) -> Callable[[], None]:
        def call() -> None:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1) as there:
                    there.sendall(line)
                    return

        return call

    lines = (b"GET / HTTP/1.1\r\n\r\n", b"astra-host \xc2\xb2 2\n", b"astra-host 1\n", b"\xff" * 600)
    assert met(coming(port, 2, 0), *map(stranger, lines), coming(port, 2, 1)) == [""] * (len(lines) + 2)
    assert met(coming(port, 2, 0, 1.0), stranger(b"astra-host 1 2\n"))[0] == "host 1 of 2 did not come within 1 s"


def test_what_is_raised_over_a_broken_collective_is_one() -> None:
    """What is closed on the way out fails too, and then that is raised; the watch is to find out who is gone."""

    def closing(error: Exception) -> Exception:
        try:
            try:
                raise error
            finally:
                raise OSError("the checkpoint could not be closed")
        except OSError as raised:
            return raised

    broken = JaxRuntimeError("UNKNOWN: Gloo all-reduce failed")
    assert hosts._of_a_collective(broken) and hosts._of_a_collective(closing(broken))
    assert hosts._of_a_collective(ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"))
    assert not hosts._of_a_collective(closing(ValueError("a bug"))) and not hosts._of_a_collective(None)
