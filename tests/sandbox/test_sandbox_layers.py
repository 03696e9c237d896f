"""Each layer on its own: with all others left out it still stops what docs/sandbox.md says it stops."""

from __future__ import annotations

import os
import textwrap

import pytest

from sandbox import Limits, SandboxConfig, SandboxPool
from sandbox.selftest import LAYERS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBES = textwrap.dedent(
    """
    import ctypes, errno, os, resource, signal, socket, threading

    def refused(attempt):
        try:
            return f"reached {attempt()!r}"
        except (OSError, MemoryError, RuntimeError) as error:
            return errno.errorcode.get(getattr(error, "errno", None), type(error).__name__)

    def read_host_file():
        return refused(lambda: open("/etc/passwd").read(4))

    def write_file():
        def attempt():
            with open("/tmp/sandbox-probe", "x"):
                os.unlink("/tmp/sandbox-probe")
        return refused(attempt)

    def list_processes():
        return refused(lambda: len(os.listdir("/proc")))

    def see_interfaces():
        return [name for _, name in socket.if_nameindex() if name != "lo"]

    def see_host_name():
        return os.uname().nodename

    def probe_parent():
        return refused(lambda: os.kill(ctypes.CDLL(None).getppid(), 0))

    def open_socket():
        return refused(lambda: socket.socket())

    def fork():
        def attempt():
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
        return refused(attempt)

    def start_thread():
        return refused(threading.Thread(target=lambda: None).start)

    def make_namespace():
        def attempt():
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(0x10000000):
                raise OSError(ctypes.get_errno(), "unshare")
        return refused(attempt)

    def take_memory():
        return refused(lambda: len(bytearray(1 << 34)))

    def fill_file():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def attempt():
            with open("/tmp/sandbox-probe", "w") as file:
                os.unlink("/tmp/sandbox-probe")
                file.write("x")
        return refused(attempt)

    def open_many():
        return refused(lambda: [os.dup(0) for _ in range(100)])

    def spin():
        while True:
            pass

    def user():
        return os.getuid()

    def mark_descriptors():
        import fcntl
        return [fcntl.fcntl(number, fcntl.F_SETFL, os.O_APPEND) for number in (0, 1, 2)]

    def see_marks():
        import fcntl
        return [fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND for number in (0, 1, 2)]
    """
)
ALONE: dict[str, dict[str, object]] = {
    "namespaces": {
        "read_host_file": "ENOENT",
        "write_file": "ENOENT",  # there is no /tmp
        "list_processes": "ENOENT",
        "see_host_name": "sandbox",
        "see_interfaces": [],
    },
    "landlock": {"read_host_file": "EACCES", "write_file": "EACCES", "list_processes": "EACCES"},
    "seccomp": {
        "read_host_file": "EPERM",
        "write_file": "EPERM",
        "list_processes": "EPERM",
        "open_socket": "EPERM",
        "fork": "EAGAIN",
        "start_thread": "RuntimeError",
        "probe_parent": "EPERM",
        "make_namespace": "EPERM",
    },
    "rlimits": {"take_memory": "MemoryError", "fill_file": "EFBIG", "open_many": "EMFILE"},
}


def only(layer: str) -> SandboxConfig:
    others = tuple(one for one in LAYERS if one != layer)
    return SandboxConfig(leave_out=others, allow_unisolated=True, limits=Limits(cpu_seconds=1))


@pytest.mark.parametrize("layer", ALONE)
async def test_a_layer_alone_stops_its_attacks(layer: str) -> None:
    async with SandboxPool(only(layer)) as pool:
        assert pool.tier == ("C" if layer == "seccomp" else "D")
        states = {name: pool.layers[name] for name in ("namespaces", "landlock", "seccomp")}
        if layer != "rlimits" and states[layer] == "off":
            pytest.skip(f"this machine has no {layer}: {pool.layers}")
        assert {name for name, state in states.items() if state != "off"} == {layer} - {"rlimits"}
        assert pool.layers["rlimits"] == "on" and pool.layers["cgroup"] == "off"
        found = {probe: (await pool.call(PROBES, probe, {})).value for probe in ALONE[layer]}
        assert found == ALONE[layer]
        assert (await pool.call(PROBES, "spin", {})).ended_by == "cpu_limit"


async def test_without_any_layer_the_probes_do_reach_what_the_layers_keep_from_them() -> None:
    """That the other tests can fail."""
    async with SandboxPool(only("rlimits")) as pool:
        for probe in ("read_host_file", "list_processes", "open_socket", "probe_parent", "write_file"):
            assert (await pool.call(PROBES, probe, {})).value.startswith("reached"), probe
        assert (await pool.call(PROBES, "see_host_name", {})).value == os.uname().nodename


async def test_no_two_environments_share_an_open_file() -> None:
    """Not even without seccomp, which keeps calls from changing what the descriptors 0 to 2 lead to."""
    async with SandboxPool(only("rlimits")) as pool:
        assert (await pool.call(PROBES, "mark_descriptors", {})).value == [0, 0, 0]
        assert (await pool.call(PROBES, "see_marks", {})).value == [os.O_APPEND] * 3
        assert (await pool.call(f"{PROBES}# another\n", "see_marks", {})).value == [0, 0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give slots other user ids")
async def test_user_ids_of_their_own() -> None:
    async with SandboxPool(SandboxConfig()) as pool:
        if pool.layers["uid"] != "one of its own for each slot":
            pytest.skip(f"not on this machine: {pool.layers}")
        users = [(await pool.call(f"{PROBES}# {i}\n", "user", {})).value for i in range(3)]
        assert len(set(users)) == 1  # inside each user namespace nobody has a name
    async with SandboxPool(SandboxConfig(leave_out=("own_uid",))) as pool:
        assert pool.tier == "A" and pool.layers["uid"] == "the host's own"


@pytest.mark.parametrize(("left_out", "tier"), [("landlock", "B"), ("namespaces", "B"), ("seccomp", "D")])
async def test_leaving_one_layer_out_costs_its_tier(left_out: str, tier: str) -> None:
    async with SandboxPool(SandboxConfig(leave_out=(left_out,), allow_unisolated=True)) as pool:
        assert pool.tier == tier and pool.layers[left_out] == "off"
        result = await pool.call("def f():\n    import tomllib\n    return tomllib.loads('a = 1')", "f", {})
        assert result.value == {"a": 1}


async def test_an_unknown_layer_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"leave_out\[0\] is 'landlok'; use one of namespaces, .* nearest is landlock",
    ):
        SandboxConfig(leave_out=("landlok",))
