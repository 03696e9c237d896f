"""A policy behind OpenAI's HTTP API: `service` is the server, `launch.serve` the program."""
