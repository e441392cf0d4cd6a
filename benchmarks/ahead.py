"""Measure the cost of limiting the steps that a host dispatches ahead.

  python -m benchmarks.ahead [--rounds=9]

Compares the training loop, with at most three steps in flight, and the same
loop without a limit, in turn in one process: a small ViT whose steps take about
as long as their dispatch, and Ti/16 at 64 px with 128 images. Prints the time
of the first as a multiple of the second: median and quartiles of the rounds.
"""

import argparse
import itertools
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np
import optax

import memory_vit as mv
from memory_vit.config import OptimConfig
from memory_vit.model.backbone import init_backbone
from memory_vit.model.vit_config import vit_config
from memory_vit.runtime import sharding
from memory_vit.tasks.split_forward import make_split_forward
from memory_vit.train import divergence, fit, optim
from memory_vit.train.state import Steps
from memory_vit.train.step import Step

_NAME = "task"
# (variant, side in pixels, images in a batch, steps in a round)
_WORKLOADS = (("Micro/8", 32, 16, 40), ("Ti/16", 64, 128, 5))


class Unbounded(divergence.DivergenceMonitor):
  """Collects metrics without waiting for any."""

  def add(self, metrics: object) -> None:
    self._pending.append(metrics)


class Workload:
  """A task trained on images of noise."""

  def __init__(self, variant: str, side: int, batch_size: int) -> None:
    config = vit_config(variant, image_size=side, num_classes=10)
    self._backbone = init_backbone(config, jax.random.key(0))
    self._task = mv.init_task(
      jax.random.key(1), self._backbone, name=_NAME, num_classes=100, cells=5
    )
    self._mesh, self._batch_size = sharding.make_mesh(), batch_size
    self._optimizer = optim.make_optimizer(
      {_NAME: OptimConfig()}, {_NAME: optax.constant_schedule(0.01)}
    )
    forward = make_split_forward(config, (self._task.spec,))
    self._step = Step(forward, self._optimizer, self._mesh)
    rng = np.random.default_rng(0)
    shape = (batch_size, side, side, 3)
    self._batch: dict[str, np.ndarray] = {
      "image": rng.uniform(-1, 1, shape).astype(np.float32),
      "label": rng.integers(0, 100, batch_size),
    }

  def seconds(
    self, steps: int, kind: type[divergence.DivergenceMonitor]
  ) -> float:
    """Train; returns the seconds of a step."""
    state = self._step.create_state({_NAME: self._task.params})
    with mock.patch.object(fit, "DivergenceMonitor", kind):
      _, past = fit.fit(
        self._step,
        state,
        self._batches(),
        title=_NAME,
        frozen={"backbone": self._backbone.params, "tasks": {}},
        mesh=self._mesh,
        steps=Steps(total=steps, log=steps),
        batch_size=self._batch_size,
      )
    return past.timed_seconds / past.timed_steps

  def _batches(self) -> Iterator[dict[str, np.ndarray]]:
    return itertools.repeat(self._batch)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=9)
  rounds = parser.parse_args().rounds
  for variant, side, batch_size, steps in _WORKLOADS:
    workload = Workload(variant, side, batch_size)
    workload.seconds(3, divergence.DivergenceMonitor)  # compiles
    ratios, bounded = [], []
    for i in range(rounds):
      kinds = [divergence.DivergenceMonitor, Unbounded]
      took = {k: workload.seconds(steps, k) for k in kinds[:: (-1) ** i]}
      bounded.append(took[divergence.DivergenceMonitor])
      ratios.append(took[divergence.DivergenceMonitor] / took[Unbounded])
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    print(
      f"{variant} {side} px, batch {batch_size}: {middle:.3f} ({low:.3f} to "
      f"{high:.3f}) of the time without a bound, "
      f"{1000 * np.median(bounded):.1f} ms a step; {rounds} rounds of {steps} "
      f"steps, {jax.devices()[0].device_kind}",
      flush=True,
    )


if __name__ == "__main__":
  main()
