"""Pages of `astra inspect` and `astra watch`: `service.py` serves them, and each kind of record is a module."""
