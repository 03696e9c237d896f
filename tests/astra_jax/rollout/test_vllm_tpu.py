"""Rollouts on vLLM's TPU servers (tpu-inference 0.32).

The servers run on JAX's CPU devices (`tpu_on_cpu.py` says what differs), from an environment that ASTRA_TPU_INFERENCE
names by its python:

    python3.12 -m venv DIR && DIR/bin/pip install vllm-tpu==0.32.0 tensorstore ./astra_jax/rollout/vllm/plugin

Without it the tests of the API process's side are left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from vllm_world import (
    PLUGIN,
    PROMPTS,
    ROOT,
    Server,
    World,
    assert_labelled,
    assert_same,
    generated_tokens,
    model,
    post,
    serving,
    sync_settings,
    weights,
)

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.rollout.vllm.publishing import Publisher

WORLDS = ROOT / "tests" / "worlds"
sys.path.insert(0, str(PLUGIN))  # a distribution of its own, which this environment does not have

from astra_vllm.digest import digest, hashed  # noqa: E402
from astra_vllm.handover import WORKER, WorkerExtension  # noqa: E402
from astra_vllm.memory import SharedMemory, mapped, tensors  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")
PYTHON = os.environ.get("ASTRA_TPU_INFERENCE", "")
CHIPS = 2


# -------------------------------------------------------------------------------------------- the API process's side


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
async def test_a_digest_is_of_the_values_wherever_they_lie(dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    x = torch.randn(600, 700, generator=torch.Generator().manual_seed(0)).to(torch_dtype)
    x[0] = -x[0].abs()
    assert 0 < digest(x) < 2**32
    assert digest(x.T.reshape(20, -1, 30).contiguous()) == digest(x)
    assert digest(torch.nn.functional.pad(x, (0, 3, 0, 5))) == digest(x)
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32).numpy()
    in_jax = hashed(jnp.asarray(bits.view(f"uint{8 * bits.itemsize}")).T.astype(jnp.uint32)).sum(dtype=jnp.uint32)
    assert int(in_jax) == digest(x)
    others = {digest(x)}
    for place in ((0, 0), (599, 699), (300, 11)):
        near = x.clone()
        near[place] = torch.nextafter(near[place].float(), torch.tensor(9.0)).to(torch_dtype) + near[place] / 100
        others.add(digest(near))
    swapped = x.clone()  # the same sum of values
    swapped[1, 1], swapped[1, 2] = x[1, 1] + 1, x[1, 2] - 1
    assert len(others | {digest(swapped)}) == 5
    assert digest(torch.zeros(1000, dtype=torch_dtype)) == 0


SHAPES = {"model.embed_tokens.weight": (10, 8), "model.layers.0.mlp.up_proj.weight": (16, 8), "model.norm.weight": (8,)}


class Engine:
    """What the API process sees of a server whose worker holds torch tensors, transposed and filled up with zeros."""

    version = "default"

    def __init__(self, *, extension: str = WORKER, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        parallel = SimpleNamespace(worker_extension_cls=extension)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.served = {name: torch.ones(shape[::-1], dtype=torch.bfloat16) for name, shape in shapes.items()}
        embedded = self.served["model.embed_tokens.weight"]
        self.served["model.embed_tokens.weight"] = torch.nn.functional.pad(embedded, (0, 2))

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        return [getattr(self, method)(*args)]

    def policy_parameters(self) -> dict:
        return {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in self.served.items()}

    def load_policy(self, path: str, places: list) -> dict[str, int] | None:
        for name, tensor in tensors(mapped(path), places):
            if name in self.served:
                filled = self.served[name].shape[-1] - tensor.shape[0]
                self.served[name] = torch.nn.functional.pad(
                    tensor.bfloat16().mT if tensor.ndim > 1 else tensor.bfloat16(), (0, filled)
                )
        return {name: digest(x) for name, x in self.served.items()}

    async def update_weight_version(self, version: str) -> None:
        self.version = version


class LoadsNothing(Engine):
    def load_policy(self, path: str, places: list) -> dict[str, int] | None:
        return super().load_policy(path, [])


class SaysNothing(Engine):
    def load_policy(self, path: str, places: list) -> dict[str, int] | None:
        super().load_policy(path, places)
        return None


class LeavesOneOut(Engine):
    def load_policy(self, path: str, places: list) -> dict[str, int] | None:
        return super().load_policy(path, places[:-1])


class Truncates(Engine):
    def load_policy(self, path: str, places: list) -> dict[str, int] | None:
        super().load_policy(path, places)
        self.served["model.norm.weight"][-1] = 0
        return super().load_policy(path, [])


class SecondRankLags(Engine):
    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        (before,) = await super().collective_rpc(method, (args[0], [])) if args else (None,)
        (now,) = await super().collective_rpc(method, args)
        return [now, before]


def read(seed: int) -> tuple[SharedMemory, list]:
    """Tensors of a checkpoint in float32, a tied head among them, as the API process has read them."""
    places, start = [], 0
    for name, shape in (SHAPES | {"lm_head.weight": (10, 8)}).items():
        places.append((name, shape, "float32", start))
        start += 4 * int(np.prod(shape))
    memory = SharedMemory(start)
    draws = torch.Generator().manual_seed(seed)
    for _, tensor in tensors(memory.view, places):
        tensor.copy_(torch.randn(tensor.shape, generator=draws))
    return memory, sorted(places)


async def test_a_version_is_served_under_its_name_when_the_worker_has_all_of_it() -> None:
    engine = Engine()
    handover = await WorkerExtension.of(engine, SHAPES)
    for version in ("1", "2"):
        memory, places = read(int(version))
        handover.prepare(memory, places)
        await handover.load(memory, places, version)
        assert engine.version == version


@pytest.mark.parametrize("kind", [LoadsNothing, SaysNothing, LeavesOneOut, Truncates, SecondRankLags])
async def test_what_was_not_taken_over_whole_never_gets_the_versions_name(kind: type[Engine]) -> None:
    engine = kind()
    handover = await WorkerExtension.of(engine, SHAPES)
    memory, places = read(1)
    handover.prepare(memory, places)
    with pytest.raises(RuntimeError, match="does not serve what was read: model.*differs"):
        await handover.load(memory, places, "1")
    assert engine.version == "default"


class Quantised(Engine):
    def policy_parameters(self) -> dict:
        raise ValueError("weights are not synced with quantization")


@pytest.mark.parametrize(
    "engine,shapes,message",
    [
        (Engine(extension=""), SHAPES, f"--worker-extension-cls {WORKER}.*it has none"),
        (Engine(extension="other.Worker"), SHAPES, f"--worker-extension-cls {WORKER}.*it has other.Worker"),
        (Quantised(), SHAPES, "cannot be synced: weights are not synced with quantization"),
        (Engine(), SHAPES | {"lm_head.weight": (10, 8)}, "lm_head.weight is not both"),
        (
            Engine(),
            SHAPES | {"model.norm.weight": (4,)},
            r"model.norm.weight is served as \[8\].*have \[4\].*filled up",
        ),
    ],
)
async def test_servers_that_cannot_be_synced_do_not_start(engine: Engine, shapes, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        await WorkerExtension.of(engine, shapes)
    assert engine.version == "default"


# ------------------------------------------------------------------------------------------- real servers and workers


def real(test):
    """It takes minutes, and an environment with tpu-inference."""
    reason = "needs tpu-inference: ASTRA_TPU_INFERENCE=DIR/bin/python, see this file"
    return pytest.mark.slow(pytest.mark.skipif(not PYTHON, reason=reason)(test))


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Of a process in which tpu-inference runs on CPU devices; the plugin is this checkout's."""
    folder = tmp_path_factory.mktemp("plugin")
    info = folder / "tpu_on_cpu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tpu-on-cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ntpu_on_cpu = tpu_on_cpu:register\n")
    paths = [PLUGIN, WORLDS, folder]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={CHIPS}",
        "SKIP_JAX_PRECOMPILE": "1",
        "VLLM_PLUGINS": "astra_sync,tpu_on_cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class TPUServer(Server):
    """`vllm serve` of tpu-inference.

    Args:
        chips: CPU devices.
        worker: its `--worker-extension-cls`.
    """

    def __init__(
        self, world: World, environment: dict[str, str], *, chips: int = 1, worker: str = WORKER, **more
    ) -> None:
        arguments = (f"--worker-extension-cls={worker}", "--max-num-seqs=8", "--max-num-batched-tokens=256")
        super().__init__(world, plugin=False, ranks=chips, arguments=arguments, forked=False, **more)
        self._command[0] = str(Path(PYTHON).with_name("vllm"))
        self._environment = environment | {"JAX_LOG_COMPILES": "1"} | sync_settings(world.folder)

    def wait(self, seconds: float = 900) -> None:
        """See `Server.wait`; three processes import torch, JAX and vLLM one after the other."""
        super().wait(seconds)

    def compiled(self) -> int:
        """Programs so far."""
        return len(re.findall("Finished XLA compilation", self.log.read_text()))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("vllm")
    return {name: World.make(folder / name, tie=name == "tied", head_dim=128) for name in ("untied", "tied")}


