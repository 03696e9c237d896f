"""Online multi-turn GRPO: `train` is the loop, `step` one update of it, `losses` the objective, `config` settings."""
