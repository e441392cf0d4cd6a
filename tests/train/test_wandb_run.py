"""Weights & Biases: what a run sends, and how failures are handled."""

import dataclasses
import importlib.util
import json
import struct
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import class_evaluation, one_device, tiny_backbone

import memory_vit as mv
from memory_vit.config import (
  Config,
  DataConfig,
  SweepConfig,
  TaskConfig,
  WandbConfig,
)
from memory_vit.errors import ConfigError, TrainingError
from memory_vit.runtime.preemption import PREEMPTED, STOPPED, Interrupted
from memory_vit.train import fit, run, settle, wandb_run
from memory_vit.train.metric_writers import MetricWriters
from memory_vit.train.state import Steps
from memory_vit.train.step import TrainState
from memory_vit.train.sweep import Trial
from memory_vit.train.tensorboard import TensorBoard
from memory_vit.train.wandb_run import WandbRun
from studies.paper import runs
from studies.paper.study import Study
from studies.vtab import protocol
from studies.vtab.layout import TaskData
from studies.vtab.protocol import Benchmark
from studies.vtab.tasks import TASKS

CONFIG = Config(
  backbone="https://user:pass%40word@example.org/vit.npz?token=secret",
  wandb=WandbConfig(project="pets", entity="us", group="all"),
)
ALONE = [Trial("pets", {}, CONFIG)]
SWEEP = [
  Trial(f"pets-{i}", {"learning_rate": rate}, CONFIG)
  for i, rate in enumerate((0.1, 0.3))
]


class FakeRun:
  """What `wandb.init` returns; fails after so many calls of `log`."""

  id, url = "id", "https://example.org/id"
  offline = disabled = False

  def __init__(self, most=1_000):
    self.logged, self.metrics, self.summary = [], [], {}
    self.ended, self.most, self.updates = None, most, []
    self.preempting = False
    self.config = types.SimpleNamespace(
      update=lambda values, **options: self.updates.append((values, options))
    )

  def define_metric(self, name, **options):
    self.metrics.append((name, options))

  def log(self, values):
    if len(self.logged) == self.most:
      raise OSError(28, "No space left on device")
    self.logged.append(values)

  def mark_preempting(self):
    self.preempting = True

  def finish(self, exit_code):
    self.ended = exit_code


class FakeWandb:
  """The library, at its border."""

  def __init__(self):
    self.runs, self.told, self.error = [], [], None
    self.Image = lambda array: ("image", array.shape)
    self.Settings = dict

  def init(self, **options):
    if self.error:
      raise self.error
    self.told.append(options)
    self.runs.append(FakeRun())
    return self.runs[-1]


@pytest.fixture
def library(monkeypatch):
  fake = FakeWandb()
  monkeypatch.setattr(wandb_run, "wandb", fake)
  return fake


def written_by(run_of_wandb, folder=Path("run")):
  """A run that has begun."""
  made = WandbRun(CONFIG, folder, ALONE)
  made._run, made._has_begun = run_of_wandb, True
  return made


def train(run_of_wandb, logdirs, names=("pets",)):
  """Five steps of some names, evaluated at the second and the last."""

  def step_fn(state, frozen, batch):
    step = int(state.step) + 1
    metrics = {
      n: {"loss": float(step), "accuracy": 0.5, "skipped": 0.0,
          "learning_rate": 0.25}
      for n in names
    }  # fmt: skip
    return TrainState(jnp.int32(step), state.params, ()), metrics

  result = class_evaluation(0.5, classes=6)
  params = {n: {"head": np.full(4, 2, np.float32)} for n in names}
  state = TrainState(jnp.int32(0), jax.tree.map(jnp.array, params), ())
  batches = ({"image": np.zeros((1, 1))} for _ in range(5))
  with MetricWriters(TensorBoard(logdirs), run_of_wandb) as writers:
    return fit.fit(
      step_fn, state, batches, title="run", frozen=None, batch_size=4,
      mesh=one_device(), steps=Steps(total=5, log=2, evaluate=2),
      evaluate=lambda params: dict.fromkeys(names, result), writers=writers,
    )  # fmt: skip


