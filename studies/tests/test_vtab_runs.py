"""The protocol of VTAB-1k: search, choice, final runs, tests."""

import dataclasses
import json

import pytest
from conftest import random_task, tiny_backbone
from fake_benchmarks import (
  RATES,
  FakeRuns,
  run_benchmark,
  small_benchmark,
  vtab_config,
  write_digest,
)
from fake_studies import scores_of

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.errors import MemoryVitError
from memory_vit.run_result import RunResult, SweepResult, TrialResult
from studies.record import directory_of, read_record
from studies.vtab import protocol, report, runner
from studies.vtab.scores import Score
from studies.vtab.tasks import TASKS


@pytest.fixture
def fake(monkeypatch):
  return FakeRuns().install(monkeypatch)


def scores(tmp_path):
  return report.scores_of(read_record(tmp_path / "run"))


def test_learning_rate_is_chosen_on_200_images_and_tested_once(
  tmp_path, backbone_file, fake
):
  bench = small_benchmark(tmp_path, backbone_file, ["cifar", "kitti"])
  run_benchmark(bench, tmp_path / "run")
  search, *finals = fake.configs[:3]
  assert (search.data.train, search.data.validation) == ("train800", "val200")
  assert search.data.test == ""
  assert search.sweep.learning_rate == RATES
  assert search.sweep.seed == (0,)
  for seed, final in enumerate(finals):
    assert final.data.train == "train800+val200"
    assert (final.data.validation, final.data.test) == ("", "")
    # At the chosen rate, and nothing else.
    assert final.sweep.overrides == ({"learning_rate": 0.1},)
    assert final.sweep.combinations == 1
    # It determines the order of images and the initialization.
    assert config_lib.data_seed(final) == seed
    assert final.sweep.seed == (seed,)
  for config in (search, *finals):
    assert config.eval_every > 10**9  # only the last step is evaluated
    assert config.data.train_crop == config.data.eval_crop == "resize"
    assert not config.data.flip
  assert fake.tested == [
    [(name, "head", 0), (name, "head", 1)] for name in ("cifar", "kitti")
  ]
  score = scores(tmp_path)["cifar", "head"]
  assert score.settings == {"learning_rate": 0.1}
  assert score.validation == pytest.approx(0.6)
  # At the chosen rate, of seed 0 and seed 1; a lower rate is better on test.
  assert score.tests == pytest.approx((0.49, 0.48))
  assert score.test == pytest.approx(0.485)
  assert (score.tried, score.trials, score.at_edge) == (3, 3 + 2, ())
  assert score.passes == (1, 1, 1)
  assert (score.test_examples, score.parameters) == (4, 100)
  assert (score.training_seconds, score.wall_seconds) == (6.0, 25.0)


@pytest.mark.slow
def test_finished_runs_are_not_repeated(tmp_path, backbone_file, monkeypatch):
  bench = small_benchmark(
    tmp_path, backbone_file, ["cifar", "kitti"], regimes=("head", "full")
  )
  killed = FakeRuns(stops_at=9)
  killed.install(monkeypatch)
  with pytest.raises(KeyboardInterrupt):
    run_benchmark(bench, tmp_path / "run")
  # The tasks that were finished have been written.
  assert {task for task, _ in scores(tmp_path)} == {"cifar"}
  rest = FakeRuns()
  rest.install(monkeypatch)
  run_benchmark(bench, tmp_path / "run")
  assert rest.directories[0] == killed.directories[-1]
  assert len(killed.directories[:-1] + rest.directories) == 2 * 2 * 3
  # Heads in one pass, every `full` in its own; each once.
  assert killed.tested + rest.tested == [
    [(name, *run) for run in runs]
    for name in ("cifar", "kitti")
    for runs in ([("head", 0), ("head", 1)], [("full", 0)], [("full", 1)])
  ]
  # A task with a backbone of its own is removed after its test.
  assert {p.parents[3].name for p in (tmp_path / "run").rglob("task.json")} == {
    "head"
  }
  first = ((tmp_path / "run") / "report.json").read_bytes()
  again = FakeRuns()
  again.install(monkeypatch)
  run_benchmark(bench, tmp_path / "run")
  assert not again.configs + again.tested
  assert ((tmp_path / "run") / "report.json").read_bytes() == first


