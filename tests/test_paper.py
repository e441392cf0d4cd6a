"""The paper's study: what is run, what is chosen, what is reported."""

import collections
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys

import fake_data
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from conftest import ROOT, one_device, random_task, tiny_backbone

import memory_vit as mv
from configs import quickstart
from memory_vit import config as config_lib
from memory_vit.data import batching, datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.errors import (
  ConfigError,
  DivergedError,
  TaskError,
  TrainingError,
)
from memory_vit.model.regimes import REGIMES
from memory_vit.run_result import (
  BackboneResult,
  RunResult,
  SweepResult,
  TrialResult,
)
from memory_vit.runtime import files, sharding
from memory_vit.runtime.lock import only_run
from memory_vit.study import (
  analysis,
  budget,
  costs,
  execute,
  forecast,
  interference,
  paper_numbers,
  plan,
  runner,
  wording,
)
from memory_vit.study import report as study_report
from memory_vit.study.runs import PARTS, config_of, possible_parts
from memory_vit.study.selection import Choice, Point, best, choose
from memory_vit.study.together import interference as interference_tables
from memory_vit.tasks import inference, split_forward
from memory_vit.training import run as training_run
from memory_vit.training import sweep

TRAINED = (
  "table2", "sensitivity", "cells", "placement", "adapters", "extension",
)  # fmt: skip


@pytest.fixture(scope="module")
def backbone_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(tiny_backbone(num_classes=5), path)
  return path


@pytest.fixture
def config(backbone_file):
  """Two rates, seeds, cells and other data sets, on the embedded digits."""
  values = quickstart.get_config()
  values.pretrain.variant = ""
  values.upstream.name = ""
  values.backbone = str(backbone_file)
  values.batch_size, values.batch_size_eval = 16, 64
  values.total_steps, values.eval_every, values.checkpoint_every = 2, 2, 2
  values.study.learning_rates = (0.3, 0.1)
  values.study.seeds = (0, 4)
  values.study.cells = (1, 5)
  values.study.others = ("digits:0-4", "digits:2-6")
  return config_lib.from_dict(values.to_dict())


def with_study(config, **values):
  changed = dataclasses.replace(config.study, **values)
  return dataclasses.replace(config, study=changed)


@functools.cache
def fingerprint():
  return tiny_backbone(num_classes=5).fingerprint


class FakeRuns:
  """Stands for `run.train_and_evaluate`: accuracies without training."""

  def __init__(self, accuracy, stops_at=0):
    self.accuracy, self.stops_at = accuracy, stops_at
    self.calls = []

  def __call__(self, config, directory, stop=None):
    self.calls.append(directory.name)
    if len(self.calls) == self.stops_at:
      raise KeyboardInterrupt
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for variant in sweep.trials_of(config, "t"):
      own = variant.config
      validation, test = self.accuracy(own)
      trained = REGIMES[own.regime].trained
      entries.append(
        TrialResult(
          name=variant.name,
          cells=own.task.cells if "memory" in trained else 0,
          learning_rate=own.learning_rate,
          val_accuracy=validation,
          test_accuracy=test if own.data.test else None,
          test_examples=200 if own.data.test else 0,
          trainable_params=100,
          exported=f"tasks/{variant.name}",
        )
      )
    return self.write(config, directory, entries)

  def write(self, config, directory, entries):
    (directory / "checkpoints" / "2").mkdir(parents=True, exist_ok=True)
    files.write_json(directory / "config.json", config_lib.to_dict(config))
    result = RunResult(
      tasks=tuple(entries),
      backbone=BackboneResult(fingerprint=fingerprint()),
      wall_seconds=32.0,
      sweep=SweepResult() if config.sweep.is_on else None,
    )
    files.write_json(directory / "result.json", result.to_json())
    return result


def accuracies(config):
  """On validation the higher rate is better, on test the lower one."""
  return config.learning_rate, 0.5 - config.learning_rate / 10


def follow(config, parts, accuracy, diverges=lambda run, rate: False):
  """Plans until there is nothing new, as if every run was finished at once."""
  points, order = {}, []
  for part in parts:
    while run := plan.next_run(config, part, points):
      order.append(run)
      points[run.name] = [
        p if diverges(run, p.learning_rate) else dataclasses.replace(
          p, validation=accuracy(run, p.learning_rate), test=0.5,
          parameters=9, task="t", examples=100,
        )
        for p in execute.lost_points(run)
      ]  # fmt: skip
  return order, points


def test_a_plan_trains_nothing_twice(config):
  runs, points = follow(config, PARTS, lambda run, rate: rate)
  assert len({r.name for r in runs}) == len({*runs}) == len(runs)
  assert plan.plan(config, PARTS, points) == [
    *dict.fromkeys(plan.plan(config, PARTS, points))
  ]
  kinds = collections.Counter((r.regime, r.data, bool(r.reads)) for r in runs)
  first, other, last = "digits:5-9", "digits:0-4", "digits:2-6"
  assert kinds == {
    # Of the first data set two rates of the first seed, the better one of the
    # second (for each number of cells); those that share a pass by seed.
    ("full", first, False): 3,
    ("head", first, False): 2,
    ("head_cls", first, False): 3,
    ("memory", first, False): 6,
    ("memory_masked", first, False): 2,
    ("cls_masked", first, False): 2,
    ("norms_masked", first, False): 2,
    ("memory_propagated", first, False): 3,
    ("memory_additive", first, False): 3,
    ("adapter", first, False): 3,
    ("adapter_memory", first, False): 3,
    # Interference with one seed; extension with both.
    ("memory", other, False): 2,
    ("memory", last, False): 2,
    ("memory_masked", other, False): 2,
    ("memory_masked", last, False): 1,
    ("memory_masked", other, True): 2,
  }
  masked = next(r for r in runs if r.regime == "memory_masked")
  assert masked.variants == [(0.3, 1), (0.3, 5), (0.1, 1), (0.1, 5)]
  assert masked.name == "memory_masked-digits-5-9-seed0"
  # What all parts need is what each needs.
  apart = [r for part in PARTS for r in plan.plan(config, [part], points)]
  assert {*apart} == {*runs}
  assert len(apart) > len(runs)
  assert plan.plan(config, ["costs"], {}) == []


