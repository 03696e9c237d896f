"""Trajectories from and to the released ASTRA-SFT record (`ASTRA-SFT-1k` on Hugging Face), and `{tools, messages}`.

    write_records("sft.jsonl", trajectories, servers=servers, tasks=tasks)       # export, Qwen-Agent's messages
    write_records("chat.jsonl", trajectories, form="openai")                     # export, {tools, messages}
    write_records("train.parquet", trajectories, form="trl")                     # the same, as TRL's trainers read it
    imported = import_dataset("sft.jsonl")                                       # import, of any of `forms`
    imported.records, imported.rejected, imported.defects

The released columns are JSON strings: `query_info` (the task), `mcp_info` (`base_info` with the server and its tools,
`call_info`, `features`) and `trajectory` (Qwen-Agent's messages). On export the seven axes stand in a column `reward`,
in the form of the original's scorer. Fields that only we have are in `features`, which the original does not read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from astra_jax.base.errors import InputError
from astra_jax.base.typed import convert_to, decode_json, value_or_json
from synthesis.astra_format import keys
from synthesis.astra_format.forms import columns
from synthesis.astra_format.messages import read_messages, to_qwen
from synthesis.astra_format.null_arguments import without_null_arguments
from synthesis.astra_format.records import Defect, Imported, read_rows, write_rows
from synthesis.astra_format.tools import read_tools, take_from_system, tools_column, without_parameters
from synthesis.core.openai_messages import to_openai
from synthesis.core.records import (
    AxisScore,
    CallError,
    Dialogue,
    EmulatedExecution,
    InjectedFailure,
    Language,
    Message,
    Task,
    ToolServer,
    Trajectory,
)
from synthesis.core.stages import Rejected
from synthesis.core.tool_documents import WRAPPER_KEYS
from synthesis.pipeline.languages import language_of

__all__ = [
    "FORMS", "Imported", "import_dataset", "import_record", "to_chat_record", "to_record", "to_trl_record",
    "write_records",
]  # fmt: skip

AXIS_NAMES: Mapping[str, str] = {
    "query_understanding": "query_understand",
    "query_planning": "query_plan",
    "tool_response_understanding": "tool_understand",
    "response_conditioned_planning": "tool_plan",
    "tool_call_status": "tool_call",
    "conciseness": "tool_concise",
    "final_answer": "final_answer",
}
"""Our axis → the original's."""
MENDED = (
    "calls_in_text",
    "null_argument",
    "repaired_arguments",
    "repeated_call_id",
    "results_in_text",
    "tools_in_system",
    "tools_rewritten",
    "unread_column",
)
"""Defects that an import repairs, and columns that it does not read."""
KEPT_AS_IT_IS = ("call_in_code_block", "encrypted_reasoning", "tools_stay_in_system")
"""Observations about a user's own conversation that are only counted."""
BEYOND_REPAIR = ("bad_arguments", "no_question")


# ---------------------------------------------------------------------------------------------------------------------
# Export


def to_record(trajectory: Trajectory, *, server: ToolServer | None = None, task: Task | None = None) -> dict[str, Any]:
    """Return the released columns; without the server or the task, what the trajectory knows of them."""
    query = {
        "have_plan": task is not None and task.mode == "chain",
        "mode": "several_servers" if trajectory.servers else "single_server",
        "target_tools": task.tools if task else [],
        "generated_question": _question(trajectory.messages),
    }
    group = {
        "server_title": server.title if server else trajectory.server_id,
        "server_name": trajectory.server_id,
        "server_description": server.description if server else "",
        "domain": trajectory.domain,
    }
    tools = [{"name": one.name, "description": one.description, "parameters": one.parameters}
             for one in trajectory.tools]  # fmt: skip
    features = {
        "id": trajectory.id,
        "task_id": trajectory.task_id,
        "language": trajectory.language,
        "injected_failures": trajectory.injected_failures,
        "failures": msgspec.to_builtins(trajectory.failures),
        "errors": msgspec.to_builtins(trajectory.errors),
        "needs": trajectory.needs,
        **({"dialogue": msgspec.to_builtins(trajectory.dialogue)} if trajectory.dialogue else {}),
        **({"servers": trajectory.servers} if trajectory.servers else {}),
    }
    emulated = server is not None and isinstance(server.execution, EmulatedExecution)
    info = {
        "base_info": {"group_info": group, "tool_list": tools},
        "call_info": {"mock_tool": True} if emulated else {},
        "features": features,
    }
    reward: dict[str, Any] = {
        AXIS_NAMES[axis]: {"score": given.score, "extra_info": {"reason": given.reason}}
        for axis, given in trajectory.scores.items()
    }
    reward["overall_score"] = trajectory.reward
    columns = {"query_info": query, "mcp_info": info, "trajectory": to_qwen(trajectory.messages), "reward": reward}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in columns.items()}