def test_forecast_excludes_finished_runs(tmp_path, backbone_file, fake):
  bench = small_benchmark(tmp_path, backbone_file, ["kitti"])
  run_benchmark(bench, tmp_path / "run")
  before = sorted(tmp_path.rglob("*"))
  assert "About" not in runner.forecast(bench, tmp_path / "run")
  # One more seed is one more run, of 8 s, and no search.
  more = dataclasses.replace(bench, seeds=(0, 1, 2), missing={"dtd": "none"})
  text = runner.forecast(more, tmp_path / "run")
  assert "4 runs, 3 of them finished." in text
  assert "About 0:00:08 left for 1 runs" in text
  assert text.startswith("dtd is left out: none\n")
  assert sorted(tmp_path.rglob("*")) == before
  assert len(fake.configs) == 3


def test_more_seeds_train_only_further_final_runs(
  tmp_path, backbone_file, fake
):
  """The search has the first seed only, so finished runs stay."""
  bench = small_benchmark(tmp_path, backbone_file, ["cifar"], seeds=(0, 1))
  run_benchmark(bench, tmp_path / "run")
  calls = len(fake.configs)
  run_benchmark(dataclasses.replace(bench, seeds=(0, 1, 2)), tmp_path / "run")
  assert [config.seed for config in fake.configs[calls:]] == [2]
  assert fake.tested[1:] == [[("cifar", "head", 2)]]
  assert scores(tmp_path)["cifar", "head"].tests == pytest.approx(
    (0.49, 0.48, 0.47)
  )


def test_changed_task_is_tested_again(tmp_path, backbone_file, fake):
  bench = small_benchmark(tmp_path, backbone_file, ["cifar"])
  run_benchmark(bench, tmp_path / "run")
  write_digest(
    directory_of(tmp_path / "run", runner.final_name("cifar", "head", 1)),
    "of another",
  )
  run_benchmark(bench, tmp_path / "run")
  assert fake.tested[1:] == [[("cifar", "head", 1)]]


@pytest.mark.fault("changed-run")
def test_changed_test_images_are_refused(tmp_path, backbone_file, fake):
  """No run reads them: the test records their checksum."""
  bench = small_benchmark(tmp_path, backbone_file, ["cifar"])
  run_benchmark(bench, tmp_path / "run")
  image = (
    tmp_path
    / "data/cifar"
    / ((tmp_path / "data/cifar/test.txt").read_text().split()[0])
  )
  image.write_bytes(image.read_bytes() + b" ")
  with pytest.raises(
    MemoryVitError, match="data are not those .*\n.*1 changed"
  ):
    run_benchmark(bench, tmp_path / "run")
  assert len(fake.tested) == 1


@pytest.mark.parametrize(
  ("what", "expected"),
  [
    ("contexts", ["features", "contexts", "none"]),
    ("none", ["none"] * 3),
  ],
)
def test_each_search_caches_the_inputs_of_its_regime(
  tmp_path, backbone_file, fake, what, expected
):
  regimes = ("head", "cls_masked", "full")
  bench = small_benchmark(tmp_path, backbone_file, ["kitti"], regimes=regimes)
  cache = dataclasses.replace(bench.config.cache, what=what)
  config = dataclasses.replace(bench.config, cache=cache)
  bench = dataclasses.replace(bench, config=config)
  found = [
    protocol.search_config(bench, bench.tasks[0], regime).cache.what
    for regime in regimes
  ]
  assert found == expected


def test_finished_run_of_another_configuration_is_refused(
  tmp_path, backbone_file, fake
):
  bench = small_benchmark(tmp_path, backbone_file, ["cifar"])
  run_benchmark(bench, tmp_path / "run")
  changed = dataclasses.replace(bench.config, epochs=3.0)
  with pytest.raises(MemoryVitError, match="another configuration.*\n.*epochs"):
    run_benchmark(dataclasses.replace(bench, config=changed), tmp_path / "run")


@pytest.mark.fault("changed-run")
def test_changed_data_of_a_finished_run_are_refused(
  tmp_path, backbone_file, fake
):
  """Also if only the list differs."""
  bench = small_benchmark(tmp_path, backbone_file, ["cifar"])
  run_benchmark(bench, tmp_path / "run")
  result = next((tmp_path / "run").rglob("search/result.json"))
  values = json.loads(result.read_text())
  values["data"] = {"train": {"by": "files", "sha256": "0" * 64}}
  result.write_text(json.dumps(values))
  with pytest.raises(
    MemoryVitError, match="data are not those of the finished"
  ):
    run_benchmark(bench, tmp_path / "run")


