"""The teacher: one client for every model call that synthesis makes.

A request is an answer type (a `msgspec.Struct`, whose JSON schema the endpoint enforces), the variables of its prompt,
a language and a seed. Prompts are files, `prompts/<language>/<snake_case name of the answer type>.jinja`.
Fail closed: an answer that does not fit its schema is asked for again, then `TeacherError`; it is never scored as good.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

import msgspec

from astra_jax.base.errors import InputError, UserError
from astra_jax.base.files import first_line
from astra_jax.base.progress import log_above_progress
from astra_jax.base.typed import decode_json
from synthesis.core.chat_format import AssistantTurn, MalformedCall
from synthesis.core.endpoint import Endpoint, RequestRefused
from synthesis.core.endpoint_settings import OpenAITeacherConfig, Role
from synthesis.core.loose_json import read_loosely
from synthesis.core.openai_messages import replayed
from synthesis.core.rate_limits import Spent, summed
from synthesis.core.recording import NotRecorded, Recording
from synthesis.core.records import Language, Message, ToolSpec
from synthesis.core.references import referred
from synthesis.core.stages import Acceptance
from synthesis.pipeline.model_router import ModelRouter, judged_by, role_of
from synthesis.pipeline.prompts import Prompts, packaged, render_prompt
from synthesis.pipeline.structured_output import (
    BadAnswer,
    Probe,
    StructuredOutput,
    is_exact,
    open_format,
    prompt_name,
    read_answer,
    response_format,
    strict_schema,
)

__all__ = ["OpenAITeacher", "OpenAITeacherConfig", "Teacher", "TeacherError", "prompt_name", "render_prompt"]

_FROM_STRONGEST: tuple[StructuredOutput, ...] = ("json_schema", "json_object")
"""From the strongest on."""
_TRIES_PER_OUTPUT = 3
_OUTPUT_TEXTS: Mapping[StructuredOutput, str] = {
    "json_schema": "answers have their JSON schema",
    "json_object": "answers are JSON, with the schema in the prompt",
    "text": "answers are text, with the schema in the prompt",
}

T = TypeVar("T", bound=msgspec.Struct)
Mode = Literal["off", "record", "replay"]


class TeacherError(Exception):
    """The teacher gave no valid answer; the message names the answer type and the fault of the last try."""


class Teacher(Protocol):
    """Answers the requests of synthesis: an endpoint, the offline teacher, or a class of the user's own.

    A teacher may have more: `Described`, `Routed`, `Metered`, `Connected`, and `BY_RULES = True` if it computes its
    answers from the packaged tables, as the offline teacher does.
    """

    async def ask(self, answer: type[T], variables: Mapping[str, Any], *, language: Language, seed: int) -> T:
        """Request an answer.

        Args:
            answer: type of the answer; its name selects the prompt.
            variables: variables of the prompt's template.
            language: language of the prompt, and of all text in the answer for a user.
            seed: makes the answer repeatable if the teacher supports it.

        Raises:
            TeacherError: no valid answer after all retries.
        """
        ...

    async def act(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, language: Language, seed: int,
        sent: Sequence[dict[str, Any] | None] = (),
    ) -> AssistantTurn:  # fmt: skip
        """Return the next turn of the conversation, as its agent, who sees nothing but the conversation.

        Args:
            messages: the conversation so far.
            tools: tools that may be called.
            language: language of the conversation.
            seed: as in `ask`.
            sent: `AssistantTurn.sent` of each assistant message in `messages`.

        Returns:
            Reasoning, text and calls; an unreadable call is a `MalformedCall`. The calls' ids come from the model and
            may repeat those of another turn.

        Raises:
            TeacherError: no turn after all retries.
        """
        ...


@runtime_checkable
class Described(Protocol):
    """A teacher with a description of its model."""

    @property
    def description(self) -> Mapping[str, Any]: ...


@runtime_checkable
class Routed(Protocol):
    """A teacher that is several models.

    Attributes:
        router: the models of each role.
    """

    @property
    def router(self) -> ModelRouter: ...

    def route(self, record: str) -> Teacher:
        """Return the same teacher, with the models that are chosen for a record."""
        ...


@runtime_checkable
class Metered(Protocol):
    """A teacher that counts the use of its endpoints."""

    @property
    def spent_by_stage(self) -> Mapping[str, Spent]: ...


@runtime_checkable
class Connected(Protocol):
    """A teacher with connections, which are closed at the end of a run."""

    async def close(self) -> None: ...


def follows_rules(teacher: Teacher) -> bool:
    """Return whether a teacher computes its answers from the packaged tables."""
    return bool(getattr(teacher, "BY_RULES", False))


def load_teacher(name: str) -> Teacher:
    """Return a teacher of the user's own, which `--teacher` names: a class, or a function without parameters.

    Raises:
        InputError: it cannot be imported or called, or lacks a method of `Teacher`.
    """
    made = referred(name)
    try:
        teacher: Teacher = made()
        described = description(teacher)
    except UserError:
        raise
    except Exception as error:
        raise InputError(f"--teacher={name}: {type(error).__name__}: {first_line(error)}") from error
    kind = type(teacher).__name__
    if lacking := [one for one in ("ask", "act") if not inspect.iscoroutinefunction(getattr(teacher, one, None))]:
        raise InputError(
            f"--teacher={name} makes a {kind}, which has no `async def {lacking[0]}`; give it the methods of "
            "synthesis.pipeline.teacher.Teacher (docs/extending.md)"
        )
    if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
        raise InputError(
            f"--teacher={name}: the description of {kind} is {described!r:.200}; make it a mapping with a `name`"
        )
    return teacher


def route(teacher: Teacher, record: str) -> Teacher:
    """Return the teacher of a record, with the models that are chosen for it."""
    return teacher.route(record) if isinstance(teacher, Routed) else teacher


def models_of(teacher: Teacher, record: str, judged: Role) -> dict[Role, str]:
    """Return the model of each role for a record; {} for a teacher by rules. See `ModelRouter.names`."""
    return teacher.router.names(record, judged) if isinstance(teacher, Routed) else {}


def description(teacher: Teacher) -> Mapping[str, Any]:
    """Return the description of a teacher for cards and records: `name`, its type; and the settings of a model that
    determine its answers."""
    return teacher.description if isinstance(teacher, Described) else {"name": type(teacher).__name__}


class OpenAITeacher:
    """A `Teacher` behind an LLM endpoint, asked in the strictest form that it enforces (`structured_output`).

    After a failure of the endpoint the same request is sent again, with the same seed. After a bad answer (truncated,
    not JSON, not of its type) another seed is sent, with the fault in the prompt. The class's name is part of stages'
    fingerprints.

    Args:
        recording: stores answers (see `mode`) and, in any mode, costs.
        prompts: prompts of requests; None: the package's.
        mode: `off` sends every request. `record` sends requests that are not recorded yet, and records them; a request
            without a valid answer is sent again. `replay` sends nothing, and raises `NotRecorded` for an answer that is
            not recorded.

    Raises:
        ValueError: `mode` needs a recording.
    """

    def __init__(
        self, config: OpenAITeacherConfig, recording: Recording | None = None, mode: Mode = "off",
        prompts: Prompts | None = None,
    ) -> None:  # fmt: skip
        if mode not in get_args(Mode) or (mode != "off" and recording is None):
            raise ValueError(
                f"mode={mode!r}: must be one of {', '.join(get_args(Mode))}; record and replay need a recording"
            )
        self.config = config
        self.mode = mode
        self.recording = recording
        self.prompts = prompts or packaged()
        self.router = ModelRouter.of(config)
        self._about: str | None = None
        self._jitter = random.Random()  # pauses change no answer, and programs should not pause alike
        budget = config.budget()
        self._states: dict[str, _EndpointState] = {}
        self._models: dict[Role, list[tuple[OpenAITeacherConfig, _EndpointState]]] = {}
        for role in get_args(Role):
            self._models[role] = []
            for one in config.models(role):
                key = _endpoint_key(one)
                if key not in self._states:
                    self._states[key] = _EndpointState(Endpoint(one, recording, budget))
                self._models[role].append((one, self._states[key]))
        self._budget = budget

    @property
    def endpoints(self) -> list[Endpoint]:
        """Return all endpoints that may be used."""
        return [state.endpoint for state in self._states.values()]

    @property
    def description(self) -> Mapping[str, Any]:
        """See `description`: the model, where it is served (the address without what may be secret), how it samples."""
        roles = {
            role: [
                {**one.described, "weight": weight}
                for one, weight in zip(self.config.models(role), self.config.weights(role), strict=True)
            ]
            for role in get_args(Role)
            if role in self.config.roles
        }
        return {
            "name": type(self).__name__,
            **self.config.described,
            "prompts": self.prompts.digest,
            **({"roles": roles} if roles else {}),
            **({"judge_own_text": True} if self.config.judge_own_text else {}),
        }

    def route(self, record: str) -> OpenAITeacher:
        """Return the same teacher, with the models that are chosen for a record; see `ModelRouter`."""
        teacher = copy.copy(self)
        teacher._about = record
        return teacher

    def _model(self, role: Role, judged: Role = "agent") -> tuple[OpenAITeacherConfig, _EndpointState]:
        """Return the model that answers in a role; without a record, for which one would be chosen, the first."""
        index = 0 if self._about is None else self.router.sample(self._about, role, judged)
        return self._models[role][index]

    @property
    def spent(self) -> Spent:
        """On all its models, by this run and by those before it with the same recording."""
        return self._budget.spent

    @property
    def spent_by_stage(self) -> dict[str, Spent]:
        """Return the costs by stage."""
        accounts = {id(one.spent_by_stage): one.spent_by_stage for one in self.endpoints}  # of a model there is one
        stages = sorted({stage for account in accounts.values() for stage in account})
        return {stage: summed(of[stage] for of in accounts.values() if stage in of) for stage in stages}

    async def ask(self, answer: type[T], variables: Mapping[str, Any], *, language: Language, seed: int) -> T:
        """See `Teacher.ask`.

        Raises:
            TeacherError: no valid answer, or the endpoint refused the request.
            AbortRun: the run cannot continue: `BudgetSpent`, `EndpointDown`, `EndpointUnusable` or `NotRecorded`.
        """
        return await self.answer(answer, self.prompts.render(answer, variables, language), language, seed)

    async def answer(self, answer: type[T], prompt: str, language: Language, seed: int) -> T:
        """`ask`, with a prompt that was rendered elsewhere; raises the same."""
        config, state = self._model(role_of(answer), judged_by(answer))
        digest = self._digest(lambda: _identity(config, answer, prompt, seed))
        if (known := self._recorded(digest, answer.__name__, seed, config)) is not None:
            try:
                return read_answer(known, answer)[0]
            except BadAnswer as error:  # the type may check more than it did when recorded
                if self.mode == "replay":
                    raise NotRecorded(
                        f"{config.model}: {answer.__name__} is recorded, and cannot be used: {error}",
                        "record it again with --teacher_mode=record",
                    ) from None
        try:
            given, text = await self._ask(config, state, answer, prompt, language, seed)
        except TeacherError as error:
            self._record(digest, "", str(error))
            raise
        self._record(digest, text)
        return given

    def _digest(self, request: Callable[[], bytes]) -> bytes:
        """Return a request's key in the recording, or b"" without a recording."""
        return b"" if self.mode == "off" or self.recording is None else hashlib.sha256(request()).digest()

    def _recorded(self, digest: bytes, what: str, seed: int, config: OpenAITeacherConfig) -> str | None:
        """Return the recorded answer to a request, or None if the endpoint must be asked.

        Raises:
            TeacherError: in a replay, the request is recorded without an answer.
            NotRecorded: in a replay, the request is not recorded.
        """
        if not digest or self.recording is None:
            return None
        if (known := self.recording.answer(digest)) is not None:
            text, problem = known
            if not problem:
                return text
            if self.mode == "replay":
                raise TeacherError(problem)
        if self.mode == "replay":
            raise NotRecorded(
                f"{self.recording.path} has no answer to a request for {what} (seed {seed}, model {config.model})",
                "another configuration, prompt or seed was recorded: run with these, or record with mode 'record'",
            )
        return None

    def _record(self, digest: bytes, text: str, problem: str = "") -> None:
        if digest and self.recording is not None:
            self.recording.keep(digest, text, problem)

    async def act(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, language: Language, seed: int,
        sent: Sequence[dict[str, Any] | None] = (),
    ) -> AssistantTurn:  # fmt: skip
        """See `Teacher.act`. Uses the chat API's messages and tools, which the served model renders with its own chat
        template.

        The endpoint gets its own messages back unchanged. A turn that is truncated, has an unreadable call, or has
        another problem is requested again. When no tries are left, a turn with only the last kind of problem is
        returned.

        Raises:
            TeacherError: every turn was truncated, or the endpoint refused the request.
            AbortRun: as in `ask`.
        """
        config, state = self._model("agent")
        endpoint = state.endpoint
        body = _body(config, replayed(messages, (), endpoint.read_turn), seed)
        if tools:
            body["tools"] = [tool.to_openai() for tool in tools]
        names = [tool.name for tool in tools]
        # A recording knows the conversation by what it says: ids and signatures of another run do not matter.
        api = {} if config.api == "openai" else {"api": config.api}
        digest = self._digest(lambda: msgspec.json.encode({**body, **api}))
        if (known := self._recorded(digest, "a turn of the agent", seed, config)) is not None:
            message = decode_json(known, dict[str, Any])
        else:
            body["messages"] = replayed(messages, sent, endpoint.read_turn)
            try:
                message = await self._turn(config, state, body, seed, names)
            except TeacherError as error:
                self._record(digest, "", str(error))
                raise
            self._record(digest, msgspec.json.encode(message).decode())
        return replace(endpoint.read_turn(message, names), sent=message)

    async def _turn(
        self,
        config: OpenAITeacherConfig,
        state: _EndpointState,
        body: Mapping[str, Any],
        seed: int,
        tools: Sequence[str],
    ) -> dict[str, Any]:
        """Return a turn as the endpoint sent it."""
        unreadable: dict[str, Any] | None = None
        problems: dict[str, None] = {}
        for number in range(config.tries):
            seeded = {"seed": (seed + number) % 2**31} if "seed" in body else {}
            try:
                reply = await state.endpoint.complete_turn(
                    "agent_turn", {**body, **seeded}, self._jitter, timeout_seconds=config.timeout_seconds
                )
            except RequestRefused as error:
                raise TeacherError(f"a turn of the agent: {error}") from None
            if reply.problem:
                problems[reply.problem] = None
                state.acceptance("a turn of the agent").reject(reply.problem, reply.text)
                continue
            unreadable = reply.message
            turn = state.endpoint.read_turn(unreadable, tools)
            malformed = [(call.error, call.text) for call in turn.calls if isinstance(call, MalformedCall)]
            malformed += [(turn.leak, turn.content)] if turn.leak else []
            if not malformed:
                state.acceptance("a turn of the agent").accept()
                return unreadable
            state.acceptance("a turn of the agent").reject(*malformed[0])
        if unreadable is None:
            raise TeacherError(f"a turn of the agent: {' or '.join(problems)} in all of {config.tries} tries")
        return unreadable

    async def close(self) -> None:
        """Close the connections, and print how many answers were repaired. The recording stays open."""
        for state in self._states.values():
            state.report_repairs()
            await state.endpoint.close()

    async def _ask(
        self,
        config: OpenAITeacherConfig,
        state: _EndpointState,
        answer: type[T],
        prompt: str,
        language: Language,
        seed: int,
    ) -> tuple[T, str]:
        """Return the answer, and its JSON."""
        kind = prompt_name(answer)
        output = await self._structured_output(config, state)
        problem = ""
        for number in range(config.tries):
            body = self._request(config, answer, prompt, language, seed + number, output, problem)
            try:
                reply = await state.endpoint.complete(kind, body, self._jitter, timeout_seconds=config.timeout_seconds)
            except RequestRefused as error:
                raise TeacherError(f"{answer.__name__}: {error}") from None
            if reply.problem:
                problem = f"the answer was {reply.problem}"
            else:
                try:
                    given = read_answer(reply.text, answer)
                except BadAnswer as error:
                    problem = str(error)
                else:
                    state.acceptance(answer.__name__).accept()
                    if not is_exact(reply.text, answer):
                        state.count_repair(reply.text)
                    return given
            state.acceptance(answer.__name__).reject(problem, reply.text)
        raise TeacherError(f"{answer.__name__}: no valid answer in {config.tries} tries; {problem}")

    async def _structured_output(self, config: OpenAITeacherConfig, state: _EndpointState) -> StructuredOutput:
        """Found once, by one of all that share the endpoint."""
        if (output := state.output if config.structured_output == "auto" else config.structured_output) is not None:
            return output
        async with state.probing:
            if state.output is None:
                state.output, why = await self._probe_structured_output(config, state)
                log_above_progress(f"{config.base_url}, model {config.model}: {_OUTPUT_TEXTS[state.output]}{why}")
            return state.output

    async def _probe_structured_output(
        self, config: OpenAITeacherConfig, state: _EndpointState
    ) -> tuple[StructuredOutput, str]:
        """Return the strictest form that the endpoint enforces, and why it is not a stricter one.

        The request is one that prose would answer. One request is enough if the first form works. An answer without the
        form is requested twice more, since any single answer may be bad.
        """
        why = ""
        for output in _FROM_STRONGEST:
            for number in range(_TRIES_PER_OUTPUT):
                body = self._request(config, Probe, "Say yes.", "en", number, output, "")
                try:
                    reply = await state.endpoint.complete("probe", body, self._jitter, trying=True)
                except RequestRefused as error:
                    why = f" ({output} is refused with {error})"
                    break
                text = reply.text.rpartition("</think>")[2].strip()
                with contextlib.suppress(ValueError, RecursionError):
                    given, _ = read_loosely(text)
                    if isinstance(given, dict) and (
                        output != "json_schema" or set(given) == set(Probe.__struct_fields__)
                    ):
                        return output, why
                why = f" ({output} is taken, and not heeded)"
        return "text", why

    def _request(
        self, config: OpenAITeacherConfig, answer: type[msgspec.Struct], prompt: str, language: Language, seed: int,
        output: StructuredOutput, problem: str,
    ) -> bytes:  # fmt: skip
        """Return the JSON of a request.

        Args:
            problem: fault of the previous try; "" at the first.
        """
        parts = [prompt]
        if output != "json_schema":
            schema = msgspec.json.encode(strict_schema(answer)).decode()
            parts.append(self.prompts.template("_as_json", language).render(schema=schema))
        if problem:
            parts.append(self.prompts.template("_refused", language).render(problem=problem))
        messages = [{"role": "user", "content": "\n\n".join(parts)}]
        return msgspec.json.encode(_body(config, messages, seed, response_format(answer, output)))


