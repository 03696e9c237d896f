"""One side of `benchmarks.grpo_step`: `python -m benchmarks.grpo_step_side NAME FOLDER train|gradients`.

train      answers the lines of `train_step_side.serve`, a step being one update
gradients  writes FOLDER/gradients-NAME/*.safetensors, by Hugging Face's names, and answers {"loss"}
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.shapes import Shape
from benchmarks.train_step_side import MATMUL, Multiply, Step, own_stdout, serve

PAD = 0
"""A token that no episode has."""

OPTIMIZER = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28

Work = dict[str, Any]


@dataclass(frozen=True)
class Built:
    """A side.

    Attributes:
        step: one update on policy; returns its loss.
        gradients: of the given weights, with the given old logprobs, written to a folder; returns the loss.
        parameters: how many.
    """

    step: Step
    multiply: Multiply
    gradients: Callable[[Path], float]
    parameters: int


def read_work(folder: Path) -> Work:
    """Return the work of all sides. `shape` is the model's."""
    work = json.loads((folder / "work.json").read_text())
    shape = {field.name: work["case"][field.name] for field in fields(Shape)}
    return work | {"shape": shape, "folder": str(folder), "hf": str(folder / "hf")}


def read_episodes(folder: Path) -> dict[str, Any]:
    """Return the arrays that `grpo_step.prepare` wrote; `_bt` are [episodes, tokens], each episode from the left."""
    import numpy as np

    with np.load(folder / "episodes.npz") as file:
        return dict(file)


# ---------------------------------------------------------------------------------------------------------------------
# Ours


def qwen3(work: Work) -> Any:
    from astra_jax.models.qwen3.presets import Qwen3Config

    return Qwen3Config(**work["shape"], tie_embeddings=True)


def grpo_config(work: Work) -> Any:
    from astra_jax.grpo.config import GRPOConfig
    from astra_jax.grpo.losses import ObjectiveConfig
    from astra_jax.rollout.episode import EpisodeConfig

    case = work["case"]
    return GRPOConfig(
        batch_size=case["groups"],
        group_size=work["group_size"],
        micro_batch_size=case["at_once"]["jax"],
        learning_rate=LEARNING_RATE,
        objective=ObjectiveConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH, tis_cap=None),
        episode=EpisodeConfig(max_prompt_tokens=case["prompt"], max_response_tokens=case["completion"]),
        row_buckets=(case["row_tokens"],),
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        **OPTIMIZER,
    )


def our_episodes(arrays: Mapping[str, Any]) -> list[Any]:
    """As rollouts would give them; what the sampler said are the old logprobs."""
    from astra_jax.rollout.episode import Episode
    from synthesis.core.reward import Reward

    episodes = []
    for row, length in enumerate(arrays["lengths_b"].tolist()):
        reward = float(arrays["rewards_b"][row])
        score = Reward(value=reward, recall=reward, precision=reward, solved=0, needed=1, calls=1)
        names = ("tokens_bt", "mask_bt", "old_logps_bt")
        ids, mask, logps = (arrays[name][row, :length].tolist() for name in names)
        prompt = int(arrays["prompts_b"][row])
        episodes.append(Episode("e", ids, prompt, mask, logps, [0] * length, [], score, 1, "answered", []))
    return episodes


def one_by_one(arrays: Mapping[str, Any], length: int) -> Iterator[Any]:
    """Each episode as a micro-batch of one row."""
    from astra_jax.grpo.packing import pack

    for episode, advantage in zip(our_episodes(arrays), arrays["advantages_b"], strict=True):
        yield from pack([episode], [float(advantage)], row_buckets=(length,), rows=1)