def test_data_of_other_classes_are_refused(tmp_path, backbone_file, fake):
  bench = small_benchmark(tmp_path, backbone_file, ["kitti"])
  lines = tmp_path / "data/kitti/test.txt"
  lines.write_text(lines.read_text().replace(" 3\n", " 4\n"))
  with pytest.raises(MemoryVitError, match="5 classes, kitti of VTAB-1k has 4"):
    run_benchmark(bench, tmp_path / "run")
  assert not fake.configs


def test_diverged_settings_are_not_chosen(tmp_path, backbone_file, monkeypatch):
  runs = FakeRuns(diverges=lambda c: c.learning_rate == 0.1)
  runs.install(monkeypatch)
  bench = small_benchmark(tmp_path, backbone_file, ["cifar"])
  run_benchmark(bench, tmp_path / "run")
  score = scores(tmp_path)["cifar", "head"]
  assert score.settings == {"learning_rate": 0.01}
  assert (score.diverged, score.at_edge) == (1, ("learning_rate",))


def test_diverged_seed_leaves_no_mean(tmp_path, backbone_file, monkeypatch):
  """It is not tested; other seeds are."""
  runs = FakeRuns(diverges=lambda c: c.seed == 1)
  runs.install(monkeypatch)
  bench = small_benchmark(tmp_path, backbone_file, ["cifar"], seeds=(0, 1, 2))
  run_benchmark(bench, tmp_path / "run")
  score = scores(tmp_path)["cifar", "head"]
  assert runs.tested == [[("cifar", "head", 0), ("cifar", "head", 2)]]
  assert (score.test, score.tests) == (None, pytest.approx((0.49, 0.47)))


def test_task_that_always_diverges_has_no_accuracy(
  tmp_path, backbone_file, monkeypatch
):
  runs = FakeRuns(diverges=lambda c: True)
  runs.install(monkeypatch)
  bench = small_benchmark(tmp_path, backbone_file, ["cifar"])
  run_benchmark(bench, tmp_path / "run")
  score = scores(tmp_path)["cifar", "head"]
  assert (score.test, score.tests, score.diverged) == (None, (), 3)
  assert len(runs.configs) == 1  # all diverged, so there is no final run
  text = ((tmp_path / "run") / "report.md").read_text()
  assert "none: all diverged" in text


def test_first_of_equal_settings_is_chosen():
  config = dataclasses.replace(vtab_config())
  config = dataclasses.replace(
    config, sweep=dataclasses.replace(config.sweep, seed=(0,), cells=(1, 5))
  )
  trials = tuple(
    TrialResult(
      name=f"task-{i}",
      cells=5,
      learning_rate=rate,
      varied={"learning_rate": rate, "task.cells": 5, "seed": 0},
      val=scores_of(0.5),
    )
    for i, rate in enumerate(RATES)
  )
  result = RunResult(
    tasks=trials[::-1], wall_seconds=1.0, sweep=SweepResult(lost={"task-0": 3})
  )
  choice = protocol.choose(config, result)
  assert choice.settings == {"learning_rate": 0.1, "task.cells": 5}
  assert (choice.tried, choice.diverged) == (6, 4)
  assert choice.at_edge == ("task.cells",)


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("data.name", "cifar10"),
    ("data.test", "validation"),
    ("data.seed", 0),
    ("seed", 1),
    ("task.name", "pets"),
    ("backbone", "random:B/16"),
  ],
)
def test_options_set_by_the_protocol_are_refused(key, value):
  values = config_lib.to_dict(vtab_config(image_size=224))
  part, _, last = key.rpartition(".")
  (values[part] if part else values)[last] = value
  config = config_lib.from_dict(values)
  with pytest.raises(
    MemoryVitError, match=rf"config\.{key} is .* expected"
  ) as error:
    protocol.require_possible(config, ["head"])
  assert "\n" not in str(error.value)


