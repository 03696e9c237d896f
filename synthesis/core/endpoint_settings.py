"""Settings of an endpoint of models: address, limits, budgets, and the models of each role."""

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
    """A model that answers in one role, and how its requests differ from those of the other roles. A field that is None
    has the value of `OpenAITeacherConfig`.

    Attributes:
        base_url: URL of the endpoint, as in `OpenAITeacherConfig`.
        model: name of the model at that endpoint.
        api: API that the endpoint speaks. None: `openai` if `base_url` is set, else that of all roles.
        api_key: API key of the endpoint. None: no key if `base_url` is set, else that of all roles.
        weight: how often this model is chosen for a record, relative to the other models of the role.
        temperature: sampling temperature.
        max_tokens: maximum tokens of one answer, reasoning included.
        timeout_seconds: time limit of one request, in seconds.
        tries: number of bad answers before `TeacherError`.
        extra_body: additional fields of a request, merged with those of all roles; null removes a field.
        structured_output: see `OpenAITeacherConfig`.
        concurrency: maximum requests of this role in flight.
        requests_per_minute: rate limit of this role, in requests.
        tokens_per_minute: rate limit of this role, in tokens.
        price_prompt: price of a million prompt tokens. None: 0 if the model or its endpoint differs, else that of all
            roles.
        price_completion: price of a million completion tokens. None: as for `price_prompt`.
        given_as: see `OpenAITeacherConfig`.

    Raises:
        SettingError: a number is out of range, `extra_body` has a field that the client sets itself, or an endpoint has
            no model.
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
    """An endpoint of models (vLLM, SGLang, a hosted service) of any `api`.

    Requests are written in OpenAI's form, and translated for other APIs.

    Attributes:
        base_url: URL of the endpoint. It ends in `/v1` for `api="openai"`; for the others it is
            `https://api.anthropic.com` or `https://generativelanguage.googleapis.com`.
        model: name of the served model.
        api: API that the endpoint speaks. `anthropic` and `gemini` need the extra of that name.
        api_key: API key, sent as a bearer token; local servers accept any.
        temperature: sampling temperature.
        max_tokens: maximum tokens of one answer, reasoning included.
        timeout_seconds: time limit of one request, in seconds.
        tries: number of bad answers (truncated, malformed, or not of the schema) before `TeacherError`. Each try has
            another seed, and its prompt names the fault of the previous answer.
        extra_body: additional fields of every request, such as `{"chat_template_kwargs": {"enable_thinking": false}}`.
            null removes a field: `{"seed": null}` if a service refuses seeds.
        roles: models by role; of several models, one is chosen for each record by weight. All other roles use the
            settings here.
        judge_own_text: let a model judge its own text if the role has no other judge.
        structured_output: constraint that the endpoint enforces on answers: their JSON schema (strict structured
            output), any JSON (`json_object`), or nothing (`text`). In the latter two cases the prompt contains the
            schema. `auto` finds out with one request at the start.
        concurrency: maximum requests in flight.
        requests_per_minute: rate limit in requests. None: no limit.
        tokens_per_minute: rate limit in tokens, of prompts and answers. Estimated before a request and corrected by the
            `usage` of the answer. None: no limit.
        backoff_seconds: pause after the first failure of a request, in seconds (429, 5xx, a timeout, a dropped
            connection, or a body that is not a completion). It doubles with each failure, with jitter. `Retry-After` is
            honored.
        longest_backoff_seconds: upper limit of the pause between retries, in seconds.
        failures: number of failures of one request before `TeacherError`, while the endpoint answers other requests.
            429 does not count.
        max_unavailable_seconds: how long, in seconds, the endpoint may answer nothing before the run stops with
            `EndpointDown`. Also how long one request may get 429, while others are answered, before `TeacherError`. An
            address that has never answered is reported after 15 seconds, if nothing listens there or it does not speak
            the API.
        unusable_answers: number of answers of one kind, all unusable, after which the run stops.
        token_budget: maximum tokens of all requests, including those of earlier runs with the same recording. None: no
            limit.
        money_budget: maximum cost of all requests, including those of earlier runs with the same recording; needs
            prices. None: no limit.
        price_prompt: price of a million prompt tokens, in any one currency.
        price_completion: price of a million completion tokens, in the currency of `price_prompt`.
        given_as: how the user wrote a setting, by its name: `{"max_unavailable_seconds":
            "--teacher_max_unavailable_minutes=60"}`. Messages use these names; see `written`.

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
