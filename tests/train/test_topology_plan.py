"""A plan for devices that are not there; two of the CPU's stand in for them."""

import dataclasses
import re

import jax
import pytest
from conftest import tiny_backbone

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.backbones.download import KNOWN
from memory_vit.backbones.load import known_config
from memory_vit.commands import train
from memory_vit.data import datasets
from memory_vit.data.split_ref import SplitRef, Subset
from memory_vit.errors import BackboneError, ConfigError, DataError
from memory_vit.model.backbone import backbone_shapes
from memory_vit.runtime import absent_devices
from memory_vit.runtime.absent_devices import Chip
from memory_vit.train import topology_plan

MIB = 2**20


@pytest.fixture
def chip(monkeypatch):
  """Sets the memory of a chip, in MiB."""

  def of(mebibytes):
    found = Chip("cpu", mebibytes * MIB, 1.5)
    monkeypatch.setattr(absent_devices, "chip_of", lambda topology: found)

  monkeypatch.setattr(absent_devices, "compiler", lambda topology: "XLA 1")
  monkeypatch.setattr(
    absent_devices, "devices", lambda topology: jax.devices()[:2]
  )
  of(64)
  return of


@pytest.fixture
def config(tmp_path):
  mv.save_backbone(tiny_backbone(depth=2), tmp_path / "tiny.npz")
  return config_lib.Config(
    backbone=str(tmp_path / "tiny.npz"),
    batch_size=16,
    batch_size_eval=16,
    total_steps=100,
  )


def gib(text):
  return float(re.search(r"([\d.]+) GiB a chip", text)[1])


def row(text, name):
  [line] = [line for line in text.splitlines() if line.startswith(name)]
  return line.removeprefix(name).strip()


@pytest.mark.slow
def test_largest_batch_is_within_the_memory_and_near_it(config, chip):
  """Memory grows with images, so somewhat larger ones do not fit."""
  text = topology_plan.plan(config, "v5e:2x1", classes=7)
  found = row(text, "largest batch")
  images = int(found.split()[0].replace(",", ""))
  assert images % 2 == 0
  assert 0.7 * 0.9 * 64 * MIB < gib(found) * 2**30 <= 0.91 * 64 * MIB
  larger = dataclasses.replace(config, batch_size=2 * images)
  text = topology_plan.plan(larger, "v5e:2x1", classes=7)
  assert "too much" in row(text, "memory")
  again = int(row(text, "largest batch").split()[0].replace(",", ""))
  assert again == pytest.approx(images, rel=0.15)


def test_chip_without_room_is_refused(config, chip):
  chip(0)
  with pytest.raises(ConfigError, match="the backbone alone takes"):
    topology_plan.plan(config, "v5e:2x1", classes=7)


@pytest.mark.slow
def test_trials_that_do_not_fit_together_take_turns(config, chip):
  sweep = config_lib.SweepConfig(learning_rate=(0.1, 0.2, 0.3), export="all")
  config = dataclasses.replace(
    config,
    sweep=sweep,
    batch_size=1024,
    data=config_lib.DataConfig(validation=""),
  )
  chip(100)
  text = topology_plan.plan(config, "v5e:2x1", classes=3000)
  assert "for 3 trials in 1 pass" in row(text, "steps")
  chip(40)
  text = topology_plan.plan(config, "v5e:2x1", classes=3000)
  assert "in 2 passes" in row(text, "steps")


@pytest.mark.slow
def test_batch_that_the_compiler_refuses_is_halved(config, chip, monkeypatch):
  compiled = topology_plan._GroupPlan._compile
  refused = iter([True, True])
  monkeypatch.setattr(
    topology_plan._GroupPlan,
    "_compile",
    lambda self, p: None if next(refused, False) else compiled(self, p),
  )
  config = dataclasses.replace(config, batch_size=400)
  text = topology_plan.plan(config, "v5e:2x1", classes=7)
  assert "the compiler refuses a step" in row(text, "memory")
  # A quarter of it fits, and half was refused.
  images = int(row(text, "largest batch").split()[0])
  assert 100 <= images < 200
  assert "training" not in text


def test_other_errors_of_the_compiler_are_raised(config, chip, monkeypatch):
  def fail(*args, **options):
    raise jax.errors.JaxRuntimeError("INTERNAL: no such instruction")

  monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
  with pytest.raises(jax.errors.JaxRuntimeError, match="no such instruction"):
    topology_plan.plan(config, "v5e:2x1", classes=7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["labels", "values"])
def test_kinds_of_tasks_are_planned(config, chip, kind):
  task = config_lib.TaskConfig(kind=kind)
  config = dataclasses.replace(config, task=task)
  text = topology_plan.plan(config, "v5e:2x1", classes=7)
  assert gib(row(text, "memory")) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["head", "probe", "adapter", "full"])
def test_other_regimes_are_planned(config, chip, regime):
  task = config_lib.TaskConfig(bottleneck=4)
  config = dataclasses.replace(config, regime=regime, task=task)
  text = topology_plan.plan(config, "v5e:2x1", classes=7)
  assert "images, which take" in row(text, "largest batch")


def test_sweep_on_cached_rows_is_planned_without_the_cache(config, chip):
  """Rows on the host take no memory of a chip, and their number is unknown."""
  config = dataclasses.replace(
    config,
    sweep=config_lib.SweepConfig(learning_rate=(0.1, 0.2), export="all"),
    cache=config_lib.CacheConfig(what="contexts"),
    data=config_lib.DataConfig(validation="", train_crop="resize", flip=False),
  )
  text = topology_plan.plan(config, "v5e:2x1", classes=7)
  assert "for 2 trials in 1 pass" in row(text, "steps")


