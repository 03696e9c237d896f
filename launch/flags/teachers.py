"""The flags of every program that synthesises: who answers its requests, and who embeds its tool documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from absl import flags

from launch.flags import cli
from launch.flags.numbers import number_flag, numbers_of
from sandbox.settings import Amount, Count, Minutes, Rate, SettingError, TotalOrZero

if TYPE_CHECKING:  # --help does not wait for them
    from synthesis.pipeline.embedding import Embedder
    from synthesis.pipeline.teacher import Mode, OpenAITeacher, OpenAITeacherConfig

_URL = flags.DEFINE_string(
    "teacher_url", None, "OpenAI-compatible endpoint of the teacher, ending in /v1; by default the offline teacher."
)
_MODEL = flags.DEFINE_string("teacher_model", None, "The served model's name; with --teacher_url.")
_KEY_FILE = flags.DEFINE_string("teacher_key_file", None, "File whose first line is the endpoint's key.")
_CONCURRENCY = number_flag("teacher_concurrency", 256, Count, "Requests in flight at most.")
_REQUESTS = number_flag("teacher_requests_per_minute", None, Rate, "Rate limit; by default none.")
_TOKENS = number_flag("teacher_tokens_per_minute", None, Rate, "Rate limit, prompts and answers; by default none.")
_OUTAGE = number_flag(
    "teacher_outage_minutes", 60.0, Minutes, "How long the endpoint may answer nothing before the run stops."
)
_TOKEN_BUDGET = number_flag(
    "teacher_token_budget",
    None,
    TotalOrZero,
    "Tokens of the whole run, restarts included; when they are spent it stops.",
)
_MONEY_BUDGET = number_flag("teacher_money_budget", None, Amount, "The same in money, at the prices given.")
_PRICES = flags.DEFINE_list(
    "teacher_prices", None, "Prices of a million prompt tokens and a million answer tokens, as 0.5,2; any currency."
)
_RECORDING = flags.DEFINE_string(
    "teacher_recording", None, "SQLite file of answers and of what was spent; by default teacher.sqlite in the workdir."
)
_MODE = flags.DEFINE_enum(
    "teacher_mode",
    "off",
    ["off", "record", "replay"],
    "record: keep all answers, and ask only for those not kept yet. replay: ask nothing, the answers are all kept.",
)
_EMBEDDER_URL = flags.DEFINE_string(
    "embedder_url", None, "OpenAI-compatible endpoint for embeddings, ending in /v1; by default a small packaged model."
)
_EMBEDDER_MODEL = flags.DEFINE_string("embedder_model", None, "Its model's name; with --embedder_url.")
_EMBEDDER_KEY_FILE = flags.DEFINE_string("embedder_key_file", None, "File whose first line is its key.")


_OF_THE_TEACHER: tuple[flags.FlagHolder[Any], ...] = (
    _CONCURRENCY, _REQUESTS, _TOKENS, _OUTAGE, _TOKEN_BUDGET, _MONEY_BUDGET, _PRICES, _RECORDING, _MODE,
)  # fmt: skip


def endpoint_maker_from_flags(workdir: Path) -> Callable[[], OpenAITeacher] | None:
    """What makes the teacher behind an endpoint, here or (it can be pickled) in another process; None: the offline one.

    Args:
        workdir: of the run: where it is noted what was spent, and answers where they are recorded.

    Raises:
        cli.UsageError: flags contradict each other or have bad values.
    """
    from synthesis.pipeline.teacher import OpenAITeacherConfig

    url, model, key = _endpoint(_URL, _MODEL, _KEY_FILE, *_OF_THE_TEACHER)
    if not url:
        return None
    path = Path(_RECORDING.value or workdir / "teacher.sqlite").absolute()
    prices = numbers_of(_PRICES, Amount) or [0.0, 0.0]
    if len(prices) != 2:
        raise cli.UsageError(f"--{_PRICES.name}={','.join(_PRICES.value or [])}: write two numbers, as 0.5,2")
    try:
        config = OpenAITeacherConfig(
            url,
            model,
            key,
            concurrency=_CONCURRENCY.value,
            requests_per_minute=_REQUESTS.value,
            tokens_per_minute=_TOKENS.value,
            outage_seconds=_OUTAGE.value * 60,
            token_budget=_TOKEN_BUDGET.value,
            money_budget=_MONEY_BUDGET.value,
            price_prompt=prices[0],
            price_completion=prices[1],
        )
    except SettingError as error:
        raise cli.UsageError(f"--teacher_*: {error}") from None
    return partial(_endpoint_teacher, config, path, cast("Mode", _MODE.value))


def _endpoint_teacher(config: OpenAITeacherConfig, recording: Path, mode: Mode) -> OpenAITeacher:
    from synthesis.core.recording import Recording
    from synthesis.pipeline.teacher import OpenAITeacher

    return OpenAITeacher(config, Recording(recording), mode)


def embedder_maker_from_flags() -> Callable[[], Embedder]:
    """What makes the embedder of tool documents, here or in another process. Raises `cli.UsageError`."""
    from synthesis.pipeline.embedding import EndpointConfig, EndpointEmbedder, SentenceEmbedder

    url, model, key = _endpoint(_EMBEDDER_URL, _EMBEDDER_MODEL, _EMBEDDER_KEY_FILE)
    return partial(EndpointEmbedder, EndpointConfig(url, model, key)) if url else SentenceEmbedder


def _endpoint(
    url: flags.FlagHolder[str | None],
    model: flags.FlagHolder[str | None],
    key_file: flags.FlagHolder[str | None],
    *others: flags.FlagHolder[Any],
) -> tuple[str, str, str]:
    """Address, model and key; all "" without an address."""
    if not url.value:
        if given := next((flag.name for flag in (model, key_file, *others) if flag.value != flag.default), None):
            raise cli.UsageError(f"--{given} is for an endpoint: give --{url.name} too")
        return "", "", ""
    if not url.value.startswith(("http://", "https://")):
        raise cli.UsageError(f"--{url.name}={url.value}: write http://HOST:PORT/v1")
    if not model.value:
        raise cli.UsageError(f"--{url.name} wants --{model.name}, the name under which the model is served")
    return url.value, model.value, cli.token_of(key_file) or "EMPTY"