@dataclass
class _EndpointState:
    """An endpoint, and how it is asked for answers once that is known."""

    endpoint: Endpoint
    output: StructuredOutput | None = None
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)
    answers: dict[str, Acceptance] = field(default_factory=dict)
    repaired: int = 0
    repaired_example: str = ""

    def acceptance(self, kind: str) -> Acceptance:
        """Return the counts of a kind of answers."""
        if kind not in self.answers:
            config = self.endpoint.config
            what = f"answers of {config.model} at {config.base_url} to requests for {kind}"
            self.answers[kind] = Acceptance(what, config.unusable_answers, config.written("unusable_answers"))
        return self.answers[kind]

    def count_repair(self, text: str) -> None:
        """Count an answer that was accepted only after its text or its values were repaired."""
        self.repaired += 1
        self.repaired_example = self.repaired_example or text

    def report_repairs(self) -> None:
        """Print how many answers were repaired, if any were, and start counting again."""
        if self.repaired:
            config, accepted = self.endpoint.config, sum(one.accepted for one in self.answers.values())
            log_above_progress(
                f"{config.base_url}, model {config.model}: {self.repaired} of {accepted} accepted answers were not "
                f"exact JSON of their schema, and were repaired, such as: {self.repaired_example:.200}"
            )
            self.repaired = 0


def _endpoint_key(config: OpenAITeacherConfig) -> str:
    """Return the key of an endpoint that roles may share: its address, model, API key, limits and prices."""
    plain = OpenAITeacherConfig(config.base_url, config.model)
    own = ("temperature", "max_tokens", "timeout_seconds", "tries", "extra_body", "roles", "judge_own_text")
    return repr(replace(config, **{name: getattr(plain, name) for name in own}))


def _identity(config: OpenAITeacherConfig, answer: type[msgspec.Struct], prompt: str, seed: int) -> bytes:
    """Return the content of a request that is its key in a recording, with the settings that matter.

    The form of the answer is not in it, since it depends on the endpoint. Recordings of versions up to 0.1 use the same
    key.
    """
    return msgspec.json.encode(_body(config, [{"role": "user", "content": prompt}], seed, open_format(answer)))


def _body(
    config: OpenAITeacherConfig,
    messages: Sequence[Mapping[str, Any]],
    seed: int,
    response_format: msgspec.Raw | None = None,
) -> dict[str, Any]:
    body = {
        "model": config.model,
        "messages": messages,
        "response_format": response_format,
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "seed": seed % 2**31,
        **config.extra_body,
    }
    return {name: value for name, value in body.items() if value is not None}
