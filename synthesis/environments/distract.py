"""Distract: irrelevant but executable tools, in three bands of embedding similarity (paper §3.2).

For each needed tool the cosine similarities to all candidates of other domains are min-max normalised. A candidate
above `high_cut` is `high`, below `low_cut` it is `low`, else `medium`. A candidate in different bands for different
needed tools belongs to the closest. No candidate does a needed tool's work: none has its intent, and none answers a
reference call when it is executed. No document reveals an answer. If intents are held out, training environments are
not offered tools of held-out intents.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import gcd
from typing import Any

import msgspec
import numpy as np

from astra_jax.base.typed import json_decoder
from synthesis.core.matching import contains
from synthesis.core.plays import play
from synthesis.core.records import Answer, CodeTool, Language
from synthesis.core.stages import rng_for
from synthesis.core.stored import Records
from synthesis.environments.config import BANDS, Band, EnvironmentsConfig
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.drafts import NeededTool, ToolsetDraft
from synthesis.environments.leaks import answers_of, leaked
from synthesis.environments.proof import translations
from synthesis.pipeline.demo import fact_tools
from synthesis.pipeline.embedding import Embedder, document_text
from synthesis.pipeline.languages import PACKAGED_LANGUAGES
from synthesis.pipeline.partition import Split


class Candidate(msgspec.Struct, frozen=True):
    """A tool that may become a distractor; `intent` names what it looks up."""

    intent: str
    domain: str
    tool: CodeTool


_BLOCK = 256
"""Needed tools whose similarities to all candidates are in memory at a time; fewer for a large index."""
_SIMILARITIES = 1 << 23
"""Maximum number of similarities (4 bytes each) in memory at a time; there are a few copies."""
_CLOSE = 1_024
"""Maximum number of `high` candidates kept for a needed tool, sampled by the candidates' number and order."""
_CHUNK = 32
"""Candidates checked at a time while sampling."""


