"""--dry_run reports what a run will cache, and writes nothing."""

import dataclasses
import shutil

import pytest
from conftest import ROOT

from memory_vit import config as config_lib
from memory_vit.commands import train
from memory_vit.errors import ConfigError, DataError
from memory_vit.train import dry_run, run

# A row: keys and values of two blocks, 17 tokens of width 32, in float32.
ROW = 2 * 2 * 17 * 32 * 4


@pytest.fixture
def config(backbone_file, tmp_path):
  return config_lib.Config(
    backbone=str(backbone_file),
    image_size=8,
    batch_size=8,
    batch_size_eval=16,
    epochs=2.0,
    data=config_lib.DataConfig(
      name="digits:5-9",
      train="train[:40]",
      validation="train[40:50]",
      test="",
      train_crop="resize",
      flip=False,
    ),
    cache=config_lib.CacheConfig(
      what="contexts", where="disk", dir=str(tmp_path / "cache")
    ),
  )


@pytest.mark.slow
def test_dry_run_reports_cache_size_and_writes_nothing(config, tmp_path):
  workdir = tmp_path / "run"
  text = dry_run.dry_run(config, workdir)
  assert "10 of 8 images, for 1 trial in 1 pass" in text
  assert f"40 rows of {ROW:,} bytes: {40 * ROW:,} bytes" in text
  assert f"10 rows of {ROW:,} bytes: {10 * ROW:,} bytes" in text
  assert "40 rows are missing" in text
  assert "cached in    " in text
  assert str(tmp_path / "cache") in text
  assert not workdir.exists()
  assert not (tmp_path / "cache").exists()
  run.train_and_evaluate(config, workdir)
  found = sorted(tmp_path.rglob("*.rows"))
  # Behind a header of 16 bytes.
  assert sum(path.stat().st_size for path in found) == 50 * (16 + ROW)
  assert "0 rows are missing" in dry_run.dry_run(config, workdir)


@pytest.mark.slow
def test_cache_that_does_not_fit_on_disk_is_refused(
  config, tmp_path, monkeypatch
):
  usage = shutil._ntuple_diskusage(2**40, 2**40, 50 * ROW - 1)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  with pytest.raises(ConfigError, match="contexts of training and validation"):
    dry_run.dry_run(config, tmp_path / "run")


@pytest.mark.fault("damaged-shard")
def test_dry_run_downloads_nothing(config, tmp_path):
  data = config_lib.DataConfig(name="cifar10", dir=str(tmp_path / "data"))
  config = dataclasses.replace(
    config, data=data, cache=config_lib.CacheConfig()
  )
  with pytest.raises(DataError, match="162.17 MiB.*a dry run downloads not"):
    dry_run.dry_run(config, tmp_path / "run")
  assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_command_reports_a_run_without_a_cache(backbone_file, tmp_path, capsys):
  arguments = train.parse([
    "main", f"--config={ROOT / 'configs' / 'digits.py'}",
    f"--workdir={tmp_path / 'run'}",
    f"--config.backbone={backbone_file}", "--config.batch_size=8",
    "--config.total_steps=7", "--dry_run",
  ])  # fmt: skip
  assert train.execute(arguments) == 0
  out = capsys.readouterr().out
  assert "7 of 8 images" in out
  assert "off (config.cache.what is 'none')" in out
  assert not (tmp_path / "run").exists()
