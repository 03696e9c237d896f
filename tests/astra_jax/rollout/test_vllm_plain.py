"""Rollouts on a real vLLM server without our plugin, and on servers that fail at every request."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import jax
import pytest
from aiohttp import web
from vllm_world import (
    GREEDY,
    KEY,
    PROMPTS,
    Server,
    World,
    assert_same,
    drawn_during,
    post,
    require_vllm,
    serving,
    weights,
)

from astra_jax.models.hf_checkpoint import load_hf
from astra_jax.rollout.vllm.publishing import FolderPublisher
from astra_jax.rollout.vllm.sampler import PolicyError, VLLMConfig
from synthesis.core.endpoint import EndpointUnusable
from synthesis.core.records import Answer, SubQuestion
from synthesis.environments.teacher_answers import DependencyConsistencyAnswer
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig

require_vllm()
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    made = World.make(tmp_path_factory.mktemp("plain"), tie=False)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (made.folder / "serve" / "chat_template.jinja").write_text(template, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def plain(world) -> Iterator[tuple[Server, ...]]:
    """Two that were started as vLLM comes; the second one's logprobs are those before temperature and nucleus."""
    servers = [
        Server(world, scale_out=False, plugin=False, dummy=False, logprobs=f"{kind}_logprobs")
        for kind in ("processed", "raw")
    ]
    with serving(*servers) as servers:
        yield servers


async def test_a_server_as_it_comes_follows_the_trainer(world, plain) -> None:
    async with world.policy(plain[0], sync="reload") as policy:
        for version, seed in ((1, 1), (2, 2), (3, 1)):
            params = weights(world.model, seed)
            await policy.update(params, version)
            await assert_same(policy, params, world, version)
        assert policy.stats.stale == policy.stats.failures == policy.stats.dropped == 0
        assert policy.fleet.servers[0].sync_seconds.keys() == {"pause", "load", "resume", "probe"}
        completions = await drawn_during(policy, weights(world.model, 2), 4)
        assert {one.policy_version for one in completions} <= {3, 4} and policy.stats.stale > 0


async def test_synthesis_can_ask_it(plain) -> None:
    """The model's words are noise; that they are a teacher's answer at all is the schema's doing, over the wire."""
    step = SubQuestion(2, "How many people live in Tokyo?", Answer(1), [1], 2, True, "population_of_city")
    first = SubQuestion(1, "What is the capital of Japan?", Answer("Tokyo"), [], 1, True, "capital_of_country")
    variables = {"question": "How many?", "dependencies": [first], "step": step, "feedback": ""}
    # Hot, so that a string ends some time: of 600 tokens only a few hold the quote that does it.
    # It is told what vLLM enforces: noise that is cut off would look like a form that is not heeded.
    ask = {"temperature": 2.0, "max_tokens": 1000, "tries": 8, "structured_output": "json_schema"}
    config = OpenAITeacherConfig(f"{plain[0].url}/v1", "policy", KEY, **ask)  # type: ignore[arg-type]
    teacher = OpenAITeacher(config)
    asked = [
        teacher.ask(DependencyConsistencyAnswer, variables, language=language, seed=seed)
        for language in ("en", "zh")
        for seed in range(2)
    ]
    answers = await asyncio.gather(*asked)
    assert {type(one) for one in answers} == {DependencyConsistencyAnswer}
    assert all(one.verdict in ("matched", "missing", "redundant") for one in answers)
    other = OpenAITeacher(dataclasses.replace(config, model="another"))
    with pytest.raises(EndpointUnusable, match="refuses every request with status 404"):
        await other.ask(DependencyConsistencyAnswer, variables, language="en", seed=0)


async def test_a_failed_reload_leaves_a_server_paused_until_a_good_one(world, plain) -> None:
    params = weights(world.model, 3)
    async with world.policy(plain[0], sync="reload") as policy:
        await policy.update(params, 1)
        (data,) = (world.folder / "folders" / "1").glob("*.safetensors")
        data.write_bytes(data.read_bytes()[:1000])
        assert post(plain[0], "/update_weight_version", {"new_version": "other"})[0] == 200
        waiting = asyncio.create_task(policy.generate(PROMPTS[0], GREEDY))
        while not policy.stats.dropped:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.5)  # it tries to rejoin meanwhile, three times a second
        assert policy.stats.rejoined == 0 and not waiting.done()
        await policy.update(params, 2)
        assert (await waiting).policy_version == 2
        await assert_same(policy, params, world, 2)


