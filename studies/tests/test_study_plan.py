"""Which runs a study needs, and how they are configured."""

import collections
import dataclasses
import json

import pytest
from fake_studies import configured, follow, small_study

from memory_vit.commands import console
from memory_vit.config import CacheConfig
from memory_vit.errors import MemoryVitError
from memory_vit.train import sweep
from studies.paper import __main__ as paper
from studies.paper import analysis, plan
from studies.paper.runs import config_of
from studies.paper.section import Setting, best_rate
from studies.paper.study import PARTS, Study


@pytest.fixture
def study(backbone_file):
  return small_study(backbone_file)


def test_plan_contains_no_run_twice(study):
  runs, trials = follow(study, PARTS, lambda run, rate: rate)
  assert len({r.name for r in runs}) == len({*runs}) == len(runs)
  assert plan.plan(study, PARTS, trials) == [
    *dict.fromkeys(plan.plan(study, PARTS, trials))
  ]
  kinds = collections.Counter((r.regime, r.data, bool(r.reads)) for r in runs)
  first, other, last = "digits:5-9", "digits:0-4", "digits:2-6"
  assert kinds == {
    # On the first data set two rates with the first seed, the better one with
    # the second (for each number of cells); those that share a pass by seed.
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
    # Interference has one seed, extension both.
    ("memory", other, False): 2,
    ("memory", last, False): 2,
    ("memory_masked", other, False): 2,
    ("memory_masked", last, False): 1,
    ("memory_masked", other, True): 2,
  }
  masked = next(r for r in runs if r.regime == "memory_masked")
  assert masked.trials == [(0.3, 1), (0.3, 5), (0.1, 1), (0.1, 5)]
  assert masked.name == "memory_masked-digits-5-9-seed0"
  # All parts together need the runs that each needs.
  apart = [r for part in PARTS for r in plan.plan(study, [part], trials)]
  assert {*apart} == {*runs}
  assert len(apart) > len(runs)
  assert plan.plan(study, ["costs"], {}) == []


def test_further_seeds_run_at_the_learning_rate_of_the_first(study):
  """Chosen separately for each number of cells, on validation, not on test."""
  study = dataclasses.replace(
    study, seeds=(7, 0, 4), regimes=("memory", "memory_masked")
  )

  def accuracy(run, rate):
    return rate if run.cells == (1,) else -rate

  unknown = plan.runs_of(study, "cells", {})
  assert [r.name for r in unknown[:4]] == [
    "memory-digits-5-9-cells1-rate0.3-seed7",
    "memory-digits-5-9-cells1-rate0.1-seed7",
    "memory-digits-5-9-cells1-rate-of-the-best-seed0",
    "memory-digits-5-9-cells1-rate-of-the-best-seed4",
  ]
  runs, _ = follow(study, ["cells"], accuracy)
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
  # The number of runs was known before their learning rates.
  assert len(unknown) == len(runs)
  everything, _ = follow(
    dataclasses.replace(study, search="all"), ["cells"], accuracy
  )
  assert len(everything) == 2 * 2 * 3 + 3
  # Of equals the lowest learning rate, also in the table.
  runs, trials = follow(study, ["cells"], lambda run, rate: 0.5)
  at = {r.learning_rates for r in runs if r.seed == 4 and r.regime == "memory"}
  assert at == {(0.1,)}
  some = [t for found in trials.values() for t in found]
  choice = best_rate(study, some, Setting("memory", 5))
  assert (choice.learning_rate, len(choice.tests)) == (0.1, 3)


def test_learning_rate_at_which_the_first_seed_diverged_is_not_chosen(study):
  only = dataclasses.replace(study, regimes=("full",), seeds=(0, 4, 5))

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
  # Further seeds have no runs.
  runs, _ = follow(only, ["table2"], lambda run, rate: rate, lambda *_: True)
  assert [r.seed for r in runs] == [0, 0]