def test_wandb_gets_the_scalars_of_tensorboard(library, tmp_path):
  with wandb_run.opened(CONFIG, tmp_path, ALONE) as opened:
    train(opened, {"pets": tmp_path})
  (fake,) = library.runs
  assert [values["step"] for values in fake.logged] == [1, 2, 2, 4, 4, 5, 5]
  first, _, validation, *_ = fake.logged
  assert first["train/loss"] == 1.0
  assert first["train/learning_rate"] == 0.25
  assert first["norm/head"] == 4.0
  assert validation == {
    "validation/loss": 1.0, "validation/top1": 0.5, "validation/top5": 1.0,
    "step": 2,
  }  # fmt: skip
  # Steps are a value of their own: those of W&B could not begin again.
  assert ("*", {"step_metric": "step"}) in fake.metrics


def test_trials_of_a_sweep_are_one_wandb_run(library, tmp_path):
  """All of a step in one row; of each trial under its own name."""
  with wandb_run.opened(CONFIG, tmp_path, SWEEP) as opened:
    names = ["pets-0", "pets-1"]
    train(opened, {name: tmp_path / name for name in names}, names)
  (fake,) = library.runs
  assert len(fake.logged) == 7
  assert {key.partition("/")[0] for key in fake.logged[0]} == {*names, "step"}
  ((told, _),) = fake.updates
  assert told["trials"]["pets-1"] == {"learning_rate": 0.3}


def test_resumed_run_continues_the_same_wandb_run(library, tmp_path):
  def interrupted():
    with wandb_run.opened(CONFIG, tmp_path, ALONE):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    interrupted()
  with wandb_run.opened(CONFIG, tmp_path, ALONE):
    pass
  (other := tmp_path / "other").mkdir()
  with wandb_run.opened(CONFIG, other, ALONE):
    pass
  first, second, third = library.told
  assert first["id"] == second["id"] != third["id"]
  assert {told["resume"] for told in library.told} == {"allow"}
  assert [fake.ended for fake in library.runs] == [1, 0, 0]


@pytest.mark.fault("wandb")
def test_refused_resume_leaves_the_wandb_run_unchanged(library, tmp_path):
  """Not even that it was there: what W&B has is that of the earlier run."""
  with wandb_run.opened(CONFIG, tmp_path, ALONE):
    pass
  with (
    pytest.raises(TrainingError),
    wandb_run.opened(CONFIG, tmp_path, ALONE, resumes=True),
  ):
    raise TrainingError("the run began with another config")
  assert len(library.told) == 1
  assert library.runs[0].ended == 0


def test_resumed_wandb_run_begins_once_the_run_is_accepted(library, tmp_path):
  with wandb_run.opened(CONFIG, tmp_path, ALONE):
    pass
  with wandb_run.opened(CONFIG, tmp_path, ALONE, resumes=True) as opened:
    assert len(library.told) == 1
    opened.config = dataclasses.replace(CONFIG, log_every=7)
    opened.begin()
    opened.begin()  # a second pass
  first, second = library.told
  assert first["id"] == second["id"]
  assert library.runs[1].updates[0][0]["log_every"] == 7


@pytest.mark.parametrize(
  ("status", "marked"), [(PREEMPTED, True), (STOPPED, False)]
)
def test_interrupted_run_ends_with_its_status_in_wandb(
  library, tmp_path, status, marked
):
  with (
    pytest.raises(Interrupted),
    wandb_run.opened(CONFIG, tmp_path, ALONE),
  ):
    raise Interrupted(status, "its state is saved")
  assert library.runs[0].ended == status
  assert library.runs[0].preempting == marked


def test_wandb_gets_no_secrets(library, tmp_path):
  with wandb_run.opened(CONFIG, tmp_path, ALONE):
    pass
  (told,) = library.told
  ((config, _),) = library.runs[0].updates
  said = json.dumps([told, config], default=str)
  assert config["backbone"] == "https://example.org/vit.npz"
  for secret in ("pass%40word", "user:", "token="):
    assert secret not in said
  assert (told["project"], told["entity"], told["group"]) == (
    "pets", "us", "all",
  )  # fmt: skip
  # Nor the command line, nor what is printed, nor what else is installed.
  assert told["settings"]["x_disable_meta"]
  assert told["settings"]["console"] == "off"
  assert told["settings"]["x_save_requirements"] is False


