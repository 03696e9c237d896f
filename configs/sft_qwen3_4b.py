"""SFT of Qwen3-4B: the paper's batch, a learning rate of 1e-5 (ours)."""

from configs.training import sft_run

CONFIG = sft_run("4b", learning_rate=1e-5)
