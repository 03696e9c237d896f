"""Every attack is stopped, and leaves the pool healthy: the next call of the same environment is right, at once."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import pytest_asyncio

from astra_jax.base.nesting import MOST_NESTING
from sandbox import CallResult, Limits, Outcome, SandboxConfig, SandboxPool
from sandbox.outcomes import SlotReply, decode
from sandbox.protocol import CallVerdict, Report

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = Path(__file__).with_name("hostile_tools.py").read_text(encoding="utf-8")
LIMITS = Limits(cpu_seconds=1, wall_seconds=20.0, memory_bytes=256 << 20)

CONTAINED = {Outcome.OK, Outcome.TOOL_ERROR}
"""The attack ran to its end and reached nothing, or was refused with an exception."""

ATTACKS: dict[str, set[Outcome]] = {
    "fork_bomb": CONTAINED,
    "run_program": {Outcome.TOOL_ERROR},
    "leave_a_daemon": {Outcome.TOOL_ERROR},
    "thread_bomb": CONTAINED,
    "spin": {Outcome.CPU_TIMEOUT},
    "spin_and_ignore_the_limit": {Outcome.CPU_TIMEOUT},
    "spin_in_c": {Outcome.CPU_TIMEOUT},
    "spin_just_past_the_limit": {Outcome.CPU_TIMEOUT},
    "sleep_for_ever": {Outcome.OK},
    "take_memory_at_once": {Outcome.TOOL_ERROR},
    "take_memory_slowly": {Outcome.TOOL_ERROR, Outcome.CPU_TIMEOUT},  # whichever limit comes first
    "leave_shared_memory": {Outcome.TOOL_ERROR},
    "share_by_system_calls": {Outcome.OK},
    "recurse": {Outcome.TOOL_ERROR, Outcome.CRASH, Outcome.CPU_TIMEOUT},
    "endless_generator": {Outcome.TOOL_ERROR, Outcome.CPU_TIMEOUT},
    "print_without_end": {Outcome.OK},
    "write_to_stdout_descriptor": {Outcome.OK},
    "return_too_much": {Outcome.TOO_LARGE},
    "open_many_files": {Outcome.OK},
    "read_host_files": {Outcome.OK},
    "list_directories": {Outcome.OK},
    "write_files": {Outcome.OK},
    "link_files": {Outcome.OK},
    "read_environment": {Outcome.OK},
    "open_sockets": {Outcome.OK},
    "kill_everybody": {Outcome.OK},
    "trace_and_read_others": {Outcome.OK},
    "own_signals_to_others": {Outcome.TOOL_ERROR},
    "privileged_system_calls": {Outcome.OK},
    "raise_limits": {Outcome.OK},
    "segfault": {Outcome.CRASH},
    "abort": {Outcome.CRASH},
    "exit_with_success": {Outcome.NO_RESULT},
    "sys_exit": {Outcome.TOOL_ERROR},
    "close_the_channel_and_stay": {Outcome.CPU_TIMEOUT},
    "forge_and_return": {Outcome.PROTOCOL_ERROR},
    "write_junk": {Outcome.PROTOCOL_ERROR},
    "write_half_a_report": {Outcome.PROTOCOL_ERROR},
    "forge_nan": {Outcome.PROTOCOL_ERROR},
    "forge_infinity": {Outcome.PROTOCOL_ERROR},
    "forge_deep_nesting": {Outcome.UNSERIALISABLE},
    "forge_surrogate": {Outcome.PROTOCOL_ERROR},
    "forge_huge_integer": {Outcome.PROTOCOL_ERROR},
    "forge_other_fields": {Outcome.PROTOCOL_ERROR},
    "flood_the_channel": {Outcome.FLOOD},
    "write_to_every_descriptor": {Outcome.OK},
    "return_nan": {Outcome.UNSERIALISABLE},
    "return_infinity": {Outcome.UNSERIALISABLE},
    "return_surrogate": {Outcome.UNSERIALISABLE},
    "return_huge_integer": {Outcome.UNSERIALISABLE},
    "return_generator": {Outcome.UNSERIALISABLE},
    "return_cycle": {Outcome.UNSERIALISABLE},
    "return_deep_list": {Outcome.UNSERIALISABLE},
    "start_processes_by_number": {Outcome.OK},
    "reach_processes_by_number": {Outcome.OK},
    "use_keyrings": {Outcome.OK},
    "load_kernel_code": {Outcome.OK},
    "use_shared_memory_and_queues": {Outcome.OK},
    "use_exotic_descriptors": {Outcome.OK},
    "administer_the_machine": {Outcome.OK},
    "set_the_clock": {Outcome.OK},
    "read_memory_through_proc": {Outcome.OK},
    "flood_inodes": {Outcome.OK},
    "survive_the_exit": {Outcome.OK},
    "outlive_the_exit_hooks": {Outcome.OK},
    "tamper_with_the_writer": {Outcome.PROTOCOL_ERROR},
    "raise_what_cannot_be_printed": {Outcome.CPU_TIMEOUT},
    "raise_a_huge_message": CONTAINED,
    "return_endless_dict": {Outcome.CPU_TIMEOUT, Outcome.TOOL_ERROR, Outcome.UNSERIALISABLE},
    "return_endless_list": {Outcome.CPU_TIMEOUT, Outcome.TOOL_ERROR, Outcome.UNSERIALISABLE},
    "change_time_and_chance": {Outcome.OK},
    "replace_the_decoder": {Outcome.OK},
    "forge_divergence": {Outcome.DIVERGED},
    "forge_a_long_result": {Outcome.PROTOCOL_ERROR},
    "forge_long_output": {Outcome.PROTOCOL_ERROR},
    "forge_a_long_error": {Outcome.PROTOCOL_ERROR},
    "set_flags_of_shared_files": {Outcome.OK},
    "wake_on_shared_pages": {Outcome.OK},
    "arm_a_timer": {Outcome.OK},
    "open_for_writing": {Outcome.OK},
    "wait_for_ever": {Outcome.CRASH},
    "work_a_little_then_wait": {Outcome.CRASH},
    "wait_by_system_calls": {Outcome.OK},
    "move_pages_of_libraries": {Outcome.OK},
    "poison": CONTAINED | {Outcome.PROTOCOL_ERROR},  # it also spoils its own report
}

HOSTILE_MODULES = {
    "loops at import": ("while True: pass", {Outcome.CPU_TIMEOUT}),
    "forks at import": ("import os\nwhile True: os.fork()", {Outcome.TOOL_ERROR}),
    "exits at import": ("import os\nos._exit(0)", {Outcome.NO_RESULT}),
    "kills at import": ("import os\nos.kill(-1, 9)", {Outcome.TOOL_ERROR}),
    "writes at import": ("import os\nos.write(3, b'x' * 9)\nos._exit(0)", {Outcome.PROTOCOL_ERROR}),
    "hoards at import": ("x = bytearray(1 << 40)", {Outcome.TOOL_ERROR}),
    "nests for the parser": ("x = " + "(" * 5000, {Outcome.TOOL_ERROR}),
    "nests for the compiler": ("x = " + "-" * 200_000 + "1", {Outcome.TOOL_ERROR, Outcome.CRASH}),
    "null byte": ("x = 1\0", {Outcome.TOOL_ERROR}),
    "lone surrogate": ("x = '\ud800'", {Outcome.TOOL_ERROR}),
    "folds constants": ("x = ((1 << 100_000) ** 90) ** 99", {Outcome.TOOL_ERROR, Outcome.CPU_TIMEOUT}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    async with SandboxPool(SandboxConfig(limits=LIMITS)) as pool:
        yield pool


async def assert_healthy(pool: SandboxPool, code: str = HOSTILE) -> None:
    result = await pool.call(code, "innocent", {"number": 21})
    assert result.ok, result
    assert result.value == {"doubled": 42, "text": "[true, null]", "length": 7}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_attack_is_stopped_and_harms_nobody_else(pool: SandboxPool, attack: str) -> None:
    opened = pool.stats.opened
    await assert_healthy(pool)
    result = await pool.call(HOSTILE, attack, {})
    assert result.kind in ATTACKS[attack], result
    assert result.value is None, f"{attack} got through: {result.value}"
    assert len(result.stdout) <= LIMITS.stdout_bytes + 100
    assert result.cpu_seconds < LIMITS.cpu_seconds + 1.5
    await assert_healthy(pool)
    assert pool.stats.opened - opened <= 1, "the attack cost the environment its slot"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="i386 calls exist only on x86_64")
async def test_foreign_system_call_interface_kills_the_call(pool: SandboxPool) -> None:
    result = await pool.call(HOSTILE, "foreign_abi", {})
    assert result.kind is Outcome.CRASH
    assert result.ended_by == "seccomp"
    await assert_healthy(pool)


@pytest.mark.parametrize("name", HOSTILE_MODULES)
async def test_hostile_module_is_stopped_before_any_call(pool: SandboxPool, name: str) -> None:
    source, expected = HOSTILE_MODULES[name]
    result = await pool.call(source, "anything", {})
    assert result.kind in expected, result
    assert result.error
    await assert_healthy(pool)


@pytest.mark.parametrize("attack", ["wait_for_ever", "work_a_little_then_wait"])
async def test_who_waits_ends_at_once_and_is_told_why(pool: SandboxPool, attack: str) -> None:
    """No call can use some of its time, wait for the rest, and be masked as one that a busy machine held up."""
    retried = pool.stats.retried
    result = await pool.call(HOSTILE, attack, {})
    assert (result.kind, result.ended_by, pool.stats.retried) == (Outcome.CRASH, "seccomp", retried)
    assert "it waited for another thread or process" in result.error


async def test_nothing_that_a_call_says_is_infrastructure() -> None:
    for report in Report:
        body = b'{"value": 1, "stdout": ""}' if report is Report.RETURNED else b'{"error": "mine", "stdout": ""}'
        result = decode(SlotReply(CallVerdict.REPORTED, report, 0.1, 0.1, 0, body), LIMITS)
        assert not result.is_infrastructure and result.kind is not Outcome.PROTOCOL_ERROR


async def test_a_results_depth_is_judged_alike_however_deep_the_host_is() -> None:
    """Python's own limit counts the host's callers too."""

    def judged(levels: int, callers: int) -> CallResult:
        if callers:
            return judged(levels, callers - 1)
        body = b'{"value":' + b"[" * levels + b"]" * levels + b',"stdout":""}'
        return decode(SlotReply(CallVerdict.REPORTED, Report.RETURNED, 0.1, 0.1, 0, body), LIMITS)

    for levels in (MOST_NESTING, MOST_NESTING + 1, 700, 5_000):
        shallow, deep = judged(levels, 0), judged(levels, 400)
        assert shallow.kind is (Outcome.OK if levels == MOST_NESTING else Outcome.UNSERIALISABLE)
        assert (deep.kind, deep.error) == (shallow.kind, shallow.error), levels


@pytest.mark.parametrize(("cpu_seconds", "kind"), [(0.01, Outcome.IDLE_TIMEOUT), (0.3, Outcome.WALL_TIMEOUT)])
async def test_who_waits_is_told_from_who_is_kept_waiting(cpu_seconds: float, kind: Outcome) -> None:
    result = decode(SlotReply(CallVerdict.WALL_LIMIT, 0, cpu_seconds, 30.0, 0, b""), LIMITS)
    assert result.kind is kind and result.is_infrastructure is (kind is Outcome.WALL_TIMEOUT)


async def test_waiting_for_ever_is_the_tools_own_doing_and_not_retried() -> None:
    """Where no layer refuses it."""
    config = SandboxConfig(
        limits=Limits(cpu_seconds=5, wall_seconds=1.5), leave_out=("seccomp",), allow_unisolated=True
    )
    works = """
