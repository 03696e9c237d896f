"""Roles: each with its own endpoint, model and key; several models of one, drawn for each record; and no model that
judges itself."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any, get_args

import msgspec
import pytest
from answering_endpoint import Answering, Guided

from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from synthesis.core.endpoint_settings import OpenAITeacherConfig, Role, RoleSettings
from synthesis.core.rate_limits import BudgetSpent
from synthesis.core.recording import Recording
from synthesis.core.records import Message, Provenance, Task, TaskScores
from synthesis.environments import teacher_answers as of_environments
from synthesis.pipeline.model_router import ModelRouter, judged_by, role_of
from synthesis.pipeline.pipeline_run import models_on_card, of_records
from synthesis.pipeline.prompts import Prompts
from synthesis.pipeline.teacher import OpenAITeacher, models_of, route
from synthesis.trajectories import teacher_answers as of_trajectories
from synthesis.trajectories.teacher_answers import BackTranslatedQuery, FinalAnswerScore, TaskRating

PROMPTS = Prompts(
    {f"en/{name}.jinja": "Go." for name in ("back_translated_query", "final_answer_score", "task_rating")}
)


def settings(**roles: Any) -> OpenAITeacherConfig:
    """Models that are all served nowhere."""
    named = {role: tuple(RoleSettings(model=one) for one in models) for role, models in roles.items()}
    return OpenAITeacherConfig("http://127.0.0.1:9/v1", "base", roles=named)  # type: ignore[arg-type]


def wanted(config: OpenAITeacherConfig) -> OpenAITeacherConfig:
    """That a model judges itself."""
    return OpenAITeacherConfig(config.base_url, config.model, roles=config.roles, judge_own_text=True)


class Keyed(Answering):
    """Says who asked it with which key."""

    async def answer(self, request: Any) -> Any:
        self.keys.append(request.headers["Authorization"])
        return await super().answer(request)

    def __init__(self) -> None:
        super().__init__(Guided())
        self.keys: list[str] = []


async def test_each_role_asks_its_own_endpoint_with_its_own_key() -> None:
    """What the teacher's key may open is no other address's to know."""
    first, second = Keyed(), Keyed()
    async with first as one, second as two:
        config = OpenAITeacherConfig(
            one, "base", "of-the-first", structured_output="json_schema",
            roles={
                "judge": (RoleSettings(base_url=two, model="judge", temperature=0),),
                "agent": (RoleSettings(base_url=two, model="agent", api_key="of-the-agent"),),
            },
        )  # fmt: skip
        teacher = OpenAITeacher(config, prompts=PROMPTS).route("task-0")
        await teacher.ask(BackTranslatedQuery, {}, language="en", seed=0)
        await teacher.ask(FinalAnswerScore, {}, language="en", seed=0)
        second.turns['[{"role": "user", "content": "Hello"}]', 0] = {"role": "assistant", "content": "Yes."}
        second.turns = {key: {**turn, "tool_calls": []} for key, turn in second.turns.items()}
        await teacher.act([Message("user", "Hello")], [], language="en", seed=0)
        await teacher.close()
    assert [body["model"] for body in first.requests] == ["base"] and first.keys == ["Bearer of-the-first"]
    assert [body["model"] for body in second.requests] == ["judge", "agent"]
    assert second.keys == ["Bearer EMPTY", "Bearer of-the-agent"] and second.requests[0]["temperature"] == 0


def test_what_cards_say_of_roles_holds_no_key_and_moving_a_server_is_no_other_run() -> None:
    def described(port: int) -> dict[str, Any]:
        own = RoleSettings(base_url=f"http://127.0.0.1:{port}/v1", model="j", api_key="secret", weight=2)
        return dict(
            OpenAITeacher(OpenAITeacherConfig("http://127.0.0.1:9/v1", "m", roles={"judge": (own,)})).description
        )

    one, other = described(1), described(2)
    assert one != other and of_records(one) == of_records(other)
    (judge,) = one["roles"]["judge"]
    assert (judge["model"], judge["endpoint"], judge["weight"]) == ("j", "http://127.0.0.1:1/v1", 2)
    assert "secret" not in repr(one)


def test_models_are_drawn_by_weight_the_same_for_a_record_whatever_else_is_drawn() -> None:
    roles = {"agent": (RoleSettings(model="a", weight=3), RoleSettings(model="b"))}
    config = OpenAITeacherConfig("http://127.0.0.1:9/v1", "base", roles=roles)  # type: ignore[arg-type]
    router = ModelRouter.of(config)
    names = [router.names(f"task-{number}", "agent") for number in range(2_000)]
    sample = Counter(one["agent"] for one in names)
    assert 1_420 < sample["a"] < 1_580 and sample["a"] + sample["b"] == 2_000
    assert {one["author"] for one in names} == {one["judge"] for one in names} == {"base"}
    again = pickle.loads(pickle.dumps(router))
    assert [again.names(f"task-{number}", "agent") for number in reversed(range(2_000))] == names[::-1]


def test_a_judge_is_never_the_model_whose_text_it_judges() -> None:
    router = ModelRouter.of(settings(author=["a", "b"], agent=["a", "b", "c"], judge=["a", "b", "c"]))
    router.check()
    for judged in ("author", "agent"):
        pairs = Counter()
        for number in range(300):
            models = router.names(f"task-{number}", judged)
            pairs[models[judged], models["judge"]] += 1
        assert all(wrote != judge for wrote, judge in pairs) and len({judge for _, judge in pairs}) == 3


def test_the_weights_of_the_judges_that_are_left_are_theirs() -> None:
    judges = tuple(RoleSettings(model=model, weight=weight) for model, weight in (("a", 8), ("b", 1), ("c", 3)))
    roles = {"agent": (RoleSettings(model="a"),), "author": (RoleSettings(model="a"),), "judge": judges}
    router = ModelRouter.of(OpenAITeacherConfig("http://127.0.0.1:9/v1", "base", roles=roles))  # type: ignore[arg-type]
    of = {
        judged: [router.names(f"task-{number}", judged)["judge"] for number in range(400)]
        for judged in ("agent", "author")
    }
    for judged in of.values():
        assert set(judged) == {"b", "c"} and 260 < judged.count("c") < 340
    assert of["agent"] != of["author"], "the judge of one text says nothing about that of another"


@pytest.mark.parametrize(
    ("roles", "who"),
    [
        ({}, "'base' is the author and the only judge"),
        ({"judge": ["base", "base"]}, "'base' is the author and the only judge"),
        ({"author": ["a"], "agent": ["b", "c"], "judge": ["c"]}, "'c' is the agent and the only judge"),
        ({"author": ["a"], "agent": ["b"], "user": ["c"], "judge": ["c"]}, "'c' is the user and the only judge"),
    ],
)
def test_an_only_judge_of_its_own_text_is_refused_unless_it_is_wanted(roles: Any, who: str) -> None:
    config = settings(**roles)
    with pytest.raises(InputError, match=f"{who} of what it writes.*--roles=.*--judge_own_text"):
        ModelRouter.of(config).check()
    ModelRouter.of(wanted(config)).check()


async def test_a_stage_that_asks_the_only_judge_about_its_own_text_is_refused() -> None:
    """Whoever gives a pipeline a teacher, and never came by the flags."""
    teacher = OpenAITeacher(settings(agent=["other"]), prompts=PROMPTS)
    with pytest.raises(InputError, match="'base' is the author and the only judge"):
        await route(teacher, "task-1").ask(TaskRating, {}, language="en", seed=0)


def test_every_judge_says_whose_text_it_judges() -> None:
    for answer in (*of_trajectories.ANSWERS, *of_environments.ANSWERS):
        if role_of(answer) == "judge":
            assert getattr(answer, "JUDGES", None) in get_args(Role), answer
    assert judged_by(TaskRating) == "author" and judged_by(FinalAnswerScore) == judged_by(msgspec.Struct) == "agent"


def test_a_variation_has_the_models_of_its_original() -> None:
    task = Task("task-0-000001-persona", "s", "en", "chain", "persona", "?", [], TaskScores(0, 0, 0))
    assert (
        task.family == "task-0-000001" == msgspec.structs.replace(task, id=task.family, augmentation="original").family
    )


def test_cards_count_who_made_the_records_and_who_judged_itself() -> None:
    teacher = OpenAITeacher(
        OpenAITeacherConfig("http://x/v1", "m", roles={"agent": (RoleSettings(model="n"),)}, judge_own_text=True)
    )
    made = models_of(teacher, "task-1", "agent")
    assert made["agent"] == "n" and made["judge"] == made["author"] == "m"

    class Kept(msgspec.Struct):
        provenance: Provenance

    def kept(agent: str, judge: str) -> Kept:
        return Kept(Provenance("OpenAITeacher", models={"author": "m", "agent": agent, "judge": judge}))

    card = models_on_card([kept("n", "m"), kept("m", "m"), kept("n", "n"), kept("n", "n")])
    assert card["models"] == {"agent": {"m": 1, "n": 3}, "author": {"m": 4}, "judge": {"m": 2, "n": 2}}
    assert card["judged_own_text"] == {"m": 1, "n": 2}
    assert models_on_card([Kept(Provenance("OfflineTeacher"))]) == {}


async def test_a_budget_is_of_all_models_together_at_the_prices_of_each(tmp_path: Any) -> None:
    """100 tokens an answer: of the author's free ones, then the judge's at a price; both count."""
    endpoint = Answering(Guided())
    async with endpoint as url:
        judge = RoleSettings(model="j", price_prompt=1e6, price_completion=1e6, requests_per_minute=6e4)
        config = OpenAITeacherConfig(
            url, "m", structured_output="json_schema", token_budget=300, roles={"judge": (judge,)}
        )
        teacher = OpenAITeacher(config, Recording(tmp_path / "t.sqlite"), "record", PROMPTS).route("task-1")
        for seed in range(2):
            await teacher.ask(BackTranslatedQuery, {}, language="en", seed=seed)
        await teacher.ask(FinalAnswerScore, {}, language="en", seed=0)
        with pytest.raises(BudgetSpent, match="token_budget=300.* is spent: 300 tokens"):
            await teacher.ask(FinalAnswerScore, {}, language="en", seed=1)
        await teacher.close()
    assert (teacher.spent.requests, teacher.spent.tokens, teacher.spent.money) == (3, 300, 100.0)
    assert teacher.spent_by_stage[""].tokens == 300 and len(teacher.endpoints) == 2


def test_roles_are_checked() -> None:
    with pytest.raises(SettingError, match="judge has no model"):
        OpenAITeacherConfig("http://x/v1", "m", roles={"judge": ()})
    with pytest.raises(SettingError, match="RoleSettings.base_url is http://y/v1: give model too"):
        RoleSettings(base_url="http://y/v1")
    with pytest.raises(
        SettingError, match=r"money_budget=1 needs prices for model j \(role judge\): give --teacher_prices=IN,OUT"
    ):
        OpenAITeacherConfig(
            "http://x/v1", "m", money_budget=1, price_prompt=1, roles={"judge": (RoleSettings(model="j"),)}
        )
    same = OpenAITeacherConfig("http://x/v1", "m", price_prompt=1, roles={"judge": (RoleSettings(temperature=0),)})
    assert same.models("judge")[0].price_prompt == 1 and len(OpenAITeacher(same).endpoints) == 1
