"""Tables of a study: choices and comparisons with the spread."""

import dataclasses
from pathlib import Path

import pytest
from fake_studies import configured, follow, scores_of, small_study

from memory_vit.errors import MemoryVitError
from memory_vit.run_result import RunResult, SweepResult, TrialResult
from studies.paper import analysis, paper_numbers, plan, report
from studies.paper.section import compare
from studies.paper.selection import BestRate, best, choose
from studies.paper.trials import StudyTrial, trials_of


@pytest.fixture
def study(backbone_file):
  return small_study(backbone_file)


def trial(rate, seed, validation, test):
  return StudyTrial(
    run="r", regime="head", data="d", seed=seed, reads=False,
    learning_rate=rate, cells=0, validation=validation, test=test,
    parameters=7,
  )  # fmt: skip


def test_learning_rate_is_chosen_on_validation_and_reported_on_test():
  trials = [
    # Other rates have the best single validation and the best test.
    trial(0.1, 0, 0.9, 0.5), trial(0.1, 1, 0.3, 0.5),
    trial(0.2, 0, 0.7, 0.6), trial(0.2, 1, 0.8, 0.4),
    trial(0.3, 0, 0.6, 0.9), trial(0.3, 1, 0.6, 0.9),
    trial(1.0, 0, 0.99, 0.99), trial(1.0, 1, None, None),
  ]  # fmt: skip
  choice = choose(trials)
  assert choice == BestRate(
    learning_rate=0.2, validation=0.75, tests=(0.6, 0.4), diverged=0,
    parameters=7,
  )  # fmt: skip
  assert (choice.test, choice.spread) == (0.5, pytest.approx(0.2))
  # The first seed alone chooses another one; the second diverged.
  choice = choose(trials, seed=0)
  assert (choice.learning_rate, choice.validation) == (1.0, 0.99)
  assert (choice.tests, choice.diverged) == ((0.99,), 1)
  assert choice.spread is None
  assert choose(trials, seed=1).learning_rate == 0.2
  assert best(trials).learning_rate == 1.0
  assert choose(trials[-1:]) is None
  assert best(trials[-1:]) is None


@pytest.mark.parametrize(
  ("first", "second", "lost", "expected"),
  [
    ((0.9, 0.92), (0.8, 0.81), 0, ("+10.5", "2.0", "yes", "")),
    ((0.8, 0.802), (0.8, 0.83), 0, ("-1.4", "3.0", "no", "")),
    # With one seed there is no spread.
    ((0.8,), (0.7, 0.71), 2, ("+9.5", "", "", "a: 2 of 3")),
    ((0.8, 0.8), (0.8, 0.8), 0, ("0.0", "0.0", "no", "")),
    # A difference shown as 0.0 is not beyond the spread.
    ((0.8, 0.8), (0.8001, 0.8001), 0, ("0.0", "0.0", "no", "")),
  ],
)
def test_differences_are_compared_with_the_spread(
  first, second, lost, expected
):
  one, other = (
    BestRate(
      learning_rate=0.1, validation=0.5, tests=tests, diverged=count,
      parameters=1,
    )
    for tests, count in ((first, lost), (second, 0))
  )  # fmt: skip
  row = compare("a", one, "b", other)
  assert tuple(report.shown(*item) for item in row.items()) == (
    "a", "b", *expected,
  )  # fmt: skip
  assert compare("a", one, "b", None) == {
    "regime": "a", "compared to": "b", "difference": None, "spread": None,
    "beyond spread": None,
    "diverged": ", ".join([*filter(None, [expected[3]]), "b: at every rate"]),
  }  # fmt: skip