@pytest.mark.fault("unwritable-events", "wandb")
def test_full_disk_of_wandb_does_not_end_training(library, tmp_path, caplog):
  with wandb_run.opened(CONFIG, tmp_path, ALONE) as opened:
    (fake,) = library.runs
    fake.most = 2
    state, _ = train(opened, {"pets": tmp_path})
  assert state.step == 5
  assert len(fake.logged) == 2
  # Else W&B refuses this id for as long as the process lives.
  assert fake.ended == 0
  first, last = (r.message for r in caplog.records if r.levelname == "WARNING")
  assert "training continues without it (OSError: " in first
  assert last == "Weights & Biases: not all of this run was written"


def test_outbox_of_wandb_is_closed_after_a_failure(
  library, tmp_path, monkeypatch
):
  """In a bucket its files are sent then, for `wandb sync`."""
  closed = []
  monkeypatch.setattr(
    wandb_run.files.Outbox, "close", lambda outbox: closed.append(outbox)
  )
  with wandb_run.opened(CONFIG, tmp_path, ALONE) as opened:
    library.runs[0].most = 0
    opened.guard.attempt(lambda: opened.write_scalars(1, {"pets": {"a": 1.0}}))
    assert opened.guard.failed
  assert len(closed) == 1


def test_failed_finish_of_wandb_is_only_logged(library, tmp_path, caplog):
  def finish(exit_code):
    raise OSError(28, "No space left on device")

  with wandb_run.opened(CONFIG, tmp_path, ALONE):
    library.runs[0].finish = finish
  assert "OSError: " in caplog.text


def test_plots_and_results_are_sent_to_wandb(library):
  fake = FakeRun()
  to = written_by(fake)
  plot = np.zeros((4, 6, 3), np.uint8)
  to.write_images(7, {"pets": {"attention/overlays": plot}})
  to.summarize({"best/step": 3, "best/test_top1": None})
  assert fake.logged == [{"attention/overlays": ("image", (4, 6, 3)),
                          "step": 7}]  # fmt: skip
  assert fake.summary == {"best/step": 3}


def test_wandb_is_not_opened_without_a_project(library, tmp_path):
  with wandb_run.opened(Config(), tmp_path, ALONE) as opened:
    assert opened is None
  assert not library.told
  assert not list(tmp_path.iterdir())


def test_only_process_0_writes_to_wandb(library, tmp_path, monkeypatch):
  monkeypatch.setattr(wandb_run.processes, "on_process_0", lambda action: None)
  with wandb_run.opened(CONFIG, tmp_path, ALONE) as opened:
    opened.write_scalars(1, {"pets": {"train/loss": 1.0}})
  assert not library.told


@pytest.mark.parametrize(("mode", "told"), [("", None), ("offline", "offline")])
def test_settings_of_wandb_apply_without_a_mode(library, tmp_path, mode, told):
  """The variable WANDB_MODE, and `wandb offline`."""
  config = Config(wandb=WandbConfig(project="pets", mode=mode))
  with wandb_run.opened(config, tmp_path, ALONE):
    pass
  assert library.told[-1]["mode"] == told


def test_damaged_wandb_json_is_not_reported_as_a_missing_login(
  library, tmp_path
):
  (tmp_path / wandb_run.FILE).touch()
  with (
    pytest.raises(ConfigError, match=r"wandb\.json is not readable"),
    wandb_run.opened(CONFIG, tmp_path, ALONE),
  ):
    pass


def test_full_disk_is_not_reported_as_a_missing_login(library, tmp_path):
  library.error = OSError(28, "No space left on device")
  with (
    pytest.raises(TrainingError, match="make room") as raised,
    wandb_run.opened(CONFIG, tmp_path, ALONE),
  ):
    pass
  assert "login" not in str(raised.value)


def test_missing_login_is_an_error_in_one_line(library, tmp_path):
  library.error = RuntimeError("No API key configured.\nUse `wandb login`")
  with (
    pytest.raises(TrainingError, match="or WANDB_API_KEY") as raised,
    wandb_run.opened(CONFIG, tmp_path, ALONE),
  ):
    pass
  assert "\n" not in str(raised.value)
  assert "No API key configured." in str(raised.value)


@pytest.mark.fault("wandb")
def test_missing_login_is_found_before_data_are_read(
  library, tmp_path, monkeypatch
):
  library.error = RuntimeError("No API key configured.")
  # Not every environment of the tests has it.
  monkeypatch.setattr(wandb_run, "require_installed", lambda config: None)
  monkeypatch.setattr(
    run, "open_inputs", lambda *args, **options: pytest.fail("it was opened")
  )
  config = dataclasses.replace(
    CONFIG, image_size=8, batch_size=8, batch_size_eval=8,
    data=DataConfig(name="digits:0-4"),
  )  # fmt: skip
  with pytest.raises(TrainingError, match="Weights & Biases cannot begin"):
    run.train_and_evaluate(config, tmp_path)