def test_further_seeds_run_at_the_rate_of_the_first(config):
  """Chosen for each number of cells apart, on validation, not on test."""
  config = with_study(
    config, seeds=(7, 0, 4), regimes=("memory", "memory_masked")
  )

  def accuracy(run, rate):
    return rate if run.cells == (1,) else -rate

  unknown = plan.runs_of(config, "cells", {})
  assert [r.name for r in unknown[:4]] == [
    "memory-digits-5-9-cells1-rate0.3-seed7",
    "memory-digits-5-9-cells1-rate0.1-seed7",
    "memory-digits-5-9-cells1-rate-of-the-best-seed0",
    "memory-digits-5-9-cells1-rate-of-the-best-seed4",
  ]
  runs, _ = follow(config, ["cells"], accuracy)
  names = [r.name for r in runs if r.regime == "memory"]
  assert sorted(names) == sorted(
    f"memory-digits-5-9-cells{cells}-rate{rate}-seed{seed}"
    for cells, best in ((1, 0.3), (5, 0.1))
    for seed, rates in ((7, (0.3, 0.1)), (0, (best,)), (4, (best,)))
    for rate in rates
  )
  # The masked sweep has all rates for every seed.
  masked = [r for r in runs if r.regime == "memory_masked"]
  assert [r.seed for r in masked] == [7, 0, 4]
  assert {r.learning_rates for r in masked} == {(0.3, 0.1)}
  # As many as before it is known which.
  assert len(unknown) == len(runs)
  everything, _ = follow(with_study(config, search="all"), ["cells"], accuracy)
  assert len(everything) == 2 * 2 * 3 + 3
  # Of equals the lowest rate, here and in the table.
  runs, points = follow(config, ["cells"], lambda run, rate: 0.5)
  at = {r.learning_rates for r in runs if r.seed == 4 and r.regime == "memory"}
  assert at == {(0.1,)}
  some = [p for found in points.values() for p in found]
  choice = wording.choice_of(config, some, "memory", 5)
  assert (choice.learning_rate, len(choice.tests)) == (0.1, 3)


def test_a_rate_at_which_the_first_seed_diverged_is_not_chosen(config):
  only = with_study(config, regimes=("full",), seeds=(0, 4, 5))

  def diverges(run, rate):
    return rate == 0.3 or run.seed == 5

  runs, points = follow(only, ["table2"], lambda run, rate: rate, diverges)
  assert [r.learning_rates + (r.seed,) for r in runs] == [
    (0.3, 0), (0.1, 0), (0.1, 4), (0.1, 5),
  ]  # fmt: skip
  some = [p for found in points.values() for p in found]
  (row,) = analysis.table2(only, some).rows
  assert (row["learning rate"], row["seeds"]) == (0.1, 2)
  assert row["diverged"] == "1 of 3"
  # Nothing is left for further seeds.
  runs, _ = follow(only, ["table2"], lambda run, rate: rate, lambda *_: True)
  assert [r.seed for r in runs] == [0, 0]


def test_regimes_that_are_not_to_be_run(config):
  masked = with_study(config, regimes=("memory_masked", "cls_masked"))
  assert possible_parts(masked) == [
    "table2", "sensitivity", "cells", "costs", "extension",
  ]  # fmt: skip
  runs, points = follow(masked, possible_parts(masked), lambda *_: 0.5)
  assert {r.regime for r in runs} == {"memory_masked", "cls_masked"}
  some = [p for found in points.values() for p in found]
  for make in (analysis.table2, analysis.cells, analysis.sensitivity):
    found = make(masked, some)
    assert {row["regime"] for row in found.rows} <= {*masked.study.regimes}
    assert "head" not in " ".join(found.sentences)
    assert all(found.lines.values())
  with pytest.raises(ConfigError, match=r"--only=interference needs \['memory"):
    possible_parts(masked, ["table2", "interference"])
  with pytest.raises(ConfigError, match=r"regimes\[0\] is 'memory_mask', exp"):
    with_study(config, regimes=("memory_mask",))


def test_configurations_of_runs(config):
  for planned in follow(config, PARTS, lambda *_: 0.5)[0]:
    made = config_of(config, planned, "b.npz", ["dir"])
    assert (made.regime, made.seed) == (planned.regime, planned.seed)
    assert made.data.name == planned.data
    assert bool(made.data.test) == planned.tested
    variants = [
      (v.config.learning_rate, v.config.task.cells)
      for v in sweep.trials_of(made, "t")
    ]
    if planned.cells:
      assert variants == planned.variants
    assert len(variants) == len(planned.variants)
    assert made.study == config_lib.StudyConfig()


