"""Counts and times of a server, in the format of Prometheus."""

import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ServerMetrics:
    """Metrics of one server. Any thread may call the methods."""

    def __init__(self) -> None:
        disable_created_metrics()  # a second series for each count, with a time that nobody reads
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "tokamake_requests", "Requests", ["method", "path", "status"], registry=registry
        )
        self._request_seconds = Histogram(
            "tokamake_request_seconds", "Time of a request", ["path"], registry=registry,
            buckets=(*_SECONDS, 60.0, 120.0, 300.0),
        )  # fmt: skip
        self._first_token = Histogram(
            "tokamake_time_to_first_token_seconds", "From the request to a sequence's first token",
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self._between_tokens = Histogram(
            "tokamake_time_between_tokens_seconds", "Between tokens of a sequence",
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self._prompt_tokens = Counter(
            "tokamake_prompt_tokens", "Tokens of prompts", registry=registry
        )
        self._new_tokens = Counter("tokamake_new_tokens", "Generated tokens", registry=registry)
        self._sequences = Gauge(
            "tokamake_sequences", "Sequences that wait or continue", registry=registry
        )

    def request(self, method: str, path: str, *, status: int, seconds: float) -> None:
        self._requests.labels(method, path, status).inc()
        self._request_seconds.labels(path).observe(seconds)

    def sequences(self, change: int, *, prompt_tokens: int = 0) -> None:
        """Count sequences that came (positive) or ended (negative)."""
        self._sequences.inc(change)
        self._prompt_tokens.inc(prompt_tokens)

    def token(self, since: float, *, is_first: bool) -> float:
        """Count a new token; return its time. `since`: time of the request or the token before."""
        now = time.perf_counter()
        (self._first_token if is_first else self._between_tokens).observe(now - since)
        self._new_tokens.inc()
        return now

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