def test_runs_of_a_study_are_in_one_group():
  """Each under the name of its directory."""
  wandb = WandbConfig(project="pets", name="mine")
  many = dataclasses.replace(wandb, name="", group="mine")
  config = Config(
    wandb=wandb, data=DataConfig(name="digits:5-9"), task=TaskConfig(cells=5)
  )
  planned = runs.PaperRun(
    regime="head", data="digits:5-9", seed=0, learning_rates=(0.1,)
  )
  assert runs.config_of(Study(config=config), planned).wandb == many
  data = TaskData(
    task=TASKS[0], name="list", dir="data", train="a", held_out="b",
    test="d",
  )  # fmt: skip
  bench = Benchmark(
    config=config, tasks=(data,), missing={}, regimes=("head",), seeds=(0,)
  )
  assert protocol.search_config(bench, data, "head").wandb == many
  grouped = dataclasses.replace(wandb, group="all")
  assert grouped.of_many().group == "all"


def test_settled_options_are_sent_to_wandb_once_the_run_begins(
  library, tmp_path
):
  with wandb_run.opened(CONFIG, tmp_path, ALONE) as opened:
    opened.config = dataclasses.replace(CONFIG, image_size=48)
    opened.begin()
  _, (values, options) = library.runs[0].updates
  assert values["image_size"] == 48
  assert values["backbone"] == "https://example.org/vit.npz"
  assert options == {"allow_val_change": True}


@pytest.mark.fault("wandb")
def test_finish_of_wandb_has_a_timeout(library, tmp_path, caplog):
  """What is not sent then stays, and the warning says how to send it."""

  def finish(exit_code):
    raise TimeoutError("Timed out finishing run.")

  with wandb_run.opened(CONFIG, tmp_path, ALONE):
    library.runs[0].finish = finish
  settings = library.told[0]["settings"]
  # Of the 30 s that a preempted process has, saving takes up to 10.
  assert 0 < settings["finish_timeout"] <= 10
  assert settings["finish_timeout_raises"]
  (warning,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
  assert f"wandb sync {tmp_path}/wandb/*run-*-id*" in warning


@pytest.mark.fault("wandb")
def test_missing_wandb_library_is_refused_first(tmp_path, monkeypatch):
  missing = types.SimpleNamespace(find_spec=lambda name: None)
  monkeypatch.setattr(
    wandb_run, "importlib", types.SimpleNamespace(util=missing)
  )
  config = dataclasses.replace(CONFIG, data=DataConfig(name="digits:0-4"))
  with pytest.raises(ConfigError, match=r"pip install '\.\[wandb\]'"):
    settle.require_possible(config, tmp_path / "run", one_device())
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("runs/mine", "runs/mine"),
    ("C:\\a@b", "C:\\a@b"),
    ("gs://bucket/a@b.npz", "gs://bucket/a@b.npz"),
    ("hf://facebook/dinov2-base@main", "hf://facebook/dinov2-base@main"),
    ("https://u:p@w@host:8/x?key=1#z", "https://host:8/x"),
    (("http://u@h", {"a": "http://u@h"}), ["http://h", {"a": "http://h"}]),
    ("s3://u:p@a/x,HTTPS://v:q@b/y?k=1", "s3://a/x,HTTPS://b/y"),
    ("s3://u:p@a,s3://v:q@b", "s3://a,s3://b"),
    ("gs://bucket/train-?.tfrecord#1", "gs://bucket/train-?.tfrecord#1"),
    ("gs://bucket/day=?/hour=1.npz", "gs://bucket/day=?/hour=1.npz"),
    ("s3://b/k-?/l?X-Amz-Signature=SE/C", "s3://b/k-?/l"),
    ("abfss://c@d.org/x?sv=1&sig=SECRET", "abfss://d.org/x"),
    ("https://user:pa/s@s?@host/x", "https://host/x"),
    ("https://u:p@host/a@b", "https://host/a@b"),
    ("https://host:80/a@b", "https://host:80/a@b"),
    ("https://h.org?x=SECRET@z", "https://h.org"),
    ("https://h.org:80?x=a:b@z", "https://h.org:80"),
  ],
)
def test_addresses_lose_their_passwords(text, expected):
  assert wandb_run.without_secrets(text) == expected


