"""The keys of rows, messages, turns, calls and tools: which are read, which change nothing, and the marks of training.

A key that is not known may ask for something: to leave a turn out, to show another prompt. So it is refused by its
name, except in a row, whose columns are mostly metadata: there a column is refused if it speaks of training, and the
others are named as not read. What is null or empty says nothing, and is never refused.

`MARKS` are the keys by which other trainers say what a turn counts in the loss, as their documentation has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from synthesis.core.stages import Rejected
from synthesis.core.tool_documents import PARAMETER_KEYS, WRAPPER_KEYS, opened_text

MOST_WEIGHT = 1_000.0


@dataclass(frozen=True)
class Mark:
    """A key that says what a turn counts in the loss.

    Attributes:
        trainers: whose documentation has it.
        most: the largest value; true is 1.
        inverse: true and 1 say that the turn is not trained.
        of_row: it is read in a row as well, for all of the row's turns.
    """

    trainers: str
    most: float = 1.0
    inverse: bool = False
    of_row: bool = False


MARKS: Mapping[str, Mark] = {
    "weight": Mark("OpenAI, Mistral, Together AI, Fireworks AI, axolotl", MOST_WEIGHT, of_row=True),
    "loss_weight": Mark("LLaMA-Factory", MOST_WEIGHT, of_row=True),
    "train": Mark("axolotl, Tinker", of_row=True),
    "training": Mark("axolotl"),
    "trainable": Mark("Tinker", of_row=True),
    "loss": Mark("ms-swift, XTuner, AgentTuning"),
    "loss_mask": Mark("VeOmni"),
    "step_loss_mask": Mark("slime"),
    "masked": Mark("torchtune", inverse=True),
}

MEDIA = frozenset({"images", "image", "videos", "video", "audios", "audio", "image_url", "image_urls", "image_path",
                   "image_paths", "input_audio", "pixel_values", "attachments"})  # fmt: skip
"""Keys of what no model here reads."""

ASTRA_ROW = frozenset({"query_info", "mcp_info", "reward"})
"""Columns beside `trajectory`."""
CONVERSATIONS = ("trajectory", "messages", "completion", "conversations")
"""Columns of which a row has one, or it says two things."""
REFUSED_COLUMNS: Mapping[str, str] = {
    "chosen": "SFT takes no pairs of answers",
    "rejected": "SFT takes no pairs of answers",
    "rejected_response": "SFT takes no pairs of answers",
    "rejected_messages": "SFT takes no pairs of answers",
    "kto_tag": "SFT takes no verdicts on answers",
    "mask": "it does not say whether it names what is trained or what is not",
    "history": "turns are read from the conversation's own column alone",
    "documents": "chat formats here show no documents",
    "objects": "the models here read text alone",
    "chat_template": "the chat format is the model's own",
    "chat_template_kwargs": "the chat format takes no arguments",
    "enable_thinking": "whether turns have thoughts follows from the messages",
    "input_ids": "rows are conversations, and not tokens",
    "token_ids": "rows are conversations, and not tokens",
}
"""Columns that would change what is trained, and why they are not read."""
SYSTEM_COLUMNS = ("system_prompt", "system_message")
"""Columns that hold a system message, under a name that is not read."""
TRAINING_WORDS = frozenset({"weight", "weights", "mask", "masks", "masked", "masking", "loss", "train", "trainable",
                            "training", "untrained", "supervise", "supervised", "kto"})  # fmt: skip
"""Words in a name that speak of training; a column's name may have them if its value is text."""
TRAINING_COLUMNS = frozenset({"label", "labels", "skip", "ignore", "exclude", "excluded"})
"""Names of columns that do as a whole."""
METADATA_WORDS = frozenset({"num", "n", "count", "total", "id", "ids", "idx", "name", "split", "set", "source", "type",
                            "version", "date", "time"})  # fmt: skip
"""Words in the name of a column that describe a row, whatever else is in it."""
DEFAULTS: Mapping[str, bool] = {
    "mask_history": False, "train_on_inputs": False, "train_on_input": False, "train_on_prompt": False,
    "assistant_only_loss": True, "completion_only_loss": True, "mask_prompt": True, "mask_inputs": True,
}  # fmt: skip
"""Columns that ask for what is done anyway, with this value."""

