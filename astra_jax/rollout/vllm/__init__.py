"""Rollouts on vLLM servers: `policy` asks them, `server` is one of them, `sync` and `publishing` transfer weights."""
