"""What the teachers of several processes share that ask the same endpoints."""

from __future__ import annotations

from typing import Protocol

from synthesis.core.endpoint_limits import EndpointLimits
from synthesis.core.endpoint_settings import OpenAITeacherConfig
from synthesis.core.recording import Answers
from synthesis.pipeline.answer_forms import Form


class SharedEndpoint(Protocol):
    """Of one process; see `ray_leases.EndpointLine`.

    Attributes:
        answers: in place of a recording of its own; None where nothing is recorded.
    """

    @property
    def answers(self) -> Answers | None: ...

    def limits(self, config: OpenAITeacherConfig) -> EndpointLimits:
        """Those of the next of `OpenAITeacher.endpoints`."""
        ...

    async def form(self, config: OpenAITeacherConfig) -> Form:
        """See `OpenAITeacher.form_of_answers`."""
        ...
