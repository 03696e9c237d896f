"""Servers that are added and removed while a run goes on, and what they are asked: the policy, on emulated ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import jax
import pytest
from emulated_rollouts import EmulatedServer, emulated, policy_on, until
from rollout_world import tiny_model

from astra_jax.base.errors import InputError, UserError
from astra_jax.base.settings import SettingError
from astra_jax.rollout.sampler import Sampling
from astra_jax.rollout.vllm.addresses import Addresses
from astra_jax.rollout.vllm.sampler import PolicyError, VLLMConfig, VLLMSampler
from astra_jax.rollout.vllm.server_metrics import parse_metrics

SAMPLING = Sampling(max_tokens=2, stop_ids=(), seed=0)
PATIENT = {"answer_seconds": 20.0}  # nothing is silent here, and a busy machine may be slow


@pytest.fixture(scope="module")
def model():
    return tiny_model(640, 4096)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


@pytest.fixture
def policy(model, tmp_path):
    return lambda servers, **config: policy_on(servers, model, tmp_path, **PATIENT | config)


async def draw(policy: VLLMSampler, sessions: list[str], length: int = 2) -> None:
    """A completion of each, asked for at once."""
    calls = (policy.generate([1] * length, SAMPLING, session=session) for session in sessions)
    assert [one.token_ids for one in await asyncio.gather(*calls)] == [[5, 6]] * len(sessions)


def place(server: EmulatedServer) -> str:
    return server.url.removeprefix("http://")


async def test_a_file_of_servers_is_read_again(policy, params, tmp_path, caplog) -> None:
    """One joins with the current weights; one leaves when what it has in flight is over; another dies as it leaves."""
    file = tmp_path / "servers"
    async with emulated(3) as (first, second, third):
        file.write_text(f"# ours\n{first.url}\n\n{second.url}/  # a comment\n")
        async with policy([], urls=(f"@{file}",)) as opened:
            await opened.load_weights(params, 1)
            await asyncio.gather(draw(opened, ["a"], length=1), draw(opened, ["b"]))
            assert first.asked == second.asked == 1 and third.looks == 0
            if second.bodies[0]["token_ids"] == [1]:  # where "a" is
                first, second = second, first
            file.write_text("\n".join(server.url for server in (first, second, third)))
            await until(lambda: len(opened.fleet.serving) == 3)
            assert third.syncs == ["r1:1"]
            first.hangs.clear()
            running = [asyncio.create_task(draw(opened, ["a"])) for _ in range(2)]  # which are at home there
            await until(lambda: first.here == 2)
            file.write_text(f"{second.url}\n{third.url}\n")
            await until(lambda: opened.metrics()[f"servers/{place(first)}/leaving"] == 1)
            await opened.load_weights(params, 2)  # it is not synced any more
            await draw(opened, [f"c{i}" for i in range(8)] + ["a"])
            assert first.asked == 3 and first.syncs == ["r1:1"] and opened.stats.completions == 11
            assert not any(one.done() for one in running)
            first.hangs.set()
            await asyncio.gather(*running)  # drawn there to the end, by the weights that it was asked for
            assert first.asked == 3 and opened.stats.completions == 13 and opened.stats.dropped == 0
            await until(lambda: f"servers/{place(first)}/leaving" not in opened.metrics())
            assert opened.stats.completions == 13  # those of servers that are gone stay counted
            looks = first.looks
            second.hangs.clear()
            running = [asyncio.create_task(draw(opened, [f"d{i}" for i in range(8)]))]
            await until(lambda: second.here >= 4)
            file.write_text(third.url)
            await until(lambda: opened.metrics()[f"servers/{place(second)}/leaving"] == 1)
            await second.stop()
            await asyncio.gather(*running)
            assert opened.stats.failures >= 4 and third.asked >= 8 and first.looks == looks
            caplog.set_level(logging.WARNING)
            for text in ("", "# nobody\n", "no address\n", f"http://user:{'secret'}@a:1\n", "ftp://a:1\n"):
                file.write_text(text)
                await asyncio.sleep(0.15)  # three looks
                await draw(opened, ["e"])
            file.unlink()
            await asyncio.sleep(0.15)
            said = [line for line in caplog.messages if "the servers stay those that they are" in line]
            assert 3 <= len(said) <= 7 and not any("secret" in line for line in said)
            assert [server.url for server in opened.fleet.servers] == [third.url]


async def test_a_server_that_is_named_again_before_it_has_left_stays(policy, params, tmp_path) -> None:
    file = tmp_path / "servers"
    async with emulated(2) as (first, second):
        both = f"{first.url}\n{second.url}"
        file.write_text(both)
        async with policy([], urls=(f"@{file}",)) as opened:
            await opened.load_weights(params, 1)
            first.hangs.clear()
            running = asyncio.create_task(draw(opened, [f"a{i}" for i in range(4)]))
            await until(lambda: first.here == 2)
            file.write_text(second.url)
            await until(lambda: opened.fleet.servers[0].leaving)
            file.write_text(both)
            await until(lambda: not opened.fleet.servers[0].leaving)
            first.hangs.set()
            await running
            await draw(opened, [f"b{i}" for i in range(6)])
            assert first.asked > 2 and first.syncs == ["r1:1"]


async def test_a_name_is_looked_up_again(policy, params, monkeypatch) -> None:
    """As the pods of a headless service: another address, the same port."""
    addresses = ["127.0.0.1"]
    real = asyncio.BaseEventLoop.getaddrinfo

    async def getaddrinfo(self, host, port, **options):
        if host != "servers.test":
            return await real(self, host, port, **options)
        if not addresses:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    first, second = EmulatedServer(), EmulatedServer()
    async with contextlib.AsyncExitStack() as stack:
        for server in (first, second):
            stack.push_async_callback(server.stop)
        await first.start()
        port = int(first.url.rpartition(":")[2])
        await second.start(port, "127.0.0.2")
        opened = await stack.enter_async_context(policy([], urls=(f"dns+http://servers.test:{port}",)))
        await opened.load_weights(params, 1)
        await draw(opened, ["a", "b"])
        assert first.asked == 2 and second.looks == 0
        addresses.append("127.0.0.2")
        await until(lambda: len(opened.fleet.serving) == 2)
        addresses.clear()  # of a name server that is away
        await asyncio.sleep(0.2)
        await draw(opened, ["c", "d"])
        assert second.syncs == ["r1:1"] and second.asked == 1
        addresses.append("127.0.0.2")
        await until(lambda: [server.url for server in opened.fleet.servers] == [second.url])
        await draw(opened, ["a", "b"])
        assert first.asked == 3


async def test_requests_wait_for_room_in_the_servers_own_cache(policy, params) -> None:
    """One says that it has room for 100 tokens, the other nothing; none is asked for more than it has room for."""
    async with emulated(2) as (small, silent):
        small.cache = 100
        async with policy([small, silent], cache_tokens=200) as opened:
            await opened.load_weights(params, 1)
            small.hangs.clear()
            silent.hangs.clear()
            running = asyncio.create_task(draw(opened, [f"a{i}" for i in range(12)], length=38))
            await until(lambda: small.here == 2 and silent.here == 5)  # 40 tokens each
            await asyncio.sleep(0.1)
            found = opened.metrics()
            assert found["routing/waiting"] == 5 and small.here == 2 and silent.here == 5
            row = {name: found[f"servers/{place(small)}/{name}"] for name in ("tokens_in_flight", "cache_tokens")}
            assert row == {"tokens_in_flight": 80, "cache_tokens": 100}
            small.hangs.set()
            silent.hangs.set()
            await running
            assert small.most_asked == 2 and silent.most_asked == 5 and opened.stats.completions == 12
            assert opened.metrics()["routing/waiting"] == 0


async def test_mates_and_later_turns_are_at_one_server(policy, params) -> None:
    """Eight groups of four, two turns each; the group's prompt is known by its first token."""
    async with emulated(2) as servers, policy(servers) as opened:
        await opened.load_weights(params, 1)

        async def episode(group: int, number: int) -> None:
            session = f"group{group}.{number}"
            for length in (3, 6):
                await opened.generate([group + 1] * length, SAMPLING, session=session)
            opened.release(session)

        await asyncio.gather(*(episode(group, number) for group in range(8) for number in range(4)))
        asked = [{body["token_ids"][0] for body in server.bodies} for server in servers]
        assert not asked[0] & asked[1] and len(asked[0]) == len(asked[1]) == 4
        found = opened.metrics()
        assert found["routing/placed"] == 64 and found["routing/stayed"] == 32 and found["routing/moved"] == 0


