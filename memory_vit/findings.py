"""What a study found: for every part a table, lines to plot and a sentence.

Everything here is computed from points that were measured; the paper's own
numbers stand beside.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memory_vit import measured
from memory_vit.config import Config
from memory_vit.costs import Cost
from memory_vit.measured import Choice, Point
from memory_vit.study import slug
from memory_vit.variants import ViTConfig

Row = dict[str, Any]
# Of every point of a line x, mean, least, greatest.
Line = list[tuple[float, float, float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """A part of the report.

  Attributes:
    title: its heading.
    rows: of the table; all have the same keys, which are its header.
    sentence: what the numbers say.
    notes: how they came about.
    lines: {label: points}; empty where there is nothing to plot.
    xlabel: of the plot.
    log: whether its x axis is logarithmic.
  """

  title: str
  rows: list[Row]
  sentence: str
  notes: tuple[str, ...] = ()
  lines: dict[str, Line] = dataclasses.field(default_factory=dict)
  xlabel: str = ""
  log: bool = False


# Table 2 of the paper, ViT-B/32; of memory by cells.
_TABLE2 = {
  "sun397": {
    "full": 0.769, "head": 0.759, "head_cls": 0.764,
    1: 0.770, 5: 0.768, 10: 0.769, 20: 0.769,
  },
  "inaturalist2017": {
    "full": 0.540, "head": 0.463, "head_cls": 0.487,
    1: 0.494, 5: 0.501, 10: 0.500, 20: 0.500,
  },
  "cifar100": {
    "full": 0.918, "head": 0.858, "head_cls": 0.886,
    1: 0.909, 5: 0.910, 10: 0.911, 20: 0.909,
  },
  "places365": {
    "full": 0.559, "head": 0.509, "head_cls": 0.524,
    1: 0.533, 5: 0.538, 10: 0.539, 20: 0.541,
  },
}  # fmt: skip
# Names of these data sets in TFDS, and in our configurations.
_PAPERS_NAMES = {
  "sun397": "sun397", "sun397-tfds": "sun397", "cifar100": "cifar100",
  "inaturalist2017": "inaturalist2017", "i_naturalist2017": "inaturalist2017",
  "places365": "places365", "places365_small": "places365",
}  # fmt: skip
# Section 4.4: i-Naturalist alone, then + Places, + CIFAR, + SUN.
_INTERFERENCE = (0.500, 0.281, 0.278, 0.173)
# Table 4, i-Naturalist: accuracy and the parameters that it gives.
_ADAPTERS = {
  "memory": (0.501, "46 K"),
  "adapter": (0.499, "737 K"),
  "adapter_memory": (0.503, "783 K"),
}
_CHOSEN = (
  "Learning rates are chosen on validation (mean over seeds); accuracies are "
  "means over seeds on the test split, `spread` is the greatest less the least."
)


def table2(config: Config, points: Sequence[Point]) -> Finding:
  """Every regime at its best learning rate."""
  paper = papers_table(config)
  kinds = [("full", 0), ("head", 0), ("head_cls", 0)]
  kinds += [("memory", cells) for cells in config.study.cells]
  kinds += [("memory_masked", cells) for cells in config.study.cells]
  kinds += [("cls_masked", 0)]
  rows = []
  for regime, cells in kinds:
    row = {
      "regime": regime,
      "cells": cells or None,
      **_chosen(_choice(config, points, regime, cells)),
    }
    if paper:
      key = cells if regime == "memory" else regime
      row |= {"paper": paper.get(key), "yours": None}
    rows.append(row)
  cells = config.task.cells
  return Finding(
    title=f"Regimes on {config.data.name} (the paper's Table 2)",
    rows=rows,
    sentence=_compared(
      config, points, ("memory_masked", cells), ("cls_masked", 0)
    ),
    notes=(
      _CHOSEN,
      *(("`yours` is for numbers of your own.",) if paper else ()),
    ),
  )


def papers_table(config: Config) -> Mapping[str | int, float]:
  """Row of the paper's Table 2; empty for data that is not in it."""
  for name in (config.task.name, config.data.name):
    found = _PAPERS_NAMES.get(slug(name.split(":")[0]))
    if found:
      return _TABLE2[found]
  return {}


def sensitivity(config: Config, points: Sequence[Point]) -> Finding:
  """Accuracy over learning rate."""
  cells = config.task.cells
  lines, ranges, rows = {}, [], []
  for regime, m in (("full", 0), ("memory", cells), ("memory_masked", cells)):
    some = _of(config, points, regime, m)
    label = _label(regime, m)
    lines[label] = []
    for rate in sorted(config.study.learning_rates):
      seeds = [p for p in some if p.learning_rate == rate]
      tests = [p.test for p in seeds if p.test is not None]
      rows.append(
        {
          "regime": regime,
          "cells": m or None,
          "learning rate": rate,
          "test": float(np.mean(tests)) if tests else None,
          "spread": max(tests) - min(tests) if tests else None,
          "diverged": f"{len(seeds) - len(tests)} of {len(seeds)}",
        }
      )
      if tests:
        lines[label].append((rate, *_mean_and_range(tests)))
    means = [mean for _, mean, _, _ in lines[label]]
    lost = len(config.study.learning_rates) - len(means)
    span = (
      f"{label} lies between {_percent(min(means))} and {_percent(max(means))}"
      if means
      else f"{label} has no accuracy"
    )
    ranges.append(span + (f", and diverges at {lost} of them" if lost else ""))
  rates = config.study.learning_rates
  return Finding(
    title="Sensitivity to the learning rate",
    rows=rows,
    sentence=f"Over learning rates from {min(rates)} to {max(rates)}, "
    f"{'; '.join(ranges)}.",
    notes=("Means over the seeds that did not diverge, on the test split.",),
    lines=lines,
    xlabel="learning rate",
    log=True,
  )