def test_the_largest_trials_are_measured(config, chip, monkeypatch):
  seen = []

  def measure(self, trials, images, *names):
    seen.append([trial.config.task.cells for trial in trials])

  monkeypatch.setattr(topology_plan._GroupPlan, "_measure", measure)
  sweep = config_lib.SweepConfig(cells=(1, 30, 20), export="all")
  config = dataclasses.replace(
    config,
    regime="memory",
    sweep=sweep,
    batch_size=2,
    data=config_lib.DataConfig(validation=""),
  )
  topology_plan.plan(config, "v5e:2x1", classes=7)
  assert seen == [[30]]


@pytest.mark.slow
def test_sweep_of_which_no_trial_fits_is_planned(config, chip):
  chip(1)
  sweep = config_lib.SweepConfig(learning_rate=(0.1, 0.2), export="all")
  config = dataclasses.replace(
    config,
    sweep=sweep,
    batch_size=1024,
    data=config_lib.DataConfig(validation=""),
  )
  text = topology_plan.plan(config, "v5e:2x1", classes=7)
  assert "in 2 passes" in row(text, "steps")
  assert "too much" in row(text, "memory")


def test_seconds_of_the_run_are_those_of_its_steps(config, chip, monkeypatch):
  """Stated by the compiler for TPUs; CPUs' states none."""
  made = topology_plan.CompilerReport.of

  def of(compiled):
    return dataclasses.replace(made(compiled), cycles=3_000_000)

  monkeypatch.setattr(topology_plan.CompilerReport, "of", of)
  optim = config_lib.OptimConfig(accumulation_steps=4)
  config = dataclasses.replace(config, total_steps=10_000, optim=optim)
  text = topology_plan.plan(config, "v5e:2x1", classes=7)
  # Four times two programs and an update, of 2 ms each.
  assert row(text, "training") == "about 3:00, 18 ms a step"


def test_cached_rows_are_on_the_chips(config, chip):
  cache = config_lib.CacheConfig(what="contexts", where="device")
  data = config_lib.DataConfig(train_crop="resize", flip=False)
  config = dataclasses.replace(config, cache=cache, data=data)
  text = topology_plan.plan(config, "v5e:2x1", classes=7, examples=100_000)
  assert "cached rows" in row(text, "memory")
  bytes_of_a_row = int(
    re.search(r"of ([\d,]+) bytes", row(text, "cache"))[1].replace(",", "")
  )
  assert gib(row(text, "memory")) == pytest.approx(
    bytes_of_a_row * 50_000 / 2**30, rel=0.1
  )
  half = dataclasses.replace(cache, dtype="bfloat16")
  half = dataclasses.replace(config, cache=half)
  text = topology_plan.plan(half, "v5e:2x1", classes=7, examples=100_000)
  assert f"of {bytes_of_a_row // 2:,} bytes" in row(text, "cache")
  with pytest.raises(ConfigError, match="config.data.name is empty"):
    topology_plan.plan(config, "v5e:2x1", classes=7)


def test_missing_examples_and_files_are_named(config, chip):
  data = config_lib.DataConfig(name="cifar100")
  config = dataclasses.replace(config, data=data, epochs=2.0)
  with pytest.raises(ConfigError, match="'cifar100'.*give --examples"):
    topology_plan.plan(config, "v5e:2x1")
  folder = config_lib.DataConfig(name="folder", dir="nowhere")
  with pytest.raises(DataError, match="give --classes"):
    topology_plan.plan(dataclasses.replace(config, data=folder), "v5e:2x1")
  config = dataclasses.replace(config, backbone="nowhere.npz")
  with pytest.raises(BackboneError, match="or random:B/16"):
    topology_plan.plan(config, "v5e:2x1", classes=3)


def test_tfds_says_classes_of_what_is_not_prepared(tmp_path):
  ref = SplitRef("sun397/tfds", str(tmp_path), "train[:50%]")
  names, size = datasets.describe(ref)
  assert len(names) == 397
  assert size is None
  chosen = dataclasses.replace(ref, subset=Subset(per_class=5))
  assert datasets.describe(chosen)[1] == 5 * 397
  digits = SplitRef("digits:0-4", "", "train", subset=Subset(first=17))
  assert datasets.describe(digits) == (("0", "1", "2", "3", "4"), 17)


@pytest.mark.parametrize("name", [n for n in KNOWN if n != "glyphs"])
def test_short_names_tell_shapes(name):
  shapes = backbone_shapes(known_config(name))
  assert shapes["head"]["kernel"].shape[1] == 21_843
  assert ("pre_logits" in shapes) == name.startswith("i21k")
  assert known_config(name).variant == name.partition("-")[2]


def test_other_backbones_have_no_known_shapes():
  assert known_config("glyphs") is None
  assert known_config("augreg-B/7") is None


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--topology=v5e:1"], "--topology applies only to plans for absent"),
    (["--dry_run", "--classes=3"], "--classes applies only to plans"),
    (["--dry_run", "--topology=v5e:1", "--gpu=h100"], "only one of them"),
    (["--dry_run", "--gpu=h100", "--examples=-1"], "--examples is -1"),
    (["--dry_run"], "--workdir is missing"),
  ],
)
def test_flags_that_do_not_go_together_are_refused(flags, message):
  with pytest.raises(ConfigError, match=message):
    train.parse(["main", "--config=sun397", *flags])