def test_tables_show_sensitivity_and_ends_of_the_range(study):
  study = dataclasses.replace(
    study, learning_rates=(0.1, 0.3, 1.0), regimes=("full", "memory")
  )
  accuracy = {("full", 0.1): 0.9, ("full", 0.3): 0.5, ("memory", 0.1): 0.7,
              ("memory", 0.3): 0.8, ("memory", 1.0): 0.75}  # fmt: skip
  _, trials = follow(
    study, ["table2"], lambda run, rate: accuracy[run.regime, rate],
    lambda run, rate: (run.regime, rate) == ("full", 1.0),
  )  # fmt: skip
  some = [
    dataclasses.replace(t, test=t.validation)
    for found in trials.values() for t in found
  ]  # fmt: skip
  full, memory = analysis.sensitivity(study, some).comparisons
  assert full == {
    "regime": "full", "cells": None, "lowest test": 0.5, "highest test": 0.9,
    "difference": pytest.approx(0.4), "rates": 3, "diverged": 1,
  }  # fmt: skip
  assert (memory["cells"], memory["rates"], memory["diverged"]) == (5, 3, 0)
  assert memory["difference"] == pytest.approx(0.1)
  full, _, memory = analysis.table2(study, some).rows
  assert (full["learning rate"], full["end of range"]) == (0.1, "lowest")
  assert (memory["learning rate"], memory["end of range"]) == (0.3, None)
  # 100 images, sqrt(0.8 * 0.2 / 100).
  assert memory["test"] == 0.8
  assert memory["standard error"] == pytest.approx(0.04)
  # The seeds that have chosen the learning rate.
  both = dataclasses.replace(study, regimes=("full", "memory_masked"))
  rows = analysis.table2(both, []).rows
  assert [(row["regime"], row["chosen by"]) for row in rows] == [
    ("full", "seed 0"), ("memory_masked", "mean of the seeds"),
    ("memory_masked", "mean of the seeds"),
  ]  # fmt: skip


def test_diverged_trial_of_a_sweep_has_no_result(study):
  planned = plan.plan(study, ["table2"], {})[-1]
  assert planned.regime == "norms_masked"
  entries = tuple(
    TrialResult(
      name=f"t-0{i}", learning_rate=rate, cells=0, val=scores_of(0.5),
      test=scores_of(0.4, 9), trainable_params=3, exported="tasks/t",
    )
    for i, rate in enumerate(planned.learning_rates)
  )  # fmt: skip
  result = RunResult(
    tasks=entries, sweep=SweepResult(lost={"t-01": 7}), wall_seconds=1.0
  )
  here = Path("runs")
  well, lost = trials_of(planned, result, here)
  assert (well.validation, well.test, well.examples) == (0.5, 0.4, 9)
  assert well.task == str(here / "tasks" / "t")
  assert (lost.learning_rate, lost.validation, lost.task) == (0.1, None, None)
  # A trial that is neither finished nor lost is an error.
  missing = dataclasses.replace(result, tasks=entries[:1], sweep=SweepResult())
  with pytest.raises(MemoryVitError, match="Move the run away"):
    trials_of(planned, missing, here)


def test_table_2_shows_the_numbers_of_the_paper(study):
  for name, task, expected in (
    ("sun397/tfds", "sun397", 0.768),
    ("cifar100", "", 0.910),
    ("i_naturalist2017", "", 0.501),
    ("folder", "places365", 0.538),
    ("cifar10", "", None),
  ):
    there = configured(
      study,
      data=dataclasses.replace(study.data, name=name),
      task=dataclasses.replace(study.task, name=task),
    )
    assert paper_numbers.table2(there).get(5) == expected
  there = configured(
    study, data=dataclasses.replace(study.data, name="cifar100")
  )
  rows = analysis.table2(there, []).rows
  memory = next(r for r in rows if (r["regime"], r["cells"]) == ("memory", 1))
  assert memory["paper"] == 0.909
  assert rows[-1]["regime"] == "norms_masked"
  assert rows[-1]["paper"] is None


# As the paper prints them, in percent.
TABLE_2 = """
             full  head  head_cls   1     5     10    20
sun397       76.9  75.9  76.4       77.0  76.8  76.9  76.9
inaturalist2017 54.0 46.3 48.7      49.4  50.1  50.0  50.0
cifar100     91.8  85.8  88.6       90.9  91.0  91.1  90.9
places365    55.9  50.9  52.4       53.3  53.8  53.9  54.1
"""


def test_numbers_of_the_paper_are_as_printed(study):
  columns, *rows = (line.split() for line in TABLE_2.strip().splitlines())
  keys = [int(name) if name.isdigit() else name for name in columns]
  for name, *values in rows:
    there = configured(study, data=dataclasses.replace(study.data, name=name))
    found = {
      k: round(100 * v, 6) for k, v in paper_numbers.table2(there).items()
    }
    assert found == dict(zip(keys, map(float, values), strict=True)), name
  # Section 4.4 and Table 4: of i-Naturalist.
  assert paper_numbers.INTERFERENCE == (0.500, 0.281, 0.278, 0.173)
  assert paper_numbers.ADAPTERS == {
    "memory": (0.501, "46 K"), "adapter": (0.499, "737 K"),
    "adapter_memory": (0.503, "783 K"),
  }  # fmt: skip
