"""The settings of an endpoint of chat completions, and of the requests of each role."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

from astra_jax.base.access import keyless
from astra_jax.base.proxies import via
from astra_jax.base.settings import (
    Amount,
    Bound,
    Count,
    Length,
    Rate,
    Seconds,
    SettingError,
    Settings,
    Temperature,
    TotalOrZero,
)
from synthesis.core.rate_limits import Budget

Role = Literal["author", "agent", "emulator", "user", "judge"]
"""Role of a model: author of tasks and worlds, agent that works on them, emulator of tool results, user who talks to
the agent, or judge."""

StructuredOutputSetting = Literal["auto", "json_schema", "json_object", "text"]

ApiName = Literal["openai", "anthropic", "gemini"]
"""The API of an endpoint: OpenAI's chat completions, Anthropic's messages, or Gemini's `generateContent`."""


@dataclass(frozen=True)
class RoleSettings(Settings):
    """A model that answers as one role, and how its requests differ from the others'. What is None is as for all.

    Attributes:
        base_url: where it is served, ending in `/v1`.
        model: its name there.
        api: of that address; None: `openai` where `base_url` is another.
        api_key: of that address; None: where `base_url` is another, none is sent.
        weight: how often it is drawn, beside the others of its role.
        temperature: of sampling.
        max_tokens: of one answer, thinking included.
        timeout_seconds: of one request.
        tries: bad answers before `TeacherError`.
        extra_body: further fields of a request, beside those for all; null leaves a field out.
        structured_output: see `OpenAITeacherConfig`.
        concurrency: requests of this role in flight at most.
        requests_per_minute: of this role.
        tokens_per_minute: of this role.
        price_prompt: of a million prompt tokens; None: 0 where the model or its address is another.
        price_completion: of a million completion tokens, likewise.
        given_as: see `OpenAITeacherConfig`.

    Raises:
        SettingError: a number is out of range, `extra_body` names what a request is about, or an address has no model.
    """

    base_url: str | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    weight: Annotated[float, Bound(above=0, most=1e12)] = 1.0
    temperature: Temperature | None = None
    max_tokens: Length | None = None
    timeout_seconds: Seconds | None = None
    tries: Count | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    structured_output: StructuredOutputSetting | None = None
    concurrency: Count | None = None
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    price_prompt: Amount | None = None
    price_completion: Amount | None = None
    api: ApiName | None = None
    given_as: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        keyless(self.base_url or "", "RoleSettings.base_url")
        _check_extra("RoleSettings", self.extra_body)
        if self.base_url is not None and not self.model:
            raise SettingError(f"RoleSettings.base_url is {self.base_url}: give model too, the name that it serves")


_OURS = frozenset({"model", "messages", "response_format", "tools", "tool_choice", "stream", "n"})
"""Fields of a request that are not settings: they define the question, or how its answer is read."""


def _check_extra(whose: str, extra: Mapping[str, Any]) -> None:
    if ours := sorted(_OURS & set(extra)):
        raise SettingError(f"{whose}.extra_body names {', '.join(ours)}, which a request decides itself; leave it out")


