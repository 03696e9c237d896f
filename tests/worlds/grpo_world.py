"""What runs of `astra grpo` start from: a configuration, a model that calls a tool, its tokenizer, environments."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from rollout_world import CAPITAL, DISTRACTORS, POPULATION, make_environment

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.model import Params
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chatml import QWEN3
from synthesis.core.datasets import write_dataset
from synthesis.core.records import Message, ToolCall, ToolEnvironment

ROOT = Path(__file__).parent.parent.parent

MODEL = Qwen3Config(
    vocab_size=512,
    d_model=512,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=32,
    d_ff=32,
    tie_embeddings=False,
    max_positions=2048,
)

CONFIG = f"""
from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.episode import EpisodeConfig
from configs.training import GRPORun

MODEL = {MODEL}
EPISODE = EpisodeConfig(max_turns=2, max_prompt_tokens=400, max_response_tokens=100, distractors_per_band=0)
CONFIG = GRPORun(MODEL, GRPOConfig(steps=2, batch_size=2, group_size=4, concurrent_groups=1, episode=EPISODE,
                                   row_buckets=(512,), micro_batch_size=2, checkpoint_every=1, episodes_every=1))
"""


def caller(config: Qwen3Config, tokenizer: ChatTokenizer) -> Params:
    """A model that knows which token follows which: it calls a tool, in some of its attempts the right one."""
    right = '<tool_call>{"name": "capital_of", "arguments": {"country": "France"}}</tool_call><|im_end|>'
    follow_vv = jnp.zeros((config.vocab_size, config.vocab_size))
    for text in (f"\n{right}", "\nNo<|im_end|>"):
        ids = tokenizer.encode(text)
        follow_vv = follow_vv.at[jnp.array(ids[:-1]), jnp.array(ids[1:])].set(1.0)
    params = config.init(jax.random.key(0))
    layers = params["layers"]
    layers["attention"]["o_nhd"] *= 0
    layers["mlp"]["down_fd"] *= 0
    return params | {"embed_vd": jnp.eye(config.vocab_size), "head_dv": follow_vv}  # normed, an entry of 1 is 22


def make_grpo_world(folder: Path) -> ChatTokenizer:
    """Write `config.py`, the model (`serve`, in Hugging Face's form) and `environments`; returns the tokenizer."""
    (folder / "config.py").write_text(CONFIG)
    environments = [make_environment(f"e{i}") for i in range(4)]
    specs = [tool.spec for tool in (CAPITAL, POPULATION, *DISTRACTORS["high"], *DISTRACTORS["low"])]
    call = Message("assistant", "", tool_calls=[ToolCall("call_0", "capital_of", {"country": "France"})])
    segments = QWEN3.render([Message("user", environments[0].question), call], specs)
    tokenizer = ChatTokenizer.train(["".join(segment.text for segment in segments)] * 8, 512, folder / "serve")
    save_hf(caller(MODEL, tokenizer), MODEL, folder / "serve")
    write_dataset(folder / "environments", ToolEnvironment, environments, card={"split": "train"})
    return tokenizer


def grpo_flags(world: Path) -> list[str]:
    """The flags of `astra grpo` for what `make_grpo_world` wrote."""
    flags = {"config": world / "config.py", "weights": world / "serve", "environments": world / "environments"}
    return [f"--{name}={value}" for name, value in flags.items()]