def jax_side(work: Work) -> Built:
    import jax
    import jax.numpy as jnp

    from astra_jax.grpo.step import accumulate, build_micro_batches, grpo_optimizer, update_step
    from astra_jax.models.hf_checkpoint import save_hf
    from astra_jax.rollout.records import Group
    from astra_jax.run import weights
    from astra_jax.run.batch import to_device
    from astra_jax.run.gradients import zero_gradients
    from astra_jax.run.optimizers import initial_state

    model, config, size = qwen3(work), grpo_config(work), work["group_size"]
    episodes = our_episodes(read_episodes(Path(work["folder"])))
    groups = [Group(start, "e", 0, episodes[start : start + size]) for start in range(0, len(episodes), size)]
    params, opt_state = initial_state(weights.load(work["hf"], model), grpo_optimizer(config))
    state = [params, opt_state]

    def step() -> float:
        state[0], state[1], metrics = update_step(state[0], state[1], groups, model, config)
        return metrics["train/loss"]

    def gradients(folder: Path) -> float:
        batches, total = build_micro_batches(groups, model, config)
        sums, loss = zero_gradients(params), 0.0
        for batch in batches:
            batch = to_device(replace(batch, old_logps_bt=batch.sampler_logps_bt), None)
            sums, (part, _) = accumulate(params, sums, batch, model=model, config=config)
            loss += float(part) / total
        save_hf(jax.tree.map(lambda x: x / total, sums), model, folder)
        return loss

    square = jax.random.normal(jax.random.key(0), (MATMUL, MATMUL))
    product = jax.jit(jnp.matmul)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return Built(step, lambda: product(square, square).block_until_ready(), gradients, count)


# ---------------------------------------------------------------------------------------------------------------------
# The others