def test_other_data_sets_have_splits_of_their_own(config):
  others = (
    {"name": "folder", "dir": "pictures/birds", "test": "new", "resize": 7},
    "digits:2-6",
    {"name": "digits:0-4", "test": ""},
  )
  config = config_lib.from_dict(
    config_lib.to_dict(with_study(config, others=others))
  )
  runs, _ = follow(config, ["interference", "extension"], lambda *_: 0.5)
  made = {(r.data, r.tested): config_of(config, r, "b").data for r in runs}
  birds, digits = made["folder:birds", True], made["digits:2-6", False]
  first = config.data
  assert (birds.name, birds.dir, birds.test) == (
    "folder", "pictures/birds", "new",
  )  # fmt: skip
  assert (birds.train, birds.resize) == (first.train, 7)
  assert digits == dataclasses.replace(first, name="digits:2-6", test="")
  names = [r.name for r in runs if r.data == "folder:birds"]
  assert names[0] == "memory-folder-birds-cells5-rate0.3-seed0"
  assert possible_parts(config) == list(PARTS)
  for wrong in ((3,), ({"name": 3},)):
    # Where it is no data set at all the configuration is refused already.
    with pytest.raises(ConfigError, match=r"others\[0\]"):
      possible_parts(with_study(config, others=wrong))


def test_parts(config):
  alone = with_study(config, others=())
  assert possible_parts(config) == list(PARTS)
  assert possible_parts(alone) == [
    "table2", "sensitivity", "cells", "placement", "adapters", "costs",
  ]  # fmt: skip
  assert possible_parts(config, ["costs", "table2"]) == [
    "table2", "costs",
  ]  # fmt: skip
  with pytest.raises(ConfigError, match=r"--only=\['tabel2'\]: expected some"):
    possible_parts(config, ["tabel2"])
  with pytest.raises(ConfigError, match="in config.study.others"):
    possible_parts(alone, ["interference"])


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"learning_rates": ()}, "learning_rates is .*, expected values that diff"),
    (
      {"learning_rates": (0.1, 0.0)},
      r"rates\[1\] is 0.0, expected a positive number",
    ),
    ({"seeds": (1, 1)}, "config.study.seeds is .*, expected values that"),
    ({"seeds": (-1,)}, r"seeds\[0\] is -1, expected at least 0"),
    ({"cells": (0, 5)}, r"study.cells\[0\] is 0, expected at least 1"),
    ({"cells": (1, 10)}, "config.task.cells is 5, expected one of config.stud"),
    ({"others": ("digits:5-9",)}, r"others\[0\] is 'digits:5-9', a name tha"),
    ({"others": ({"nam": "digits:0-4"},)}, r"others\[0\]: missing keys .*nam"),
    ({"others": ({"test": "test"},)}, "'name' of '' in config.study.others is"),
    ({"others": ({"name": "d", "test": ""},)}, "'test' of 'd' in .* is empty"),
  ],
)
def test_studies_that_cannot_be(config, values, message):
  with pytest.raises(ConfigError, match=message):
    possible_parts(with_study(config, **values))


def test_options_of_one_run_are_refused(config):
  for part, values, message in (
    ("sweep", {"cells": (1,)}, "config.sweep is for one run"),
    ("task", {"attends_to": ("x",)}, "config.task.attends_to"),
    ("data", {"test": ""}, "'test' of config.data is empty"),
    ("data", {"validation": ""}, "'validation' of config.data is empty"),
  ):
    new = dataclasses.replace(getattr(config, part), **values)
    with pytest.raises(ConfigError, match=message):
      possible_parts(dataclasses.replace(config, **{part: new}))


def point(rate, seed, validation, test):
  return Point(
    run="r", regime="head", data="d", seed=seed, reads=False,
    learning_rate=rate, cells=0, validation=validation, test=test,
    parameters=7,
  )  # fmt: skip


def test_chosen_on_validation_reported_on_test():
  points = [
    # The best single validation, and the best test, are of other rates.
    point(0.1, 0, 0.9, 0.5), point(0.1, 1, 0.3, 0.5),
    point(0.2, 0, 0.7, 0.6), point(0.2, 1, 0.8, 0.4),
    point(0.3, 0, 0.6, 0.9), point(0.3, 1, 0.6, 0.9),
    point(1.0, 0, 0.99, 0.99), point(1.0, 1, None, None),
  ]  # fmt: skip
  choice = choose(points)
  assert choice == Choice(
    learning_rate=0.2, validation=0.75, tests=(0.6, 0.4), diverged=0,
    parameters=7,
  )  # fmt: skip
  assert (choice.test, choice.spread) == (0.5, pytest.approx(0.2))
  # By the first seed alone, another one; that the second diverged is seen.
  choice = choose(points, seed=0)
  assert (choice.learning_rate, choice.validation) == (1.0, 0.99)
  assert (choice.tests, choice.diverged) == ((0.99,), 1)
  assert choice.spread is None
  assert choose(points, seed=1).learning_rate == 0.2
  assert best(points).learning_rate == 1.0
  assert choose(points[-1:]) is None
  assert best(points[-1:]) is None


@pytest.mark.parametrize(
  ("first", "second", "diverged", "expected"),
  [
    ((0.9, 0.92), (0.8, 0.81), 0,
     "a is 10.5 points above b, more than the spread over seeds (2.0 and "
     "1.0)."),
    ((0.8, 0.802), (0.8, 0.83), 0,
     "a is 1.4 points below b, within the spread over seeds (0.2 and 3.0)."),
    ((0.8,), (0.7, 0.71), 2,
     "a is 9.5 points above b, with one seed, thus no spread, on at least one "
     "side; of a diverged 2 of 3 seeds."),
    ((0.8, 0.8), (0.8, 0.8), 0,
     "a equals b to 0.1 points, within the spread over seeds (0.0 and 0.0)."),
  ],
)  # fmt: skip
def test_differences_are_held_against_the_spread(
  first, second, diverged, expected
):
  one, other = (
    Choice(
      learning_rate=0.1, validation=0.5, tests=tests, diverged=lost,
      parameters=1,
    )
    for tests, lost in ((first, diverged), (second, 0))
  )  # fmt: skip
  assert wording.difference("a", one, "b", other) == expected
  assert wording.difference("a", one, "b", None) == (
    "b diverged at every learning rate (with a seed at least)."
  )


