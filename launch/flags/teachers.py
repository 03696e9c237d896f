"""Flags of every synthesis program: the teacher's endpoint, and the embedder of tool documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from absl import flags

from astra_jax.base.settings import (
    Amount,
    Count,
    Length,
    Minutes,
    Rate,
    Seconds,
    SettingError,
    Temperature,
    TotalOrZero,
)
from launch.flags import cli, roles
from launch.flags.numbers import number_flag, numbers_of

if TYPE_CHECKING:  # --help does not wait for them
    from synthesis.core.endpoint_settings import ApiName, StructuredOutputSetting
    from synthesis.pipeline.embedding import Embedder
    from synthesis.pipeline.preview import Affordable, Expected
    from synthesis.pipeline.teacher import Mode, OpenAITeacher, Teacher

_OWN = flags.DEFINE_string(
    "teacher", None, "A teacher of your own, my_module:MyTeacher, in place of an endpoint; docs/extending.md."
)
_URL = flags.DEFINE_string(
    "teacher_url",
    None,
    "Address of the teacher's endpoint, ending in /v1 for OpenAI-compatible services; by default the offline teacher.",
)
_API = flags.DEFINE_enum(
    "teacher_api",
    "openai",
    ["openai", "anthropic", "gemini"],
    "API of the teacher's endpoint. For anthropic (https://api.anthropic.com) and gemini "
    "(https://generativelanguage.googleapis.com) install the extra of that name.",
)
_MODEL = flags.DEFINE_string("teacher_model", None, "Name of the model that --teacher_url serves.")
_KEY_FILE = flags.DEFINE_string("teacher_key_file", None, "File whose first line is the API key of --teacher_url.")
_TEMPERATURE = number_flag("teacher_temperature", 1.0, Temperature, "Sampling temperature of the teacher; 0 is greedy.")
_MAX_TOKENS = number_flag(
    "teacher_max_tokens", 16_384, Length, "Maximum tokens of one teacher answer, reasoning included."
)
_TIMEOUT = number_flag("teacher_timeout_seconds", 300.0, Seconds, "Time limit of one request, in seconds.")
_TRIES = number_flag("teacher_tries", 6, Count, "Maximum requests for one usable answer.")
_EXTRA_BODY = flags.DEFINE_string(
    "teacher_extra_body",
    None,
    'Additional fields of every request, as JSON, for example {"reasoning_effort": "low"}; null removes a field.',
)
_PROMPTS = flags.DEFINE_string(
    "prompts",
    None,
    "Folder of your own prompts, LANGUAGE/NAME.jinja, which replace those of the same names in synthesis/prompts.",
)
_STRUCTURED_OUTPUT = flags.DEFINE_enum(
    "teacher_structured_output",
    "auto",
    ["auto", "json_schema", "json_object", "text"],
    "Form of answers that the endpoint enforces: a JSON schema, any JSON, or nothing; auto finds out with one request. "
    "Without an enforced schema, the prompt contains it.",
)
_CONCURRENCY = number_flag("teacher_concurrency", 256, Count, "Maximum requests in flight.")
_REQUESTS = number_flag("teacher_requests_per_minute", None, Rate, "Rate limit in requests; by default none.")
_TOKENS = number_flag(
    "teacher_tokens_per_minute", None, Rate, "Rate limit in tokens of prompts and answers; by default none."
)
_UNUSABLE = number_flag(
    "teacher_unusable_answers",
    50,
    Count,
    "Number of answers of one kind after which the run stops if less than one in a hundred is usable.",
)
_UNAVAILABLE = number_flag(
    "teacher_max_unavailable_minutes",
    60.0,
    Minutes,
    "Minutes without any answer of the endpoint after which the run stops.",
)
_TOKEN_BUDGET = number_flag(
    "teacher_token_budget",
    None,
    TotalOrZero,
    "Stop after this many tokens, earlier starts of the run included; by default no limit.",
)
_MONEY_BUDGET = number_flag(
    "teacher_money_budget",
    None,
    Amount,
    "Stop after this much money (needs --teacher_prices), earlier starts of the run included; by default no limit.",
)
_PRICES = flags.DEFINE_list(
    "teacher_prices",
    None,
    "Prices of a million prompt tokens and a million answer tokens, for example 0.5,2; in any currency.",
)
RECORDING = flags.DEFINE_string(
    "teacher_recording",
    None,
    "SQLite file that records answers and costs; runs may share it. By default teacher.sqlite in the workdir.",
)
_MODE = flags.DEFINE_enum(
    "teacher_mode",
    "record",
    ["off", "record", "replay"],
    "record: store all answers in --teacher_recording, and request only those not stored yet. replay: send no "
    "requests, "
    "and fail for an answer that is not stored. off: store nothing.",
)
_OF_THE_TEACHER: tuple[flags.FlagHolder[Any], ...] = (
    _API, _TEMPERATURE, _MAX_TOKENS, _TIMEOUT, _TRIES, _EXTRA_BODY, _PROMPTS, _STRUCTURED_OUTPUT, roles.JUDGE_OWN,
    _CONCURRENCY, _REQUESTS, _TOKENS, _UNAVAILABLE, _UNUSABLE, _TOKEN_BUDGET, _MONEY_BUDGET, _PRICES, RECORDING, _MODE,
)  # fmt: skip
_WRITTEN: Mapping[str, flags.FlagHolder[Any]] = {
    "base_url": _URL, "model": _MODEL, "api_key": _KEY_FILE, "api": _API, "max_tokens": _MAX_TOKENS,
    "unusable_answers": _UNUSABLE, "token_budget": _TOKEN_BUDGET, "money_budget": _MONEY_BUDGET,
}  # fmt: skip
"""Flag of each setting that messages about an endpoint name."""


def teacher_from_flags(workdir: Path) -> Teacher:
    """Return the teacher of --teacher, else the one behind --teacher_url, else the offline teacher.

    Raises:
        InputError: as `load_teacher`.
        cli.UsageError, InputError: as `endpoint_from_flags`.
    """
    from synthesis.pipeline.teacher import load_teacher

    if _OWN.value is not None:
        instead = f"is for an endpoint, and --{_OWN.name}={_OWN.value} takes its place: leave one of them out"
        cli.refuse_unused((_URL, _MODEL, _KEY_FILE, *_OF_THE_TEACHER), instead)
        if asked := list(roles.roles_from_flags()):
            raise cli.UsageError(f"--{roles.ROLES.name} names {asked[0]}, which {instead}")
        return load_teacher(_OWN.value)
    if (endpoint := endpoint_from_flags(workdir)) is not None:
        return endpoint
    from synthesis.offline.teacher import OfflineTeacher  # the demo: only where it is asked for

    return OfflineTeacher()


def budget_of(teacher: Teacher, wanted: int, expected: Callable[[int], Expected]) -> Affordable | None:
    """Return the budget of a teacher for a forecast; None without a budget. See `Affordable`."""
    from synthesis.pipeline.preview import Affordable
    from synthesis.pipeline.teacher import OpenAITeacher

    if not isinstance(teacher, OpenAITeacher):
        return None
    tokens, money = teacher.config.token_budget, teacher.config.money_budget
    if tokens is None and money is None:
        return None
    return Affordable(math.inf if tokens is None else tokens, math.inf if money is None else money, wanted, expected)


def print_budget(teacher: Teacher, wanted: int, noun: str) -> None:
    """Print what the budget leaves for each wanted record, before a run starts; nothing without a budget."""
    from astra_jax.base.progress import log_above_progress
    from synthesis.pipeline.teacher import OpenAITeacher

    if not isinstance(teacher, OpenAITeacher) or not wanted:
        return
    spent = teacher.spent
    for flag, cap, used, form in (
        (_TOKEN_BUDGET, teacher.config.token_budget, spent.tokens, ",.0f"),
        (_MONEY_BUDGET, teacher.config.money_budget, spent.money, ",.4g"),
    ):
        if cap is not None:
            before = f" ({used:{form}} spent by earlier starts)" if used else ""
            log_above_progress(
                f"--{flag.name}={flag.value}: {max(0.0, cap - used) / wanted:{form}} for each of {wanted:,} {noun}"
                f"{before}. To see how many it buys, run the same command with --preview=5"
            )


def endpoint_from_flags(workdir: Path) -> OpenAITeacher | None:
    """Return the teacher behind an endpoint; None for the offline teacher.

    Args:
        workdir: folder of the run, for its costs and recorded answers.

    Raises:
        cli.UsageError: flags contradict each other or have bad values.
        InputError: a model would judge its own text, or one of the user's prompts is invalid.
    """
    from synthesis.core.recording import Recording
    from synthesis.pipeline.model_router import ModelRouter
    from synthesis.pipeline.prompts import read_prompts
    from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig

    url, model, key = _endpoint()
    if not url:
        return None
    path = Path(RECORDING.value or workdir / "teacher.sqlite").absolute()
    prices = numbers_of(_PRICES, Amount) or [0.0, 0.0]
    if len(prices) != 2:
        raise cli.UsageError(f"--{_PRICES.name}={','.join(_PRICES.value or [])}: write two numbers, as 0.5,2")
    try:
        config = OpenAITeacherConfig(
            url,
            model,
            key,
            api=cast("ApiName", _API.value),
            temperature=_TEMPERATURE.value,
            max_tokens=_MAX_TOKENS.value,
            timeout_seconds=_TIMEOUT.value,
            tries=_TRIES.value,
            extra_body=_json_of(_EXTRA_BODY, dict[str, Any]) or {},
            roles=roles.roles_from_flags(),
            judge_own_text=roles.JUDGE_OWN.value,
            structured_output=cast("StructuredOutputSetting", _STRUCTURED_OUTPUT.value),
            concurrency=_CONCURRENCY.value,
            requests_per_minute=_REQUESTS.value,
            tokens_per_minute=_TOKENS.value,
            max_unavailable_seconds=_UNAVAILABLE.value * 60,
            unusable_answers=_UNUSABLE.value,
            token_budget=_TOKEN_BUDGET.value,
            money_budget=_MONEY_BUDGET.value,
            price_prompt=prices[0],
            price_completion=prices[1],
            given_as={name: f"--{flag.name}={flag.value}" for name, flag in _WRITTEN.items()},
        )
    except SettingError as error:
        raise cli.UsageError(str(error).replace("OpenAITeacherConfig.", "--teacher_")) from None
    ModelRouter.of(config).check()
    prompts = read_prompts(Path(_PROMPTS.value)) if _PROMPTS.value is not None else None
    return OpenAITeacher(config, Recording(path), cast("Mode", _MODE.value), prompts)


def _json_of(flag: flags.FlagHolder[str | None], kind: Any) -> Any:
    """Return the decoded JSON of a flag; None without the flag. Raises `cli.UsageError`."""
    import msgspec

    from astra_jax.base.typed import decode_json

    if flag.value is None:
        return None
    try:
        return decode_json(flag.value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise cli.UsageError(f"--{flag.name}={flag.value}: {error}") from None


def embedder_from_flags() -> Embedder:
    """Return the embedder of tool documents. Raises `cli.UsageError`."""
    from synthesis.pipeline.embedding import EndpointEmbedder, SentenceEmbedder

    config = roles.embedder_from_flags()
    return SentenceEmbedder() if config is None else EndpointEmbedder(config)


def _endpoint() -> tuple[str, str, str]:
    """Return URL, model and key of the teacher; all are "" without a URL."""
    if not _URL.value:
        cli.refuse_unused((_MODEL, _KEY_FILE, *_OF_THE_TEACHER), f"is for an endpoint: give --{_URL.name} too")
        if asked := list(roles.roles_from_flags()):
            raise cli.UsageError(
                f"--{roles.ROLES.name} names {asked[0]}, but no model answers in the other roles; give --{_URL.name} "
                "too"
            )
        return "", "", ""
    if not _URL.value.startswith(("http://", "https://")):
        raise cli.UsageError(f"--{_URL.name}={_URL.value}: write http://HOST:PORT/v1")
    if not _MODEL.value:
        raise cli.UsageError(f"--{_URL.name} needs --{_MODEL.name}, the name of the served model; give it too")
    return _URL.value, _MODEL.value, cli.token_of(_KEY_FILE) or "EMPTY"
