"""Joins that tell something: no nearly constant ones, no hop that can be skipped; the quickstart's are as they were."""

from __future__ import annotations

import pytest

from configs.quickstart import QuickstartConfig
from sandbox import SandboxConfig, SandboxPool
from synthesis.core.datasets import read_dataset
from synthesis.core.records import ToolEnvironment
from synthesis.core.stages import Journal, rng_for
from synthesis.environments.config import EnvironmentsConfig
from synthesis.environments.pipeline import synthesize
from synthesis.offline import grammar, plans, sampling
from synthesis.offline.facts.relations import all_relations, joinable
from synthesis.offline.teacher import OfflineTeacher
from synthesis.offline.trajectory_author import Keep, chain_plan
from synthesis.pipeline.executors import Executor
from synthesis.trajectories.config import TrajectoriesConfig

EASTER = ("easter_of_year", "weekday_of_date")
NEIGHBOR = ("largest_neighbor_of_country", "continent_of_country")


def test_joins_of_nearly_one_value_are_known():
    """Eight of all that can be made; of the others no value has more than nine tenths."""
    table = all_relations()
    pairs = [(one.id, two.id) for one in table.values() for two in table.values() if joinable(one, two)]
    silent = [pair for pair in pairs if sampling.tells_nothing(*pair)]
    assert len(silent) == 8 and EASTER in silent
    for pair in set(pairs) - set(silent):
        values = [str(table[pair[1]].rows[str(table[pair[0]].rows[one])]) for one in sampling.subjects(pair)]
        assert not values or max(map(values.count, set(values))) <= 0.9 * len(values)


def test_a_hop_can_be_skipped_where_the_value_is_that_of_an_earlier_subject():
    assert sampling.can_skip("Portugal", NEIGHBOR)  # Spain's, and its own
    assert not sampling.can_skip("Egypt", ("largest_neighbor_of_country", "capital_of_country"))
    assert not sampling.can_skip("Peru", ("capital_of_country",))
    crossing = next(one for one in sampling.subjects(NEIGHBOR) if not sampling.can_skip(one, NEIGHBOR))
    assert sampling.informative(plans.from_chains([(crossing, NEIGHBOR)]))
    assert not sampling.informative(plans.from_chains([(crossing, NEIGHBOR), ("2026", EASTER)]))


def test_chains_of_tasks_are_of_those_alone():
    keep, rng = Keep(None, informative=True), rng_for(0, "chains")
    for _ in range(20):
        [(subject, path)] = plans.chains(chain_plan(NEIGHBOR, keep, rng))
        assert path == NEIGHBOR and not sampling.can_skip(subject, path)
    with pytest.raises(ValueError, match="nearly all that it finds is the same"):
        chain_plan(EASTER, keep, rng)
    assert chain_plan(EASTER, Keep(None), rng)


async def test_environments_have_none_that_a_shorter_way_answers(tmp_path):
    """Re-derived from the records: no reference call gives its value of an earlier call's argument too."""
    shares = {"multi_hop": 1.0, "parallel_multi_hop": 1.0}
    config = EnvironmentsConfig(
        count=24, structures=shares, held_out_fraction=0.0, languages={"en": 1.0}, informative_joins=True
    )
    async with SandboxPool(SandboxConfig()) as pool:
        with Journal(tmp_path / "journal.sqlite") as journal:
            await synthesize(
                config, executor=Executor(OfflineTeacher(), pool), journal=journal, out_dir=tmp_path, seed=1
            )
    made = read_dataset(tmp_path / "train", ToolEnvironment)
    assert len(made) > 18
    for one in made:
        assert sampling.informative(grammar.parse(one.question, "en")), one.question


def test_the_quickstart_is_as_it_was():
    quick = QuickstartConfig()
    assert not quick.trajectories.informative_joins and not quick.environments.informative_joins
    assert TrajectoriesConfig().informative_joins and not EnvironmentsConfig().informative_joins
