"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import (
  CollectorRegistry,
  Counter,
  Gauge,
  Histogram,
  Info,
  ProcessCollector,
  generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Histogram bounds in seconds, from small models on GPUs to full queues on CPUs.
_SECONDS = (
  0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Metrics:
  """Metrics of one application, which has its own registry."""

  def __init__(self, dtype: str) -> None:
    self._registry = CollectorRegistry()
    ProcessCollector(registry=self._registry)
    about = "The model that answers."
    Info("memory_vit_model", about, registry=self._registry).info(
      {"dtype": dtype}
    )
    labels = ("method", "route")
    self._requests = Counter(
      "memory_vit_requests",
      "Requests, by method, route and status.",
      (*labels, "status"),
      registry=self._registry,
    )
    self._latency = Histogram(
      "memory_vit_request_seconds",
      "Seconds from the headers of a request to the end of its answer.",
      labels,
      buckets=_SECONDS,
      registry=self._registry,
    )
    self._images = Counter(
      "memory_vit_images",
      "Images, by result: answered, or refused as unreadable.",
      ("result",),
      registry=self._registry,
    )
    self._batch_fill = Histogram(
      "memory_vit_batch_fill",
      "Share of the rows of a batch that are images; the rest is padding.",
      buckets=_SHARES,
      registry=self._registry,
    )
    self._batch_seconds = Histogram(
      "memory_vit_batch_seconds",
      "Seconds to predict a batch; a large request takes several passes.",
      buckets=_SECONDS,
      registry=self._registry,
    )
    self._changes = Counter(
      "memory_vit_task_changes",
      "Changes of the set of tasks, by action.",
      ("action",),
      registry=self._registry,
    )
    self._problems = Gauge(
      "memory_vit_task_problem",
      "1 for each task file in --state_dir that cannot be used, and why.",
      ("task", "reason"),
      registry=self._registry,
    )
    self._batch_sizes = Gauge(
      "memory_vit_batch_size_compiled",
      "1 for each batch size that is compiled, 0 for one that is not yet.",
      ("size",),
      registry=self._registry,
    )
    self._compilation_problems = Gauge(
      "memory_vit_compilation_problem",
      "1 for batch sizes or attention if they cannot be compiled, and why.",
      ("programs", "reason"),
      registry=self._registry,
    )

  def watch(self, name: str, about: str, value: Callable[[], Any]) -> None:
    """Add a gauge that calls `value` each time the metrics are read."""
    gauge = Gauge(f"memory_vit_{name}", about, registry=self._registry)
    gauge.set_function(lambda: float(value()))

  def request(
    self, method: str, route: str, status: int, seconds: float
  ) -> None:
    self._requests.labels(method, route, str(status)).inc()
    self._latency.labels(method, route).observe(seconds)

  def images(self, answered: int, refused: int) -> None:
    self._images.labels("answered").inc(answered)
    self._images.labels("refused").inc(refused)

  def batch(self, images: int, rows: int, seconds: float) -> None:
    self._batch_fill.observe(images / rows)
    self._batch_seconds.observe(seconds)

  def change(self, action: str) -> None:
    self._changes.labels(action).inc()

  def task_problems(self, problems: Mapping[str, str]) -> None:
    """Set the gauges of unusable task files, given as {task name: reason}."""
    self._problems.clear()
    for name, reason in problems.items():
      self._problems.labels(name, reason).set(1)

  def compiled(
    self,
    sizes: Sequence[int],
    compiled: Sequence[int],
    problems: Mapping[str, str],
  ) -> None:
    """Set the gauges of compiled batch sizes and of compilation problems."""
    for size in sizes:
      self._batch_sizes.labels(str(size)).set(size in compiled)
    for programs, reason in problems.items():
      self._compilation_problems.labels(programs, reason).set(1)

  def text(self) -> bytes:
    return generate_latest(self._registry)