async def test_a_server_that_serves_something_else_is_refused(world, plain) -> None:
    params = weights(world.model, 1)
    async with world.policy(plain[1], sync="reload") as policy:
        with pytest.raises(PolicyError, match="no rollout server took version 1.*--logprobs-mode processed_logprobs"):
            await policy.update(params, 1)
    other = dataclasses.replace(world.model, rope_theta=50.0)
    async with dataclasses.replace(world, model=other).policy(plain[0], sync="reload") as policy:
        with pytest.raises(PolicyError, match="serves another model than the policy's"):
            await policy.update(params, 2)
    with pytest.raises(PolicyError, match="no /v1/policy/version: install astra_jax/rollout/vllm/plugin there"):
        async with world.policy(plain[0]):
            pass
    with pytest.raises(PolicyError, match="episodes may have 4000: start it with --max-model-len=4000"):
        async with world.policy(plain[0], sync="reload", max_length=4000):
            pass


async def test_a_reload_is_refused_where_it_is_not_safe(world) -> None:
    with pytest.raises(ValueError, match="10.0.0.3:8000: .* no API key.*tunnel.*sync='plugin'"):
        VLLMConfig(urls=("http://127.0.0.1:8000", "http://10.0.0.3:8000"), sync="reload")
    tied = dataclasses.replace(world, model=dataclasses.replace(world.model, tie_embeddings=True))
    with pytest.raises(ValueError, match="tied embeddings.*sync='plugin'"):
        tied.policy(urls=("http://localhost:8000",), sync="reload")


async def test_published_folders_are_whole_and_few(world, tmp_path) -> None:
    (tmp_path / "7.unfinished").mkdir()  # of a run that was killed
    publisher = FolderPublisher(tmp_path, world.model, dtype="float32")
    params = weights(world.model, 0)
    wanted = jax.tree.map(lambda x: x.copy(), params)
    folders = [publisher.publish(params, version) for version in (1, 2, 3)]
    jax.tree.map(lambda x: x.delete(), params)  # as a training step that they are donated to
    publisher.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    found = load_hf(folders[-1], world.model)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, wanted))


async def test_a_request_that_every_server_fails_at_is_given_up(world, tmp_path) -> None:
    """Servers that sync, and answer no request; with a plugin that is too old at first."""
    sent = []
    described = {
        "version": "r1:1",
        "vocab_size": world.model.vocab_size,
        "vocabulary": None,
        "max_model_len": 4096,
        "logprobs_mode": "processed_logprobs",
        "protocol": 4,
        "wants_key": True,
        "config": world.model.to_hf(),
        "dtype": "float32",
        "sampling": {},
    }

    async def version(_: web.Request) -> web.Response:
        return web.json_response(described)

    async def sync(_: web.Request) -> web.Response:
        return web.json_response({"seconds": {}})

    async def generate(request: web.Request) -> web.Response:
        if not await request.json():
            return web.json_response({}, status=400)
        sent.append(request.url.port)
        return web.json_response({"error": "the engine died of it"}, status=500)

    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/policy/version", version),
            web.post("/v1/policy/lease", version),
            web.post("/v1/policy/sync", sync),
        ]
    )
    app.add_routes([web.post("/inference/v1/generate", generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    sites = [web.TCPSite(runner, "127.0.0.1", 0) for _ in range(2)]
    for site in sites:
        await site.start()
    ports = [address[1] for address in runner.addresses]
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
    try:
        with pytest.raises(PolicyError, match="does not say its on_tpus: its plugin is older than this trainer"):
            async with world.policy(urls=urls):
                pass
        described["on_tpus"] = False
        async with world.policy(urls=urls, attempts=3, check_seconds=0.1) as policy:
            await policy.update(weights(world.model, 1), 1)
            with pytest.raises(PolicyError, match="was sent 3 times.*the engine died of it") as error:
                await policy.generate(PROMPTS[0], GREEDY)
        assert len(sent) == 3 and set(sent) == set(ports) and all(url in str(error.value) for url in urls)
        assert policy.stats.failures == 3 and policy.stats.dropped == 0  # they answer, and have the current weights
    finally:
        await runner.cleanup()