async def test_a_look_that_an_update_falls_into_tells_nothing(policy, params) -> None:
    """The server said its version, then took a new one over, then said the rest: it was left out for the old one."""
    async with emulated(1) as (server,), policy([server]) as opened:
        await opened.load_weights(params, 1)
        server.metrics_hang.clear()
        asked = server.metrics_asked
        await until(lambda: server.metrics_asked > asked)
        await opened.load_weights(params, 2)
        server.metrics_hang.set()
        looks = server.looks
        await until(lambda: server.looks > looks + 1)
        assert opened.stats.dropped == 0 and opened.fleet.serving == opened.fleet.servers


async def test_a_start_without_any_server_is_refused(policy, tmp_path) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    for urls, said in (
        ((f"@{tmp_path / 'empty'}",), "empty names no server"),
        ((f"@{tmp_path / 'nowhere'}",), "nowhere is not a file of addresses"),
        (("dns+http://no-such-name.invalid:8000",), "no-such-name.invalid:8000 has no address"),
    ):
        with pytest.raises(UserError, match=said) as refused:
            async with policy([], urls=urls):
                pass
        assert bool(refused.value.away) == urls[0].startswith("dns")  # it may be there later
    with pytest.raises(PolicyError, match="0 of 1 rollout servers are there"):
        async with policy([], urls=("http://127.0.0.1:9",)):
            pass