def test_study_plans_and_reports_only_its_regimes(study):
  masked = dataclasses.replace(study, regimes=("memory_masked", "cls_masked"))
  assert masked.parts() == [
    "table2", "sensitivity", "cells", "costs", "extension", "regimes",
  ]  # fmt: skip
  runs, trials = follow(masked, masked.parts(), lambda *_: 0.5)
  assert {r.regime for r in runs} == {"memory_masked", "cls_masked"}
  some = [t for found in trials.values() for t in found]
  for make in (analysis.table2, analysis.cells, analysis.sensitivity):
    found = make(masked, some)
    assert {row["regime"] for row in found.rows} <= {*masked.regimes}
    compared = {row["regime"] for row in found.comparisons}
    assert {name.split()[0] for name in compared} <= {*masked.regimes}
    assert "head" not in str(found.comparisons)
    assert all(found.lines.values())
  with pytest.raises(
    MemoryVitError, match=r"--only=interference needs \['memory"
  ):
    masked.parts(["table2", "interference"])
  with pytest.raises(
    MemoryVitError, match=r"regimes has \['memory_mask'\], exp"
  ):
    dataclasses.replace(study, regimes=("memory_mask",))


def test_configurations_of_runs_match_the_plan(study):
  for planned in follow(study, PARTS, lambda *_: 0.5)[0]:
    reads = ["dir"] if planned.reads else []
    made = config_of(study, planned, reads)
    assert (made.regime, made.seed) == (planned.regime, planned.seed)
    assert made.data.name == planned.data
    assert bool(made.data.test) == planned.tested
    trials = [
      (trial.config.learning_rate, trial.config.task.cells)
      for trial in sweep.trials_of(made, "t")
    ]
    if planned.cells:
      assert trials == planned.trials
    assert len(trials) == len(planned.trials)


def test_tasks_read_by_other_parts_are_exported(study):
  """All trials of these runs, and only the best one of others."""
  runs, trials = follow(study, ["regimes", *PARTS], lambda *_: 0.5)
  read = {run.reads.name for run in runs if run.reads}
  read |= {
    run.name for run in plan.runs_of(study, "interference", trials)
    if run.regime == "memory_masked"
  }  # fmt: skip
  found = {
    run.name for run in runs if config_of(study, run).sweep.export == "all"
  }
  assert found >= read
  assert {name.split("-")[0] for name in found} == {"memory_masked"}


def test_each_run_caches_the_inputs_of_its_regime(study):
  """A study has runs that cache contexts, features, and nothing."""
  squeezed = dataclasses.replace(study.data, train_crop="resize", flip=False)
  study = configured(
    study, data=squeezed, cache=CacheConfig(what="contexts", where="device")
  )
  caches = {
    run.regime: config_of(study, run).cache
    for run in follow(study, ["regimes"], lambda *_: 0.5)[0]
  }
  assert {cache.where for cache in caches.values()} == {"device"}
  expected = {"head": "features", "full": "none", "memory": "none"}
  expected |= {"cls_masked": "contexts", "norms_layers_masked": "contexts"}
  found = {name: caches[name].what for name in expected}
  assert found == expected
  nothing = configured(study, cache=CacheConfig())
  runs = follow(nothing, ["regimes"], lambda *_: 0.5)[0]
  assert {config_of(nothing, run).cache.what for run in runs} == {"none"}


