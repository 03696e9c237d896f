"""The RL track: a question, the graph of its sub-questions, a proven tool for each: a world that checks itself.

`pipeline.synthesize` runs the stages, one file each: decompose → validate → implement → merge → distract → verify.
"""
