"""SFT of Qwen3-1.7B: the paper's batch, a learning rate of 1e-5 (ours)."""

from configs.training import sft_run

CONFIG = sft_run("1.7b", learning_rate=1e-5)
