"""The released ASTRA-SFT record and `{tools, messages}`: there and back, and what is wrong with foreign ones."""

from __future__ import annotations

import json

import jinja2
import msgspec
import pytest
from template_world import template

from synthesis.astra_format.messages import read_messages, to_qwen
from synthesis.astra_format.sft import (
    AXIS_NAMES,
    import_dataset,
    import_record,
    to_chat_record,
    to_record,
    write_records,
)
from synthesis.core.chat_format import NotInFormat
from synthesis.core.chatml import QWEN2_5, QWEN3, QWEN3_INSTRUCT
from synthesis.core.llama3_chat import LLAMA3, TODAY
from synthesis.core.openai_messages import to_openai
from synthesis.core.records import (
    AxisScore,
    CallError,
    Dialogue,
    EmulatedExecution,
    Goal,
    InjectedFailure,
    Message,
    Task,
    TaskScores,
    ToolCall,
    Trajectory,
)
from synthesis.core.stages import Rejected
from synthesis.offline.facts.servers import fact_servers
from synthesis.trajectories.judge import AXES

COUNTRIES = fact_servers("en", ("countries",))[0]
MESSAGES = [
    Message("system", "Plan first."),
    Message("user", "What are the capitals of Japan and of Chad? \u201cQUERY\u201d"),
    Message(
        "assistant", "I look both up.", "They do not depend on each other.",
        [ToolCall("call_1", "capital_of_country", {"country": "Japan"}),
         ToolCall("call_2", "capital_of_country", {"country": "Chad"})],
    ),
    Message("tool", '{"capital": "Tokyo"}', tool_call_id="call_1", name="capital_of_country"),
    Message("tool", "", tool_call_id="call_2", name="capital_of_country"),
    Message("assistant", "", "", [ToolCall("call_3", "capital_of_country", {"country": "Chad"})]),
    Message("tool", '{"capital": "N\'Djamena"}', tool_call_id="call_3", name="capital_of_country"),
    Message("assistant", "Tokyo and N'Djamena.", "I have both."),
]  # fmt: skip
TRAJECTORY = Trajectory(
    "trajectory-t", "t", COUNTRIES.id, COUNTRIES.domain, "en", COUNTRIES.tools, MESSAGES, 1,
    {axis: AxisScore(index / 6, f"reason {index}") for index, axis in enumerate(AXES)}, 0.5,
    [InjectedFailure("call_2", "empty")], [CallError("call_1", "tool_error")],
)  # fmt: skip
TASK = Task("t", COUNTRIES.id, "en", "server", "original", "q", ["capital_of_country"], TaskScores(5, 5, 5))


OTHER = msgspec.structs.replace(
    TRAJECTORY, id="other", tools=[COUNTRIES.tools[1]], messages=[Message("user", "And?"), Message("assistant", "No.")]
)


FAMILIES = {
    "qwen3": QWEN3,
    "qwen3_instruct_2507": QWEN3_INSTRUCT,
    "qwen2_5": QWEN2_5,
    "llama3_1": LLAMA3,
    "llama3_2": LLAMA3,
}
"""TRL's templates of the models that are trained here."""
ONE_CALL = msgspec.structs.replace(
    TRAJECTORY, id="one", messages=[*MESSAGES[:2], *MESSAGES[5:7], MESSAGES[-1]], tools=COUNTRIES.tools[:2]
)
NESTED = msgspec.structs.replace(
    ONE_CALL, id="nested",
    messages=[
        MESSAGES[1],
        Message(
            "assistant", "", "",
            [ToolCall("a", "capital_of_country", {"of": [{"x": 0}, 2.5, "\u5317\u4eac", True], "by": {}})],
        ),
        Message("tool", "[1]", tool_call_id="a", name="capital_of_country"),
        Message("assistant", "Done."),
    ],
)  # fmt: skip


