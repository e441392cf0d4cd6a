"""Every option does what `memory_vit.config` says, and nothing else.

`ROWS` changes one option after the other. With each a run is made, from the
configuration to `result.json`, and what is seen of it is compared with a run
without the change: `differs` names all that must be another then, and the rest
must be as it was. To add an option, add a row:

  row("optim.new", 0.5, "learned"),

  option    as `--config.OPTION`
  value     one that is not the default
  differs   what of a run is another: keys of `SEEN`. Where a row that is
            missing something fails, its message says what did differ; take it
            over only if the comment in config.py says so.
  given     what else has to be set, in both runs, for the option to matter
  goes_on   whether a saved run goes on when the option has changed; most may
            not change, see `state.what_matters`
  maybe     what may be another, or not

What a run computes with is real. Only what depends on nothing but its arguments
is not made twice: batches of the same examples, programs of the same functions.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any
from unittest import mock

import fake_data
import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from conftest import random_task, tiny_backbone

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit import plots
from memory_vit.cache.run_cache import RunCache
from memory_vit.data import batching, datasets
from memory_vit.errors import MemoryVitError
from memory_vit.evaluation import evaluate
from memory_vit.model import trees, vit_config
from memory_vit.runtime import sharding
from memory_vit.tasks import split_forward
from memory_vit.train import (
  fit,
  inputs,
  optim,
  passes,
  progress,
  run,
  run_pictures,
  state,
  wandb_run,
)
from memory_vit.train.step import Step

SEEN = {
  "refused": "the message of a run that is not possible; then nothing else",
  "backbone": "shape, computation and weights of the frozen model",
  "placement": "how the backbone and the batches lie on the devices",
  "task": "what the new task is, and its first values",
  "rates": "its learning rate at every step",
  "examples": "which examples each batch of training holds",
  "crops": "their pixels",
  "parts": "how many pictures pass the model at once in training",
  "learned": "the task after the last step",
  "evaluated": "the pixels of what is evaluated, and of which splits",
  "evaluation batches": "how many pictures are evaluated at once",
  "when": "after which steps is logged, evaluated, saved, and profiled",
  "files": "what lies in the working directory at the end",
  "result": "result.json, but for the time that it took",
  "waits": "how long is waited for a batch",
  "identity": "what a saved run that goes on must share",
  "pictures": "on how many images pictures are drawn at the end",
  "told": "what Weights & Biases is told of the run",
}


@dataclasses.dataclass(frozen=True)
class Row:
  """See above."""

  option: str
  value: Any
  differs: frozenset[str]
  given: dict[str, Any]
  maybe: frozenset[str]


def row(option, value, *differs, given=None, goes_on=False, maybe=()):
  """A row; what is learned with another option is another run."""
  also = () if goes_on or "refused" in differs else ("identity",)
  if "learned" in differs:  # it may be as good as before
    maybe = (*maybe, "result")
  made = Row(
    option, value, frozenset({*differs, *also}), given or {}, frozenset(maybe)
  )
  return pytest.param(made, id=f"{option}={value}")


# What else has to be set. Files of the fixture `files` are named in capitals.
SMALL = {"data.train_crop": "small"}
CENTRAL = {"data.eval_crop": "central"}
FOLDER = {
  "data.name": "folder", "data.dir": "FOLDER", "data.train": "train",
  "data.validation": "train", "data.test": "train", "task.name": "pictures",
}  # fmt: skip
SQUEEZED = {"data.train_crop": "resize", "data.flip": False}
KEPT = {**SQUEEZED, "cache.what": "contexts"}
ON_DISK = {**KEPT, "cache.where": "disk", "cache.dir": "PLACE"}
CROPS = {**SMALL, "cache.what": "contexts", "cache.crops": 3, "total_steps": 12}
BROKEN = {**FOLDER, "data.dir": "BROKEN"}
TFDS = {**FOLDER, "data.name": "own", "data.dir": "TFDS"}
LIST = {**FOLDER, "data.name": "list", "data.dir": "LIST"}
CODE = {**TFDS, "data.dir": "CODE"}
VALUES = {"data.name": "glyphs:angle", "task.kind": "values"}
ADAPTER = {"regime": "adapter"}
SIDE = {"regime": "side_masked"}
ADAMW = {"optim.name": "adamw"}
# Nothing is learned, so that no evaluation is better than the first.
STOPS = {"eval_every": 1, "learning_rate": 1e-9}
# Each step multiplies all parameters by a million millions.
DIVERGES = {
  "optim.name": "adamw", "optim.weight_decay": 1e6, "learning_rate": 1e6,
  "total_steps": 4,
}  # fmt: skip
UPSTREAM = {"upstream.name": "digits:0-4", "upstream.split": "test[:10]"}
UP_FOLDER = {
  "upstream.name": "folder", "upstream.dir": "FIVE", "upstream.split": "train",
}  # fmt: skip
UP_CENTRAL = {**UPSTREAM, "upstream.eval_crop": "central"}
SWEEP = {"sweep.learning_rate": (0.3, 0.1)}
WANDB = {"wandb.project": "pets"}
# Where the backbone is another one: a task keeps its fingerprint.
ANEW = ("backbone", "task", "learned")

ROWS = [
  row("backbone", "OTHER", *ANEW),
  row("gelu", "exact", "backbone", "task", maybe=("learned", "result")),
  row("image_size", 16, *ANEW, "crops", "evaluated"),
  row("dtype", "bfloat16", "backbone", "learned"),
  row("batch_size", 16, "examples", "crops", "parts", "learned"),
  row("batch_size_eval", 8, "evaluation batches", goes_on=True),
  row("total_steps", 4, "when", "rates", "examples", "crops", "parts", "files",
      "learned"),
  row("epochs", 0.8, "when", "rates", "examples", "crops", "parts", "files",
      "learned"),
  row("learning_rate", 0.5, "rates", "learned"),
  row("seed", 1, "task", "examples", "crops", "learned"),
  row("regime", "adapter", "task", "learned"),
  row("eval_every", 1, "when", "evaluated", "evaluation batches", "files",
      maybe=("result",)),
  row("early_stopping", 1, "when", "files", "result", given=STOPS,
      maybe=("evaluated", "evaluation batches", "examples", "crops", "parts")),
  row("checkpoint_every", 1, "when", "files"),
  row("log_every", 1, "when", goes_on=True),
  row("log_images", 4, "pictures", "files", goes_on=True),
  row("export_orbax", True, "files", goes_on=True),
  row("profile_at", 2, "when", goes_on=True),
  row("stall_timeout", 500.0, "waits", goes_on=True),
  row("trust_data_code", True, "refused", given=CODE),
  row("data.name", "digits:0-4", "task", "examples", "crops", "evaluated",
      "files", "learned"),
  row("data.dir", "FOLDER2", "crops", "evaluated", "learned", given=FOLDER),
  row("data.train", "train[:30]", "examples", "crops", "learned"),
  row("data.train_crop", "small", "crops", "learned"),
  row("data.train_crop", "resize", "crops", "learned"),
  row("data.flip", False, "crops", "learned"),
  row("data.resize", 10, "crops", "learned", given=SMALL),
  row("data.resize", 10, "task", "evaluated", given=CENTRAL, maybe=("result",)),
  row("data.seed", 1, "examples", "crops", "learned"),
  row("data.cache_gib", 0.0, "refused", given=TFDS),
  row("data.max_bad", 1, "refused", given=BROKEN),
  # What a state says of its data is written otherwise then; it is compared as
  # it was written.
  row("data.digest", "contents", "result"),
  row("data.label", "other", "task", "learned", given=TFDS),
  row("data.path", "other", "crops", "evaluated", "learned", given=LIST),
  row("data.per_class", 2, "examples", "crops", "learned"),
  row("data.first", 20, "examples", "crops", "learned"),
  row("data.validation", "train[50:60]", "evaluated", "result"),
  row("data.test", "test[10:20]", "evaluated", "result"),
  row("data.eval_crop", "central", "task", "evaluated", maybe=("result",)),
  row("data.eval_crop", "resize", "task", "evaluated",
      given={"backbone": "STATES"}, maybe=("result",)),
  row("cache.what", "contexts", "crops", "evaluated", "placement",
      given=SQUEEZED),
  # The third epoch takes the third view, or the first one again.
  # The digits are no larger than what is kept of an image.
  row("cache.what", "images"),
  row("cache.crops", 2, "crops", "learned", given=CROPS),
  row("cache.dtype", "bfloat16", "crops", "evaluated", "learned", given=KEPT),
  row("cache.where", "device", "placement", given=KEPT, goes_on=True),
  row("cache.dir", "PLACE2", "placement", given=ON_DISK, goes_on=True),
  row("task.name", "mine", "task", "files", "result"),
  row("task.kind", "labels", "task", "examples", "evaluated", "learned",
      "files"),
  row("task.units", ("degrees",), "task", given=VALUES, goes_on=True),
  row("task.loss", "huber", "learned", given=VALUES),
  row("task.cells", 1, "task", "learned"),
  row("task.bottleneck", 2, "task", "learned", given=ADAPTER),
  row("task.side_width", 2, "task", "learned", given=SIDE),
  row("task.side_mixing", "none", "task", "learned", given=SIDE),
  row("task.attends_to", ("PARENT",), "task", "learned", "files"),
  row("task.indirect", ("PARENT",), "refused",
      given={"task.attends_to": ("CHILD",)}),
  row("task.memory_norm", False, "task", "learned"),
  row("task.memory_std", 0.5, "task", "learned"),
  row("task.cls_init", "normal", "task", "learned"),
  row("task.padded_classes", 9, "task", "learned"),
  row("task.init", "HEAD", "task", "learned", "when", "files", "evaluated",
      "evaluation batches"),
  row("task.unknown", 0.2, "result", goes_on=True),
  row("optim.name", "adamw", "learned"),
  row("optim.momentum", 0.5, "learned"),
  row("optim.weight_decay", 0.5, "learned", given=ADAMW),
  row("optim.grad_clip", 0.1, "learned"),
  row("optim.clip_by", "part", "learned", given={"optim.grad_clip": 0.1}),
  row("optim.cls_factor", 9.0, "learned"),
  row("optim.memory_factor", 9.0, "learned"),
  row("optim.warmup", 0.7, "rates", "learned"),
  row("optim.warmup_steps", 3, "rates", "learned"),
  row("optim.schedule", "constant", "rates", "learned"),
  row("optim.label_smoothing", 0.3, "learned"),
  row("optim.class_weights", "balanced", "learned"),
  row("optim.mixup", 0.5, "parts", "learned"),
  row("optim.max_skipped", 2, "refused", given=DIVERGES),
  row("optim.accumulation_steps", 2, "parts"),
  row("sweep.regime", ("cls_masked", "memory_masked"), "task", "rates", "files",
      "learned"),
  row("sweep.learning_rate", (0.3, 0.5), "task", "rates", "files",
      "learned"),
  row("sweep.cells", (2, 3), "task", "rates", "files", "learned"),
  row("sweep.seed", (0, 1), "task", "rates", "files", "learned"),
  row("sweep.overrides", ({}, {"optim.momentum": 0.5}), "task", "rates",
      "files", "learned"),
  row("sweep.export", "all", "files", "result", given=SWEEP, goes_on=True),
  row("sweep.memory_gib", 0.0015, "when", "files", "examples", "crops", "parts",
      "evaluated", "evaluation batches", "learned", given=SWEEP),
  row("upstream.name", "digits:0-4", "evaluated", "evaluation batches",
      "when", "result", given={"upstream.split": "test[:10]"}, goes_on=True),
  row("upstream.dir", "FIVE2", "evaluated", given=UP_FOLDER,
      goes_on=True, maybe=("result",)),
  row("upstream.split", "test[10:20]", "evaluated", given=UPSTREAM,
      goes_on=True, maybe=("result",)),
  row("upstream.eval_crop", "central", "evaluated", given=UPSTREAM,
      goes_on=True, maybe=("result",)),
  row("upstream.eval_crop", "resize", "evaluated",
      given={**UPSTREAM, "backbone": "STATES"}, goes_on=True,
      maybe=("result",)),
  row("upstream.resize", 10, "evaluated", given=UP_CENTRAL,
      goes_on=True, maybe=("result",)),
  row("wandb.project", "birds", "told", "files", goes_on=True),
  row("wandb.entity", "us", "told", given=WANDB, goes_on=True),
  row("wandb.name", "mine", "told", given=WANDB, goes_on=True),
  row("wandb.group", "all", "told", given=WANDB, goes_on=True),
  row("wandb.mode", "offline", "told", given=WANDB, goes_on=True),
  row("mesh.fsdp", 2, "placement", goes_on=True),
]  # fmt: skip

# As little as shows everything; what is not here is at its default.
BASE = {
  "backbone": "BACKBONE", "image_size": 8, "batch_size": 8,
  "batch_size_eval": 16, "total_steps": 3, "data.name": "digits:5-9",
  "data.train": "train[:40]", "data.validation": "train[40:50]",
  "data.test": "test[:10]", "log_images": 0, "export_orbax": False,
}  # fmt: skip


def options(cls=config_lib.Config, prefix=""):
  """ "seed", "data.name", "task.cells", ...: all that there are."""
  for field in dataclasses.fields(cls):
    if dataclasses.is_dataclass(field.type):
      yield from options(field.type, f"{prefix}{field.name}.")
    else:
      yield prefix + field.name


def test_every_option_has_a_row():
  assert {row.values[0].option for row in ROWS} == {*options()}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_an_option_does_what_it_says(row, observe, pictures):
  before = observe({**BASE, **row.given})
  after = observe({**BASE, **row.given, row.option: row.value})
  if "refused" in row.differs:
    seen = ["refused"]
  else:
    assert not before["refused"]
    assert not after["refused"]
    seen = [*SEEN]
  found = {key for key in seen if not same(before[key], after[key])}
  assert found.difference(row.maybe) == row.differs


def same(a, b):
  """Equal; numbers that were computed, but for rounding."""
  if isinstance(a, dict) and isinstance(b, dict):
    return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
  if isinstance(a, list | tuple) and isinstance(b, list | tuple):
    return len(a) == len(b) and all(map(same, a, b))
  if isinstance(a, float | np.ndarray) and isinstance(b, float | np.ndarray):
    return np.shape(a) == np.shape(b) and np.allclose(
      a, b, rtol=1e-5, atol=1e-6, equal_nan=True
    )
  if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
    return False
  return a == b


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """What options name: {"BACKBONE": its path, ...}."""
  root = tmp_path_factory.mktemp("files")
  backbone = small_backbone(0)
  mv.save_backbone(backbone, root / "BACKBONE.npz")
  mv.save_backbone(small_backbone(1), root / "OTHER.npz")
  central = mv.EvalPreprocessing(image_size=8, crop="central", resize=10)
  states = dataclasses.replace(backbone, preprocessing=central)
  mv.save_backbone(states, root / "STATES.npz")
  head = random_task(backbone, "head", regime="head", cells=0, classes=5)
  mv.save_task(head, root / "HEAD")
  parent = random_task(backbone, "parent")
  mv.save_task(parent, root / "PARENT")
  child = random_task(backbone, "child", attends_to=[parent])
  mv.save_task(child, root / "CHILD")
  for seed, (name, classes, broken) in enumerate((
    ("FOLDER", "ab", False), ("FOLDER2", "ab", False), ("BROKEN", "ab", True),
    ("FIVE", "abcde", False), ("FIVE2", "abcde", False),
  )):  # fmt: skip
    write_pictures(root / name, classes, 100 * seed, broken)
  features = tfds.features.FeaturesDict(
    {
      "image": tfds.features.Image(shape=(None, None, 3)),
      "label": tfds.features.ClassLabel(names=["a", "b"]),
      "other": tfds.features.ClassLabel(names=["x", "y", "z"]),
    }
  )
  lists = [f"train/b/{i}.png,train/a/{i}.png,{'xy'[i % 2]}\n" for i in range(4)]
  write_pictures(root / "LIST", "ab", 0, broken=False)
  table = "".join(["path,other,label\n", *lists])
  (root / "LIST" / "train.csv").write_text(table)
  for name in ("PLACE", "PLACE2"):
    (root / name).mkdir()
  for name in ("TFDS", "CODE"):
    fake_data.write_adhoc(root / name, "own", features, {"train": [0, 1] * 4})
  for file in (root / "CODE").rglob("features.json"):
    text = file.read_text().replace("tensorflow_datasets.core", "not_there")
    file.write_text(text)
  return {
    **{path.stem: str(path) for path in root.iterdir()},
    "BACKBONE": str(root / "BACKBONE.npz"),
  }


def small_backbone(seed):
  """One block, and a head of five classes."""
  return tiny_backbone(
    seed, width=16, depth=1, mlp_dim=24, patch_size=4, num_classes=5
  )


def write_pictures(root, classes, seed, broken):
  """Four pictures of each class; of the first, one that is none."""
  for i, name in enumerate(classes):
    folder = root / "train" / name
    folder.mkdir(parents=True)
    for j in range(4):
      picture = fake_data.noise(seed + 4 * i + j, 12, 12)
      (folder / f"{j}.png").write_bytes(fake_data.encode(picture, "PNG"))
  if broken:
    (root / "train" / classes[0] / "0.png").write_bytes(b"no picture")


@pytest.fixture(scope="module")
def observe(files, tmp_path_factory):
  """Options -> what is seen of a run with them; each is run once."""
  root = tmp_path_factory.mktemp("runs")
  known = {}
  with pytest.MonkeyPatch.context() as patch, Watcher(patch) as watcher:

    def observe(changes):
      key = repr(sorted(changes.items()))
      if key not in known:
        config = config_of(changes, files)
        known[key] = watcher.seen_of(config, root / str(len(known)))
      return known[key]

    yield observe


def config_of(changes, files):
  """A configuration of {"data.name": value, ...}."""
  values = config_lib.to_dict(config_lib.Config())
  for option, value in changes.items():
    *path, last = option.split(".")
    part = functools.reduce(dict.__getitem__, path, values)
    if isinstance(value, tuple):
      part[last] = tuple(
        files.get(v, v) if isinstance(v, str) else v for v in value
      )
    else:
      part[last] = files.get(value, value) if isinstance(value, str) else value
  return config_lib.from_dict(values)


class Watcher:
  """Runs configurations, and writes down what they do on the way.

  What passes between the modules is looked at, and handed on as it is.
  """

  def __init__(self, patch):
    self._patch, self._seen = patch, None
    self._generators = []

  def __enter__(self):
    self._make_small()
    self._make_once()
    self._look()
    return self

  def __exit__(self, *args):
    for generator in self._generators:
      generator.close()

  def seen_of(self, config, workdir):
    """Makes a run; returns {key of SEEN: what was seen}."""
    seen = {key: [] for key in SEEN}
    self._seen = seen
    try:
      result = run.train_and_evaluate(config, workdir)
    except MemoryVitError as error:
      seen["refused"] = f"{type(error).__name__}: {error}"
      return seen
    result = result.to_json()
    for key in ("wall_seconds", "images_per_second"):
      del result[key]
    if "sweep" in result:
      result["sweep"] = {
        k: v
        for k, v in result["sweep"].items()
        if not k.startswith("training_seconds")
      }
    seen["result"] = result
    names = (str(path.relative_to(workdir)) for path in workdir.rglob("*"))
    seen["files"] = sorted(
      {
        re.sub(r"tfevents.*", "tfevents", n)
        for n in names
        # What lies in inventory/ is called by its SHA-256.
        if "arrays/" not in n and not n.startswith("inventory/")
      }
    )
    seen["waits"] = sorted({*seen["waits"]})
    return seen

  def _make_small(self):
    """As few devices as it takes, a tiny backbone to train, no figures."""
    patch, make_mesh = self._patch, sharding.make_mesh
    patch.setattr(
      sharding, "make_mesh",
      lambda devices=None, fsdp=1: make_mesh(jax.devices()[:fsdp], fsdp),
    )  # fmt: skip
    patch.setattr(sharding, "_LEAST", 64)
    patch.setitem(vit_config.VARIANTS, "Micro", (16, 1, 16, 2))
    patch.setattr(plots, "sweep_figure", mock.MagicMock())
    patch.setattr(wandb_run, "require_installed", lambda config: None)
    library = mock.MagicMock(init=self._see_told)
    library.Settings.model_fields = ("finish_timeout",)
    patch.setattr(wandb_run, "wandb", library)
    # A round number.
    patch.setattr(
      passes, "pack_bytes", lambda inputs, trials, *_: len(trials) * 2**20
    )

  def _make_once(self):
    """Functions that depend on their arguments alone."""
    patch = self._patch
    for module, name in (
      (optim, "make_schedule"), (split_forward, "make_split_forward"),
      (datasets, "open_ref"),
    ):  # fmt: skip
      patch.setattr(module, name, functools.cache(getattr(module, name)))
    patch.setattr(optim, "make_optimizer", once(optim.make_optimizer))
    for name in ("train_batches", "eval_batches"):
      patch.setattr(batching, name, self._replayed(getattr(batching, name)))

  def _replayed(self, make):
    """Batches are read once; as long as some are missing, from where it was."""
    known = {}

    def replayed(source, *args, **options):
      self._see("waits", source.stall_timeout)
      args = (source, *args)
      key = key_of(args, options)
      # With the arguments: what has the number of a key must stay alive.
      kept, rest, _ = known.setdefault(
        key, ([], make(*args, **options), (args, options))
      )
      self._generators.append(rest)
      i = 0
      while True:
        if i == len(kept):
          try:
            kept.append(next(rest))
          except StopIteration:
            return
          except Exception:
            del known[key]
            raise
        yield kept[i]
        i += 1

    return replayed

  def _look(self):
    """At what passes between the modules."""
    self._wrap(inputs, "open_backbone", after=self._see_backbone)
    self._wrap(fit, "start", after=self._see_start)
    self._wrap(fit, "fit", self._see_fit, self._see_learned)
    self._wrap(Step, "__call__", before=self._see_step)
    self._wrap(Step, "gradient", before=self._see_part)
    self._wrap(RunCache, "rows", after=self._see_rows)
    self._wrap(evaluate, "evaluate_source", before=self._see_evaluation)
    self._wrap(sharding, "prefetch", after=self._see_batches)
    patch = self._patch
    patch.setattr(run_pictures, "attention_figures", self._see_pictures)
    patch.setattr(run_pictures, "confusion_figures", lambda *args: {})
    self._wrap(progress.Progress, "report", before=self._at("report"))
    self._wrap(fit.Checkpoints, "save", before=self._at("save"))
    for name in ("start_trace", "stop_trace"):
      note = self._at(name)
      self._patch.setattr(jax.profiler, name, lambda *args, note=note: note())

  def _wrap(self, owner, name, before=None, after=None):
    real = getattr(owner, name)

    def wrapped(*args, **options):
      if before:
        before(*args, **options)
      result = real(*args, **options)
      return result if after is None else after(result, *args)

    self._patch.setattr(owner, name, wrapped)

  def _see(self, key, value):
    self._seen[key].append(value)

  def _at(self, what):
    return lambda *args, **options: self._see("when", (what, self._step))

  def _see_backbone(self, backbone, *args):
    params = sharding.to_host(backbone.params)
    self._see(
      "backbone", (backbone.config, backbone.fingerprint,
                   trees.fingerprint(params)),
    )  # fmt: skip
    self._see("placement", [
      str(a.sharding.spec) for a in jax.tree.leaves(backbone.params)
    ])  # fmt: skip
    return backbone

  def _see_start(self, start, made, trials):
    for name, task in start.tasks.items():
      self._see("task", (name, task.spec, host(task.params)))
    self._see("identity", state.describe(made, trials))
    return start

  def _see_fit(self, step_fn, *args, steps, **options):
    self._step, total = 0, steps.total
    for schedule in step_fn.schedules.values():
      self._see("rates", [float(schedule(i)) for i in range(total)])

  def _see_learned(self, result, *args):
    state, _ = result
    self._see("learned", [host(task) for task in state.params.values()])
    return result

  def _see_step(self, *args):
    self._step += 1

  def _see_part(self, step, params, frozen, batch):
    self._see("parts", len(batch["label"]))

  def _see_rows(self, rows, *args):
    path = getattr(rows, "path", None)
    place = path and path.parents[1].name
    self._see("placement", (type(rows).__name__, place))
    return rows

  def _see_evaluation(self, predict, source, *args, **options):
    self._see("evaluated", (source.name, source.split))
    self._see("when", ("evaluate", self._step))

  def _see_pictures(self, made, task, predictions):
    self._see("pictures", (task.name, made.config.log_images))
    return {}

  def _see_told(self, **options):
    """The run itself takes whatever it is given."""
    name, workdir = options["name"], str(options["dir"])
    self._see(
      "told",
      {
        "name": "WORKDIR" if workdir.endswith(name) else name,
        **{key: options[key] for key in ("project", "entity", "group", "mode")},
      },
    )
    return mock.MagicMock()

  def _see_batches(self, batches, *args):
    evaluated = []
    for batch in batches:
      # Of what is kept, the first leaf stands for the image.
      shown = batch.get("image", batch.get("inputs"))
      image, label = map(
        np.asarray, (jax.tree.leaves(shown)[0], batch["label"])
      )
      if "mask" in batch:
        real = np.asarray(batch["mask"]) > 0
        self._see("evaluation batches", len(label))
        evaluated += [*zip(label[real], image[real], strict=True)]
      else:
        self._see("examples", label)
        self._see("crops", image)
      yield batch
    self._see("evaluated", evaluated)


def once(make):
  """`make`, which returns the same object for the same arguments."""
  known = {}

  def made(*args, **options):
    key = key_of(args, options)
    if key not in known:  # with the arguments, whose numbers are in the key
      known[key] = make(*args, **options), (args, options)
    return known[key][0]

  return made


def key_of(args, options):
  """Equal for equal arguments, and for the same objects."""

  def key(value):
    if isinstance(value, Mapping):
      return tuple((k, key(v)) for k, v in value.items())
    try:
      hash(value)
    except TypeError:
      return id(value)
    return value

  return tuple(map(key, args)), key(options)


def host(params):
  """{"cls": numbers, ...}"""
  return {k: np.asarray(v) for k, v in trees.flatten(params).items()}