def test_other_data_sets_may_have_their_own_splits(study):
  others = (
    {"name": "folder", "dir": "images/birds", "test": "new", "resize": 7},
    "digits:2-6",
    {"name": "digits:0-4", "test": ""},
    {"name": "list", "dir": "vtab/dtd"},
  )
  study = dataclasses.replace(study, others=others)
  # As a report receives it.
  options = json.loads(json.dumps(study.options))
  assert Study.of(study.config, options) == study
  runs, _ = follow(study, ["interference", "extension"], lambda *_: 0.5)
  made = {(r.data, r.tested): config_of(study, r).data for r in runs}
  birds, digits = made["folder:birds", True], made["digits:2-6", False]
  first = study.data
  assert (birds.name, birds.dir, birds.test) == (
    "folder", "images/birds", "new",
  )  # fmt: skip
  assert (birds.train, birds.resize) == (first.train, 7)
  assert digits == dataclasses.replace(first, name="digits:2-6", test="")
  names = [r.name for r in runs if r.data == "folder:birds"]
  assert names[0] == "memory-folder-birds-cells5-rate0.3-seed0"
  assert made["list:dtd", False].dir == "vtab/dtd"
  assert study.parts() == list(PARTS)


def test_parts_follow_from_data_sets_and_only(study):
  alone = dataclasses.replace(study, others=())
  assert study.parts() == list(PARTS)
  assert alone.parts() == [
    "table2", "sensitivity", "cells", "placement", "adapters", "costs",
    "regimes",
  ]  # fmt: skip
  assert study.parts(["costs", "table2"]) == [
    "table2", "costs",
  ]  # fmt: skip
  with pytest.raises(
    MemoryVitError, match=r"--only=\['tabel2'\]: expected some"
  ):
    study.parts(["tabel2"])
  with pytest.raises(MemoryVitError, match="expected some in --others"):
    alone.parts(["interference"])


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"learning_rates": ()}, "learning_rates is .*, expected values that diff"),
    ({"seeds": (1, 1)}, "--seeds is .*, expected values that"),
    ({"cells": (0, 5)}, "--cells has 0, expected at least 1"),
    ({"cells": (1, 10)}, "config.task.cells is 5, expected one of --cells"),
    ({"search": "some"}, "--search is 'some', expected one of"),
    ({"others": ("digits:5-9",)}, "number 0 is 'digits:5-9', the name of"),
    ({"others": ({"nam": "digits:0-4"},)}, "number 0: .*data.nam"),
    ({"others": ({"name": 3},)}, "number 0: .*data.name is 3"),
    ({"others": ({"test": "test"},)}, "'name' of '' in --others is"),
    ({"others": ({"name": "d", "test": ""},)}, "'test' of 'd' in .* is empty"),
  ],
)
def test_invalid_studies_are_refused(study, values, message):
  with pytest.raises(MemoryVitError, match=message):
    dataclasses.replace(study, **values)


def test_options_of_a_single_run_are_refused(study):
  for part, values, message in (
    ("sweep", {"cells": (1,)}, "config.sweep is for one run"),
    ("task", {"attends_to": ("x",)}, "config.task.attends_to"),
    ("data", {"test": ""}, "'test' of config.data is empty"),
    ("data", {"validation": ""}, "'validation' of config.data is empty"),
  ):
    new = dataclasses.replace(getattr(study.config, part), **values)
    with pytest.raises(MemoryVitError, match=message):
      configured(study, **{part: new})


@pytest.mark.fault("bad-option")
@pytest.mark.parametrize(
  "flags",
  [
    ["--only=x"], ["--only=interference"], ["--dry_run=x"], ["x"],
    ["--learning_rates=0"], ["--learning_rates=nan"], ["--learning_rates=a"],
    ["--seeds=-1"], ["--seeds=1.5"], ["--cells=1,1"], ["--regimes=memory_mask"],
    ["--others={3}"], ["--config.study.seeds=(0,)"], ["--config=no.py"],
    ["--report_only", "--dry_run"], ["--report_only", "--only=costs"],
  ],
)  # fmt: skip
def test_bad_flags_are_refused(flags, tmp_path, capsys):
  given = ["--config=digits", f"--workdir={tmp_path / 'run'}", *flags]
  status = console.run_command(lambda: paper.run(given))
  out, err = capsys.readouterr()
  assert (status, out) == (2, "")
  assert len(err.splitlines()) == 1
  assert err.startswith("error: ")
  assert not (tmp_path / "run").exists()
