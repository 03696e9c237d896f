"""SFT of Qwen3-30B-A3B: the paper's batch, a learning rate of 5e-6 (ours)."""

from configs.training import sft_run

CONFIG = sft_run("30b-a3b", learning_rate=5e-6)
