"""Irrelevant tools: embeddings, the bands of similarity, draws that are fair, fast and the same for the same seed."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from processor_time import at_most

from synthesis.core.records import CodeTool, ToolSpec
from synthesis.environments import distract
from synthesis.environments.config import BANDS
from synthesis.environments.distract import Candidate, Index
from synthesis.environments.drafts import NeededTool
from synthesis.offline.facts.relations import all_relations
from synthesis.offline.facts.servers import tool_spec
from synthesis.pipeline.embedding import (
    EmbeddingError,
    EndpointConfig,
    EndpointEmbedder,
    SentenceEmbedder,
    document_text,
)
from synthesis.pipeline.kept_embeddings import KeptEmbedder

ALL = dict.fromkeys(BANDS, 10_000)


def tool(name: str, domain: str, description: str = "") -> NeededTool:
    spec = ToolSpec(name, description or name, {"type": "object", "properties": {}, "required": []})
    return NeededTool(name, domain, CodeTool(spec, ""), [], [])


def candidate(name: str, description: str, domain: str = "other", intent: str = "") -> Candidate:
    return Candidate(intent or name, domain, tool(name, domain, description).tool)


class Angles:
    """An embedder whose vectors are planted: at the angle, in degrees, that the description says."""

    name = "angles"

    async def embed(self, texts: Any) -> np.ndarray:
        angles = np.radians([float(text.split("\n")[1]) for text in texts])
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def cosine(value: float) -> str:
    return str(np.degrees(np.arccos(value)))


def built(candidates: list[Candidate], needed: list[NeededTool], embedder: Any = None) -> Index:
    return asyncio.run(Index.build(candidates, needed, embedder or Angles(), high_cut=0.85, low_cut=0.4))


def names(bands: dict[str, list[Candidate]]) -> dict[str, list[str]]:
    return {band: sorted(one.tool.spec.name for one in found) for band, found in bands.items()}


def test_bands_are_normalised_and_leave_out_the_own_domain_intent_and_name() -> None:
    needed = tool("needed", "d", "0")
    # Raw cosines 0.2 … 0.8: normalised 0, 0.35, 0.5, 0.8, 0.9, 1.
    cosines = {"a": 0.2, "b": 0.41, "c": 0.5, "e": 0.68, "f": 0.74, "g": 0.8}
    candidates = [candidate(name, cosine(value)) for name, value in cosines.items()]
    candidates += [
        candidate("own", cosine(0.99), domain="d"),
        candidate("twin", cosine(0.78), intent="needed"),
        candidate("needed", cosine(0.77)),
    ]
    bands = built(candidates, [needed]).draw([needed], ALL, random.Random(0))
    assert names(bands) == {"high": ["f", "g"], "medium": ["c", "e"], "low": ["a", "b"]}


def test_the_closest_band_wins_over_several_needed_tools() -> None:
    one, other = tool("one", "d", "0"), tool("other", "d", "90")
    near = candidate("near", "85", domain="x")  # far from `one`, next to `other`
    middle, close = candidate("middle", "45", domain="x"), candidate("close", "5", domain="x")
    index = built([near, middle, close], [one, other])
    bands = index.draw([one, other], ALL, random.Random(0))
    assert names(bands) == {"high": ["close", "near"], "medium": ["middle"], "low": []}
    assert index.closeness([one, other], bands["medium"]) == pytest.approx(np.cos(np.radians(45)), abs=1e-6)
    assert index.closeness([one, other], []) == 0.0


def test_no_candidates_of_another_domain_is_no_band() -> None:
    needed = tool("needed", "d", "0")
    empty: dict[str, list[str]] = {band: [] for band in BANDS}
    assert names(built([], [needed]).draw([needed], ALL, random.Random(0))) == empty
    assert names(built([candidate("x", "1", domain="d")], [needed]).draw([needed], ALL, random.Random(0))) == empty
    # One alone is the closest there is.
    single = built([candidate("x", "60")], [needed]).draw([needed], ALL, random.Random(0))
    assert names(single) == {"high": ["x"], "medium": [], "low": []}


def many(n: int) -> tuple[list[Candidate], list[NeededTool]]:
    rng = np.random.default_rng(0)
    candidates = [candidate(f"c{i}", str(a), domain=f"d{i % 7}") for i, a in enumerate(rng.uniform(0, 90, n))]
    needed = [tool(f"n{i}", f"d{i}", str(a)) for i, a in enumerate((3.0, 6.0, 9.0))]
    return candidates, needed


def test_a_draw_depends_on_its_seed_alone_and_what_is_left_out_makes_room_for_others() -> None:
    candidates, needed = many(1000)
    index, again = built(candidates, needed), built(candidates, needed)
    counts = dict.fromkeys(BANDS, 3)
    first = index.draw(needed, counts, random.Random(5))
    assert first == again.draw(needed, counts, random.Random(5)) != index.draw(needed, counts, random.Random(6))
    assert {band: len(found) for band, found in first.items()} == counts
    for band in BANDS:
        left_out = first[band][0].tool.spec.name
        second = index.draw(needed, counts, random.Random(5), without=[left_out])
        kept = [one for one in first[band] if one.tool.spec.name != left_out]
        assert second[band][:2] == kept and len(second[band]) == 3
        assert all(second[other] == first[other] for other in BANDS if other != band)


def test_every_tool_of_a_band_is_as_likely_as_any_other() -> None:
    candidates, needed = many(300)
    index = built(candidates, needed)
    bands = index.draw(needed, ALL, random.Random(0))
    counts = dict.fromkeys(BANDS, 2)
    rounds = 4000
    drawn = {band: Counter[str]() for band in BANDS}
    for seed in range(rounds):
        for band, found in index.draw(needed, counts, random.Random(seed)).items():
            drawn[band].update(one.tool.spec.name for one in found)
    for band, found in bands.items():
        expected = rounds * 2 / len(found)
        assert set(drawn[band]) == {one.tool.spec.name for one in found}
        # Six standard deviations of a count.
        assert all(abs(n - expected) < 6 * expected**0.5 for n in drawn[band].values()), band


def test_memory_grows_with_the_tools_and_is_shared_by_the_processes_of_a_machine() -> None:
    """Every candidate is close to every needed tool: all of them would be n x n."""
    sizes = []
    for n in (1_500, 3_000):
        candidates = [candidate(f"c{i}", "1", domain="x") for i in range(n)]
        needed = [tool(f"n{i}", "d", "0" if i % 2 else "2") for i in range(n)]
        index = built(candidates, needed)
        buffers: list[pickle.PickleBuffer] = []
        own = pickle.dumps(index, 5, buffer_callback=buffers.append)
        assert len(own) < 10_000
        sizes.append(sum(len(one.raw()) for one in buffers))
        copy: Index = pickle.loads(own, buffers=buffers)
        bands = copy.draw(needed[:3], dict.fromkeys(BANDS, 5), random.Random(1))
        assert bands == index.draw(needed[:3], dict.fromkeys(BANDS, 5), random.Random(1)) and len(bands["high"]) == 5
        assert all(found in candidates for found in bands["high"])
    assert sizes[1] < 2.1 * sizes[0]
    drawn = {
        one.tool.spec.name for seed in range(3) for one in index.draw(needed[:1], ALL, random.Random(seed))["high"]
    }
    others = {one.tool.spec.name for one in index.draw(needed[2:3], ALL, random.Random(0))["high"]}
    assert len(drawn) == len(others) == distract._CLOSE and drawn != others  # a part, another for each
    with pytest.raises(KeyError, match="was not built with"):
        index.draw([tool("stranger", "d", "0")], ALL, random.Random(0))


def test_large_indices_are_drawn_from_quickly() -> None:
    """Ten times slower than measured (docs/environments.md)."""
    candidates, needed = many(20_000)
    index = built(candidates, needed)
    with at_most(1):
        for seed in range(300):
            index.draw(needed, dict.fromkeys(BANDS, 2), random.Random(seed))


# ---------------------------------------------------------------------------------------------------------------------
# Embedders


@pytest.mark.parametrize("language", ["en", "zh"])
def test_sentence_embeddings_put_tools_of_one_server_together(language: Any) -> None:
    relations = list(all_relations().values())
    vectors = asyncio.run(SentenceEmbedder().embed([document_text(tool_spec(one, language)) for one in relations]))
    assert vectors.shape == (len(relations), 256) and vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -1)
    closest = similarity.argmax(axis=1)
    same = [relations[i].domain == relations[j].domain for i, j in enumerate(closest)]
    assert sum(same) / len(same) > 0.8


def test_sentence_embeddings_depend_on_the_text_alone() -> None:
    texts = ["capital city of a country", "国家的首都", "", "molar mass of an isotope " * 50]
    together = asyncio.run(SentenceEmbedder().embed(texts))
    assert np.allclose([asyncio.run(SentenceEmbedder().embed([text]))[0] for text in texts], together, atol=1e-5)
    assert np.isfinite(together).all() and asyncio.run(SentenceEmbedder().embed([])).shape == (0, 256)


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[Any]:
    """A real HTTP server of OpenAI's embeddings API; `answers` are the statuses to give first."""
    state: dict[str, Any] = {
        "answers": [],
        "asked": [],
        "times": [],
        "headers": {},
        "value": lambda text: [float(len(text)), 1.0],
    }

    async def embeddings(request: web.Request) -> web.Response:
        body = await request.json()
        state["asked"].append((body, request.headers["Authorization"]))
        state["times"].append(time.monotonic())
        if state["answers"]:
            there = {"Location": "/v1/embeddings", **state["headers"]}  # where a redirect would be answered
            return web.json_response({"error": {"message": "not now"}}, status=state["answers"].pop(0), headers=there)
        data = [
            {"object": "embedding", "index": i, "embedding": state["value"](t)} for i, t in enumerate(body["input"])
        ]
        return web.json_response({"object": "list", "model": body["model"], "data": data[::-1], "usage": {}})

    app = web.Application()
    app.router.add_post("/v1/embeddings", embeddings)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield state
    await runner.cleanup()


