"""Supervised fine-tuning: `train` is the loop, `step` one step of it, `data` what it reads, `config` the settings."""
