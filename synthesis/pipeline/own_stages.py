"""Stages of the user's own, between the package's: `--config.own_stages='{"verify": ["my_module:my_stage"]}'`.

async def short_questions(environment, context):
    if len(environment.question.split()) > 60:
        raise Rejected("long_question", environment.question)
    return [environment]

short_questions.reads = ("attempts",)  # settings that it reads, if any
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from astra_jax.base.errors import InputError
from astra_jax.base.settings import OneOf
from synthesis.core.references import referred
from synthesis.pipeline.stage_keys import StageSpec

OwnStages = Mapping[str, tuple[Annotated[str, OneOf((), own=True)], ...]]
"""Type of the setting: references to functions, by the name of the stage that they follow."""


@dataclass(frozen=True)
class OwnStage:
    """A function of the user's own as a stage after one of the package's.

    Attributes:
        stage: its declaration.
        function: the user's, `(record, context) -> records`.
    """

    stage: StageSpec[Any, Any]
    function: Callable[[Any, Any], Awaitable[Sequence[Any]]]

    async def __call__(self, record: Any, context: Any) -> Sequence[Any]:
        """Return the function's records.

        Raises:
            InputError: it returned something else, or two records of one id; or it called `sys.exit`.
            Exception: whatever the function raises, such as `Rejected`.
        """
        name, kind, id = self.stage.name, self.stage.out, self.stage.id
        assert id is not None, "as `load_own_stages` has it"
        try:
            found = await self.function(record, context)
        except SystemExit as error:  # it would end the program as if the run were finished
            raise InputError(f"own_stages: {name} raised SystemExit: {error}") from error
        if not isinstance(found, (list, tuple)) or not all(isinstance(one, kind) for one in found):
            raise InputError(f"own_stages: {name} returned {found!r:.200}; return a list of {kind.__name__} records")
        if len({id(one) for one in found}) < len(found):
            raise InputError(f"own_stages: {name} returned two records with the id {id(found[0])}; give each its own")
        return found


def load_own_stages(
    given: Mapping[str, Iterable[str]], after: Iterable[StageSpec[Any, Any]], settings: Collection[str]
) -> dict[str, list[OwnStage]]:
    """Return the stages of the setting `own_stages`, by the name of the stage that they follow.

    Args:
        given: the setting.
        after: stages of the run.
        settings: names of the run's settings.

    Raises:
        InputError: there is no such stage, a function cannot be loaded, or it declares a setting that does not exist.
    """
    known = {one.name: one for one in after if one.id is not None}
    found: dict[str, list[OwnStage]] = {}
    for name, references in given.items():
        if name not in known:
            raise InputError(f"own_stages: no stage {name!r} that yours can follow; there are {', '.join(known)}")
        found[name] = [_loaded(one, known[name], settings) for one in references]
    return found


def _loaded(reference: str, after: StageSpec[Any, Any], settings: Collection[str]) -> OwnStage:
    function = referred(reference)
    if not inspect.iscoroutinefunction(function):
        raise InputError(
            f"own_stages: {reference} is {function!r:.80}; give an `async def` with the parameters (record, context) "
            "(docs/extending.md)"
        )
    reads = tuple(getattr(function, "reads", ()))
    if unknown := [one for one in reads if one not in settings]:
        raise InputError(f"own_stages: {reference} reads the setting {unknown[0]!r}, which does not exist")
    name, id = f"{after.name}+{reference}", after.id
    assert id is not None
    return OwnStage(StageSpec(name, after.out, id, reads, id, code=_source_digest(function)), function)


def _source_digest(function: Any) -> str:
    """Return the digest of the file in which a function is defined."""
    file = Path(sys.modules[function.__module__].__file__ or "")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
