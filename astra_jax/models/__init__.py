"""Models. `model.Model` is what the rest holds; a family is a folder with its sizes and its table of names.

`layers` and `decoder` compute, `sharding` places, `hf_checkpoint` reads and writes, `families` finds the folder that a
checkpoint is of. Nothing outside this room and `configs` knows a family by name.
"""
