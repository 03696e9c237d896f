"""Convert checkpoints between Hugging Face, Orbax (which training writes), peft and GGUF.

    astra convert --from_hf=DIR --to_orbax=DIR [--param_dtype=float32]
    astra convert --from_orbax=DIR --to_hf=DIR [--step=N]
    astra convert --from_orbax=DIR --to_peft=DIR [--step=N]
    astra convert --from_gguf=FILE --to_hf=DIR [--param_dtype=bfloat16]
    astra convert --from_peft=ADAPTER --to_hf=DIR [--base=DIR]

An Orbax folder is the `checkpoints/` of a training run; it may be in a bucket, gs://BUCKET/FOLDER. Tokenizer files are
copied too. For a run with adapters, --to_hf merges them into the weights that they were trained on; --base names those
weights if they were moved. --to_peft writes the adapters alone, for the package peft. --from_peft merges an adapter
into the weights that its adapter_config.json names, or --base. The tokenizer and chat template of a GGUF file are
rebuilt from its metadata (docs/convert.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from absl import flags

from astra_jax.base.terminal import say
from launch.flags import cli, hub, shared

if TYPE_CHECKING:
    from pathlib import Path

    from etils import epath

_FROM_HF = flags.DEFINE_string(
    "from_hf",
    None,
    "Hugging Face folder to read (config.json and *.safetensors), or a name on the Hub: Qwen/Qwen3-0.6B.",
)
_TO_ORBAX = flags.DEFINE_string("to_orbax", None, "Folder to write an Orbax checkpoint to; must be empty.")
_FROM_GGUF = flags.DEFINE_string("from_gguf", None, "GGUF file (llama.cpp) of a Llama, Qwen2 or Qwen3 to read.")
_FROM_PEFT = flags.DEFINE_string(
    "from_peft", None, "Adapter folder to read, as peft writes it, or its name on the Hub."
)
_FROM_ORBAX = flags.DEFINE_string(
    "from_orbax", None, "Orbax folder to read, as --to_orbax or a training run writes it."
)
_TO_HF = flags.DEFINE_string("to_hf", None, "Folder to write Hugging Face files to; must be empty.")
_TO_PEFT = flags.DEFINE_string("to_peft", None, "Folder to write a run's adapters to; must be empty.")
_BASE = shared.base()
_STEP = shared.step()
_DTYPE = shared.param_dtype()
_MODEL_CLASS = shared.model_class()

_WAYS = {
    ("from_hf", "to_orbax"): ("param_dtype",),
    ("from_orbax", "to_hf"): ("step", "base", "param_dtype"),
    ("from_orbax", "to_peft"): ("step",),
    ("from_gguf", "to_hf"): ("param_dtype",),
    ("from_peft", "to_hf"): ("base", "param_dtype"),
}
"""Supported conversions (source, target), and the additional flags of each."""


def main() -> None:
    from astra_jax.run.backends import start_backend
    from launch.flags.exports import to_hf
    from synthesis.core.workdir import locked_target

    ends = (_FROM_HF, _TO_ORBAX, _FROM_GGUF, _FROM_PEFT, _FROM_ORBAX, _TO_HF, _TO_PEFT)
    given = tuple(flag.name for flag in ends if flag.value)
    if given not in _WAYS:
        raise cli.UsageError(
            "give one source and one target: --from_hf and --to_orbax; --from_orbax and --to_hf or --to_peft; "
            "--from_gguf "
            "and --to_hf; or --from_peft and --to_hf"
        )
    for flag in (_STEP, _BASE, _DTYPE):
        if flag.value is not None and flag.name not in _WAYS[given]:
            ways = [f"--{source} with --{target}" for (source, target), more in _WAYS.items() if flag.name in more]
            raise cli.UsageError(f"--{flag.name} is for {' and for '.join(ways)}; leave it out")
    start_backend()
    if "to_peft" in given:
        _to_peft()
        return
    if "from_gguf" in given:
        _from_gguf()
        return
    if "from_peft" in given:
        _from_peft()
        return
    if "from_hf" in given:
        _from_hf()
        return
    source, target = cli.checkpoints_of(cli.folder(_FROM_ORBAX)), cli.local_folder(_TO_HF)
    with locked_target(target):
        _check_empty("to_hf", target)
        base = cli.folder(_BASE) if _BASE.value else None
        made = to_hf(source, target, dtype=_DTYPE.value, step=_STEP.value, base=base)
    say(f"{target}: {made.parameters:,} parameters in {made.dtype}, {made.tokenizer_files} tokenizer files")


def _from_hf() -> None:
    import jax

    from astra_jax import chat_files
    from astra_jax.models import hf_checkpoint
    from astra_jax.run import model_card, weights
    from synthesis.core.workdir import locked_target

    source, target = hub.model_folder(_FROM_HF), cli.folder(_TO_ORBAX, written=True)
    model = hf_checkpoint.read_config(source, param_dtype=_DTYPE.value or hf_checkpoint.stored_dtype(source))
    with locked_target(target):
        _check_empty("to_orbax", target)
        params = hf_checkpoint.load_hf(source, model)
        copied = chat_files.copy_tokenizer(source, target)
        weights.save_orbax(params, model, target)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        model_card.copy_card(source, target)
    if left := chat_files.not_copied(source):
        say(f"{target}: not copied from {source}: {', '.join(left)}")
    say(f"{target}: {count:,} parameters in {model.param_dtype}, {copied} tokenizer files")


def _to_peft() -> None:
    from astra_jax.models import hf_checkpoint, peft
    from astra_jax.run import frozen, weights
    from launch.flags.exports import copy_tokenizer
    from synthesis.core.workdir import locked_target

    source, target = cli.checkpoints_of(cli.folder(_FROM_ORBAX)), cli.local_folder(_TO_PEFT)
    model = hf_checkpoint.read_config(source, param_dtype=hf_checkpoint.stored_dtype(source))
    with locked_target(target):
        _check_empty("to_peft", target)
        adapters = weights.load_adapters(source, model, step=_STEP.value)
        under = frozen.read(source)
        assert under is not None
        base = under.origin.folder if under.origin else ""
        count = peft.save(adapters, model, under.lora, target, base=base)
        copied = copy_tokenizer(source, target, weights.stored_step(source, _STEP.value))
    say(f"{target}: {count:,} parameters of adapters to {base or 'unnamed weights'}, {copied} tokenizer files")


def _from_peft() -> None:
    import jax

    from astra_jax.models import hf_checkpoint
    from astra_jax.run import weights
    from launch.flags import sources
    from synthesis.core.workdir import locked_target

    found, target = sources.source(_FROM_PEFT, _BASE), cli.local_folder(_TO_HF)
    if found.adapter is None:
        raise cli.UsageError(f"--from_peft={_FROM_PEFT.value} is not an adapter of peft: it has no adapter_config.json")
    model = found.model(param_dtype=_DTYPE.value or hf_checkpoint.stored_dtype(found.folder))
    found.check_vocabulary(model)
    with locked_target(target):
        _check_empty("to_hf", target)
        params = weights.load(found.folder, model, adapter=found.adapter)
        copied = found.copy_tokenizer(target)  # config.json repeats its end tokens
        hf_checkpoint.save_hf(params, model, target)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    say(f"{target}: {count:,} parameters in {model.param_dtype} of {found.folder}, {copied} tokenizer files")


def _from_gguf() -> None:
    from pathlib import Path

    from astra_jax.models.gguf.convert import convert
    from synthesis.core.workdir import locked_target

    source, target = Path(_FROM_GGUF.value or ""), Path(cli.local_folder(_TO_HF))
    if not source.is_file():
        raise cli.UsageError(f"--from_gguf={source} is not a file")
    with locked_target(target):
        _check_empty("to_hf", target)
        made = convert(source, target, dtype=_DTYPE.value)
    say(f"{target}: {made.parameters:,} parameters in {made.dtype}, {made.tokenizer_files} tokenizer files")


def _check_empty(flag: str, target: Path | epath.Path) -> None:
    if target.exists() and any(target.iterdir()):
        raise cli.UsageError(f"--{flag}={target} is not empty; give a new folder")


if __name__ == "__main__":
    cli.run(main, again="the target is incomplete; delete it, or give a new folder")