@pytest.fixture(scope="module")
def servers(worlds, environment) -> Iterator[dict[str, TPUServer]]:
    untied, tied = TPUServer(worlds["untied"], environment), TPUServer(worlds["tied"], environment, chips=CHIPS)
    with serving(untied, tied):
        yield {"untied": untied, "tied": tied}


@real
@pytest.mark.parametrize("kind", ["untied", "tied"])
async def test_servers_follow_the_trainer_and_compile_nothing_again(worlds, servers, kind: str) -> None:
    world, server = worlds[kind], servers[kind]
    async with world.policy(server) as policy:
        for version, seed in ((1, 1), (2, 2), (3, 1)):
            params = weights(world.model, seed)
            before = server.compiled()
            await policy.load_weights(params, version)
            await assert_same(policy, params, world, version)
            if version == 3:
                assert server.compiled() == before > 0
        assert policy.stats.stale == policy.stats.failures == policy.stats.dropped == 0


@real
async def test_a_sync_falls_into_requests_and_their_tokens_are_labelled(worlds, servers) -> None:
    """Requests are kept over a sync, and their caches are made anew: each span of tokens is of the weights it names."""
    world, server = worlds["untied"], servers["untied"]
    old, new = weights(world.model, 1), weights(world.model, 2)
    publisher = world.publisher()
    items = {}
    for version, params in ((1, old), (2, new)):
        items[version] = str(publisher.publish(params, version))
        publisher.wait()
    assert post(server, "/v1/policy/sync", {"item": items[1], "version": "r1:1"})[0] == 200
    parameters = {"max_tokens": 400, "temperature": 0.0, "logprobs": 1, "ignore_eos": True}
    body = {"token_ids": PROMPTS[0], "sampling_params": parameters}
    before = generated_tokens(server)
    calls = [asyncio.ensure_future(asyncio.to_thread(post, server, "/inference/v1/generate", body)) for _ in range(3)]
    while await asyncio.to_thread(generated_tokens, server) < before + 20:
        assert not any(call.done() for call in calls)
        await asyncio.sleep(0.05)
    status, _ = await asyncio.to_thread(post, server, "/v1/policy/sync", {"item": items[2], "version": "r1:2"})
    assert status == 200
    for status, answer in await asyncio.gather(*calls):
        choice = answer["choices"][0]
        spans = choice["weight_versions"]
        assert status == 200 and [span["version"] for span in spans] == ["r1:1", "r1:2"] and spans[1]["end"] == 400
        assert_labelled(choice, world, (old, new))


