"""Flags that several programs have, each defined here once: one name, one type, one meaning.

    _WEIGHTS = shared.weights()

What a program adds to a meaning stands behind its first words, which are the same everywhere
(`tests/launch/test_flags.py`). Names that flags had before are in `RENAMED`: they are refused with today's.
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
"""The tier where rlimits are all there is."""

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
"""Today's names of flags that were called otherwise, in the programs that have those."""


def todays_flag(name: str) -> str | None:
    """What a program calls a flag that it does not know by this name; None: it never had one of it."""
    today = RENAMED.get(name)
    return today if today is not None and today in flags.FLAGS else None


def workdir(more: str = "made if it is not there.", *, required: bool = True) -> _Text:
    """Where a run's files are.

    Args:
        more: behind what it is.
        required: False, where it may be given without its name.
    """
    return flags.DEFINE_string("workdir", None, f"Folder of the run; {more}", required=required)


def seed(of: str = "") -> flags.FlagHolder[int]:
    """Args: of: what is drawn, where that is not all that a run does."""
    return number_flag("seed", 0, Seed, f"Of all that is drawn{of and f': {of}'}.")


def weights(*, required: bool = True) -> flags.FlagHolder[Any]:
    """The model that a program starts from."""
    about = (
        "The model: a Hugging Face folder, a run's checkpoints/, a folder of a peft adapter, or a name on the Hub, "
        "such as Qwen/Qwen3-0.6B."
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
    """Where it is not beside the weights."""
    about = "Folder of the tokenizer, or a name on the Hub; by default that of --weights."
    return flags.DEFINE_string("tokenizer", None, about)


def step() -> flags.FlagHolder[int | None]:
    """Of a run's checkpoints."""
    return number_flag("step", None, CountOrZero, "Step of a run's checkpoints; by default the newest.")


def base() -> _Text:
    """Under adapters."""
    about = "The weights that an adapter was trained on, where they are not where its folder says."
    return flags.DEFINE_string("base", None, about)


def param_dtype() -> Any:
    """Of weights that are written."""
    return flags.DEFINE_enum("param_dtype", None, DTYPES, "Of the weights; by default as they are stored.")


def mesh(more: str = "By default one device.") -> Any:
    """Sizes of axes, which `launch.flags.meshes` reads."""
    return flags.DEFINE_list("mesh", [], f"Sizes of mesh axes; such as fsdp=8,context=2. {more}")


def environments(*, required: bool = True) -> flags.FlagHolder[Any]:
    """Flag `--environments`, whose value `launch.flags.environments` reads.

    Args:
        required: False, where another flag may be given in its place.
    """
    about = "Dataset of tool environments; or my_module:my_name, mcp:FILE, verifiers:ID or openenv:URL."
    return flags.DEFINE_string("environments", None, about, required=required)


def reward() -> _Text:
    """Flag `--reward`, of programs that score episodes."""
    about = "Named rewards, with weights that sum to 1; such as score:0.9,format:0.1. By default score; of records f1."
    return flags.DEFINE_string("reward", None, about)


def held_out(more: str) -> _Text:
    """Flag `--held_out`.

    Args:
        more: what may be given, and what is measured.
    """
    return flags.DEFINE_string("held_out", None, f"Data that is not trained on, to measure progress: {more}")


def sandbox_tier() -> Any:
    """Of programs that run tool code, their own or other programs'."""
    about = "Weakest isolation to accept, see docs/sandbox.md; strict is A. D trusts the code."
    return flags.DEFINE_enum("sandbox_tier", "C", ("A", "B", "C", UNISOLATED, "strict"), about)


def port(default: int) -> flags.FlagHolder[int]:
    """Of a service."""
    return number_flag("port", default, Port, "Port to listen on; 0 takes a free one.")
