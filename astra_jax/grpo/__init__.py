"""Online multi-turn GRPO: `train` is the loop, `step` one update, `losses` the objective, `config` the settings."""
