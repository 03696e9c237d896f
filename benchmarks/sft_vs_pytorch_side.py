"""One side of `benchmarks.sft_vs_pytorch`: trains when a line on stdin tells it to.

ready      answers {"seconds"} of getting ready to train
train N    N steps; answers {"steps": [{"seconds", "tokens", "loss"}, …]}, the first one with its compilation, and JAX's
           side {"device"}, what they ran on
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.train_step_side import own_stdout

OnStep = Callable[[float, float], None]
"""Called after each step with its tokens and its loss."""


class Turns:
    """Reads lines from stdin before a step that no line has asked for yet, and answers them."""

    def __init__(self) -> None:
        self.about: dict[str, str] = {}
        """Said with each answer to `train`."""
        self._answers = own_stdout()
        self._asked = 0
        self._steps: list[dict[str, float]] = []
        self._started = time.perf_counter()

    def wait(self) -> None:
        """Return when the next step is asked for."""
        while self._asked == 0:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            word, _, number = line.strip().partition(" ")
            if word == "ready":
                self._answer({"seconds": time.perf_counter() - self._started})
            else:
                self._asked, self._steps = int(number), []
        self._started = time.perf_counter()

    def stepped(self, tokens: float, loss: float) -> None:
        """A step is done; waits for the next."""
        self._steps.append({"seconds": time.perf_counter() - self._started, "tokens": tokens, "loss": loss})
        self._asked -= 1
        if self._asked == 0:
            self._answer({"steps": self._steps} | self.about)
        self.wait()

    def _answer(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)


def jax_side(work: dict[str, Any], turns: Turns) -> None:
    import jax

    from astra_jax.models.qwen3.presets import Qwen3Config
    from astra_jax.run import weights
    from astra_jax.run.hooks import Hook
    from astra_jax.sft import train as sft
    from astra_jax.tokenizer import ChatTokenizer

    model, config = Qwen3Config(**work["model"], dtype=work["dtype"]), _sft_config(work)
    start, tokenizer = partial(weights.load, work["hf"], model), ChatTokenizer.load(work["hf"])

    class Clock(Hook):
        def after_update(self, run: Any, state: Any, batch: Any, row: Any) -> None:
            turns.stepped(row["data/row_tokens"] * work["rows"] * (1 - row["data/padding_share"]), row["train/loss"])

    turns.about["device"] = jax.devices()[0].device_kind
    with tempfile.TemporaryDirectory() as workdir:
        turns.wait()
        sft.train(config, model, start, work["data"], tokenizer, workdir, progress=False, hooks=[Clock()])


def _sft_config(work: dict[str, Any]) -> Any:
    from astra_jax.sft.config import SFTConfig
    from astra_jax.sft.data import DataConfig

    names = ("learning_rate", "warmup_fraction", "final_fraction", "b1", "b2", "eps", "max_grad_norm", "steps")
    data = DataConfig(seq_len=work["seq_len"], seed=work["seed"])
    chosen = {name: work[name] for name in names}
    return SFTConfig(
        data=data,
        row_buckets=tuple(work["row_buckets"]),
        batch_size=work["rows"],
        micro_batch_size=1 if work["row_buckets"] else None,  # each row is cut by itself, as TRL's are
        checkpoint_every=10**9,
        sample_every=0,
        **chosen,
    )


def trl_side(work: dict[str, Any], turns: Turns, *, flat: bool) -> None:
    """`flat`: a batch is one row, as TRL packs; else a row at a time, accumulated."""
    from pathlib import Path

    import torch
    import transformers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from astra_jax.sft.step import learning_rate
    from astra_jax.tokenizer import ChatTokenizer
    from synthesis.core.datasets import read_dataset
    from synthesis.core.records import Trajectory

    torch.set_num_threads(work["threads"])
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "use_cache": False}
    model = transformers.Qwen3ForCausalLM.from_pretrained(work["hf"], **options)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(Path(work["hf"]) / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_template(),
    )
    trajectories = read_dataset(work["data"], Trajectory)
    dataset = Dataset.from_list([_conversation(trajectory) for trajectory in trajectories])
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            use_cpu=work["device"] == "cpu",
            bf16=work["dtype"] == "bfloat16",
            max_length=work["seq_len"],
            packing=True,
            assistant_only_loss=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=work["rows"] if flat else 1,
            gradient_accumulation_steps=1 if flat else work["rows"],
            max_steps=work["steps"],
            max_grad_norm=work["max_grad_norm"],
            seed=work["seed"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1.0, betas=(work["b1"], work["b2"]), eps=work["eps"], weight_decay=0.0, fused=True
        )
        rate = learning_rate(_sft_config(work), work["steps"])
        rates = [float(rate(step)) for step in range(work["steps"] + 1)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, work["steps"])])
        # Both sides train on the same tokens of the same conversations.
        ours = ChatTokenizer.load(work["hf"])
        seen = 0.0

        class OnLog(transformers.TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                nonlocal seen
                if logs and "loss" in logs:
                    tokens, seen = logs["num_tokens"] - seen, logs["num_tokens"]
                    turns.stepped(tokens, float(logs["loss"]))

        trainer = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[OnLog()],
            optimizers=(optimizer, schedule),
        )
        trained = sum(label != -100 for row in trainer.train_dataset["labels"] for label in row)
        wanted = 0
        for one in trajectories:
            ids, mask = ours.encode_segments(ours.format.render(one.messages, one.tools, keep_reasoning=True))
            if len(ids) > work["seq_len"]:
                raise ValueError(f"{one.id} has {len(ids)} tokens, more than --seq_len={work['seq_len']}")
            wanted += sum(mask)
        if trained != wanted:
            raise ValueError(f"TRL trains on {trained} tokens of the dataset, we on {wanted}")
        turns.wait()
        trainer.train()


def _template() -> str:
    """TRL's for Qwen3, with its marks of what is trained on, but for the newline behind a turn: no model says it."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "chat_templates" / "qwen3_training.jinja"
    text = file.read_text(encoding="utf-8")
    inside = "        {{- '<|im_end|>\\n' }}\n        {%- endgeneration %}\n"
    outside = "        {{- '<|im_end|>' }}\n        {%- endgeneration %}\n        {{- '\\n' }}\n"
    if text.count(inside) != 1:
        raise ValueError(f"{file} has another form than that of TRL 1.16; adapt benchmarks/sft_vs_pytorch_side.py")
    return text.replace(inside, outside)


def _conversation(trajectory: Any) -> dict[str, Any]:
    """As TRL wants them: OpenAI's messages, Qwen3's reasoning. JSON in strings, which Arrow would else unify."""
    messages = []
    for message in trajectory.messages:
        calls = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
        one = {"role": message.role, "content": message.content, "reasoning_content": message.reasoning or None}
        messages.append(one | {"tool_calls": calls or None})
    return {"messages": messages, "tools": json.dumps([tool.to_openai() for tool in trajectory.tools])}


def main() -> None:
    turns = Turns()
    name, work = sys.argv[1], json.loads(sys.argv[2])
    if name.startswith("jax"):
        jax_side(work, turns)
    else:
        trl_side(work, turns, flat="flat" in name)
    turns.wait()


if __name__ == "__main__":
    main()
