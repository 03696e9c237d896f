"""Does it fit, and how fast can it be: compiles the real training step for accelerators that are not here.

`hardware` knows the chips and slices, `programs` lowers the steps, `collectives` reads the compiled program's traffic,
`plan` puts it together. Needs `pip install '.[tpu]'` for TPUs; no TPU.
"""