import resource, threading
def f():
    while resource.getrusage(resource.RUSAGE_SELF).ru_utime < 0.2:
        sum(range(1000))
    threading.Event().wait()
"""
    async with SandboxPool(config) as pool:
        for code, function in ((HOSTILE, "wait_for_ever"), (works, "f")):
            result = await pool.call(code, function, {})
            assert result.kind is Outcome.IDLE_TIMEOUT, result
            assert not result.is_infrastructure
        assert result.cpu_seconds > 0.15  # enough of it to be kept waiting, where a layer forbids to wait
        assert pool.stats.retried == 0
        await assert_healthy(pool)


@pytest.mark.parametrize("tier", ["B", "C"])
async def test_weaker_tiers_stop_what_does_not_need_namespaces(tier: str) -> None:
    attacks = ["fork_bomb", "open_sockets", "kill_everybody", "trace_and_read_others", "read_host_files", "write_files"]
    attacks += ["privileged_system_calls", "list_directories", "raise_limits", "thread_bomb"]
    async with SandboxPool(SandboxConfig(limits=LIMITS, highest_tier=tier)) as pool:
        assert pool.tier == tier
        for attack in attacks:
            result = await pool.call(HOSTILE, attack, {})
            assert result.kind in CONTAINED, result
            assert result.value is None, f"{attack} got through: {result.value}"
            await assert_healthy(pool)
