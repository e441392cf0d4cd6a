"""The dry run of a study: its runs, and an estimate of their time."""

import dataclasses
import math
from pathlib import Path

import pytest
from conftest import one_device
from fake_studies import FakeRuns, accuracies, small_study, with_study

import memory_vit as mv
from memory_vit.errors import DataError, TrainingError
from memory_vit.train import run as training_run
from studies.paper import forecast, plan
from studies.paper.runs import config_of


@pytest.fixture
def config(backbone_file):
  return small_study(backbone_file)


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

  def time_it(config, *_):
    timed.append(config.regime)
    return 30.0

  monkeypatch.setattr(forecast, "step_seconds", time_it)
  text = forecast.forecast(alone, tmp_path, ["adapters"])
  assert sorted(tmp_path.rglob("*")) == before
  # What is no sweep is one kind, whatever its rate.
  assert timed == ["adapter", "memory", "adapter_memory"]
  rows = [line.split() for line in text.splitlines()[2:11]]
  assert [row[0] for row in rows] == [r.name for r in planned]
  assert rows[0][1:] == ["1", "finished"]
  # The further seed at a rate that is not known yet is counted, too.
  assert rows[2] == ["adapter-digits-5-9-rate-of-the-best-seed1", "1"]
  assert "9 runs of 9 trials and 2 steps for adapters, 1 of them fin" in text
  # 8 trials of 2 steps.
  assert "About 8:00 left on 8 x cpu" in text
  assert "a step of adapter takes 30 s, one of memory takes 30 s" in text
  # A split that is not there is noticed here already.
  wrong = dataclasses.replace(alone.data, test="tset")
  with pytest.raises(DataError, match="tset"):
    forecast.forecast(
      dataclasses.replace(alone, data=wrong), tmp_path, ["table2"]
    )


def test_a_dry_run_knows_how_many_steps_epochs_are(
  config, tmp_path, monkeypatch
):
  config = with_study(config, regimes=("head",))
  config = dataclasses.replace(config, epochs=0.5, image_size=0)
  examples = forecast.train_split(config).size
  steps = math.ceil(0.5 * examples / config.batch_size)
  timed = []

  def time_it(config, *_):
    timed.append((config.total_steps, config.image_size))
    return 1.0

  monkeypatch.setattr(forecast, "step_seconds", time_it)
  text = forecast.forecast(config, tmp_path, ["table2"])
  assert timed == [(steps, 8)]
  assert f"and {steps} steps for table2" in text


def test_a_dry_run_times_each_kind_of_run_once(config, tmp_path, monkeypatch):
  """The trials of a masked regime share a pass: a step of it is one of all."""
  config = with_study(
    config, regimes=("head_cls", "memory_masked"), cells=(1, 2), others=(),
    learning_rates=(0.3, 0.1, 0.03), seeds=(0, 1),
  )  # fmt: skip
  timed = []

  def time_it(config, *_):
    timed.append((config.regime, config.sweep.combinations))
    return 30.0 if config.regime == "head_cls" else 45.0

  monkeypatch.setattr(forecast, "step_seconds", time_it)
  text = forecast.forecast(config, tmp_path, ["cells"])
  assert sorted(timed) == [("head_cls", 1), ("memory_masked", 6)]
  # head_cls: three rates, and the best once more; memory: a sweep for a seed.
  seconds = config.total_steps * (4 * 30 + 2 * 45)
  assert f"About {forecast.duration(seconds)} left" in text
  assert "a step of head_cls takes 30 s" in text
  assert "one of memory_masked takes 45 s" in text


@pytest.mark.slow
def test_a_backbone_of_another_pretraining_is_refused(config, tmp_path):
  settings = dataclasses.replace(
    config.pretrain, variant="Micro/2", total_steps=4
  )
  (tmp_path / "backbone.npz").write_bytes(Path(config.backbone).read_bytes())
  other = dataclasses.replace(config, pretrain=settings)
  with pytest.raises(TrainingError, match="was not made by this configuration"):
    forecast.forecast(other, tmp_path, ["adapters"])


@pytest.mark.slow
def test_a_step_is_timed(config):
  """Of a sweep that of all of its trials."""
  planned = next(
    r for r in plan.plan(config, ["table2"], {}) if r.regime == "cls_masked"
  )
  seconds = forecast.step_seconds(
    config_of(config, planned, config.backbone),
    mv.load_backbone(config.backbone, image_size=8),
    one_device(),
    forecast.train_split(config),
  )
  assert 0 < seconds < 60
