"""The pool behind HTTP: the same answers as in process, and every refusal by name."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from certificates import make_certificate
from serving import serving

from astra_jax.base.access import network_of, shows_token
from sandbox import Limits, Outcome, Sandbox, SandboxConfig, SandboxError, SandboxPool
from sandbox.remote import RemotePool
from sandbox.service import SandboxServiceConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parent.parent.parent
TOOL = textwrap.dedent(
    """
    import random

    def echo(value):
        print("echo", value)
        return value

    def deep(levels):
        value = []
        for _ in range(levels):
            value = [value]
        return value

    def chance():
        return [random.random(), random.randint(0, 9)]

    def fail(word):
        raise KeyError(word)

    def nothing_json():
        return 1j

    def work(millions):
        total = 0
        for i in range(int(millions * 1_000_000)):
            total += i
        return total

    def spin():
        while True:
            pass
    """
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig(limits=Limits(source_bytes=20_000, argument_bytes=20_000))) as pool:
        yield pool


async def post(url: str, body, **options) -> tuple[int, dict, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | options.pop("headers", {})
    async with aiohttp.ClientSession() as session, session.post(url, data=data, headers=headers, **options) as response:
        return response.status, await response.json(), dict(response.headers)


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


CALLS = {
    "value": ("echo", {"value": {"a": [1, 2.5, None, True, 2**80], "中": "é\u2028𝄞"}}),
    "randomness": ("chance", {}),
    "exception": ("fail", {"word": "x"}),
    "unserialisable": ("nothing_json", {}),
    "no function": ("nope", {}),
    "wrong arguments": ("echo", {"values": 1}),
    "arguments no JSON": ("echo", {"value": float("inf")}),
    "an integer too long": ("echo", {"value": [10**5_000]}),
    "too large": ("echo", {"value": "x" * 21_000}),
    "cpu limit": ("spin", {}),
    "arguments as deep as may be": ("echo", {"value": json.loads("[" * 198 + "]" * 198)}),
    "arguments too deep": ("echo", {"value": json.loads("[" * 250 + "]" * 250)}),
    "arguments much too deep": ("echo", {"value": nested(5_000)}),
    "result too deep": ("deep", {"levels": 201}),
    "result much too deep": ("deep", {"levels": 980}),  # near what Python's own limit leaves to the host
    "result deeper than Python allows": ("deep", {"levels": 1_000}),
}


@pytest.mark.parametrize("case", CALLS)
async def test_a_call_over_http_is_the_call_in_process(pool: SandboxPool, case: str) -> None:
    function, arguments = CALLS[case]
    here: Sandbox = pool
    expected = await here.call(TOOL, function, arguments, seed=3)
    async with serving(pool, token="open sesame") as (_, url), RemotePool(url, token="open sesame") as remote:
        there: Sandbox = remote
        result = await there.call(TOOL, function, arguments, seed=3)
        assert (there.tier, there.layers) == (here.tier, here.layers)
    for name in ("kind", "value", "stdout", "error", "ended_by"):
        assert getattr(result, name) == getattr(expected, name), name
    assert result.ok == (case in ("value", "randomness", "arguments as deep as may be"))


async def test_one_caller_does_not_take_what_others_need() -> None:
    """Callers are told apart by address. One fills all that it may have with calls that wait; another is answered."""
    waits = "import threading\ndef wait():\n    threading.Event().wait()"  # which it can without seccomp
    more = {"leave_out": ("seccomp",), "allow_unisolated": True}
    config = SandboxConfig(max_slots=8, concurrency=4, limits=Limits(wall_seconds=3), **more)
    call = {"code": waits, "function": "wait", "arguments": {}}
    async with (
        SandboxPool(config) as pool,
        serving(pool, max_waiting=4, caller_calls_per_second=1.0) as (service, url),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))) as neighbour,
    ):
        greedy = [asyncio.create_task(post(f"{url}/call", call | {"code": f"{waits}\n# {i}"})) for i in range(12)]
        while sum(one.done() for one in greedy) < 6:
            await asyncio.sleep(0.01)
        async with neighbour.post(f"{url}/call", json=call | {"code": TOOL, "function": "chance"}) as response:
            assert (await response.json())["kind"] == "ok"
        assert sum(one.done() for one in greedy) == 6  # its others still wait: three run, three have no permit
        answers = [await one for one in greedy]
        refused = [(body["error"], headers["Retry-After"]) for status, body, headers in answers if status == 429]
        assert len(refused) == 6 and all("6 calls of yours are under way" in text for text, _ in refused)
        kinds = [body["kind"] for status, body, _ in answers if status == 200]
        assert kinds == ["idle_timeout"] * 6
        statuses = [(await post(f"{url}/call", call | {"code": TOOL, "function": "chance"}))[0] for _ in range(15)]
        assert statuses[0] == 200 and statuses[-1] == 429, statuses  # ten a ten seconds


async def test_callers_with_many_addresses_are_one() -> None:
    same = {network_of(one) for one in ("2001:db8:0:7::1", "2001:db8:0:7:ffff::2", "2001:db8:0:7::3%eth0")}
    assert same == {"2001:db8:0:7::/64"} and network_of("2001:db8:0:8::1") not in same
    assert [network_of(one) for one in ("10.0.0.1", "10.0.0.2", "")] == ["10.0.0.1", "10.0.0.2", ""]


async def test_shares_of_callers_are_checked() -> None:
    for name, value in (("caller_share", 0), ("caller_share", 1.1), ("caller_calls_per_second", 0)):
        with pytest.raises(ValueError, match=f"SandboxServiceConfig.{name} is {value}"):
            SandboxServiceConfig(**{name: value})
    with pytest.raises(ValueError, match="caller_calls_per_second is nan"):
        SandboxServiceConfig(caller_calls_per_second=float("nan"))


async def test_without_the_token_nothing_runs(pool: SandboxPool) -> None:
    async with serving(pool, token="right") as (_, url):
        before = pool.stats.calls
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
            status, body, answer = await post(f"{url}/call", {}, headers=headers)
            assert status == 401 and "Authorization: Bearer TOKEN" in body["error"]
            assert answer["WWW-Authenticate"] == "Bearer"
        for token in (None, "wrong"):
            with pytest.raises(SandboxError, match="asks for another token"):
                async with RemotePool(url, token=token):
                    pass
        assert pool.stats.calls == before


async def test_a_token_that_is_no_text_is_refused() -> None:
    assert not shows_token({"Authorization": "Bearer \udcff"}, "right")
    assert shows_token({"Authorization": "bearer right "}, "right") and shows_token({}, None)


async def test_beyond_loopback_a_token_is_needed() -> None:
    for host in ("0.0.0.0", "::", "sandbox.example"):
        with pytest.raises(ValueError, match=r"can be reached from other machines, and no token is set"):
            SandboxServiceConfig(host=host)
        assert SandboxServiceConfig(host=host, token="t").host == host
    for host in ("127.0.0.1", "::1", "localhost"):
        assert SandboxServiceConfig(host=host).token is None


async def test_pages_of_other_sites_run_nothing(pool: SandboxPool) -> None:
    call = {"code": TOOL, "function": "chance", "arguments": {}}
    async with serving(pool) as (_, url):
        before = pool.stats.calls
        for path in ("/call", "/run_code"):
            for headers in (
                {"Host": "evil.example"},
                {"Origin": "http://evil.example"},
                {"Origin": "null"},
            ):
                status, body, _ = await post(url + path, call, headers=headers)
                assert status == 403 and ("is not this machine" in body["error"] or "own pages" in body["error"])
            status, body, _ = await post(url + path, call, headers={"Content-Type": "text/plain"})
            assert status == 415 and "send application/json" in body["error"]
        assert pool.stats.calls == before
        assert (await post(f"{url}/call", call))[0] == 200


BAD = {
    "no JSON": (b"{", "the body is not JSON"),
    "deep": (b"[" * 100_000, "the body is not JSON"),
    "no object": ([1], "the body is a JSON list; send an object with code, function, arguments, seed"),
    "missing": ({"code": ""}, "field 'function' is missing"),
    "wrong type": ({"code": "", "function": 3, "arguments": {}}, "field 'function' is 3; send a JSON string"),
    "a bool": ({"code": "", "function": "f", "arguments": {}, "seed": True}, "'seed' is true; send a JSON integer"),
    "unknown": ({"code": "", "function": "f", "arguments": {}, "sede": 1}, "unknown field 'sede'"),
    "no module": ({"function": "f", "arguments": {}}, "send one of 'code' and 'digest'"),
    "two modules": ({"code": "", "digest": "0", "function": "f", "arguments": {}}, "send one of 'code' and 'digest'"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_body_is_refused_by_name(pool: SandboxPool, case: str) -> None:
    body, words = BAD[case]
    async with serving(pool) as (_, url):
        status, answer, _ = await post(f"{url}/call", body)
        assert status == 400 and words in answer["error"]


class Relay:
    """Between a client and a service, which may be another one by the next connection; counts the bytes sent there."""

    def __init__(self, port: int) -> None:
        self.port = port  # of the service
        self.sent = 0

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", self.port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, counts: bool) -> None:
            while data := await source.read(1 << 16):
                self.sent += len(data) * counts
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, to_there, True), copy(there, writer, False), return_exceptions=True)


async def test_a_module_is_sent_once_and_again_to_a_service_that_does_not_have_it(pool: SandboxPool) -> None:
    code = TOOL + "#" * 15_000
    async with (
        SandboxPool(SandboxConfig()) as another,
        serving(pool) as (first, _),
        serving(another) as (second, _),
        await asyncio.start_server((relay := Relay(first.port)).pass_on, "127.0.0.1", 0) as server,
        RemotePool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as remote,
    ):

        async def bytes_sent(value: int) -> int:
            before = relay.sent
            assert (await remote.call(code, "echo", {"value": value})).value == value
            return relay.sent - before

        assert await bytes_sent(0) > 15_000
        assert max([await bytes_sent(i) for i in range(1, 4)]) < 1_000
        relay.port = second.port  # as after a restart, or behind a balancer
        await first.stop()
        assert await bytes_sent(4) > 15_000
        assert await bytes_sent(5) < 1_000


async def test_a_digest_stands_for_the_source_that_is_open_and_no_other() -> None:
    """Two clients, modules that push each other out, and a body that asks for a module that is not there."""
    codes = [f"def which():\n    return {i}\n" for i in range(3)]
    async with (
        SandboxPool(SandboxConfig(max_slots=2)) as pool,
        serving(pool) as (_, url),
        RemotePool(url) as one,
        RemotePool(url) as two,
    ):
        for _ in range(2):
            for i, code in enumerate(codes):
                results = await asyncio.gather(*(remote.call(code, "which", {}) for remote in (one, two, one)))
                assert [result.value for result in results] == [i] * 3
        assert pool.stats.evicted >= 3
        named = [
            {"digest": hashlib.sha256(code.encode()).hexdigest(), "function": "which", "arguments": {}}
            for code in codes
        ]
        answers = [await post(f"{url}/call", body) for body in named]
        assert [status for status, *_ in answers] == [409, 200, 200]  # the first one was pushed out
        assert "send its 'code'" in answers[0][1]["error"] and [body["value"] for _, body, _ in answers[1:]] == [1, 2]


async def test_a_large_body_and_a_wrong_path_are_refused(pool: SandboxPool) -> None:
    async with serving(pool) as (_, url):
        status, answer, _ = await post(f"{url}/call", b"x" * 1_000_000)
        assert status == 413 and "larger than" in answer["error"]
        async with RemotePool(url) as remote:
            result = await remote.call("#" * 1_000_000, "f", {})
            assert (result.kind, result.ended_by) == (Outcome.TOO_LARGE, "source")
        assert (await post(f"{url}/calls", {}))[0] == 404
        assert (await post(f"{url}/health", {}))[0] == 405


async def test_a_full_queue_says_when_to_come_back() -> None:
    """One call at once, one may wait. Of five at a time some are put off; a patient client gets all of its answers."""
    async with (
        SandboxPool(SandboxConfig(concurrency=1)) as pool,
        serving(pool, max_waiting=1, caller_share=1.0) as (service, url),
    ):
        body = {"code": TOOL, "function": "work", "arguments": {"millions": 5}}
        answers = await asyncio.gather(*(post(f"{url}/call", body) for _ in range(5)))
        put_off = [(text, headers) for status, text, headers in answers if status == 429]
        assert len(put_off) == 3 and [status for status, *_ in answers].count(200) == 2
        assert all("waiting already" in text["error"] and int(headers["Retry-After"]) >= 1 for text, headers in put_off)
        async with RemotePool(url) as remote:
            results = await asyncio.gather(*(remote.call(TOOL, "echo", {"value": i}) for i in range(5)))
            assert [result.value for result in results] == list(range(5))
        async with RemotePool(url, patience_seconds=0) as hasty:
            results = await asyncio.gather(*(hasty.call(TOOL, "work", {"millions": 5}) for _ in range(5)))
            ends = [(result.kind, result.ended_by) for result in results if not result.ok]
            assert ends == [(Outcome.OPEN_FAILED, "queue")] * 3
        assert (service.running, service.waiting) == (0, 0)


async def test_metrics_and_health_count(pool: SandboxPool) -> None:
    async with serving(pool) as (_, url), RemotePool(url) as remote:
        await asyncio.gather(*(remote.call(TOOL, "echo", {"value": i}) for i in range(3)))
        await remote.call(TOOL, "fail", {"word": ""})
        await post(f"{url}/call", b"{")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/metrics") as response:
                text = await response.text()
                assert response.content_type == "text/plain"
            async with session.get(f"{url}/health") as response:
                health = await response.json()
    assert 'sandbox_calls_total{kind="ok"} 3.0' in text
    assert 'sandbox_calls_total{kind="tool_error"} 1.0' in text
    assert 'sandbox_refused_total{status="400"} 1.0' in text
    assert "sandbox_call_seconds_count 4.0" in text and f'sandbox_tier{{tier="{pool.tier}"}} 1.0' in text
    assert health == {"status": "ok", "tier": pool.tier, "layers": pool.layers, "running": 0, "waiting": 0}


async def test_a_caller_that_hangs_up_ends_its_call() -> None:
    async with SandboxPool(SandboxConfig(limits=Limits(cpu_seconds=60))) as pool, serving(pool) as (service, url):
        task = asyncio.create_task(post(f"{url}/call", {"code": TOOL, "function": "spin", "arguments": {}}))
        while service.running == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        async with asyncio.timeout(50):  # of the call's 60
            while service.running:
                await asyncio.sleep(0.01)
        assert (await pool.call(TOOL, "echo", {"value": 1})).value == 1


async def test_closing_the_client_during_a_call_ends_it_as_closing_the_pool_does() -> None:
    async with SandboxPool(SandboxConfig(limits=Limits(cpu_seconds=60))) as pool, serving(pool) as (service, url):
        async with RemotePool(url) as remote:
            call = asyncio.create_task(remote.call(TOOL, "spin", {}))
            while service.running == 0:
                await asyncio.sleep(0.01)
        result = await call
        assert (result.kind, result.ended_by) == (Outcome.ENV_DIED, "pool"), result


async def test_a_call_that_outlasts_the_drain_is_cut_off() -> None:
    async with (
        SandboxPool(SandboxConfig(limits=Limits(cpu_seconds=60, wall_seconds=60))) as pool,
        serving(pool, drain_seconds=0.1) as (service, url),
    ):
        call = asyncio.create_task(post(f"{url}/call", {"code": TOOL, "function": "spin", "arguments": {}}))
        while service.running == 0:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):  # of the call's 60
            assert await service.stop() == 1
        with pytest.raises(aiohttp.ClientError):
            await call
        assert service.running == 0


async def test_a_service_with_too_weak_isolation_is_refused() -> None:
    async with SandboxPool(SandboxConfig(highest_tier="D", allow_unisolated=True)) as weak, serving(weak) as (_, url):
        with pytest.raises(SandboxError, match="no isolation beyond rlimits"):
            async with RemotePool(url):
                pass
        async with RemotePool(url, allow_unisolated=True) as remote:
            assert (await remote.call(TOOL, "echo", {"value": 1})).value == 1
    async with SandboxPool(SandboxConfig(highest_tier="B")) as weaker, serving(weaker) as (_, url):
        with pytest.raises(SandboxError, match="tier B, minimum_tier asks for A"):
            async with RemotePool(url, minimum_tier="strict"):
                pass
    with pytest.raises(ValueError, match="RemotePool.minimum_tier='E'"):
        RemotePool(url, minimum_tier="E")


async def test_a_service_that_is_gone_is_no_fault_of_the_code(pool: SandboxPool) -> None:
    with pytest.raises(SandboxError, match="no sandbox service answers at http://127.0.0.1:9"):
        async with RemotePool("http://127.0.0.1:9"):
            pass
    async with serving(pool) as (service, url), RemotePool(url) as remote:
        await service.stop()
        result = await remote.call(TOOL, "echo", {"value": 1})
    assert result.is_infrastructure and (result.kind, result.ended_by) == (Outcome.ENV_DIED, "connection")
    with pytest.raises(SandboxError, match="not open"):
        await remote.call(TOOL, "echo", {"value": 1})


async def test_the_program_drains_on_sigterm() -> None:
    """A call in flight is answered, later ones find nobody, and the exit status is 0."""
    command = [sys.executable, "-m", "launch.sandbox_server", "--port=0"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = await asyncio.to_thread(server.stdout.readline)
        found = re.match(r"sandbox on (http://127\.0\.0\.1:\d+), tier [ABC] \(", line)
        assert found, line
        async with RemotePool(found.group(1)) as remote:
            slow = asyncio.create_task(remote.call(TOOL, "work", {"millions": 15}))
            async with aiohttp.ClientSession() as session:
                while True:
                    async with session.get(f"{found.group(1)}/health") as response:
                        if (await response.json())["running"]:
                            break
                    if slow.done():  # on a busy machine it may end before anybody has looked
                        slow = asyncio.create_task(remote.call(TOOL, "work", {"millions": 15}))
            server.send_signal(signal.SIGTERM)
            assert (await slow).value == sum(range(15_000_000))
            late = await remote.call(TOOL, "echo", {"value": 1})
            assert late.is_infrastructure
        assert await asyncio.to_thread(server.wait, 30) == 0
        assert server.stdout.read() == "stopped\n"
    finally:
        server.kill()
        server.wait()


async def test_the_program_speaks_https(tmp_path) -> None:
    cert, key = make_certificate(tmp_path)
    command = [sys.executable, "-m", "launch.sandbox_server", "--port=0", f"--tls_cert={cert}", f"--tls_key={key}"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.match(r"sandbox on (https://127\.0\.0\.1:\d+), ", await asyncio.to_thread(server.stdout.readline))
        assert found
        async with RemotePool(found.group(1), ca_file=cert) as remote:
            assert (await remote.call(TOOL, "echo", {"value": 1})).value == 1
        with pytest.raises(SandboxError, match="certificate verify failed"):
            async with RemotePool(found.group(1)):
                pass
        with pytest.raises(ValueError, match="/nowhere is not a file of certificates"):
            RemotePool(found.group(1), ca_file="/nowhere")
        server.terminate()
        assert await asyncio.to_thread(server.wait, 30) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tls_cert=/nowhere"], "SandboxServiceConfig.tls_cert=/nowhere without tls_key"),
        (["--header_seconds=0"], "header_seconds=0"),
        (["--host=0.0.0.0"], "no token is set"),
        (["--key_file=/nowhere"], "--key_file=/nowhere is not a file with a key"),
        (["--concurrency=9", "--max_slots=2"], "concurrency is 9; use at most max_slots, which is 2"),
    ],
)
async def test_bad_flags_end_in_one_line(flags: list[str], words: str) -> None:
    command = [sys.executable, "-m", "launch.sandbox_server", *flags]
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
