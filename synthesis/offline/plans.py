"""Plans: relations to apply to entities, with their order.

A plan is a tuple of steps. A step applies one relation to an entity or to the value of an earlier step. Its *terminal*
steps, which no other step uses, are the subject of its question. Relations are unary, so every terminal is a chain that
starts from one entity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from synthesis.core.records import Structure
from synthesis.offline.facts.catalog import KINDS
from synthesis.offline.facts.relations import all_relations

Value = str | int | float


@dataclass(frozen=True)
class Step:
    """`relation` (an id) applied to `argument`: an entity (str), or the index (int) of the step whose value it is."""

    relation: str
    argument: str | int


Plan = tuple[Step, ...]
Chain = tuple[str, tuple[str, ...]]
"""One terminal of a plan: the entity it starts from, and its relation ids in order of evaluation."""


def evaluate(plan: Plan) -> list[Value]:
    """The value of every step.

    Raises:
        ValueError: a relation, subject or step index does not exist; the message names it.
    """
    values: list[Value] = []
    for index, step in enumerate(plan):
        relation = all_relations().get(step.relation)
        if relation is None:
            raise ValueError(f"step {index}: unknown relation {step.relation!r}; see all_relations()")
        if isinstance(step.argument, int) and not 0 <= step.argument < index:
            raise ValueError(f"step {index}: argument {step.argument} is not the index of an earlier step")
        subject = str(values[step.argument]) if isinstance(step.argument, int) else step.argument
        if subject not in relation.rows:
            raise ValueError(f"step {index}: {step.relation} has no row for {subject!r}")
        values.append(relation.rows[subject])
    return values


def terminals(plan: Plan) -> list[int]:
    """Indices of the steps that no other step consumes: what the question asks for."""
    consumed = {step.argument for step in plan if isinstance(step.argument, int)}
    return [index for index in range(len(plan)) if index not in consumed]


def chains(plan: Plan) -> list[Chain]:
    """Every terminal as its starting entity and the relations applied to it."""
    found: list[Chain] = []
    for index in terminals(plan):
        relations: list[str] = []
        argument: str | int = index
        while isinstance(argument, int):
            relations.append(plan[argument].relation)
            argument = plan[argument].argument
        found.append((argument, tuple(reversed(relations))))
    return found


def from_chains(every: Sequence[Chain]) -> Plan:
    """The plan that asks for the given chains in this order. Equal steps become one."""
    steps: dict[Step, int] = {}
    for entity, relations in every:
        argument: str | int = entity
        for relation in relations:
            argument = steps.setdefault(Step(relation, argument), len(steps))
    return tuple(steps)


def signature(plan: Plan) -> str:
    """The plan's structure without its entities, parallel chains sorted: `a_of_b>c_of_a|d_of_b`."""
    return "|".join(sorted(">".join(relations) for _, relations in chains(plan)))


def structure(plan: Plan) -> Structure:
    """The plan's structure, one of the paper's four."""
    every = chains(plan)
    if max(len(relations) for _, relations in every) == 1:
        return "single_hop" if len(every) == 1 else "parallel_single_hop"
    return "multi_hop" if len(every) == 1 else "parallel_multi_hop"


def entities(plan: Plan) -> list[str]:
    """Every named subject in the question or among the values that are entities, in order, once each."""
    named = [step.argument for step in plan if isinstance(step.argument, str)]
    found = [str(v) for s, v in zip(plan, evaluate(plan), strict=True) if all_relations()[s.relation].object in KINDS]
    return list(dict.fromkeys([*named, *found]))
