"""The teacher, the embedder and the sandbox of a run's stages.

A stage is a coroutine function `(record, context) -> records`. It runs in this process, which asks the endpoints.
Sandbox work goes through `pipeline.context.in_sandbox`, so that it can run on the cores of a cluster (`ray_cluster`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from astra_jax.base.errors import InputError
from synthesis.core.rate_limits import Spent
from synthesis.core.records import Language
from synthesis.pipeline.embedding import Embedder, SentenceEmbedder
from synthesis.pipeline.languages import PACKAGED_LANGUAGES
from synthesis.pipeline.preview import Preview
from synthesis.pipeline.ray_cluster import RayCluster
from synthesis.pipeline.teacher import Connected, Metered, OpenAITeacher, Teacher, follows_rules

if TYPE_CHECKING:
    from sandbox import Sandbox


@dataclass
class Executor:
    """The means of a run's stages; leaving it as a context manager closes the teacher's connections.

    Attributes:
        sandbox: an open sandbox, or an open cluster of them.
        embedder: of tool documents.
    """

    teacher: Teacher
    sandbox: Sandbox | RayCluster
    embedder: Embedder = field(default_factory=SentenceEmbedder)

    @property
    def by_rules(self) -> bool:
        """The teacher follows rules, as the offline teacher does, and is no model."""
        return follows_rules(self.teacher)

    @property
    def costs(self) -> Mapping[str, Spent]:
        """Use of the teacher's endpoint by stage, in this run and earlier ones; empty without an endpoint."""
        return self.teacher.spent_by_stage if isinstance(self.teacher, Metered) else {}

    def records_at_once(self, wanted: int) -> int:
        """Return how many records are in work: as many as wanted, and enough to keep a cluster's cores busy."""
        return max(wanted, 2 * self.sandbox.cores) if isinstance(self.sandbox, RayCluster) else wanted

    def watch(self, preview: Preview) -> None:
        """Let a preview observe the requests to endpoints."""
        if isinstance(self.teacher, OpenAITeacher):
            for endpoint in self.teacher.endpoints:
                endpoint.watch = preview.note

    async def __aenter__(self) -> Executor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self.teacher, Connected):  # it opens its connections again when it is asked again
            await self.teacher.close()


def check_spoken(languages: Mapping[Language, float], *, by_rules: bool) -> None:
    """Refuse languages that the teacher cannot write.

    Args:
        languages: weights; 0 asks for none.

    Raises:
        InputError: rules know no such language.
    """
    foreign = [one for one, weight in languages.items() if weight and one not in PACKAGED_LANGUAGES]
    if by_rules and foreign:
        raise InputError(
            f"languages: the offline teacher writes {' and '.join(PACKAGED_LANGUAGES)}, not {', '.join(foreign)}; "
            "leave it out, or give --teacher_url"
        )