def as_trl_reads(path):
    """The rows as `datasets` 4.7 and later give them: what is of Arrow's type `arrow.json` is opened."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    import pyarrow
    from pyarrow import parquet

    table = parquet.read_table(path)
    assert table.schema.field("messages").type == pyarrow.list_(pyarrow.json_())
    assert table.schema.field("tools").type == pyarrow.string()
    return [{**row, "messages": [json.loads(one) for one in row["messages"]]} for row in table.to_pylist()]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_trl_reads_is_what_we_train_on(tmp_path, family, suffix):
    """TRL's own template of each family writes from the export what its chat format here writes."""
    pytest.importorskip("pyarrow")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    path = tmp_path / f"trl.{suffix}"
    exported = [TRAJECTORY, OTHER, ONE_CALL, NESTED, msgspec.structs.replace(OTHER, id="no tools", tools=[])]
    assert write_records(path, exported, form="trl") == len(exported)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<|begin_of_text|>"
    )
    left_out = []
    for row, ours in zip(as_trl_reads(path), exported, strict=True):
        tools = json.loads(row["tools"]) if isinstance(row["tools"], str) else row["tools"]  # as TRL's trainer does

        def rendered(messages=row["messages"], tools=tools):
            return tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template(family), tokenize=False, date_string=TODAY
            )

        try:
            wanted = "".join(segment.text for segment in FAMILIES[family].render(ours.messages, ours.tools))
        except NotInFormat:
            left_out.append(ours.id)
            with pytest.raises(jinja2.TemplateError, match="single tool-call"):
                rendered()
        else:
            assert rendered() == wanted
    assert left_out == ([TRAJECTORY.id] if family.startswith("llama") else [])
    assert [one.messages for one in import_dataset(path).records] == [one.messages for one in exported]


def test_the_axes_all_have_the_names_of_the_original():
    assert tuple(AXIS_NAMES) == AXES


def test_the_released_columns(tmp_path):
    emulated = msgspec.structs.replace(COUNTRIES, execution=EmulatedExecution())
    record = to_record(TRAJECTORY, server=emulated, task=TASK)
    assert set(record) == {"query_info", "mcp_info", "trajectory", "reward"}
    opened = {name: json.loads(value) for name, value in record.items()}
    assert opened["query_info"]["target_tools"] == ["capital_of_country"] and not opened["query_info"]["have_plan"]
    assert opened["mcp_info"]["base_info"]["group_info"]["server_title"] == COUNTRIES.title
    assert opened["mcp_info"]["call_info"] == {"mock_tool": True}
    assert opened["reward"]["overall_score"] == 0.5 and opened["reward"]["tool_call"]["score"] == pytest.approx(4 / 6)
    roles = [(one["role"], "function_call" in one) for one in opened["trajectory"]]
    assert roles == [
        ("system", False), ("user", False), ("assistant", False), ("assistant", True), ("assistant", True),
        ("function", False), ("function", False), ("assistant", True), ("function", False), ("assistant", False),
    ]  # fmt: skip
    assert opened["trajectory"][2]["reasoning_content"] and opened["trajectory"][3]["content"] == ""
    assert json.loads(opened["trajectory"][4]["function_call"]["arguments"]) == {"country": "Chad"}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_released_record_comes_back_whole(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"sft.{suffix}"
    talk = msgspec.structs.replace(TRAJECTORY, dialogue=Dialogue("refused", [Goal("And?")], policy="Never."))
    assert write_records(path, [TRAJECTORY, talk], servers={COUNTRIES.id: COUNTRIES}, tasks={"t": TASK}) == 2
    imported = import_dataset(path)
    assert imported.records == [TRAJECTORY, talk] and imported.rows == 2
    assert not imported.rejected and not imported.defects


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tools_and_messages_come_back(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"chat.{suffix}"
    write_records(path, [TRAJECTORY], form="openai")
    imported = import_dataset(path)
    (one,) = imported.records
    assert (one.tools, one.messages, one.language) == (TRAJECTORY.tools, MESSAGES, "en") and not imported.defects
    assert one.id == one.task_id == "astra-sft-000000" and one.scores == {} and one.reward is None


def test_forms_and_suffixes_are_named(tmp_path):
    with pytest.raises(ValueError, match="form: unknown 'nous'"):
        write_records(tmp_path / "a.jsonl", [TRAJECTORY], form="nous")
    with pytest.raises(ValueError, match="jsonl or .parquet"):
        write_records(tmp_path / "a.csv", [TRAJECTORY])
    with pytest.raises(ValueError, match="there is no such file"):
        import_dataset(tmp_path / "a.jsonl")


def without_ids(messages):
    """As the released file has them: results are known by name and order alone."""
    return [{key: value for key, value in one.items() if key != "extra"} for one in messages]


def test_messages_without_ids_get_some_and_results_go_to_their_calls():
    messages, defects = read_messages(without_ids(to_qwen(MESSAGES)))
    assert messages == MESSAGES and defects == []
    # By name where two different functions were called, whatever the order of the results.
    two = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [], "function_call": {"name": "a", "arguments": "{}"}},
        {"role": "assistant", "content": [], "function_call": {"name": "b", "arguments": ""}},
        {"role": "function", "name": "b", "content": "of b"},
        {"role": "function", "name": "a", "content": [{"text": "of a"}]},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\ndone"},
    ]
    messages, defects = read_messages(two)
    assert [(m.content, m.tool_call_id) for m in messages if m.role == "tool"] == [
        ("of b", "call_2"),
        ("of a", "call_1"),
    ]
    assert messages[-1] == Message("assistant", "done", "well") and defects == []


