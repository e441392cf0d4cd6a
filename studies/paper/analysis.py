"""Sections on trained regimes: accuracies, beside the paper's own numbers."""

from collections.abc import Sequence

import numpy as np

import memory_vit as mv
from memory_vit.model import get_regime
from studies.paper import costs, paper_numbers
from studies.paper.section import (
  Row,
  Section,
  Setting,
  best_rate,
  compare,
  compare_settings,
  on_first_data,
  rate_columns,
)
from studies.paper.selection import choose, select
from studies.paper.study import Study
from studies.paper.trials import StudyTrial


def table2(study: Study, trials: Sequence[StudyTrial]) -> Section:
  """Every regime at its best learning rate."""
  rows = [
    _row(study, trials, Setting(regime, cells))
    for regime in study.regimes_of("table2")
    for cells in _cells_of(study, regime)
  ]
  if paper := paper_numbers.table2(study):
    for row in rows:
      is_memory = row["regime"] == "memory"
      row["paper"] = paper.get(row["cells"] if is_memory else row["regime"])
  masked = Setting("memory_masked", study.task.cells)
  memory = Setting("memory", study.task.cells)
  cls, norms = Setting("cls_masked"), Setting("norms_masked")
  head = Setting("head")
  pairs = (
    (masked, cls),
    (cls, head),
    (masked, head),
    (norms, masked),
    (norms, cls),
    (memory, Setting("head_cls")),
    (memory, Setting("full")),
  )
  return Section(
    title=f"Regimes on {study.data.name} (the paper's Table 2)",
    rows=rows,
    comparisons=compare_settings(study, trials, pairs),
  )


def placement(study: Study, trials: Sequence[StudyTrial]) -> Section:
  """Memory that is dropped after each layer, against memory that stays."""
  count = study.task.cells
  settings = [Setting(r, count) for r in study.regimes_of("placement")]
  memory, *others = settings
  return Section(
    title="Where memory enters, and how far it is propagated",
    rows=[_row(study, trials, setting) for setting in settings],
    comparisons=compare_settings(
      study, trials, [(memory, other) for other in others]
    ),
    notes=(
      "With `memory`, each layer has its own cells, which are dropped after "
      "attention. `memory_propagated` enters before the first layer and passes "
      "through all of them; with `memory_additive`, each layer adds its own "
      "cells to it (Figure 2b of the paper, right and left). The paper says, "
      "without numbers, that both did worse.",
    ),
  )


def sensitivity(study: Study, trials: Sequence[StudyTrial]) -> Section:
  """Accuracy over learning rate."""
  lines: dict[str, list[tuple[float, float, float, float]]] = {}
  rows, ranges = [], []
  for regime in study.regimes_of("sensitivity"):
    cells = study.task.cells if get_regime(regime).has("memory") else 0
    setting = Setting(regime, cells)
    some = on_first_data(study, trials, setting)
    seed = study.search_seed(regime)
    if seed is not None:  # further seeds have one learning rate
      some = [trial for trial in some if trial.seed == seed]
    line = lines.setdefault(setting.label, [])
    mine = []
    for rate in sorted(study.learning_rates):
      seeds = [t for t in some if t.learning_rate == rate]
      tests = [t.test for t in seeds if t.test is not None]
      mine.append(_rate_row(setting, rate, len(seeds), tests))
      if tests:
        line.append((rate, *_mean_and_range(tests)))
    rows += mine
    ranges.append(_range_row(setting, mine))
  return Section(
    title="Sensitivity to the learning rate",
    rows=rows,
    comparisons=ranges,
    notes=(
      "Means over the seeds that did not diverge, on the test split. If one "
      "seed searches for the learning rate, it is shown alone.",
    ),
    lines=lines,
    xlabel="learning rate",
    log=True,
  )


def cells(study: Study, trials: Sequence[StudyTrial]) -> Section:
  """Accuracy over the number of cells, with and without mask and memory."""
  kinds = {
    "memory_masked": ("mask", "memory"),
    "cls_masked": ("mask", "no memory"),
    "memory": ("full attention", "memory"),
    "head_cls": ("full attention", "no memory"),
  }
  regimes = study.regimes_of("cells")
  rows: list[Row] = []
  lines: dict[str, list[tuple[float, float, float, float]]] = {}
  for regime in (regime for regime in kinds if regime in regimes):
    attention, kind = kinds[regime]
    line = lines.setdefault(f"{attention}, {kind}", [])
    for count in sorted(_cells_of(study, regime)):
      setting = Setting(regime, count)
      row = _row(study, trials, setting)
      rows.append({"attention": attention, **row})
      if rate := best_rate(study, trials, setting):
        # Without memory the line is constant.
        for x in (count,) if count else sorted(study.cells):
          line.append((x, *_mean_and_range(rate.tests)))
  masked = Setting("memory_masked", study.task.cells)
  memory = Setting("memory", study.task.cells)
  fewest, most = min(study.cells), max(study.cells)
  pairs = [
    (memory, Setting("head_cls")),
    (masked, Setting("cls_masked")),
    (masked, memory),
  ]
  if most > fewest:
    pairs += [
      (one._replace(cells=most), one._replace(cells=fewest))
      for one in (masked, memory)
    ]
  return Section(
    title="Cells, with and without a mask",
    rows=rows,
    comparisons=compare_settings(study, trials, pairs),
    lines=lines,
    xlabel="cells",
  )


