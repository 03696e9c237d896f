"""Flags that several programs have, each defined once: one name, one type, one meaning.

    _WEIGHTS = shared.weights()

A program may add to the first words of a help text, which are the same everywhere (`tests/launch/test_flags.py`).
Former names of flags are in `RENAMED`: they are refused with the current name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import flags

from astra_jax.base.settings import CountOrZero, Port, Seed
from launch.flags.numbers import number_flag

flags.disclaim_key_flags()  # a flag belongs to the module that asks for it

_Text = flags.FlagHolder[str | None]

DTYPES = ("bfloat16", "float32")
UNISOLATED = "D"
"""Sandbox tier whose only protection is rlimits."""

RENAMED: Mapping[str, str] = {
    "allow_unisolated": "sandbox_tier",
    "api_key_file": "key_file",
    "data.accept": "accept",
    "data.preview": "preview",
    "data.skip_bad": "skip_bad",
    "dataset": "data",
    "endpoint": "model_url",
    "extra": "extra_body",
    "host": "host_index",
    "json": "figures",
    "host_meeting_deadline": "rendezvous_deadline",
    "judge_endpoint": "judge_url",
    "key_file": "model_key_file",
    "minimum_tier": "sandbox_tier",
    "output": "page",
    "rollout_request_seconds": "rollout_timeout_seconds",
    "rollout_urls": "rollout_url",
    "sandbox_token_file": "sandbox_key_file",
    "stored": "weight_quantization",
    "teacher_answer_form": "teacher_structured_output",
    "teacher_outage_minutes": "teacher_max_unavailable_minutes",
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


def workdir(more: str = "created if it does not exist.", *, required: bool = True) -> _Text:
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
    return number_flag("seed", 0, Seed, f"Random seed{of and f': for {of}'}.")


def weights(*, required: bool = True) -> flags.FlagHolder[Any]:
    """Define the flag of the model that a program starts from."""
    about = (
        "The model: a Hugging Face folder, a training run's folder or its checkpoints/, a folder of a peft adapter, or "
        "a name on the Hub, for example Qwen/Qwen3-0.6B."
    )
    return flags.DEFINE_string("weights", None, about, required=required)


def model_class() -> _Text:
    """Flag `--model_class`, which `cli.run` reads, of programs that read a model's `config.json`."""
    about = (
        "A model of your own, my_module:MyModel, which reads the config.json of the weights in place of the families "
        "here; docs/extending.md."
    )
    return flags.DEFINE_string("model_class", None, about)


def tokenizer() -> _Text:
    """Define the flag of a tokenizer that is not in the folder of the weights."""
    about = "Folder of the tokenizer, or a name on the Hub; by default the tokenizer of --weights."
    return flags.DEFINE_string("tokenizer", None, about)


def step() -> flags.FlagHolder[int | None]:
    """Define the flag that selects a run's checkpoint."""
    return number_flag("step", None, CountOrZero, "Step of the run's checkpoint to read; by default the newest.")


def base() -> _Text:
    """Define the flag of the weights under an adapter."""
    about = "Weights that the adapter was trained on; needed if they are not at the place that its folder names."
    return flags.DEFINE_string("base", None, about)


def param_dtype() -> Any:
    """Define the flag of the dtype of written weights."""
    return flags.DEFINE_enum("param_dtype", None, DTYPES, "Dtype of the written weights; by default as stored.")


def mesh(more: str = "By default one device.") -> Any:
    """Define the flag of the mesh axes' sizes, which `launch.flags.meshes` reads."""
    return flags.DEFINE_list("mesh", [], f"Sizes of mesh axes; for example fsdp=8,context=2. {more}")


def environments(*, required: bool = True) -> flags.FlagHolder[Any]:
    """Define the flag `--environments`, whose value `launch.flags.environments` reads.

    Args:
        required: False if another flag may be given instead.
    """
    about = (
        "Environments: a dataset of tool environments, or my_module:my_name, mcp:FILE, verifiers:ID or openenv:URL "
        "(docs/own_environments.md)."
    )
    return flags.DEFINE_string("environments", None, about, required=required)


def reward() -> _Text:
    """Define the flag `--reward` of programs that score episodes."""
    about = (
        "Named rewards, with weights that sum to 1; for example score:0.9,format:0.1. By default f1 for datasets, else "
        "score, the environment's own."
    )
    return flags.DEFINE_string("reward", None, about)


def held_out(more: str) -> _Text:
    """Define the flag `--held_out`.

    Args:
        more: allowed values, and what is measured.
    """
    return flags.DEFINE_string("held_out", None, f"Data to measure progress on, never trained on: {more}")


def sandbox_tier() -> Any:
    """Define the flag of the weakest accepted isolation, for programs that run tool code."""
    about = (
        "Weakest isolation of tool code to accept, from A (also: strict) to D, which has rlimits only, for code that "
        "you trust; docs/sandbox.md."
    )
    return flags.DEFINE_enum("sandbox_tier", "C", ("A", "B", "C", UNISOLATED, "strict"), about)


def port(default: int) -> flags.FlagHolder[int]:
    """Define the flag of a service's port."""
    return number_flag("port", default, Port, "Port to listen on; 0 takes a free one.")
