"""Metrics of one service for `/metrics`, in their own registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from astra_jax.rollout.sampler import StreamingPolicy

_TO_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_WHOLE = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """Counters, gauges and histograms."""

    def __init__(self, policy: StreamingPolicy) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "astra_serving_requests", "Requests answered.", ["endpoint", "status"], registry=self.registry
        )
        self.failures = Counter(
            "astra_serving_failures", "Requests that the server failed on.", ["error"], registry=self.registry
        )
        self.tokens = Counter("astra_serving_tokens", "Tokens of finished choices.", ["kind"], registry=self.registry)
        self.to_first = self._histogram("time_to_first_token", "From a request to a choice's first tokens.", _TO_FIRST)
        self.per_token = self._histogram("time_per_token", "Between a choice's tokens, from its first on.", _PER_TOKEN)
        self.whole = self._histogram("choice", "From a request to the end of a choice.", _WHOLE)
        running = Gauge("astra_serving_running", "Choices that tokens are drawn for.", registry=self.registry)
        running.set_function(lambda: policy.running)
        waiting = Gauge("astra_serving_waiting", "Choices that wait for a slot.", registry=self.registry)
        waiting.set_function(lambda: policy.waiting)
        self._seconds, self._finished = 0.0, 0

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"astra_serving_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def observe(self, prompt: int, tokens: int, started: float, first: float, ended: float) -> None:
        """Record a finished choice.

        Args:
            prompt, tokens: number of the prompt's tokens, and of sampled tokens.
            started, first, ended: `time.perf_counter` of the request, of the first tokens, of the last.
        """
        self.tokens.labels("prompt").inc(prompt)
        self.tokens.labels("completion").inc(tokens)
        self.to_first.observe(first - started)
        if tokens > 1:
            self.per_token.observe((ended - first) / (tokens - 1))
        self.whole.observe(ended - started)
        self._seconds += ended - started
        self._finished += 1

    def mean_seconds(self) -> float:
        """Mean duration of the choices so far; one second before the first."""
        return self._seconds / self._finished if self._finished else 1.0