def adapters(
  study: Study, trials: Sequence[StudyTrial], vit: mv.ViTConfig
) -> Section:
  """Memory beside bottleneck adapters."""
  count, r = study.task.cells, study.task.bottleneck
  rows = []
  for regime in study.regimes_of("adapters"):
    setting = Setting(regime, 0 if regime == "adapter" else count)
    rate = best_rate(study, trials, setting)
    accuracy, parameters = paper_numbers.ADAPTERS[regime]
    rows.append(
      {
        **_row(study, trials, setting),
        "parameters": rate and rate.parameters,
        "without head": costs.parameters(vit, *setting, r),
        "paper, i-Naturalist": accuracy,
        "paper's parameters, no head": parameters,
      }
    )
  d, l = vit.width, vit.depth
  weights, biases = 4 * d * r * l, 2 * (r + d) * l
  memory, adapter = Setting("memory", count), Setting("adapter")
  both = Setting("adapter_memory", count)
  pairs = ((memory, adapter), (both, adapter), (both, memory))
  return Section(
    title=f"Adapters of bottleneck {r}, and memory of {count} cells",
    rows=rows,
    comparisons=compare_settings(study, trials, pairs),
    notes=(
      "`parameters` counts all trained parameters, including the head.",
      "The paper counts 3072 * 5 * 4 * 12 = 737 K parameters of adapters: four "
      "matrices of 3072 x 5 in each of 12 blocks; 3072 is the hidden width of "
      "the MLP of a B/32. Ours are those of Houlsby et al., after attention "
      "and after the MLP, on tokens of the model's width: four matrices "
      f"of {d} x {r} in each of {l} blocks, {weights:,}, and {biases:,} biases "
      "(184,320 and 18,552 on a B/32 with bottleneck 5).",
    ),
  )


def extension(study: Study, trials: Sequence[StudyTrial]) -> Section:
  """A task alone, as in a concatenation, and attending to the first."""
  regime, m = "memory_masked", study.task.cells
  first, other, *_ = study.data_sets
  some = {"regime": regime, "data": other, "cells": m}
  alone = choose(select(trials, **some))
  reading = choose(select(trials, **some, reads=True))
  rows = [
    {"model": model, "task": other, "attends to": parent,
     **rate_columns(study, regime, rate)}
    for model, parent, rate in (
      ("concatenation", None, alone), ("extension", first, reading),
    )
  ]  # fmt: skip
  return Section(
    title=f"Extension and concatenation: {other} after {first}",
    rows=rows,
    comparisons=[compare("extension", reading, "concatenation", alone)],
    notes=(
      f"Both have {m} cells. The extension attends to the memory_masked task "
      "of the same seed that is best on validation. In a concatenation, the "
      "outputs of a task are those of the task alone.",
    ),
  )


def _row(study: Study, trials: Sequence[StudyTrial], setting: Setting) -> Row:
  rate = best_rate(study, trials, setting)
  return {**setting.columns, **rate_columns(study, setting.regime, rate)}


def _rate_row(
  setting: Setting, rate: float, seeds: int, tests: Sequence[float]
) -> Row:
  """A regime at one learning rate."""
  lost = seeds - len(tests)
  return {
    **setting.columns,
    "learning rate": rate,
    "test": float(np.mean(tests)) if tests else None,
    "spread": max(tests) - min(tests) if len(tests) > 1 else None,
    "seeds": len(tests),
    "diverged": f"{lost} of {seeds}" if lost else None,
  }


def _range_row(setting: Setting, rows: Sequence[Row]) -> Row:
  """Range of a regime over learning rates."""
  means = [row["test"] for row in rows if row["test"] is not None]
  return {
    **setting.columns,
    "lowest test": min(means, default=None),
    "highest test": max(means, default=None),
    "difference": max(means) - min(means) if means else None,
    "rates": len(rows),
    "diverged": sum(row["diverged"] is not None for row in rows),
  }


def _cells_of(study: Study, regime: str) -> tuple[int, ...]:
  """The numbers of cells that a regime is trained with."""
  return study.cells if get_regime(regime).has("memory") else (0,)


def _mean_and_range(values: Sequence[float]) -> tuple[float, float, float]:
  return float(np.mean(values)), min(values), max(values)
