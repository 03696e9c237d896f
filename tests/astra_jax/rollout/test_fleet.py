"""Rollout servers that come, go, hang and answer oddly: nothing is lost, nobody waits for them for ever."""

from __future__ import annotations

import asyncio
import logging

import jax
import pytest
from emulated_rollouts import EmulatedServer, Lease, emulated, policy_on, spans, until
from metrics_page import undocumented
from rollout_world import ScriptedSampler, call, make_environment, tiny_model

from astra_jax.grpo import train as grpo
from astra_jax.grpo.config import GRPOConfig
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.rollout.sampler import Sampling
from astra_jax.rollout.vllm.sampler import PolicyError, VLLMSampler
from astra_jax.rollout.vllm.server import RolloutServer

SAMPLING = Sampling(max_tokens=2, stop_ids=(), seed=0)


@pytest.fixture(scope="module")
def model():
    return tiny_model(640, 4096)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


@pytest.fixture
def policy(model, tmp_path):
    return lambda servers, **config: policy_on(servers, model, tmp_path, **config)


async def draw(policy: VLLMSampler, count: int) -> list[int]:
    """The versions of so many completions, asked for at once."""
    calls = (policy.generate([1, 2], SAMPLING, session=f"episode {i}") for i in range(count))
    return [one.policy_version for one in await asyncio.gather(*calls)]


@pytest.mark.parametrize("turns", range(6))
async def test_no_request_begins_in_a_sync_that_follows_another_at_once(turns: int) -> None:
    """Its first tokens would be of weights that are given up, under the name of those that come."""
    server, began_settled = RolloutServer("http://127.0.0.1:1"), []
    server.take_in()

    async def request() -> None:
        async with server.asking():
            began_settled.append(server.settled.is_set())

    server.settled.clear()
    waiting = asyncio.create_task(request())
    await asyncio.sleep(0.01)
    server.settled.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    server.settled.clear()
    await asyncio.sleep(0.01)
    server.settled.set()
    await waiting
    assert began_settled == [True]


def hang(server: EmulatedServer) -> None:
    server.hangs.clear()


@pytest.mark.parametrize("how", ["silent", "stands"])
async def test_what_is_in_flight_at_a_server_that_hangs_is_drawn_elsewhere(policy, params, how) -> None:
    """It answers no look any more; or it does, but draws no token."""
    async with emulated(2) as (first, second), policy([first, second], stall_seconds=0.5) as opened:
        await opened.load_weights(params, 1)
        hang(first)
        running = asyncio.create_task(draw(opened, 6))
        await until(lambda: first.asked and second.asked)
        setattr(first, how, True)
        async with asyncio.timeout(30):
            assert await running == [1] * 6
        assert opened.stats.completions == 6 and opened.stats.failures == first.asked == 3
        assert first.syncs == second.syncs == ["r1:1"]
        first.silent = first.stands = False
        first.hangs.set()
        await until(lambda: opened.fleet.serving == opened.fleet.servers)
        assert first.syncs == ["r1:1"]  # it had the current weights all the time
        assert opened.stats.rejoined >= 1


async def test_a_server_whose_engine_hangs_is_taken_back_once_it_draws(policy, params) -> None:
    """Its API answers all the while, and it would be the emptiest."""
    async with emulated(2) as (first, second), policy([first, second], stall_seconds=0.5) as opened:
        await opened.load_weights(params, 1)
        hang(first)
        first.stands = True
        assert await draw(opened, 6) == [1] * 6
        (out,) = (server for server in opened.fleet.servers if server.url == first.url)
        asked = first.asked
        await until(lambda: first.tries > 2)
        assert not out.serving and "it draws no token" in out.reason
        await opened.load_weights(params, 2)  # which it takes over, as its process is there
        await until(lambda: first.syncs[-1] == "r1:2" and out.sync is None)
        tried = first.tries
        await until(lambda: first.tries > tried + 1)
        assert not out.serving and await draw(opened, 6) == [2] * 6
        assert first.asked == asked and (out.counts.dropped, out.counts.rejoined) == (1, 0)
        first.stands = False
        first.hangs.set()
        await until(lambda: out.serving)
        assert out.counts.rejoined == 1 and first.syncs == ["r1:1", "r1:2"]
        tried = first.tries
        newcomers = (opened.generate([1, 2], SAMPLING, session=f"later {i}") for i in range(6))
        assert [one.policy_version for one in await asyncio.gather(*newcomers)] == [2] * 6
        assert first.asked > asked and first.tries == tried


