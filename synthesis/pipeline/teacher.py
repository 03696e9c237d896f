"""The teacher: one client for every model call that synthesis makes.

A request is an answer type (a `msgspec.Struct`, whose JSON schema the endpoint enforces), the variables of its prompt,
a language and a seed. Prompts are files, `prompts/<language>/<snake_case name of the answer type>.jinja`.
Fail closed: an answer that does not fit its schema is asked for again, then `TeacherError`; it is never scored as good.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

import jinja2
import msgspec

from synthesis.core.endpoint import Endpoint, OpenAITeacherConfig, RequestRefused
from synthesis.core.rate_limits import Spent
from synthesis.core.recording import NotRecorded, Recording
from synthesis.core.records import Language

__all__ = ["OpenAITeacher", "OpenAITeacherConfig", "Teacher", "TeacherError", "prompt_name", "render_prompt"]

PROMPTS = Path(__file__).parents[1] / "prompts"

T = TypeVar("T", bound=msgspec.Struct)
Mode = Literal["off", "record", "replay"]


class TeacherError(Exception):
    """The teacher gave no valid answer; the message names the answer type and what was wrong with the last try."""


class Teacher(Protocol):
    """Whoever answers synthesis requests: an OpenAI-compatible endpoint or the offline teacher."""

    async def ask(self, answer: type[T], variables: Mapping[str, Any], *, language: Language, seed: int) -> T:
        """One request.

        Args:
            answer: the type of the answer; its name selects the prompt.
            variables: what the prompt's template needs.
            language: of the prompt, and of whatever the answer says to a user.
            seed: makes the answer repeatable where the teacher can be.

        Raises:
            TeacherError: no valid answer after all retries.
        """
        ...


@cache
def prompt_name(answer: type[msgspec.Struct]) -> str:
    """`TaskScoresAnswer` -> `task_scores_answer`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", answer.__name__).lower()


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PROMPTS),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,  # it would look at the file for each request
    )
    # Records appear in prompts as JSON; msgspec knows how to write them, jinja's own filter does not.
    environment.filters["json"] = lambda value: msgspec.json.encode(value).decode()
    return environment


def render_prompt(answer: type[msgspec.Struct], variables: Mapping[str, Any], language: Language) -> str:
    """The prompt of a request.

    Raises:
        jinja2.TemplateNotFound: no prompt file for this answer and language.
        jinja2.UndefinedError: the template needs a variable that is not given.
    """
    return _environment().get_template(f"{language}/{prompt_name(answer)}.jinja").render(variables)


