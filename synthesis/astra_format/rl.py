"""Environments from and to the released ASTRA-RL record.

    write_records("rl.jsonl", environments, seed=0)                       # export
    imported = await import_dataset("rl.jsonl", pool, journal)            # import
    imported.records, imported.rejected, imported.defects

The released record has gold answers, but not the calls that give them. On import these are searched
(`reference_search`) and proven in the sandbox as our own are; a record with an answer that no call reaches is rejected.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from astra_jax.base.errors import InputError
from synthesis.astra_format.candidates import leaves, names_value
from synthesis.astra_format.records import (
    AstraRecord,
    Defect,
    Imported,
    answer_text,
    defects,
    parse,
    read_records,
    read_rows,
    spec_of,
    typed_answer,
    write_rows,
)
from synthesis.astra_format.reference_search import Found, SearchConfig, find_calls
from synthesis.core.matching import contains
from synthesis.core.records import Answer, CodeTool, ReferenceCall, SubQuestion, ToolEnvironment, World
from synthesis.core.reward import sub_tasks_by_tool
from synthesis.core.stages import Journal, Rejected, rng_for, run_stage
from synthesis.environments import dependency_graph
from synthesis.environments.proof import shown
from synthesis.environments.verify import solve
from synthesis.pipeline.languages import language_of

if TYPE_CHECKING:
    from sandbox import Sandbox

__all__ = [
    "AstraRecord",
    "Defect",
    "Imported",
    "SearchConfig",
    "defects",
    "import_dataset",
    "import_record",
    "read_records",
    "to_record",
    "write_records",
]

BAND = "medium"
"""Band of every imported distractor. A band is a position among all candidates over which similarities were normalised,
and the record holds only the sampled ones."""

# ---------------------------------------------------------------------------------------------------------------------
# Export


def to_record(environment: ToolEnvironment, *, seed: int) -> dict[str, Any]:
    """Return the four columns. Needed and irrelevant tools are shuffled together.

    Raises:
        InputError: it has a world, or cannot be scored: a sub-question without a reference call, or none needs one.
    """
    if isinstance(environment.world, World):
        raise InputError(
            f"environment {environment.id} has a world, which the released record has no place for; export a dataset "
            "that was made with stateful_share=0"
        )
    tools = [*environment.tools, *(tool for band in environment.distractors.values() for tool in band)]
    rng_for(seed, "astra_rl", environment.id).shuffle(tools)
    answers = sub_tasks_by_tool(environment)
    return {
        "prompt": [{"role": "user", "content": environment.question}],
        "tool_schema": _json([tool.spec.to_openai() for tool in tools]),
        "tool_dict": _json({tool.spec.name: tool.code for tool in tools}),
        "sub_qa_dict": _json({tool: [answer_text(sub.answer) for sub in subs] for tool, subs in answers.items()}),
    }


def write_records(path: Path | str, environments: Iterable[ToolEnvironment], seed: int) -> int:
    """Write environments as a .jsonl or .parquet file, whole or not at all; returns how many.

    Raises:
        ValueError: another suffix, .parquet without pyarrow, or an environment that cannot be scored.
    """
    return write_rows(path, (to_record(environment, seed=seed) for environment in environments))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------------------------------
# Import


async def import_dataset(
    path: Path | str,
    sandbox: Sandbox,
    journal: Journal,
    config: SearchConfig | None = None,
    *,
    concurrency: int = 8,
) -> Imported[ToolEnvironment]:
    """Import every row of a file as an environment, or count it with the reason why it is none.

    Args:
        path: see `read_records` for the formats.
        sandbox: an open one.
        journal: an import that was killed resumes from it; another file or configuration starts from scratch.
        config: bounds of the search.
        concurrency: rows in work at a time.

    Raises:
        ValueError: the file cannot be read.
    """
    config = config or SearchConfig()
    rows = list(enumerate(read_rows(path)))
    digest = hashlib.sha256(msgspec.json.encode(dataclasses.asdict(config)))
    for _, data in rows:
        digest.update(len(data).to_bytes(8, "big") + data)
    found: Counter[str] = Counter()
    for row, data in rows:
        try:
            found.update(defect.name for defect in defects(parse(data, row, path)))
        except Rejected:
            continue  # the stage counts it

    async def stage(item: tuple[int, bytes]) -> list[ToolEnvironment]:
        return [await import_record(parse(item[1], item[0], path), sandbox, config)]

    result = await run_stage(
        f"astra_rl/{digest.hexdigest()[:16]}",
        stage,
        rows,
        key=lambda item: str(item[0]),
        out=ToolEnvironment,
        journal=journal,
        concurrency=concurrency,
        description="astra_rl: import",
    )
    return Imported(list(result.outputs), result.rejected, result.details, found, len(rows))


async def import_record(record: AstraRecord, sandbox: Sandbox, config: SearchConfig | None = None) -> ToolEnvironment:
    """Return the record as an environment, every gold answer with a proven call.

    Raises:
        Rejected: the name of a defect (see `defects`), a reason of `reference_search.find_calls` or `verify.solve`, or
            `cyclic`.
        Transient: the sandbox itself failed.
    """
    if found := defects(record):
        raise Rejected(found[0].name, found[0].detail)
    specs = [spec_of(schema) for schema in record.schemas]
    tools = {spec.name: CodeTool(spec, record.code[spec.name]) for spec in specs}
    answers = {tool: [typed_answer(value) for value in values] for tool, values in record.answers.items()}
    language = language_of(record.question)
    calls = await find_calls(tools, answers, record.question, sandbox, config or SearchConfig(), language)
    steps, calls = _steps(calls, tools, record.question)
    irrelevant = [tool for name, tool in tools.items() if name not in record.answers]
    arguments = [value for call in calls for value in leaves(call.arguments) if isinstance(value, str)]
    consumed = {dependency for step in steps for dependency in step.depends_on}
    environment = ToolEnvironment(
        id=f"astra-rl-{record.row}",
        language=language,
        domain="imported",
        structure=dependency_graph.structure_of(dependency_graph.graph_of(steps)),
        question=record.question,
        # The record has no final answer; the results that no other call needs are the answer.
        answer=Answer([answer_text(step.answer) for step in steps if step.id not in consumed]),
        sub_questions=steps,
        tools=[tool for name, tool in tools.items() if name in record.answers],
        reference_calls=[
            ReferenceCall(step.id, call.tool, call.arguments, call.output, call.rule)
            for step, call in zip(steps, calls, strict=True)
        ],
        distractors={BAND: irrelevant} if irrelevant else {},
        entities=list(dict.fromkeys(arguments)),
        signature=dependency_graph.signature_of(steps),
        split="train",
        mode="imported",
        difficulty=dependency_graph.difficulty_of(steps),
    )
    await solve(environment, sandbox)
    return environment


def _steps(calls: Sequence[Found], tools: dict[str, CodeTool], question: str) -> tuple[list[SubQuestion], list[Found]]:
    """Return a sub-question for each call, and the calls in their order: a step follows the steps that it depends
    on."""
    needs = [_needs(i, calls, question) for i in range(len(calls))]
    placed: dict[int, tuple[int, set[int]]] = {}  # call → its hop, and the calls that its arguments are from
    while len(placed) < len(calls):
        ready = {
            # Of several calls that return a value the earliest: no longer a path than there has to be.
            i: {next(j for j in sources if j in placed) for sources in needs[i]}
            for i in range(len(calls))
            if i not in placed and all(any(j in placed for j in sources) for sources in needs[i])
        }
        if not ready:
            names = [call.tool for i, call in enumerate(calls) if i not in placed]
            raise Rejected("cyclic", f"each of {', '.join(names)} needs an argument that only another of them returns")
        hop = 1 + max((hop for hop, _ in placed.values()), default=0)
        placed.update({i: (hop, providers) for i, providers in ready.items()})
    ids = {i: id_ for id_, i in enumerate(placed, start=1)}
    steps: list[SubQuestion] = []
    for i, (hop, providers) in placed.items():
        call, tool = calls[i], tools[calls[i].tool]
        steps.append(
            SubQuestion(
                id=ids[i],
                question=f"{tool.spec.description} {shown(tool, call.arguments)}".strip(),
                answer=call.answer,
                depends_on=sorted(ids[provider] for provider in providers),
                hop=hop,
                needs_tool=True,
                intent=call.tool,
            )
        )
    return steps, [calls[i] for i in placed]


def _needs(i: int, calls: Sequence[Found], question: str) -> list[list[int]]:
    """For each argument's value that the question does not name and another call returns: the calls that do."""
    needs: list[list[int]] = []
    for value in leaves(calls[i].arguments):
        if names_value(question, value, identifiers=True):
            continue
        wanted = Answer(value)
        # A call that was given the value only repeats it.
        sources = [
            j
            for j, other in enumerate(calls)
            if j != i and contains(other.output, wanted) and not contains(other.arguments, wanted)
        ]
        gold = [j for j in sources if contains(calls[j].answer.value, wanted)]
        if sources:
            needs.append(gold or sources)
    return needs