def cells(config: Config, points: Sequence[Point]) -> Finding:
  """Accuracy over cells, with and without mask and memory."""
  rows, lines = [], {}
  for masked, memory, regime in (
    ("mask", "memory", "memory_masked"),
    ("mask", "none", "cls_masked"),
    ("full attention", "memory", "memory"),
    ("full attention", "none", "head_cls"),
  ):
    has_memory = memory == "memory"
    label = f"{masked}, {'memory' if has_memory else 'no memory'}"
    lines[label] = []
    for count in sorted(config.study.cells) if has_memory else (0,):
      choice = _choice(config, points, regime, count)
      rows.append(
        {"attention": masked, "regime": regime, "cells": count,
         **_chosen(choice)}
      )  # fmt: skip
      if choice is None:
        continue
      tests = [
        p.test
        for p in _of(config, points, regime, count)
        if p.learning_rate == choice.learning_rate
      ]
      # Without memory there is one number, whatever the cells are.
      for x in (count,) if has_memory else sorted(config.study.cells):
        lines[label].append((x, *_mean_and_range(tests)))
  count = config.task.cells
  return Finding(
    title="Cells, with and without a mask",
    rows=rows,
    sentence=_compared(config, points, ("memory", count), ("head_cls", 0))
    + " "
    + _compared(config, points, ("memory_masked", count), ("memory", count)),
    notes=(_CHOSEN,),
    lines=lines,
    xlabel="cells",
  )


def adapters(
  config: Config, vit: ViTConfig, points: Sequence[Point]
) -> Finding:
  """Memory beside bottleneck adapters."""
  cells, r = config.task.cells, config.task.bottleneck
  rows = []
  for regime in ("adapter", "memory", "adapter_memory"):
    m = 0 if regime == "adapter" else cells
    choice = _choice(config, points, regime, m)
    accuracy, parameters = _ADAPTERS[regime]
    rows.append(
      {
        "regime": regime,
        "cells": m or None,
        **_chosen(choice),
        "parameters": choice and choice.parameters,
        "paper, i-Naturalist": accuracy,
        "paper's parameters, no head": parameters,
      }
    )
  d, l = vit.width, vit.depth
  weights = 4 * d * r * l
  biases = 2 * (r + d) * l
  return Finding(
    title=f"Adapters of bottleneck {r}, and memory of {cells} cells",
    rows=rows,
    sentence=_compared(config, points, ("memory", cells), ("adapter", 0)),
    notes=(
      _CHOSEN,
      "`parameters` are all that are trained, the head among them.",
      "The paper counts 3072 * 5 * 4 * 12 = 737 K parameters of adapters: four "
      "matrices of 3072 x 5 in each of 12 blocks, 3072 being the hidden width "
      "of the MLP of a B/32. Ours are those of Houlsby et al., after attention "
      "and after the MLP, where tokens are as wide as the model: four matrices "
      f"of {d} x {r} in each of {l} blocks, {weights:,}, and {biases:,} biases "
      "(184,320 and 18,552 on a B/32 with bottleneck 5).",
    ),
  )


def costs(vit: ViTConfig, found: Sequence[Cost], plain: int) -> Finding:
  """Parameters and operations, by formula and as compiled.

  Args:
    vit: the backbone.
    found: one for every regime.
    plain: operations of the plain ViT, by formula.
  """
  rows = [
    {
      "regime": cost.regime,
      "parameters": cost.parameters,
      "in the arrays": cost.parameters_counted,
      "MFLOP": cost.flops / 1e6,
      "once a batch": cost.flops_once / 1e6,
      "MFLOP by XLA": cost.flops_xla and cost.flops_xla / 1e6,
      "XLA / formula": cost.flops_xla and cost.flops_xla / cost.flops,
      "of the plain ViT": cost.flops / plain,
    }
    for cost in found
  ]
  dearest = max(found, key=lambda cost: cost.flops)
  ratios = [c.flops_xla / c.flops for c in found if c.flops_xla]
  xla = (
    f"XLA counts {min(ratios):.3f} to {max(ratios):.3f} times the formulas."
    if ratios
    else "XLA did not say what it counts."
  )
  return Finding(
    title=f"Parameters and operations on {vit.variant}, {vit.image_size} px",
    rows=rows,
    sentence=f"The most is computed by {dearest.regime}, "
    f"{dearest.flops / plain:.3f} times the plain ViT; {xla}",
    notes=(
      f"Without heads, which have {vit.width + 1:,} parameters for a class. "
      "Operations of a forward pass for one picture, a multiplication with its "
      "addition being 2. `once a batch` is a part of them: keys and values of "
      "memory depend on no picture.",
      "The formulas count products of matrices; XLA counts all of its compiled "
      "program, which its backend has fused as it does.",
      "The paper's Table 5, for B/32: full 80 M parameters, head 768 k for k "
      "classes, class token 768, memory 768 * 12 * 5; about 25 MFLOP more with "
      "memory.",
    ),
  )