@real
async def test_a_foreign_checkpoint_is_refused_and_the_old_weights_go_on(worlds, servers) -> None:
    world, server = worlds["untied"], servers["untied"]
    params = weights(world.model, 1)
    async with world.policy(server) as policy:
        await policy.load_weights(params, 5)
        other = dataclasses.replace(world.model, d_ff=384)
        foreign = Publisher(world.folder / "foreign", other, dtype="float32")
        item = foreign.publish(weights(other, 0), 1)
        foreign.close()
        status, answer = post(server, "/v1/policy/sync", {"item": str(item), "version": "r1:6"})
        assert status == 400 and "model.layers.0.mlp.down_proj.weight" in answer["error"]
        await assert_same(policy, params, world, 5)


@real
@pytest.mark.parametrize("kind,chips", [("untied", 1), ("tied", 2)])
async def test_what_is_served_after_a_sync_is_to_the_bit_what_a_start_would_load(
    tmp_path, environment, kind: str, chips: int
) -> None:
    """In bfloat16, with a vocabulary that two chips do not share evenly."""
    config = dataclasses.replace(model(kind == "tied", head_dim=128), vocab_size=641)
    for seed in (0, 1):
        stored = dataclasses.replace(config, param_dtype="bfloat16")
        save_hf(jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights(config, seed)), stored, tmp_path / str(seed))
    program = WORLDS / "tpu_arrays.py"
    command = [PYTHON, str(program), str(tmp_path / "0"), str(tmp_path / "1"), str(chips)]
    inside = {**os.environ, **environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "tpu_on_cpu"}
    ended = await asyncio.to_thread(subprocess.run, command, env=inside, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads([line for line in ended.stdout.splitlines() if line.startswith("{")][-1])
    assert found["compiled_by_drawing"] == [] and found["parameters"] == 11 * config.n_layers + (
        2 if kind == "tied" else 3
    )


@real
async def test_a_server_without_the_extension_does_not_start(worlds, environment) -> None:
    server = TPUServer(worlds["untied"], environment, worker="")
    try:
        server.start()
        with pytest.raises(AssertionError, match=f"start the server with --worker-extension-cls {WORKER}"):
            server.wait()
    finally:
        server.kill()