def records(file):
  """What lies in a file of W&B: a log as of LevelDB, of protocol buffers."""
  import wandb
  from wandb.proto import wandb_internal_pb2

  wandb.teardown()  # what writes the file may be behind: it ends
  content = file.read_bytes()
  assert content.startswith(b":W&B")
  place, parts, found = 7, b"", []
  while place + 7 <= len(content):
    if (left := 2**15 - place % 2**15) < 7:
      place += left
      continue
    _, length, kind = struct.unpack_from("<IHB", content, place)
    parts += content[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (1, 4):  # whole, or the last part
      found.append(wandb_internal_pb2.Record.FromString(parts))
      parts = b""
  return found


needs_wandb = pytest.mark.skipif(
  importlib.util.find_spec("wandb") is None,
  reason="wandb (of the extra `wandb`) is not installed",
)


@pytest.fixture
def offline(tmp_path, monkeypatch):
  """The library itself, which leaves nothing elsewhere and asks nobody."""
  monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
  monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.mark.fault("wandb")
@pytest.mark.processes
@needs_wandb
def test_wandb_run_of_the_caller_stays_open(tmp_path, offline):
  import wandb

  own = wandb.init(
    project="own", mode="offline", dir=tmp_path,
    settings=wandb.Settings(silent=True),
  )  # fmt: skip
  config = Config(
    backbone="vit.npz", wandb=WandbConfig(project="pets", mode="offline")
  )
  (workdir := tmp_path / "run").mkdir()
  try:
    with wandb_run.opened(config, workdir, ALONE):
      pass
    assert wandb.run is own
    own.log({"loss": 1.0})  # raises where it has ended
  finally:
    own.finish()
  (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
  kinds = [record.WhichOneof("record_type") for record in records(file)]
  assert "history" in kinds
  assert len([*(workdir / "wandb").glob("offline-run-*/*.wandb")]) == 1


@pytest.mark.processes
@needs_wandb
def test_offline_sweep_is_recorded_and_resumed(tmp_path, offline, pictures):
  """The library itself, twice: the second run resumes the first."""
  mv.save_backbone(tiny_backbone(num_classes=5), tmp_path / "vit.npz")
  config = Config(
    backbone=str(tmp_path / "vit.npz"), image_size=8, batch_size=8,
    batch_size_eval=16, total_steps=4, log_every=1, eval_every=4, log_images=2,
    data=DataConfig(
      name="digits:5-9", train="train[:40]", validation="train[40:50]",
      test="test[:10]",
    ),
    sweep=SweepConfig(learning_rate=(0.1, 0.3)),
    wandb=WandbConfig(project="digits", mode="offline"),
  )  # fmt: skip
  workdir = tmp_path / "run"
  run.train_and_evaluate(config, workdir)
  run.train_and_evaluate(config, workdir)
  first, second = sorted(
    (workdir / "wandb").glob("offline-run-*/*.wandb"),
    key=lambda file: file.stat().st_mtime_ns,
  )
  assert first.name == second.name  # one run, of that id
  # By this `wandb sync` knows that it resumes.
  (told,) = (r.run for r in records(second) if r.HasField("run"))
  assert told.resume
  found = records(first)
  rows = [
    {"/".join([i.key] if i.key else i.nested_key): json.loads(i.value_json)
     for i in record.history.item}
    for record in found if record.WhichOneof("record_type") == "history"
  ]  # fmt: skip
  loss = {
    row["step"]: row["digits-5-9-00/train/loss"]
    for row in rows
    if "digits-5-9-00/train/loss" in row
  }
  assert [*loss] == [1, 2, 3, 4]
  assert loss[1] == pytest.approx(np.log(5), abs=1e-3)  # a head of zeros
  images = [key for row in rows for key in row if "attention/" in key]
  shown = {key.partition("/")[2] for key in images}
  assert any(key.startswith("attention/overlays") for key in shown)
  assert list(first.parent.glob("files/media/images/**/*.png"))
  (exit_record,) = (
    r.exit for r in found if r.WhichOneof("record_type") == "exit"
  )
  assert exit_record.exit_code == 0
