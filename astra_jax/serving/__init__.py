"""OpenAI's HTTP API for a policy: `service` is the server, `astra serve` the program."""
