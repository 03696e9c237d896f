"""Rollouts on vLLM servers: `policy` sends requests, `server` is one server, `sync` and `publishing` transfer weights."""
