"""Qwen3, dense or with experts: `presets` says how large, and reads and writes `config.json`; `names` is its table."""
