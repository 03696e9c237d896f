"""Rollouts on real vLLM servers, and their weights' sync from the trainer's checkpoints."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import tensorstore as ts
from rollout_world import make_environment
from vllm_world import (
    CONTEXT,
    GREEDY,
    KEY,
    PROMPTS,
    Server,
    World,
    assert_same,
    drawn_during,
    model,
    post,
    require_vllm,
    said_in_vllm,
    serving,
    trainer_logprobs,
    weights,
)

from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.groups import GroupSampler
from astra_jax.grpo.step import grpo_optimizer, update_step
from astra_jax.models.layers.sizes import Yarn
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.rollout.sampler import Sampling
from astra_jax.rollout.vllm.publishing import Publisher
from astra_jax.rollout.vllm.sampler import PolicyError
from astra_jax.run.optimizers import initial_state
from sandbox import SandboxPool
from synthesis.core.reward import Reward

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("vllm")
    return {name: World.make(folder / name, tie=name == "tied") for name in ("untied", "tied")}


@pytest.fixture(scope="module")
def servers(worlds) -> Iterator[tuple[Server, ...]]:
    """Of the untied model; the second does not tell which weights drew a completion."""
    with serving(Server(worlds["untied"]), Server(worlds["untied"], scale_out=False)) as servers:
        yield servers


async def test_servers_follow_the_trainer(worlds, servers) -> None:
    """Of the tied model: `test_two_ranks_take_their_slices_of_what_is_read_once`."""
    world = worlds["untied"]
    async with world.policy(*servers) as policy:
        for version, seed in ((1, 1), (2, 2), (3, 1)):
            params = weights(world.model, seed)
            await policy.load_weights(params, version)
            await assert_same(policy, params, world, version)
        assert policy.stats.stale == policy.stats.failures == policy.stats.dropped == 0
        for server in policy.fleet.servers:
            assert server.sync_seconds.keys() == {"check", "read", "pause", "load", "resume"}


async def test_draws_are_the_same_in_both_ways_of_asking(worlds, servers) -> None:
    """`/v1/completions` of the second server draws what `/inference/v1/generate` of the first draws."""
    world = worlds["untied"]
    first, second = servers
    params = weights(world.model, 1)
    stop = Sampling(max_tokens=200, stop_ids=(7, 8, 9, 10, *range(20, 60)), seed=3, temperature=0.8)
    nucleus = Sampling(max_tokens=60, stop_ids=(), seed=4, temperature=1.2, top_p=0.7)
    drawn = []
    for server in (first, second):
        async with world.policy(server) as policy:
            await policy.load_weights(params, 1)
            await assert_same(policy, params, world, 1)
            drawn.append([await policy.generate(PROMPTS[1], one) for one in (stop, nucleus)])
            with pytest.raises(ValueError, match="maximum (model|context) length"):
                await policy.generate([1] * (CONTEXT + 1), GREEDY)
            assert policy.stats.stale == policy.stats.failures == 0
    for one, other in zip(*drawn, strict=True):
        assert one.token_ids == other.token_ids and one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-6)
    assert drawn[0][0].finish == "stop" and drawn[0][1].finish == "length"


async def test_what_a_sync_falls_into_is_drawn_again_where_nobody_says_which_weights_drew_it(worlds, servers) -> None:
    world, server = worlds["untied"], servers[1]
    old, new = weights(world.model, 1), weights(world.model, 2)
    async with world.policy(server, check_seconds=60.0) as policy:  # the request finds it, not a look
        await policy.load_weights(old, 1)
        completions = await drawn_during(policy, new, 2)
        assert {one.policy_version for one in completions} <= {1, 2}
        assert policy.stats.stale > 0 and policy.stats.dropped == 0
        for version, params in ((1, old), (2, new)):
            drawn = [one for one in completions if one.policy_version == version]
            assert len({tuple(one.token_ids) for one in drawn}) <= 1
            for completion in drawn[:1]:
                tokens = [*PROMPTS[0], *completion.token_ids]
                want = trainer_logprobs(params, world.model, tokens)[len(PROMPTS[0]) - 1 :]
                np.testing.assert_allclose(completion.logprobs, want, atol=1e-3)
        publisher = world.publisher()
        item = str(publisher.publish(old, 3))
        publisher.wait()
        assert post(server, "/v1/policy/sync", {"item": item, "version": "r1:3"})[0] == 200  # behind the policy's back
        policy.config = dataclasses.replace(policy.config, attempts=1)
        with pytest.raises(PolicyError, match="was sent 1 times.*weights r1:3 drew it, not r1:2"):
            await policy.generate(PROMPTS[0], GREEDY)
        assert policy.stats.dropped == 1


async def test_draws_are_reproducible_and_stop_where_they_are_told(worlds, servers) -> None:
    world = worlds["untied"]
    params = weights(world.model, 1)
    async with world.policy(*servers) as policy:
        await policy.load_weights(params, 1)
        sampling = Sampling(max_tokens=200, stop_ids=(7, 8, 9, 10, *range(20, 60)), seed=3, temperature=0.8)
        first = await policy.generate(PROMPTS[1], sampling, session="a")
        again = await policy.generate(PROMPTS[1], sampling, session="b")
        assert first == again and first.finish == "stop" and first.token_ids[-1] in sampling.stop_ids
        assert not set(first.token_ids[:-1]) & set(sampling.stop_ids)
        with pytest.raises(ValueError, match="maximum (model|context) length"):
            await policy.generate([1] * (CONTEXT + 1), GREEDY)


async def test_seeds_of_long_prompts_draw_the_same_alone_and_among_others(worlds, servers) -> None:
    """Prompts are read in parts where many come at once; the engine on CPUs died of a seed then."""
    world = worlds["untied"]
    prompts = [[(7 * i + j) % 500 + 20 for j in range(1_500)] for i in range(12)]
    sampling = [Sampling(max_tokens=3, stop_ids=(), seed=i, temperature=1.0) for i in range(12)]
    async with world.policy(servers[0], attempts=1) as policy:
        await policy.load_weights(weights(world.model, 1), 1)
        together = await asyncio.gather(*(policy.generate(*one) for one in zip(prompts, sampling, strict=True)))
        for i in (0, 7, 11):
            alone = await policy.generate(prompts[i], sampling[i])
            assert alone.token_ids == together[i].token_ids
        other = dataclasses.replace(sampling[0], seed=99)
        assert (await policy.generate(prompts[0], other)).token_ids != together[0].token_ids
        assert policy.stats.failures == policy.stats.dropped == 0


async def test_requests_in_flight_survive_a_sync_and_their_tokens_are_labelled(worlds, servers) -> None:
    """Where older weights may draw: what the sync falls into goes on, and each token's logprob is of those it names."""
    world = worlds["untied"]
    by_version = {1: weights(world.model, 1), 2: weights(world.model, 2)}
    async with world.policy(servers[0], max_off_policy_steps=1) as policy:
        await policy.load_weights(by_version[1], 1)
        completions = await drawn_during(policy, by_version[2], 2)
        assert policy.stats.stale == policy.stats.failures == policy.stats.dropped == 0
    spanning = [one for one in completions if len(set(one.versions)) > 1]
    assert len(spanning) == policy.stats.spanning > 0
    assert all(one.versions == sorted(one.versions) and len(one.token_ids) == 100 for one in completions)
    one = max(spanning, key=lambda one: min(one.versions.count(version) for version in by_version))
    for version, params in by_version.items():
        want = trainer_logprobs(params, world.model, [*PROMPTS[0], *one.token_ids])[len(PROMPTS[0]) - 1 :]
        off, drew = np.abs(np.asarray(one.logprobs) - want), np.asarray(one.versions) == version
        assert off[drew].max() < 1e-3 and np.median(off[~drew]) > 1