def to_chat_record(trajectory: Trajectory) -> dict[str, Any]:
    """`{tools, messages}` in OpenAI's form, the input of the original's scorer; it has nothing else.

    A row has its tools once: of a conversation in which a tool is only there later, it holds what was before.
    """
    trajectory = _of_first_tools(trajectory)
    return {
        "tools": [tool.to_openai() for tool in trajectory.tools],
        "messages": [
            {**one, "weight": message.weight} if message.weight != 1 else one
            for one, message in zip(to_openai(trajectory.messages), trajectory.messages, strict=True)
        ],
    }


def to_trl_record(trajectory: Trajectory) -> dict[str, Any]:
    """Return `messages` and `tools` as TRL's trainers and the chat templates that TRL ships read them.

    Arguments are objects: most templates raise on JSON text, or encode it a second time. A message has no field that
    is null: Llama's template asks whether `tool_calls` is there. `tools` is JSON text, which TRL opens, or null: of an
    empty list Llama's template makes an environment of tools.

    Raises:
        InputError: a turn has another weight than 1, which TRL does not read.
    """
    trajectory = _of_first_tools(trajectory)
    if weighed := next((one for one in trajectory.messages if one.weight != 1), None):
        raise InputError(
            f"--form=trl: {trajectory.id} has a turn of weight {weighed.weight:g}, and TRL trains every turn alike; "
            "use --form=openai"
        )
    messages = to_openai(trajectory.messages)
    for message, ours in zip(messages, trajectory.messages, strict=True):
        for written, call in zip(message.get("tool_calls", ()), ours.tool_calls, strict=True):
            written["function"]["arguments"] = call.arguments
    tools = json.dumps([tool.to_openai() for tool in trajectory.tools], ensure_ascii=False)
    return {"messages": messages, "tools": tools if trajectory.tools else None}


def _of_first_tools(trajectory: Trajectory) -> Trajectory:
    """Return the conversation up to the first change of its tools."""
    if not trajectory.dialogue or not trajectory.dialogue.restored_at_turn:
        return trajectory
    users = [index for index, message in enumerate(trajectory.messages) if message.role == "user"]
    end = users[trajectory.dialogue.restored_at_turn - 1]
    return msgspec.structs.replace(trajectory, messages=trajectory.messages[:end], tools=trajectory.tools_once(1))


Form = Literal["qwen", "openai", "trl"]
FORMS: tuple[Form, ...] = get_args(Form)


def write_records(
    path: Path | str,
    trajectories: Iterable[Trajectory],
    *,
    form: Form = "qwen",
    servers: Mapping[str, ToolServer] | None = None,
    tasks: Mapping[str, Task] | None = None,
) -> int:
    """Write trajectories as a .jsonl or .parquet file, whole or not at all; returns how many.

    Args:
        form: `qwen`: the released record; `openai`: `{tools, messages}`; `trl`: these as TRL reads them.
        servers: by id, for the record's title, description and execution.
        tasks: by id, for the record's target tools.

    Raises:
        ValueError: another form or suffix, or .parquet without pyarrow.
    """
    if form == "openai":
        chats = (to_chat_record(one) for one in trajectories)
        if Path(path).suffix == ".parquet":  # a column has one schema; tools have one each
            chats = ({name: json.dumps(value, ensure_ascii=False) for name, value in one.items()} for one in chats)
        return write_rows(path, chats)
    if form == "trl":
        return write_rows(path, map(to_trl_record, trajectories), lists_of_json=("messages",))
    if form != "qwen":
        raise InputError(f"form: unknown {form!r}; use {', '.join(FORMS)}")
    by_server, by_task = servers or {}, tasks or {}
    return write_rows(
        path,
        (to_record(one, server=by_server.get(one.server_id), task=by_task.get(one.task_id)) for one in trajectories),
    )


def _question(messages: Iterable[Message]) -> str:
    return next((message.content for message in messages if message.role == "user"), "")


# ---------------------------------------------------------------------------------------------------------------------
# Import


class _Group(msgspec.Struct):
    server_name: str | None = None
    server_title: str | None = None
    domain: str | None = None


class _Base(msgspec.Struct):
    group_info: _Group = msgspec.field(default_factory=_Group)
    tool_list: list[Any] = []


class _Features(msgspec.Struct):
    id: str = ""
    task_id: str = ""
    language: Language | None = None
    injected_failures: int = 0
    failures: list[InjectedFailure] = []
    errors: list[CallError] = []
    needs: list[str] | None = None
    dialogue: Dialogue | msgspec.UnsetType = msgspec.UNSET
    servers: list[str] | msgspec.UnsetType = msgspec.UNSET


class _Info(msgspec.Struct):
    base_info: _Base = msgspec.field(default_factory=_Base)
    features: _Features | None = None


class _Row(msgspec.Struct):
    trajectory: str | list[Any] | None = None
    messages: str | list[Any] | None = None
    mcp_info: str | dict[str, Any] | None = None
    reward: str | dict[str, Any] | None = None
    weight: float = 1.0
    unread: list[str] = []


