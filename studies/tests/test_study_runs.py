"""Runs of a study: each is trained once, and the report shows all."""

import dataclasses
import json
import logging
import os
import subprocess
import sys

import fake_data
import pytest
from conftest import ROOT, tiny_backbone
from fake_studies import (
  FakeRuns,
  accuracies,
  configured,
  follow,
  run_study,
  sections,
  small_study,
)
from faults import Process, main_of

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.data import datasets
from memory_vit.data.data_record import DataRecord
from memory_vit.data.split_ref import configured_splits
from memory_vit.errors import DivergedError, MemoryVitError, TrainingError
from memory_vit.runtime import files
from memory_vit.runtime.lock import only_run
from studies.paper import costs, measured_costs, report
from studies.record import markdown_table

TRAINED = (
  "table2", "sensitivity", "cells", "placement", "adapters", "extension",
)  # fmt: skip


@pytest.fixture
def study(backbone_file):
  return small_study(backbone_file)


@pytest.mark.slow
def test_killed_study_resumes_and_reports_all_runs(
  study, tmp_path, monkeypatch
):
  """Killed in the middle, it resumes without repeating a run."""
  planned, _ = follow(study, TRAINED, lambda run, rate: rate)
  names = [r.name for r in planned]
  killed = FakeRuns(accuracies, stops_at=len(names) - 3)
  monkeypatch.setattr(mv, "train_and_evaluate", killed)
  with pytest.raises(KeyboardInterrupt):
    run_study(study, tmp_path, TRAINED)
  # The parts that were finished have been written.
  assert "Table 2" in (tmp_path / "report.md").read_text()
  rest = FakeRuns(accuracies)
  monkeypatch.setattr(mv, "train_and_evaluate", rest)
  run_study(study, tmp_path, TRAINED)
  found = sections(tmp_path)
  assert killed.calls[:-1] + rest.calls == names
  again = FakeRuns(accuracies)
  monkeypatch.setattr(mv, "train_and_evaluate", again)
  # Parts of earlier commands stay.
  for parts in (TRAINED, ["cells"]):
    run_study(study, tmp_path, parts)
    assert sections(tmp_path) == found
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
  # One seed if it searches alone, both if all rates are one run.
  seeds = {r["regime"]: r["seeds"] for r in found["sensitivity"].rows}
  assert seeds == {"full": 1, "memory": 1, "memory_masked": 2}
  text = (tmp_path / "report.md").read_text()
  for part in found.values():
    assert f"## {part.title}" in text
    for rows in (part.rows, part.comparisons):
      assert markdown_table(report.formatted(rows)) in text
  assert (
    "| full |  | 0.3 | highest | seed 0 | 30.0 % | 47.0 % | 0.0 | 3.5 | 2 |  |"
  ) in text
  assert "| memory (5 cells) | full | 0.0 | 0.0 | no |  |" in text
  for part in ("sensitivity", "cells"):
    assert (tmp_path / f"{part}.png").stat().st_size > 1000
    assert f"({part}.png)" in text
  numbers = json.loads((tmp_path / "report.json").read_text())
  assert set(numbers["parts"]) == set(TRAINED)
  assert len(numbers["points"]) == sum(len(r.trials) for r in planned)


def test_finished_runs_of_another_configuration_are_refused(
  study, tmp_path, monkeypatch
):
  study = dataclasses.replace(study, regimes=("head",))
  fake = FakeRuns(accuracies)
  monkeypatch.setattr(mv, "train_and_evaluate", fake)
  run_study(study, tmp_path, ["table2"])
  assert len(fake.calls) == 2
  # Checkpoints are removed, also after a kill before that.
  first, second = (tmp_path / "runs" / name for name in fake.calls)
  assert not (first / "checkpoints").exists()
  (second / "checkpoints" / "2").mkdir(parents=True)
  # Options without influence on results may change.
  log = configured(study, log_every=7, batch_size_eval=32)
  run_study(dataclasses.replace(log, others=()), tmp_path, ["table2"])
  assert len(fake.calls) == 2
  assert sorted(path.name for path in second.iterdir()) == [
    "config.json", "result.json",
  ]  # fmt: skip
  longer = configured(study, total_steps=3)
  with pytest.raises(MemoryVitError, match="config.total_steps: 2, now 3"):
    run_study(longer, tmp_path, ["table2"])
  other = tmp_path / "other.npz"
  mv.save_backbone(tiny_backbone(seed=1, num_classes=5), other)
  with pytest.raises(MemoryVitError, match="  backbone: '"):
    run_study(configured(study, backbone=str(other)), tmp_path, ["table2"])
  assert len(fake.calls) == 2


