"""Models. `model.Model` is the interface for other packages; a family is a folder with sizes and a table of names.

`layers` and `decoder` compute, `sharding` places parameters, `hf_checkpoint` reads and writes, `families` finds the
family of a checkpoint. Only this package and `configs` know families by name.
"""