async def test_one_failed_request_is_no_reason_for_a_sync(policy, params) -> None:
    async with emulated(1) as (server,), policy([server]) as opened:
        await opened.load_weights(params, 1)
        server.answers = [503]
        assert await draw(opened, 1) == [1]
        assert server.syncs == ["r1:1"] and opened.stats.failures == 1 and opened.stats.dropped == 0


@pytest.mark.parametrize(
    "max_off_policy_steps, updates, versions, stale",
    [(0, [2], [2, 2], 1), (1, [2], [1, 2], 0), (1, [2, 3], [3, 3], 1), (2, [2, 3], [1, 3], 0)],
)
async def test_an_update_falls_into_a_completion(
    policy, params, max_off_policy_steps, updates, versions, stale
) -> None:
    """It counts by its spans, or is drawn again where its first tokens are too old."""
    async with emulated(1) as (server,), policy([server], max_off_policy_steps=max_off_policy_steps) as opened:
        await opened.load_weights(params, 1)
        hang(server)
        running = asyncio.create_task(opened.generate([1, 2], SAMPLING, session="episode"))
        await until(lambda: server.asked)
        for version in updates:
            await opened.load_weights(params, version)
        server.hangs.set()
        completion = await running
        assert completion.versions == versions and completion.token_ids == [5, 6]
        assert (opened.stats.stale, opened.stats.spanning) == (stale, 1 - stale) and opened.stats.dropped == 0


async def test_weights_of_another_process_are_never_a_span_of_ours(policy, params) -> None:
    async with emulated(1) as (server,), policy([server], max_off_policy_steps=5) as opened:
        await opened.load_weights(params, 3)
        for label in ("r2:3", "r1:2", "r1:3, unchecked", "none"):
            server.answers = [{"weight_versions": spans(["r1:3", label])}]
            assert (await opened.generate([1, 2], SAMPLING)).versions == [3, 3]
        assert opened.stats.stale == 4 and opened.stats.spanning == 0