def test_addresses_that_are_none_are_refused_by_name(tmp_path) -> None:
    for url, said in (
        ("a:8000", "has 'a:8000'; give servers as http://HOST:PORT"),
        ("http://", "give servers as"),
        ("http://a:port", "give servers as"),
        ("@", "has '@' without a file"),
        ("dns+http://servers", "without a port"),
        (f"dns+http://user:{'secret'}@servers:1", "a user or password before its host"),
    ):
        with pytest.raises(SettingError, match=said) as refused:
            VLLMConfig((url,))
        assert "secret" not in str(refused.value)
    with pytest.raises(SettingError, match="sync='reload' with dns"):
        VLLMConfig(("dns+http://localhost:1",), sync="reload")
    (tmp_path / "far").write_text("http://10.0.0.3:8000\n")
    with pytest.raises(InputError, match="sync='reload' with http://10.0.0.3:8000"):
        Addresses((f"@{tmp_path / 'far'}",), "reload").of_files()


async def test_an_address_with_a_slash_behind_it_is_the_same_server(tmp_path) -> None:
    with pytest.raises(SettingError, match="names a server twice"):
        VLLMConfig(("http://a:8000", "http://a:8000/"))
    written = tmp_path / "servers"
    written.write_text("http://a:8000/\nhttp://b:8000\nhttp://b:8000/\n")
    addresses = Addresses((f"@{written}", "http://a:8000", "http://c:8000/"), "plugin")
    assert list(await addresses.read()) == ["http://a:8000", "http://b:8000", "http://c:8000"]


async def test_a_certificate_is_the_names_and_not_the_addresses() -> None:
    found = await Addresses(("dns+https://localhost:8000", "http://a:1"), "plugin").read()
    assert found.pop("http://a:1") is None and set(found.values()) == {"localhost"}
    assert "https://127.0.0.1:8000" in found


def test_what_room_a_server_has_is_read_from_its_metrics() -> None:
    """vLLM 0.32's own lines, cut; with two engines the blocks are of both."""
    one = 'vllm:cache_config_info{block_size="16",engine="%d",kv_cache_size_tokens="%s",num_gpu_blocks="1024"} 1.0\n'
    assert parse_metrics(one % (0, "8192") + one % (1, "8192")).cache == 16_384
    assert parse_metrics(one % (0, "None") + one % (1, "None")).cache == 16_384
    found = parse_metrics('vllm:num_preemptions_total{engine="0"} 3.0\nvllm:generation_tokens_total{engine="0"} 7.0\n')
    assert (found.cache, found.preemptions, found.tokens) == (None, 3, 7)
    with pytest.raises(ValueError):
        parse_metrics("vllm:generation_tokens_total many\n")
