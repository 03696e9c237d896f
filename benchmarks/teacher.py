"""Requests a second of the teacher's client on an endpoint of known latency, of what so many in flight could make.

`stage` is a stage as it is run: prompt, request, answer checked by its type, journal. `teacher` is the client alone,
our limits and books over `openai` with its aiohttp transport. `openai` is the same requests through the package's
default client, `openai_raw` that without its parsing of the answer. The endpoint is a process of its own, and says how
many requests it saw at once and how late its answers were. Processor time a request tells what a rate would be on a
processor of its own.

    python -m benchmarks.teacher --save
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from absl import flags, logging

from astra_jax.base.settings import Bound, Count, SecondsOrZero
from astra_jax.base.typed import decode_json
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag

_REQUESTS = number_flag(
    "requests", 51_200, Annotated[int, Bound(least=100, most=2**31 - 1)], "Requests of one measurement."
)
_IN_FLIGHT = number_flag("in_flight", 256, Count, "Requests in flight.")
_LATENCY = number_flag("latency", 0.1, SecondsOrZero, "Seconds from a request to its answer.")
_TURNS = number_flag("turns", 3, Count, "Measurements of each side; the figures are medians.")
_SIDES = flags.DEFINE_list("sides", ["stage", "teacher", "openai_raw", "openai"], "What to measure.")
_UVLOOP = flags.DEFINE_bool("uvloop", False, "uvloop's event loop for the client, where it is installed.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to benchmarks/results/teacher.jsonl.")

PROMPT = "What is the capital of {{ country }}?" + " Think of rivers, of roads and of what was built there." * 20


class CapitalAnswer(msgspec.Struct, frozen=True):
    city: str
    certain: bool


Ask = Callable[[int], Awaitable[object]]


async def rate(ask: Ask, requests: int, in_flight: int) -> tuple[float, float]:
    """Seconds and processor seconds of so many requests, once all connections are open."""
    numbers = iter(range(in_flight, requests + in_flight))

    async def worker() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*map(ask, range(in_flight)))
    started, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return time.perf_counter() - started, time.process_time() - processor


async def measure(side: str, url: str, requests: int, in_flight: int, folder: Path) -> tuple[float, float]:
    import openai

    from synthesis.core.stages import Journal, run_stage
    from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig, render_prompt

    def variables(number: int) -> dict[str, Any]:
        return {"country": f"number {number}"}

    if side in ("teacher", "stage"):
        teacher = OpenAITeacher(OpenAITeacherConfig(url, "m", concurrency=in_flight))

        async def ask(number: int) -> list[CapitalAnswer]:
            return [await teacher.ask(CapitalAnswer, variables(number), language="en", seed=number)]

        if side == "teacher":
            return await rate(ask, requests, in_flight)
        with Journal(folder / f"{time.time_ns()}.sqlite") as journal:
            await asyncio.gather(*map(ask, range(in_flight)))
            started, processor = time.perf_counter(), time.process_time()
            await run_stage(
                "ask", ask, range(requests), key=str, out=CapitalAnswer, journal=journal, concurrency=in_flight
            )
            return time.perf_counter() - started, time.process_time() - processor

    schema = msgspec.json.schema(CapitalAnswer)
    options: dict[str, Any] = {
        "model": "m",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "capital_answer", "schema": schema, "strict": True},
        },
        "temperature": 1.0,
        "max_tokens": 16_384,
    }
    limits = openai.DEFAULT_CONNECTION_LIMITS.__class__(max_connections=in_flight, max_keepalive_connections=in_flight)
    async with openai.AsyncOpenAI(
        base_url=url, api_key="EMPTY", max_retries=0, http_client=openai.DefaultAsyncHttpxClient(limits=limits)
    ) as client:
        create: Any = client.chat.completions.create
        if side == "openai_raw":
            create = client.chat.completions.with_raw_response.create

        async def asked(number: int) -> CapitalAnswer:
            prompt = render_prompt(CapitalAnswer, variables(number), "en")
            given = await create(messages=[{"role": "user", "content": prompt}], seed=number, **options)
            text = (
                msgspec.json.decode(given.content)["choices"][0]["message"]["content"]
                if side == "openai_raw"
                else given.choices[0].message.content
            )
            return decode_json(text, CapitalAnswer)

        return await rate(asked, requests, in_flight)


@contextlib.contextmanager
def endpoint(seen: dict[str, Any]) -> Iterator[str]:
    """The address of an endpoint; puts into `seen` what it saw."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.teacher_side", str(_LATENCY.value)],
        cwd=rows.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        seen.update(json.loads(process.communicate()[0]))
    finally:
        process.kill()
        process.wait()


def figures(folder: Path) -> dict[str, Any]:
    import synthesis.pipeline.prompts

    (folder / "en").mkdir()
    (folder / "en" / "capital_answer.jinja").write_text(PROMPT)
    synthesis.pipeline.prompts.PROMPTS = folder
    run: Any = asyncio.run
    if _UVLOOP.value:
        import uvloop

        run = uvloop.run
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES.value}
    for _ in range(_TURNS.value):
        for side, of_side in measured.items():
            # The slow sides need not take ten minutes to be measured.
            count = _REQUESTS.value if not side.startswith("openai") else max(100, _REQUESTS.value // 10)
            one: dict[str, float] = {}
            with endpoint(one) as url:
                seconds, processor = run(measure(side, url, count, _IN_FLIGHT.value, folder))
            of_side.append({**one, "seconds": seconds / count, "processor": processor / count})
    ideal = _IN_FLIGHT.value / _LATENCY.value if _LATENCY.value else float("inf")
    row: dict[str, Any] = {
        "in_flight": _IN_FLIGHT.value,
        "latency_seconds": _LATENCY.value,
        "ideal_per_second": round(ideal),
        "uvloop": _UVLOOP.value,
    }
    for side, of_side in measured.items():
        per_second = 1 / statistics.median(one["seconds"] for one in of_side)
        row[side] = {
            "per_second": round(per_second),
            "of_ideal": round(per_second / ideal, 3),
            "processor_us_a_request": round(statistics.median(one["processor"] for one in of_side) * 1e6),
            "endpoint_saw_in_flight": max(one["peak"] for one in of_side),
            "endpoint_late_ms": statistics.median(one["late_ms"] for one in of_side),
        }
    return row


def main() -> None:
    logging.set_verbosity(logging.WARNING)  # the openai package would log each request
    with tempfile.TemporaryDirectory() as folder:
        row = figures(Path(folder))
    rows.report("teacher", row, save=_SAVE.value)


if __name__ == "__main__":
    cli.run(main)
