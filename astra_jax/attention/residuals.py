"""Names of residuals of attention's backward passes besides q, k and v, for the policies of `jax.checkpoint`."""

RESIDUALS = "attention"
"""Checkpoint name of the output and of the scores' log-sum-exp, in every backend."""