def test_sensitivity_and_the_ends_of_the_range(config):
  config = with_study(
    config, learning_rates=(0.1, 0.3, 1.0), regimes=("full", "memory")
  )
  accuracy = {("full", 0.1): 0.9, ("full", 0.3): 0.5, ("memory", 0.1): 0.7,
              ("memory", 0.3): 0.8, ("memory", 1.0): 0.75}  # fmt: skip
  _, points = follow(
    config, ["table2"], lambda run, rate: accuracy[run.regime, rate],
    lambda run, rate: (run.regime, rate) == ("full", 1.0),
  )  # fmt: skip
  some = [
    dataclasses.replace(p, test=p.validation)
    for found in points.values() for p in found
  ]  # fmt: skip
  _, full, memory, widest = analysis.sensitivity(config, some).sentences
  assert full == (
    "full lies between 50.0 % and 90.0 %, 40.0 points apart, and diverges at 1 "
    "of them."
  )
  assert memory.endswith("10.0 points apart, and diverges at none.")
  assert widest.startswith("The widest range is that of full")
  notes = " ".join(analysis.table2(config, some).notes)
  assert "that was tried of full (0.1): a better one" in notes
  # 100 pictures, sqrt(0.8 * 0.2 / 100).
  assert "80.0 % has a standard error of 4.0 points" in notes


def test_a_study_from_its_runs_to_the_report(config, tmp_path, monkeypatch):
  """Killed in its middle, it goes on without repeating a run."""
  planned, _ = follow(config, TRAINED, lambda run, rate: rate)
  names = [r.name for r in planned]
  killed = FakeRuns(accuracies, stops_at=len(names) - 3)
  monkeypatch.setattr(training_run, "train_and_evaluate", killed)
  with pytest.raises(KeyboardInterrupt):
    runner.run_study(config, tmp_path, TRAINED)
  # What is known by then has been written.
  assert "Table 2" in (tmp_path / "report.md").read_text()
  rest = FakeRuns(accuracies)
  monkeypatch.setattr(training_run, "train_and_evaluate", rest)
  found = runner.run_study(config, tmp_path, TRAINED)
  assert killed.calls[:-1] + rest.calls == names
  again = FakeRuns(accuracies)
  monkeypatch.setattr(training_run, "train_and_evaluate", again)
  monkeypatch.setattr(study_report, "plot", lambda *_: None)  # they are there
  assert runner.run_study(config, tmp_path, TRAINED) == found
  # Parts that were named earlier stay.
  assert runner.run_study(config, tmp_path, ["cells"]) == found
  assert again.calls == []

  for row in found["table2"].rows:
    assert row["learning rate"] == 0.3
    assert row["test"] == pytest.approx(0.47)
    assert (row["seeds"], row["spread"], row["diverged"]) == (2, 0, None)
    assert "paper" not in row
  assert len(found["table2"].rows) == 3 + 2 + 2 + 2
  rates = found["sensitivity"].lines["full"]
  assert [(x, round(mean, 2)) for x, mean, _, _ in rates] == [
    (0.1, 0.49), (0.3, 0.47),
  ]  # fmt: skip
  # One seed where that one searches, both where all rates are one run.
  seeds = {r["regime"]: r["seeds"] for r in found["sensitivity"].rows}
  assert seeds == {"full": 1, "memory": 1, "memory_masked": 2}
  text = (tmp_path / "report.md").read_text()
  for part in found.values():
    assert f"## {part.title}" in text
    assert all(f"- {sentence}" in text for sentence in part.sentences)
    assert study_report.markdown_table(part.rows) in text
  assert "| full |  | 0.3 | 30.0 % | 47.0 % | 0.0 | 2 |  |" in text
  for part in ("sensitivity", "cells"):
    assert (tmp_path / f"{part}.png").stat().st_size > 1000
    assert f"({part}.png)" in text
  numbers = json.loads((tmp_path / "report.json").read_text())
  assert set(numbers["parts"]) == set(TRAINED)
  assert len(numbers["points"]) == sum(len(r.variants) for r in planned)


def test_finished_runs_of_another_configuration_are_refused(
  config, tmp_path, monkeypatch
):
  config = with_study(config, regimes=("head",))
  fake = FakeRuns(accuracies)
  monkeypatch.setattr(training_run, "train_and_evaluate", fake)
  runner.run_study(config, tmp_path, ["table2"])
  assert len(fake.calls) == 2
  # Its states were removed; also of one that was killed before that.
  first, second = (tmp_path / "runs" / name for name in fake.calls)
  assert not (first / "checkpoints").exists()
  (second / "checkpoints" / "2").mkdir(parents=True)
  # What does not change a result may change.
  log = dataclasses.replace(config, log_every=7, batch_size_eval=32)
  runner.run_study(with_study(log, others=()), tmp_path, ["table2"])
  assert len(fake.calls) == 2
  assert sorted(path.name for path in second.iterdir()) == [
    "config.json", "result.json",
  ]  # fmt: skip
  longer = dataclasses.replace(config, total_steps=3)
  with pytest.raises(ConfigError, match="config.total_steps: 2, now 3"):
    runner.run_study(longer, tmp_path, ["table2"])
  other = tmp_path / "other.npz"
  mv.save_backbone(tiny_backbone(seed=1, num_classes=5), other)
  with pytest.raises(ConfigError, match="  backbone: '"):
    runner.run_study(
      dataclasses.replace(config, backbone=str(other)), tmp_path, ["table2"]
    )
  assert len(fake.calls) == 2


