"""GRPO of Qwen3-8B with the paper's settings: 25,600 + 49,152 tokens, constant learning rate of 2e-6."""

from configs.training import grpo_run

CONFIG = grpo_run("8b")