def test_shared_ids_are_mended():
    """The original numbers calls anew each turn, and two calls of one function in a turn share an id."""
    given = to_openai(MESSAGES)
    for message in given:
        for call in message.get("tool_calls", []):
            call["id"] = "call_0_capital_of_country"
        if message["role"] == "tool":
            message["tool_call_id"] = "call_0_capital_of_country"
    messages, defects = read_messages(given)
    assert [one.name for one in defects] == ["repeated_call_id"] * 2
    ids = [call.id for message in messages for call in message.tool_calls]
    assert len(set(ids)) == 3 and [m.tool_call_id for m in messages if m.role == "tool"] == ids
    assert [m.content for m in messages] == [m.content for m in MESSAGES]


CALL = {"role": "assistant", "content": "", "function_call": {"name": "capital_of_country", "arguments": "{}"}}
USER, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Tokyo."}
RESULT = {"role": "function", "name": "capital_of_country", "content": "{}"}


def called(name="capital_of_country", arguments="{}"):
    return {**CALL, "function_call": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        ([USER, CALL, RESULT, ANSWER], []),
        ([USER, CALL, ANSWER], ["call_without_result"]),
        ([USER, CALL, CALL, RESULT, ANSWER], ["call_without_result"]),
        ([USER, CALL, RESULT, RESULT, ANSWER], ["result_without_call"]),
        ([USER, CALL, {**RESULT, "name": "area_of_country"}, ANSWER], ["result_without_call", "call_without_result"]),
        ([USER, called("fly"), {**RESULT, "name": "fly"}, ANSWER], ["unknown_tool"]),
        ([USER, called(arguments="{country: Japan}"), RESULT, ANSWER], ["bad_arguments"]),
        ([USER, called(arguments="[1]"), RESULT, ANSWER], ["bad_arguments"]),
        ([USER, CALL, RESULT, {"role": "assistant", "content": "[ERROR: timeout after 240 s]"}], ["ends_in_error"]),
        ([USER, CALL, RESULT], ["no_final_answer"]),
        ([USER, CALL], ["call_without_result", "no_final_answer"]),
        ([USER, CALL, RESULT, {"role": "assistant", "content": "  "}], ["no_final_answer"]),
        ([USER, called(arguments="```json\n{}\n```"), RESULT, ANSWER], ["repaired_arguments"]),
        ([USER, CALL, RESULT, {**ANSWER, "content": "Tokyo.<|im_end|>"}], ["leaked_markup"]),
        ([USER, CALL, RESULT, {**ANSWER, "content": "<thought>So. Tokyo."}], ["leaked_markup"]),
        ([USER, CALL, RESULT, {**ANSWER, "content": "capital_of_country({})"}], ["leaked_markup"]),
        ([USER, CALL, RESULT, {**ANSWER, "reasoning_content": "So. <tool_call>"}], ["leaked_markup"]),
        ([{**USER, "content": "What is <|im_end|>?"}, CALL, RESULT, ANSWER], []),  # nobody trains on it
        ([ANSWER], ["no_question"]),
        ([], ["no_question", "no_final_answer"]),
    ],
)
def test_defects_are_named_and_reject(tmp_path, messages, names):
    record = {**to_record(TRAJECTORY), "trajectory": json.dumps(messages)}
    trajectory, defects = import_record(json.dumps(record).encode(), 0)
    assert [one.name for one in defects] == names and trajectory.tools == COUNTRIES.tools
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(record))
    imported = import_dataset(path)
    fatal = names if names != ["repaired_arguments"] else []
    assert imported.rejected == ({fatal[0]: 1} if fatal else {}) and set(imported.defects) == set(names)
    if fatal:
        assert "row 0" in imported.details[names[0]]
    # What can be used is used, if it is asked for.
    accepted = import_dataset(path, accept=names)
    assert len(accepted.records) == (not {"bad_arguments", "no_question"} & set(names))


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "<think>\nSo.\n</think>\n\nTokyo."},
        {"content": "So.\n</think>\n\nTokyo."},
        {"content": "Tokyo.", "reasoning": "<think>So.</think>"},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "So."}]},
                {"type": "text", "text": "Tokyo."},
            ]
        },
        {"content": [{"type": "reasoning", "text": "So."}, {"type": "text", "text": "Tokyo."}]},
    ],
)
def test_thinking_stays_thinking_in_every_form(answer):
    record = {**to_record(TRAJECTORY), "trajectory": [USER, CALL, RESULT, {"role": "assistant", **answer}]}
    trajectory, defects = import_record(json.dumps(record).encode(), 0)
    assert not defects and trajectory.messages[-1] == Message("assistant", "Tokyo.", "So.")