def test_a_study_in_epochs_is_not_repeated(config, tmp_path, monkeypatch):
  """Its runs record the steps that their data made of these."""

  class Resolved(FakeRuns):
    def write(self, config, directory, entries):
      config = dataclasses.replace(config, total_steps=7)
      return super().write(config, directory, entries)

  config = with_study(config, regimes=("head",))
  config = dataclasses.replace(config, epochs=0.5, image_size=0)
  fake = Resolved(accuracies)
  monkeypatch.setattr(training_run, "train_and_evaluate", fake)
  for _ in range(2):
    runner.run_study(config, tmp_path, ["table2"])
    assert len(fake.calls) == 2
  longer = dataclasses.replace(config, epochs=1.0)
  with pytest.raises(ConfigError, match="steps: '0.5 epochs', now '1.0 epo"):
    runner.run_study(longer, tmp_path, ["table2"])
  in_steps = dataclasses.replace(config, epochs=0.0)
  with pytest.raises(ConfigError, match="steps: '0.5 epochs', now 2"):
    runner.run_study(in_steps, tmp_path, ["table2"])
  report = json.loads((tmp_path / "report.json").read_text())
  assert report["config"]["image_size"] == 8


def test_finished_runs_on_other_data_are_refused(
  config, tmp_path, monkeypatch, caplog
):
  """As long as the data are there to be compared."""
  config = with_study(config, regimes=("head",), others=())
  pictures = tmp_path / "pictures"
  where = dataclasses.replace(
    config.data, name="folder", dir=str(pictures), train="train",
    validation="train", test="train",
  )  # fmt: skip
  fake_data.write_folder(
    pictures, {"train/a": ["1.png", "2.png"], "train/b": ["3.png"]}
  )
  config = dataclasses.replace(config, data=where)
  fake = FakeRuns(accuracies)

  def runs(config, directory, stop=None):
    result = fake(config, directory, stop)
    found = datasets.take_inventory("folder", "train", str(pictures))
    record = DataRecord(
      directory=directory / "inventory",
      inventories=dict.fromkeys(("train", "validation", "test"), found),
    )
    record.keep()
    result = dataclasses.replace(result, data=record.digests)
    files.write_json(directory / "result.json", result.to_json())
    return result

  monkeypatch.setattr(training_run, "train_and_evaluate", runs)
  runner.run_study(config, tmp_path / "s", ["table2"])
  runner.run_study(config, tmp_path / "s", ["table2"])
  assert len(fake.calls) == 2
  (pictures / "train/a/2.png").rename(pictures / "train/b/2.png")
  with pytest.raises(ConfigError, match="1 of another class") as error:
    runner.run_study(config, tmp_path / "s", ["table2"])
  for name in fake.calls:
    assert name in str(error.value)
  assert "train/a/2.png: class 'a', now 'b'" in str(error.value)
  # Without data nothing can be compared, and nothing has to be trained.
  monkeypatch.setattr(execute.logger, "propagate", True)
  (pictures / "train").rename(pictures / "away")
  runner.run_study(config, tmp_path / "s", ["table2"])
  assert "whether data changed is not known" in caplog.text
  assert len(fake.calls) == 2


def test_a_second_study_is_kept_out(config, tmp_path, monkeypatch):
  config = with_study(config, regimes=("head",))
  fake = FakeRuns(accuracies)
  monkeypatch.setattr(training_run, "train_and_evaluate", fake)
  with (
    only_run(tmp_path),
    pytest.raises(TrainingError, match="another run is using"),
  ):
    runner.run_study(config, tmp_path, ["table2"])
  assert fake.calls == []


def test_what_was_measured_is_remembered(tmp_path):
  calls = []

  def measure():
    calls.append(1)
    return {"a": (1, 2.5)}

  file = tmp_path / "m.json"
  assert runner._remembered(file, {"of": (1,)}, None) is None
  for _ in range(2):
    found = runner._remembered(file, {"of": (1,)}, measure)
    assert found == {"a": [1, 2.5]}
  assert len(calls) == 1
  assert runner._remembered(file, {"of": (2,)}, None) is None
  runner._remembered(file, {"of": (2,)}, measure)
  assert len(calls) == 2


def test_what_diverges_is_a_finding(config, tmp_path, monkeypatch):
  """It is not tried again, and no other run needs it to be there."""

  class Diverging(FakeRuns):
    def __call__(self, config, directory, stop=None):
      if config.regime in ("full", "memory_masked"):
        self.calls.append(directory.name)
        directory.mkdir(parents=True)
        made = config_lib.to_dict(config)
        files.write_json(directory / "config.json", made)
        raise DivergedError("not finite", {"digits": 1})
      return super().__call__(config, directory)

  fake = Diverging(accuracies)
  monkeypatch.setattr(training_run, "train_and_evaluate", fake)
  parts = ("table2", "sensitivity", "extension")
  found = runner.run_study(config, tmp_path, parts)
  # Neither a run that would read what diverged, nor a further seed of it.
  assert not any("reading" in name for name in fake.calls)
  assert [name for name in fake.calls if name.startswith("full")] == [
    "full-digits-5-9-rate0.3-seed0", "full-digits-5-9-rate0.1-seed0",
  ]  # fmt: skip
  assert runner.run_study(config, tmp_path, parts) == found
  assert len(fake.calls) == len({*fake.calls})
  full = found["table2"].rows[0]
  assert (full["regime"], full["test"]) == ("full", None)
  assert full["diverged"] == "at every rate"
  assert "memory_masked (5 cells) diverged at every learning rate (with" in (
    " ".join(found["table2"].sentences)
  )
  assert "full diverges at all of them." in found["sensitivity"].sentences
  assert found["sensitivity"].lines["full"] == []


