"""Checkpoints between Hugging Face's safetensors and the Orbax layout that training reads and writes.

    python -m launch.convert --from_hf=DIR --to_orbax=DIR [--param_dtype=float32]
    python -m launch.convert --from_orbax=DIR --to_hf=DIR [--step=N]

A training run's `checkpoints/` folder is such an Orbax directory. Tokenizer files are copied along.
"""

from __future__ import annotations

from absl import flags

from launch import cli

_FROM_HF = flags.DEFINE_string("from_hf", None, "Directory with config.json and *.safetensors.")
_TO_ORBAX = flags.DEFINE_string("to_orbax", None, "Directory to write; must not hold a checkpoint yet.")
_FROM_ORBAX = flags.DEFINE_string("from_orbax", None, "Directory that --to_orbax or a training run wrote.")
_TO_HF = flags.DEFINE_string("to_hf", None, "Directory to write; must not hold a checkpoint yet.")
_STEP = flags.DEFINE_integer("step", None, "Step of --from_orbax; by default the newest.")
_DTYPE = flags.DEFINE_enum("param_dtype", None, ["bfloat16", "float32"], "By default as the checkpoint has it.")


def main() -> None:
    import dataclasses
    from pathlib import Path

    import jax

    from astra_jax.models.qwen3 import weights

    given = {flag.name: flag.value for flag in (_FROM_HF, _TO_ORBAX, _FROM_ORBAX, _TO_HF) if flag.value}
    if tuple(given) not in (("from_hf", "to_orbax"), ("from_orbax", "to_hf")):
        raise cli.UsageError("give --from_hf and --to_orbax, or --from_orbax and --to_hf")
    source, target = (Path(value) for value in given.values())
    if target.exists() and any(target.iterdir()):
        raise cli.UsageError(f"--{list(given)[1]}={target} is not empty; give a new folder")
    stored = weights.read_config(source, param_dtype=weights.stored_dtype(source))
    config = dataclasses.replace(stored, param_dtype=_DTYPE.value or stored.param_dtype)
    if "from_hf" in given:
        params = weights.load_hf(source, config)
        weights.save_orbax(params, config, target)
    else:
        params = weights.load_orbax(source, stored, step=_STEP.value)
        params = jax.tree.map(lambda x: x.astype(config.param_dtype), params)
        weights.save_hf(params, config, target)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    copied = weights.copy_tokenizer(source, target)
    print(f"{target}: {count:,} parameters in {config.param_dtype}, {copied} tokenizer files")


def _mends() -> tuple[type[Exception], ...]:
    from astra_jax.checkpoints import CheckpointError
    from astra_jax.models.qwen3.weights import WeightsError

    return (CheckpointError, ValueError, WeightsError)


if __name__ == "__main__":
    cli.run(main, mends=_mends)
