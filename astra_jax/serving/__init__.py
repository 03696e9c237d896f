"""OpenAI's HTTP API for a policy: `service` is the server, `launch.serve` the program."""
