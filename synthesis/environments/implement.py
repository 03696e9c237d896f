"""Implement: a tool for every sub-question that needs one (paper §2.2.3).

Tool document → harder document → call statement → code, proven in the sandbox. What fails goes back to the teacher with
the sandbox's message, a bounded number of times; then the whole decomposition is rejected, for all its steps must run.
"""

from __future__ import annotations

import ast
import keyword
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from synthesis.core.loose_json import unfenced
from synthesis.core.records import CodeTool, Decomposition, ReferenceCall, SubQuestion, ToolSpec
from synthesis.core.stages import Rejected, rng_for
from synthesis.environments.context import EnvironmentContext
from synthesis.environments.drafts import Draft, NeededTool, ToolsetDraft
from synthesis.environments.leaks import answers_of, check_arguments_ask, leaked, prose
from synthesis.environments.proof import Case, check_arguments, prove
from synthesis.environments.teacher_answers import (
    HarderToolDocumentAnswer,
    ReferenceCallAnswer,
    ToolCodeAnswer,
    ToolDocumentAnswer,
    arguments,
    to_spec,
)
from synthesis.pipeline.context import gather_or_cancel
from synthesis.pipeline.languages import check_language

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")


async def implement(draft: Draft, context: EnvironmentContext) -> list[ToolsetDraft]:
    """Return the draft with one proven tool for each sub-question that needs one.

    Raises:
        Rejected: `bad_document`, `answer_leaked`, `wrong_language`, `not_compatible`, `not_harder`, `bad_call`,
            `answer_in_call`, `bad_code`, a reason of `proof.prove`, or `teacher_failed`.
    """
    context = context.route(draft.decomposition.id)
    steps = zip(draft.decomposition.sub_questions, draft.domains, strict=True)
    needed = [(step, domain) for step, domain in steps if step.needs_tool]
    tools = await gather_or_cancel(*(_implement_step(draft, step, domain, context) for step, domain in needed))
    return [ToolsetDraft(draft, tools)]


async def _implement_step(draft: Draft, step: SubQuestion, domain: str, context: EnvironmentContext) -> NeededTool:
    decomposition = draft.decomposition
    key = f"{decomposition.id}/{step.id}"
    by_id = {one.id: one for one in decomposition.sub_questions}
    about = {
        "step": step,
        "dependencies": [by_id[dependency] for dependency in step.depends_on],
        "domain": domain,
        "table_rows": context.config.table_rows,
        "seed": context.seed,
    }

    async def ask(answer: type[Any], variables: Mapping[str, Any], check: Any, attempt: int | None = None) -> Any:
        own_key, attempts = (key, None) if attempt is None else (f"{key}/{attempt}", 1)
        variables = {**about, **variables}
        return await context.ask(
            answer, variables, language=decomposition.language, key=own_key, check=check, attempts=attempts
        )

    async def check_document(given: ToolDocumentAnswer) -> ToolSpec:
        return checked_spec(given, decomposition)

    spec: ToolSpec = await ask(ToolDocumentAnswer, {}, check_document)

    if rng_for(context.seed, "harden", key).random() < context.config.hardened_share:

        async def check_harder(given: HarderToolDocumentAnswer, plain: ToolSpec = spec) -> ToolSpec:
            harder = checked_spec(given, decomposition)
            if problem := _not_harder(plain, harder):
                raise problem
            return harder

        spec = await ask(HarderToolDocumentAnswer, {"document": spec}, check_harder)

    async def check_call(given: ReferenceCallAnswer) -> ReferenceCallAnswer:
        for one in (given.arguments, given.other_arguments):
            check_arguments(spec, arguments(one))
        if arguments(given.arguments) == arguments(given.other_arguments):
            raise Rejected("bad_call", "other_arguments are the same as arguments; they must have another answer")
        check_arguments_ask(arguments(given.arguments), step, decomposition)
        return given

    feedback = ""
    for attempt in range(context.config.attempts):
        # A wrong call makes right code look wrong, so each further round asks for both again.
        call = await ask(ReferenceCallAnswer, {"document": spec, "feedback": feedback}, check_call)
        given, other = arguments(call.arguments), arguments(call.other_arguments)
        case = Case(step.id, given, other, step.answer, decomposition.language)

        async def check_code(given: ToolCodeAnswer, case: Case = case) -> tuple[CodeTool, list[ReferenceCall]]:
            tool = CodeTool(spec, read_source(given.code, spec.name))
            return tool, await prove(tool, [case], context)

        try:
            variables = {"document": spec, "call": call, "feedback": feedback}
            tool, calls = await ask(ToolCodeAnswer, variables, check_code, attempt)
        except Rejected as rejection:
            if attempt + 1 == context.config.attempts or rejection.reason == "teacher_failed":
                raise
            feedback = rejection.detail
            continue
        return NeededTool(step.intent, domain, tool, calls, [dict(case.other_arguments)])
    raise AssertionError("the last attempt returns or raises")


