"""Grammars that constrain an answer: JSON of a schema, calls of tools, thoughts before either.

`response_format`, `tool_choice` and `strict` functions become one grammar of the whole turn, in Lark's syntax with JSON
schemas inside, as llguidance reads it (https://github.com/guidance-ai/llguidance). It compiles in milliseconds, and
takes some ten microseconds to find the allowed next tokens. Both are bounded for every schema.

JSON is written as in training, with ", " and ": " and no other spaces. So the model writes in its usual form, and no
model can write spaces for ever. Thoughts are free.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import llguidance
import numpy as np

from astra_jax.rollout.sampler import ConstraintError
from astra_jax.serving.protocol import ChatRequest, InvalidRequest, shown
from astra_jax.serving.strict import check_schema
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chat_format import CallFrame
from synthesis.core.tool_schemas import UncheckableSchema, check_size

_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY: dict[str, Any] = {"type": "object"}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
_LONGEST_PROBLEM = 300
_LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)
"""Limits below llguidance's own for memory: a state takes one or two kilobytes."""


class Grammars:
    """Builder of grammars for requests to one model. Its methods may take milliseconds, the first call a second."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        """
        Args:
            vocab_size: the model's, which may be larger than the tokenizer's.
        """
        self._format = tokenizer.format
        self._source = tokenizer
        self._vocab_size = vocab_size

    def warm_up(self) -> None:
        """Read the vocabulary, so that the first grammar need not wait for it."""
        assert self._vocabulary

    def of(self, asked: ChatRequest) -> Grammar | None:
        """Return the grammar of the answer to a request; None: no constraint.

        Raises:
            InvalidRequest: the requested form is invalid or cannot be enforced.
        """
        answer = _answer_schema(asked.response_format)
        tools, forced = _tools(asked)
        strict = any(function.get("strict") for function in tools)
        if answer is None and not forced and not strict:
            return None
        if asked.continue_final_message:
            raise InvalidRequest(
                "continue_final_message is true, but response_format, tool_choice or a strict function asks for a form "
                "of the whole turn; leave one of them out",
                param="continue_final_message",
            )
        if asked.ignore_eos:
            raise InvalidRequest(
                "ignore_eos is true, but an answer of a given form ends with the turn; leave it out", param="ignore_eos"
            )
        param = "tools" if answer is None else "response_format"
        try:
            return self._compiled(self._turn(asked, answer, tools, forced, own=True), param)
        except InvalidRequest:
            if all(function.get("strict") for function in tools):
                raise
            # A function that is not strict may have any schema; its arguments may then be any object.
            return self._compiled(self._turn(asked, answer, tools, forced, own=False), param)

    def _turn(
        self,
        asked: ChatRequest,
        answer: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
        forced: bool,
        *,
        own: bool,
    ) -> str:
        """Return the grammar of a turn; `own`: functions that are not strict have their schemas' arguments, too."""
        frame = self._format.call_frame
        several = asked.parallel_tool_calls and not isinstance(asked.tool_choice, dict) and frame.between is not None
        rules, bodies = [], []
        if answer is not None and not forced:
            rules.append(f"json: %json {_schema(answer)}")
            bodies.append("json")
        if tools:
            rules += _call_rules(tools, frame, own=own)
        if tools and (forced or answer is not None):
            rules.append(f"call: {_text(frame.before)} one {_text(frame.after)}")
            bodies.append(f"call ({_text(frame.between or '')} call)*" if several else "call")
        elif tools and frame.opens:
            # Text is free until a call is opened, which must then be a valid call.
            rules += [
                f"opened[suffix={_text(frame.opens)}]: /(?s:.*)/",
                f"part: opened {_text(frame.before.removeprefix(frame.opens))} one {_text(frame.after)}",
                "rest: /(?s:.*)/",
            ]
            bodies.append("part* rest" if several else "part | rest")
        elif tools:
            rules += [
                f"call: {_text(frame.before)} one {_text(frame.after)}",
                r"TEXT: /\s*([^\s{](?s:.)*)?/",
            ]
            bodies.append("call | TEXT")
        thought = ""
        if self._format.thought_start and asked.thinking:
            start, end = self._format.thought_start, self._format.thought_end
            rules.append(f'thought: {_text(start)} thinking "\\n\\n"\nthinking[suffix={_text(end)}]: /(?s:.*)/')
            thought = "thought? "
        return "\n".join(["%llguidance {}", f"start: {thought}({' | '.join(bodies)})", *rules])

    def _compiled(self, text: str, param: str) -> Grammar:
        grammar = llguidance.LLMatcher.grammar_from_lark(text)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            problem = matcher.get_error().split("JSON schema: ")[-1].split("\n   1 |")[0]  # the grammar's text follows
            problem = " ".join(problem.split())[:_LONGEST_PROBLEM]
            raise InvalidRequest(f"{param} has a schema that cannot be enforced here: {problem}", param=param)
        return Grammar(matcher)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        source = self._source
        try:
            own = llguidance.LLTokenizer(source.definition, slices=[])  # for each kind of tokenizer
            there = source.ids
            tokens = [own.decode_bytes([i]) if i in there else b"" for i in range(self._vocab_size)]
            return llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_Vocabulary(source, tokens)),
                n_vocab=self._vocab_size,
                eos_token=list(source.end_ids),
            )
        except ValueError as error:
            raise InvalidRequest(
                f"answers of a given form are not offered here: the model's tokenizer cannot be read ({error!s:.200})",
                param="response_format",
            ) from None