ODD = {
    "an error with status 200": b'{"error": "engine is dead"}',
    "no object": b"[1, 2]",
    "no JSON": b"<html>",
    "nested without end": b"[" * 100_000,
    "bytes that are no text": b'{"choices": "\xff\xfe"}',
    "no choice": b'{"choices": []}',
    "no logprobs": {"logprobs": None},
    "a logprob that is nothing": {"logprobs": {"content": [{"logprob": None}, {"logprob": -1.0}]}},
    "one logprob for two tokens": {"logprobs": {"content": [{"logprob": -1.0}]}},
    "no tokens": {"token_ids": None},
    "versions that are none": {"weight_versions": [None]},
    "versions of other tokens": {"weight_versions": [{"version": "r1:1", "start": 1, "end": 2}]},
    "versions of too few tokens": {"weight_versions": [{"version": "r1:1", "start": 0, "end": 1}]},
    "abort": {"finish_reason": "abort"},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
async def test_an_odd_answer_is_an_attempt_that_failed(policy, params, odd) -> None:
    async with emulated(1) as (server,), policy([server]) as opened:
        await opened.load_weights(params, 1)
        server.answers = [odd]
        assert await draw(opened, 1) == [1]
        assert opened.stats.failures == 1 and opened.stats.completions == 1


async def test_the_lookout_survives_what_a_server_says_of_itself(policy, params) -> None:
    async with emulated(2) as (first, second), policy([first, second]) as opened:
        await opened.load_weights(params, 1)
        for odd in ({"version": None}, {"version": {"a": []}}, {"max_model_len": "many", "version": "9"}):
            first.described = odd
            await until(lambda: not opened.fleet.servers[0].serving)
            looks = first.looks
            await until(lambda looks=looks: first.looks > looks + 3)  # it is looked at all the time
            first.described = {}
            await until(lambda: opened.fleet.servers[0].serving)
        assert await draw(opened, 4) == [1] * 4


async def test_an_update_does_not_wait_for_one_that_hangs(policy, params) -> None:
    async with emulated(3) as servers, policy(servers, min_servers=2) as opened:
        await opened.load_weights(params, 1)
        servers[0].sync_hangs.clear()
        async with asyncio.timeout(20):
            await opened.load_weights(params, 2)
            assert await draw(opened, 6) == [2] * 6
            await opened.load_weights(params, 3)  # while its sync to 2 hangs
            assert await draw(opened, 6) == [3] * 6
        assert servers[0].syncs == ["r1:1", "r1:2"] and servers[0].asked == 0
        servers[0].sync_hangs.set()
        await until(lambda: len(opened.fleet.serving) == 3)
        assert servers[0].syncs == ["r1:1", "r1:2", "r1:3"]


async def test_a_sync_that_fails_everywhere_is_tried_again(policy, params) -> None:
    async with emulated(2) as servers, policy(servers) as opened:
        await opened.load_weights(params, 1)
        for server in servers:
            server.sync_status = 500
        update = asyncio.create_task(opened.load_weights(params, 2))
        await until(lambda: all(len(server.syncs) > 2 for server in servers))
        assert not update.done()
        servers[1].sync_status = 200
        await update
        assert await draw(opened, 2) == [2, 2]


async def test_patience_ends_with_every_reason(policy, params) -> None:
    async with emulated(2) as servers, policy(servers, patience_seconds=0.3) as opened:
        await opened.load_weights(params, 1)
        for server in servers:
            server.sync_status = 500
        with pytest.raises(PolicyError, match="took version 2 over") as error:
            await opened.load_weights(params, 2)
        assert all(server.url in str(error.value) for server in servers) and "a full disk" in str(error.value)


async def test_why_a_server_is_out_is_still_told_while_it_is_tried_again(policy, params) -> None:
    """Its next sync was under way as an update ended, and the reason became that it was not done yet."""
    async with emulated(2) as (first, second), policy([first, second]) as opened:
        await opened.load_weights(params, 1)
        second.sync_status = 500
        await opened.load_weights(params, 2)
        (out,) = (server for server in opened.fleet.servers if server.url == second.url)
        await until(lambda: "a full disk" in out.reason)
        second.sync_hangs.clear()
        tried = len(second.syncs)
        await until(lambda: len(second.syncs) > tried)
        await opened.load_weights(params, 3)
        assert out.sync is not None and "a full disk" in out.reason
        second.sync_status = 200
        second.sync_hangs.set()
        await until(lambda: out.serving and second.version == "r1:3")


async def test_the_first_sync_tells_at_once_how_servers_were_started(policy, params) -> None:
    async with emulated(1) as (server,), policy([server], patience_seconds=3600.0) as opened:
        server.sync_status = 400
        with pytest.raises(PolicyError, match="took version 1 over.*a full disk"):
            await opened.load_weights(params, 1)


async def test_a_start_without_one_of_several(policy, params, caplog) -> None:
    """It comes later; but one that is there and is another's ends the start."""
    async with emulated(2) as (first, second):
        port = int(second.url.rpartition(":")[2])
        await second.stop()
        with pytest.raises(PolicyError, match="1 of 2 rollout servers are there, min_servers is 2.*no rollout server"):
            async with policy([first, second], min_servers=2):
                pass
        with caplog.at_level(logging.WARNING):
            async with policy([first, second]) as opened:
                await opened.load_weights(params, 1)
                assert await draw(opened, 3) == [1] * 3
                await until(lambda: sum(second.url in line for line in caplog.messages))
                told = sum(second.url in line for line in caplog.messages)
                await asyncio.sleep(0.3)  # six more looks
                assert sum(second.url in line for line in caplog.messages) <= told + 1
                await second.start(port)
                await until(lambda: opened.stats.rejoined == 1)
                row = opened.fleet.rows()[second.url]
                assert row["serving"] == 1 and row["rejoined"] == 1 and row["sync_read_seconds"] == 0.5
        first.described = {"vocab_size": 700}
        with pytest.raises(PolicyError, match="vocab_size is 700, the policy's is 640"):
            async with policy([first, second]):
                pass


async def test_a_second_trainer_is_refused_by_name(policy, params) -> None:
    """It came to its own update 1 and trained on the other's weights of update 1."""
    async with emulated(1) as (server,), policy([server]) as first:
        await first.load_weights(params, 1)
        with pytest.raises(PolicyError, match="is held by the run r1 for .*, and r2 is another: give this run servers"):
            async with policy([server], run_id="r2"):
                pass
        async with policy([server]) as successor:  # of the same run: the first one was preempted
            await successor.load_weights(params, 1)
            assert await draw(successor, 1) == [1] and server.syncs == ["r1:1", "r1:1"]


async def test_another_run_takes_over_when_the_lease_has_run_out(policy, params) -> None:
    """Looks renew it, before the first weights as well; whose run it no longer is draws nothing that counts."""
    short = {"lease_seconds": 0.5}
    async with emulated(1) as (server,):
        async with policy([server], **short) as first:
            await asyncio.sleep(0.8)
            with pytest.raises(PolicyError, match="is held by the run r1"):
                async with policy([server], run_id="r2"):
                    pass
            await first.load_weights(params, 1)
        await until(lambda: server.lease.state is None)
        async with policy([server], run_id="r2", patience_seconds=0.5) as second:
            await second.load_weights(params, 1)
            assert server.version == "r2:1" and await draw(second, 1) == [1]
            server.lease, server.version = Lease(), "r3:1"  # it was away, and another run has had it since
            server.lease.take("r3", 60.0)
            with pytest.raises(PolicyError, match="no rollout server was there.*held by the run r3"):
                await draw(second, 1)


async def test_weights_of_the_same_name_by_a_process_before_are_not_taken_for_its_own(policy, params) -> None:
    """A preempted run comes to its update 2 again, with other weights, while a server has been away since."""
    async with emulated(2) as (here, away):
        async with policy([here, away]) as first:
            await first.load_weights(params, 2)
        await away.stop()
        async with policy([here, away]) as successor:
            await successor.load_weights(params, 2)
            await away.start(int(away.url.rpartition(":")[2]))
            await until(lambda: len(successor.fleet.serving) == 2)
            assert away.syncs == ["r1:2", "r1:2"]


PATIENT = {"answer_seconds": 20.0}  # nothing is silent here, and a busy machine may be slow
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 2048}
OTHER_MODELS = {
    "another RoPE": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}, "rope_theta is 5000.0, .* 1000"),
    "a stretched context": ({"rope_scaling": YARN, "rope_parameters": YARN}, r"yarn is Yarn\(factor=2.0.* is None"),
    "wider heads": ({"head_dim": 64}, "head_dim is 64, the policy's is "),
    "other heads": ({"num_key_value_heads": 2}, "n_kv_heads is 2, the policy's is 1"),
    "another epsilon": ({"rms_norm_eps": 1e-5}, "rms_eps is 1e-05, the policy's is 1e-06"),
    "an own head": ({"tie_word_embeddings": False}, "tie_embeddings is False, the policy's is True"),
    "another family": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "family is llama, the policy's is qwen3",
    ),
    "what is not computed": ({"hidden_act": "gelu"}, "not trained here: hidden_act is 'gelu'"),
}