def test_unknown_and_repeated_regimes_are_refused():
  for names, problem in (
    (["head", "heads"], "'heads' is no regime"),
    (["head", "head"], "'head' is named twice"),
  ):
    with pytest.raises(MemoryVitError, match=f"{problem}; .*cls_masked"):
      protocol.require_possible(vtab_config(), names)


def test_means_are_printed_only_over_all_tasks():
  scores = {}
  for i, task in enumerate(TASKS):
    tests = (0.01 * i, 0.01 * i + 0.02)
    scores[task.name, "head"] = Score(
      task=task.name,
      regime="head",
      tests=tests,
      seeds=2,
      test_examples=task.test_examples,
    )
  found = report.means("head", scores)
  # 0 to 6, 7 to 10, 11 to 18: the mean of groups is not that of the tasks.
  assert found.groups == pytest.approx(
    {"natural": 0.04, "specialized": 0.095, "structured": 0.155}
  )
  assert found.of_groups == pytest.approx(0.29 / 3)
  assert found.of_tasks == pytest.approx(0.10)
  assert found.spread == pytest.approx(0.02)
  lost = dataclasses.replace(scores["kitti", "head"], tests=(0.5,))
  # With fewer images it is not a result of the benchmark.
  fewer = dataclasses.replace(scores["kitti", "head"], test_examples=710)
  for changed in (
    {**scores, ("kitti", "head"): lost},
    {**scores, ("kitti", "head"): fewer},
    {key: s for key, s in scores.items() if key[0] != "kitti"},
  ):
    found = report.means("head", changed)
    assert (found.of_groups, found.of_tasks, found.spread) == (None, None, None)
    assert set(found.groups.values()) == {None}


def test_report_names_regimes_tested_on_another_number_of_images():
  """Also if another regime of the task was tested on all images."""
  task = next(task for task in TASKS if task.name == "kitti")

  def score(regime, images):
    return Score(
      task="kitti", regime=regime, tests=(0.5,), seeds=1, test_examples=images
    )

  scores = {
    ("kitti", "head"): score("head", 4),
    ("kitti", "memory"): score("memory", task.test_examples),
  }
  one = {"score": 0.5, "examples": 7}
  together = {"regime": "memory", "tasks": {"kitti": one}}
  lines = report.other_sizes(scores, together)
  assert lines[-2:] == [
    "- kitti, head: 4 test images, the benchmark has 711",
    "- kitti, memory, seed 0, all in one model: 7 test images, the benchmark "
    "has 711",
  ]
  whole = {("kitti", "memory"): scores["kitti", "memory"]}
  assert report.other_sizes(whole, None) == []


def test_report_names_missing_tasks(tmp_path, backbone_file, fake):
  bench = small_benchmark(tmp_path, backbone_file, ["cifar", "kitti"])
  bench = dataclasses.replace(bench, missing={"dtd": "there is no dtd"})
  run_benchmark(bench, tmp_path / "run")
  text = ((tmp_path / "run") / "report.md").read_text()
  assert "**No means are given**, as tasks are missing:" in text
  assert (
    "**No means are given** of these, as their test splits have other sizes"
    in text
  )
  assert "- kitti, head: 4 test images, the benchmark has 711\n" in text
  assert "- dtd: there is no dtd\n" in text
  assert "- svhn: left out by --only" in text
  table = next(
    line for line in text.splitlines() if line.startswith("| head | 48.5 |")
  )
  cells = [cell.strip() for cell in table.strip("|").split("|")]
  assert len(cells) == 1 + 19 + 3 + 2
  assert cells[1 + [t.name for t in TASKS].index("kitti")] == "48.5"
  assert cells[-5:] == [""] * 5
  numbers = json.loads(((tmp_path / "run") / "report.json").read_text())
  assert numbers["means"]["head"]["of_tasks"] is None
  assert len(numbers["scores"]) == 2


def test_retrained_task_replaces_the_exported_one(tmp_path):
  """The table and the tasks are of the same runs."""
  backbone = tiny_backbone(depth=1)
  for seed in (1, 2):
    task = random_task(backbone, protocol.NAME_IN_RUNS, seed=seed)
    mv.save_task(task, tmp_path / "run" / "tasks" / protocol.NAME_IN_RUNS)
    runner.export(tmp_path / "run", tmp_path / "exported", "cifar", backbone)
    found = mv.load_task(tmp_path / "exported", backbone)
    assert (found.name, found.digest) == ("cifar", task.digest)