async def test_a_bad_checkpoint_is_refused_and_the_old_weights_go_on(worlds, servers) -> None:
    world, server = worlds["untied"], servers[0]
    bad = world.folder / "bad"
    params = weights(world.model, 1)
    async with world.policy(server) as policy:
        await policy.load_weights(params, 5)
        good = world.folder / "policy" / "5"

        def refused(item: Path, *words: str) -> None:
            status, answer = post(server, "/v1/policy/sync", {"item": str(item), "version": "r1:6"})
            assert status == 400 and all(word in answer["error"] for word in words), answer

        refused(bad / "nothing", "not there")
        unfinished = bad / "6.orbax-checkpoint-tmp"
        shutil.copytree(good, unfinished)
        refused(unfinished / "params", "still being written")
        uncommitted = bad / "7"
        shutil.copytree(good, uncommitted)
        (uncommitted / "_CHECKPOINT_METADATA").unlink()
        refused(uncommitted / "params", "_CHECKPOINT_METADATA", "not there")

        other = world.model.__class__(**{**vars(world.model), "d_ff": 96})
        foreign = Publisher(bad / "foreign", other, dtype="float32")
        item = foreign.publish(weights(other, 0), 1)
        foreign.close()
        refused(item, "model.layers.0.mlp.down_proj.weight", "[128, 96]", "[128, 256]")
        shallow = world.model.__class__(**{**vars(world.model), "n_layers": 2})
        partial = Publisher(bad / "partial", shallow, dtype="float32")
        item = partial.publish(weights(shallow, 0), 1)
        partial.close()
        refused(item, "tensor model.layers.2.", "is missing")
        tied = Publisher(bad / "tied", model(tie=True), dtype="float32")
        item = tied.publish(weights(model(tie=True), 0), 1)
        tied.close()
        refused(item, "lm_head.weight is missing")

        # Of other weights: what could be read of it is in the memory that the served ones were loaded from.
        others = Publisher(bad / "others", world.model, dtype="float32")
        corrupt = others.publish(weights(world.model, 2), 8).parent
        others.close()
        (data, *_) = sorted(Path(corrupt, "params").rglob("d/*"), key=lambda path: -path.stat().st_size)
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
        refused(corrupt / "params", "cannot be read")

        for body in (
            {},
            {"item": 3, "version": "r1:1"},
            {"item": "x", "version": 1},
            {"item": "x", "version": "1"},
            {"item": "x", "version": "r1:1", "z": 0},
        ):
            assert post(server, "/v1/policy/sync", body)[0] == 400
        await assert_same(policy, params, world, 5)
        assert policy.stats.stale == policy.stats.failures == 0


