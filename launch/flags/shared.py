"""Flags that several programs have, each defined once: one name, one type, one meaning.

    _WEIGHTS = shared.weights()

A program may add to the first words of a help text, which are the same everywhere (`tests/launch/test_flags.py`).
Former names of flags are in `RENAMED`: they are refused with the current name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import flags

from launch.flags.numbers import number_flag
from sandbox.settings import CountOrZero, Port, Seed

flags.disclaim_key_flags()  # a flag belongs to the module that asks for it

_Text = flags.FlagHolder[str | None]

DTYPES = ("bfloat16", "float32")
UNISOLATED = "D"
"""Sandbox tier whose only protection is rlimits."""

RENAMED: Mapping[str, str] = {
    "api_key_file": "key_file",
    "allow_unisolated": "sandbox_tier",
    "data.accept": "accept",
    "data.preview": "preview",
    "data.skip_bad": "skip_bad",
    "dataset": "data",
    "endpoint": "model_url",
    "extra": "extra_body",
    "host": "host_index",
    "json": "figures",
    "judge_endpoint": "judge_url",
    "key_file": "model_key_file",
    "minimum_tier": "sandbox_tier",
    "output": "page",
    "rollout_request_seconds": "rollout_timeout_seconds",
    "rollout_urls": "rollout_url",
    "sandbox_token_file": "sandbox_key_file",
    "timeout_minutes": "timeout_seconds",
    "to": "repository",
    "token_file": "key_file",
    "user_endpoint": "user_url",
}
"""Current names of flags by their former names, for the programs that have them."""


def todays_flag(name: str) -> str | None:
    """Return the current name of a program's flag, given a former name; None if it never had such a flag."""
    today = RENAMED.get(name)
    return today if today is not None and today in flags.FLAGS else None


def workdir(more: str = "made if it is not there.", *, required: bool = True) -> _Text:
    """Define the flag of a run's folder.

    Args:
        more: text after the first words of the help.
        required: False if the folder may be given without the flag's name.
    """
    return flags.DEFINE_string("workdir", None, f"Folder of the run; {more}", required=required)


def seed(of: str = "") -> flags.FlagHolder[int]:
    """Define the flag of the random seed.

    Args:
        of: random choices that depend on it, if not all of the run's.
    """
    return number_flag("seed", 0, Seed, f"Of all that is drawn{of and f': {of}'}.")


def weights(*, required: bool = True) -> flags.FlagHolder[Any]:
    """Define the flag of the model that a program starts from."""
    about = (
        "The model: a Hugging Face folder, a run's checkpoints/, a folder of a peft adapter, or a name on the Hub, "
        "such as Qwen/Qwen3-0.6B."
    )
    return flags.DEFINE_string("weights", None, about, required=required)


def tokenizer() -> _Text:
    """Define the flag of a tokenizer that is not in the folder of the weights."""
    about = "Folder of the tokenizer, or a name on the Hub; by default that of --weights."
    return flags.DEFINE_string("tokenizer", None, about)


def step() -> flags.FlagHolder[int | None]:
    """Define the flag that selects a run's checkpoint."""
    return number_flag("step", None, CountOrZero, "Step of a run's checkpoints; by default the newest.")


def base() -> _Text:
    """Define the flag of the weights under an adapter."""
    about = "The weights that an adapter was trained on, where they are not where its folder says."
    return flags.DEFINE_string("base", None, about)


def param_dtype() -> Any:
    """Define the flag of the dtype of written weights."""
    return flags.DEFINE_enum("param_dtype", None, DTYPES, "Of the weights; by default as they are stored.")


def mesh(more: str = "By default one device.") -> Any:
    """Define the flag of the mesh axes' sizes, which `launch.flags.meshes` reads."""
    return flags.DEFINE_list("mesh", [], f"Sizes of mesh axes; such as fsdp=8,context=2. {more}")


def environments(*, required: bool = True) -> flags.FlagHolder[Any]:
    """Define the flag `--environments`, whose value `launch.flags.environments` reads.

    Args:
        required: False if another flag may be given instead.
    """
    about = "Dataset of tool environments; or my_module:my_name, mcp:FILE, verifiers:ID or openenv:URL."
    return flags.DEFINE_string("environments", None, about, required=required)


def reward() -> _Text:
    """Define the flag `--reward` of programs that score episodes."""
    about = "Named rewards, with weights that sum to 1; such as score:0.9,format:0.1. By default score; of records f1."
    return flags.DEFINE_string("reward", None, about)


def held_out(more: str) -> _Text:
    """Define the flag `--held_out`.

    Args:
        more: allowed values, and what is measured.
    """
    return flags.DEFINE_string("held_out", None, f"Data that is not trained on, to measure progress: {more}")


def sandbox_tier() -> Any:
    """Define the flag of the weakest accepted isolation, for programs that run tool code."""
    about = "Weakest isolation to accept, see docs/sandbox.md; strict is A. D trusts the code."
    return flags.DEFINE_enum("sandbox_tier", "C", ("A", "B", "C", UNISOLATED, "strict"), about)


def port(default: int) -> flags.FlagHolder[int]:
    """Define the flag of a service's port."""
    return number_flag("port", default, Port, "Port to listen on; 0 takes a free one.")
