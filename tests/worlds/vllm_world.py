"""Real vLLM servers on the CPU that serve a tiny model: with our plugin from dummy weights, or as they come."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astra_jax.axes import is_bias
from astra_jax.head import token_logprobs
from astra_jax.models.decoder import Decoder
from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.model import Params
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.sampler import Completion, Sampling
from astra_jax.rollout.vllm.direct import DirectPublisher
from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher
from astra_jax.rollout.vllm.sampler import VLLMConfig, VLLMSampler
from astra_jax.rollout.vllm.sync import AnyPublisher
from astra_jax.tokenizer import ChatTokenizer

ROOT = Path(__file__).parent.parent.parent
VLLM = Path(os.environ.get("ASTRA_VLLM", ROOT / ".venv-vllm" / "vllm" / "bin" / "vllm"))
ZYGOTE = Path(__file__).with_name("vllm_zygote.py")
PLUGIN = ROOT / "astra_jax" / "rollout" / "vllm" / "plugin"
RUN = "r1"
"""Whose weights the servers get: their labels are r1:1 and so on."""
KEY = "open sesame"
SYNC_KEY = "close sesame"
CONTEXT = 2048
PROMPTS = [[5, 17, 300, 42], list(range(20, 90)), [600, 1, 2, 3] * 40]
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # A thread for each rank, on whichever CPU is free. Several wait for one another in circles, for longer than this
    # model takes, and vLLM binds those of all servers to the same CPUs.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
GREEDY = Sampling(max_tokens=40, stop_ids=(), seed=0, temperature=0.0)


def require_vllm() -> None:
    if not VLLM.exists():
        pytest.skip("needs vLLM: launch/vllm_cpu.sh .venv-vllm", allow_module_level=True)


def model(tie: bool, head_dim: int = 32, family: type[Decoder] = Qwen3Config, **sizes: Any) -> Decoder:
    return family(
        vocab_size=640,
        d_model=128,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=head_dim,  # 32 is the least that vLLM's attention on CPUs takes
        d_ff=256,
        tie_embeddings=tie,
        max_positions=4096,
        **sizes,
    )


def weights(config: Decoder, seed: int) -> Params:
    """Random, and wide enough that greedy sampling has one clear answer.

    Wider ones blow up what float32 leaves open: at six times, logprobs of short sequences differ by up to 9e-5 from the
    server's and those of 1,500 tokens by 4e-4; at three times by 4e-5 and 8e-5. Queries and keys that have no norm grow
    with them, so that such a model's are half as wide.
    """
    width = 3.0 if config.qk_norm else 1.5
    params = config.init(jax.random.key(seed))

    def wide(path: Any, x: jax.Array) -> jax.Array:
        if is_bias(path[-1].key):  # which begin at 0
            key = jax.random.fold_in(jax.random.key(seed), ord(path[-1].key[0]))
            return 0.5 * jax.random.normal(key, x.shape, x.dtype)
        return x * (width if x.ndim > 1 else 1)

    return jax.tree_util.tree_map_with_path(wide, params)


@dataclass
class World:
    """A folder to serve from, a folder to publish to, and a tokenizer."""

    folder: Path
    model: Decoder
    tokenizer: ChatTokenizer

    @classmethod
    def make(cls, folder: Path, **sizes: Any) -> World:
        config = model(**sizes)
        text = (ROOT / "docs" / "sandbox.md").read_text(encoding="utf-8")
        tokenizer = ChatTokenizer.train([text], 600, folder / "serve")
        save_hf(weights(config, 0), config, folder / "serve")
        return cls(folder, config, tokenizer)

    def publisher(self) -> Publisher:
        return Publisher(self.folder / "policy", self.model, dtype="float32")

    def folder_publisher(self) -> FolderPublisher:
        return FolderPublisher(self.folder / "folders", self.model, dtype="float32")

    @contextlib.asynccontextmanager
    async def direct_policy(self, *servers: Server) -> AsyncIterator[tuple[VLLMSampler, DirectPublisher]]:
        """Whose weights the servers take out of this process's memory."""
        publisher = DirectPublisher(self.model, key=SYNC_KEY, run=RUN, host="127.0.0.1", dtype="float32")
        with contextlib.closing(publisher):
            async with self.policy(*servers, publisher=publisher, sync="direct") as policy:
                yield policy, publisher

    def policy(
        self, *servers: Server, max_length: int = CONTEXT, publisher: AnyPublisher | None = None, **config
    ) -> VLLMSampler:
        urls = tuple(server.url for server in servers)
        config.setdefault("sync_key", None if config.get("sync") == "reload" else SYNC_KEY)
        plain = dict(urls=urls, api_key=KEY, run_id=RUN, check_seconds=0.3, patience_seconds=90.0, lease_seconds=600.0)
        options = VLLMConfig(**plain | config)
        if publisher is None:
            publisher = self.folder_publisher() if options.sync == "reload" else self.publisher()
        digest = self.tokenizer.vocabulary_digest
        return VLLMSampler(options, publisher, vocabulary=digest, max_length=max_length)


