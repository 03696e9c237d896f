"""One page of each kind, of data that is made to be awkward: long ids, long words, Chinese, wide tables."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import msgspec
import networkx as nx
from result_world import evaluation, result

from astra_jax.evaluation.comparison import compare
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.saved import Evaluation
from astra_jax.evaluation.table import tabulate
from astra_jax.grpo.dump import BatchDump, DumpedBatches
from astra_jax.grpo.episode_pages import write_episodes
from astra_jax.rollout.episode import Episode
from astra_jax.rollout.records import Group
from astra_jax.run.metrics import MetricWriter
from launch.quickstart import report
from launch.quickstart.ledger import write_json
from launch.quickstart.summary import MODELS
from launch.viewer.batches import BatchPages
from launch.viewer.cards import ViewerService
from launch.viewer.environments import EnvironmentPages, stored_environments
from launch.viewer.evaluation_page import write_evaluation
from launch.viewer.lists import Pages
from launch.viewer.preview_page import rendered
from launch.viewer.results import ResultPages
from launch.viewer.service import PageService, ViewerConfig
from launch.viewer.service import rendered as rendered_page
from launch.viewer.trajectories import TrajectoryPages
from launch.viewer.watch_pages import WatchService
from launch.viewer.watched import Watcher
from sandbox.interface import Sandbox
from synthesis.audit.report import AuditedData, audit
from synthesis.core.datasets import write_dataset
from synthesis.core.environment import CallRecord
from synthesis.core.rate_limits import Spent
from synthesis.core.records import (
    Answer,
    AxisScore,
    CodeExecution,
    CodeTool,
    InjectedFailure,
    Message,
    ReferenceCall,
    SubQuestion,
    ToolCall,
    ToolEnvironment,
    ToolServer,
    ToolSpec,
    Trajectory,
)
from synthesis.core.reward import Reward
from synthesis.environments.statistics import statistics_of
from synthesis.pipeline.preview import Bounds, Exchange, Forecast, Preview, Seen, StageSeen
from synthesis.trajectories.judge import AXES
from synthesis.trajectories.statistics import trajectory_statistics

LONG_ID = "facts-geography-capital_of_country_and_population_of_its_capital-000123"
SERVER = "server-of-countries-and-territories-with-a-long-name"
QUESTION = "How many people live in Norway's capital, which calling code has a phone there, and how do they compare?"
CHINESE = "请告诉我：位于北欧斯堪的纳维亚半岛西部、与瑞典接壤的国家挪威，其首都是哪一座城市？"
CODE = "def capital_of_country(country):\n    return {'capital': {'Norway': 'Oslo'}[country]}\n"
CALLS = [
    CallRecord(0, "capital_of_country", {"country": "Norway"}, "ok", '{"capital": "Oslo"}', [1]),
    CallRecord(0, "fact", {"city": "Oslo" * 12}, "tool_error", '{"error": "rate limit exceeded"}'),
]
OFFERED = ["capital_of_country", "fact", "population_of_the_largest_division", "spin"]
EXPECTED = Answer(15270.4, tolerance=0.1, unit="people")


def tool(name: str) -> CodeTool:
    properties = {
        "country": {"type": "string", "description": "Name of the country."},
        "fact": {"type": "string", "enum": ["population", "calling code"]},
    }
    spec = ToolSpec(
        name,
        f"Find the {name.replace('_', ' ')}.",
        {"type": "object", "properties": properties, "required": ["country"]},
    )
    return CodeTool(spec, CODE.replace("capital_of_country", name))


def environment(number: int, question: str = QUESTION, language: str = "en") -> ToolEnvironment:
    return ToolEnvironment(
        id=f"{LONG_ID}-{number}",
        language=language,
        domain="geography and administrative divisions",
        structure="parallel_multi_hop",
        question=question,
        answer=Answer(15270.4, tolerance=0.1, unit="people"),
        sub_questions=[
            SubQuestion(1, "What is the capital of Norway?", Answer("Oslo"), [], 1, True, "capital"),
            SubQuestion(2, f"How many live there, {'would you say, ' * 5}?", Answer(717710), [1], 2, True, "fact"),
            SubQuestion(3, CHINESE, Answer("+47"), [1], 2, True, "fact"),
            SubQuestion(4, "What is their ratio?", Answer(15270.4), [1, 2, 3], 3, True, "ratio"),
        ],
        tools=[tool("capital_of_country"), tool("population_of_the_largest_division")],
        reference_calls=[
            ReferenceCall(1, "capital_of_country", {"country": "Norway"}, {"capital": "Oslo"}, "string"),
            ReferenceCall(2, "population_of_the_largest_division", {"country": "Oslo"}, {"value": 717710.0}),
        ],
        distractors={"high": [tool("spin")], "medium": [], "low": []},
        entities=["Norway", "Oslo"],
        signature="capital>fact|fact>ratio" * 4,
        split="train",
    )


def messages(question: str) -> list[Message]:
    return [
        Message("system", "Use the tools."),
        Message("user", question),
        Message(
            "assistant", "I look both up.", "I need two capitals.",
            [ToolCall("1", "capital_of_country", {"country": "Norway"}), ToolCall("2", "fact", {"city": "Oslo" * 12})],
        ),
        Message("tool", '{"capital": "Oslo"}', tool_call_id="1", name="capital_of_country"),
        Message("tool", '{"error": "rate limit exceeded"}', tool_call_id="2", name="fact"),
        Message("assistant", "It is Oslo."),
    ]  # fmt: skip


def trajectory(number: int) -> Trajectory:
    return Trajectory(
        id=f"trajectory-{LONG_ID}-{number}",
        task_id=f"task-{LONG_ID}",
        server_id=SERVER,
        domain="geography",
        language="zh" if number % 2 else "en",
        tools=[tool("capital_of_country").spec, tool("fact").spec],
        messages=messages(CHINESE if number % 2 else f"{number}: {QUESTION}"),
        scores={axis: AxisScore(0.5 + 0.1 * (number % 5), "Every call was needed.") for axis in AXES},
        reward=0.5 + number / 200,
        injected_failures=1,
        failures=[InjectedFailure("2", "rate_limit")],
    )


def batches(folder: Path, question: str = QUESTION) -> DumpedBatches:
    """Of three updates of a run with rollouts across updates; the tokens of an episode are the characters of a text."""
    tokenizer = cast(Any, SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))))
    dump = BatchDump(
        folder, run="0123456789abcdef", identity={"grpo.seed": 0, "model.family": "qwen3"}, tokenizer=tokenizer
    )
    dump.begin(0)
    prompt, said, result = f"user: {question}\n", "capital_of_country(Norway)\n", '{"capital": "Oslo"}\n'
    text = prompt.encode("utf-8", "replace").decode() + said + result + "It is Oslo, 在挪威.\n" * 60
    mask = [0] * len(prompt) + [1] * len(said) + [0] * len(result)
    mask += [1] * (len(text) - len(mask))

    def episode(number: int, update: int) -> Episode:
        value = number / 4
        score = Reward(value, value, value, number, 4, 5, parts={"f1": value, "a_reward_of_your_own": 1 - value})
        logprobs = [-0.02 * (place % 200) * drawn for place, drawn in enumerate(mask)]
        versions = [max(0, update - (place < 700)) * drawn for place, drawn in enumerate(mask)]
        ids = [*map(ord, text)]
        said = messages(question)[1:]
        return Episode(
            LONG_ID, ids, 50, mask, logprobs, versions, CALLS, score, 2, "answered", said, None, OFFERED, EXPECTED
        )

    for update in range(3):
        groups = [
            Group(2 * update + i, LONG_ID, max(0, update - 1), [episode(n, update) for n in range(5)]) for i in range(2)
        ]
        line = dump.write(update, groups, {"counts": {"groups_sampled": 3.0, "length_bias": 0.97}})
        dump.commit(line, f"{update}" * 64, f"{update + 1}" * 64)
    return DumpedBatches(folder)


def _statistics(trajectories: list[Trajectory]) -> dict[str, Any]:
    server = ToolServer(SERVER, "Countries", "", "facts", "en", [], CodeExecution(""))
    return trajectory_statistics(trajectories, {SERVER: server})


def item(number: int) -> ItemResult:
    said = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "ls", "arguments": '{"all": true}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "a.txt"},
    ]
    problem = "" if number % 3 == 0 else "turn 3: the state differs from what was expected of a multi-turn run"
    score = float(number % 3 == 0)
    return result("miss_func", f"multi_turn_miss_func_{number:04}", 0, score, problem=problem, messages=said)


def _stage(share: float, model: str) -> Evaluation:
    missing = [[float(n < share * 10)] * 2 for n in range(10)]
    return evaluation({"base": [[1, 1], [0, 1]] * 5, "miss_func": missing}, model=model)


@contextmanager
def served(made: Callable[[], PageService]) -> Iterator[str]:
    """The address of a service in a thread of its own."""
    loop, ready, end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    address: list[str] = []

    async def serve() -> None:
        service = made()
        await service.start()
        address.append(f"http://127.0.0.1:{service.port}")
        ready.set()
        await end.wait()
        await service.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


@contextmanager
def every_page(folder: Path) -> Iterator[dict[str, str]]:
    """Addresses by the kind of page."""
    environments = [environment(n) for n in range(53)] + [environment(99, CHINESE, "zh")]
    trajectories, items = [trajectory(n) for n in range(60)], [item(n) for n in range(55)]
    rejected = {"verify": {"too_short_for_a_chain": 40, "unparsable": 3}, "judge": {"judge_failed": 4}}
    write_dataset(folder / "environments", ToolEnvironment, environments, card={})
    write_dataset(folder / "trajectories", Trajectory, trajectories, card={})
    write_dataset(folder / "items", ItemResult, items, card={"model": "tiny"})
    of_environments = statistics_of(environments)
    cards: dict[str, Mapping[str, Any]] = {
        "environment": {
            "kind": "ToolEnvironment",
            "statistics": of_environments,
            "rejected": rejected["verify"],
        },
        "trajectory": {
            "kind": "Trajectory",
            "statistics": _statistics(trajectories),
            "rejected": rejected,
        },
        "result": {"kind": "ItemResult", "model": "tiny"},
        "batch": (run := batches(folder / "batches")).card,
    }
    of: dict[str, Pages] = {
        # Nothing here runs a tool.
        "environment": EnvironmentPages(stored_environments(folder / "environments"), cast(Sandbox, None)),
        "trajectory": TrajectoryPages(folder / "trajectories"),
        "result": ResultPages(folder / "items"),
        "batch": BatchPages(run),
    }
    own = items[1]
    ones = {
        "environment": f"/environment/{quote(environments[1].id)}?sort=id",
        "trajectory": f"/trajectory/{quote(trajectories[1].id)}",
        "result": f"/result/{own.suite}/{own.category}/{own.item}/0",
        "batch": "/update/1/group/1/episode/3",
    }
    stored = ("evaluation", "comparison", "preview", "episodes", "audit")
    found = {name: (folder / f"{name}.html").as_uri() for name in stored}
    write_evaluation(folder / "evaluation.html", tabulate(_stage(0.8, "tiny")))
    write_evaluation(folder / "comparison.html", compare({name: _stage(s, name) for name, s in STAGES.items()}))
    (folder / "preview.html").write_text(_preview(), encoding="utf-8")
    _episodes(folder / "episodes.html")
    kinds: dict[str, type[ToolEnvironment] | type[Trajectory]] = {
        "environments": ToolEnvironment,
        "trajectories": Trajectory,
    }
    report = asyncio.run(audit([AuditedData(name, folder / name, kind) for name, kind in kinds.items()], {}, None, {}))
    (folder / "audit.html").write_text(rendered_page("audit.html.jinja", report=report), encoding="utf-8")
    found["report"] = quickstart_report(folder / "quickstart").as_uri()
    with ExitStack() as stack:
        for name, pages in of.items():
            address = stack.enter_context(served(partial(ViewerService, pages, cards[name], CONFIG)))
            found |= {f"{name} list": f"{address}/", f"{name} card": f"{address}/card", name: address + ones[name]}
        found["refusal"] = f"{address}/none"
        watcher = Watcher(grpo_workdir(folder / "run"))
        found["watch"] = f"{stack.enter_context(served(lambda: WatchService(watcher, CONFIG, seconds=0.2)))}/"
        yield found


CONFIG = ViewerConfig(port=0, drain_seconds=0.0)
STAGES = {"base": 0.8, "sft": 0.3, "rl": 0.9}


def _preview() -> str:
    preview = Preview(2)
    exchange = Exchange("m", 120, "Which servers are there?\n" + "{" * 90, "None.")
    preview.stages["propose"] = StageSeen(4, [Seen([exchange], Spent(), 0.5), Seen(rejected="too_short")])
    bounds = Bounds(120_000.0, 90_000.0, 150_000.0)
    return rendered(preview, Forecast({"requests": bounds, "tokens": bounds}, bounds, ["judge"]))


def _episodes(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)

    def episode(number: int) -> Episode:
        score = Reward(number / 8, 0.5, 0.25, 1, 2, 4)
        said, ids = messages(QUESTION)[1:], [*range(900)]
        plain, zeros = [0] * 900, [0.0] * 900
        return Episode(
            LONG_ID, ids, 50, plain, zeros, plain, CALLS, score, 3, "answered", said, None, OFFERED, EXPECTED
        )

    group = Group(3, LONG_ID, 7, [episode(number) for number in range(8)])
    metrics = {f"rollout/a_metric_with_a_rather_long_name_{n}": n * 1.234e-5 for n in range(12)}
    write_episodes(path, 7, [group, group], metrics)


def grpo_workdir(workdir: Path) -> Path:
    """Of a GRPO run on two servers, of which one is left out, that nobody works on."""
    workdir.mkdir()
    starts = [{"time": "2026-01-02T03:04:05+00:00", "command": f"grpo.py --config=grpo:14b --environments={LONG_ID}"}]
    record = {"config": {"grpo": {"steps": 140}}, "starts": starts}
    (workdir / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with MetricWriter(workdir / "metrics") as writer:
        writer.write(
            0, {f"eval/{mode}/{name}": 0.25 for mode in ("greedy", "sampled") for name in ("reward", "solved")}
        )
        for step in range(1, 41):
            row = {"train/loss": 0.1 / step, "train/grad_norm": 1.0 + step % 3, "train/entropy": 2.0 / step}
            row |= {"train/mismatch_kl": 1e-4 * step, "train/mismatch_abs": 2e-4 * step, "filling/valid_share": 0.5}
            row |= {f"rollout/{name}": min(0.95, 0.3 + step / 70) for name in ("reward", "recall", "precision")}
            row |= {f"rollout/{name}_tokens": 500.0 + (31 * step) % 97 for name in ("sampled", "total")}
            row |= {f"seconds/{name}": 10.0 + step for name in ("rollout", "update")}
            row["goodput/kept_seconds"] = 90.0 * step
            for server, there in (("gpu-1.cluster.example.com:8000", 1.0), ("gpu-2.cluster.example.com:8000", 0.0)):
                figures = {"serving": there, "requests": 12.0 * there, "tokens_per_second": 4321.0 * there}
                row |= {f"servers/{server}/{name}": value for name, value in figures.items()}
            writer.write(step, row)
        writer.amend(40, {f"eval/{mode}/reward": 0.625 for mode in ("greedy", "sampled")})
    _episodes(workdir / "episodes" / "update_00040.html")
    (workdir / "samples").mkdir()
    (workdir / "samples" / "00000040.txt").write_text(f"\x1b[2J{CHINESE}\n<b>It is Oslo.</b>", encoding="utf-8")
    return workdir


def quickstart_report(workdir: Path) -> Path:
    """The report of a run that never was."""
    environments = [environment(n) for n in range(3)]
    rows = [trajectory(n) for n in range(3)]
    code = CodeExecution("")
    servers = [ToolServer(f"s{n}", f"Countries and territories {n}", "", "facts", "en", [], code) for n in range(4)]
    write_dataset(
        workdir / "trajectories" / "trajectories",
        Trajectory,
        rows,
        card={"statistics": _statistics(rows)},
    )
    write_dataset(workdir / "trajectories" / "servers", ToolServer, servers, card={})
    card = {"statistics": statistics_of(environments)}
    for split in ("train", "held_out"):
        write_dataset(workdir / "environments" / split, ToolEnvironment, environments, card=card)
    (workdir / "trajectories" / "graphs").mkdir()
    names = ["capital_of_country", "population_of_the_largest_division", "fact_of_city", "ratio", "a"]
    for server in servers:
        graph = nx.DiGraph()
        graph.add_weighted_edges_from([(names[a], names[b], 1.0 + a + b) for a in range(5) for b in range(5) if a != b])
        nx.write_graphml(graph, workdir / "trajectories" / "graphs" / f"{server.id}.graphml")
    for folder, steps in (("sft/dialogue", 60), ("sft/tools", 40), ("grpo", 36)):
        with MetricWriter(workdir / folder / "metrics") as writer:
            for step in range(1, steps + 1):
                rollouts = {f"rollout/{name}": 0.3 + step / 70 for name in ("reward", "recall", "precision")}
                writer.write(step, {"train/loss": 4 / (1 + step / 9)} | (rollouts if folder == "grpo" else {}))
    said = msgspec.to_builtins(messages(QUESTION)[1:])
    kept = {one.id: {"messages": said, "finish": "answered", "score": None, "right": False} for one in environments}
    held_out = {}
    for number, model in enumerate(MODELS):
        write_json(workdir / "stages" / f"evaluate_{model}.json", {"samples": kept})
        low = 0.2 * number
        held_out[model] = {
            "f1": low + 0.1, "f1_interval": [low, low + 0.2], "recall": low, "precision": low, "answer_accuracy": low,
            "answer_interval": [low, low + 0.1], "mean_calls": 3.1, "episodes": 78,
        }  # fmt: skip
    summary = {
        "profile": "quick", "seed": 0, "version": "0.2.0", "seconds": 400.0, "peak_rss_bytes": 2**31, "servers": 4,
        "machine": {"cpus": 2, "devices": ["cpu"]}, "sandbox": {"tier": "A"}, "mcp_servers": 2, "tools": 20,
        "held_out": held_out, "rejected": {"trajectories": {"verify": {"too_short": 4}}},
        "digests": {"environments/train": "sha256:" + "0123456789abcdef" * 4},
        "stages": {name: {"seconds": 12.5} for name in ("trajectories", "sft_dialogue", "grpo")},
    }  # fmt: skip
    return report.write(workdir, summary)
