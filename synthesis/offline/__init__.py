"""The demo: a teacher that follows rules over real facts, the tool servers of these facts, and a git repository.

Nothing of it is loaded before it is asked for: see `synthesis.pipeline.demo`.
"""