def test_defects_of_tools():
    record = to_chat_record(TRAJECTORY)
    record["tools"] += [record["tools"][0], {"type": "function", "function": {"name": "two words"}}]
    trajectory, defects = import_record(json.dumps(record).encode(), 7)
    assert [one.name for one in defects] == ["colliding_names", "bad_schema"]
    assert trajectory.tools == COUNTRIES.tools and trajectory.id == "astra-sft-000007"


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"query_info": "{}"}, "it is of no known form; its keys are query_info; known are messages"),
        ({"trajectory": "[{]"}, "column trajectory"),
        ({"trajectory": [{"role": "wizard", "content": ""}]}, "message 0: .*wizard"),
        ({"trajectory": [USER, {"role": "assistant", "content": [{"image": "x"}]}]}, "not text, such as an image"),
        ({"trajectory": [USER], "mcp_info": '{"base_info": 3}'}, "column mcp_info"),
        ([1], "no record"),
    ],
)
def test_what_is_no_record_is_rejected_and_the_rest_read(tmp_path, record, match):
    with pytest.raises(Rejected, match=f"bad_record: .*{match}"):
        import_record(json.dumps(record).encode(), 0)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in (record, to_record(TRAJECTORY))))
    imported = import_dataset(path)
    assert imported.records == [TRAJECTORY] and imported.rejected == {"bad_record": 1}