@pytest.mark.parametrize("change, said", OTHER_MODELS.values(), ids=OTHER_MODELS.keys())
async def test_a_server_of_another_model_is_refused_by_the_name_of_the_field(policy, change, said) -> None:
    async with emulated(1) as (server,):
        server.config |= change
        with pytest.raises(PolicyError, match=f"{server.url} serves a model .*{said}.*--write_serving_folder=DIR"):
            async with policy([server], **PATIENT):
                pass


async def test_a_server_that_computes_or_samples_otherwise_is_refused(policy) -> None:
    async with emulated(1) as (server,):
        for described, said in (
            ({"dtype": "bfloat16"}, "serves in bfloat16, the weights are published in float32: .*--dtype=float32"),
            ({"sampling": {"max_tokens": 512}}, "has max_new_tokens 512 in its generation_config.json, episodes may"),
            ({"vocabulary": "abc"}, "vocabulary abc, the policy's is "),
        ):
            server.described = described
            with pytest.raises(PolicyError, match=said):
                async with policy([server], **PATIENT):
                    pass
        server.described = {"sampling": {"top_k": 20, "max_tokens": 4096}}
        async with policy([server], **PATIENT):
            pass


async def test_requests_say_all_that_a_generation_config_could(policy, params) -> None:
    async with emulated(1) as (server,), policy([server], **PATIENT) as opened:
        await opened.load_weights(params, 1)
        await draw(opened, 1)
        asked = server.bodies[-1]["sampling_params"]
        assert (asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (0, 0.0, 1.0)
        assert asked["presence_penalty"] == asked["frequency_penalty"] == 0.0 and "seed" in asked
        server.answers = [{"token_ids": [5], "logprobs": {"content": [{"logprob": -1.0}]}}]  # of two, and no stop
        assert await draw(opened, 1) == [1] and opened.stats.failures == 1


async def test_metrics_have_a_row_for_each_server(policy, params) -> None:
    async with emulated(2) as servers, policy(servers) as opened:
        await opened.load_weights(params, 1)
        await draw(opened, 5)
        found = opened.metrics()
        assert not undocumented([found])
        places = [server.url.removeprefix("http://") for server in servers]
        assert sum(found[f"servers/{place}/completions"] for place in places) == 5
        assert sum(found[f"servers/{place}/tokens"] for place in places) == 10
        paces = [found[f"servers/{place}/tokens_per_second"] for place in places]
        assert all((pace > 0) == (found[f"servers/{p}/tokens"] > 0) for pace, p in zip(paces, places, strict=True))
        await asyncio.sleep(0.01)  # nothing is drawn meanwhile
        assert {opened.metrics()[f"servers/{place}/tokens_per_second"] for place in places} == {0.0}
        assert {found[f"servers/{place}/{name}"] for place in places for name in ("in_flight", "waiting")} == {0.0}


async def test_a_run_whose_servers_end_it_keeps_what_it_trained(pool, chat_tokenizer, tmp_path) -> None:
    """Ten updates between two checkpoints, the sync of the third fails: it goes on from the third."""
    model = tiny_model(chat_tokenizer.vocab_size, 1024)
    episode = EpisodeConfig(max_turns=3, max_prompt_tokens=600, max_response_tokens=200, distractors_per_band=1)
    config = GRPOConfig(
        steps=4,
        batch_size=1,
        group_size=2,
        micro_batch_size=1,
        checkpoint_every=10,
        episode=episode,
        row_buckets=(800,),
    )

    class Gone(ScriptedSampler):
        async def load_weights(self, params, version):
            if version == 3:
                raise PolicyError("no rollout server took version 3 over")
            await super().load_weights(params, version)

    def by_seed(session, turn, seed):
        return call("capital_of", country="France") if turn == 0 and seed % 2 else f"I say {seed % 7}."

    async def run(kind):
        start = lambda: model.init(jax.random.key(0))  # noqa: E731
        arguments = (config, model, start, [make_environment("a")], chat_tokenizer, pool)
        return await grpo.train(*arguments, tmp_path / "run", policy=kind(chat_tokenizer, by_seed), progress=False)

    with pytest.raises(PolicyError, match="version 3"):
        await run(Gone)
    assert [row["step"] for row in (await run(ScriptedSampler)).history] == [4]
