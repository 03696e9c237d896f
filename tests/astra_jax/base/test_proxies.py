"""Proxies of the environment: never for this machine, and named where an answer may be theirs."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import httpx2
import openai
import pytest
from aiohttp import web

from astra_jax.base.errors import InputError
from astra_jax.base.proxies import exempt_this_machine, via
from astra_jax.evaluation import preflight
from astra_jax.evaluation.harness import EvaluationError
from astra_jax.evaluation.suite import ModelEndpoint
from synthesis.core.endpoint_apis import http_client
from synthesis.core.mirror import _downloaded
from synthesis.pipeline.embedding import EmbeddingError, EndpointConfig, EndpointEmbedder

USER = ":".join(("user", "p@ss"))

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@asynccontextmanager
async def answering(status: int, text: str, host: str = "127.0.0.1") -> AsyncIterator[str]:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(status=status, text=text, content_type="text/html")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    try:
        yield f"{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("given", [None, "", "corp.example", " a.example , ,b.example,", "*", "corp.example,*"])
@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_this_machine_is_exempt_for_every_client(monkeypatch, given, variable, case) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    if given is not None:
        monkeypatch.setenv(case("no_proxy"), given)
    exempt_this_machine()
    for host in ("localhost", "127.0.0.1", "127.0.1.1", "::1", socket.gethostname(), "localhost:80", "127.0.0.1:8000"):
        assert urllib.request.proxy_bypass(host), host
    kept = [one for one in ("a.example", "b.example", "corp.example") if one in (given or "")]
    for host in ("a.example", "b.example", "corp.example", "models.example"):
        assert bool(urllib.request.proxy_bypass(host)) == (host in kept or "*" in (given or ""))
    mounts = httpx2.Client()._mounts
    assert not any(one is not None and "//127." in pattern.pattern for pattern, one in mounts.items())
    exempt_this_machine()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
    assert os.environ["no_proxy"].count("localhost") == ("*" not in (given or ""))


def test_without_a_proxy_nothing_is_set() -> None:
    exempt_this_machine()
    assert "no_proxy" not in os.environ


@pytest.mark.parametrize(
    ("variable", "value", "url", "said"),
    [
        ("http_proxy", f"http://{USER}@proxy.example:3128/", "http://m.example/v1", "http_proxy=http://proxy.example:3128"),
        ("HTTPS_PROXY", "proxy.example:3128", "https://m.example/v1", "HTTPS_PROXY=proxy.example:3128"),
        ("all_proxy", f"socks5://{USER}@proxy.example:1080", "https://m.example", "all_proxy=socks5://proxy.example:1080"),
        ("https_proxy", "http://proxy.example:3128", "http://m.example/v1", ""),
        ("http_proxy", "http://proxy.example:3128", "http://127.9.9.9:8000/v1", ""),
        ("http_proxy", "http://proxy.example:3128", "http://localhost:8000/v1", ""),
        ("http_proxy", "http://proxy.example:3128", "http://[::1]:8000/v1", ""),
    ],
)  # fmt: skip
def test_a_message_names_the_variable_without_its_password(monkeypatch, variable, value, url, said) -> None:
    monkeypatch.setenv(variable, value)
    assert via(url) == (f" (through {said})" if said else "")
    monkeypatch.setenv("no_proxy", "m.example")
    assert via(url) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8"])
async def test_no_client_asks_a_proxy_for_this_machine(monkeypatch, tmp_path, host) -> None:
    """The proxy answered for the address of this machine, which it cannot know."""
    for name in NAMES[:3]:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with answering(418, "of this machine", host) as place:
        with pytest.raises(EvaluationError, match="answered 418 .* of this machine"):
            await preflight.check(ModelEndpoint(f"http://{place}/v1", "m", "k"), "model_url")
        with pytest.raises(EmbeddingError, match="418"):
            await EndpointEmbedder(EndpointConfig(f"http://{place}/v1", "m", tries=1)).embed(["a"])
        for package, kind in ((openai, openai.DefaultAioHttpClient), (anthropic, anthropic.DefaultAioHttpClient)):
            limits = type(package.DEFAULT_CONNECTION_LIMITS)
            client = http_client(kind, package.Timeout, limits, f"http://{place}", 1, {})
            assert (await client.get(f"http://{place}")).text == "of this machine"
            await client.aclose()
        client = http_client(httpx2.AsyncClient, httpx2.Timeout, httpx2.Limits, f"http://{place}", 1, {})
        assert (await client.get(f"http://{place}")).text == "of this machine"
        await client.aclose()


@pytest.mark.parametrize("status", [403, 407, 503])
async def test_an_answer_of_a_proxy_is_told_as_one(monkeypatch, tmp_path, status) -> None:
    async with answering(status, "<html>Access denied</html>") as place:
        monkeypatch.setenv("http_proxy", f"http://{USER}@{place}")
        said = rf"http://m.example/v1 \(through http_proxy=http://{place}\)"
        with pytest.raises(EvaluationError, match=said) as first:
            await preflight.check(ModelEndpoint("http://m.example/v1", "m", "k"), "model_url")
        with pytest.raises(EmbeddingError, match=said) as second:
            await EndpointEmbedder(EndpointConfig("http://m.example/v1", "m", tries=1)).embed(["a"])
        assert "p@ss" not in f"{first.value}{second.value}"


def test_a_proxy_that_is_away_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"through http_proxy=http://127.0.0.1:9\) cannot be read"):
        _downloaded("http://m.example/tools.json", tmp_path)
