"""Qwen2.5, dense: `presets` says how large, and reads and writes `config.json`; `names` is its table."""
