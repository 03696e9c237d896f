"""The flags of every program that synthesises: who answers its requests, and who embeds its tool documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from absl import flags

from launch import cli

if TYPE_CHECKING:  # --help does not wait for them
    from synthesis.environments.embedding import Embedder
    from synthesis.teacher import Teacher

_URL = flags.DEFINE_string(
    "teacher_url", None, "OpenAI-compatible endpoint of the teacher, ending in /v1; by default the offline teacher."
)
_MODEL = flags.DEFINE_string("teacher_model", None, "The served model's name; with --teacher_url.")
_KEY_FILE = flags.DEFINE_string("teacher_key_file", None, "File whose first line is the endpoint's key.")
_EMBEDDER_URL = flags.DEFINE_string(
    "embedder_url", None, "OpenAI-compatible endpoint for embeddings, ending in /v1; by default a small packaged model."
)
_EMBEDDER_MODEL = flags.DEFINE_string("embedder_model", None, "Its model's name; with --embedder_url.")
_EMBEDDER_KEY_FILE = flags.DEFINE_string("embedder_key_file", None, "File whose first line is its key.")


def teacher_from_flags() -> Teacher:
    """The teacher. Raises `cli.UsageError`."""
    from synthesis.offline.teacher import OfflineTeacher
    from synthesis.teacher import OpenAITeacher, OpenAITeacherConfig

    url, model, key = _endpoint(_URL, _MODEL, _KEY_FILE)
    return OpenAITeacher(OpenAITeacherConfig(url, model, key)) if url else OfflineTeacher()


def embedder_from_flags() -> Embedder:
    """The embedder of tool documents. Raises `cli.UsageError`."""
    from synthesis.environments.embedding import EndpointConfig, EndpointEmbedder, SentenceEmbedder

    url, model, key = _endpoint(_EMBEDDER_URL, _EMBEDDER_MODEL, _EMBEDDER_KEY_FILE)
    return EndpointEmbedder(EndpointConfig(url, model, key)) if url else SentenceEmbedder()


def _endpoint(
    url: flags.FlagHolder[str | None], model: flags.FlagHolder[str | None], key_file: flags.FlagHolder[str | None]
) -> tuple[str, str, str]:
    """Address, model and key; all "" without an address."""
    if not url.value:
        if given := next((flag.name for flag in (model, key_file) if flag.value), None):
            raise cli.UsageError(f"--{given} is for an endpoint: give --{url.name} too")
        return "", "", ""
    if not url.value.startswith(("http://", "https://")):
        raise cli.UsageError(f"--{url.name}={url.value}: write http://HOST:PORT/v1")
    if not model.value:
        raise cli.UsageError(f"--{url.name} wants --{model.name}, the name under which the model is served")
    return url.value, model.value, cli.token_of(key_file) or "EMPTY"
