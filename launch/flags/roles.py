"""`--roles`: the models of each role in synthesis, as JSON on the command line or in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from absl import flags

from astra_jax.base.former_settings import todays_name
from astra_jax.base.settings import SettingError
from launch.flags import cli

if TYPE_CHECKING:  # --help does not wait for them
    from synthesis.core.endpoint_settings import Role, RoleSettings
    from synthesis.pipeline.embedding import EndpointConfig

ROLES = flags.DEFINE_string(
    "roles",
    None,
    "Models of roles that --teacher_model does not answer (author, agent, emulator, user, judge, embedder): JSON, or a "
    'file with JSON, for example {"judge": {"url": "http://HOST:8000/v1", "model": "NAME", "key_file": "FILE", '
    '"temperature": 0}}. A role may have a list of models, of which one is sampled by weight for each record, and any '
    "setting of the --teacher_* flags.",
)
JUDGE_OWN = flags.DEFINE_bool("judge_own_text", False, "Let a model judge its own text; refused by default.")

_EMBEDDER = "embedder"
_NAMES: Mapping[str, str] = {"url": "base_url", "key_file": "api_key"}
"""Field of `--roles` → name of the setting."""
_OF_A_ROLE = (
    "url", "model", "key_file", "weight", "temperature", "max_tokens", "timeout_seconds", "tries", "extra_body",
    "structured_output", "concurrency", "requests_per_minute", "tokens_per_minute", "prices", "api",
)  # fmt: skip
_OF_THE_EMBEDDER = ("url", "model", "key_file", "batch", "timeout_seconds", "tries")


def roles_from_flags() -> dict[Role, tuple[RoleSettings, ...]]:
    """Return the chat roles of --roles. Raises `cli.UsageError`."""
    from synthesis.core.endpoint_settings import RoleSettings

    given = {role: models for role, models in _read().items() if role != _EMBEDDER}
    return {role: tuple(_made(RoleSettings, role, one, _OF_A_ROLE) for one in models) for role, models in given.items()}


def embedder_from_flags() -> EndpointConfig | None:
    """Return the embeddings endpoint of --roles, or None. Raises `cli.UsageError`."""
    from synthesis.pipeline.embedding import EndpointConfig

    models = _read().get(_EMBEDDER, [])
    if not models:
        return None
    if len(models) > 1:
        raise _wrong(
            f"{_EMBEDDER} has {len(models)} models, but vectors of different models cannot be compared; give one"
        )
    if missing := [name for name in ("url", "model") if not models[0].get(name)]:
        raise _wrong(f"{_EMBEDDER} has no {missing[0]}")
    return _made(EndpointConfig, _EMBEDDER, models[0], _OF_THE_EMBEDDER)


def _read() -> dict[Any, list[dict[str, Any]]]:
    """Return the models of each role as the user wrote them."""
    import msgspec

    from astra_jax.base.typed import decode_json
    from synthesis.core.endpoint_settings import Role

    if ROLES.value is None:
        return {}
    try:
        text = ROLES.value if ROLES.value.lstrip().startswith("{") else Path(ROLES.value).read_text(encoding="utf-8")
        given = decode_json(text, dict[str, dict[str, Any] | list[dict[str, Any]]])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _wrong(str(error)) from None
    except OSError as error:
        raise _wrong(f"{error.strerror}; give JSON, or the name of a file with JSON") from None
    known = (*get_args(Role), _EMBEDDER)
    if unknown := [role for role in given if role not in known]:
        raise _wrong(f"there is no role {unknown[0]!r}; there are {', '.join(known)}")
    return {role: models if isinstance(models, list) else [models] for role, models in given.items()}


def _made(kind: type[Any], role: str, given: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the settings of a model, of class `kind`."""
    if unknown := [name for name in given if name not in names]:
        if (today := todays_name(unknown[0])) in names:
            raise _wrong(f"{role}.{unknown[0]}: this setting is called {today} now")
        raise _wrong(f"{role} has no setting {unknown[0]!r}; there are {', '.join(names)}")
    settings = {_NAMES.get(name, name): value for name, value in given.items() if name != "prices"}
    url, file, prices = given.get("url"), given.get("key_file"), given.get("prices")
    if url is not None and not (isinstance(url, str) and url.startswith(("http://", "https://"))):
        raise _wrong(f"{role}.url is {url!r}: write http://HOST:PORT/v1")
    if file is not None:
        settings["api_key"] = cli.token_in(str(file), f"--{ROLES.name}: {role}.key_file")
    if prices is not None:
        if not isinstance(prices, list) or len(prices) != 2:
            raise _wrong(f"{role}.prices is {prices!r}: write two numbers, as [0.5, 2]")
        settings |= {"price_prompt": prices[0], "price_completion": prices[1]}
    if kind.__name__ == "RoleSettings":
        settings["given_as"] = {
            _NAMES.get(name, name): f"{name}={value} of role {role} in --{ROLES.name}" for name, value in given.items()
        }
    try:
        return kind(**settings)
    except SettingError as error:
        said = str(error).removeprefix(f"{kind.__name__}.")
        raise _wrong(f"{role}.{re.sub('^base_url', 'url', said)}") from None


def _wrong(what: str) -> cli.UsageError:
    return cli.UsageError(f"--{ROLES.name}: {what}")
