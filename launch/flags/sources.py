"""Weights that `--weights` names: a model's folder, or an adapter of `peft` with the folder of its base."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from launch.flags import cli, hub

if TYPE_CHECKING:
    from etils import epath

    from astra_jax.models.model import Model
    from astra_jax.tokenizer import ChatTokenizer

_Text = flags.FlagHolder[str | None]


class NamedWeights(NamedTuple):
    """Folders of a model.

    Attributes:
        folder: folder of the weights, without the adapter.
        adapter: folder of a `peft` adapter, or None.
    """

    folder: epath.Path
    adapter: epath.Path | None

    @property
    def tokenizer(self) -> epath.Path:
        """Return the folder of the tokenizer: the adapter's if it has one, else the base's.

        Raises:
            UsageError: the adapter has a chat template and no tokenizer.
        """
        if self.adapter is None:
            return self.folder
        if any((self.adapter / name).exists() for name in ("tokenizer.json", "vocab.json")):
            return self.adapter
        if (self.adapter / "chat_template.jinja").exists():
            raise cli.UsageError(
                f"{self.adapter} has a chat template and no tokenizer: copy the tokenizer of {self.folder} there "
                "(tokenizer.json, tokenizer_config.json), or give the folder of both with --tokenizer"
            )
        return self.folder

    @property
    def named(self) -> epath.Path:
        """Return the folder that the user named."""
        return self.adapter or self.folder

    def model(self, **dtypes: str) -> Model:
        """Return the model, without its weights. Raises `WeightsError`: it cannot be read."""
        from astra_jax.run import weights

        return weights.read_model(self.folder, self.adapter, **dtypes)

    def load_tokenizer(self, folder: epath.Path | None = None) -> ChatTokenizer:
        """Return the tokenizer of a folder, by default of `tokenizer`. Raises as `ChatTokenizer.load`.

        The end tokens of a turn come from the base's generation_config.json, since an adapter's folder has none.
        """
        from astra_jax.tokenizer import ChatTokenizer

        return ChatTokenizer.load(folder or self.tokenizer, generation=self.folder)

    def check_vocabulary(self, model: Model) -> None:
        """Check that the model has a row for every token of the tokenizer, whatever its chat template. Raises
        `UsageError`."""
        from tokenizers import Tokenizer

        file = self.tokenizer / "tokenizer.json"
        if not file.exists():
            return
        size = max(Tokenizer.from_buffer(file.read_bytes()).get_vocab(with_added_tokens=True).values()) + 1
        if size > model.vocab_size:
            raise cli.UsageError(
                f"{file} has {size} tokens, but the embedding with the adapter has {model.vocab_size} rows: the rows "
                "of added tokens are not in the adapter. Save it again with save_embedding_layers=True"
            )

    def copy_tokenizer(self, target: epath.Path | str) -> int:
        """Copy the tokenizer's files, and the base's generation_config.json if the tokenizer's folder has none. Return
        the number of files."""
        from astra_jax import chat_files

        copied = chat_files.copy_tokenizer(self.tokenizer, target)
        return copied + chat_files.copy_generation_config(self.tokenizer, self.folder, target)


def source(weights: _Text, base: _Text | None) -> NamedWeights:
    """Return the folders that two flags name, downloaded if they are on the Hub.

    Args:
        weights: flag of a model, or of an adapter of `peft`.
        base: flag of the adapter's base; by default the base that its adapter_config.json names. None: the program has
            no such flag.

    Raises:
        UsageError: a folder is missing, or `base` is given without an adapter.
        HubError: the Hub does not provide a model.
        WeightsError: the adapter cannot be read.
    """
    from astra_jax.models import peft_folder

    folder = hub.model_folder(weights)
    if not peft_folder.is_adapter(folder):
        if base is not None and base.value is not None:
            raise cli.UsageError(
                f"--base={base.value}: --{weights.name}={weights.value} is not an adapter of peft; leave out "
                "--base. (For a run's own adapters, give --base to astra convert, which merges them)"
            )
        return NamedWeights(folder, None)
    if base is not None and base.value is not None:
        under, said = hub.model_folder(base), f"--base={base.value}"
    else:
        name = peft_folder.read_settings(folder).base
        if not name:
            raise cli.UsageError(
                f"--{weights.name}={weights.value} is an adapter of peft, whose adapter_config.json does not name the "
                "weights that it was trained on; give them with --base"
            )
        said = f"base_model_name_or_path={name} of {folder}/{peft_folder.CONFIG}"
        under = hub.named_folder(name, said)
        if not under.is_dir():
            raise cli.UsageError(f"{said} is not a folder on this machine; give its folder with --base")
    if peft_folder.is_adapter(under):
        raise cli.UsageError(f"{said} is an adapter of peft too; merge it first (astra convert --from_peft --to_hf)")
    return NamedWeights(folder=under, adapter=folder)