async def test_weights_out_of_the_trainers_memory_are_those_of_its_files_to_the_bit(worlds, servers) -> None:
    world, server = worlds["untied"], servers[0]
    params = weights(world.model, 3)

    def drawn() -> list[list[tuple[int, float]]]:
        return [greedy(server, prompt) for prompt in PROMPTS]

    async with world.policy(server) as policy:
        await policy.load_weights(params, 1)
        by_files = drawn()
    async with world.direct_policy(server) as (policy, publisher):
        await policy.load_weights(weights(world.model, 1), 2)
        assert all(one != other for one, other in zip(drawn(), by_files, strict=True))
        await policy.load_weights(params, 3)
        assert drawn() == by_files
        await policy.load_weights(params | {"embed_vd": 1.5 * params["embed_vd"]}, 4)  # the rest is there already
        assert drawn() != by_files
        await policy.load_weights(params, 5)
        assert drawn() == by_files
        await assert_same(policy, params, world, 5)
        item = publisher.publish(params, 6)
        publisher.wait()
        for label, said in (("r1:7", "weights r1:7 are not served"), ("r1:4", "weights r1:4 are not served")):
            status, answer = post(server, "/v1/policy/sync", {"item": item, "version": label})
            assert status == 400 and said in answer["error"], answer
    status, answer = post(server, "/v1/policy/sync", {"item": item, "version": "r1:6"})
    assert status == 400 and "cannot be reached" in answer["error"]  # the trainer has ended
    assert drawn() == by_files


