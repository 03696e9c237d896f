"""Planner: does a job fit, and how fast is it? It compiles the real training step for accelerators that are not here.

`hardware` knows the chips and slices, `programs` lowers the steps, `collectives` reads the compiled program's traffic,
`plan` combines them. Needs `pip install '.[tpu]'` for TPUs, but no TPU.
"""