def test_finished_study_in_epochs_is_not_repeated(study, tmp_path, monkeypatch):
  """Its runs record the number of steps that epochs became."""

  class Resolved(FakeRuns):
    def write(self, config, directory, entries):
      config = dataclasses.replace(config, total_steps=7)
      return super().write(config, directory, entries)

  study = dataclasses.replace(study, regimes=("head",))
  study = configured(study, epochs=0.5, image_size=0)
  fake = Resolved(accuracies)
  monkeypatch.setattr(mv, "train_and_evaluate", fake)
  for _ in range(2):
    run_study(study, tmp_path, ["table2"])
    assert len(fake.calls) == 2
  longer = configured(study, epochs=1.0)
  with pytest.raises(MemoryVitError, match="steps: '0.5 epochs', now '1.0 epo"):
    run_study(longer, tmp_path, ["table2"])
  in_steps = configured(study, epochs=0.0)
  with pytest.raises(MemoryVitError, match="steps: '0.5 epochs', now 2"):
    run_study(in_steps, tmp_path, ["table2"])
  report = json.loads((tmp_path / "report.json").read_text())
  assert report["config"]["image_size"] == 8


@pytest.mark.fault("changed-run")
@pytest.mark.parametrize("per_class", [0, 1])
def test_finished_runs_on_other_data_are_refused(
  study, tmp_path, monkeypatch, caplog, per_class
):
  """If the data are available to be compared; also if a seed chooses."""
  study = dataclasses.replace(study, regimes=("head",), others=())
  images = tmp_path / "images"
  where = dataclasses.replace(
    study.data, name="folder", dir=str(images), train="train",
    validation="train", test="train", per_class=per_class,
  )  # fmt: skip
  fake_data.write_folder(
    images, {"train/a": ["1.png", "2.png"], "train/b": ["3.png"]}
  )
  study = configured(study, data=where)
  fake = FakeRuns(accuracies)

  def runs(config, directory, stop=None):
    result = fake(config, directory, stop)
    splits = configured_splits(config)
    record = DataRecord(
      directory=directory / "inventory",
      data_files={
        role: datasets.find_data_files(splits[role])
        for role in ("train", "validation", "test")
      },
    )
    record.keep()
    result = dataclasses.replace(result, data=record.digests)
    files.write_json(directory / "result.json", result.to_json())
    return result

  monkeypatch.setattr(mv, "train_and_evaluate", runs)
  run_study(study, tmp_path / "s", ["table2"])
  run_study(study, tmp_path / "s", ["table2"])
  assert len(fake.calls) == 2
  (images / "train/a/2.png").rename(images / "train/b/2.png")
  with pytest.raises(MemoryVitError, match="1 missing, 1 new") as error:
    run_study(study, tmp_path / "s", ["table2"])
  assert fake.calls[0] in str(error.value)
  assert "missing: train/a/2.png" in str(error.value)
  # Missing data cannot be compared, and finished runs need none.
  monkeypatch.setattr(logging.getLogger("memory_vit"), "propagate", True)
  (images / "train").rename(images / "away")
  run_study(study, tmp_path / "s", ["table2"])
  assert "cannot check whether data changed" in caplog.text
  assert len(fake.calls) == 2


@pytest.mark.fault("two-runs")
def test_second_study_in_a_directory_is_refused(study, tmp_path):
  """Also while the first one measures, and none of its runs trains."""
  with (
    only_run(tmp_path / "runs"),
    pytest.raises(TrainingError, match="another run is using"),
  ):
    run_study(study, tmp_path, ["table2"])


def test_measured_costs_are_reused_until_options_change(
  study, tmp_path, monkeypatch
):
  """Until something changes on which it depends."""
  calls = []

  def measure(study, vit):
    calls.append(study.task.cells)
    cost = costs.Cost(
      regime="head", parameters=1, parameters_counted=1, flops=8,
      flops_once=0, flops_xla=None,
    )  # fmt: skip
    return [dataclasses.asdict(cost)]

  monkeypatch.setattr(measured_costs, "measure", measure)
  for _ in range(2):
    run_study(study, tmp_path, ["costs"])
    assert sections(tmp_path)["costs"].rows[0]["MFLOP"] == 8 / 1e6
  assert calls == [5]
  other = configured(study, task=dataclasses.replace(study.task, cells=1))
  # Results of another configuration are not shown.
  monkeypatch.setattr(mv, "train_and_evaluate", FakeRuns(accuracies))
  run_study(other, tmp_path, ["adapters"])
  assert "costs" not in sections(tmp_path)
  run_study(other, tmp_path, ["costs"])
  assert calls == [5, 1]
  assert {*sections(tmp_path)} >= {"costs", "adapters"}


def test_runs_of_another_configuration_are_not_shown(
  study, tmp_path, monkeypatch
):
  monkeypatch.setattr(mv, "train_and_evaluate", FakeRuns(accuracies))
  run_study(study, tmp_path, ["placement"])
  assert [*sections(tmp_path)] == ["placement"]
  longer = configured(study, total_steps=3)
  run_study(longer, tmp_path, ["extension"])
  assert [*sections(tmp_path)] == ["extension"]