def test_a_variant_that_is_lost_in_a_sweep_has_no_result(config):
  planned = plan.plan(config, ["table2"], {})[-1]
  assert planned.regime == "norms_masked"
  entries = tuple(
    TrialResult(
      name=f"t-0{i}", learning_rate=rate, cells=0, val_accuracy=0.5,
      test_accuracy=0.4, test_examples=9, trainable_params=3,
      exported="tasks/t",
    )
    for i, rate in enumerate(planned.learning_rates)
  )  # fmt: skip
  result = RunResult(
    tasks=entries, sweep=SweepResult(lost={"t-01": 7}), wall_seconds=1.0
  )
  well, lost = execute.points_of(planned, result, ROOT)
  assert (well.validation, well.test) == (0.5, 0.4)
  assert well.task == str(ROOT / "tasks" / "t")
  assert (lost.learning_rate, lost.validation, lost.task) == (0.1, None, None)
  # What is neither there nor lost is not taken for lost.
  missing = dataclasses.replace(result, tasks=entries[:1], sweep=SweepResult())
  with pytest.raises(ConfigError, match="Move the run away"):
    execute.points_of(planned, missing, ROOT)


def test_a_dry_run_trains_nothing(config, tmp_path, monkeypatch):
  def never(*args):
    raise AssertionError("trained")

  alone = with_study(config, seeds=(0, 1), learning_rates=(0.3, 0.1))
  fake = FakeRuns(accuracies)
  monkeypatch.setattr(training_run, "train_and_evaluate", fake)
  planned = plan.plan(alone, ["adapters"], {})
  first = config_of(alone, planned[0], alone.backbone)
  fake(first, tmp_path / "runs" / planned[0].name)
  before = sorted(tmp_path.rglob("*"))
  monkeypatch.setattr(training_run, "train_and_evaluate", never)
  timed = []

  def time_it(self, config, variants):
    timed.append(config.regime)
    return forecast.Seconds(30.0, 20.0, 10.0)

  monkeypatch.setattr(forecast.Timer, "_timed", time_it)
  text = forecast.forecast(alone, tmp_path, ["adapters"])
  assert sorted(tmp_path.rglob("*")) == before
  assert timed == ["memory", "adapter_memory"]  # once for both seeds
  rows = [line.split() for line in text.splitlines()[2:11]]
  assert [row[0] for row in rows] == [r.name for r in planned]
  assert rows[0][1:] == ["1", "0:00", "finished"]
  assert rows[1][1:] == ["1", "0:32", "as", "a", "finished", "run"]
  # The further seed at a rate that is not known yet is counted, too.
  assert rows[2][0] == "adapter-digits-5-9-rate-of-the-best-seed1"
  assert rows[2][1:] == rows[1][1:]
  assert rows[5][0] == "memory-digits-5-9-cells5-rate-of-the-best-seed1"
  assert rows[5][1:] == ["1", "0:30", "0:20", "0:10", "1:00", "timed"]
  assert "9 runs of 9 variants and 2 steps for adapters; about 7:04" in text


def test_a_dry_run_knows_how_many_steps_epochs_are(
  config, tmp_path, monkeypatch
):
  config = with_study(config, regimes=("head",))
  config = dataclasses.replace(config, epochs=0.5, image_size=0)
  examples = forecast.Splits.of(config).train.size
  steps = math.ceil(0.5 * examples / config.batch_size)
  timed = []

  def time_it(self, config, variants):
    timed.append((config.total_steps, config.image_size))
    return forecast.Seconds(1.0, 1.0, 1.0)

  monkeypatch.setattr(forecast.Timer, "_timed", time_it)
  text = forecast.forecast(config, tmp_path, ["table2"])
  assert {*timed} == {(steps, 8)}
  assert f"and {steps} steps for table2" in text


@pytest.mark.slow
def test_steps_are_timed(config):
  mesh = sharding.make_mesh(jax.devices()[:1])
  timer = forecast.Timer(
    mv.load_backbone(config.backbone, image_size=8),
    mesh,
    forecast.Splits.of(config),
  )
  planned = next(
    r for r in plan.plan(config, ["table2"], {}) if r.regime == "cls_masked"
  )
  made = config_of(config, planned, config.backbone)
  found = timer.seconds(made)
  assert min(found.training, found.evaluation, found.compiling) > 0
  assert list(timer.known) == [("cls_masked", (5,)), ("cls_masked", (5, 5))]


def test_the_papers_numbers_stand_beside(config):
  for name, task, expected in (
    ("sun397/tfds", "sun397", 0.768),
    ("cifar100", "", 0.910),
    ("i_naturalist2017", "", 0.501),
    ("folder", "places365", 0.538),
    ("cifar10", "", None),
  ):
    there = dataclasses.replace(
      config,
      data=dataclasses.replace(config.data, name=name),
      task=dataclasses.replace(config.task, name=task),
    )
    assert paper_numbers.table2(there).get(5) == expected
  there = dataclasses.replace(
    config, data=dataclasses.replace(config.data, name="cifar100")
  )
  rows = analysis.table2(there, []).rows
  memory = next(r for r in rows if (r["regime"], r["cells"]) == ("memory", 1))
  assert memory["paper"] == 0.909
  assert rows[-1]["regime"] == "norms_masked"
  assert rows[-1]["paper"] is None


