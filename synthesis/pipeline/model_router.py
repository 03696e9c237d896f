"""Choose the model of each role, of several by weight for each record; a model never judges its own text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import msgspec

from astra_jax.base.errors import InputError
from synthesis.core.endpoint_settings import OpenAITeacherConfig, Role
from synthesis.core.stages import rng_for

Models = tuple[tuple[str, float], ...]
"""Names, each with its weight."""


def role_of(answer: type[msgspec.Struct]) -> Role:
    """Return the role that gives an answer: `ROLE` of its type, by default the author."""
    return getattr(answer, "ROLE", "author")


def judged_by(answer: type[msgspec.Struct]) -> Role:
    """Return the role whose text a judge's answer is about: `JUDGES` of its type, by default the agent."""
    return getattr(answer, "JUDGES", "agent")


@dataclass(frozen=True)
class ModelRouter:
    """Models of each role. It holds no key, so it can be sent to other processes.

    Attributes:
        models: models by role.
        judge_own_text: allow a model to judge its own text.
    """

    models: Mapping[Role, Models]
    judge_own_text: bool

    @classmethod
    def of(cls, config: OpenAITeacherConfig) -> ModelRouter:
        """Return the models that the settings of an endpoint name."""
        roles: tuple[Role, ...] = get_args(Role)
        named = {
            role: tuple(
                (one.model, weight) for one, weight in zip(config.models(role), config.weights(role), strict=True)
            )
            for role in roles
        }
        return cls(named, config.judge_own_text)

    def sample(self, record: str, role: Role, judged: Role = "agent") -> int:
        """Which of a role's models answers for a record: by weight, and the same whenever it is asked for.

        Args:
            judged: whose text a judge is about: it is another model than that role's of this record.

        Raises:
            InputError: no judge is left.
        """
        models = self.models[role]
        open_to = range(len(models))
        if role == "judge" and not self.judge_own_text:
            wrote = self.models[judged][self.sample(record, judged)][0]
            open_to = [index for index in open_to if models[index][0] != wrote]  # type: ignore[assignment]
            if not open_to:
                raise self._only_judge(wrote, judged)
        if len(open_to) == 1:
            return open_to[0]
        weights = [models[index][1] for index in open_to]
        return rng_for(0, "model", role, judged if role == "judge" else "", record).choices(open_to, weights)[0]

    def names(self, record: str, judged: Role = "agent") -> dict[Role, str]:
        """Return the model of each role for a record; raises as `sample`."""
        return {role: self.models[role][self.sample(record, role, judged)][0] for role in self.models}

    def check(self) -> None:
        """See that each text has a judge. Raises `InputError`: the only judge is a model that writes it."""
        if self.judge_own_text:
            return
        judges = {name for name, _ in self.models["judge"]}
        for role in ("author", "agent", "user"):
            for name, _ in self.models[role]:
                if judges == {name}:
                    raise self._only_judge(name, role)

    def _only_judge(self, model: str, role: Role) -> InputError:
        return InputError(
            f"{model!r} is the {role} and the only judge of what it writes, to which a model is too kind: give judge "
            """another model (--roles='{"judge": {"url": "http://HOST:8000/v1", "model": "NAME"}}'), or """
            "--judge_own_text, which lets it"
        )