@dataclass(frozen=True)
class OpenAITeacherConfig(Settings):
    """An endpoint of models (vLLM, SGLang, a hosted service).

    Attributes:
        base_url: ends in `/v1` for `api="openai"`; `https://api.anthropic.com` and
            `https://generativelanguage.googleapis.com` for the other two.
        model: the served model's name.
        api: which API the endpoint speaks. `anthropic` and `gemini` need the extra of that name.
        api_key: sent as a bearer token; local servers take any.
        temperature: of sampling.
        max_tokens: of one answer, thinking included.
        timeout_seconds: of one request.
        tries: how many bad answers (cut or broken off, malformed, not of the schema) before `TeacherError`; each try
            has another seed and is told what was wrong.
        extra_body: further fields of every request, such as `{"chat_template_kwargs": {"enable_thinking": false}}`;
            null leaves a field out (`{"seed": null}` where a service refuses seeds).
        roles: who answers as a role: a model, or several of which one is drawn for each record by weight; a role that
            is not there is answered as all are.
        judge_own_text: let a model judge what it wrote itself, where no other judge is there.
        structured_output: how the endpoint enforces the structure of an answer: its JSON schema (strict structured
            output), JSON (`json_object`) or not at all (`text`). The prompts of the latter two have the schema. `auto`
            finds it with one request before the first.
        concurrency: requests in flight at most.
        requests_per_minute: None is no limit.
        tokens_per_minute: of prompts and answers; estimated before a request and corrected by the answer's `usage`.
            None is no limit.
        backoff_seconds: first pause after a failure (429, 5xx, a timeout, a dropped connection, a body that is no
            completion); doubles with each, up to `longest_backoff_seconds`, with jitter. `Retry-After` is honoured.
        longest_backoff_seconds: see there.
        failures: of one request, 429 apart, before `TeacherError`, where the endpoint meanwhile answers other requests.
        max_unavailable_seconds: how long the endpoint may answer nothing at all before the run stops with
            `EndpointDown`. And how long it may put one request off with 429, while it answers others, before
            `TeacherError`. If nothing was answered yet and nobody listens, or something other than the API answers,
            this is reported in 15 seconds.
        unusable_answers: answers of one kind of which none is usable before the run stops.
        token_budget: tokens of all requests, earlier runs with the same recording included; None is no cap.
        money_budget: the same in money; wants prices.
        price_prompt: of a million prompt tokens, in any one currency.
        price_completion: of a million completion tokens.
        given_as: how the user wrote a setting, by its name:
            `{"max_unavailable_seconds": "--teacher_max_unavailable_minutes=60"}`. Messages use it (see `written`).

    Raises:
        SettingError: a number is out of range, a role has no model, or a budget in money lacks prices.
    """

    base_url: str
    model: str
    api_key: str = field(default="EMPTY", repr=False)
    temperature: Temperature = 1.0
    max_tokens: Length = 16_384
    timeout_seconds: Seconds = 300.0
    tries: Count = 6
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[Role, tuple[RoleSettings, ...]] = field(default_factory=dict)
    judge_own_text: bool = False
    structured_output: StructuredOutputSetting = "auto"
    concurrency: Count = 256
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    backoff_seconds: Seconds = 0.5
    longest_backoff_seconds: Seconds = 60.0
    failures: Count = 12
    max_unavailable_seconds: Seconds = 3600.0
    unusable_answers: Count = 50
    token_budget: TotalOrZero | None = None
    money_budget: Amount | None = None
    price_prompt: Amount = 0.0
    price_completion: Amount = 0.0
    api: ApiName = "openai"
    given_as: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        keyless(self.base_url, "OpenAITeacherConfig.base_url")
        _check_extra("OpenAITeacherConfig", self.extra_body)
        if none := [role for role, models in self.roles.items() if not models]:
            raise SettingError(f"OpenAITeacherConfig.roles: {none[0]} has no model; give one, or leave the role out")
        if self.money_budget is None:
            return
        for role in get_args(Role):
            for one in self.models(role):
                if not (one.price_prompt or one.price_completion):
                    raise SettingError(
                        f"{self.written('money_budget')} needs prices for model {one.model} (role {role}): give "
                        '--teacher_prices=IN,OUT, or add "prices": [IN, OUT] to that role in --roles'
                    )

    def budget(self) -> Budget:
        """Return the caps on what all requests may cost, with nothing spent."""
        caps = [self.written(name) for name in ("token_budget", "money_budget") if getattr(self, name) is not None]
        return Budget(tokens=self.token_budget, money=self.money_budget, written=caps)

    def written(self, name: str) -> str:
        """Return a setting with its value as the user wrote it: `--teacher_url=http://…`, or `base_url=http://…`."""
        return self.given_as.get(name, f"{name}={getattr(self, name)}")

    @property
    def place(self) -> str:
        """Return the address for messages, with the proxy that the environment names for it."""
        return self.base_url + via(self.base_url)

    @property
    def described(self) -> dict[str, Any]:
        """Return the description of the model for cards: its name, its address without secrets, its sampling
        settings."""
        address = urllib.parse.urlsplit(self.base_url)
        port = f":{address.port}" if address.port else ""
        return {
            "model": self.model,
            **({} if self.api == "openai" else {"api": self.api}),
            "endpoint": f"{address.scheme}://{address.hostname}{port}{address.path}",
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **({"extra_body": dict(self.extra_body)} if self.extra_body else {}),
        }

    def models(self, role: Role) -> tuple[OpenAITeacherConfig, ...]:
        """Return the request settings of each model that may answer for a role."""
        return tuple(self._of(own) for own in self.roles.get(role, (RoleSettings(),)))

    def weights(self, role: Role) -> tuple[float, ...]:
        """Return the sampling weights of `models`."""
        return tuple(own.weight for own in self.roles.get(role, (RoleSettings(),)))

    def _of(self, own: RoleSettings) -> OpenAITeacherConfig:
        given = {name: value for name, value in vars(own).items() if value is not None and name != "weight"}
        others: dict[str, Any] = {
            "money_budget": None,
            "extra_body": {**self.extra_body, **own.extra_body},
            "given_as": {**self.given_as, **own.given_as},
        }
        if own.base_url not in (None, self.base_url) or own.model not in (None, self.model):
            others |= {"price_prompt": own.price_prompt or 0.0, "price_completion": own.price_completion or 0.0}
        if own.base_url not in (None, self.base_url):
            # A key and an API belong to one address.
            others |= {"api_key": own.api_key or "EMPTY", "api": own.api or "openai"}
        return replace(self, **{**given, **others, "roles": {}})