_ORIGIN = frozenset({
    "id", "ids", "uuid", "uid", "idx", "index", "order", "number", "hash", "sha256", "checksum", "key", "message_id",
    "msg_id", "parent_id", "parent", "parent_message_id", "conversation_id", "session_id", "thread_id", "request_id",
    "response_id", "turn", "turn_id", "turn_idx", "turn_index", "turn_number", "turn_identifier", "step", "step_id",
    "round", "openai_id", "source", "sources", "dataset", "dataset_name", "origin", "url", "link", "license", "licence",
    "author", "author_id", "annotator", "annotator_id", "user_id", "username", "created", "created_at", "updated_at",
    "create_time", "update_time", "date", "datetime", "time", "timestamp", "timestamps", "start_time", "end_time",
    "duration", "latency", "latency_ms", "metadata", "meta", "meta_data", "_meta", "info", "extra_info", "extras",
    "attributes", "properties", "tags", "tag", "category", "categories", "topic", "topics", "domain", "difficulty",
    "comment", "comments", "note", "notes", "version", "object", "status", "state", "lang", "language", "locale",
})  # fmt: skip
_MEASURES = frozenset({
    "model", "model_name", "model_id", "model_slug", "provider", "engine", "generator", "usage", "tokens",
    "token_count", "token_counter", "num_tokens", "n_tokens", "prompt_tokens", "completion_tokens", "length", "cost",
    "finish_reason", "stop_reason", "finish_details", "stop_sequence", "end_turn", "logprobs", "logprob",
    "system_fingerprint", "service_tier", "temperature", "top_p", "seed", "score", "scores", "rating", "ratings",
    "rank", "quality", "quality_score", "reward", "rewards", "confidence", "perplexity", "ppl", "feedback", "votes",
    "upvotes", "toxicity", "toxic", "detoxify", "moderation", "safety", "safe", "flagged", "redacted", "pii",
    "hashed_ip", "country", "header", "headers", "emotion", "intent", "annotations", "review",
})  # fmt: skip
MESSAGE = _ORIGIN | _MEASURES | {
    "type", "content_type", "name", "sender", "avatar", "refusal", "citations", "cache_control", "is_error",
    "success", "encrypted_content", "signature", "provider_specific_fields", "parsed", "end_of_turn", "eot",
}  # fmt: skip
"""Keys of messages, and of ShareGPT's turns, that change nothing of what is trained."""
PART = frozenset({"type", "text", "cache_control", "annotations", "citations", "signature", "id", "index", "metadata"})
"""Keys of a text in a message's list of content."""
CALL = frozenset({"id", "type", "index", "call_id", "function_id", "status", "timestamp", "metadata", "extra_content",
                  "thought_signature", "signature", "cache_control", "caller", "provider_specific_fields"})  # fmt: skip
"""Keys of calls, and of the functions in them, that change nothing."""
TOOL_READ = frozenset({"type", "name", "description", "properties", "required", "additionalProperties",
                       *PARAMETER_KEYS, *WRAPPER_KEYS})  # fmt: skip
TOOL = _ORIGIN - {"properties", "extras"} | {
    "strict", "title", "display_name", "annotations", "output_schema", "outputSchema", "output_type", "returns",
    "return", "response", "responses", "result", "results", "output", "outputs", "examples", "example",
    "input_examples", "server", "server_name", "namespace", "provider", "icons", "execution", "cache_control",
    "defer_loading", "allowed_callers", "deprecated", "enabled", "is_async", "async", "code", "implementation",
    "method", "path", "endpoint", "host", "api_name", "tool_name", "category_name", "requires_confirmation",
    "eager_input_streaming", "auth",
}  # fmt: skip
"""Keys of tools that the model is not shown."""


def check(
    given: Mapping[str, Any],
    known: Collection[str],
    harmless: Collection[str],
    where: str,
    remedy: str = "remove it, or put it into 'metadata' if it changes nothing",
) -> None:
    """Refuse what is neither read nor harmless.

    Raises:
        Rejected: `unknown_key`: with the key, its value and the remedy.
    """
    for name, value in given.items():
        if name in known or name in harmless or says_nothing(value):
            continue
        if name in MEDIA:
            raise Rejected("unknown_key", f"{_at(where)}{name!r} is given, and the models here read text alone")
        if TRAINING_WORDS & set(_words(name)):
            remedy = f"remove it, or use one of {', '.join(MARKS)} for a whole turn"
        raise Rejected(
            "unknown_key",
            f"{_at(where)}the key {name!r} ({value!r:.60}) is not known, and might change what is trained; {remedy}",
        )


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def says_nothing(value: Any) -> bool:
    """Return whether a value is null or empty, as a columnar file fills up what a row does not have."""
    return value is None or (isinstance(value, str | list | dict) and not value)