OF_THE_PLUGIN, PLUGINS = '--weight-transfer-config={"backend": "astra"}', "astra,astra_sync"
"""A flag, and the variable VLLM_PLUGINS."""


def serving_flags(
    folder: Path, port: int, *, dtype: str = "float32", logprobs: str = "processed_logprobs"
) -> list[str]:
    """What `vllm` is told to serve a tiny model of a folder on this machine's CPUs."""
    return [
        "serve", str(folder), "--host=127.0.0.1", f"--port={port}", "--served-model-name=policy", f"--dtype={dtype}",
        f"--max-model-len={CONTEXT}", "--enforce-eager", "--kv-cache-memory-bytes=134217728",
        f"--logprobs-mode={logprobs}",
    ]  # fmt: skip


class Server:
    """One `vllm serve` and all its processes.

    Args:
        scale_out: it has `/inference/v1/generate`.
        plugin: ours; else vLLM's development endpoints.
        dummy: starts from dummy weights; else from those in the world's folder.
        logprobs: vLLM's `--logprobs-mode`.
        arguments: further ones of `vllm serve`.
        forked: from a process that has imported vLLM; else started as users do.
        folder: to serve from; by default the world's.
    """

    def __init__(
        self,
        world: World,
        *,
        ranks: int = 1,
        scale_out: bool = True,
        plugin: bool = True,
        dummy: bool = True,
        dtype: str = "float32",
        logprobs: str = "processed_logprobs",
        arguments: Sequence[str] = (),
        forked: bool = True,
        folder: Path | None = None,
    ) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = world.folder / f"server-{self.port}.log"
        self._command = [
            str(VLLM), *serving_flags(folder or world.folder / "serve", self.port, dtype=dtype, logprobs=logprobs),
            f"--api-key={KEY}", f"--tensor-parallel-size={ranks}", *arguments,
        ]  # fmt: skip
        self._environment = QUIET | sync_settings(world.folder)
        if plugin:
            self._command.append(OF_THE_PLUGIN)
            self._environment["VLLM_PLUGINS"] = PLUGINS
        else:
            self._environment |= {"VLLM_PLUGINS": "", "VLLM_SERVER_DEV_MODE": "1"}
        if dummy:
            self._command.append("--load-format=dummy")
        if scale_out:
            self._command.append("--enable-scale-out")
        self._forked = forked
        self._pid = 0

    def start(self) -> None:
        if self._forked:
            self._pid = _forked(command=self._command, environment=self._environment, log=str(self.log))
        else:
            self._pid = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": _plugin_path(), **self._environment},
                stdout=self.log.open("ab"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ).pid

    def wait(self, seconds: float = 300) -> None:
        """Until it is healthy."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self._lives(), self.log.read_text()[-3000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        """All of it at once: the engine outlives the API process otherwise."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            while self._lives():
                time.sleep(0.05)

    def _lives(self) -> bool:
        with contextlib.suppress(ChildProcessError):  # the zygote's are reaped there
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                return False
        return Path(f"/proc/{self._pid}").exists()


def sync_settings(folder: Path) -> dict[str, str]:
    """The environment of a server that takes checkpoints below a folder, with `SYNC_KEY`."""
    file = folder / "sync_key"
    file.write_text(f"{SYNC_KEY}\n")
    return {"ASTRA_SYNC_ROOT": str(folder), "ASTRA_SYNC_KEY_FILE": str(file)}


def _plugin_path() -> str:
    """So that the plugin is this checkout's, whichever is installed; vLLM finds it by what is."""
    return os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])


