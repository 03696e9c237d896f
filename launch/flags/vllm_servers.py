"""vLLM servers that `astra grpo --vllm=N` runs on its own machine: which GPUs they get, their keys, start and end."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from absl import flags

from astra_jax.base.settings import Bound
from astra_jax.base.terminal import say
from launch.flags import cli
from launch.flags.children import ChildServer, ChildServers, free_ports, make_key
from launch.flags.numbers import number_flag

COUNT = number_flag(
    "vllm",
    None,
    Annotated[int, Bound(least=1, most=64)],
    "Number of vLLM servers to start on this machine, sample from, and stop at the end (docs/vllm.md). Without GPUs "
    "they share the processors with the trainer, with one GPU its memory; several GPUs are divided.",
)
_GPUS = flags.DEFINE_string(
    "vllm_gpus",
    None,
    'GPUs of the servers of --vllm, such as "4,5 6,7": a word for each server. The trainer gets the others. By default '
    "the trainer gets half of the GPUs or more.",
)
_PROGRAM = flags.DEFINE_string(
    "vllm_program", None, "Path of the program vllm for --vllm; by default from PATH or the folder .venv-vllm."
)
_FLAGS = flags.DEFINE_string(
    "vllm_flags", "", 'Further flags of vllm serve for the servers of --vllm: "--gpu-memory-utilization=0.8".'
)
_READY_SECONDS = 1200.0
_RESTARTS = 5
_PLUGIN = Path(__file__).resolve().parents[2] / "astra_jax" / "rollout" / "vllm" / "plugin"
_SHARED = 0.45
"""Share of a single GPU's memory for the trainer, and for all servers together."""


@dataclass(frozen=True)
class Division:
    """GPUs of the trainer and of each server, as in CUDA_VISIBLE_DEVICES; empty without GPUs."""

    trainer: tuple[str, ...]
    servers: tuple[tuple[str, ...], ...]

    @property
    def is_shared(self) -> bool:
        """True if trainer and servers use the same GPU."""
        return bool(set(self.trainer) & {gpu for server in self.servers for gpu in server})


