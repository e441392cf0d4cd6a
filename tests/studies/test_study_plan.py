"""Which runs a study needs, and how they are configured."""

import collections
import dataclasses

import pytest
from fake_studies import follow, small_study, with_study

from memory_vit import config as config_lib
from memory_vit.config import KeepConfig
from memory_vit.errors import ConfigError
from memory_vit.train import sweep
from studies.paper import analysis, plan
from studies.paper.runs import PARTS, config_of, possible_parts
from studies.paper.section import best_rate


@pytest.fixture
def config(backbone_file):
  return small_study(backbone_file)


def test_a_plan_trains_nothing_twice(config):
  runs, trials = follow(config, PARTS, lambda run, rate: rate)
  assert len({r.name for r in runs}) == len({*runs}) == len(runs)
  assert plan.plan(config, PARTS, trials) == [
    *dict.fromkeys(plan.plan(config, PARTS, trials))
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
    ("layers_masked", first, False): 2,
    ("norms_layers_masked", first, False): 2,
    ("side_masked", first, False): 2,
    ("probe", first, False): 2,
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
  assert masked.trials == [(0.3, 1), (0.3, 5), (0.1, 1), (0.1, 5)]
  assert masked.name == "memory_masked-digits-5-9-seed0"
  # What all parts need is what each needs.
  apart = [r for part in PARTS for r in plan.plan(config, [part], trials)]
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
  runs, trials = follow(config, ["cells"], lambda run, rate: 0.5)
  at = {r.learning_rates for r in runs if r.seed == 4 and r.regime == "memory"}
  assert at == {(0.1,)}
  some = [t for found in trials.values() for t in found]
  choice = best_rate(config, some, ("memory", 5))
  assert (choice.learning_rate, len(choice.tests)) == (0.1, 3)


def test_a_rate_at_which_the_first_seed_diverged_is_not_chosen(config):
  only = with_study(config, regimes=("full",), seeds=(0, 4, 5))

  def diverges(run, rate):
    return rate == 0.3 or run.seed == 5

  runs, trials = follow(only, ["table2"], lambda run, rate: rate, diverges)
  assert [r.learning_rates + (r.seed,) for r in runs] == [
    (0.3, 0), (0.1, 0), (0.1, 4), (0.1, 5),
  ]  # fmt: skip
  some = [t for found in trials.values() for t in found]
  (row,) = analysis.table2(only, some).rows
  assert (row["learning rate"], row["seeds"]) == (0.1, 2)
  assert row["diverged"] == "1 of 3"
  # Nothing is left for further seeds.
  runs, _ = follow(only, ["table2"], lambda run, rate: rate, lambda *_: True)
  assert [r.seed for r in runs] == [0, 0]


def test_regimes_that_are_not_to_be_run(config):
  masked = with_study(config, regimes=("memory_masked", "cls_masked"))
  assert possible_parts(masked) == [
    "table2", "sensitivity", "cells", "costs", "extension", "regimes",
  ]  # fmt: skip
  runs, trials = follow(masked, possible_parts(masked), lambda *_: 0.5)
  assert {r.regime for r in runs} == {"memory_masked", "cls_masked"}
  some = [t for found in trials.values() for t in found]
  for make in (analysis.table2, analysis.cells, analysis.sensitivity):
    found = make(masked, some)
    assert {row["regime"] for row in found.rows} <= {*masked.study.regimes}
    compared = {row["regime"] for row in found.comparisons}
    assert {name.split()[0] for name in compared} <= {*masked.study.regimes}
    assert "head" not in str(found.comparisons)
    assert all(found.lines.values())
  with pytest.raises(ConfigError, match=r"--only=interference needs \['memory"):
    possible_parts(masked, ["table2", "interference"])
  with pytest.raises(ConfigError, match=r"regimes\[0\] is 'memory_mask', exp"):
    with_study(config, regimes=("memory_mask",))


def test_configurations_of_runs(config):
  for planned in follow(config, PARTS, lambda *_: 0.5)[0]:
    reads = ["dir"] if planned.reads else []
    made = config_of(config, planned, "b.npz", reads)
    assert (made.regime, made.seed) == (planned.regime, planned.seed)
    assert made.data.name == planned.data
    assert bool(made.data.test) == planned.tested
    variants = [
      (v.config.learning_rate, v.config.task.cells)
      for v in sweep.trials_of(made, "t")
    ]
    if planned.cells:
      assert variants == planned.trials
    assert len(variants) == len(planned.trials)
    assert made.study == config_lib.StudyConfig()


def test_tasks_that_other_parts_read_are_exported(config):
  """All trials of those; of others the best alone, which takes less time."""
  runs, trials = follow(config, ["regimes", *PARTS], lambda *_: 0.5)
  read = {run.reads.name for run in runs if run.reads}
  read |= {
    run.name for run in plan.runs_of(config, "interference", trials)
    if run.regime == "memory_masked"
  }  # fmt: skip
  found = {
    run.name
    for run in runs
    if config_of(config, run, "b").sweep.export == "all"
  }
  assert found >= read
  assert {name.split("-")[0] for name in found} == {"memory_masked"}


def test_what_a_run_keeps_is_what_its_regime_reads(config):
  """One study has runs that keep contexts, features, and nothing."""
  squeezed = dataclasses.replace(config.data, train_crop="resize", flip=False)
  config = dataclasses.replace(
    config, data=squeezed, keep=KeepConfig(what="contexts", where="device")
  )
  kept = {
    run.regime: config_of(config, run, "b").keep
    for run in follow(config, ["regimes"], lambda *_: 0.5)[0]
  }
  assert {keep.where for keep in kept.values()} == {"device"}
  expected = {"head": "features", "full": "none", "memory": "none"}
  expected |= {"cls_masked": "contexts", "norms_layers_masked": "contexts"}
  found = {name: kept[name].what for name in expected}
  assert found == expected
  nothing = dataclasses.replace(config, keep=KeepConfig())
  runs = follow(nothing, ["regimes"], lambda *_: 0.5)[0]
  assert {config_of(nothing, run, "b").keep.what for run in runs} == {"none"}


def test_other_data_sets_have_splits_of_their_own(config):
  others = (
    {"name": "folder", "dir": "pictures/birds", "test": "new", "resize": 7},
    "digits:2-6",
    {"name": "digits:0-4", "test": ""},
    {"name": "list", "dir": "vtab/dtd"},
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
  assert made["list:dtd", False].dir == "vtab/dtd"
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
    "regimes",
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
