"""The paper's study: what is run, what is chosen, what is reported."""

import collections
import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import ROOT, random_task, tiny_backbone

import memory_vit as mv
from configs import quickstart
from memory_vit import config as config_lib
from memory_vit import (
  costs,
  data,
  findings,
  forecast,
  interference,
  measured,
  paper,
  records,
  report,
  run,
  sharding,
  study,
  sweep,
)
from memory_vit.errors import ConfigError, DivergedError, TaskError
from memory_vit.regimes import REGIMES

TRAINED = ("table2", "sensitivity", "cells", "adapters", "extension")


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
    for variant in sweep.variants_of(config, "t"):
      own = variant.config
      validation, test = self.accuracy(own)
      trained = REGIMES[own.regime].trained
      entries.append(
        {
          "name": variant.name,
          "cells": own.task.cells if "memory" in trained else 0,
          "learning_rate": own.learning_rate,
          "val_accuracy": validation,
          "test_accuracy": test if own.data.test else None,
          "trainable_params": 100,
          "exported": f"tasks/{variant.name}",
        }
      )
    records.write_json(directory / "config.json", config_lib.to_dict(config))
    result = {"tasks": entries, "images_per_second": 32.0}
    records.write_json(directory / "result.json", result)
    return result


def accuracies(config):
  """On validation the higher rate is better, on test the lower one."""
  return config.learning_rate, 0.5 - config.learning_rate / 10


def test_a_plan_trains_nothing_twice(config):
  runs = study.plan(config, study.PARTS)
  assert len({r.name for r in runs}) == len({*runs}) == len(runs)
  kinds = collections.Counter((r.regime, r.data, bool(r.reads)) for r in runs)
  first, other, last = "digits:5-9", "digits:0-4", "digits:2-6"
  assert kinds == {
    # Of the first data set, rates * seeds (* cells); masked ones by seed.
    ("full", first, False): 4,
    ("head", first, False): 4,
    ("head_cls", first, False): 4,
    ("memory", first, False): 8,
    ("memory_masked", first, False): 2,
    ("cls_masked", first, False): 2,
    ("adapter", first, False): 4,
    ("adapter_memory", first, False): 4,
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
  apart = [r for part in study.PARTS for r in study.plan(config, [part])]
  assert {*apart} == {*runs}
  assert len(apart) > len(runs)
  assert study.plan(config, ["costs"]) == []


def test_configurations_of_runs(config):
  for planned in study.plan(config, study.PARTS):
    made = study.config_of(config, planned, "b.npz", ["dir"])
    assert (made.regime, made.seed) == (planned.regime, planned.seed)
    assert made.data.name == planned.data
    assert bool(made.data.test) == planned.tested
    variants = [
      (v.config.learning_rate, v.config.task.cells)
      for v in sweep.variants_of(made, "t")
    ]
    if planned.cells:
      assert variants == planned.variants
    assert len(variants) == len(planned.variants)
    assert made.study == config_lib.StudyConfig()


def test_parts(config):
  alone = with_study(config, others=())
  assert study.possible_parts(config) == list(study.PARTS)
  assert study.possible_parts(alone) == [
    "table2", "sensitivity", "cells", "adapters", "costs",
  ]  # fmt: skip
  assert study.possible_parts(config, ["costs", "table2"]) == [
    "table2", "costs",
  ]  # fmt: skip
  with pytest.raises(ConfigError, match=r"--only=\['tabel2'\]: expected some"):
    study.possible_parts(config, ["tabel2"])
  with pytest.raises(ConfigError, match="in config.study.others"):
    study.possible_parts(alone, ["interference"])


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"learning_rates": ()}, "learning_rates is .*, expected values that diff"),
    ({"learning_rates": (0.1, 0.0)}, "expected positive numbers"),
    ({"seeds": (1, 1)}, "config.study.seeds is .*, expected values that"),
    ({"seeds": (-1,)}, "config.study.seeds is .*, expected at least 0"),
    ({"cells": (0, 5)}, "config.study.cells is .*, expected at least 1"),
    ({"cells": (1, 10)}, "config.task.cells is 5, expected one of config.stud"),
    ({"others": ("digits:5-9",)}, "which is config.data.name"),
  ],
)
def test_studies_that_cannot_be(config, values, message):
  with pytest.raises(ConfigError, match=message):
    study.possible_parts(with_study(config, **values))


def test_options_of_one_run_are_refused(config):
  for part, values, message in (
    ("sweep", {"cells": (1,)}, "config.sweep is for one run"),
    ("task", {"attends_to": ("x",)}, "config.task.attends_to"),
    ("data", {"test": ""}, "config.data.test is empty"),
    ("data", {"validation": ""}, "config.data.validation is empty"),
  ):
    new = dataclasses.replace(getattr(config, part), **values)
    with pytest.raises(ConfigError, match=message):
      study.possible_parts(dataclasses.replace(config, **{part: new}))