async def test_an_endpoint_is_asked_in_batches_and_again_when_it_is_busy(endpoint: Any) -> None:
    endpoint["answers"] = [429]
    embedder = EndpointEmbedder(EndpointConfig(endpoint["url"], "e", api_key="k", batch=2))
    vectors = await embedder.embed(["a", "bbb", "cc"])
    expected = np.array([[1, 1], [3, 1], [2, 1]], np.float32)
    assert np.allclose(vectors, expected / np.linalg.norm(expected, axis=1, keepdims=True))
    assert [body["input"] for body, _ in endpoint["asked"]] == [["a", "bbb"], ["a", "bbb"], ["cc"]]
    assert {key for _, key in endpoint["asked"]} == {"Bearer k"} and embedder.name == "e"


async def test_what_an_endpoint_has_embedded_it_is_not_asked_for_again(endpoint: Any, tmp_path: Path) -> None:
    """Not by a run that goes on either, and the vectors are the same to the bit."""
    asked = EndpointEmbedder(EndpointConfig(endpoint["url"], "e", batch=2, tries=1))
    with contextlib.closing(KeptEmbedder(asked, tmp_path)) as embedder:
        assert not (await embedder.embed([])).size and not list(tmp_path.iterdir())
        first = await embedder.embed(["a", "bbb", "a"])
        endpoint["answers"] = [500]
        with pytest.raises(EmbeddingError):
            await embedder.embed(["bbb", "cc"])
    with contextlib.closing(KeptEmbedder(asked, tmp_path)) as embedder:
        again = await embedder.embed(["a", "bbb", "a", "cc"])
    assert [body["input"] for body, _ in endpoint["asked"]] == [["a", "bbb"], ["cc"], ["cc"]]
    assert again.dtype == np.float32 and (again[:3] == first).all()
    assert (again == await asked.embed(["a", "bbb", "a", "cc"])).all()
    endpoint["value"] = lambda text: [1.0, 1.0, 1.0]
    words = "different widths; serve one model, and delete .*embeddings.sqlite"
    with contextlib.closing(KeptEmbedder(asked, tmp_path)) as embedder, pytest.raises(EmbeddingError, match=words):
        await embedder.embed(["a", "dddd"])


