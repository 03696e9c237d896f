"""The pages of `launch.inspect`. `service.py` serves them; each kind of record has its routes, all have `cards.py`."""
