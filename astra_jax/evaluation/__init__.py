"""Evaluation: held-out environments (`episodes.py`), and public benchmarks by their own harnesses (`run.py`)."""
