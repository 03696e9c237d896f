"""Supervised fine-tuning: `train` is the loop, `step` one step, `data` the input pipeline, `config` the settings."""
