"""Pages of trajectories.

GET  /                   trajectories; ?text, ?domain, ?language, ?failures and ?reward filter them, ?sort orders them
GET  /trajectory/ID      one of them: the conversation, the scores, the tool documents
"""

from __future__ import annotations

import os

from aiohttp import web

from launch.viewer.conversation import question_of, turns_of
from launch.viewer.lists import ListChoice, RecordList, Row, StoredRecords
from launch.viewer.schemas import parameters_of
from launch.viewer.service import page
from synthesis.core.records import Trajectory
from synthesis.core.tool_results import server_text
from synthesis.trajectories.execution import FAILURES
from synthesis.trajectories.judge import AXES

_COLUMNS = {
    "question": "question",
    "server": "code",
    "domain": "small",
    "language": "small",
    "behaviour": "small",
    "calls": "number",
    "failures": "number",
    "reward": "number",
}
_CHOICES = (
    ListChoice("domain", "all domains"),
    ListChoice("language", "all languages"),
    ListChoice(
        "failures",
        "with or without injected failures",
        lambda row: "with" if row.values["failures"] else "without",
        ("with", "without"),
        "{} injected failures",
    ),
)


class TrajectoryPages:
    """Shows the trajectories of a dataset. Raises as `StoredRecords`."""

    noun = "trajectories"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._records = StoredRecords(path, Trajectory, self.noun, _row)
        self._list = RecordList(
            "Trajectories", self.noun, _COLUMNS, self._records.rows, "/trajectory/{}",
            text="text in question, id, server, called tools", choices=_CHOICES, least="reward",
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._records.rows)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that the module lists."""
        return [web.get("/", self._list.show), web.get("/trajectory/{id:.+}", self._show)]

    async def _show(self, request: web.Request) -> web.Response:
        one = self._records.read(request.match_info["id"])
        return page(
            "trajectory.html.jinja",
            title=one.id,
            heading=question_of(one.messages) or one.id,
            language=one.language,
            values=_facts(one),
            turns=turns_of(one.messages, failures_of(one)),
            scores=scores_of(one),
            tools=one.tools,
            parameters_of=parameters_of,
            **self._list.around(request, one.id),
        )


def _row(one: Trajectory) -> Row:
    question = question_of(one.messages)
    names = [call.name for message in one.messages for call in message.tool_calls]
    behaviour = one.dialogue.behaviour.replace("_", " ") if one.dialogue else ""
    values = {
        **{name: getattr(one, name) for name in ("domain", "language", "reward")},
        "question": question or "(no question)",
        "server": one.server_id,
        "behaviour": behaviour,
        "calls": len(names),
        "failures": one.injected_failures,
    }
    text = "\n".join([question, one.id, one.server_id, behaviour, *dict.fromkeys(names)]).casefold()
    return Row(one.id, values, text, one.language)


def _facts(one: Trajectory) -> dict[str, object]:
    facts: dict[str, object] = {"id": one.id, "reward": one.reward}
    facts |= {name: getattr(one, name) for name in ("server_id", "domain", "language", "task_id", "injected_failures")}
    if one.dialogue:
        facts["behaviour"] = one.dialogue.behaviour.replace("_", " ")
        more = {"user": one.dialogue.persona, "withheld": one.dialogue.hidden_tools}
        facts |= {name: value for name, value in more.items() if value}
    if one.unfinished is True:
        facts["end"] = "broken off at a limit"
    return facts | {"messages": len(one.messages), "tool documents": len(one.tools)}


def scores_of(one: Trajectory) -> list[tuple[str, float | None, str]]:
    """Return (axis, score, reason) of the seven axes in the paper's order, then of others; None: not scored."""
    names = [*AXES, *(name for name in one.scores if name not in AXES)]
    known = [(name, one.scores.get(name)) for name in names]
    return [(name, score.score, score.reason) if score else (name, None, "") for name, score in known]


def failures_of(one: Trajectory) -> dict[int, tuple[str, str]]:
    """Return the (failure, kind) of results by message index.

    Records of older versions only say how many failures were injected; the texts of injected failures are known.
    """
    recorded = {error.call_id: ("error", error.kind) for error in one.errors}
    recorded |= {failure.call_id: ("injected", failure.kind) for failure in one.failures}
    tools = {index: message for index, message in enumerate(one.messages) if message.role == "tool"}
    found = {index: recorded[said.tool_call_id] for index, said in tools.items() if said.tool_call_id in recorded}
    if len(one.failures) < one.injected_failures:
        kinds = {text: kind for kind, text in FAILURES.items()}
        alike = {index: kinds.get(server_text(message.content), "") for index, message in tools.items()}
        failure = "injected" if sum(map(bool, alike.values())) <= one.injected_failures else "perhaps"
        found = {index: (failure, kind) for index, kind in alike.items() if kind} | found
    return found