def point(rate, seed, validation, test):
  return measured.Point(
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
  choice = measured.choose(points)
  assert choice == measured.Choice(
    learning_rate=0.2, validation=0.75, test=0.5, spread=pytest.approx(0.2),
    parameters=7,
  )  # fmt: skip
  assert measured.best(points).learning_rate == 1.0
  assert measured.choose(points[-1:]) is None
  assert measured.best(points[-1:]) is None


def test_a_study_from_its_runs_to_the_report(config, tmp_path, monkeypatch):
  """Killed in its middle, it goes on without repeating a run."""
  planned = [r.name for r in study.plan(config, TRAINED)]
  killed = FakeRuns(accuracies, stops_at=len(planned) - 3)
  monkeypatch.setattr(run, "train_and_evaluate", killed)
  with pytest.raises(KeyboardInterrupt):
    paper.run_study(config, tmp_path, TRAINED)
  # What is known by then has been written.
  assert "Table 2" in (tmp_path / "report.md").read_text()
  rest = FakeRuns(accuracies)
  monkeypatch.setattr(run, "train_and_evaluate", rest)
  found = paper.run_study(config, tmp_path, TRAINED)
  assert killed.calls[:-1] + rest.calls == planned
  again = FakeRuns(accuracies)
  monkeypatch.setattr(run, "train_and_evaluate", again)
  assert paper.run_study(config, tmp_path, TRAINED) == found
  assert again.calls == []

  for row in found["table2"].rows:
    assert row["learning rate"] == 0.3
    assert row["test"] == pytest.approx(0.47)
    assert "paper" not in row
  assert len(found["table2"].rows) == 3 + 2 + 2 + 1
  rates = found["sensitivity"].lines["full"]
  assert [(x, round(mean, 2)) for x, mean, _, _ in rates] == [
    (0.1, 0.49), (0.3, 0.47),
  ]  # fmt: skip
  text = (tmp_path / "report.md").read_text()
  for part in found.values():
    assert f"## {part.title}" in text
    assert part.sentence in text
    assert report.markdown_table(part.rows) in text
  for part in ("sensitivity", "cells"):
    assert (tmp_path / f"{part}.png").stat().st_size > 1000
    assert f"({part}.png)" in text
  numbers = json.loads((tmp_path / "report.json").read_text())
  assert set(numbers["parts"]) == set(TRAINED)
  assert len(numbers["points"]) == sum(
    len(r.variants) for r in study.plan(config, TRAINED)
  )


def test_what_diverges_is_a_finding(config, tmp_path, monkeypatch):
  """It is not tried again, and no other run needs it to be there."""

  class Diverging(FakeRuns):
    def __call__(self, config, directory, stop=None):
      if config.regime in ("full", "memory_masked"):
        directory.mkdir(parents=True)
        self.calls.append(directory.name)
        raise DivergedError("not finite", {"digits": 1})
      return super().__call__(config, directory)

  fake = Diverging(accuracies)
  monkeypatch.setattr(run, "train_and_evaluate", fake)
  parts = ("table2", "sensitivity", "extension")
  found = paper.run_study(config, tmp_path, parts)
  # All but the runs that would read what diverged.
  readers = [r for r in study.plan(config, parts) if r.reads]
  assert len(fake.calls) == len(study.plan(config, parts)) - len(readers)
  assert paper.run_study(config, tmp_path, parts) == found
  assert len(fake.calls) == len({*fake.calls})
  full = found["table2"].rows[0]
  assert (full["regime"], full["test"]) == ("full", None)
  assert "memory_masked with 5 cells diverged at every learning rate" in (
    found["table2"].sentence
  )
  assert "full has no accuracy, and diverges at 2" in (
    found["sensitivity"].sentence
  )
  assert found["sensitivity"].lines["full"] == []


def test_a_variant_that_is_lost_in_a_sweep_has_no_result(config):
  planned = study.plan(config, ["table2"])[-1]
  entries = [
    {"name": f"t-0{i}", "learning_rate": rate, "cells": 0, "val_accuracy": 0.5,
     "test_accuracy": 0.4, "trainable_params": 3, "exported": "tasks/t"}
    for i, rate in enumerate(planned.learning_rates)
  ]  # fmt: skip
  result = {"tasks": entries, "sweep": {"lost": {"t-01": 7}}}
  well, lost = measured.points_of(planned, result, ROOT)
  assert (well.validation, well.test) == (0.5, 0.4)
  assert well.task == str(ROOT / "tasks" / "t")
  assert (lost.learning_rate, lost.validation, lost.task) == (0.1, None, None)


def test_a_dry_run_trains_nothing(config, tmp_path, monkeypatch):
  def never(*args):
    raise AssertionError("trained")

  alone = with_study(config, learning_rates=(0.1,), seeds=(0, 1))
  fake = FakeRuns(accuracies)
  monkeypatch.setattr(run, "train_and_evaluate", fake)
  planned = study.plan(alone, ["adapters"])
  first = study.config_of(alone, planned[0], alone.backbone)
  fake(first, tmp_path / "runs" / planned[0].name)
  before = sorted(tmp_path.rglob("*"))
  monkeypatch.setattr(run, "train_and_evaluate", never)
  timed = []

  def time_it(self, config, variants):
    timed.append(config.regime)
    return 0.5

  monkeypatch.setattr(forecast.Timer, "_timed", time_it)
  text = forecast.forecast(alone, tmp_path, ["adapters"])
  assert sorted(tmp_path.rglob("*")) == before
  assert timed == ["memory", "adapter_memory"]  # once for both seeds
  rows = [line.split() for line in text.splitlines()[2:8]]
  assert [row[0] for row in rows] == [r.name for r in planned]
  assert rows[0][1:] == ["1", "2", "0:00", "finished"]
  # 2 steps of 16 pictures, at 32 a second.
  assert rows[1][1:] == ["1", "2", "0:01", "as", "a", "finished", "run"]
  assert rows[2][3:] == ["0:01", "from", "timed", "steps"]
  assert "6 runs of 6 variants for adapters; about 0:05" in text


@pytest.mark.slow
def test_steps_are_timed(config):
  source = data.open_source("digits:5-9", config.data.train)
  mesh = sharding.make_mesh(jax.devices()[:1])
  timer = forecast.Timer(mv.load_backbone(
    config.backbone, image_size=8), mesh, source)  # fmt: skip
  planned = next(
    r for r in study.plan(config, ["table2"]) if r.regime == "cls_masked"
  )
  made = study.config_of(config, planned, config.backbone)
  assert timer.seconds(made) > 0
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
    assert findings.papers_table(there).get(5) == expected
  there = dataclasses.replace(
    config, data=dataclasses.replace(config.data, name="cifar100")
  )
  rows = findings.table2(there, []).rows
  memory = next(r for r in rows if (r["regime"], r["cells"]) == ("memory", 1))
  assert (memory["paper"], memory["yours"]) == (0.909, None)
  assert rows[-1]["regime"] == "cls_masked"
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
  alone = interference.logits(backbone, tasks[0], images)
  none = interference.logits(backbone, interference.naive(tasks[0], []), images)
  assert np.array_equal(none, alone)
  found = interference.logits(
    backbone, interference.naive(tasks[0], tasks[1:]), images
  )
  memories = [task.params["memory"] for task in tasks]
  expected = dense_logits(backbone, tasks[0], memories, images)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  assert not np.allclose(found, alone, atol=0.01)
  with pytest.raises(TaskError, match="expected tasks of 'memory'"):
    interference.naive(tasks[0], [random_task(backbone, "m")])


def test_interference_is_measured(config):
  backbone = mv.load_backbone(config.backbone, image_size=8)
  mesh = sharding.make_mesh(jax.devices()[:1])
  source = data.open_source("digits:5-9", "test")
  options = {"batch_size": 192, "mesh": mesh}
  naive = [
    random_task(backbone, f"t{i}", seed=i, classes=5, regime="memory")
    for i in range(2)
  ]
  found = interference.naive_accuracies(backbone, naive, source, **options)
  hits = []
  for batch in data.eval_batches(
    source, naive[0].spec.evaluation, batch_size=192
  ):
    memories = [task.params["memory"] for task in naive]
    out = dense_logits(backbone, naive[0], memories, batch["image"])
    right = np.asarray(out).argmax(-1) == batch["label"]
    hits += list(right[batch["mask"] > 0])
  assert found[1] == pytest.approx(np.mean(hits))
  masked = [random_task(backbone, f"m{i}", seed=i, classes=5) for i in range(3)]
  kept = interference.masked_accuracies(backbone, masked, source, **options)
  assert [accuracy for accuracy, _ in kept] == [kept[0][0]] * 3
  assert kept[0][1] == 0
  assert max(difference for _, difference in kept) == 0
  finding = findings.interference(config, [*found, 0.1], kept)
  assert [row["paper, no mask"] for row in finding.rows] == [
    0.5, 0.281, 0.278,
  ]  # fmt: skip
  assert f"take {100 * (found[0] - 0.1):.1f} points" in finding.sentence


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
  finding = findings.adapters(config_lib.Config(), config, [])
  assert "184,320, and 18,552 biases" in " ".join(finding.notes)


@pytest.mark.slow
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
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  options = {"cwd": ROOT, "env": environment, "text": True, "check": True}
  planned = subprocess.run(
    [*command, "--dry_run"], **options, stdout=subprocess.PIPE
  ).stdout
  # memory on both data sets and at both rates; masked memory once on each, and
  # once more reading.
  assert "7 runs of 10 variants" in planned
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
