"""The layers of decoders: attention with a rotary embedding, gated feed-forwards, experts. They know no family."""
