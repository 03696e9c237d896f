"""What attention's backward passes need beside q, k and v, by name: for the policies of `jax.checkpoint`."""

RESIDUALS = "attention"
"""The checkpoint name of the output and of the scores' log-sum-exp, in every backend."""