class Grammar:
    """Compiled grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def constraint(self) -> GrammarConstraint:
        """Return the constraint of one completion."""
        return GrammarConstraint(self._matcher)


class GrammarConstraint:
    """`Constraint` that allows the tokens with which a grammar's text can continue."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._first = matcher
        self._matcher: llguidance.LLMatcher | None = None
        self._read = 0

    def allow(self, drawn: Sequence[int], words_w: np.ndarray) -> None:
        """Mask the tokens that are not allowed; see `Constraint.allow`."""
        if self._matcher is None:
            self._matcher = self._first.deep_copy()
        self._matcher.consume_tokens([int(token) for token in drawn[self._read :]])
        self._read = len(drawn)
        self._matcher.unsafe_compute_mask_ptr(words_w.ctypes.data, words_w.nbytes)
        if self._matcher.is_error():
            problem = self._matcher.get_error().split("\n")[0][:_LONGEST_PROBLEM]
            raise ConstraintError(f"what may follow cannot be said, its schema is too complex: {problem}")


class _Vocabulary:
    """Tokenizer's data for llguidance.

    Tags of the chat format are ordinary text, even if they are single tokens. Tokens of the frame and control tokens
    are in no text.
    """

    def __init__(self, tokenizer: ChatTokenizer, tokens: list[bytes]) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, None
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = tokens

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


# ---------------------------------------------------------------------------------------------------------------------
# Requested forms


def _refuse_others(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            param = f"{where}.{name}"
            raise InvalidRequest(
                f"{param:.100} is {shown(value)}; it is not offered here, leave it out (a schema is that of the type "
                "json_schema)",
                param=param,
            )


def _answer_schema(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kind = response_format.get("type")
    if kind in ("text", "json_object"):
        _refuse_others(response_format, ("type",), "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY
    named = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(named, dict) or not isinstance(named.get("schema", {}), dict):
        raise InvalidRequest(
            f"response_format is {shown(response_format)}; use text, json_object, or json_schema with a schema",
            param="response_format",
        )
    schema: dict[str, Any] = named.get("schema", _ANY)
    where = "response_format.json_schema"
    _refuse_others(response_format, ("type", "json_schema"), "response_format")
    _refuse_others(named, ("name", "description", "schema", "strict"), where)
    if named.get("strict") not in (None, True, False):
        raise InvalidRequest(f"{where}.strict is {shown(named['strict'])}; send true or false", param=f"{where}.strict")
    if named.get("strict"):
        check_schema(schema, f"{where}.schema")
    try:
        check_size(schema)
    except UncheckableSchema as error:
        raise InvalidRequest(f"{where}.schema: {error}", param=f"{where}.schema") from None
    return schema


def _tools(asked: ChatRequest) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the functions that may be called, each with a name, and whether a call is required."""
    functions = [tool["function"] for tool in asked.tools]
    for i, function in enumerate(functions):
        if function.get("strict"):
            parameters = function.get("parameters")
            check_schema(_NOTHING if parameters is None else parameters, f"tools[{i}].function.parameters")
    choice = asked.tool_choice
    if choice == "none":
        return [], False
    if choice == "auto":
        return functions, False
    if choice == "required":
        if not functions:
            raise InvalidRequest("tool_choice is required, but there are no tools; send some", param="tool_choice")
        return functions, True
    chosen = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = chosen.get("name") if isinstance(chosen, dict) else None
    found = [function for function in functions if function["name"] == name]
    if not found:
        raise InvalidRequest(
            f"tool_choice is {shown(choice)}; use auto, none, required, or a function that tools has",
            param="tool_choice",
        )
    return found, True


def _call_rules(functions: Sequence[Mapping[str, Any]], frame: CallFrame, *, own: bool) -> list[str]:
    rules = [f"one: {' | '.join(f'one_{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        parameters = function.get("parameters")
        schema = _NOTHING if parameters is None else parameters
        if not function.get("strict"):
            schema = schema if own else _ANY
            rules.append(f"args_{i}: %json {_schema(schema, lenient=True)}")
        else:
            rules.append(f"args_{i}: %json {_schema(schema)}")
        rules.append(f"one_{i}: {_text(function['name'] + frame.middle)} args_{i}")
    return rules


def _schema(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    return json.dumps({**schema, "x-guidance": {**_WRITTEN, "lenient": lenient}})


def _text(text: str) -> str:
    """Return a literal of a grammar."""
    return json.dumps(text) if text else ""