class LocalServers:
    """Servers for a run, from its flags. Creating it takes the trainer's GPUs: do so before JAX starts its backend.

    Attributes:
        urls: their addresses.
        key_file, sync_key_file: files with the keys for sampling and for new weights.

    Raises:
        UsageError: there is no vLLM or no plugin in its environment, or too few GPUs.
    """

    def __init__(self, workdir: Path) -> None:
        count = COUNT.value or 0
        self._program = _program()
        _check_plugin(self._program)
        self._division = divided(_visible_gpus(), count, _GPUS.value)
        self._folder, self._ports = workdir / "vllm", free_ports(count)
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self.key_file, self.sync_key_file = (make_key(self._folder / "keys" / name) for name in ("api", "sync"))
        if self._division.trainer:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._division.trainer)
            os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(_SHARED if self._division.is_shared else 0.95))

    @property
    def serving_folder(self) -> Path:
        """Folder that the servers start from; the caller writes it before `running`."""
        return self._folder / "served"

    @contextlib.contextmanager
    def running(self, *, published: str, dtype: str, max_length: int) -> Iterator[None]:
        """Start the servers, wait until they are ready, and stop them at the end. One that ends is started again.

        Args:
            published: folder of the weights that they load.
            dtype: in which they compute.
            max_length: maximum tokens of prompt and completion together.

        Raises:
            ServerFailed: one ended, or did not get ready.
        """
        options = [
            "--host=127.0.0.1", "--load-format=dummy", f"--dtype={dtype}", f"--max-model-len={max_length}",
            '--weight-transfer-config={"backend": "astra"}', "--enable-scale-out", "--logprobs-mode=processed_logprobs",
        ]  # fmt: skip
        variables = {
            "ASTRA_SYNC_ROOT": published,
            "ASTRA_SYNC_KEY_FILE": str(self.sync_key_file),
            "VLLM_PLUGINS": "astra,astra_sync",
            "VLLM_API_KEY": self.key_file.read_text(encoding="utf-8").strip(),  # not on a command line
        }
        servers = []
        for number, (port, gpus) in enumerate(zip(self._ports, self._division.servers, strict=True), 1):
            more, own = self._of_devices(gpus)
            command = [self._program, "serve", str(self.serving_folder), f"--port={port}", *options, *more]
            command += shlex.split(_FLAGS.value)
            log = self._folder / f"server-{number}.log"
            health = f"http://127.0.0.1:{port}/health"
            servers.append(ChildServer(f"vLLM server {number}", command, health, log, variables | own))
        say(self._plan(servers), file=sys.stderr)
        with ChildServers(servers, restarts=_RESTARTS) as children:
            children.wait(_READY_SECONDS)
            say(f"{len(servers)} vLLM servers are ready", file=sys.stderr)
            children.keep_running()
            yield

    def _of_devices(self, gpus: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the flags and variables that depend on a server's devices."""
        if not gpus:
            threads = max(1, (os.cpu_count() or 1) // (len(self._ports) + 1))
            return ["--enforce-eager"], {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        flags = [f"--tensor-parallel-size={len(gpus)}"] if len(gpus) > 1 else []
        if self._division.is_shared:
            flags.append(f"--gpu-memory-utilization={_SHARED / len(self._ports):.3g}")
        return flags, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}

    def _plan(self, servers: Sequence[ChildServer]) -> str:
        """Return which devices each part gets, and where its log is."""

        def devices(gpus: Sequence[str]) -> str:
            return f"GPU {','.join(gpus)}" if gpus else "processors"

        lines = [f"{self._program} on this machine; it stops with this command:"]
        shared = " (shared memory)" if self._division.is_shared else ""
        lines.append(f"  trainer: {devices(self._division.trainer)}{shared}")
        for server, gpus, url in zip(servers, self._division.servers, self.urls, strict=True):
            lines.append(f"  {server.name}: {devices(gpus)}{shared}, {url}, log in {server.log}")
        return "\n".join(lines)


def refuse_without() -> None:
    """Refuse flags of --vllm without it. Raises `UsageError`."""
    cli.refuse_unused((_GPUS, _PROGRAM, _FLAGS), f"is for servers on this machine: give --{COUNT.name} too")


def divided(gpus: Sequence[str], servers: int, wanted: str | None) -> Division:
    """Return which GPUs the trainer and each server get.

    Args:
        gpus: all GPUs of this machine; empty without any.
        servers: number of servers.
        wanted: value of --vllm_gpus.

    Raises:
        UsageError: there are too few GPUs, or `wanted` does not fit.
    """
    if wanted is not None:
        words = [tuple(filter(None, word.split(","))) for word in wanted.split()]
        named = [gpu for word in words for gpu in word]
        left = tuple(gpu for gpu in gpus if gpu not in named)
        if len(words) != servers or len({*named}) < len(named) or not {*named} <= {*gpus} or not left:
            raise cli.UsageError(
                f"--vllm_gpus={wanted}: write a word of different GPUs for each of the {servers} servers of --vllm, "
                f"and leave one for the trainer; this machine has {', '.join(gpus) or 'no GPUs'}"
            )
        return Division(left, tuple(words))
    if len(gpus) < 2:
        return Division(tuple(gpus), (tuple(gpus),) * servers)
    if servers >= len(gpus):
        raise cli.UsageError(
            f"--vllm={servers}: each server needs a GPU, and the trainer one; this machine has {len(gpus)}. Give at "
            f"most --vllm={len(gpus) - 1}"
        )
    each = max(1, len(gpus) // 2 // servers)
    each = 1 << (each.bit_length() - 1)  # tensor parallelism divides the heads
    first = len(gpus) - each * servers
    chosen = tuple(tuple(gpus[first + i * each : first + (i + 1) * each]) for i in range(servers))
    return Division(tuple(gpus[:first]), chosen)


def _visible_gpus() -> list[str]:
    """Return this machine's NVIDIA GPUs as in CUDA_VISIBLE_DEVICES; none if JAX uses the processors."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [one.strip() for one in named.split(",") if one.strip() not in ("", "-1")]
    found = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(found.iterdir())))] if found.is_dir() else []


def _program() -> str:
    """Return the path of vLLM's program. Raises `UsageError`."""
    usual = [shutil.which("vllm"), ".venv-vllm/bin/vllm", ".venv-vllm/vllm/bin/vllm"]
    given = [os.path.expanduser(_PROGRAM.value)] if _PROGRAM.value else [one for one in usual if one]
    for path in given:
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return str(Path(path).absolute())
    where = (
        f"--vllm_program={_PROGRAM.value} is not a program"
        if _PROGRAM.value
        else (f"--vllm={COUNT.value}: there is no program vllm on PATH or in .venv-vllm")
    )
    raise cli.UsageError(
        f"{where}; install it in an environment of its own, python -m venv .venv-vllm && .venv-vllm/bin/pip install "
        f"'vllm>=0.32,<0.33' {_PLUGIN}, or give its path with --vllm_program"
    )


def _check_plugin(program: str) -> None:
    """Check that our plugin is installed beside vLLM. Raises `UsageError`."""
    python = Path(program).with_name("python")
    if not python.exists():
        return
    found = "import importlib.metadata as m; m.distribution('astra-vllm')"
    if subprocess.run([str(python), "-c", found], capture_output=True, cwd="/", check=False).returncode:
        raise cli.UsageError(
            f"{program} has no plugin astra-vllm, with which it loads new weights; install it: {python} -m pip install "
            f"{_PLUGIN}"
        )
