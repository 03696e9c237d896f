"""What an endpoint is asked for and what is read of its answer: strict schemas, weaker forms, a request to find out."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from answering_endpoint import Answering, Deaf, Guided, JsonOnly, Refused, Server, Strict, strict_problem

from synthesis.core.endpoint import EndpointUnusable
from synthesis.core.endpoint_settings import RoleSettings
from synthesis.environments import teacher_answers as of_environments
from synthesis.pipeline.structured_output import (
    BadAnswer,
    Probe,
    open_format,
    prompt_name,
    read_answer,
    response_format,
    strict_schema,
)
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig, role_of
from synthesis.trajectories import teacher_answers as of_trajectories
from synthesis.trajectories.teacher_answers import EmulatedResult, TaskChainProposals, TaskRating

ANSWERS: tuple[type[msgspec.Struct], ...] = (*of_trajectories.ANSWERS, *of_environments.ANSWERS, Probe)


class Note(msgspec.Struct, frozen=True):
    text: str
    unit: str = ""
    aliases: list[str] = []


class Open(msgspec.Struct, frozen=True):
    anything: dict[str, int]


# ---------------------------------------------------------------------------------------------------------------------
# Schemas


@pytest.mark.parametrize("answer", ANSWERS, ids=prompt_name)
def test_schemas_are_closed_and_complete(answer: type[msgspec.Struct]) -> None:
    assert strict_problem(strict_schema(answer)) == ""


def test_the_rules_refuse_what_was_sent_before() -> None:
    """The emulated rules are no formality: of the open schemas none passed."""
    before = [json.loads(bytes(open_format(one)))["json_schema"]["schema"] for one in ANSWERS]
    assert all(strict_problem(schema) for schema in before)


def test_optional_fields_are_nullable_and_their_null_is_read_as_absent() -> None:
    schema = strict_schema(Note)
    assert schema["required"] == ["text", "unit", "aliases"]
    assert schema["properties"]["unit"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert read_answer('{"text": "a", "unit": null, "aliases": null}', Note)[0] == Note("a")
    with pytest.raises(BadAnswer, match="missing required field `text`"):
        read_answer('{"text": null, "unit": "km", "aliases": null}', Note)


def test_bounds_are_choices() -> None:
    assert strict_schema(TaskRating)["properties"]["tool_necessity"] == {"type": "integer", "enum": [1, 2, 3, 4, 5]}


def test_an_object_of_any_names_cannot_be_asked_for() -> None:
    with pytest.raises(TypeError, match="use a list of named values"):
        strict_schema(Open)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "a", "unit": "km"}',
        'Sure! Here it is:\n```json\n{"text": "a", "unit": "km"}\n```\nAnything else?',
        'The set {x | x > 1} is meant, so: {"text": "a", "unit": "km"}',
        '<think>{"text": "b"}</think>{"text": "a", "unit": "km"}',
        'First {"other": 1}, then {"text": "a", "unit": "km"}.',
        '{"text": "a", "unit": "km"} {"text": "a", "unit": "km"}',
    ],
)
def test_an_answer_is_found_among_what_surrounds_it(text: str) -> None:
    given, kept = read_answer(text, Note)
    assert given == Note("a", "km") and msgspec.json.decode(kept, type=Note) == given


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("I would rather not.", "not JSON"),
        ('{"text": "a"', "not JSON"),
        ('{"text": 1}', "Expected `str`, got `int`"),
        ('{"text": "a"} or {"text": "b"}', "two different JSON objects"),
        ('{"text": "a", "aliases": ' + "[" * 100_000, "nested too deeply"),
        ("{" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_answer_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(BadAnswer, match=problem):
        read_answer(text, Note)


def test_json_inside_an_answer_is_read_with_it() -> None:
    """Where it was read only by the stage the run was rejected, and nothing asked again."""
    good = '{"reasoning": "", "result": "{\\"celsius\\": 12}", "is_error": false}'
    assert read_answer(good, EmulatedResult)[0].result == '{"celsius": 12}'
    with pytest.raises(BadAnswer, match="`result` is not JSON"):
        read_answer('{"reasoning": "", "result": "12 °C", "is_error": false}', EmulatedResult)


class Judged(msgspec.Struct, frozen=True):
    reason: str
    rating: Annotated[int, msgspec.Meta(ge=1, le=5)]
    share: float
    fits: bool
    verdict: Literal["no", "gave_away", "yes"]
    notes: list[Note]
    names: list[str]


JUDGED = Judged("So.", 4, 0.5, True, "gave_away", [Note("a")], ["b"])
WRITTEN = {
    "reason": "So.", "rating": 4, "share": 0.5, "fits": True, "verdict": "gave_away", "notes": [{"text": "a"}],
    "names": ["b"],
}  # fmt: skip


@pytest.mark.parametrize(
    "forms",
    [
        {"rating": "4", "share": "0.5", "fits": "true"},
        {"rating": 4.0, "fits": "Yes"},
        {"rating": " ４ ", "fits": "TRUE", "verdict": "Gave away."},
        {"verdict": "GAVE-AWAY", "notes": {"text": "a"}, "names": "b"},
        {"notes": '[{"text": "a"}]', "names": '["b"]'},
        {"notes": ['{"text": "a"}'], "names": "b"},
        {"notes": [[{"text": "a"}]], "rating": "4.0"},
    ],
)
def test_a_value_in_another_form_is_read_where_one_reading_is_possible(forms: dict[str, Any]) -> None:
    assert read_answer(json.dumps({**WRITTEN, **forms}), Judged)[0] == JUDGED


@pytest.mark.parametrize(
    ("forms", "problem"),
    [
        ({"rating": 4.5}, "rating"),
        ({"rating": "4 of 5"}, "rating"),
        ({"rating": "9"}, "rating"),
        ({"rating": True}, "rating"),
        ({"fits": "perhaps"}, "fits"),
        ({"fits": 1}, "fits"),
        ({"verdict": "yes or no"}, "verdict"),
        ({"names": "b, c"}, "names"),
        ({"names": 5}, "names"),
        ({"reason": 5}, "reason"),
        ({"reason": {"text": "So."}}, "reason"),
        ({"Reason": "No.", "rating": "4"}, "rating"),  # two names that differ in case
    ],
)
def test_a_value_with_several_readings_is_refused(forms: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadAnswer, match=problem):
        read_answer(json.dumps({**WRITTEN, **forms}), Judged)


@pytest.mark.parametrize(
    "text",
    [
        '{"Text": "a", "UNIT": "km"}',
        '{"Note": {"text": "a", "unit": "km"}}',
        '[{"text": "a", "unit": "km"}]',
        '\ufeff{"text": "a", "unit": "km"}',
        '{"text"： "a"， "unit": "km"}',
        '{"text": "a", "unit": "km",}',
        "{'text': 'a', 'unit': 'km'}",
        "Here it is:\n```json\n{'text': 'a', 'unit': 'km'}\n```\nDone.",
        "<think>Perhaps {}.</think>\n```json\n{'text': 'a', 'unit': 'km'}\n```",
    ],
)
def test_an_answer_in_another_form_is_read(text: str) -> None:
    given, kept = read_answer(text, Note)
    assert given == Note("a", "km") and read_answer(kept, Note)[0] == given


def test_a_thinking_tag_in_an_answer_is_text() -> None:
    assert read_answer('{"text": "It ends with </think>."}', Note)[0] == Note("It ends with </think>.")


def test_json_that_is_wanted_as_text_may_be_given_as_it_is() -> None:
    for result in ({"celsius": 12}, '```json\n{"celsius": 12}\n```', '{"celsius": 12,}', "{'celsius': 12}"):
        text = json.dumps({"reasoning": "", "result": result, "is_error": "false"})
        assert read_answer(text, EmulatedResult)[0] == EmulatedResult("", '{"celsius": 12}', False)


# ---------------------------------------------------------------------------------------------------------------------
# Endpoints


class Writing(Answering):
    """A model that writes one answer to whatever it is asked; to the simplest question "Yes."."""

    def told(self, content: str, seed: int) -> str:
        if content.startswith("Say yes."):
            return "Yes."
        return 'Of course.\n{"text": "Oslo"}\nIs that all?'


async def ask(teacher: OpenAITeacher) -> Note:
    return await teacher.answer(Note, "Which city?", "en", 5)


@pytest.mark.parametrize(
    ("server", "form", "requests", "said"),
    [
        (Strict(), "json_schema", 1, "answers have their JSON schema"),
        (Guided(), "json_schema", 1, "answers have their JSON schema"),
        (JsonOnly(), "json_object", 2, "answers are JSON, with the schema in the prompt (json_schema is refused with"),
        (
            Server(),
            "text",
            2,
            "answers are text, with the schema in the prompt (json_object is refused with status 400",
        ),
        (Deaf(), "text", 6, "answers are text, with the schema in the prompt (json_object is taken, and not heeded"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Server) else None,
)
async def test_the_form_is_found_once_and_said(
    server: Server, form: str, requests: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = Writing(server)
    async with endpoint as url:
        teacher = OpenAITeacher(OpenAITeacherConfig(url, "m"))
        for _ in range(3):
            assert await ask(teacher) == Note("Oslo")
        await teacher.close()
    probes, asked = endpoint.requests[:requests], endpoint.requests[requests:]
    assert [one["messages"][0]["content"].startswith("Say yes.") for one in probes] == [True] * requests
    assert len(asked) == 3
    for body in asked:
        assert body.get("response_format", {"type": "text"})["type"] == form
        content = body["messages"][0]["content"]
        assert content.startswith("Which city?") and ('"additionalProperties":false' in content) == (
            form != "json_schema"
        )
    assert capsys.readouterr().err.count(f"{url}, model m: {said}") == 1


async def test_a_code_block_around_an_answer_is_no_weaker_form() -> None:
    class Fencing(Writing):
        def told(self, content: str, seed: int) -> str:
            if content.startswith("Say yes."):
                return f"```json\n{json.dumps(dict.fromkeys(Probe.__struct_fields__, 1))}\n```"
            return '```json\n{"text": "Oslo"}\n```'

    async with Fencing(Deaf()) as url:
        teacher = OpenAITeacher(OpenAITeacherConfig(url, "m"))
        assert await ask(teacher) == Note("Oslo")
        assert await teacher._structured_output(*teacher._model("author")) == "json_schema"


async def test_a_form_that_is_given_is_not_asked_for() -> None:
    endpoint = Writing(JsonOnly())
    async with endpoint as url:
        assert await ask(OpenAITeacher(OpenAITeacherConfig(url, "m", structured_output="json_object"))) == Note("Oslo")
    assert len(endpoint.requests) == 1


async def test_a_wrong_model_is_no_form() -> None:
    """What refuses everything is said to refuse everything, not to know no schema."""

    class Elsewhere(Server):
        def check(self, body: Any) -> None:
            raise Refused("The model `m` does not exist")

    async with Writing(Elsewhere()) as url:
        with pytest.raises(EndpointUnusable, match="refuses every request with status 400.*`m` does not exist"):
            await ask(OpenAITeacher(OpenAITeacherConfig(url, "m")))


async def test_a_spoilt_answer_is_not_taken_for_a_form_that_is_unknown() -> None:
    endpoint = Writing(Strict(), noise=0.15)
    async with endpoint as url:
        teacher = OpenAITeacher(OpenAITeacherConfig(url, "m"))
        assert await ask(teacher) == Note("Oslo")
        assert await teacher._structured_output(*teacher._model("author")) == "json_schema"


async def test_every_answer_of_the_rules_passes_strict_endpoints() -> None:
    """As a hosted service would take it: each schema, and the answer as a decoder constrained by it writes it."""
    endpoint = Answering(Strict())
    async with endpoint as url:
        teacher = OpenAITeacher(OpenAITeacherConfig(url, "m", structured_output="json_schema"))
        for answer in ANSWERS:
            body = json.loads(teacher._request(teacher.config, answer, "Go.", "en", 0, "json_schema", ""))
            endpoint.server.check(body)
            text = endpoint.server.shaped(body, "{}")
            if answer not in (EmulatedResult,):  # "" is no JSON
                read_answer(text, answer)


# ---------------------------------------------------------------------------------------------------------------------
# Settings of requests, by role


async def test_settings_of_requests_by_role() -> None:
    own = RoleSettings(temperature=0, max_tokens=50, tries=2, extra_body={"reasoning_effort": "high"})
    config = OpenAITeacherConfig(
        "http://127.0.0.1:9/v1", "m", temperature=0.7, max_tokens=900, structured_output="json_schema",
        extra_body={"reasoning_effort": "low", "seed": None},
        roles={"judge": (own,)},
    )  # fmt: skip
    teacher = OpenAITeacher(config)

    def body(answer: type[msgspec.Struct]) -> dict[str, Any]:
        return json.loads(
            teacher._request(config.models(role_of(answer))[0], answer, "Go.", "en", 3, "json_schema", "")
        )

    author, judge = body(TaskChainProposals), body(TaskRating)
    assert (author["temperature"], author["max_tokens"], author["reasoning_effort"]) == (0.7, 900, "low")
    assert (judge["temperature"], judge["max_tokens"], judge["reasoning_effort"]) == (0, 50, "high")
    assert "seed" not in author and "seed" not in judge
    assert config.models("judge")[0].tries == 2 and config.models("agent")[0].tries == 6
    assert config.models("judge")[0].timeout_seconds == config.timeout_seconds


def test_every_answer_has_a_role() -> None:
    assert role_of(EmulatedResult) == "emulator" and role_of(TaskRating) == "judge"
    assert role_of(TaskChainProposals) == "author"
    judges = {one.__name__ for one in ANSWERS if one.__name__.endswith("Score")}
    assert judges <= {one.__name__ for one in ANSWERS if role_of(one) == "judge"}


async def test_a_role_has_its_own_time_and_tries() -> None:
    endpoint = Answering(Guided(), noise=1.0)
    async with endpoint as url:
        config = OpenAITeacherConfig(
            url, "m", structured_output="json_schema", roles={"judge": (RoleSettings(tries=2),)}
        )
        with pytest.raises(Exception, match="TaskRating: no valid answer in 2 tries"):
            await OpenAITeacher(config).answer(TaskRating, "x", "en", 0)
    assert len(endpoint.requests) == 2 and response_format(TaskRating, "text") is None


@pytest.mark.parametrize("name", ["model", "messages", "response_format", "tools"])
def test_what_a_request_decides_is_no_setting(name: str) -> None:
    with pytest.raises(Exception, match=f"extra_body names {name}, which a request decides itself"):
        OpenAITeacherConfig("http://x/v1", "m", extra_body={name: 1})
    with pytest.raises(Exception, match=f"extra_body names {name}"):
        RoleSettings(extra_body={name: 1})