@functools.cache
def _zygote() -> subprocess.Popen[str]:
    """Ends with this process, which holds its input open."""
    command = [str(VLLM.with_name("python")), str(ZYGOTE)]
    environment = os.environ | QUIET | {"PYTHONPATH": _plugin_path()}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _forked(**asked: Any) -> int:
    """A process of the zygote's, see there."""
    zygote = _zygote()
    zygote.stdin.write(json.dumps(asked) + "\n")
    zygote.stdin.flush()
    return int(zygote.stdout.readline())


def said_in_vllm(script: str, folder: Path) -> str:
    """What a script says that is run by vLLM's Python, with the settings of a server of this folder; to its end."""
    log = folder / "script.log"
    pid = _forked(command=["script"], script=script, environment=sync_settings(folder), log=str(log))
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)
    return log.read_text()


@contextlib.contextmanager
def serving(*servers: Server) -> Iterator[tuple[Server, ...]]:
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()


def generated_tokens(server: Server) -> float:
    """How many tokens a server has sampled since it was started."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def trainer_logprobs(params: Params, model: Decoder, tokens: list[int]) -> np.ndarray:
    """Of each token but the first, as the trainer computes them."""
    length = -(-len(tokens) // 256) * 256  # few, each of which is compiled
    ids_bt = np.asarray([[*tokens, *[0] * (length - len(tokens))]])
    segments_bt = (np.arange(length) < len(tokens)).astype(np.int32)[None]
    return np.asarray(_logprobs(params, model, ids_bt, segments_bt))[: len(tokens) - 1]


@functools.partial(jax.jit, static_argnames="config")
def _logprobs(params: Params, config: Decoder, ids_bt: jax.Array, segments_bt: jax.Array) -> jax.Array:
    x_btd, _ = config.forward(params, ids_bt, jnp.arange(ids_bt.shape[1])[None], segments_bt)
    return token_logprobs(x_btd[:, :-1], config.head_kernel(params), ids_bt[:, 1:])[0][0]


def assert_labelled(choice: dict, world: World, by_version: Sequence[Params]) -> None:
    """Each span of a completion of `PROMPTS[0]` has the logprobs of the weights that it names; one span for each."""
    logprobs = np.asarray([one["logprob"] for one in choice["logprobs"]["content"]])
    tokens = [*PROMPTS[0], *choice["token_ids"]]
    wanted = [trainer_logprobs(params, world.model, tokens)[len(PROMPTS[0]) - 1 :] for params in by_version]
    for i, span in enumerate(choice["weight_versions"]):
        part = slice(span["start"], span["end"])
        # A request this long has up to 1e-4 of float32 noise without any sync; one label that is off by a token, or one
        # cache of the other weights, is off by more than 1.
        np.testing.assert_allclose(logprobs[part], wanted[i][part], atol=1e-3)
        assert np.median(np.abs(logprobs[part] - wanted[1 - i][part])) > 1


async def drawn_during(policy: VLLMSampler, params: Params, version: int) -> list[Completion]:
    """Completions of callers who ask again and again until an update is over; each caller's last began after it.

    However long the update takes to reach the servers, it falls into requests.
    """
    sampling, over = dataclasses.replace(GREEDY, max_tokens=100), asyncio.Event()

    async def call(place: int) -> list[Completion]:
        await asyncio.sleep(0.02 * place)  # in step, all might end just before the update falls in
        completions = []
        while not over.is_set():
            completions.append(await policy.generate(PROMPTS[0], sampling))
        return [*completions, await policy.generate(PROMPTS[0], sampling)]

    calls = asyncio.gather(*(call(place) for place in range(16)))
    await asyncio.sleep(0.4)
    try:
        await policy.load_weights(params, version)
    finally:
        over.set()
        by_caller = await calls
    assert {completions[-1].policy_version for completions in by_caller} == {version}
    return [completion for completions in by_caller for completion in completions]


async def assert_same(policy, params: Params, world: World, version: int, greedy: Sampling = GREEDY) -> None:
    """Greedy draws of the servers are the trainer's own, with its logprobs."""
    for prompt in PROMPTS:
        completion = await policy.generate(prompt, greedy)
        assert completion.policy_version == version and completion.finish == "length"
        tokens = [*prompt, *completion.token_ids]
        want = trainer_logprobs(params, world.model, tokens)[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logprobs, want, atol=1e-4)


def post(server: Server, path: str, body: dict, **headers: str) -> tuple[int, dict]:
    """With both keys, unless told otherwise."""
    sent = {"Authorization": f"Bearer {KEY}", "X-Astra-Sync-Key": SYNC_KEY, "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), sent)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
