"""Conversion of a GGUF file to a Hugging Face folder, which is written completely or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from astra_jax.base.files import location, write_text
from astra_jax.chat_files import token_ids
from astra_jax.models.gguf.file import GGUFFile
from astra_jax.models.gguf.tokenizer import HFTokenizer
from astra_jax.models.gguf.weights import HFModel
from astra_jax.models.hf_checkpoint import save_tensors

FILE_BYTES = 10**9
"""Bytes of a safetensors file; this much is in memory, plus one tensor."""


@dataclass(frozen=True)
class Converted:
    """Result of a conversion: the number of parameters, their dtype, and the number of tokenizer files."""

    parameters: int
    dtype: str
    tokenizer_files: int


def convert(source: Path, target: Path, *, dtype: str | None = None, file_bytes: int = FILE_BYTES) -> Converted:
    """Write the weights, `config.json`, tokenizer and chat template of a GGUF file as a Hugging Face folder.

    The whole header is checked before the first tensor is read. Quantised weights become the values of their blocks;
    they are not the model's original weights.

    Args:
        source: the file.
        target: a folder that is missing or empty; the caller has locked it (`workdir.locked_target`).
        dtype: `float32` or `bfloat16`; by default bfloat16 if all matrices are, else float32.

    Raises:
        GGUFError: the file is damaged, or of a kind that is not supported.
        WeightsError: the disk has no room.
    """
    file = GGUFFile(source)
    model = HFModel(file)
    tokenizer = HFTokenizer(file, model.config["vocab_size"])
    dtype = dtype or ("bfloat16" if model.is_bfloat16 else "float32")
    prefix = f".{target.name}.partial-"
    for left in target.parent.iterdir():
        if left.name.startswith(prefix):  # from a conversion that was killed
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as made:
        folder = Path(made) / "hf"  # the umask sets its mode, unlike that of the temporary folder
        save_tensors(model.tensors(dtype), folder, max_bytes=file_bytes)
        files = tokenizer.save(folder)
        content = {**model.config, **token_ids(location(folder)), "dtype": dtype}
        write_text(folder / "config.json", json.dumps(content, indent=2) + "\n")
        folder.replace(target)
    return Converted(model.parameters, dtype, len(files))
