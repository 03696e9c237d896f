"""Measurements: `python -m benchmarks.NAME` prints rows and appends them to `benchmarks/results/NAME.jsonl`."""