# ---------------------------------------------------------------------------------------------------------------------
# Marks of training


def weight_of(given: Mapping[str, Any], where: str, *, of_row: bool = False) -> float:
    """Return the product of all marks of a turn, or of a row; 1 if there is none.

    Raises:
        Rejected: `bad_mark`: an invalid value, or a key that asks for something unsupported.
    """
    weight = 1.0
    for name, mark in MARKS.items():
        if (mark.of_row or not of_row) and not says_nothing(value := given.get(name)):
            weight *= _read(value, mark, f"{_at(where)}{name!r}")
    return weight


def check_asks_nothing(given: Mapping[str, Any], role: str, where: str) -> None:
    """Refuse a mark that asks to train on what no assistant says. 0 and false ask for what is done anyway.

    Raises:
        Rejected: `bad_mark`.
    """
    for name in MARKS.keys() & {name for name, value in given.items() if not says_nothing(value)}:
        if _read(given[name], MARKS[name], f"{_at(where)}{name!r}"):
            raise Rejected(
                "bad_mark",
                f"{_at(where)}{name!r} is {given[name]!r:.20} and asks to train on a turn of the role {role}; only the "
                f"assistant's turns are trained: remove it, or set it to {'true' if MARKS[name].inverse else 'false'}",
            )


def without_marks(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in MARKS}


def _read(value: Any, mark: Mark, where: str) -> float:
    if not isinstance(value, bool | int | float) or not math.isfinite(value) or not 0 <= value <= mark.most:
        raise Rejected(
            "bad_mark", f"{where} is {value!r:.40}; it wants true, false or a number from 0 to {mark.most:g}"
        )
    return 1.0 - value if mark.inverse else float(value)


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def unread(row: Mapping[str, Any], read: Collection[str], system: str = "") -> list[str]:
    """Return the columns of a row that are not read: metadata.

    Args:
        read: columns that are read of a row of this form.
        system: text of the system message that the conversation has.

    Raises:
        Rejected: `unknown_key`: a column that would change what is trained.
    """
    found = []
    for name, value in row.items():
        if says_nothing(value) or name in read or (name in MARKS and MARKS[name].of_row):
            continue
        if name in DEFAULTS and value is DEFAULTS[name]:
            continue
        if why := _refusal(name, value, read, system):
            raise Rejected("unknown_key", f"the column {name!r} ({value!r:.60}) is not read: {why}")
        found.append(name)
    return found


def _refusal(name: str, value: Any, read: Collection[str], system: str) -> str:
    """Why a column may not be left unread; empty: it may, or it is read."""
    if name in CONVERSATIONS:
        own = next((one for one in CONVERSATIONS if one in read), "instruction")
        return f"the row's conversation is in {own!r}; remove one of the two columns"
    if name in MEDIA:
        return "the models here read text alone; leave the row out"
    if name in REFUSED_COLUMNS:
        return f"{REFUSED_COLUMNS[name]}; remove the column"
    if name in SYSTEM_COLUMNS and isinstance(value, str) and value.strip() != system.strip():
        return "it would be the system message; rename it to system, or remove the column"
    words = set(_words(name))
    speaks = name in TRAINING_COLUMNS or (words & TRAINING_WORDS and not words & METADATA_WORDS)
    if speaks and not _is_words(value):
        return "its name speaks of training; remove the column, or use weight or train for a whole row"
    if words & {"tools", "functions", "tool", "function"} and _are_tools(value):
        return "it holds tools; rename it to tools, or remove the column"
    return ""


def _words(name: str) -> Iterator[str]:
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:200])
    return (word for word in re.split(r"[^a-z0-9]+", parted.lower()) if word)


def _is_words(value: Any) -> bool:
    """Return whether a value is a text, or texts, and no truth or number that is written as one."""
    if isinstance(value, list):
        return all(map(_is_words, value))
    if not isinstance(value, str):
        return False
    return any(map(str.isalpha, value)) and value.strip().lower() not in ("true", "false", "yes", "no", "none", "null")


def _are_tools(value: Any) -> bool:
    value = opened_text(value)
    own = {"function", "parameters", "input_schema", "inputSchema"}
    return isinstance(value, list) and any(isinstance(one, dict) and not own.isdisjoint(one) for one in value)
