"""What every HTTP service of the house does: whom it answers, and that nobody can keep it waiting."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import resource
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from certificates import make_certificate

from astra_jax.base.access import ReachConfig, trusting
from astra_jax.base.http_service import HttpRefusal, HttpService
from sandbox import SandboxError
from sandbox.remote import RemotePool

pytestmark = pytest.mark.asyncio

MOST = 1 << 16
JSON = {"Content-Type": "application/json"}


class EchoConfig(ReachConfig):
    RISK = "be answered"


class Echo(HttpService):
    """Answers with a body's length; `/endless` sends until nobody listens, `/wait` until it is let go."""

    def __init__(self, config: ReachConfig) -> None:
        self.handled = 0
        self.sending = 0
        self.go = asyncio.Event()
        routes = [web.post("/echo", self._echo), web.post("/wait", self._wait), web.get("/health", self._echo)]
        super().__init__(config, [*routes, web.get("/endless", self._endless)], most_bytes=MOST)

    def refusal(self, request: web.Request, refused: HttpRefusal) -> web.Response:
        return web.json_response({"error": refused.text}, status=refused.status, headers=refused.headers)

    async def _echo(self, request: web.Request) -> web.Response:
        self.handled += 1
        return web.json_response({"length": len(await request.read())})

    async def _wait(self, request: web.Request) -> web.Response:
        await self.go.wait()
        return await self._echo(request)

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.sending += 1
        try:
            while True:
                await response.write(b"x" * 65_536)
        finally:
            self.sending -= 1


@contextlib.asynccontextmanager
async def echoing(**settings) -> AsyncIterator[tuple[Echo, str]]:
    service = Echo(EchoConfig(**settings))
    await service.start()
    try:
        yield service, f"{service.config.scheme}://127.0.0.1:{service.port}"
    finally:
        async with asyncio.timeout(20):
            await service.stop()


async def post(url: str, data=b"{}", headers=JSON, path: str = "/echo", **options) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=data, headers=headers, **options) as response,
    ):
        return response.status, await response.json()


async def until(true) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------------
# Whom it answers


FOREIGN = {
    "another host": ({"Host": "evil.example"}, 403, "the host 'evil.example' is not this machine"),
    "a longer host": ({"Host": "127.0.0.1.evil.example"}, 403, "is not this machine"),
    "no host": ({"Host": "["}, 403, "is not this machine"),
    "another site": ({"Origin": "https://evil.example"}, 403, "this service's own pages only"),
    "another port": ({"Origin": "http://127.0.0.1:1"}, 403, "own pages only"),
    "a page without a site": ({"Origin": "null"}, 403, "own pages only"),
    "another name for it": (
        {"Host": "evil.example", "Origin": "http://evil.example"},
        403,
        "is not this machine",
    ),
    "text": ({"Content-Type": "text/plain"}, 415, "Content-Type is 'text/plain'; send application/json"),
    "a form": ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "send application/json"),
    "parts": ({"Content-Type": "multipart/form-data; boundary=x"}, 415, "send application/json"),
    "no type": ({"Content-Type": "application/octet-stream"}, 415, "send application/json"),
    "packed": ({"Content-Encoding": "gzip"}, 415, "Content-Encoding is 'gzip'; send the body as it is"),
}


@pytest.mark.parametrize("case", FOREIGN)
async def test_what_other_sites_can_send_is_refused(case: str) -> None:
    headers, status, words = FOREIGN[case]
    async with echoing() as (service, url):
        got, answer = await post(url, headers=JSON | headers)
        assert got == status and words in answer["error"]
        if status == 403:
            async with aiohttp.ClientSession(headers=headers) as session:
                for path in ("/health", "/nowhere"):
                    async with session.get(url + path) as response:
                        assert response.status == 403
                async with session.options(f"{url}/echo") as response:
                    assert response.status == 403
                    assert not any(name.startswith("Access-Control") for name in response.headers)
        assert service.handled == 0


async def test_this_machine_is_answered_by_each_of_its_names() -> None:
    async with echoing() as (service, url):
        for headers in ({}, {"Host": "localhost:9"}, {"Host": "[::1]"}, {"Origin": url}):
            assert await post(url, headers=JSON | headers) == (200, {"length": 2})
        typed = {"Content-Type": "application/json; charset=utf-8"}
        assert (await post(url, headers=typed))[0] == 200


async def test_with_a_token_any_host_and_still_no_other_site() -> None:
    async with echoing(token="right") as (service, url):
        right = JSON | {"Authorization": "Bearer right", "Host": "far.example"}
        assert (await post(url, headers=right))[0] == 200
        assert (await post(url, headers=right | {"Origin": "https://far.example"}))[0] == 200
        assert (await post(url, headers=right | {"Origin": "https://evil.example"}))[0] == 403
        assert (await post(url, headers=JSON | {"Host": "far.example"}))[0] == 401
        assert service.handled == 2


# ---------------------------------------------------------------------------------------------------------------------
# What it takes