@pytest.mark.slow
def test_report_depends_only_on_the_directory(study, tmp_path, monkeypatch):
  """Made again elsewhere, it is the same to the byte."""
  place, copy = tmp_path / "study", tmp_path / "copy"
  monkeypatch.setattr(mv, "train_and_evaluate", FakeRuns(accuracies))
  run_study(study, place, ["cells"])
  shown = ("report.md", "cells.png")
  made = {name: (place / name).read_bytes() for name in shown}
  place.rename(copy)
  for name in (*shown, "report.json"):
    (copy / name).unlink()
  report.write_report(copy)
  assert {name: (copy / name).read_bytes() for name in shown} == made
  assert json.loads((copy / "report.json").read_text())["parts"]["cells"]
  # A missing file is named.
  next((copy / "runs").glob("head_cls*/result.json")).unlink()
  with pytest.raises(MemoryVitError, match="has lost its result"):
    report.write_report(copy)
  with pytest.raises(MemoryVitError, match=r"record.json is not readable"):
    report.write_report(tmp_path)


@pytest.mark.processes
def test_report_needs_no_jax(study, tmp_path, monkeypatch):
  """Nor flax, nor TensorFlow: none of them can be imported."""
  monkeypatch.setattr(mv, "train_and_evaluate", FakeRuns(accuracies))
  run_study(study, tmp_path, ["adapters"])
  text = (tmp_path / "report.md").read_text()
  (tmp_path / "report.md").unlink()
  for name in ("jax", "flax", "tensorflow"):
    (tmp_path / "no" / name).mkdir(parents=True)
    (tmp_path / "no" / name / "__init__.py").write_text("raise ImportError")
  done = subprocess.run(
    [sys.executable, "-m", "studies.paper", f"--workdir={tmp_path}",
     "--report_only"],
    cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path / "no")},
    text=True, capture_output=True, check=False,
  )  # fmt: skip
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout == text + "\n"
  assert (tmp_path / "report.md").read_text() == text


@pytest.mark.slow
def test_diverged_runs_are_reported_and_not_repeated(
  study, tmp_path, monkeypatch
):
  """It is not tried again, and no other run needs it."""

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
  monkeypatch.setattr(mv, "train_and_evaluate", fake)
  parts = ("table2", "sensitivity", "extension")
  run_study(study, tmp_path, parts)
  found = sections(tmp_path)
  # Neither its further seeds run, nor runs that would attend to it.
  assert not any("reading" in name for name in fake.calls)
  assert [name for name in fake.calls if name.startswith("full")] == [
    "full-digits-5-9-rate0.3-seed0", "full-digits-5-9-rate0.1-seed0",
  ]  # fmt: skip
  run_study(study, tmp_path, parts)
  assert sections(tmp_path) == found
  assert len(fake.calls) == len({*fake.calls})
  full = found["table2"].rows[0]
  assert (full["regime"], full["test"]) == ("full", None)
  assert full["diverged"] == "at every rate"
  lost = {row["diverged"] for row in found["table2"].comparisons}
  assert "memory_masked (5 cells): at every rate" in lost
  full = found["sensitivity"].comparisons[0]
  assert (full["diverged"], full["rates"], full["difference"]) == (2, 2, None)
  assert found["sensitivity"].lines["full"] == []


@pytest.mark.processes
def test_command_trains_reports_and_repeats_nothing(study, tmp_path):
  """Two regimes and interference on the embedded digits."""
  options = {
    "backbone": study.config.backbone,
    "upstream.name": "", "batch_size": 16, "batch_size_eval": 64,
    "total_steps": 3, "eval_every": 3, "checkpoint_every": 3, "log_images": 0,
  }  # fmt: skip
  workdir = f"--workdir={tmp_path / 'study'}"
  command = [
    "--config=configs/digits.py", workdir,
    *(f"--config.{key}={value}" for key, value in options.items()),
    "--only=interference,costs", "--only=extension", "--cells=5", "--seeds=0",
    "--learning_rates=0.3,0.1", "--others=digits:0-4",
  ]  # fmt: skip

  def run(*flags):
    with Process(main_of("studies.paper"), flags, tmp_path / "log") as process:
      assert process.wait() == 0, process.text
    return process.printed

  planned = run(*command, "--dry_run")
  # memory on both data sets and at both rates; masked memory once on each, and
  # once more reading.
  assert "7 runs, 0 of them finished" in planned
  assert not (tmp_path / "study").exists()
  run(*command)
  results = {
    path: path.stat().st_mtime_ns
    for path in (tmp_path / "study" / "runs").glob("*/result.json")
  }
  assert len(results) == 7
  numbers = json.loads((tmp_path / "study" / "report.json").read_text())
  assert set(numbers["parts"]) == {"costs", "interference", "extension"}
  _, together = numbers["parts"]["interference"]["rows"]
  assert together["largest difference of a logit"] == 0
  written = (tmp_path / "study" / "report.md").read_bytes()
  run(workdir, "--report_only")
  assert (tmp_path / "study" / "report.md").read_bytes() == written
  run(*command)
  assert {path: path.stat().st_mtime_ns for path in results} == results
