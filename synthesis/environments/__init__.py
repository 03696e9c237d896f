"""The RL track: decomposed questions to executable, self-checking environments (paper, section 2.2)."""
