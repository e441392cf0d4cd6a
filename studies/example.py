"""Measure how accuracy grows with the number of images: a list of your own.

  python -m studies.example NAME DIR [--config.KEY=VALUE ...]

NAME is a configuration of any data set. The same command resumes.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import memory_vit as mv
from studies import grid

COUNTS, REGIMES = (2, 8, 32), ("head", "memory_masked")


def plan(
  config: mv.Config, results: Mapping[str, mv.RunResult]
) -> list[grid.Run]:
  """A run for each regime and number of images; none needs a result."""
  return [
    grid.Run(
      name=f"{regime}-{count}-of-each-class",
      configure=functools.partial(
        config.replaced, {"regime": regime, "data.per_class": count}
      ),
    )
    for regime in REGIMES
    for count in COUNTS
  ]


def main(name: str, workdir: str, *flags: str) -> None:
  """Train the unfinished runs, and print the accuracy of each run.

  Raises:
    MemoryVitError: as `Grid.finished` and `Grid.train`.
  """
  engine = grid.open_grid(mv.read_config(name, flags=flags), Path(workdir))
  runs = functools.partial(plan, engine.config)
  results = engine.finished(runs)
  engine.train(runs, results)
  for run, result in results.items():
    print(f"{run:32} {result.tasks[0].test.accuracy:6.1%}")


if __name__ == "__main__":
  main(*sys.argv[1:])
