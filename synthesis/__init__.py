"""Synthesis: Python workers that write SFT trajectories and RL environments as ArrayRecord. Never imports jax."""
