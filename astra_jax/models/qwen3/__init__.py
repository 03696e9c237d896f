"""Qwen3, dense.

`presets` says how large, `modules` computes, `sharding` places, `weights` reads and writes Hugging Face checkpoints.
"""