async def test_bodies_are_bounded_before_they_are_read() -> None:
    async with echoing() as (service, url):
        assert await post(url, b"x" * MOST) == (200, {"length": MOST})
        bomb = gzip.compress(b" " * (64 << 20))
        assert (await post(url, bomb, JSON | {"Content-Encoding": "gzip"}))[0] == 415

        async def parts():
            for _ in range(3):
                yield b"x" * (MOST // 2)

        status, answer = await post(url, parts())
        assert status == 413 and f"larger than {MOST} bytes; send less" in answer["error"]
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        head = "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {1 << 50}\r\n\r\n".encode())  # and no byte of it
        assert b" 413 " in await reader.readline()
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\nno number\r\n".encode())
        assert b" 400 " in await reader.readline()
        writer.close()
        assert service.handled == 1


async def test_bodies_under_way_are_bounded_together() -> None:
    async with echoing(max_pending_bytes=100) as (service, url):
        first = asyncio.create_task(post(url, b"x" * 90, path="/wait"))
        await until(lambda: service._open)
        status, answer = await post(url, b"x" * 20)
        assert status == 429 and "90 bytes of requests are under way, 20 more are too many" in answer["error"]
        assert (await post(url, b"x" * 10))[0] == 200
        service.go.set()
        assert await first == (200, {"length": 90})
        assert (await post(url, b"x" * 200))[0] == 200  # alone it may be


@pytest.mark.parametrize("headers", [{f"X-{i}": "" for i in range(80)}, {"X": "x" * 9_000}], ids=["many", "long"])
async def test_headers_are_bounded(headers: dict[str, str]) -> None:
    async with echoing() as (service, url), aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health", headers=headers) as response:
            assert response.status == 400
        assert service.handled == 0


# ---------------------------------------------------------------------------------------------------------------------
# That nobody keeps it waiting


HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextlib.asynccontextmanager
async def dripping(port: int, count: int, begun: bytes) -> AsyncIterator[list[asyncio.Task[bytes]]]:
    """Connections that have begun a request and send a header's byte now and then; what each reads until its end."""

    async def drip() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        said = b""

        async def collect() -> None:
            nonlocal said
            with contextlib.suppress(ConnectionError):  # a reset does not take back what was read before it
                while more := await reader.read(2**16):
                    said += more

        read = asyncio.create_task(collect())
        with contextlib.suppress(ConnectionError):
            while begun and not read.done():
                await asyncio.sleep(0.05)
                writer.write(b"x")
                await writer.drain()
        try:
            await read
            return said
        finally:
            writer.close()

    tasks = [asyncio.create_task(drip()) for _ in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("begun", [b"", HEAD + b"X"], ids=["silence", "headers"])
async def test_half_open_requests_are_cut_off(begun: bytes) -> None:
    async with echoing(header_seconds=2) as (service, url), dripping(service.port, 300, begun) as half_open:
        assert service._connections is not None
        await until(lambda: service._connections.open > 100)
        assert (await post(url))[0] == 200  # meanwhile
        async with asyncio.timeout(20):
            assert set(await asyncio.gather(*half_open)) == {b""}
        await until(lambda: service._connections.open == 0)
        assert service._connections.late == 300 and service.handled == 1


async def test_a_body_that_drips_is_refused() -> None:
    async with (
        echoing(body_seconds=0.5, header_seconds=2) as (service, _),
        dripping(service.port, 3, HEAD + b"Content-Length: 60000\r\n\r\n{") as slow,
    ):
        await asyncio.wait(slow, timeout=20)
        for answer in [one.result() for one in slow]:
            assert b" 408 " in answer and b"the body was not there after 0.5 s; send it at once" in answer
        assert service.handled == 0


async def test_a_connection_that_idles_is_closed_and_one_that_asks_is_not() -> None:
    async with echoing(idle_seconds=1.5, header_seconds=20) as (service, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        for _ in range(5):
            await asyncio.sleep(0.4)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b'{"length": 0}' in await reader.readuntil(b"}")
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()
        assert service.handled == 5


async def test_who_takes_nothing_of_an_answer_is_cut_off() -> None:
    async with echoing(stall_seconds=0.5) as (service, _):
        with socket.create_connection(("127.0.0.1", service.port)) as caller:
            caller.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: service.sending)
            await until(lambda: not service.sending)
        assert service._connections is not None and service._connections.late == 1


async def test_a_request_may_take_its_time() -> None:
    """The deadlines are the caller's; a handler has none."""
    async with echoing(header_seconds=1, body_seconds=1, idle_seconds=1, stall_seconds=1) as (service, url):
        asked = asyncio.create_task(post(url, path="/wait"))
        await until(lambda: service._open)
        await asyncio.sleep(2)
        service.go.set()
        assert await asked == (200, {"length": 2})


async def test_one_address_does_not_take_all_connections() -> None:
    async with echoing(max_connections=8, address_share=0.5) as (service, url):
        held = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(6)]
        assert service._connections is not None
        await until(lambda: service._connections.refused == 2)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))) as neighbour,
            neighbour.get(f"{url}/health") as response,
        ):
            assert response.status == 200
        for _, writer in held:
            writer.close()
        await until(lambda: not service._connections.open)
        assert (await post(url))[0] == 200


