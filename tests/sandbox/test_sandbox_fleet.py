"""Several services as one sandbox: placement, one that dies and comes back, all else as with one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

import pytest
from aiohttp import web
from serving import serving

from sandbox import CallResult, Outcome, Sandbox, SandboxConfig, SandboxError, SandboxPool
from sandbox.fleet import SandboxFleet

TOOL = "import random\n\ndef chance():\n    return random.random()\n\ndef fail():\n    raise KeyError('x')\n"
DONE = json.dumps(asdict(CallResult(Outcome.OK, 1, ended_by="return"))).encode()


@dataclass
class Stage:
    """What a simulated service does, and what it saw. Its calls take no processor, and end when `hold` is set."""

    tier: str = "A"
    port: int = 0
    calls: list[str] = field(default_factory=list)  # the module or its digest
    running: int = 0
    most: int = 0
    status: int = 200
    hangs: bool = False
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._health)
        app.router.add_post("/call", self._call)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(3600)
        return web.json_response({"status": "ready", "tier": self.tier, "layers": {"of": str(self.port)}})

    async def _call(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(body.get("code") or body["digest"])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.hold.wait()
            return web.Response(body=DONE if self.status == 200 else b"{}", status=self.status)
        finally:
            self.running -= 1


async def started(*stages: Stage, stack: contextlib.AsyncExitStack) -> list[str]:
    return [await stack.enter_async_context(one.answering()) for one in stages]


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_calls_go_where_the_fewest_are_under_way() -> None:
    """So that of four services with the same latency each has a quarter at every moment: four times what one does."""
    stages = [Stage() for _ in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        urls = await started(*stages, stack=stack)
        fleet = await stack.enter_async_context(SandboxFleet(urls))
        calls = [asyncio.create_task(fleet.call(f"# {i}", "f", {})) for i in range(64)]
        await until(lambda: sum(one.running for one in stages) == 64)
        assert [one.running for one in stages] == [16] * 4
        stages[2].hold.set()  # the fast one
        await until(lambda: stages[2].running == 0)
        calls += [asyncio.create_task(fleet.call(f"# {i}", "f", {})) for i in range(64, 80)]
        await until(lambda: len(stages[2].calls) == 32)
        for one in stages:
            one.hold.set()
        assert all(result.ok for result in await asyncio.gather(*calls))
        assert [len(one.calls) for one in stages] == [16, 16, 32, 16]


async def test_one_call_at_a_time_stays_where_its_module_is_open() -> None:
    stages = [Stage() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(SandboxFleet(await started(*stages, stack=stack)))
        for one in stages:
            one.hold.set()
        for _ in range(4):
            for name in ("a", "b", "c"):
                assert (await fleet.call(f"# {name}", "f", {})).ok
        assert sorted(len(one.calls) for one in stages) == [4, 4, 4]
        assert all(sum(said.startswith("#") for said in one.calls) == 1 for one in stages)  # then by its digest


async def test_one_that_dies_is_left_out_and_comes_back(caplog) -> None:
    one, two = Stage(), Stage()
    two.hold.set()
    async with contextlib.AsyncExitStack() as stack:
        urls = await started(two, stack=stack)
        async with contextlib.AsyncExitStack() as first:
            urls = [*await started(one, stack=first), *urls]
            fleet = await stack.enter_async_context(SandboxFleet(urls))
            calls = [asyncio.create_task(fleet.call(f"# {i}", "f", {})) for i in range(8)]
            await until(lambda: one.running == 4)
        results = await asyncio.gather(*calls)  # it ended while four of them ran there
        assert all(result.ok for result in results) and len(two.calls) == 8
        assert list(fleet.out) == [urls[0]]
        assert all([(await fleet.call("# more", "f", {})).ok for _ in range(8)])
        assert len(one.calls) == 4 and len(two.calls) == 16
        one.hold.set()
        await started(one, stack=stack)
        await until(lambda: not fleet.out)
        assert all(result.ok for result in await asyncio.gather(*(fleet.call(f"# {i}", "f", {}) for i in range(8))))
        assert len(one.calls) == 8
    said = [record.getMessage() for record in caplog.records if record.name == "sandbox.fleet"]
    assert sum("is taken out of service" in line for line in said) == 1 and "is back in service" in said[-1]


async def test_calls_of_one_that_hangs_are_made_elsewhere() -> None:
    """A machine that hangs resets no connection; a call that only takes long is waited for."""
    hung, slow = Stage(), Stage()
    async with contextlib.AsyncExitStack() as stack:
        urls = await started(hung, slow, stack=stack)
        fleet = await stack.enter_async_context(SandboxFleet(urls, look_seconds=0.05))
        calls = [asyncio.create_task(fleet.call(f"# {i}", "f", {})) for i in range(4)]
        await until(lambda: hung.running == slow.running == 2)
        await asyncio.sleep(0.5)  # ten looks
        assert len(hung.calls) == len(slow.calls) == 2 and not fleet.out
        hung.hangs = True
        await until(lambda: slow.running == 4)
        assert list(fleet.out) == [urls[0]] and "3 looks in a row were not answered" in fleet.out[urls[0]]
        slow.hold.set()
        assert all(result.ok for result in await asyncio.gather(*calls))
        hung.hangs = False
        hung.hold.set()
        await until(lambda: not fleet.out)


async def test_one_that_answers_no_call_is_left_out_too_and_where_all_are_a_call_says_so() -> None:
    broken, whole = Stage(status=500), Stage()
    broken.hold.set()
    whole.hold.set()
    async with contextlib.AsyncExitStack() as stack:
        urls = await started(broken, whole, stack=stack)
        fleet = await stack.enter_async_context(SandboxFleet(urls))
        results = await asyncio.gather(*(fleet.call(f"# {i}", "f", {}) for i in range(6)))
        assert all(result.ok for result in results) and list(fleet.out) == [urls[0]]
        whole.status = 500
        result = await fleet.call("# all", "f", {})
        assert result.kind is Outcome.ENV_DIED and result.is_infrastructure and "500" in result.error


async def test_one_that_starts_late_joins_and_none_at_all_is_an_error() -> None:
    late, early = Stage(), Stage()
    async with contextlib.AsyncExitStack() as stack:
        async with late.answering() as url:
            pass  # its port is free again, and known
        with pytest.raises(SandboxError, match=f"no sandbox service answers at {url}"):
            await stack.enter_async_context(SandboxFleet([url]))
        fleet = await stack.enter_async_context(SandboxFleet([url, *await started(early, stack=stack)]))
        assert list(fleet.out) == [url] and fleet.layers == {"of": str(early.port)}
        await started(late, stack=stack)
        await until(lambda: not fleet.out)


async def test_the_weakest_isolation_counts() -> None:
    strong, weak, later = Stage(tier="A"), Stage(tier="B"), Stage(tier="A")
    async with contextlib.AsyncExitStack() as stack:
        urls = await started(strong, weak, stack=stack)
        fleet = await stack.enter_async_context(SandboxFleet(urls, minimum_tier="B"))
        assert (fleet.tier, fleet.layers) == ("B", {"of": str(weak.port)})
        with pytest.raises(SandboxError, match="tier B"):
            await stack.enter_async_context(SandboxFleet(urls, minimum_tier="A"))
        async with contextlib.AsyncExitStack() as first:
            others = await started(later, strong_two := Stage(), stack=first)
            fleet = await first.enter_async_context(SandboxFleet(others, minimum_tier="A"))
            later.status, later.tier = 500, "C"
            later.hold.set()
            strong_two.hold.set()
            assert (await asyncio.gather(*(fleet.call(f"# {i}", "f", {}) for i in range(2))))[0].ok
            await asyncio.sleep(0.7)  # it is greeted, and is not what it was
            assert list(fleet.out) == [others[0]]


async def test_real_services_answer_as_one_pool_does() -> None:
    async with SandboxPool(SandboxConfig(max_slots=4)) as pool, SandboxPool(SandboxConfig(max_slots=4)) as other:
        expected = [await pool.call(TOOL, name, {}, seed=3) for name in ("chance", "fail", "none")]
        async with (
            serving(pool, token="open sesame") as (_, one),
            serving(other, token="open sesame") as (_, two),
            SandboxFleet([one, two], token="open sesame") as fleet,
        ):
            sandbox: Sandbox = fleet
            for name, wanted in zip(("chance", "fail", "none"), expected, strict=True):
                for result in await asyncio.gather(*(sandbox.call(TOOL, name, {}, seed=3) for _ in range(4))):
                    assert (result.kind, result.value, result.error) == (wanted.kind, wanted.value, wanted.error)
            assert min(pool.stats.calls, other.stats.calls) > 1
            with pytest.raises(SandboxError, match="asks for another token"):
                async with SandboxFleet([one, two], token="another"):
                    pass


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1/"]])
def test_each_service_is_named_once(urls: list[str]) -> None:
    with pytest.raises(ValueError, match="each once"):
        SandboxFleet(urls)