def checked_spec(given: ToolDocumentAnswer | HarderToolDocumentAnswer, of: Decomposition) -> ToolSpec:
    """Return the document as an OpenAI tool.

    Raises:
        Rejected: `bad_document`, `answer_leaked`, `wrong_language`.
    """
    spec = to_spec(given)
    names = [one.name for one in given.parameters]
    for name in (spec.name, *names):
        if not _NAME.fullmatch(name) or keyword.iskeyword(name):
            raise Rejected("bad_document", f"{name!r} is no Python identifier in ASCII; use letters, digits and _ only")
    if len(set(names)) != len(names):
        raise Rejected("bad_document", f"two parameters have one name: {names}")
    if not spec.description.strip():
        raise Rejected("bad_document", "the description is empty")
    if not spec.parameters["required"]:
        raise Rejected("bad_document", "no parameter is required: the tool would give the answer to any call")
    if any(one.enum and one.type != "string" for one in given.parameters):
        raise Rejected("bad_document", "an enum needs the type string")
    # A policy sees the documents of all tools beside each other.
    if text := leaked(spec, answers_of(of), of.language):
        raise Rejected("answer_leaked", f"the document gives an answer away: {text!r}; use no example values")
    check_language(prose(spec), of.language, "the document")
    return spec


def _not_harder(plain: ToolSpec, harder: ToolSpec) -> Rejected | None:
    """Why a document does not scale the plain one: every plain call must stay valid, and something must be new."""
    old, new = plain.parameters, harder.parameters
    if harder.name != plain.name:
        return Rejected("not_compatible", f"the name changed from {plain.name} to {harder.name}; keep it")
    for name, schema in old["properties"].items():
        kept = new["properties"].get(name)
        if kept is None or kept["type"] != schema["type"] or ("enum" in kept and kept["enum"] != schema.get("enum")):
            return Rejected("not_compatible", f"parameter {name!r} was removed or narrowed; keep it as it is")
    if set(new["required"]) != set(old["required"]):
        return Rejected("not_compatible", f"required must stay {old['required']}, not {new['required']}")
    if len(new["properties"]) == len(old["properties"]):
        return Rejected("not_harder", "add at least one optional parameter")
    return None


def read_source(text: str, name: str) -> str:
    """Return the module that a teacher wrote without what surrounds it: one code block of Markdown and its prose, an
    invisible mark, an indentation of all lines. A module that needs no repair is returned as it is.

    Raises:
        Rejected: `bad_code`: see `check_source`; or it has several code blocks.
    """
    parts = text.split("```")
    blocks = parts[1::2] if len(parts) % 2 else []
    plain = textwrap.dedent(text.lstrip("\ufeff\u200b\r\n"))
    fenced = unfenced(f"```{blocks[0]}```") if len(blocks) == 1 else None
    repaired = plain if fenced is None else textwrap.dedent(fenced.lstrip("\ufeff\u200b"))
    for code in (text, repaired):
        try:
            check_source(code, name)
        except Rejected as rejection:
            problem = rejection
        else:
            return code
    if len(blocks) > 1:
        raise Rejected("bad_code", f"the code has {len(blocks)} code blocks; write one module, as plain text")
    raise problem


def check_source(code: str, name: str) -> None:
    """Check that a module is Python that defines a function `name` at its top level. It is not executed.

    Raises:
        Rejected: `bad_code`.
    """
    try:
        module = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last: of code that is nested too deep
        raise Rejected("bad_code", f"the code is not Python: {error or 'nested too deep'}") from error
    if not any(isinstance(one, ast.FunctionDef) and one.name == name for one in module.body):
        raise Rejected("bad_code", f"the code defines no function {name!r} at its top level")
