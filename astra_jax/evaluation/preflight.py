"""Check of an endpoint before anything runs: does it answer, with this key and as this model?"""

from __future__ import annotations

import json

import aiohttp
import msgspec

from astra_jax.base.http_responses import read_answer
from astra_jax.base.proxies import may_be_proxied, via
from astra_jax.base.typed import decode_any_json
from astra_jax.evaluation.suite import EvaluationError, Limit, ModelEndpoint
from synthesis.core.endpoint_replies import error_problem

_SECONDS = 60.0
_TOKENS: dict[Limit, int] = {"max_tokens": 1, "max_completion_tokens": 1_024}
"""Token limit of the requested completion. With the newer field reasoning counts, and some models refuse a limit in
which none fits."""


async def check(served: ModelEndpoint, flag: str) -> ModelEndpoint:
    """Request a short completion, with the newer field for its limit if the endpoint says so.

    Args:
        served: the model; if `model` is "", the only one that the endpoint serves.
        flag: flag of the endpoint, for messages. The flags of the model's name and the key's file start alike
            (`--user_url`, `--user_model`, `--user_key_file`).

    Returns:
        The endpoint with the model's name, and the field for limits that it accepts.

    Raises:
        EvaluationError: the endpoint cannot be reached, refuses the key, or does not serve the model.
    """
    role = flag.removesuffix("_url")
    named = role if role == "model" else f"{role}_model"
    shown = f"--{flag}={served.url}{via(served.url)}"
    headers = {"Authorization": f"Bearer {served.key}"}
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, trust_env=may_be_proxied(served.url)) as session:
        try:
            names = await _models(session, served.url)
            model = served.model or (names[0] if len(names) == 1 else "")
            if not model:
                raise EvaluationError(f"{shown} serves {_shown(names)}; name one with --{named}")
            limit: Limit = "max_tokens"
            status, text = await _asked(session, served.url, model, limit)
            if status == 400 and "max_completion_tokens" in text:
                limit = "max_completion_tokens"
                status, text = await _asked(session, served.url, model, limit)
        except TimeoutError:
            raise EvaluationError(f"{shown} has not answered in {_SECONDS:g} s; is it up?") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EvaluationError(f"{shown} cannot be reached ({error}); is it up?") from None
    if status in (401, 403):
        raise EvaluationError(f"{shown} refuses the key ({status}); give it with --{role}_key_file")
    if status == 404 or (status == 400 and model in text and "model" in text.lower()):
        raise EvaluationError(f"--{named}={model} is not served by {served.url}, which has {_shown(names)}")
    if status != 200:
        raise EvaluationError(f"{shown} answered {status} to a request of one token: {text[:300]}")
    if not _is_completion(text):
        raise EvaluationError(
            f"{shown} answered a request of one token without a completion: {text[:300]}; give the "
            "address of the API, which ends in /v1 for most services"
        )
    return ModelEndpoint(served.url, model, served.key, limit)


async def _asked(session: aiohttp.ClientSession, url: str, model: str, limit: Limit) -> tuple[int, str]:
    """Request a completion; return status and body."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi."}], limit: _TOKENS[limit]}
    async with session.post(f"{url}/chat/completions", json=body, allow_redirects=False) as response:
        return response.status, (await read_answer(response)).decode(errors="replace")


def _is_completion(text: str) -> bool:
    """Return whether a body with status 200 is a completion, and not an error or a web page."""
    try:
        given = decode_any_json(text)
    except (msgspec.DecodeError, UnicodeError):
        return False
    return isinstance(given, dict) and isinstance(given.get("choices"), list) and error_problem(given) is None


async def _models(session: aiohttp.ClientSession, url: str) -> list[str]:
    """Return the served names; none if the endpoint does not list them."""
    async with session.get(f"{url}/models", allow_redirects=False) as response:
        if response.status != 200:
            return []
        listed = json.loads((await read_answer(response)).decode(errors="replace"))
    data = listed.get("data") if isinstance(listed, dict) else None
    return [str(one["id"]) for one in data or [] if isinstance(one, dict) and "id" in one]


def _shown(names: list[str]) -> str:
    few = ", ".join(names[:8])
    return f"{len(names)} models ({few}{', ...' if len(names) > 8 else ''})" if names else "an unknown set of models"
