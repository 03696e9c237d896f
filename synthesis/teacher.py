"""The teacher: one client for every model call that synthesis makes.

A request is an answer type (a `msgspec.Struct`, whose JSON schema the endpoint enforces), the variables of its prompt,
a language and a seed. Prompts are files, `prompts/<language>/<snake_case name of the answer type>.jinja`.
Fail closed: an answer that does not fit its schema is asked for again, then `TeacherError`; it is never scored as good.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jinja2
import msgspec

from synthesis.records import Language

PROMPTS = Path(__file__).parent / "prompts"

T = TypeVar("T", bound=msgspec.Struct)


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


def prompt_name(answer: type[msgspec.Struct]) -> str:
    """`TaskScoresAnswer` -> `task_scores_answer`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", answer.__name__).lower()


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PROMPTS), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
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


@dataclass(frozen=True)
class OpenAITeacherConfig:
    """An OpenAI-compatible endpoint (vLLM, SGLang, a hosted service).

    Attributes:
        base_url: ends in `/v1`.
        model: the served model's name.
        api_key: sent as a bearer token; local servers take any.
        temperature: of sampling.
        max_tokens: of one answer, thinking included.
        timeout_seconds: of one request.
        tries: how often a request is made before `TeacherError`.
    """

    base_url: str
    model: str
    api_key: str = "EMPTY"
    temperature: float = 1.0
    max_tokens: int = 16_384
    timeout_seconds: float = 300.0
    tries: int = 4


class OpenAITeacher:
    """A `Teacher` behind an OpenAI-compatible endpoint, with the answer's JSON schema as `response_format`."""

    def __init__(self, config: OpenAITeacherConfig) -> None:
        import openai  # half a second, and the offline teacher needs none of it

        self.config = config
        self._refused = openai.APIStatusError
        self._passing = (openai.RateLimitError, openai.APIConnectionError, openai.InternalServerError)
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url, api_key=config.api_key, timeout=config.timeout_seconds, max_retries=0
        )

    async def ask(self, answer: type[T], variables: Mapping[str, Any], *, language: Language, seed: int) -> T:
        prompt = render_prompt(answer, variables, language)
        schema = _self_contained_schema(answer)
        problem = ""
        for attempt in range(self.config.tries):
            try:
                response = await self._client.chat.completions.create(
                    model=self.config.model,
                    messages=[{"role": "user", "content": prompt}],
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": prompt_name(answer), "schema": schema, "strict": True},
                    },
                    temperature=self.config.temperature,
                    max_tokens=self.config.max_tokens,
                    # Another seed for another try: the same one would give the same bad answer.
                    seed=(seed + attempt) % 2**31,
                )
                return msgspec.json.decode(strip_answer(response.choices[0].message.content or ""), type=answer)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                problem = f"the answer does not fit its schema: {error}"
            except self._passing as error:
                problem = f"the endpoint failed: {error}"
                await asyncio.sleep(min(30.0, 0.5 * 2**attempt))
            except self._refused as error:
                raise TeacherError(f"{answer.__name__}: {self.config.base_url} refused the request: {error}") from None
        raise TeacherError(f"{answer.__name__}: no valid answer in {self.config.tries} tries; {problem}")


@cache
def _self_contained_schema(answer: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of an answer with its definitions beside it, as strict structured output wants it."""
    (reference,), definitions = msgspec.json.schema_components([answer], ref_template="#/$defs/{name}")
    root = dict(definitions[reference["$ref"].rpartition("/")[2]])
    root["$defs"] = definitions
    return root
