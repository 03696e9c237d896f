"""Pages of `launch.inspect` and `launch.watch`: `service.py` serves them, and each kind of record is a module."""
