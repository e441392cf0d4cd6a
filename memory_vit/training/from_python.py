"""Training of a task by one call, on data and a backbone that Python has.

A door to `run.train_and_evaluate`: it makes the configuration and opens the
data. What the run leaves in its directory is as the command leaves it.
"""

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memory_vit import config as config_lib
from memory_vit.config import Config, StudyConfig
from memory_vit.data import in_memory
from memory_vit.data.reader import Reader
from memory_vit.errors import BackboneError, ConfigError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task
from memory_vit.plots import Scalars, read_scalars
from memory_vit.run_result import TrialResult
from memory_vit.runtime import paths, progress_bar
from memory_vit.tasks import store
from memory_vit.training import packing, resolve, run
from memory_vit.training.sweep import Trial

# How often a run is validated, and its training loss noted. What resumes loses
# no more than so many steps.
_EVALUATIONS, _POINTS = 5, 20
_MOST_LOST = 1_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """A task that was trained, and how that went.

  Attributes:
    task: of the best trial on the validation split.
    accuracy: of this task, in [0, 1]: on the test split where one was given,
      else on the validation split, which chose the task and so is optimistic.
    history: {"train/loss": (steps, values), "validation/top1": ...} of this
      trial, arrays; the names are those in TensorBoard.
    trials: the numbers of every trial, the best on validation first.
  """

  task: Task
  accuracy: float
  history: Scalars = dataclasses.field(repr=False)
  trials: tuple[TrialResult, ...] = dataclasses.field(repr=False)


def train_task(
  backbone: Backbone,
  train: Any,
  *,
  name: str,
  validation: Any = None,
  test: Any = None,
  class_names: Sequence[str] = (),
  keys: tuple[str, str] = ("image", "label"),
  regime: str = "memory_masked",
  cells: int = 5,
  epochs: float = 20,
  learning_rate: float | Sequence[float] | None = None,
  batch_size: int = 128,
  seed: int = 0,
  options: Mapping[str, Any] | None = None,
  workdir: str | os.PathLike[str] | None = None,
  progress: bool = True,
) -> TrainResult:
  """Train a task on a frozen backbone.

  The same run as that of `memory-vit train`, with the same result. Several
  learning rates are trials that share each pass over the images, in the regimes
  that allow it; the best on the validation split is returned.

  A split is one of

    (images, labels), two arrays or lists;
    a tf.data (not batched), torch or Hugging Face data set, a list, or anything
      else that is iterable or has `len`: of examples (image, label), or of
      dictionaries with `keys`. It is read once into memory;
    the folder DATA/train, DATA/test, ... of an image folder: the folders in
      DATA/train are the classes. Images are read as they are needed.

  An image is uint8 pixels (h, w, 3), (h, w), (h, w, 1) or (h, w, 4); the same
  in floating point, from 0 to 1; a tensor of torch (3, h, w); an image of
  Pillow; or the bytes of an image file. Images may have different sizes. They
  are prepared as the backbone states: random crops, half of them mirrored
  (`options`), and as `task.spec.evaluation` says for validation and test. A
  label is an integer from 0, or the name of a class.

  Args:
    backbone: from `load_backbone`.
    train: the training split.
    name: of the task; lower case letters, digits, "-" and "_".
    validation: on which the best step and the best trial are chosen; None holds
      out a tenth of `train`.
    test: on which the result is reported; None reports none.
    class_names: one per label; by default what the data state, else the names
      among the training labels, sorted, else "0", "1", ...
    keys: of the image and the label, where examples are dictionaries.
    regime: how the task is learned, see `regimes`.
    cells: memory cells per layer, in the regimes that have memory.
    epochs: passes over the training split.
    learning_rate: at its peak; several are tried, None tries those of our study
      (`config.StudyConfig`).
    batch_size: images in a step.
    seed: of the initial values, and of the order of the images.
    options: others of the command, {"data.flip": False} for `--config.data.flip
      =false`; docs/configs.md lists them.
    workdir: where the run keeps its states and results, and resumes if it is
      called again; None is a temporary directory, which is removed.
    progress: whether progress is shown.

  Raises:
    MemoryVitError: for input that cannot be used.
  """
  if not isinstance(backbone, Backbone):
    raise BackboneError(
      f"the backbone is of type {type(backbone).__name__}, expected one from "
      "mv.load_backbone."
    )
  with progress_bar.shown(progress), _directory(workdir) as directory:
    given = {"train": train, "validation": validation, "test": test}
    splits = _open(given, name, class_names, keys)
    rates = StudyConfig().learning_rates
    if learning_rate is not None:
      rates = tuple(np.ravel(learning_rate).tolist())
    config = _config(
      options or {},
      {
        "backbone": f"python:{backbone.config.variant}",
        "image_size": backbone.config.image_size,
        "dtype": backbone.config.dtype,
        "task.name": name,
        "regime": regime,
        "task.cells": cells,
        "epochs": epochs,
        "batch_size": batch_size,
        "seed": seed,
        **(
          {"learning_rate": rates[0]}
          if len(rates) == 1
          else {"sweep.learning_rate": rates}
        ),
      },
      splits["train"].size,
    )
    result = run.train_and_evaluate(
      config, directory, splits=splits, backbone=backbone
    )
    best = result.tasks[0]
    trial = Trial(best.name, best.varied, config)
    logdir = packing.logdirs_of([trial], directory)[best.name]
    accuracy = best.val_accuracy if test is None else best.test_accuracy
    return TrainResult(
      task=store.load_task(directory / "tasks" / name, backbone),
      accuracy=accuracy or 0.0,
      history=read_scalars(logdir),
      trials=result.tasks,
    )


@contextlib.contextmanager
def _directory(workdir: str | os.PathLike[str] | None) -> Iterator[Path]:
  if workdir is not None:
    yield paths.local(workdir, "workdir")
    return
  with tempfile.TemporaryDirectory(prefix="memory-vit-") as made:
    yield Path(made)


def _open(
  given: Mapping[str, Any],
  name: str,
  class_names: Sequence[str],
  keys: tuple[str, str],
) -> dict[str, Reader]:
  """Open the splits; without a validation split a tenth of train becomes it."""
  opened = {}
  for split, data in given.items():
    if data is not None:
      opened[split] = in_memory.open_data(
        data, name=name, split=split, class_names=class_names, keys=keys
      )
      class_names = opened["train"].class_names
  if "validation" not in opened:
    parts = in_memory.hold_out(opened["train"])
    opened["train"], opened["validation"] = parts
  return {split: Reader(source) for split, source in opened.items()}


def _config(
  options: Mapping[str, Any], said: Mapping[str, Any], examples: int
) -> Config:
  """The configuration of a run: what the arguments say, and the options."""
  for key in (*options.keys() & said.keys(), *options.keys() & {"gelu"}):
    raise ConfigError(
      f"options: {key!r} is said by the backbone or an argument of train_task."
    )
  # Who looks at attention looks at the task that is returned.
  values = {"batch_size_eval": said["batch_size"], "log_images": 0, **said}
  steps = resolve.steps_of(config_lib.replaced(Config(), values), examples)
  every = min(math.ceil(steps / _EVALUATIONS), _MOST_LOST)
  values["eval_every"] = values["checkpoint_every"] = every
  values["log_every"] = math.ceil(steps / _POINTS)
  return config_lib.replaced(Config(), {**values, **options})