async def test_who_may_sample_may_not_sync(worlds, servers, tmp_path) -> None:
    world, server = worlds["untied"], servers[0]
    params = weights(world.model, 1)
    async with world.policy(server) as policy:
        await policy.load_weights(params, 5)
        item = {"item": str(world.folder / "policy" / "5" / "params"), "version": "r1:6"}
        for headers, words in (
            ({"X_Astra_Sync_Key": KEY}, "another key than that of this server's ASTRA_SYNC_KEY_FILE"),
            ({"Origin": "http://evil.example"}, "pages of other sites"),
        ):
            status, answer = post(server, "/v1/policy/sync", item, **headers)
            assert status == 403 and words in answer["error"], answer
        assert post(server, "/v1/policy/sync", item, Content_Type="text/plain")[0] == 415
        assert post(server, "/v1/policy/sync", item, Authorization="Bearer no")[0] == 401
        request = urllib.request.Request(
            f"{server.url}/v1/policy/sync",
            json.dumps(item).encode(),
            {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as refused:  # as a trainer of the version before asks
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == 403 and "one that is older than this plugin" in refused.value.read().decode()
        shutil.copytree(world.folder / "policy", tmp_path / "policy")
        (world.folder / "link").symlink_to(tmp_path / "policy" / "5")
        for elsewhere in (tmp_path / "policy" / "5" / "params", world.folder / "link" / "params"):
            status, answer = post(server, "/v1/policy/sync", {"item": str(elsewhere), "version": "r1:6"})
            assert status == 403 and "is not below ASTRA_SYNC_ROOT" in answer["error"], answer
        for path in ("/pause", "/resume", "/update_weights", "/collective_rpc", "/init_weight_transfer_engine"):
            assert post(server, path, {})[0] == 404
        await assert_same(policy, params, world, 5)
    assert post(server, "/v1/policy/sync", {"item": "x", "version": "another:1"})[0] == 409
    with pytest.raises(PolicyError, match="is held by the run r1 for .* more seconds, and another is another"):
        async with world.policy(server, run_id="another"):
            pass
    with pytest.raises(PolicyError, match="takes weights from who shows the key of its ASTRA_SYNC_KEY_FILE"):
        async with world.policy(server, sync_key=None):
            pass
    with pytest.raises(PolicyError, match="answers 403: .*another key than that"):
        async with world.policy(server, sync_key="wrong"):
            pass


async def test_other_servers_are_refused_at_the_start(worlds, servers) -> None:
    untied = worlds["untied"]
    with pytest.raises(PolicyError, match="context of 2048 tokens, episodes may have 4000.*--max-model-len=4000"):
        async with untied.policy(servers[0], max_length=4000):
            pass
    other = World(untied.folder, untied.model.__class__(**{**vars(untied.model), "vocab_size": 700}), untied.tokenizer)
    with pytest.raises(PolicyError, match="whose vocab_size is 640, the policy's is 700; start it from the folder"):
        async with other.policy(servers[0]):
            pass
    for change, said in (
        ({"rope_theta": 100.0}, "rope_theta is 1000000.0, the policy's is 100.0"),
        ({"yarn": Yarn(2.0, 2048)}, r"yarn is None, the policy's is Yarn\(factor=2.0"),
    ):
        turned = World(untied.folder, dataclasses.replace(untied.model, **change), untied.tokenizer)
        with pytest.raises(PolicyError, match=f"serves a model whose {said}"):
            async with turned.policy(servers[0]):
                pass
    foreign = type(untied.tokenizer).train(["quite another text, " * 30], 500, untied.folder / "foreign")
    with pytest.raises(PolicyError, match="serves another tokenizer"):
        async with World(untied.folder, untied.model, foreign).policy(servers[0]):
            pass
    nowhere = Server(untied)
    with pytest.raises(PolicyError, match="no rollout server answers"):
        async with untied.policy(nowhere):
            pass
    async with untied.policy(servers[0]) as policy:
        with pytest.raises(PolicyError, match="no weights yet"):
            await policy.generate([1], GREEDY)


async def test_what_other_weights_drew_is_thrown_away(worlds, servers) -> None:
    world, server = worlds["untied"], servers[0]
    params = weights(world.model, 1)
    async with world.policy(server) as policy:
        await policy.load_weights(params, 1)
        publisher = world.publisher()
        item = str(publisher.publish(weights(world.model, 2), 2))
        publisher.wait()
        assert post(server, "/v1/policy/sync", {"item": item, "version": "r1:2"})[0] == 200  # behind the policy's back
        await policy.load_weights(params, 3)
        assert post(server, "/v1/policy/sync", {"item": item.replace("/2/", "/3/"), "version": "r1:99"})[0] == 200
        completion = await policy.generate(PROMPTS[0], GREEDY)
        assert completion.policy_version == 3
        # Either the completion tells, or a look at the server does, with the request in flight.
        assert policy.stats.stale + policy.stats.failures >= 1 and policy.stats.completions == 1
        assert policy.stats.dropped >= policy.stats.rejoined >= 1


async def test_a_killed_server_loses_nothing_and_comes_back_with_the_current_weights(worlds, servers) -> None:
    world = worlds["untied"]
    first, second = servers
    params = weights(world.model, 2)
    async with world.policy(first, second) as policy:
        await policy.load_weights(params, 1)
        sampling = Sampling(max_tokens=400, stop_ids=(), seed=0)
        calls = [policy.generate(PROMPTS[0], sampling, session=f"episode {i}") for i in range(24)]
        running = asyncio.gather(*calls)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(second.kill)
        completions = await running
        assert len(completions) == 24 and all(len(one.token_ids) == 400 for one in completions)
        assert policy.stats.failures > 0 and policy.stats.dropped == 1
        assert all(server.cache and server.cache >= CONTEXT for server in policy.fleet.servers)  # by their own metrics
        newer = weights(world.model, 3)
        await policy.load_weights(newer, 2)  # while one is away
        second.start()
        await asyncio.to_thread(second.wait)
        for _ in range(100):
            if policy.stats.rejoined:
                break
            await asyncio.sleep(0.3)
        assert policy.stats.rejoined == 1
        policy.fleet.router.close(first.url)  # so that the one that came back has to answer
        await assert_same(policy, newer, world, 2)


async def test_grpo_trains_on_what_the_servers_draw(worlds, servers) -> None:
    """Roll out, one update, sync, roll out again: the trainer finds the sampler's logprobs to be its own each time."""
    world = worlds["untied"]
    episode = EpisodeConfig(max_turns=2, max_prompt_tokens=1500, max_response_tokens=100, distractors_per_band=0)
    config = GRPOConfig(group_size=2, batch_size=1, learning_rate=1e-2, episode=episode, row_buckets=(2048,))
    params, opt_state = initial_state(weights(world.model, 4), grpo_optimizer(config))
    environments = [make_environment()]
    async with SandboxPool() as pool, world.policy(servers[0], max_length=1600) as policy:
        await policy.load_weights(params, 0)
        sampler = GroupSampler(policy, pool, environments, world.tokenizer, episode, group_size=2, seed=0)
        for update in (1, 2):
            group = await sampler()
            # A random model earns nothing, so that one of the two is declared the better.
            scored = [
                msgspec.structs.replace(
                    one, score=Reward(float(i), recall=1.0, precision=1.0, solved=0, needed=2, calls=0)
                )
                for i, one in enumerate(group.episodes)
            ]
            assert all(one.sampled_by == [update - 1] for one in scored)
            groups = [msgspec.structs.replace(group, episodes=scored)]
            params, opt_state, metrics = update_step(params, opt_state, groups, world.model, config)
            assert metrics["train/mismatch_abs"] < 1e-4 and metrics["train/trained_tokens"] > 0
            await policy.load_weights(params, update)
            await assert_same(policy, params, world, update)
        assert policy.stats.stale == 0


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank needs a CPU of its own")
async def test_two_ranks_take_their_slices_of_what_is_read_once(worlds) -> None:
    world = worlds["tied"]
    few = dataclasses.replace(GREEDY, max_tokens=10)  # ranks wait for each other in circles, six times a token
    with serving(Server(world, ranks=2)) as (server,):
        await follow(world, server, few)


async def follow(world: World, server: Server, greedy: Sampling) -> None:
    async with world.direct_policy(server) as (policy, _):
        params = weights(world.model, 3)
        await policy.load_weights(params, 0)
        await assert_same(policy, params, world, 0, greedy)
    async with world.policy(server) as policy:
        for version, seed in ((1, 1), (2, 2)):
            params = weights(world.model, seed)
            await policy.load_weights(params, version)
            await assert_same(policy, params, world, version, greedy)
        again = {"item": str(world.folder / "policy" / "2" / "params"), "version": "r1:2"}
        status, answer = await asyncio.to_thread(post, server, "/v1/policy/sync", again)
        size = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
        assert status == 200 and size <= answer["bytes"] <= 1.05 * size


async def test_in_bfloat16_a_sync_changes_no_bit_of_what_a_server_would_draw_without_it(worlds) -> None:
    """A server that starts from weights takes others over, and then its own again."""
    world = worlds["tied"]
    publisher = Publisher(world.folder / "bfloat16", world.model)
    with serving(Server(world, dummy=False, dtype="bfloat16")) as (server,):

        def sync(seed: int, version: int) -> None:
            item = str(publisher.publish(weights(world.model, seed), version))
            publisher.wait()
            assert post(server, "/v1/policy/sync", {"item": item, "version": f"r1:{version}"})[0] == 200

        started = [greedy(server, prompt) for prompt in PROMPTS]
        assert started == [greedy(server, prompt) for prompt in PROMPTS]
        sync(1, 1)
        assert all(one != greedy(server, prompt) for one, prompt in zip(started, PROMPTS, strict=True))
        sync(0, 2)
        assert started == [greedy(server, prompt) for prompt in PROMPTS]
    publisher.close()


def greedy(server: Server, prompt: list[int]) -> list[tuple[int, float]]:
    """Tokens and their logprobs."""
    parameters = {"max_tokens": 40, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    status, answer = post(server, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": parameters})
    assert status == 200
    choice = answer["choices"][0]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    return list(zip(choice["token_ids"], logprobs, strict=True))


async def test_a_server_on_tpus_that_lacks_our_worker_does_not_start(worlds) -> None:
    script = f"""
import asyncio
from types import SimpleNamespace
import vllm.platforms
from transformers import AutoConfig
from vllm.platforms.interface import PlatformEnum
class TPU(type(vllm.platforms.current_platform)):
    _enum = PlatformEnum.TPU
vllm.platforms.current_platform = TPU()
from astra_vllm.endpoint import PolicyEndpoint
args = SimpleNamespace(api_key=None, host="127.0.0.1", uds=None)
engine = SimpleNamespace(
    model_config=SimpleNamespace(hf_config=AutoConfig.from_pretrained({str(worlds["untied"].folder / "serve")!r})),
    vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls="")),
)
asyncio.run(PolicyEndpoint().init_state(engine, None, args))
"""
    said = await asyncio.to_thread(said_in_vllm, script, worlds["untied"].folder)
    assert "Error" in said and "--worker-extension-cls astra_vllm.tpu.PolicyWorker (it has none)" in said


async def test_published_weights_are_hugging_faces(worlds, tmp_path) -> None:
    """What is stored is what `load_hf` would read, and no chunk is compressed or large."""
    world = worlds["untied"]
    publisher = Publisher(tmp_path, world.model)
    params = weights(world.model, 0)
    item = publisher.publish(params, 1)
    publisher.publish(params, 2)
    publisher.publish(params, 3)
    publisher.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["2", "3"] and not item.exists()
    store = {"driver": "ocdbt", "base": f"file://{tmp_path}/3/params/", "path": "model.layers.{}.mlp.up_proj.weight/"}
    array = ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()
    assert array.spec().to_json()["metadata"]["compressor"] is None
    ours = params["layers"]["mlp"]["up_df"].transpose(0, 2, 1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(array.read().result()), np.asarray(ours))
    assert jax.tree.leaves(params)[0].dtype == jnp.float32  # not donated