def interference(
  config: Config,
  naive: Sequence[float],
  masked: Sequence[tuple[float, float]],
) -> Finding:
  """Accuracy of the first task as memories of others are added.

  Args:
    config: of the study.
    naive: accuracies without a mask: alone, with one other, ...
    masked: with masked tasks: accuracy and the largest difference of a logit.
      Both are empty where a task of them diverged.
  """
  rows = []
  for i, (unmasked, (kept, difference)) in enumerate(
    zip(naive, masked, strict=True)
  ):
    rows.append(
      {
        "memories": f"+ {config.study.others[i - 1]}" if i
                    else f"own ({config.data.name})",
        "no mask": unmasked,
        "masked": kept,
        "largest difference of a logit": difference,
        "paper, no mask": _INTERFERENCE[i] if i < len(_INTERFERENCE) else None,
      }
    )  # fmt: skip
  if rows:
    lost = 100 * (naive[0] - naive[-1])
    largest = max(difference for _, difference in masked)
    sentence = (
      f"Without a mask, the memories of {len(naive) - 1} other task(s) take "
      f"{lost:.1f} points from the first; with it {_points_of(masked)}, and no "
      f"logit differs by more than {largest:.1e}."
    )
  else:
    sentence = "Not measured: a task diverged at every learning rate."
  return Finding(
    title="Interference of memories that are put side by side",
    rows=rows,
    sentence=sentence,
    notes=(
      f"Tasks of {config.task.cells} cells with the first of the seeds, each "
      "at the learning rate that is best on validation; test split of "
      f"{config.data.name}. A row has the memories of those above it, too. The "
      "paper's numbers are of i-Naturalist, then + Places, + CIFAR, + SUN.",
    ),
  )


def extension(config: Config, points: Sequence[Point]) -> Finding:
  """A task alone, and one that attends to the first task."""
  other, m = config.study.others[0], config.task.cells
  some = {"regime": "memory_masked", "data": other, "cells": m}
  alone = measured.choose(measured.select(points, **some))
  reading = measured.choose(measured.select(points, **some, reads=True))
  first = config.data.name
  rows = [
    {"task": other, "attends to": None, **_chosen(alone)},
    {"task": other, "attends to": first, **_chosen(reading)},
  ]
  return Finding(
    title=f"Extension: {other} after {first}",
    rows=rows,
    sentence=_difference(
      f"{other} attending to {first}", reading, f"{other} alone", alone
    ),
    notes=(
      _CHOSEN,
      f"Both of {m} cells. What is attended to is the memory_masked task of "
      "the same seed that is best on validation.",
    ),
  )


def _of(
  config: Config, points: Sequence[Point], regime: str, cells: int
) -> list[Point]:
  """Points of a regime on the first data set."""
  return measured.select(
    points, regime=regime, data=config.data.name, cells=cells
  )


def _choice(
  config: Config, points: Sequence[Point], regime: str, cells: int
) -> Choice | None:
  return measured.choose(_of(config, points, regime, cells))


def _chosen(choice: Choice | None) -> Row:
  """Columns of a table; without values where nothing could be chosen."""
  return {
    "learning rate": choice and choice.learning_rate,
    "validation": choice and choice.validation,
    "test": choice and choice.test,
    "spread": choice and choice.spread,
  }


def _compared(
  config: Config,
  points: Sequence[Point],
  one: tuple[str, int],
  other: tuple[str, int],
) -> str:
  """How two regimes, each with its cells, stand to each other."""
  return _difference(
    _label(*one),
    _choice(config, points, *one),
    _label(*other),
    _choice(config, points, *other),
  )


def _difference(
  one: str, first: Choice | None, other: str, second: Choice | None
) -> str:
  for label, choice in ((one, first), (other, second)):
    if choice is None:
      return f"{label} diverged at every learning rate."
  points = 100 * (first.test - second.test)
  word = "above" if points >= 0 else "below"
  return (
    f"{one} is {abs(points):.1f} points {word} {other} (spread over seeds "
    f"{100 * first.spread:.1f} and {100 * second.spread:.1f})."
  )


def _points_of(masked: Sequence[tuple[float, float]]) -> str:
  change = 100 * abs(masked[0][0] - masked[-1][0])
  return f"accuracy changes by {change:.1f} points"


def _mean_and_range(values: Sequence[float]) -> tuple[float, float, float]:
  return float(np.mean(values)), min(values), max(values)


def _label(regime: str, cells: int) -> str:
  return f"{regime} with {cells} cells" if cells else regime


def _percent(share: float) -> str:
  return f"{100 * share:.1f} %"
