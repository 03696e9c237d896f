"""Distract: irrelevant but executable tools, in three bands of embedding similarity (paper §2.3).

For each needed tool the cosine similarities to all candidates are min-max normalised; above `high_cut` a candidate is
`high`, below `low_cut` it is `low`, else `medium`. A candidate in different bands for different needed tools belongs to
the closest. Candidates come from other domains only, and never do a needed tool's work: not of its intent, and not
answering one of its reference calls when it is executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from synthesis.environments.config import BANDS, Built, Context, NeededTool
from synthesis.environments.embedding import Embedder, document_text
from synthesis.environments.fact_tools import fact_tool, table_subjects
from synthesis.environments.proof import call_many, check_arguments
from synthesis.facts.relations import all_relations
from synthesis.matching import contains
from synthesis.records import Answer, CodeTool, Language, ToolSpec
from synthesis.runner import rng_for


class Candidate(msgspec.Struct, frozen=True):
    """A tool that may become irrelevant; `intent` says what it looks up."""

    intent: str
    domain: str
    tool: CodeTool


class Index:
    """The candidates of one language with the embeddings of their documents, and of the needed tools'."""

    def __init__(self, candidates: Sequence[Candidate], texts: Sequence[str], vectors: np.ndarray) -> None:
        self.candidates = list(candidates)
        self._row = {text: row for row, text in enumerate(texts)}
        self._vectors = vectors
        self._rows = np.array([self._row[document_text(one.tool.spec)] for one in candidates], np.int64)

    @classmethod
    async def build(cls, candidates: Sequence[Candidate], needed: Iterable[ToolSpec], embedder: Embedder) -> Index:
        """Embed all documents together, equal ones once."""
        specs = [*(one.tool.spec for one in candidates), *needed]
        texts = list(dict.fromkeys(map(document_text, specs)))
        return cls(candidates, texts, await embedder.embed(texts))

    def bands(self, tools: Sequence[NeededTool], *, high_cut: float, low_cut: float) -> dict[str, list[Candidate]]:
        """The eligible candidates by band, in the order of the candidates. Every band may be empty but `high`."""
        domains = {tool.domain for tool in tools}
        intents = {tool.intent for tool in tools}
        names = {tool.tool.spec.name for tool in tools}
        eligible = [
            i
            for i, one in enumerate(self.candidates)
            if one.domain not in domains and one.intent not in intents and one.tool.spec.name not in names
        ]
        found: dict[str, list[Candidate]] = {band: [] for band in BANDS}
        if not eligible:
            return found
        own = self._vectors[[self._row[document_text(tool.tool.spec)] for tool in tools]]
        similarity = own @ self._vectors[self._rows[eligible]].T  # [tools, eligible]
        low, high = similarity.min(axis=1, keepdims=True), similarity.max(axis=1, keepdims=True)
        # With a single candidate (or equal ones) there is nothing to rank: it is the closest there is.
        closest = np.where(high > low, (similarity - low) / np.maximum(high - low, 1e-12), 1.0).max(axis=0)
        for i, value in zip(eligible, closest, strict=True):
            band = "high" if value > high_cut else "medium" if value >= low_cut else "low"
            found[band].append(self.candidates[i])
        return found


async def build_indices(built: Sequence[Built], context: Context) -> dict[Language, Index]:
    """One index for each language that occurs, over the tools of all environments and, if so configured, all relations.

    Of several tools with one name the first is the candidate: names have to be unique in an environment.
    """
    candidates: dict[Language, dict[str, Candidate]] = {}
    needed: dict[Language, list[ToolSpec]] = {}
    for one in built:
        language = one.draft.decomposition.language
        for tool in one.tools:
            needed.setdefault(language, []).append(tool.tool.spec)
            own = candidates.setdefault(language, {})
            own.setdefault(tool.tool.spec.name, Candidate(tool.intent, tool.domain, tool.tool))
    for language, own in candidates.items() if context.config.fact_distractors else ():
        for relation in all_relations().values():
            if relation.id not in own:
                first = rng_for(context.seed, "distractor", relation.id).choice(list(relation.rows))
                subjects = table_subjects(relation, first, context.config.table_rows, context.seed)
                own[relation.id] = Candidate(relation.id, relation.domain, fact_tool(relation, subjects, language))
    return {
        language: await Index.build(list(own.values()), needed[language], context.embedder)
        for language, own in candidates.items()
    }


async def distract(built: Built, context: Context, indices: dict[Language, Index], twins: set[Twin]) -> list[Built]:
    """The environment with up to `distractors_per_band` irrelevant tools of each band, none a twin of a needed one."""
    decomposition = built.draft.decomposition
    config = context.config
    bands = indices[decomposition.language].bands(built.tools, high_cut=config.high_cut, low_cut=config.low_cut)
    rng = rng_for(context.seed, "distract", decomposition.id)
    chosen: dict[str, list[CodeTool]] = {}
    for band, candidates in bands.items():
        fit = [one.tool for one in candidates if Twin(one.tool.spec.name, decomposition.id) not in twins]
        chosen[band] = rng.sample(fit, min(config.distractors_per_band, len(fit)))
    return [msgspec.structs.replace(built, distractors=chosen)]


# ---------------------------------------------------------------------------------------------------------------------
# Twins


class Twin(msgspec.Struct, frozen=True):
    """The candidate of this name answers a reference call of this environment."""

    name: str
    environment: str


_BATCH = 256


async def find_twins(candidate: Candidate, built: Sequence[Built], context: Context) -> list[Twin]:
    """The environments for which the candidate is a twin: given a reference call's arguments, it gives the answer.

    Only environments that could get it are tried: those of other domains and intents.

    Args:
        built: the environments of the candidate's language.

    Raises:
        Transient: the sandbox itself failed.
    """
    asked: dict[bytes, list[tuple[str, Answer]]] = {}
    for one in built:
        if any(tool.domain == candidate.domain or tool.intent == candidate.intent for tool in one.tools):
            continue
        answers = {step.id: step.answer for step in one.draft.decomposition.sub_questions}
        for tool in one.tools:
            for call in tool.calls:
                arguments = _translated(call.arguments, tool.tool.spec, candidate.tool.spec)
                if arguments is not None:
                    key = msgspec.json.encode(arguments, order="sorted")
                    asked.setdefault(key, []).append((one.draft.decomposition.id, answers[call.sub_question]))
    calls = [msgspec.json.decode(key) for key in asked]
    found: set[str] = set()
    for start in range(0, len(calls), _BATCH):
        async with context.proofs:
            outputs = await call_many(candidate.tool, calls[start : start + _BATCH], context.pool)
        for output, wanted in zip(outputs, list(asked.values())[start : start + _BATCH], strict=True):
            found.update(id_ for id_, answer in wanted if output and contains(output[0], answer))
    return [Twin(candidate.tool.spec.name, id_) for id_ in sorted(found)]


def _translated(arguments: dict[str, Any], spec: ToolSpec, other: ToolSpec) -> dict[str, Any] | None:
    """The required arguments of a call under the names of another tool, or None where they do not fit its schema."""
    values = [arguments[name] for name in spec.parameters["required"]]
    names = other.parameters["required"]
    if len(values) != len(names):
        return None
    renamed = dict(zip(names, values, strict=True))
    return None if check_arguments(other, renamed) else renamed