async def test_who_comes_when_all_connections_are_taken_waits_for_one() -> None:
    async with echoing(max_connections=2, address_share=1.0) as (service, url):
        held = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(2)]
        await until(lambda: service._connections.open == 2)
        late = asyncio.create_task(post(url))
        await asyncio.sleep(0.3)
        assert not late.done() and service._connections.open == 2
        held[0][1].close()
        assert (await late)[0] == 200
        held[1][1].close()


async def test_connections_leave_descriptors_for_what_they_ask_for(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    async with echoing(max_connections=100, address_share=1.0) as (service, url):
        held = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(3)]
        assert service._connections is not None
        await until(lambda: service._connections.open == 2)
        await asyncio.sleep(0.2)
        assert service._connections.open == 2
        for _, writer in held:
            writer.close()
        assert (await post(url))[0] == 200


async def test_limits_are_checked() -> None:
    config = EchoConfig()
    for name in ("header_seconds", "body_seconds", "idle_seconds", "stall_seconds", "address_share"):
        for value in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"EchoConfig.{name}"):
                replace(config, **{name: value})
    for name in ("max_connections", "max_headers", "max_header_bytes", "max_pending_bytes"):
        for value in (0, -1, 2**70, float("nan")):
            with pytest.raises(ValueError, match=f"EchoConfig.{name}"):
                replace(config, **{name: value})


# ---------------------------------------------------------------------------------------------------------------------
# TLS


async def test_over_tls_those_who_trust_it_are_answered(tmp_path) -> None:
    cert, key = make_certificate(tmp_path)
    async with echoing(tls_cert=cert, tls_key=key, header_seconds=3) as (service, url):
        assert url.startswith("https://")
        assert (await post(url, ssl=trusting(cert)))[0] == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await post(url)
        with pytest.raises(aiohttp.ClientError):
            await post(url.replace("https", "http"))
        assert service.handled == 1
        async with dripping(service.port, 20, b"") as half_open, asyncio.timeout(20):
            await asyncio.gather(*half_open)  # their handshake never comes
        await until(lambda: not service._connections.open)


async def test_certificates_that_do_not_fit_are_refused_by_name(tmp_path) -> None:
    cert, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    locked, locked_key = make_certificate(tmp_path, "locked", password="secret")
    for given, words in (
        ({"tls_cert": cert}, "EchoConfig.tls_cert=.*service.pem without tls_key: give the certificate and its key"),
        ({"tls_key": key}, "EchoConfig.tls_key=.*service.key without tls_cert"),
        ({"tls_cert": cert, "tls_key": "/nowhere"}, "EchoConfig.tls_key=/nowhere cannot be read: No such file"),
        ({"tls_cert": str(tmp_path), "tls_key": key}, "tls_cert=.* cannot be read: Is a directory"),
        ({"tls_cert": cert, "tls_key": other}, r"not a certificate \(PEM\) and its key .*\(key values mismatch\)"),
        ({"tls_cert": key, "tls_key": key}, r"not a certificate \(PEM\) and its key"),
        ({"tls_cert": locked, "tls_key": locked_key}, "its key without a password"),
    ):
        with pytest.raises(ValueError, match=words):
            EchoConfig(**given)
    for file in ("/nowhere", key):
        with pytest.raises(ValueError, match=f"{file} is not a file of certificates"):
            trusting(file)


# ---------------------------------------------------------------------------------------------------------------------
# Clients


@contextlib.asynccontextmanager
async def answering(answer) -> AsyncIterator[str]:
    """The address of a server that is none of ours."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_client_follows_nobody_and_takes_no_endless_answer() -> None:
    asked: list[str] = []

    async def elsewhere(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response({"status": "ok", "tier": "A", "layers": {}})

    async with answering(elsewhere) as other:

        async def redirects(request: web.BaseRequest) -> web.StreamResponse:
            return web.json_response({}, status=307, headers={"Location": f"{other}{request.path}"})

        async with answering(redirects) as url:
            with pytest.raises(SandboxError, match="is 307"):
                async with RemotePool(url, token="secret"):
                    pass

        async def turns(request: web.BaseRequest) -> web.StreamResponse:
            if request.path == "/call":
                return await redirects(request)
            return web.json_response({"status": "ok", "tier": "A", "layers": {}})

        async with answering(turns) as url, RemotePool(url, token="secret") as remote:
            result = await remote.call("", "f", {})
            assert result.is_infrastructure and "307" in result.error
    assert not asked

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" " * (1 << 20))
        return response

    async with answering(endless) as url:
        with pytest.raises(SandboxError, match="AnswerTooLarge: the answer is longer than"):
            async with RemotePool(url):
                pass
