"""The folder of a model of others that knows no tools: a tokenizer without their tokens, and a plain chat template."""

from __future__ import annotations

import json
from pathlib import Path

from sft_world import trajectories
from template_world import PLAIN_CHATML
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from synthesis.core.chatml import QWEN3

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SYSTEM = "You are a tiny assistant."


def make_folder(folder: Path, *, special: tuple[str, ...] = CHATML, chat_template: str = "", size: int = 384) -> Path:
    """A tokenizer as others train them, with a chat template of theirs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["".join(one.text for one in QWEN3.render(t.messages, t.tools)) for t in trajectories(20)]
    tokenizer.train_from_iterator(
        [text.replace("<", " ") for text in texts],
        trainers.BpeTrainer(
            vocab_size=size,
            show_progress=False,
            special_tokens=[AddedToken(one, normalized=False) for one in special],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    written = chat_template or PLAIN_CHATML.replace("SYSTEM", json.dumps(SYSTEM))
    (folder / "chat_template.jinja").write_text(written)
    return folder