async def test_an_endpoint_that_is_busy_is_waited_for_and_as_long_as_it_asks(endpoint: Any) -> None:
    """Four times within seconds were all, and the run ended."""
    endpoint["answers"] = [429] * 12
    config = EndpointConfig(endpoint["url"], "e", tries=2, backoff_seconds=0.001)
    assert (await EndpointEmbedder(config).embed(["a"])).shape == (1, 2) and len(endpoint["asked"]) == 13
    endpoint |= {"answers": [429], "times": [], "headers": {"Retry-After": "1"}}
    embedder = EndpointEmbedder(config)
    first = asyncio.create_task(embedder.embed(["a"]))
    while endpoint["answers"]:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    await asyncio.gather(first, embedder.embed(["b"]))
    assert min(endpoint["times"][1:]) - endpoint["times"][0] >= 0.95
    endpoint |= {"answers": [429], "headers": {"Retry-After": "7200"}}
    with pytest.raises(EmbeddingError, match="asks to wait for 7,200 s: .*run the same command again"):
        await embedder.embed(["a"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"answers": [404]}, "refused the request"),
        ({"answers": [308]}, "refused the request"),
        ({"answers": [200]}, "answered without vectors"),
        ({"answers": [500, 500]}, "no embeddings in 2 tries"),
        ({"value": lambda text: [1.0] * len(text)}, "different widths"),
        ({"value": lambda text: [1e39, 1.0]}, "not finite"),
    ],
)
async def test_bad_embeddings_are_refused(endpoint: Any, state: dict[str, Any], message: str) -> None:
    endpoint.update(state)
    embedder = EndpointEmbedder(EndpointConfig(endpoint["url"], "e", tries=2))
    with pytest.raises(EmbeddingError, match=message):
        await embedder.embed(["a", "bbb"])
