"""From a GGUF file to a Hugging Face folder, which is there whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from astra_jax.chat_files import token_ids
from astra_jax.models.gguf.file import GGUFFile
from astra_jax.models.gguf.tokenizer import HFTokenizer
from astra_jax.models.gguf.weights import HFModel
from astra_jax.models.hf_checkpoint import save_tensors
from synthesis.core.files import location, write_text

FILE_BYTES = 10**9
"""Of a safetensors file, which is what is held in memory, with one tensor more."""


@dataclass(frozen=True)
class Converted:
    """What was written: how many parameters, in which dtype, and how many files of the tokenizer."""

    parameters: int
    dtype: str
    tokenizer_files: int


def convert(source: Path, target: Path, *, dtype: str | None = None, file_bytes: int = FILE_BYTES) -> Converted:
    """Write the weights, `config.json`, tokenizer and chat template of a GGUF file as a folder of Hugging Face's.

    All that the header says is checked before the first tensor is read. Quantised weights become what their blocks
    stand for; they are not what the model was before.

    Args:
        source: the file.
        target: the folder, which is not there or empty; the caller holds its place (`workdir.locked_target`).
        dtype: `float32` or `bfloat16`; by default bfloat16 where all matrices are, else float32.

    Raises:
        GGUFError: the file is damaged, or of a kind that is not read.
        WeightsError: there is no room on the disk.
    """
    file = GGUFFile(source)
    model = HFModel(file)
    tokenizer = HFTokenizer(file, model.config["vocab_size"])
    dtype = dtype or ("bfloat16" if model.is_bfloat16 else "float32")
    prefix = f".{target.name}.partial-"
    for left in target.parent.iterdir():
        if left.name.startswith(prefix):  # of a conversion that was killed
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as made:
        folder = Path(made) / "hf"  # unlike the temporary one, for whom the umask says
        save_tensors(model.tensors(dtype), folder, max_bytes=file_bytes)
        files = tokenizer.save(folder)
        content = {**model.config, **token_ids(location(folder)), "dtype": dtype}
        write_text(folder / "config.json", json.dumps(content, indent=2) + "\n")
        folder.replace(target)
    return Converted(model.parameters, dtype, len(files))