def padded(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts padded on the left, completions on the right: what both of the others want."""
    import numpy as np

    prompts, lengths = arrays["prompts_b"], arrays["lengths_b"]
    count, p, c = len(lengths), int(prompts.max()), int((lengths - prompts).max())
    ints = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "trained")
    out: dict[str, Any] = {name: np.zeros((count, p if "prompt" in name else c), np.int32) for name in ints}
    out["old_logps"] = np.zeros((count, c), np.float32)
    for row, (prompt, end) in enumerate(zip(prompts, lengths, strict=True)):
        size = end - prompt
        out["prompt_ids"][row, p - prompt :] = arrays["tokens_bt"][row, :prompt]
        out["prompt_mask"][row, p - prompt :] = 1
        out["completion_ids"][row, :size] = arrays["tokens_bt"][row, prompt:end]
        out["completion_mask"][row, :size] = 1
        out["trained"][row, :size] = arrays["mask_bt"][row, prompt:end]
        out["old_logps"][row, :size] = arrays["old_logps_bt"][row, prompt:end]
    return out | {"advantages": arrays["advantages_b"]}


def trl_side(work: Work) -> Built:
    """`GRPOTrainer`, whose generation gives it these episodes; its `training_step`, then clip and optimizer."""
    import datasets
    import tokenizers
    import torch
    import transformers
    from safetensors.torch import save_file
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(work["threads"])
    arrays = padded(read_episodes(Path(work["folder"])))
    count, at_once = len(arrays["advantages"]), work["case"]["at_once"]["trl"]
    passes = count // at_once
    given = {
        name: torch.tensor(arrays[name], dtype=torch.long)
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    } | {
        "tool_mask": torch.tensor(arrays["trained"], dtype=torch.long),
        "advantages": torch.tensor(arrays["advantages"]),
        "num_items_in_batch": torch.tensor(int(arrays["trained"].sum())),
    }
    old = {"old_per_token_logps": torch.tensor(arrays["old_logps"])}

    class Given(GRPOTrainer):
        """Generates nothing."""

        batch: dict[str, Any] = given

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(self.batch)

    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "use_cache": False}
    model = transformers.Qwen3ForCausalLM.from_pretrained(work["hf"], **options)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"pad": PAD, "end": 1}, unk_token="end"))
    trainer = Given(
        model=model,
        reward_funcs=lambda **_: [],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=passes,
            num_generations=work["group_size"],
            max_completion_length=work["case"]["completion"],
            loss_type="dapo",
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            beta=0.0,
            temperature=1.0,
            report_to="none",
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "end"}] * count),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", eos_token="end"),
    )
    trainer.current_gradient_accumulation_steps = passes
    betas = (OPTIMIZER["b1"], OPTIMIZER["b2"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=betas, eps=OPTIMIZER["eps"], weight_decay=0, fused=True
    )
    model.train()

    def backward() -> float:
        optimizer.zero_grad(set_to_none=True)
        return sum(float(trainer.training_step(model, [], num_items_in_batch=1)) for _ in range(passes))

    def step() -> float:
        loss = backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return loss

    def gradients(folder: Path) -> float:
        trainer.batch = given | old
        loss = backward()
        folder.mkdir()
        save_file({name: p.grad for name, p in model.named_parameters()}, folder / "all.safetensors")
        return loss

    square = torch.randn(MATMUL, MATMUL)
    return Built(step, lambda: torch.matmul(square, square), gradients, sum(p.numel() for p in model.parameters()))


def tunix_side(work: Work) -> Built:
    """`Trainer` with `grpo_loss_fn`, as its agentic GRPO learner sets it up; its jitted train step."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from safetensors.numpy import save_file
    from tunix.models.qwen3 import model as qwen3_model
    from tunix.models.qwen3 import params as qwen3_params
    from tunix.rl import algo_core, common, trainer
    from tunix.rl.agentic import agentic_grpo_learner
    from tunix.sft import peft_trainer

    shape, size = work["shape"], work["group_size"]
    config = qwen3_model.ModelConfig(
        num_layers=shape["n_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["d_model"],
        hidden_dim=shape["d_ff"],
        num_heads=shape["n_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["n_kv_heads"],
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    model = qwen3_params.create_model_from_safe_tensors(work["hf"], config, dtype=jnp.float32)
    algorithm = agentic_grpo_learner.GRPOConfig(
        num_generations=size, beta=0.0, epsilon=CLIP_LOW, epsilon_high=CLIP_HIGH, loss_agg_mode="token-mean"
    )
    algorithm.temperature = 1.0
    arrays = padded(read_episodes(Path(work["folder"])))
    names = ("prompt_ids", "prompt_mask", "completion_ids")
    example = common.TrainExample(
        **{name: jnp.asarray(arrays[name]) for name in names},
        completion_mask=jnp.asarray(arrays["trained"]),
        advantages=jnp.asarray(arrays["advantages"]),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )

    def loss_fn(model: Any, train_example: Any, algo_config: Any) -> Any:
        return algo_core.grpo_loss_fn(model, train_example, algo_config, PAD, 1)

    adamw = optax.adamw(LEARNING_RATE, weight_decay=0.0, **OPTIMIZER)
    actor = trainer.Trainer(
        model,
        optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), adamw),
        peft_trainer.TrainingConfig(eval_every_n_steps=2**30),
        custom_checkpoint_metadata_fn=dict,
    )
    actor.with_loss_fn(loss_fn, has_aux=True)
    actor.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
    train_step: list[Any] = []

    def step() -> float:
        if not train_step:
            train_step.append(actor.jit_train_and_eval_step(cache_nnx_graph=True)[0])
        loss, _, _ = train_step[0](example)
        return float(loss)

    def gradients(folder: Path) -> float:
        with_old = replace(example, old_per_token_logps=jnp.asarray(arrays["old_logps"]))
        of_model = nnx.value_and_grad(lambda model, one: loss_fn(model, one, algorithm), has_aux=True)
        (loss, _), found = nnx.jit(of_model)(model, with_old)
        folder.mkdir()
        save_file(_hf_names(nnx.to_flat_state(found)), folder / "all.safetensors")
        return float(loss)

    square = jax.random.normal(jax.random.key(0), (MATMUL, MATMUL))
    product = jax.jit(jnp.matmul)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return Built(step, lambda: product(square, square).block_until_ready(), gradients, count)


def _hf_names(state: Any) -> dict[str, Any]:
    """Tunix's parameters by Hugging Face's names and in its shapes: a projection is [outputs, inputs]."""
    import numpy as np

    named = {}
    for path, leaf in state:
        array, parts = np.asarray(leaf[...]), [str(part) for part in path]
        if parts[0] == "embedder":
            named["model.embed_tokens.weight"] = array
            continue
        if parts[0] == "final_norm":
            named["model.norm.weight"] = array
            continue
        part = parts[-2]
        if part.endswith("_proj"):
            inputs = array.shape[0] * array.shape[1] if part == "o_proj" else array.shape[0]
            array = array.reshape(inputs, -1).T
        parts[2:-1] = ["self_attn" if name == "attn" else name for name in parts[2:-1]]
        named[".".join(["model", *parts[:-1], "weight"])] = np.ascontiguousarray(array)
    return named


def main() -> None:
    answers = own_stdout()
    name, folder, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    built = {"jax": jax_side, "trl": trl_side, "tunix": tunix_side}[name](read_work(folder))
    if what == "gradients":
        print(json.dumps({"loss": built.gradients(folder / f"gradients-{name}")}), file=answers, flush=True)
    else:
        serve(built.step, built.multiply, built.parameters, answers)


if __name__ == "__main__":
    main()
