"""Prometheus metrics of one server: vLLM's base names under the prefix `tokenspeed:`, so its dashboards carry over.

What a client feels is counted where it is seen, in the front; what the core counts arrives as totals with each step
and is shown as it came last. Times are differences of one process's monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenspeed.runtime.messages import Stats
from tokenspeed.runtime.tallies import Spread, Tally

PREFIX = "tokenspeed:"
_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


class _CoreTotals(Collector):
    """The engine core's own numbers, read from its last snapshot at scrape time."""

    def __init__(self, model_name: str) -> None:
        self.stats = Stats()
        self._labels = (["model_name"], [model_name])

    def collect(self) -> Iterable[Metric]:
        stats, (names, values) = self.stats, self._labels
        used = stats.kv_pages_total - stats.kv_pages_free - stats.kv_pages_cached
        gauges = (
            ("num_requests_running", "Requests in the running batch", stats.running),
            ("num_requests_waiting", "Requests that wait to be scheduled", stats.waiting),
            (
                "kv_cache_usage_perc",
                "Share of KV pages that requests hold; 1 is all",
                used / (stats.kv_pages_total or 1),
            ),
            ("queue_age_steps", "Steps since the request at the head of the queue came", stats.queue_age_steps),
            ("decode_stall_tokens", "Most prompt tokens in a step that also decoded", stats.decode_stall_tokens),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens),
            ("num_preemptions", "Requests retracted to be computed again", stats.retractions),
            ("engine_steps", "Steps of the engine", stats.steps),
            ("plan_seconds", "Seconds spent on planning steps", stats.plan_seconds),
            ("decode_skips", "Tokens that a step left out for want of a page", stats.decode_skips),
        )
        if stats.host:
            held = stats.host["total"] - stats.host["free"]
            gauges += (
                ("host_kv_bytes", "Bytes of KV pages that host memory holds", held * stats.page_bytes),
                (
                    "host_kv_capacity_bytes",
                    "Bytes of KV pages that it can hold",
                    stats.host["total"] * stats.page_bytes,
                ),
            )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=names)
            counter.add_metric(values, value)
            yield counter
        yield from self._labelled()

    def _labelled(self) -> Iterable[Metric]:
        """Families with a further label; each is absent where the server has no such thing."""
        stats, (names, values) = self.stats, self._labels
        by_kind = stats.transfers.items()
        families: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str, dict[str, int]], ...] = (
            (GaugeMetricFamily, "window_kv_pages", "Device pages of layers that see a window: held by requests, cached, free", "state",
             stats.window_pages),
            (CounterMetricFamily, "prefix_cache_hits_by_tier", "Prompt tokens found, by where", "tier", stats.hit_tokens),
            (CounterMetricFamily, "kv_transfer_bytes", "Bytes that arrived in another tier", "kind",
             {kind: of["pages"] * stats.page_bytes for kind, of in by_kind}),
            (CounterMetricFamily, "kv_transfer_missing_pages", "Pages that did not arrive: absent, failed, or too late", "kind",
             {kind: of["missing_pages"] for kind, of in by_kind}),
            (GaugeMetricFamily, "kv_transfers_in_flight", "Transfers under way", "kind",
             {kind: of["in_flight"] for kind, of in by_kind}),
            (CounterMetricFamily, "kv_storage_events", "Pages read, written, removed or damaged, and calls that failed", "event",
             {event: n for event, n in stats.storage.items() if not event.startswith("bytes_")}),
            (CounterMetricFamily, "kv_storage_bytes", "Bytes read from storage and written to it", "direction",
             {event[6:]: n for event, n in stats.storage.items() if event.startswith("bytes_")}),
        )  # fmt: skip
        for family, name, text, label, series in families:
            metric = family(PREFIX + name, text, labels=[*names, label])
            for of, value in series.items():
                metric.add_metric([*values, of], value)
            if series:
                yield metric


class Metrics:
    """The registry of one AsyncLLM and what it observes."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._totals = _CoreTotals(model_name)
        self.registry.register(self._totals)
        self._model = model_name

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._success = Counter(
            PREFIX + "request_success",
            "Requests ended, by how",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._request_max = self._histogram("request_max_num_generation_tokens", "Tokens it may generate", _TOKENS)
        self._request_generation = self._histogram("request_generation_tokens", "Tokens it generated", _TOKENS)
        self._first_token = self._histogram("time_to_first_token_seconds", "Submission to first token", _LATENCY)
        self._inter_token = self._histogram("inter_token_latency_seconds", "Between tokens", _LATENCY)
        self._request = self._histogram("e2e_request_latency_seconds", "Submission to end", _LATENCY)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens of an engine step", _STEP)

    def _counter(self, name: str, text: str) -> Tally:
        tally = Tally(PREFIX + name, text, {"model_name": self._model})
        self.registry.register(tally)
        return tally

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Spread:
        spread = Spread(PREFIX + name, text, {"model_name": self._model}, buckets)
        self.registry.register(spread)
        return spread

    def accepted(self, prompt_tokens: int, max_tokens: int) -> None:
        """A request was handed to the core."""
        self._prompt_tokens.add(prompt_tokens)
        self._request_prompt.observe(prompt_tokens)
        self._request_max.observe(max_tokens)

    def tokens(self, count: int, seconds: float, *, first: bool = False) -> None:
        """`count` tokens of one choice, `seconds` after its submission (`first`) or its tokens before."""
        self._generation_tokens.add(count)
        if first:
            self._first_token.observe(seconds)
        else:
            self._inter_token.observe(seconds / count, count)

    def gaps(self, gaps: Mapping[float, int]) -> None:
        """How often so many seconds lay between a token and the one before."""
        for seconds, count in gaps.items():
            self._generation_tokens.add(count)
            self._inter_token.observe(seconds, count)

    def finished(self, reason: str, tokens: int, seconds: float) -> None:
        """A choice has ended, `seconds` after its submission."""
        self._success.labels(self._model, reason).inc()
        self._request_generation.observe(tokens)
        self._request.observe(seconds)

    def step(self, before: Stats, now: Stats) -> None:
        """The core's snapshot after a step."""
        if now.steps > before.steps:
            self._step_tokens.observe((now.step_tokens - before.step_tokens) / (now.steps - before.steps))
        self._totals.stats = now

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)
