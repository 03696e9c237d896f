"""SFT of Qwen3-32B: the paper's batch, a learning rate of 2e-6 (the paper's)."""

from configs.training import sft_run

CONFIG = sft_run("32b", learning_rate=2e-6)