def strip_answer(text: str) -> str:
    """A model's text without its thinking and without a code fence around the JSON."""
    text = text.rpartition("</think>")[2].strip()
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*)\n```", text, flags=re.DOTALL)
    return fenced.group(1) if fenced else text


class OpenAITeacher:
    """A `Teacher` behind an OpenAI-compatible endpoint, with the answer's JSON schema as `response_format`.

    An endpoint that fails changes no answer: the same request is sent again, with the same seed. Only a model's own bad
    answer is asked for with another seed: JSON that does not fit the schema at once, other text when it comes twice.

    Args:
        recording: keeps answers (see `mode`) and, in any mode, what was spent.
        mode: `off` asks the endpoint. `record` asks what is not recorded yet, and records it; a request that had no
            valid answer is asked again. `replay` asks nothing: what is not recorded is `NotRecorded`.

    Raises:
        ValueError: `mode` wants a recording.
    """

    def __init__(self, config: OpenAITeacherConfig, recording: Recording | None = None, mode: Mode = "off") -> None:
        if mode not in get_args(Mode) or (mode != "off" and recording is None):
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(get_args(Mode))}; all but off want a recording")
        self.config = config
        self.mode = mode
        self.recording = recording
        self.endpoint = Endpoint(config, recording)
        self._jitter = random.Random()  # pauses change no answer, and processes should not pause alike

    @property
    def spent(self) -> Spent:
        """On this model, by this run and by those before it with the same recording."""
        return self.endpoint.spent

    async def ask(self, answer: type[T], variables: Mapping[str, Any], *, language: Language, seed: int) -> T:
        """See `Teacher.ask`.

        Raises:
            TeacherError: no valid answer, or the endpoint refused the request.
            Stopped: the run cannot go on: `BudgetSpent`, `EndpointDown`, `EndpointUnusable` or `NotRecorded`.
        """
        return await self.answer(answer, render_prompt(answer, variables, language), seed)

    async def answer(self, answer: type[T], prompt: str, seed: int) -> T:
        """`ask`, with a prompt that was rendered elsewhere; raises the same."""
        if self.mode == "off" or self.recording is None:
            return (await self._ask(answer, prompt, seed))[0]
        digest = hashlib.sha256(self._request(answer, prompt, seed)).digest()
        if (known := self.recording.answer(digest)) is not None:
            text, problem = known
            if not problem:
                with contextlib.suppress(msgspec.DecodeError):  # the type may check more than it did when recorded
                    return msgspec.json.decode(text, type=answer)
            elif self.mode == "replay":
                raise TeacherError(problem)
        if self.mode == "replay":
            raise NotRecorded(
                f"{self.recording.path} has no answer to a request for {answer.__name__} (seed {seed}, model "
                f"{self.config.model})",
                "another configuration, prompt or seed was recorded: run with these, or record with mode 'record'",
            )
        try:
            given, text = await self._ask(answer, prompt, seed)
        except TeacherError as error:
            self.recording.keep(digest, "", str(error))
            raise
        self.recording.keep(digest, text)
        return given

    async def close(self) -> None:
        """Hang up. The recording stays open."""
        await self.endpoint.close()

    async def _ask(self, answer: type[T], prompt: str, seed: int) -> tuple[T, str]:
        """The answer, and its text."""
        kind = prompt_name(answer)
        problem = ""
        last: str | None = None
        for _ in range(self.config.tries):
            try:
                reply = await self.endpoint.complete(kind, self._request(answer, prompt, seed), self._jitter)
            except RequestRefused as error:
                raise TeacherError(f"{answer.__name__}: {error}") from None
            text = strip_answer(reply.text)
            if not reply.truncated:
                try:
                    return msgspec.json.decode(text, type=answer), text
                except msgspec.ValidationError as error:
                    problem = f"the answer does not fit its schema: {error}"
                    seed, last = seed + 1, None
                    continue
                except msgspec.DecodeError as error:
                    problem = f"the answer is not JSON: {error}"
            else:
                problem = f"the answer was cut off at max_tokens={self.config.max_tokens}"
            # The endpoint may have cut or garbled it: then the same seed gives another text. The same text is the
            # model's own, and only another seed changes it.
            if reply.text == last:
                seed, last = seed + 1, None
            else:
                last = reply.text
        raise TeacherError(f"{answer.__name__}: no valid answer in {self.config.tries} tries; {problem}")

    def _request(self, answer: type[msgspec.Struct], prompt: str, seed: int) -> bytes:
        return msgspec.json.encode(
            {
                "model": self.config.model,
                "messages": [{"role": "user", "content": prompt}],
                "response_format": _response_format(answer),
                "temperature": self.config.temperature,
                "max_tokens": self.config.max_tokens,
                "seed": seed % 2**31,
            }
        )


@cache
def _response_format(answer: type[msgspec.Struct]) -> msgspec.Raw:
    """Encoded once: a schema is larger than many a prompt."""
    schema = {"name": prompt_name(answer), "schema": _self_contained_schema(answer), "strict": True}
    return msgspec.Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))


@cache
def _self_contained_schema(answer: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of an answer with its definitions beside it, as strict structured output wants it."""
    (reference,), definitions = msgspec.json.schema_components([answer], ref_template="#/$defs/{name}")
    root = dict(definitions[reference["$ref"].rpartition("/")[2]])
    root["$defs"] = definitions
    return root
