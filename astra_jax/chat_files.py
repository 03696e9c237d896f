"""Files of a model's folder besides its weights: tokenizer, chat template and end tokens.

They are copied. They are rewritten if the trained chat format ends its turns with another token.

transformers' `generate` stops at `eos_token_id` of `generation_config.json`, and reads no other file if that one
exists. vLLM stops there too, and at `eos_token` of the tokenizer's files. A base model has `<|endoftext|>` in both. It
would never stop after a turn that it was trained to end with `<|im_end|>`.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from etils import epath

from astra_jax.base.errors import UserError
from astra_jax.base.files import location, write_bytes, write_text
from synthesis.core.chat_template import OTHER_TEMPLATES, TEMPLATE, named_templates
from synthesis.core.datasets import Folder

GENERATION, TOKENIZER, TOKENS = "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class TokenizerError(UserError):
    """Error: a folder has no usable tokenizer. The message says what is missing."""


def read_object(file: epath.Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if the file is missing.

    Raises:
        TokenizerError: the file is not a JSON object.
    """
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not JSON ({error}); write it again") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} is not a JSON object; copy it again")
    return content


def end_ids(folder: epath.Path) -> list[int] | None:
    """Return the ids of `eos_token_id` in `generation_config.json`, or else in `config.json`.

    Returns:
        None if neither has any.

    Raises:
        TokenizerError: it is not an id or a list of ids.
    """
    for name in (GENERATION, "config.json"):
        found = read_object(folder / name).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(one) is int and one >= 0 for one in ids):
            raise TokenizerError(f"{folder / name}: eos_token_id is {found!r:.80}; use a token id or a list of them")
        return ids
    return None


def token_ids(folder: epath.Path) -> dict[str, Any]:
    """Return the ids of `generation_config.json` that `config.json` repeats: first token, end tokens and padding.

    Raises:
        TokenizerError: the file is not a JSON object.
    """
    content = read_object(folder / GENERATION)
    return {name: content[name] for name in _IDS if content.get(name) is not None}


def generation_config(folder: epath.Path | None, ends: Sequence[int], pad: int) -> str:
    """Return a `generation_config.json` that stops at all `ends`; the rest is the folder's, or from its `config.json`.

    Args:
        folder: the model's folder; None: a tokenizer without one.
        ends: end tokens, starting with the token that ends a turn.
        pad: the padding token if the folder names none.
    """
    if folder is not None and (content := read_object(folder / GENERATION)):
        return _text(content | {"eos_token_id": list(ends)})
    stored = {} if folder is None else read_object(folder / "config.json")
    ids = {name: stored[name] for name in ("bos_token_id", "pad_token_id") if type(stored.get(name)) is int}
    return _text({"do_sample": True, "pad_token_id": pad} | ids | {"eos_token_id": list(ends)})


def changed_files(
    folder: epath.Path,
    turn_end: str,
    ends: Sequence[int],
    pad: int,
    *,
    template: str | None,
    generation: epath.Path | None = None,
) -> dict[str, str]:
    """Return contents of the files that differ from the folder's, by name: end tokens, and the template.

    Args:
        turn_end: the token that ends a turn.
        ends: ids of all end tokens, that of `turn_end` first.
        pad: the padding token if the folder names none.
        template: the chat template; None: the folder's own.
        generation: the folder of the model's `generation_config.json`, if it is another.

    Raises:
        TokenizerError: a file is not a JSON object.
    """
    made: dict[str, str] = {}
    of_model = generation or folder
    found = read_object(of_model / GENERATION).get("eos_token_id")
    if of_model != folder or ends[0] not in (found if isinstance(found, list) else [found]):
        made[GENERATION] = generation_config(of_model, ends, pad)
    config, tokens = read_object(folder / TOKENIZER), read_object(folder / TOKENS)
    wanted = config | {"eos_token": turn_end if _content(config.get("eos_token")) != turn_end else config["eos_token"]}
    if not config and (folder / "tokenizer.json").exists():
        # Otherwise transformers rebuilds the tokenizer of config.json's model_type, which splits text by its own rules.
        wanted = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | wanted
    if template is not None:
        made[TEMPLATE] = template
        wanted.pop("chat_template", None)
    if wanted != config:
        made[TOKENIZER] = _text(wanted)
    if _content(tokens.get("eos_token", turn_end)) != turn_end:
        made[TOKENS] = _text(tokens | {"eos_token": turn_end})
    return made


def _content(token: Any) -> Any:
    """Return the text of a token, which may be stored with its settings."""
    return token.get("content") if isinstance(token, dict) else token


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Copies

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TEMPLATE,
    f"{OTHER_TEMPLATES}/*.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
"""Files of a model that transformers and vLLM read besides its weights and `config.json`."""
OTHER_WEIGHTS = (".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack")
"""Suffixes of weights that are not read."""
_WEIGHTS = (".safetensors", ".index.json", *OTHER_WEIGHTS)


def copy_tokenizer(source: Folder, target: Folder, *, but: Container[str] = ()) -> int:
    """Copy the tokenizer next to a model's weights, except the files `but`. Return the number of files copied.

    With another template the folder's additional templates are not copied: transformers would use its `tool_use`.
    """
    folder = location(source)
    found = [folder / name for name in TOKENIZER_FILES if name not in but and (folder / name).is_file()]
    if TEMPLATE not in but:
        found += named_templates(folder)
    for file in found:
        content, copied = file.read_bytes(), location(target) / file.relative_to(folder)
        if not copied.exists() or copied.read_bytes() != content:
            copied.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(copied, content)
    return len(found)


def copy_generation_config(tokenizer: Folder, model: Folder, target: Folder) -> int:
    """Copy a model's `generation_config.json` if its tokenizer's folder has none. Return the number of files copied."""
    if tokenizer == model or (location(tokenizer) / GENERATION).exists():
        return 0
    return copy_tokenizer(model, target, but={*TOKENIZER_FILES} - {GENERATION})


def save_tokenizer(source: Folder, target: Folder, own: Mapping[str, str]) -> int:
    """Copy a tokenizer's files from its model's folder, and replace some by name. Return the number of files written.

    The replacements are those of `ChatTokenizer.changed_files`.
    """
    count = copy_tokenizer(source, target, but=own)
    for name, text in own.items():
        write_text(location(target) / name, text)
    return count + len(own)


def not_copied(source: Folder) -> list[str]:
    """Return names of a model folder's files that are neither weights nor copied; none for a run's `checkpoints/`."""
    folder = location(source)
    if not folder.is_dir() or (folder / "params").is_dir():
        return []
    names = (file.name for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    known = (*TOKENIZER_FILES, "config.json", "README.md")
    return sorted(name for name in names if name not in known and not name.endswith(_WEIGHTS))
