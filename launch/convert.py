"""Checkpoints between Hugging Face's safetensors and the Orbax layout that training reads and writes.

    python -m launch.convert --from_hf=DIR --to_orbax=DIR [--param_dtype=float32]
    python -m launch.convert --from_orbax=DIR --to_hf=DIR [--step=N]

A training run's `checkpoints/` folder is such an Orbax directory; it may be in a bucket, gs://BUCKET/FOLDER. Tokenizer
files are copied along.
"""

from __future__ import annotations

from absl import flags

from launch.flags import cli
from launch.flags.numbers import number_flag
from sandbox.settings import CountOrZero

_FROM_HF = flags.DEFINE_string("from_hf", None, "Directory with config.json and *.safetensors.")
_TO_ORBAX = flags.DEFINE_string("to_orbax", None, "Directory to write; must not hold a checkpoint yet.")
_FROM_ORBAX = flags.DEFINE_string("from_orbax", None, "Directory that --to_orbax or a training run wrote.")
_TO_HF = flags.DEFINE_string("to_hf", None, "Directory to write; must not hold a checkpoint yet.")
_STEP = number_flag("step", None, CountOrZero, "Step of --from_orbax; by default the newest.")
_DTYPE = flags.DEFINE_enum("param_dtype", None, ["bfloat16", "float32"], "By default as the checkpoint has it.")


def main() -> None:
    import dataclasses

    import jax

    from astra_jax.models import hf_checkpoint
    from astra_jax.run import weights

    given = [flag.name for flag in (_FROM_HF, _TO_ORBAX, _FROM_ORBAX, _TO_HF) if flag.value]
    if given not in (["from_hf", "to_orbax"], ["from_orbax", "to_hf"]):
        raise cli.UsageError("give --from_hf and --to_orbax, or --from_orbax and --to_hf")
    from_hf = "from_hf" in given
    source = cli.local_folder(_FROM_HF) if from_hf else cli.folder(_FROM_ORBAX)
    target = cli.folder(_TO_ORBAX, written=True) if from_hf else cli.local_folder(_TO_HF)
    if target.exists() and any(target.iterdir()):
        raise cli.UsageError(f"--{given[1]}={target} is not empty; give a new folder")
    stored = hf_checkpoint.read_config(source, param_dtype=hf_checkpoint.stored_dtype(source))
    model = dataclasses.replace(stored, param_dtype=_DTYPE.value or stored.param_dtype)
    if from_hf:
        params = hf_checkpoint.load_hf(source, model)
        weights.save_orbax(params, model, target)
    else:
        params = weights.load_orbax(source, stored, step=_STEP.value)
        params = jax.tree.map(lambda x: x.astype(model.param_dtype), params)
        hf_checkpoint.save_hf(params, model, target)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    copied = hf_checkpoint.copy_tokenizer(source, target)
    print(f"{target}: {count:,} parameters in {model.param_dtype}, {copied} tokenizer files")


def _user_errors() -> tuple[type[Exception], ...]:
    from astra_jax.models.hf_checkpoint import WeightsError
    from astra_jax.run.checkpoints import CheckpointError
    from synthesis.core.files import StorageError

    return (CheckpointError, StorageError, ValueError, WeightsError)


if __name__ == "__main__":
    cli.run(main, user_errors=_user_errors)
