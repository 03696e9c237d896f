"""SFT of Qwen3-8B: the paper's batch, a learning rate of 5e-6 (ours)."""

from configs.training import sft_run

CONFIG = sft_run("8b", learning_rate=5e-6)
