"""Compare a vLLM server's sync from the trainer's Orbax checkpoint with vLLM's reload of safetensors, interleaved.

A second part compares transfer through files with transfer out of the trainer's memory, interleaved too.

    python -m benchmarks.weight_sync [--part=reload|memory] [--save]

The first part has one real server on the CPU, with the plugin and vLLM's development endpoints. The model is a Qwen3 of
445 million random bfloat16 parameters in 28 layers (0.9 GB), published in both forms. Files are in the page cache for
both. The reload is timed with its necessary pause and resume, and checks nothing that it loads. A sync's reads from
disk are measured once more with the files out of the cache; the temporary folder must be on a disk for that.

In the second part the trainer publishes, and the plugin's own code reads in another process. No model loads the
weights, since that is the same work either way. Every weight changes each time, so that sending changes alone would not
help. The size of such changes is measured as well: float32 weights of which each moves by 1e-6, published in bfloat16.
Processor seconds are those of both processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import mmap
import multiprocessing
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from absl import flags

from astra_jax.base.settings import Bound
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag

if TYPE_CHECKING:
    from astra_jax.models.decoder import Decoder

PLUGIN = rows.ROOT / "astra_jax" / "rollout" / "vllm" / "plugin"

_VLLM = flags.DEFINE_string("vllm", ".venv-vllm/vllm/bin/vllm", "vLLM's program, with our plugin beside it.")
_ROUNDS = number_flag("rounds", 7, Annotated[int, Bound(least=3, most=2**31 - 1)], "Syncs of each kind.")
_PART = flags.DEFINE_enum("part", None, ["reload", "memory"], "Only this one; by default both.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/weight_sync.jsonl.")


def model() -> Decoder:
    from astra_jax.models.qwen3.presets import PRESETS

    return dataclasses.replace(PRESETS["0.6b"], vocab_size=2048, tie_embeddings=False)


def publish(folder: Path) -> tuple[int, dict[str, Path]]:
    """Writes the weights twice; returns their bytes and where they are."""
    import jax

    from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher

    params = dataclasses.replace(model(), param_dtype="bfloat16").init(jax.random.key(0))
    found = {}
    for name, kind in (("orbax", Publisher), ("safetensors", FolderPublisher)):
        publisher = kind(folder / name, model())
        found[name] = publisher.publish(params, 1)
        publisher.close()
    return 2 * sum(leaf.size for leaf in jax.tree.leaves(params)), found


class Server:
    """One `vllm serve`."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            _VLLM.value, "serve", str(folder), "--host=127.0.0.1", f"--port={port}", "--max-model-len=2048",
            "--enforce-eager", "--kv-cache-memory-bytes=536870912", "--skip-tokenizer-init",
            '--weight-transfer-config={"backend": "astra"}',
        ]  # fmt: skip
        settings = {"VLLM_PLUGINS": "astra,astra_sync", "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
        settings["ASTRA_SYNC_ROOT"] = str(folder.parents[1])
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **settings, "VLLM_NO_USAGE_STATS": "1"},
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Until it is healthy."""
        while True:
            if self.process.poll() is not None:
                raise RuntimeError("vLLM ended before it served")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())

    def disk_bytes(self) -> int:
        """Return the bytes that all of its processes have read from a disk so far."""
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[3]) == self.process.pid:  # of its session
                    total += int(stat.with_name("io").read_text().partition("\nread_bytes:")[2].split()[0])
        return total


def forget(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def serving(folder: Path, log: Path) -> Iterator[Server]:
    server = Server(folder, log)
    try:
        server.wait()
        yield server
    finally:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def measure(folder: Path) -> dict[str, Any]:
    size, found = publish(folder)
    stages: list[dict[str, float]] = []
    seconds: dict[str, list[float]] = {"sync": [], "reload": []}
    with serving(found["safetensors"], folder / "server.log") as server:

        def sync(number: int) -> None:
            answer = server.post("/v1/policy/sync", {"item": str(found["orbax"]), "version": f"benchmark:{number}"})
            stages.append(answer["seconds"])

        def reload(_: int) -> None:
            server.post("/pause?mode=keep&clear_cache=true")
            server.post(
                "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(found["safetensors"])}}
            )
            server.post("/resume")

        for number in range(_ROUNDS.value + 1):  # the first of each warms up
            for name, way in (("sync", sync), ("reload", reload)):
                started = time.perf_counter()
                way(number)
                seconds[name].append(time.perf_counter() - started)
        forget(Path(found["orbax"]))
        before = server.disk_bytes()
        sync(_ROUNDS.value + 1)
        from_disk = server.disk_bytes() - before
        cold = stages.pop()
    ratios = [ours / theirs for ours, theirs in zip(seconds["sync"][1:], seconds["reload"][1:], strict=True)]
    return {
        "parameters": size // 2,
        "gb": round(size / 1e9, 3),
        **{f"{name}_seconds": round(statistics.median(one[1:]), 3) for name, one in seconds.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(one, 2) for one in ratios],
        "stages": {name: round(statistics.median(one[name] for one in stages[1:]), 3) for name in stages[0]},
        "first_seconds": {name: round(one[0], 3) for name, one in seconds.items()},
        "disk_bytes_ratio": round(from_disk / size, 4),
        "cold_read_seconds": round(cold["read"], 3),
    }


def hand_over(folder: Path) -> dict[str, Any]:
    """Files beside memory, and what a small step comes to. Seconds and processor seconds are medians."""
    import jax

    from astra_jax.rollout.vllm.direct import DirectPublisher
    from astra_jax.rollout.vllm.publishing import Publisher

    key = secrets.token_hex(16)
    negated = jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0)
    stepped = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1e-6, tree), donate_argnums=0)
    params = dataclasses.replace(model(), param_dtype="float32").init(jax.random.key(1))
    files = Publisher(folder / "files", model())
    memory = DirectPublisher(model(), key=key, run="benchmark", host="127.0.0.1")
    publishers: dict[str, Publisher | DirectPublisher] = {"files": files, "memory": memory, "step": memory}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in publishers}
    spawned = multiprocessing.get_context("spawn")  # a fork would have JAX's threads
    ours, theirs = spawned.Pipe()
    reader = spawned.Process(target=_read, args=(theirs, str(folder), key, tensor_shapes()))
    reader.start()
    for number in range(_ROUNDS.value + 1):  # the first of each warms up
        params = negated(params)
        for place, (name, publisher) in enumerate(publishers.items()):
            params = jax.block_until_ready(stepped(params) if name == "step" else params)
            version = 3 * number + place
            started, spent = time.perf_counter(), time.process_time()
            item = publisher.publish(params, version)
            publisher.wait()
            published = time.perf_counter()
            ours.send((str(item), f"benchmark:{version}"))
            answer = ours.recv()
            answer["publish_seconds"] = published - started
            answer["seconds"] = time.perf_counter() - started
            answer["processor_seconds"] = answer.pop("processor_seconds") + time.process_time() - spent
            found[name].append(answer)
    ours.send(None)
    reader.join()
    for publisher in (files, memory):
        publisher.close()
    kept = {name: each[1:] for name, each in found.items()}

    def ratio(what: str, name: str) -> float:
        pairs = zip(kept[name], kept["files"], strict=True)
        return round(statistics.median(one[what] / files[what] for one, files in pairs), 3)

    return {
        **{
            name: {what: round(statistics.median(one[what] for one in each), 4) for what in each[0]}
            for name, each in kept.items()
        },
        "ratio": ratio("seconds", "memory"),
        "processor_ratio": ratio("processor_seconds", "memory"),
        "step_ratio": ratio("seconds", "step"),
        "step_processor_ratio": ratio("processor_seconds", "step"),
    }


def _read(pipe: Connection, root: str, key: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """A server's part of it, as its API process does it, in the plugin's own code; nothing is loaded into a model."""
    sys.path.insert(0, str(PLUGIN))
    from astra_vllm.access import SyncRoot
    from astra_vllm.checkpoint import PolicyCheckpoint
    from astra_vllm.stream import PolicyStream

    buffer, parts = None, {}
    while (asked := pipe.recv()) is not None:
        item, version = asked
        started, spent = time.perf_counter(), time.process_time()
        of_memory = item.startswith("tcp://")
        source = PolicyStream(item, version, key) if of_memory else PolicyCheckpoint(item, SyncRoot(root))
        source.compare(shapes, {}, "bfloat16")
        buffer = buffer or memoryview(mmap.mmap(-1, source.bytes))  # kept, as a server keeps it
        source.read(buffer, parts)
        pipe.send(
            {
                "read_seconds": time.perf_counter() - started,
                "read_share": source.read_bytes / source.bytes,
                "processor_seconds": time.process_time() - spent,
            }
        )


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's Hugging Face tensors, by name."""
    import jax

    from astra_jax.rollout.vllm.publishing import stacked_hf_tensors

    found = {}
    stacked = jax.eval_shape(
        lambda tree: stacked_hf_tensors(tree, model=model(), dtype="bfloat16"), model().abstract_params()
    )
    for name, leaf in stacked.items():
        axes = name.count("{}")
        for place in itertools.product(*map(range, leaf.shape[:axes])):
            found[name.replace("{}", "%d") % place] = leaf.shape[axes:]
    return found


def main() -> None:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        if _PART.value != "memory":
            figures |= measure(Path(name))
        if _PART.value != "reload":
            figures["direct"] = hand_over(Path(name))
    rows.report("weight_sync", figures, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
