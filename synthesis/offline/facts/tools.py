"""Relations as tools of environments: a small table of real facts, the needed subjects among them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from synthesis.core.matching import contains
from synthesis.core.records import Answer, CodeTool, Language, ToolSpec
from synthesis.core.stages import rng_for
from synthesis.offline.facts.code import module_source
from synthesis.offline.facts.relations import Relation, all_relations
from synthesis.offline.facts.servers import tool_spec

OPTION = "format"
OPTION_VALUES = ("object", "value")

_OPTION_CODE = '''

def {name}({parameter}, {option}="object"):
    """Return the result as an object, or its bare value."""
    if {option} not in ("object", "value"):
        raise ValueError(f"unknown {option}: {{{option}!r}}; use object or value")
    result = _{name}({parameter})
    return result if {option} == "object" else result["{result}"]
'''


def answer_of(relation: Relation, subject: str) -> Answer:
    """The relation's value for a subject, typed. A fraction may be off by a millionth of itself, as printing may do."""
    value = relation.rows[subject]
    if isinstance(value, str):
        return Answer(value)
    return Answer(value, unit=relation.unit, tolerance=0.0 if isinstance(value, int) else 1e-6 * abs(value))


def table_subjects(relation: Relation, needed: str, rows: int, seed: int) -> list[str]:
    """At most `rows` subjects, in the relation's order: `needed`, one with another value, and random others.

    They depend on the arguments alone, so equal questions get equal tools.

    Raises:
        ValueError: every subject has the same value, so no call could prove that the tool heeds its argument.
    """
    rng = rng_for(seed, "table", relation.id, needed)
    every = [subject for subject in relation.rows if subject != needed]
    chosen = {needed, other_subject(relation, needed, every, seed)}
    chosen.update(rng.sample(every, min(rows - 2, len(every))))
    # The sample leaves room for `needed` and the other subject.
    return [subject for subject in relation.rows if subject in chosen]


def other_subject(relation: Relation, needed: str, subjects: Sequence[str], seed: int) -> str:
    """Return a subject whose value is not an answer to the question about `needed`.

    Raises:
        ValueError: there is none.
    """
    answer = answer_of(relation, needed)
    rng = rng_for(seed, "other", relation.id, needed)
    # A few random tries nearly always do; going through all of 1,500 subjects is for the rest.
    for subject in [*(rng.choice(subjects) for _ in range(16)), *subjects]:
        if not contains(relation.rows[subject], answer):
            return subject
    raise ValueError(f"relation {relation.id}: every subject has the value {answer.value!r} of {needed!r}")


def fact_tool(
    relation: Relation, subjects: Sequence[str], language: Language, *, spec: ToolSpec | None = None
) -> CodeTool:
    """Return the relation as a tool over the given subjects.

    Args:
        spec: its document; the relation's own by default. With the parameter `format` the code takes it.
    """
    spec = spec or tool_spec(relation, language)
    # The relation's order, so that the same subjects give the same bytes.
    wanted = set(subjects)
    rows = {relation.id: [subject for subject in relation.rows if subject in wanted]}
    if OPTION not in spec.parameters["properties"]:
        return CodeTool(spec, module_source([relation], rows, names={relation.id: spec.name}))
    plain = module_source([relation], rows, names={relation.id: f"_{spec.name}"})
    option = _OPTION_CODE.format(name=spec.name, parameter=relation.parameter, option=OPTION, result=relation.result)
    return CodeTool(spec, plain.rstrip() + "\n" + option)


def sampled_tools(language: Language, rows: int, seed: int, *, but: Collection[str]) -> Iterator[tuple[str, CodeTool]]:
    """The domain and the tool of each relation, over `rows` subjects that the seed decides; a tool is named after its
    relation.

    Args:
        but: relations to leave out.
    """
    for relation in all_relations().values():
        if relation.id not in but:
            first = rng_for(seed, "distractor", relation.id).choice(list(relation.rows))
            yield relation.domain, fact_tool(relation, table_subjects(relation, first, rows, seed), language)
