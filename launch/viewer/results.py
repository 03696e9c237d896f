"""Pages of an evaluation's results.

GET  /             results; ?text, ?suite, ?category, ?score, ?finish and ?trial filter them, ?sort orders them
GET  /result/ID    one of them, by SUITE/CATEGORY/ITEM/TRIAL: its numbers, the conversation, its item's other trials
"""

from __future__ import annotations

import os

from aiohttp import web

from astra_jax.evaluation.results import ItemResult
from launch.viewer.conversation import question_of, turns_of
from launch.viewer.lists import ListChoice, RecordList, Row, StoredRecords
from launch.viewer.service import page
from synthesis.core.datasets import read_card

_COLUMNS = {
    "question": "question",
    "item": "code",
    "suite": "small",
    "category": "small",
    "trial": "number",
    "score": "number",
    "finish": "small",
    "problem": "small",
    "calls": "number",
    "tokens": "number",
}
_CHOICES = (
    ListChoice("suite", "all suites"),
    ListChoice("category", "all categories"),
    ListChoice(
        "score",
        "all scores",
        lambda row: {0: "0", 1: "1"}.get(row.values["score"], "between"),
        ("0", "between", "1"),
        "score {}",
    ),
    ListChoice("finish", "all endings"),
    ListChoice("trial", "all trials", text="trial {}"),
)
_MAX_CHARACTERS = 300


class ResultPages:
    """Shows the results of an evaluation. Raises as `StoredRecords`."""

    noun = "results"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._records = StoredRecords(path, ItemResult, self.noun, _row)
        model = str(read_card(path).get("model", ""))
        self._list = RecordList(
            f"Results of {model}" if model else "Results", self.noun, _COLUMNS, self._records.rows, "/result/{}",
            text="text in question, id or what was wrong", choices=_CHOICES,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._records.rows)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that the module lists."""
        return [web.get("/", self._list.show), web.get("/result/{id:.+}", self._show)]

    async def _show(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        one = self._records.read(id)
        numbers = ("sub_tasks", "steps", "calls", "prompt_tokens", "completion_tokens")
        return page(
            "result.html.jinja",
            title=f"{one.item}, trial {one.trial}",
            heading=f"{one.item}, trial {one.trial}",
            language="",
            values={
                "score": one.score,
                **{name: float(value) for name, value in one.metrics.items()},
                "finish": one.finish.replace("_", " "),
                **{name: getattr(one, name) for name in ("suite", "category", *numbers)},
                **({"problem": one.problem} if one.problem else {}),
            },
            turns=turns_of(one.messages),
            own=id,
            trials=[row for row in self._records.rows if row.id.rpartition("/")[0] == id.rpartition("/")[0]],
            **self._list.around(request, id),
        )


def _row(one: ItemResult) -> Row:
    question = question_of(one.messages)
    values = {
        **{name: getattr(one, name) for name in ("item", "suite", "category", "trial", "score", "finish")},
        **{name: getattr(one, name) for name in ("steps", "calls")},
        "question": _cut(question) or one.item or "(no question)",
        "problem": _cut(one.problem),
        "tokens": one.completion_tokens,
    }
    text = f"{question}\n{one.item}\n{one.problem}".casefold()
    return Row(f"{one.suite}/{one.category}/{one.item}/{one.trial}", values, text)


def _cut(text: str) -> str:
    return f"{text[:_MAX_CHARACTERS]}…" if len(text) > _MAX_CHARACTERS else text