class Index:
    """The candidates of one language, with their embeddings and the cuts between the bands of every needed tool.

    Building it computes all similarities once, N x M x width; the memory of the index grows with N + M. A call of
    `draw` checks only as many candidates as it takes to fill the bands. All data are arrays, which the workers of a
    machine share (Ray maps them into each process). Names are identified by 64 bits of their digest.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        needed: Sequence[NeededTool],
        vectors: Mapping[str, np.ndarray],
        *,
        high_cut: float,
        low_cut: float,
    ) -> None:
        """Args: vectors: unit vectors by `document_text`, of all candidates and needed tools."""
        self._records, self._ends = _packed(msgspec.json.encode(one) for one in candidates)
        self._domains = _digests(one.domain for one in candidates)
        self._intents = _digests(one.intent for one in candidates)
        self._names = _digests(one.tool.spec.name for one in candidates)
        self._by_name = _sorted(self._names)
        texts = [document_text(one.tool.spec) for one in candidates]
        width = len(next(iter(vectors.values()))) if vectors else 0
        order = np.random.default_rng(len(texts)).permutation(len(texts))
        self._order = order.astype(np.int32)
        self._rank = np.empty_like(self._order)
        self._rank[order] = np.arange(len(texts), dtype=np.int32)
        self._vectors = np.array([vectors[text] for text in texts], np.float32).reshape(len(texts), width)
        keys = list(dict.fromkeys((document_text(tool.tool.spec), tool.domain) for tool in needed))
        self._keys = _digests("\0".join(key) for key in keys)
        self._by_key = _sorted(self._keys)
        self._own = np.array([vectors[text] for text, _ in keys], np.float32).reshape(len(keys), width)
        domains = _digests(domain for _, domain in keys)
        step = max(1, min(_BLOCK, _SIMILARITIES // max(1, len(texts))))
        blocks = [self._cuts(start, domains[start : start + step], high_cut, low_cut)
                  for start in range(0, len(keys), step)]  # fmt: skip
        bounds = [cuts for cuts, _ in blocks]
        both: np.ndarray = np.concatenate(bounds, axis=1) if bounds else np.zeros((2, 0), np.float32)
        self._above, self._below = both
        high = [row for _, rows in blocks for row in rows]
        self._high = np.concatenate([*high, np.zeros(0, np.int32)])
        self._high_ends = np.cumsum([0, *map(len, high)])

    def __len__(self) -> int:
        return len(self._names)

    def candidate(self, row: int) -> Candidate:
        """Return the candidate of a row."""
        return _candidates.decode(self._records[self._ends[row] : self._ends[row + 1]].tobytes())

    def _cuts(
        self, start: int, domains: np.ndarray, high_cut: float, low_cut: float
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the cuts, [2, needed tools]: a candidate is `high` above the first, `low` below the second; and the
        `high` candidates of each needed tool."""
        similarity = self._own[start : start + len(domains)] @ self._vectors.T  # [needed tools, candidates]
        own = self._domains[None, :] == domains[:, None]
        # Without a candidate of another domain, -inf and inf let none into any band.
        low = np.where(own, np.inf, similarity).min(axis=1, initial=np.inf)
        high = np.where(own, -np.inf, similarity).max(axis=1, initial=-np.inf)
        with np.errstate(invalid="ignore"):
            above, below = low + high_cut * (high - low), low + low_cut * (high - low)
        # A single candidate (or equal ones) cannot be ranked: it counts as the closest.
        above, below = np.where(high > low, above, -np.inf), np.where(high > low, below, -np.inf)
        close = [
            self._some(np.flatnonzero(row).astype(np.int32), start + number)
            for number, row in enumerate((similarity > above[:, None]) & ~own)
        ]
        return np.stack([above, below]).astype(np.float32), close

    def _some(self, close: np.ndarray, number: int) -> np.ndarray:
        """Return at most `_CLOSE` of the candidates, others for each needed tool: all of them would grow with N x M."""
        if len(close) <= _CLOSE:
            return close
        turns = (self._rank[close].astype(np.int64) + number * (len(self) // 2 + 1)) % len(self)
        return close[np.sort(np.argpartition(turns, _CLOSE)[:_CLOSE])]

    @classmethod
    async def build(
        cls,
        candidates: Sequence[Candidate],
        needed: Iterable[NeededTool],
        embedder: Embedder,
        *,
        high_cut: float,
        low_cut: float,
    ) -> Index:
        """Embed all documents, equal ones once."""
        needed = list({(document_text(one.tool.spec), one.domain): one for one in needed}.values())
        specs = [*(one.tool.spec for one in candidates), *(one.tool.spec for one in needed)]
        texts = list(dict.fromkeys(map(document_text, specs)))
        vectors = dict(zip(texts, await embedder.embed(texts), strict=True))
        return cls(candidates, needed, vectors, high_cut=high_cut, low_cut=low_cut)

    def draw(
        self,
        tools: Sequence[NeededTool],
        counts: Mapping[Band, int],
        rng: random.Random,
        *,
        without: Collection[str] = (),
    ) -> dict[str, list[Candidate]]:
        """Sample up to `counts` candidates of each band, uniformly within the band.

        Args:
            tools: the needed tools; each was given to `build`.
            without: names to leave out. With equal `rng`, leaving out more names keeps the other candidates.
        """
        rows = self._rows(tools)
        own, above, below = self._own[rows], self._above[rows, None], self._below[rows, None]
        blocked = self._blocked(tools, without)
        chosen: dict[Band, list[int]] = {band: [] for band in BANDS}
        close = [self._high[self._high_ends[row] : self._high_ends[row + 1]] for row in rows]
        high = np.concatenate(close)
        whose = np.repeat(np.arange(len(rows)), [len(one) for one in close])
        walks = _walk(len(high), rng), _walk(len(self), rng)
        for steps in walks[0]:
            if len(chosen["high"]) >= counts.get("high", 0):
                break
            part = high[steps]
            # A candidate close to several needed tools counts once, for the first of them.
            first = (own @ self._vectors[part].T > above).argmax(axis=0) == whose[steps]
            chosen["high"] += list(self._eligible(part[first], blocked))
        for steps in walks[1]:
            if all(len(chosen[band]) >= counts.get(band, 0) for band in ("medium", "low")):
                break
            part = self._eligible(self._order[steps], blocked)
            similarity = own @ self._vectors[part].T  # [tools, part]
            far, near = (similarity < below).all(axis=0), (similarity > above).any(axis=0)
            chosen["low"] += list(part[far & ~near])
            chosen["medium"] += list(part[~far & ~near])
        return {band: [self.candidate(row) for row in chosen[band][: counts.get(band, 0)]] for band in BANDS}

    def closeness(self, tools: Sequence[NeededTool], chosen: Iterable[Candidate]) -> float:
        """Return the largest cosine similarity between a needed and a chosen tool; 0 if none is chosen."""
        rows = _found(_digests(one.tool.spec.name for one in chosen), self._names, self._by_name)
        return float((self._own[self._rows(tools)] @ self._vectors[rows].T).max()) if len(rows) else 0.0

    def _rows(self, tools: Sequence[NeededTool]) -> np.ndarray:
        keys = _digests(f"{document_text(tool.tool.spec)}\0{tool.domain}" for tool in tools)
        return _found(keys, self._keys, self._by_key)

    def _blocked(self, tools: Sequence[NeededTool], without: Collection[str]) -> tuple[np.ndarray, ...]:
        """Return the domains, intents and names that no chosen candidate may have."""
        names = [*(tool.tool.spec.name for tool in tools), *without]
        return _digests(tool.domain for tool in tools), _digests(tool.intent for tool in tools), _digests(names)

    def _eligible(self, rows: np.ndarray, blocked: tuple[np.ndarray, ...]) -> np.ndarray:
        """Return the rows whose domain, intent and name are none of the blocked ones."""
        domains, intents, names = blocked
        bad = (self._domains[rows, None] == domains).any(axis=1)
        bad |= (self._intents[rows, None] == intents).any(axis=1)
        bad |= (self._names[rows, None] == names).any(axis=1)
        return rows[~bad]


_candidates = json_decoder(Candidate)


def _packed(records: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return one array of all bytes, and the end of each record, from 0 on."""
    data = bytearray()
    ends = [0]
    for record in records:
        data += record
        ends.append(len(data))
    return np.frombuffer(data, np.uint8), np.array(ends, np.int64)


def _digests(names: Iterable[str]) -> np.ndarray:
    """Return 64 bits of the digest of each name."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), np.uint64)


def _sorted(digests: np.ndarray) -> np.ndarray:
    """Return the positions of the digests in ascending order."""
    return np.argsort(digests, kind="stable").astype(np.int32)


def _found(wanted: np.ndarray, digests: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the position of each wanted digest, the last of equal ones. Raises `KeyError`: a digest is missing."""
    positions = np.searchsorted(digests, wanted, side="right", sorter=order) - 1
    found = order[np.maximum(positions, 0)] if len(order) else np.zeros(0, np.int32)
    if len(found) != len(wanted) or (digests[found] != wanted).any():
        raise KeyError("a tool that the index was not built with")
    return found


def _walk(n: int, rng: random.Random) -> Iterator[np.ndarray]:
    """Yield 0 … n-1 in a random order, in parts: from a random start with a random stride. A permutation of all numbers
    would take longer than the sampling itself."""
    start, stride = rng.randrange(max(n, 1)), 1
    while n > 2 and gcd(stride := rng.randrange(1, n), n) > 1:
        pass
    return ((start + stride * np.arange(first, min(first + _CHUNK, n))) % n for first in range(0, n, _CHUNK))


async def build_indices(
    built: Records[ToolsetDraft], config: EnvironmentsConfig, embedder: Embedder, seed: int
) -> dict[tuple[Language, Split], Index]:
    """Build an index for each language and split that occurs.

    An index has the tools of all environments and, if so configured, all relations. If intents or sources are held out,
    it has only those of its split. Of several tools with one name the first is the candidate: names must be unique in
    an environment.
    """
    indices: dict[tuple[Language, Split], Index] = {}
    for language, split in dict.fromkeys((one.draft.decomposition.language, one.draft.split) for one in built):
        among = (language, split if config.partition.by == "source" else None)
        own = built.filter(partial(_is_among, *among))
        candidates: dict[str, Candidate] = {}
        # A world's tools are nothing without it.
        for tool in (tool for one in own for tool in one.tools if tool.tool.code):
            candidates.setdefault(tool.tool.spec.name, Candidate(tool.intent, tool.domain, tool.tool))
        if config.fact_distractors and language in PACKAGED_LANGUAGES:
            for domain, fact_tool in fact_tools(language, config.table_rows, seed, but={*candidates}):
                id = fact_tool.spec.name
                candidates[id] = Candidate(id, domain, fact_tool)
        partition = config.partition
        indices[language, split] = await Index.build(
            [one for one in candidates.values() if partition.split_of_intent(one.intent) in (split, None)],
            (tool for one in own if one.draft.split == split for tool in one.tools),
            embedder,
            high_cut=config.high_cut,
            low_cut=config.low_cut,
        )
    return indices


def _is_among(language: Language, split: Split | None, one: ToolsetDraft) -> bool:
    return one.draft.decomposition.language == language and split in (None, one.draft.split)


async def distract(
    built: ToolsetDraft, context: EnvironmentContext, indices: Mapping[tuple[Language, Split], Index]
) -> list[ToolsetDraft]:
    """Add up to the configured number of irrelevant tools of each band to the environment.

    No added tool is a functional twin of a needed one: a candidate that, executed, answers a reference call or states
    an answer is replaced.

    Raises:
        Transient: the sandbox itself failed.
    """
    decomposition = built.draft.decomposition
    index = indices[decomposition.language, built.draft.split]
    answers = answers_of(decomposition)
    checked: set[str] = set()
    twins: set[str] = set()
    while True:
        rng = rng_for(context.seed, "distract", decomposition.id)
        bands = index.draw(built.tools, context.config.distractors, rng, without=twins)
        chosen = [one for band in bands.values() for one in band]
        unchecked = [one.tool for one in chosen if one.tool.spec.name not in checked]
        found = {one.spec.name for one in unchecked if leaked(one.spec, answers, decomposition.language)}
        found |= await twins_of(built, [one for one in unchecked if one.spec.name not in found], context)
        if not found:
            break
        twins |= found
        checked |= {one.tool.spec.name for one in chosen}
    distractors: dict[str, list[CodeTool]] = {band: [one.tool for one in drawn] for band, drawn in bands.items()}
    closeness = index.closeness(built.tools, chosen)
    return [msgspec.structs.replace(built, distractors=distractors, closeness=closeness)]


async def twins_of(built: ToolsetDraft, candidates: Sequence[CodeTool], context: EnvironmentContext) -> set[str]:
    """Return the names of tools that answer a reference call of the environment.

    A tool is called with the reference arguments in any order, or with none if it takes none.

    Raises:
        Transient: the sandbox itself failed.
    """
    answers = {step.id: step.answer for step in built.draft.decomposition.sub_questions if not step.asks_state}
    asked: list[tuple[str, dict[str, Any]]] = []
    wanted: list[Answer] = []
    for candidate in candidates:
        for tool in built.tools:
            for reference in tool.calls:
                if reference.sub_question not in answers:
                    continue
                for arguments in translations(reference.arguments, tool.tool.spec, candidate.spec):
                    asked.append((candidate.spec.name, arguments))
                    wanted.append(answers[reference.sub_question])
    async with context.proofs:
        made = await context.in_sandbox(play, candidates, asked)
    language = built.draft.decomposition.language
    pairs = zip(made, wanted, strict=True)
    return {one.tool for one, answer in pairs if one.ok and contains(one.output, answer, language)}