def import_dataset(path: Path | str, *, accept: Collection[str] = ()) -> Imported[Trajectory]:
    """Return the records of a .jsonl, .jsonl.gz, .json (a list) or .parquet file, in any of `forms`, as trajectories.

    Args:
        accept: defects that do not reject a record; see `import_record`.

    Raises:
        ValueError: the file cannot be read; see `records.read_rows`.
    """
    found: list[Trajectory] = []
    rejected: Counter[str] = Counter()
    named: Counter[str] = Counter()
    details: dict[str, str] = {}
    rows = read_rows(path)
    for row, data in enumerate(rows):
        try:
            trajectory, defects = import_record(data, row)
            named.update({defect.name for defect in defects})
            for defect in defects:
                if defect.name in MENDED:
                    details.setdefault(defect.name, f"{path}: row {row}: {defect.detail}")
                unusable = defect.name in BEYOND_REPAIR
                if unusable or (defect.name not in accept and defect.name not in MENDED):
                    raise Rejected(defect.name, defect.detail)
        except Rejected as rejection:
            rejected[rejection.reason] += 1
            details.setdefault(rejection.reason, f"{path}: row {row}: {rejection.detail}")
        else:
            found.append(trajectory)
    return Imported(found, rejected, details, named, len(rows))


def import_record(data: bytes, row: int) -> tuple[Trajectory, list[Defect]]:
    """Return one row, whatever its defects, and its defects with their names.

    The defects are those of `messages.read_messages`, `tools.read_tools` and `tools.take_from_system`. Further ones are
    `null_argument` (left out; see `null_arguments`) and `unread_column`. `unknown_tool`: a call of a tool that the
    record does not list. `no_parameters`: a tool lists none, and is called with arguments. A record without scores has
    none, and no reward.

    Raises:
        Rejected: `bad_record`: it is no record; the detail names the column, or the forms that are known.
            `unknown_key`, `bad_mark`: a key that might change what is trained; see `keys`.
    """
    try:
        row_columns = columns(decode_json(data, dict[str, Any]))
        given = convert_to(row_columns, _Row)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Rejected("bad_record", f"no record ({error})") from None
    column = "messages" if given.trajectory is None else "trajectory"
    info: _Info = _opened(given, "mcp_info", _Info) or _Info()
    features = info.features or _Features()
    documents = tools_column(row_columns)
    for document in documents:
        _check_tool(document)
    listed, defects = read_tools([*info.base_info.tool_list, *documents])
    said, tools, taken = take_from_system(_opened(given, column, list[Any]), listed)
    messages, found = read_messages(said, tools)
    defects += taken
    defects += found
    messages, found = without_null_arguments(messages, tools)
    defects += found + [Defect("unread_column", name) for name in given.unread]
    if given.weight != 1:
        messages = [one.weighed(one.weight * given.weight) if one.role == "assistant" else one for one in messages]
    known = {tool.name for tool in tools}
    called = dict.fromkeys(call.name for message in messages for call in message.tool_calls)
    lists = f"the row lists {', '.join(sorted(known)) or 'no tools'}"
    defects += [Defect("unknown_tool", f"{name!r} is called, and {lists}") for name in called if name not in known]
    defects += without_parameters(tools, messages)
    scores, reward = _scores(_opened(given, "reward", dict[str, Any]) or {})
    group = info.base_info.group_info
    id = features.id or f"astra-sft-{row:06d}"
    trajectory = Trajectory(
        id=id,
        task_id=features.task_id or id,
        server_id=group.server_name or group.server_title or "",
        domain=group.domain or "",
        language=features.language or language_of(_question(messages)),
        tools=tools,
        messages=messages,
        injected_failures=features.injected_failures,
        scores=scores,
        reward=reward,
        failures=features.failures,
        errors=features.errors,
        needs=features.needs,
        dialogue=features.dialogue,
        servers=features.servers,
    )
    return trajectory, defects


def _opened(row: _Row, column: str, kind: Any) -> Any:
    """Decode a column that may be a JSON string.

    Raises:
        Rejected: `bad_record`.
    """
    value = getattr(row, column)
    if value is None:
        return None
    try:
        return value_or_json(value, kind)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise Rejected("bad_record", f"column {column}: {error}; correct the row or delete it") from None


def _check_tool(document: Any) -> None:
    """Raises `Rejected`: it has a key that is neither read nor harmless."""
    whole = document if isinstance(document, dict) else {}
    parts = [one for one in (whole, *map(whole.get, WRAPPER_KEYS)) if isinstance(one, dict)]
    name = next((one["name"] for one in parts if isinstance(one.get("name"), str)), "")
    for one in parts:
        keys.check(
            one, keys.TOOL_READ, keys.TOOL, f"the tool {name!r}", "remove it, or call it parameters if it is those"
        )


def _scores(given: Mapping[str, Any]) -> tuple[dict[str, AxisScore], float | None]:
    scores: dict[str, AxisScore] = {}
    for axis, name in AXIS_NAMES.items():
        one = given.get(name)
        if not isinstance(one, Mapping) or not isinstance(score := one.get("score"), int | float):
            continue
        extra = one.get("extra_info")
        reason = extra.get("reason", "") if isinstance(extra, Mapping) else ""
        scores[axis] = AxisScore(float(score), str(reason))
    overall = given.get("overall_score")
    return scores, float(overall) if isinstance(overall, int | float) else None
