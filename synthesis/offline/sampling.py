"""Random plans: relation paths first (uniform over distinct paths), then a subject for which every step evaluates."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence

from synthesis.core.records import Structure
from synthesis.offline import plans
from synthesis.offline.facts.catalog import KINDS
from synthesis.offline.facts.relations import Relation, all_relations, joinable
from synthesis.offline.plans import Plan

Path = tuple[str, ...]
_TRIES = 2000


def random_plan(
    rng: random.Random,
    structure: Structure,
    relations: Sequence[Relation] | None = None,
    max_hops: int = 3,
    *,
    branches: tuple[int, int] = (2, 3),
    keep: Callable[[str], bool] | None = None,
) -> Plan:
    """Return a random plan of the given structure over real facts.

    Trivial plans are excluded: a relation followed by its own inverse, a value that appears twice in a chain, and
    parallel chains with equal answers.

    Args:
        relations: relations that may be used; None: all.
        max_hops: longest chain of the multi-hop structures, at least 2.
        branches: fewest and most parallel chains.
        keep: returns whether an entity (a subject or an intermediate value) may occur, to hold entities out.

    Raises:
        ValueError: the relations allow no such plan, or an argument is out of range.
    """
    many, deep = structure.startswith("parallel"), structure.endswith("multi_hop")
    if deep and max_hops < 2:
        raise ValueError(f"max_hops: {max_hops} is too small for {structure}; use at least 2")
    if not 2 <= branches[0] <= branches[1]:
        raise ValueError(f"branches: {branches} must be (least, most) with 2 <= least <= most")
    ids = tuple(r.id for r in (all_relations().values() if relations is None else relations))
    lengths = [n for n in (range(2, max_hops + 1) if deep else (1,)) if _paths(ids, n)]
    if not lengths:
        raise ValueError(f"relations: no {structure} path over {len(ids)} relations; give relations that can be joined")

    def path() -> Path:
        return rng.choice(_paths(ids, rng.choice(lengths)))

    def kept(of: Path, entity: str) -> bool:
        return keep is None or all(map(keep, _entities(of, entity)))

    def subject(of: Path) -> str | None:
        every = subjects(of)
        for _ in range(20 if every else 0):
            one = rng.choice(every)
            if kept(of, one):
                return one
        return None

    for _ in range(_TRIES):
        first = path()
        entity = subject(first)
        if entity is None:
            continue
        chains = [(entity, first)]
        for _ in range(rng.randint(*branches) - 1 if many else 0):
            other = _companion(rng, first, entity, ids, lengths, path)
            shares = other != first and entity in _subject_set(other) and kept(other, entity) and rng.random() < 0.75
            another = entity if shares else subject(other)
            if another is not None:
                chains.append((another, other))
        plan = plans.from_chains(chains)
        if plans.structure(plan) != structure or (many and len(chains) < branches[0]):
            continue
        values = plans.evaluate(plan)
        ends = [str(values[i]).casefold() for i in plans.terminals(plan)]
        # A chain that ends inside another one would not be asked for.
        if len(ends) == len(chains) == len(set(ends)):
            return plan
    raise ValueError(f"relations: no {structure} plan found in {_TRIES} tries over {len(ids)} relations; allow more")


def _companion(
    rng: random.Random, first: Path, entity: str, ids: Path, lengths: list[int], path: Callable[[], Path]
) -> Path:
    """A path that goes well with `first`: itself, one from the same kind of subject, or one of the same domain."""
    kind = rng.choice(("same", "subject", "domain"))
    if kind == "same":
        return first
    table = all_relations()
    start = table[first[0]]
    near = [
        one
        for one in _paths(ids, rng.choice(lengths))
        if (table[one[0]].subject == start.subject if kind == "subject" else table[one[0]].domain == start.domain)
    ]
    return rng.choice(near) if near else path()


@functools.lru_cache(maxsize=256)
def _paths(ids: Path, hops: int) -> list[Path]:
    """Every path of `hops` joinable relations, without a relation right after its own inverse."""
    if hops == 1:
        return [(one,) for one in ids]
    table = all_relations()
    after: dict[str, list[str]] = {}
    for one in ids:
        after.setdefault(table[one].subject, []).append(one)
    return [
        (*path, following)
        for path in _paths(ids, hops - 1)
        for following in after.get(table[path[-1]].object, [])
        if joinable(table[path[-1]], table[following]) and following not in path and not _undoes(path[-1], following)
    ]


@functools.cache
def _undoes(first: str, second: str) -> bool:
    """Return whether `second` mostly leads back to where `first` came from."""
    one, two = all_relations()[first], all_relations()[second]
    if one.subject != two.object:
        return False
    reached = [(subject, str(two.rows[str(value)])) for subject, value in one.rows.items() if str(value) in two.rows]
    return 2 * sum(subject == back for subject, back in reached) > len(reached)


@functools.lru_cache(maxsize=8192)
def subjects(path: Path) -> tuple[str, ...]:
    """The subjects for which every step of the path evaluates and no value recurs; empty for mostly circular paths."""
    table = [all_relations()[one] for one in path]
    kept: list[str] = []
    reached = 0
    for subject in table[0].rows:
        trail = [subject]
        for relation in table:
            value = relation.rows.get(trail[-1])
            if value is None:
                break
            trail.append(str(value))
        else:
            reached += 1
            if len({one.casefold() for one in trail}) == len(trail):
                kept.append(subject)
    return tuple(kept) if 2 * len(kept) > reached else ()


_CONSTANT = 0.9
"""Share of one value among those of a join, above which it says nothing: every Easter is a Sunday."""


@functools.lru_cache(maxsize=8192)
def tells_nothing(first: str, second: str) -> bool:
    """Return whether nearly all values of the second relation, of what the first one leads to, are the same."""
    one, two = all_relations()[first].rows, all_relations()[second].rows
    values = Counter(str(two[str(one[subject])]) for subject in subjects((first, second)))
    return values.total() > 0 and max(values.values()) > _CONSTANT * values.total()


def can_skip(subject: str, path: Path) -> bool:
    """Return whether a hop is needless, since an earlier subject has the same value: a neighbour's continent is the
    country's own."""
    trail = [subject]
    for number, relation in enumerate(path):
        rows = all_relations()[relation].rows
        value = str(rows[trail[-1]])
        if any(str(rows.get(earlier)) == value for earlier in trail[:number]):
            return True
        trail.append(value)
    return False


def informative(plan: Plan) -> bool:
    """Return whether each hop of its chains must be made, and tells something."""
    return not any(
        can_skip(subject, path) or any(map(tells_nothing, path, path[1:])) for subject, path in plans.chains(plan)
    )


@functools.lru_cache(maxsize=1024)
def _subject_set(path: Path) -> frozenset[str]:
    return frozenset(subjects(path))


def _entities(path: Path, subject: str) -> list[str]:
    """The subject and the values along the path that are entities."""
    found, current = [subject], subject
    for one in path:
        relation = all_relations()[one]
        current = str(relation.rows[current])
        if relation.object in KINDS:
            found.append(current)
    return found