def dense_logits(backbone, first, memories, images):
  """A ViT whose tokens all attend to all memories, block by block."""
  compiled = jax.jit(dense, static_argnums=0)
  p = backbone.params
  return compiled(backbone.config, p, first.params, memories, images)


def dense(config, p, task, memories, images):
  z = oracle.patches(p["embedding"], images, 2)
  cls = jnp.broadcast_to(task["cls"], (len(z), 1, z.shape[-1]))
  position = p["Transformer"]["posembed_input"]["pos_embedding"]
  z = jnp.concatenate([cls, z], 1) + position
  for i in range(config.depth):
    memory = jnp.concatenate([m[i] for m in memories])
    z = oracle.block(
      p["Transformer"][f"encoderblock_{i}"], z, memory,
      jnp.ones((z.shape[1], z.shape[1] + len(memory)), bool),
      memory_norm=np.ones(len(memory), bool), gelu="tanh",
    )  # fmt: skip
  z = oracle.layer_norm(p["Transformer"]["encoder_norm"], z)
  return z[:, 0] @ task["head"]["kernel"] + task["head"]["bias"]


def test_naive_memories_against_the_dense_oracle(backbone, images):
  tasks = [
    random_task(backbone, f"t{i}", seed=i, cells=i + 1, regime="memory")
    for i in range(3)
  ]

  def logits(task):
    return split_forward.predict(backbone, [task], images)["t0"]

  alone = logits(tasks[0])
  assert np.array_equal(logits(interference.naive(tasks[0], [])), alone)
  found = logits(interference.naive(tasks[0], tasks[1:]))
  memories = [task.params["memory"] for task in tasks]
  expected = dense_logits(backbone, tasks[0], memories, images)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  assert not np.allclose(found, alone, atol=0.01)
  with pytest.raises(TaskError, match="expected tasks of 'memory'"):
    interference.naive(tasks[0], [random_task(backbone, "m")])


def test_interference_is_measured(config):
  backbone = tiny_backbone(num_classes=5, depth=1)
  source = datasets.open_source("digits:5-9", "test")
  options = {"batch_size": 192, "mesh": one_device()}
  naive = [
    random_task(backbone, f"t{i}", seed=i, classes=5, regime="memory", cells=6)
    for i in range(3)
  ]
  [batch] = batching.eval_batches(
    source, naive[0].spec.evaluation, batch_size=192
  )
  memories = [task.params["memory"] for task in naive]
  logits = [
    np.asarray(dense_logits(backbone, naive[0], memories[:n], batch["image"]))
    for n in (1, 2, 3)
  ]
  # With all of them, no class is the greatest of every picture.
  bias = logits[2].mean(0)
  naive[0].params["head"]["bias"] = naive[0].params["head"]["bias"] - bias
  expected = [
    np.mean(((out - bias).argmax(-1) == batch["label"])[batch["mask"] > 0])
    for out in logits
  ]
  # None could be left out unseen.
  assert expected[2] not in expected[:2]
  found = interference.naive_accuracies(backbone, naive, source, **options)
  assert found == pytest.approx(expected)
  masked = [random_task(backbone, f"m{i}", seed=i, classes=5) for i in range(3)]
  kept = interference.masked_accuracies(backbone, masked, source, **options)
  assert [accuracy for accuracy, _ in kept] == [kept[0][0]] * 3
  assert kept[0][1] == 0
  assert max(difference for _, difference in kept) == 0
  finding = interference_tables(config, [*found[:2], 0.1], kept)
  assert [row["paper, no mask"] for row in finding.rows] == [
    0.5, 0.281, 0.278,
  ]  # fmt: skip
  lost, kept = finding.sentences
  assert f"to 10.0 %, by {100 * (found[0] - 0.1):.1f} points." in lost
  assert kept.endswith("by 0.0 points, and no logit changes at all.")


