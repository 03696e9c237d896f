"""SFT of Qwen3-14B: the paper's batch, a learning rate of 5e-6 (the paper's)."""

from configs.training import sft_run

CONFIG = sft_run("14b", learning_rate=5e-6)
