"""Split: the finished environment goes to the side of the partition on which all of it lies, or is dropped."""

from __future__ import annotations

from synthesis.environments.config import Built, Context
from synthesis.environments.proof import replay
from synthesis.records import ToolEnvironment
from synthesis.runner import Rejected


async def split(built: Built, context: Context) -> list[ToolEnvironment]:
    """The environment as it is stored, every reference call of the final record run once more.

    Raises:
        Rejected: `straddles_split` where its entities and signature do not lie on one side, `name_collision`,
            `replay_failed`.
        Transient: the sandbox itself failed.
    """
    decomposition = built.draft.decomposition
    side = context.config.partition.side(decomposition.entities, decomposition.signature)
    if side is None:
        raise Rejected("straddles_split", f"{decomposition.signature} of {decomposition.entities}")
    distractors = [tool for tools in built.distractors.values() for tool in tools]
    names = [tool.spec.name for tool in [*(one.tool for one in built.tools), *distractors]]
    if len(set(names)) != len(names):
        raise Rejected("name_collision", f"tools share a name: {sorted(names)}")
    environment = ToolEnvironment(
        id=decomposition.id,
        language=decomposition.language,
        domain=decomposition.domain,
        structure=decomposition.structure,
        question=decomposition.question,
        answer=decomposition.answer,
        sub_questions=decomposition.sub_questions,
        tools=[one.tool for one in built.tools],
        reference_calls=sorted((call for one in built.tools for call in one.calls), key=lambda call: call.sub_question),
        distractors=built.distractors,
        entities=decomposition.entities,
        signature=decomposition.signature,
        split=side,
    )
    async with context.proofs:
        problems = await replay(environment, context.pool)
    if problems:
        raise Rejected("replay_failed", problems[0])
    return [environment]
