"""Validation: each kind of unfit code is rejected with its reason, fit code is not, in process and over HTTP."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from serving import serving

from sandbox import Reason, SandboxConfig, SandboxPool, validate, validate_call
from sandbox.remote import RemotePool

pytestmark = pytest.mark.asyncio(loop_scope="module")


def tool(*body: str, head: str = "") -> str:
    return head + "\ndef f(x=1):\n" + textwrap.indent("\n".join(body), "    ") + "\n"


FIT = {
    "table": tool("return T[x]", head="T = {1: {'a': [1, 2.5, None]}}"),
    "modules that compute": tool(
        "print('seen', x)",
        "return [json.dumps(x), math.pi, C(['b', 'a']).most_common(), hashlib.sha256(b'').hexdigest(), quote('é')]",
        head="import json, math, hashlib\nfrom collections import Counter as C\nfrom urllib.parse import quote",
    ),
    "dates from arguments": tool(
        "return [str(datetime.date(2024, 2, x)), time.strftime('%Y', time.gmtime(0)), datetime.datetime(1, 1, x).day]",
        head="import datetime, time",
    ),
    "randomness of its own": tool("return random.Random(x).random()", head="import random"),
    "sleep": tool("time.sleep(3600)", "return x", head="import time"),
    "dataclass": tool(
        "return asdict(P(x))", head="from dataclasses import asdict, dataclass\n@dataclass\nclass P:\n    x: int"
    ),
    "sets": tool("return list({'a', 'b', 'c', x})"),
    "results of common types": tool(
        "return {1: {'b', 'a', 'c'}, Colour.RED: P(Decimal('0.1')), 'day': date(2026, 1, x)}",
        head="from dataclasses import dataclass\nfrom datetime import date\nfrom decimal import Decimal\nimport enum\n"
        "class Colour(enum.Enum):\n    RED = 'red'\n@dataclass\nclass P:\n    price: Decimal",
    ),
    "byte order mark": "\ufeff" + tool("return x"),
    "import inside": tool("import json as j", "return j.loads('[1]')"),
    "__name__": tool("return [__name__, f.__module__]"),
    "modules of its own": tool(
        "return [T['modules'][0], N().modules]", head="T = {'modules': [1]}\nclass N:\n    modules = 2"
    ),
}  # fmt: skip
UNFIT = {
    "keys that collide": (tool("return {1: 'a', '1': 'b'}"), Reason.FAILS, "keys 1 and '1' are one in JSON"),
    "an object": (tool("return [object()]"), Reason.FAILS, "its [0] is an object, which has no JSON form"),
    "syntax": ("def f(:\n", Reason.DOES_NOT_PARSE, "line 1"),
    "random": (tool("return random.random()", head="import random"), Reason.NONDETERMINISTIC, "returned 0.8"),
    "entropy": (tool("return uuid.uuid4().hex", head="import uuid"), Reason.NONDETERMINISTIC, "another random seed"),
    "secrets": (tool("return secrets.token_hex(8)", head="import secrets"), Reason.NONDETERMINISTIC, "returned"),
    "prints at random": (tool("print(random.random())", head="import random"), Reason.NONDETERMINISTIC, "printed '0."),
    "fails at random": (
        tool("if random.random() < 0.5:", "    raise ValueError('unlucky')", head="import random"),
        Reason.NONDETERMINISTIC,
        "ValueError: unlucky",
    ),
    "address": (tool("return repr(object())"), Reason.NONDETERMINISTIC, "object at 0x"),
    "addresses kept": (tool("return id(KEPT)", head="KEPT = {}"), Reason.NONDETERMINISTIC, "returned"),
    "order by address": (
        tool(
            "return [o.n for o in {Thing(n) for n in range(40)}]",
            head="class Thing:\n    def __init__(self, n):\n        self.n = n",
        ),
        Reason.NONDETERMINISTIC,
        "returned [",
    ),
    "clock": (tool("return time.time()", head="import time"), Reason.READS_CLOCK, "time.time"),
    "clock without effect": (tool("time.perf_counter_ns()", head="import time"), Reason.READS_CLOCK, "perf_counter_ns"),
    "clock by name": (tool("return now()", head="from time import time as now"), Reason.READS_CLOCK, "time.time"),
    "today": (tool("return str(datetime.date.today())", head="import datetime"), Reason.READS_CLOCK, "read the clock"),
    "now": (tool("return str(d.now())", head="from datetime import datetime as d"), Reason.READS_CLOCK, "clock"),
    "weekday": (tool("return time.strftime('%A')", head="import time"), Reason.READS_CLOCK, "time.strftime"),
    "clock at load": (tool("return x", head="import time\nBORN = time.monotonic()"), Reason.READS_CLOCK, "monotonic"),
    "socket": (tool("return x", head="import socket"), Reason.NEEDS_NETWORK, "imports socket"),
    "urllib": (tool("return x", head="import urllib.request"), Reason.NEEDS_NETWORK, "urllib.request"),
    "from urllib": (tool("return x", head="from urllib import request"), Reason.NEEDS_NETWORK, "urllib.request"),
    "requests": (tool("import requests", "return x"), Reason.NEEDS_NETWORK, "imports requests"),
    "hidden socket": (tool("return __import__('so' + 'cket').AF_INET"), Reason.NEEDS_NETWORK, "imports socket"),
    "os": (tool("return os.getpid()", head="import os"), Reason.DISALLOWED_IMPORT, "imports os"),
    "times": (tool("return list(os.times())", head="import os"), Reason.DISALLOWED_IMPORT, "imports os"),
    "root": (tool("return os.stat('/').st_ino", head="import os"), Reason.DISALLOWED_IMPORT, "imports os"),
    "timer": (tool("return signal.getitimer(0)", head="import signal"), Reason.DISALLOWED_IMPORT, "imports signal"),
    "threads": (
        tool("return threading.get_native_id()", head="import threading"),
        Reason.DISALLOWED_IMPORT,
        "threading",
    ),
    "loaded": (tool("return sorted(sys.modules)", head="import sys"), Reason.NONDETERMINISTIC, "sys.modules"),
    "loaded, renamed": (tool("return len(s.modules)", head="import sys as s"), Reason.NONDETERMINISTIC, "sys.modules"),
    "loaded, from": (
        tool("return len(modules)", head="from sys import modules"),
        Reason.NONDETERMINISTIC,
        "sys.modules",
    ),
    "loaded, by another name": (
        tool("return 'json' in s.modules", head="import sys\ns = sys"),
        Reason.NONDETERMINISTIC,
        "sys.modules",
    ),
    "loaded, through another module": (
        tool("return len(enum.sys.modules)", head="import enum"),
        Reason.NONDETERMINISTIC,
        "sys.modules",
    ),
    "loaded, as a string": (
        tool("return ['json' in getattr(sys, 'modules'), vars(sys)['modules']['json']]", head="import sys"),
        Reason.NONDETERMINISTIC,
        "sys.modules",
    ),
    "loaded, in disguise": (
        tool("return sorted(getattr(sys, 'mod' + 'ules'))", head="import sys"),
        Reason.NONDETERMINISTIC,
        "returned [",
    ),
    "root, through another module": (
        tool("return random._os.stat('/').st_dev", head="import random"),
        Reason.NONDETERMINISTIC,
        "returned",
    ),
    "ctypes": (tool("return x", head="import ctypes"), Reason.DISALLOWED_IMPORT, "imports ctypes"),
    "subprocess": (tool("from subprocess import run", "return x"), Reason.DISALLOWED_IMPORT, "imports subprocess"),
    "third party": (tool("return x", head="import numpy"), Reason.DISALLOWED_IMPORT, "imports numpy"),
    # Every prefix of every such name was written down: minutes, in the host's process.
    "imports of long names": (
        tool("return x", head=f"from {'.'.join(['a'] * 3_000)} import {', '.join(f'b{n}' for n in range(3_000))}"),
        Reason.DISALLOWED_IMPORT,
        "imports a.a",
    ),
    "relative": (tool("return x", head="from . import tables"), Reason.DISALLOWED_IMPORT, "imports ."),
    "hidden import": (tool("return str(__import__('o' + 's'))"), Reason.DISALLOWED_IMPORT, "imports os"),
    "raises": (tool("raise KeyError(x)"), Reason.FAILS, "KeyError: 1"),
    "no function": ("def g():\n    return 1\n", Reason.FAILS, "no function 'f'"),
    "no JSON": (tool("return (n for n in [x])"), Reason.FAILS, "not JSON"),
    "raises at load": ("1 / 0\n", Reason.FAILS, "ZeroDivisionError"),
    "never ends": (tool("while True:", "    pass"), Reason.FAILS, "CPU time"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxConfig()) as pool:
        yield pool


@pytest.mark.parametrize("case", FIT)
async def test_fit_code_passes(pool: SandboxPool, case: str) -> None:
    assert await validate(pool, FIT[case], [("f", {}), ("f", {"x": 1})]) is None


@pytest.mark.parametrize("case", UNFIT)
async def test_unfit_code_is_rejected_with_its_reason(pool: SandboxPool, case: str) -> None:
    code, reason, words = UNFIT[case]
    finding = await validate(pool, code, [("f", {})])
    assert finding is not None and finding.reason is reason, finding
    assert words in finding.detail and "\n" not in finding.detail


async def test_the_real_clock_is_noticed(pool: SandboxPool) -> None:
    code = tool(
        "moment = (ctypes.c_long * 2)()", "ctypes.CDLL(None).clock_gettime(1, moment)", "return list(moment)",
        head="import ctypes",
    )  # fmt: skip
    finding = await validate(pool, code, [("f", {})], allowed=frozenset({"ctypes"}))
    assert finding is not None and finding.reason is Reason.NONDETERMINISTIC


async def test_only_what_is_called_is_judged_by_running(pool: SandboxPool) -> None:
    code = "import random\ndef f():\n    return 1\ndef g():\n    return random.random()\n"
    assert await validate(pool, code, [("f", {})]) is None
    assert (await validate(pool, code, [("f", {}), ("g", {})])).reason is Reason.NONDETERMINISTIC


async def test_the_first_result_is_that_of_a_plain_call(pool: SandboxPool) -> None:
    validation = await validate_call(pool, FIT["modules that compute"], "f", {"x": 7})
    plain = await pool.call(FIT["modules that compute"], "f", {"x": 7})
    assert (validation.result.value, validation.result.stdout) == (plain.value, plain.stdout)


async def test_over_http_it_is_the_same(pool: SandboxPool) -> None:
    async with serving(pool) as (_, url), RemotePool(url) as remote:
        for case in ("random", "today", "hidden socket"):
            code, reason, _ = UNFIT[case]
            assert (await validate(remote, code, [("f", {})])).reason is reason
        assert await validate(remote, FIT["table"], [("f", {})]) is None
