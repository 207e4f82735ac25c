"""What Prometheus reads: vLLM's metrics by their suffixes, under the prefix `compress:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from compress.runtime.server.job import Track

PREFIX = "compress:"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)  # seconds: between tokens
LONG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds: of requests
COUNTERS = {
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the cache."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the cache."),
    "num_preemptions": ("preemptions", "Requests that gave up their pages to others."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "generation_tokens": ("generated_tokens", "Tokens generated."),
    "spec_decode_num_drafts": ("drafts", "Times that draft tokens were verified."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens verified."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens kept."),
    "engine_steps": ("steps", "Steps of the engine."),
}
GAUGES = {
    "num_requests_running": ("running", "Requests that compute."),
    "num_requests_waiting": ("waiting", "Requests that wait for room."),
    "kv_cache_pages": ("pages_total", "Pages of the cache."),
    "kv_cache_pages_used": ("pages_used", "Pages that requests hold."),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", LONG),
    "inter_token_latency_seconds": ("Between two steps that brought tokens.", SHORT),
    "request_time_per_output_token_seconds": ("Per token after the first.", SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", LONG),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", LONG),
    "request_prefill_time_seconds": ("From the first step to the first token.", LONG),
    "request_decode_time_seconds": ("From the first token to the end.", LONG),
}


class EngineCollector:
    """The engine's own counters and gauges, read when asked for."""

    def __init__(self, stats: Callable[[], Any], model: str) -> None:
        self._stats, self._model = stats, model

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for suffix, (name, told) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + suffix, told, labels=["model_name"])
            counter.add_metric([self._model], getattr(stats, name))
            yield counter
        for suffix, (name, told) in GAUGES.items():
            yield self._gauge(suffix, told, getattr(stats, name))
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's pages that requests hold, 0 to 1.", usage)

    def _gauge(self, suffix: str, told: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + suffix, told, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge


class Metrics:
    """Counts and times requests; the engine's thread and the event loop may both call it."""

    def __init__(self, stats: Callable[[], Any], model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(stats, model))
        self._times = {
            suffix: Histogram(PREFIX + suffix, told, ["model_name"], registry=self._registry, buckets=buckets).labels(
                model
            )
            for suffix, (told, buckets) in HISTOGRAMS.items()
        }
        counter = Counter(
            PREFIX + "request_success",
            "Choices that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {reason: counter.labels(model, reason) for reason in ("stop", "length", "abort")}
        self._truncated = self._counter("prompts_truncated", "Prompts cut by truncate_prompt_tokens.", model)
        self._cut_tokens = self._counter("prompt_tokens_truncated", "Prompt tokens cut away.", model)
        self._refused = Counter(
            PREFIX + "requests_refused",
            "HTTP requests refused, by status.",
            ["model_name", "status"],
            registry=self._registry,
        )
        self._model = model

    def _counter(self, suffix: str, told: str, model: str) -> Counter:
        return Counter(PREFIX + suffix, told, ["model_name"], registry=self._registry).labels(model)

    def token(self, track: Track, tokens: int, now: float) -> None:
        if track.gap is not None:
            self._times["inter_token_latency_seconds"].observe(track.gap)
        elif track.first_at is not None:
            self._times["time_to_first_token_seconds"].observe(track.first_at - track.job.arrived_at)
            scheduled = now if track.scheduled_at is None else track.scheduled_at
            self._times["request_queue_time_seconds"].observe(scheduled - track.job.arrived_at)
            self._times["request_prefill_time_seconds"].observe(track.first_at - scheduled)

    def finished(self, track: Track, reason: str, now: float) -> None:
        self._finished[reason].inc()
        if reason == "abort":
            return
        self._times["e2e_request_latency_seconds"].observe(now - track.job.arrived_at)
        if track.first_at is not None:
            self._times["request_decode_time_seconds"].observe(now - track.first_at)
            if track.counted > 1:
                per_token = (now - track.first_at) / (track.counted - 1)
                self._times["request_time_per_output_token_seconds"].observe(per_token)

    def truncated(self, tokens: int) -> None:
        self._truncated.inc()
        self._cut_tokens.inc(tokens)

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
