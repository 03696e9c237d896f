"""Code shared by every package above: records and datasets, reward and matching, the chat format, the agent loop, a
tool's result as text, stages with their journal, and clients of endpoints. No jax."""
