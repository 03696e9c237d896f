"""Layers of decoders, for all families: attention with a rotary embedding, gated feed-forwards, experts."""
