"""The dry run of a study: its runs, and an estimate of their time."""

import dataclasses

import pytest
from fake_studies import (
  FakeRuns,
  accuracies,
  configured,
  follow,
  run_study,
  small_study,
)

from memory_vit.errors import DataError
from studies.paper import runner


@pytest.fixture
def study(backbone_file):
  return small_study(backbone_file)


def test_dry_run_of_a_study_trains_nothing(study, tmp_path, monkeypatch):
  """It shows the time of finished runs by kind, and kinds without any."""
  planned, _ = follow(study, ["adapters"], lambda run, rate: rate)
  fake = FakeRuns(accuracies, stops_at=2).install(monkeypatch)
  with pytest.raises(KeyboardInterrupt):
    run_study(study, tmp_path, ["adapters"])
  before = sorted(tmp_path.rglob("*"))
  text = runner.forecast(study, tmp_path, ["adapters"])
  assert sorted(tmp_path.rglob("*")) == before
  assert len(fake.calls) == 2
  rows = [line.split() for line in text.splitlines()[:9]]
  assert rows[0] == ["finished", planned[0].name]
  assert rows[1] == [planned[1].name]
  # The further seed is counted, though its learning rate is unknown.
  assert rows[2] == ["adapter-digits-5-9-rate-of-the-best-seed4"]
  assert "9 runs, 1 of them finished." in text
  # The finished run took 32 s; two others are of its kind.
  assert "About 0:01:04 left for 2 runs" in text
  assert "yet of: adapter_memory (1), memory (1);" in text
  # A missing split is reported by the dry run.
  wrong = dataclasses.replace(study.data, test="tset")
  with pytest.raises(DataError, match="tset"):
    runner.forecast(configured(study, data=wrong), tmp_path, ["table2"])


@pytest.mark.fault("damaged-shard")
def test_dry_run_of_a_study_downloads_nothing(study, tmp_path):
  data = dataclasses.replace(
    study.data, name="cifar10", dir=str(tmp_path / "data")
  )
  study = configured(study, data=data)
  with pytest.raises(DataError, match="162.17 MiB.*a dry run downloads not"):
    runner.forecast(study, tmp_path / "run", ["table2"])
  assert not (tmp_path / "data").exists()
  assert not (tmp_path / "run").exists()


def test_dry_run_of_a_study_makes_no_random_backbone(study, tmp_path):
  study = configured(study, backbone="random:Micro/2")
  text = runner.forecast(study, tmp_path / "run", ["adapters"])
  assert "9 runs, 0 of them finished." in text
  assert not (tmp_path / "run").exists()