def test_a_difference_in_any_batch_is_reported(backbone, monkeypatch):
  """The largest of all batches, and of the slots in which it was."""
  masked = [random_task(backbone, f"m{i}", seed=i, classes=5) for i in range(3)]
  source = datasets.open_source("digits:5-9", "test")
  read, calls = inference.read, []

  def disturbed(backbone, slots, context):
    """By 2 in the first of four batches, with two others; by 1 in the next."""
    calls.append(len(slots.specs))
    logits = read(backbone, slots, context)
    by = {(1, 3): 2.0, (2, 3): 1.0, (2, 2): 0.5}
    return {
      name: values + by.get((-(-len(calls) // 3), len(slots.specs)), 0.0)
      for name, values in logits.items()
    }

  monkeypatch.setattr(interference.inference, "read", disturbed)
  found = interference.masked_accuracies(
    backbone, masked, source, batch_size=48, mesh=one_device()
  )
  assert len(calls) == 4 * 3
  assert [difference for _, difference in found] == pytest.approx(
    [0.0, 0.5, 2.0], abs=1e-4
  )


# As the paper prints them, in percent.
TABLE_2 = """
             full  head  head_cls   1     5     10    20
sun397       76.9  75.9  76.4       77.0  76.8  76.9  76.9
inaturalist2017 54.0 46.3 48.7      49.4  50.1  50.0  50.0
cifar100     91.8  85.8  88.6       90.9  91.0  91.1  90.9
places365    55.9  50.9  52.4       53.3  53.8  53.9  54.1
"""


def test_every_number_of_the_paper(config):
  columns, *rows = (line.split() for line in TABLE_2.strip().splitlines())
  keys = [int(name) if name.isdigit() else name for name in columns]
  for name, *values in rows:
    there = dataclasses.replace(
      config, data=dataclasses.replace(config.data, name=name)
    )
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


@pytest.mark.parametrize("regime", REGIMES)
def test_costs_by_formula_and_by_xla(backbone, regime):
  cost = costs.cost_of(backbone.config, regime, cells=3, bottleneck=2)
  assert cost.parameters == cost.parameters_counted
  # XLA counts LayerNorm, softmax and biases as well.
  assert 1.0 < cost.flops_xla / cost.flops < 1.2
  if regime == "memory":
    # Each more cell: 2 layers; a key, a value; 17 queries that read it.
    more = costs.cost_of(backbone.config, regime, cells=7, bottleneck=2)
    expected = 4 * 2 * (2 * 2 * 32 * 32 + 2 * 2 * 17 * 32)
    assert more.flops - cost.flops == expected
    assert more.flops_xla - cost.flops_xla == pytest.approx(expected, rel=0.1)


def test_costs_are_the_papers():
  config = mv.vit_config("B/32")
  assert costs.parameters(config, "full", 5, 5) == 87_455_232
  assert costs.parameters(config, "head", 5, 5) == 0
  assert costs.parameters(config, "head_cls", 5, 5) == 768
  assert costs.parameters(config, "memory", 5, 5) == 768 + 768 * 12 * 5
  assert costs.parameters(config, "adapter", 5, 5) == 768 + 184_320 + 18_552
  plain, once = costs.flops(config, "head", 0, 0)
  assert once == 0
  assert plain == pytest.approx(8.8e9, rel=0.01)
  masked, _ = costs.flops(config, "cls_masked", 0, 0)
  assert (masked - plain) / plain == pytest.approx(0.02, abs=0.003)
  finding = budget.adapters(config_lib.Config(), config, [])
  assert "184,320, and 18,552 biases" in " ".join(finding.notes)


def test_what_stands_beside_table_5():
  """By hand: products of matrices, a multiplication with its addition 2."""
  d, depth, cells, tokens = 768, 12, 5, 7 * 7 + 1
  keys = depth * 2 * 2 * tokens * cells * d  # scores, and weighted values
  memory = depth * 2 * 2 * cells * d * d  # keys, and values
  token = depth * (
    4 * 2 * d * d + 2 * 2 * 4 * d * d + 2 * 2 * (tokens + 1 + cells) * d
  )
  block = 4 * (d * d + d) + 2 * 4 * d * d + 4 * d + d + 2 * 2 * d
  full = depth * block + (32 * 32 * 3 * d + d) + d + tokens * d + 2 * d
  (text,) = (
    note
    for note in budget.costs(
      mv.vit_config("Ti/16"),
      [costs.cost_of(tiny_backbone(depth=1).config, "head", 0, 0)],
      1,
    ).notes
    if "Table 5" in note
  )
  for number, unit in (
    (keys, "MFLOP a picture"),
    (memory, "MFLOP once a batch"),
    (token, "and the same"),
    (full, "M, "),
    (depth * block, "M of them in the 12 blocks"),
  ):
    assert f"{number / 1e6:.1f} {unit}" in text
  assert f"same {memory / 1e6:.1f})" in text
  assert f"L/32 ({24 * 4 * 50 * 5 * 1024 / 1e6:.1f})" in text
  assert f"384 px ({12 * 4 * 145 * 5 * 768 / 1e6:.1f})" in text
  # Neither is what the paper has, whichever way one counts.
  for number in (keys, memory, keys + memory, token, token + memory):
    for operations in (number, number / 2):
      assert not 20e6 < operations < 30e6


@pytest.mark.processes
def test_the_command(config, tmp_path):
  """Two regimes and interference on the embedded digits, killed once."""
  options = {
    "pretrain.variant": "", "backbone": config.backbone, "upstream.name": "",
    "batch_size": 16, "batch_size_eval": 64, "total_steps": 3,
    "eval_every": 3, "checkpoint_every": 3,
    "study.learning_rates": "(0.3, 0.1)", "study.seeds": "(0,)",
    "study.cells": "(5,)", "study.others": "('digits:0-4',)",
  }  # fmt: skip
  command = [
    sys.executable, "-m", "memory_vit.paper",
    "--config=configs/quickstart.py", f"--workdir={tmp_path / 'study'}",
    *(f"--config.{key}={value}" for key, value in options.items()),
    "--only=interference", "--only=costs", "--only=extension",
  ]  # fmt: skip
  environment = {**os.environ, "XLA_FLAGS": quick.XLA_FLAGS}
  options = {"cwd": ROOT, "env": environment, "text": True, "check": True}
  planned = subprocess.run(
    [*command, "--dry_run"], **options, stdout=subprocess.PIPE
  ).stdout
  # memory on both data sets and at both rates; masked memory once on each, and
  # once more reading.
  assert "7 runs of 10 variants and 3 steps" in planned
  assert not (tmp_path / "study").exists()
  subprocess.run(command, **options)
  results = {
    path: path.stat().st_mtime_ns
    for path in (tmp_path / "study" / "runs").glob("*/result.json")
  }
  assert len(results) == 7
  numbers = json.loads((tmp_path / "study" / "report.json").read_text())
  assert set(numbers["parts"]) == {"costs", "interference", "extension"}
  _, together = numbers["parts"]["interference"]["rows"]
  assert together["largest difference of a logit"] == 0
  subprocess.run(command, **options)
  assert {path: path.stat().st_mtime_ns for path in results} == results
