"""Workarounds for XLA's CPU backend. On TPUs and GPUs none of this runs, so you can skip the package.

`programs` has one hook for each optimisation in the compiled programs; the calling code is readable without it.
`environment` has the environment variables of a process on CPUs.
"""
