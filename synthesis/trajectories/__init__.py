"""The SFT track: tool documents to scored multi-turn trajectories (paper, section 2.1)."""
