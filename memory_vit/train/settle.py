"""Complete the configuration of a run, or refuse it.

Before anything is opened, `require_sound` refuses options that are known to
fail. Once backbone and data are open, `settled` fills in the options that
depend on them, and `require_fit` refuses inputs that do not fit together.
"""

import dataclasses
import fractions
import functools
import hashlib
import json
import logging
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import flax
import jax
import numpy as np
import optax
import psutil
from jax.sharding import Mesh

from memory_vit.config import (
  EMBEDDINGS,
  Config,
  DataConfig,
  UpstreamConfig,
  beyond_the_end,
  to_dict,
)
from memory_vit.data import split_parts
from memory_vit.data.split import Split
from memory_vit.data.split_ref import OF_A_DIRECTORY, configured_splits
from memory_vit.data.subset import value_statistics
from memory_vit.errors import BackboneError, ConfigError, DataError
from memory_vit.kinds import KINDS, TaskKind
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import NAME_RULE, Task, is_name
from memory_vit.runtime import (
  bucket,
  hub,
  messages,
  paths,
  processes,
  sharding,
)
from memory_vit.tasks import find, store
from memory_vit.tasks.manifest import MAX_SCALE
from memory_vit.train import padded_head, sweep, wandb_run
from memory_vit.train.sweep import Trial

_Part = TypeVar("_Part", DataConfig, UpstreamConfig)

logger = logging.getLogger(__name__)


# An option set to this text gets its value from the backbone.
_BACKBONE = "backbone"
# Number of epochs, and minimum number of steps, if `config.epochs` is -1. With
# five images per class, fewer steps can lose accuracy, see docs/own_data.md.
_EPOCHS, _LEAST_STEPS = 50, 25
# Names of the splits that a Python caller may pass.
_ROLES = ("train", "validation", "test")


def task_name(config: Config) -> str:
  """Return the task's name, by default "sun397" for the data "sun397/tfds"."""
  if config.task.name:
    return config.task.name
  data = config.data
  name = Path(data.dir).name if data.name in OF_A_DIRECTORY else data.name
  # Remove case and accents: "März" becomes "marz", and "ß" becomes "ss".
  name = unicodedata.normalize("NFKD", name.split("/")[0].casefold())
  name = "".join(c for c in name if not unicodedata.combining(c))
  name = re.sub(r"[^a-z0-9_-]+", "-", name)
  return name.strip("-_")


def with_splits(config: Config, splits: Mapping[str, Split]) -> Config:
  """Set `config.data` from given splits; refuse options that name data."""
  unknown = [role for role in splits if role not in _ROLES]
  if unknown or "train" not in splits:
    raise DataError(
      f"splits are given for {[*splits]}, expected 'train', and perhaps "
      "'validation' and 'test'."
    )
  data = config.data
  for key in ("name", "dir", "label"):
    if value := getattr(data, key):
      raise ConfigError(
        f"config.data.{key} is {value!r}, but the splits are given from "
        "Python: expected ''."
      )
  if data.digest != "files":
    raise ConfigError(
      "config.data.digest is 'contents', which is not possible for splits that "
      "are given from Python: expected 'files'. When contents change, change "
      "the argument `version` of open_indexable."
    )
  train = splits["train"]
  data = dataclasses.replace(
    data,
    name=train.name,
    train=train.split,
    validation=splits["validation"].split if "validation" in splits else "",
    test=splits["test"].split if "test" in splits else "",
  )
  return dataclasses.replace(config, data=data)


def require_possible(config: Config, workdir: Path, mesh: Mesh) -> None:
  """Refuse options known to fail, and make the working directory."""
  require_sound(config, workdir, mesh)
  processes.on_process_0(
    functools.partial(paths.make_directory, workdir, "--workdir")
  )


def require_sound(config: Config, workdir: Path, mesh: Mesh) -> None:
  """Refuse options known to fail, before anything is read or written."""
  paths.place(workdir, "--workdir")
  if not config.data.name:
    raise ConfigError(
      "config.data.name is empty: name a data set, as in "
      "--config=tfds:cifar10 or --config.data.name=cifar10."
    )
  if config.data.name in OF_A_DIRECTORY and not config.data.dir:
    raise ConfigError(
      f"config.data.dir is empty, but data set {config.data.name!r} needs it: "
      "give the directory of your data by --config.data.dir=DATA."
    )
  _require_outside_of_images(config, workdir)
  wandb_run.require_installed(config)
  _require_name(config)
  parent_directories(config)
  require_batches(config, mesh)
  require_memory(config)


def _require_outside_of_images(config: Config, workdir: Path) -> None:
  """Refuse a working directory within a split of image folders.

  A later run would read the plots of this run as images, and the folders of
  this run as classes.
  """
  for ref in configured_splits(config).values():
    if ref.name != "folder" or bucket.is_in(workdir):
      continue
    root = paths.local(ref.dir, "config.data.dir")
    for name in ("train", *split_parts.split_names(ref.split)):
      if workdir.resolve().is_relative_to((root / name).resolve()):
        raise ConfigError(
          f"--workdir is {workdir}, which lies in {root / name}, a split of "
          "the data: expected a directory outside of this split."
        )


def parent_directories(config: Config) -> tuple[list[Path], list[Path]]:
  """Return (directories of `attends_to`, directories of all ancestors)."""
  attends_to, indirect = (
    [_parent(p, f"config.task.{key}") for p in getattr(config.task, key)]
    for key in ("attends_to", "indirect")
  )
  return attends_to, find.ancestor_directories(attends_to, indirect)


def _parent(path: str, where: str) -> Path:
  if hub.is_address(path):
    return find.one_task(path)
  return paths.place(path, where)


def _require_name(config: Config) -> None:
  """Refuse invalid task names before training, rather than at the export."""
  trials = sweep.trials_of(config, task_name(config))
  exported = sweep.exported_names(config, task_name(config), trials)
  for name in sorted(exported):
    if not is_name(name):
      raise ConfigError(
        f"the task would be called {messages.brief(name)}, which is not a "
        f"valid name: expected a config.task.name of {NAME_RULE}."
      )


def require_batches(config: Config, mesh: Mesh) -> None:
  """Refuse batch sizes that the devices cannot share evenly."""
  parts = config.optim.accumulation_steps
  for key, size in (
    ("config.batch_size", config.batch_size),
    ("config.batch_size_eval", config.batch_size_eval),
    (
      "config.batch_size / config.optim.accumulation_steps",
      config.batch_size // parts,
    ),
  ):
    sharding.require_divisible(size, mesh, key)


def require_memory(config: Config) -> None:
  """Refuse a batch whose images do not fit into the memory of this host."""
  if config.data.name == EMBEDDINGS:  # no images are read
    return
  image = 3 * 4 * config.image_size**2  # float32 RGB
  has = psutil.virtual_memory().total
  sizes = {
    "config.batch_size": config.batch_size,
    "config.batch_size_eval": config.batch_size_eval,
  }
  for key, size in sizes.items():
    takes = size // jax.process_count() * image
    if takes > has:
      raise ConfigError(
        f"{key} is {size}: the images of a batch ({config.image_size} px) "
        f"take {takes / 2**30:.1f} GiB, but this host has "
        f"{has / 2**30:.1f} GiB. Expected a smaller batch."
      )


def require_same_start(config: Config) -> None:
  """Raise unless all processes have equal options, code, versions, devices."""
  if jax.process_count() == 1:
    return
  options = trees.flatten(json.loads(json.dumps(to_dict(config))))
  facts = {f"config.{k.replace('/', '.')}": t for k, t in options.items()}
  facts["code of memory_vit (SHA-256)"] = _code_digest()
  for module in (jax, flax, optax, np):
    facts[f"version of {module.__name__}"] = module.__version__
  facts["kind of devices"] = jax.devices()[0].device_kind
  processes.require_same("configuration", facts)


def settled(config: Config, backbone: Backbone, train: Split) -> Config:
  """Fill in the options that the configuration leaves to backbone and data."""
  _require_classes(train)
  config = _with_embeddings(config, train)
  config = with_backbone(config, backbone)
  config = with_steps(config, train.size)
  padded_head.require_width(config.task.padded_classes, train.num_classes)
  return config


def _require_classes(train: Split) -> None:
  """Refuse data of a single class, on which every model is right."""
  if advice := train.single_class():
    name = messages.brief(train.class_names[0])
    raise DataError(f"{train} has a single class, {name}: {advice}")


def with_backbone(config: Config, backbone: Backbone) -> Config:
  """Fill in the options that the configuration leaves to its backbone.

  `eval_crop` stays "backbone" if the backbone comes with a preprocessing.
  """
  return dataclasses.replace(
    config,
    image_size=backbone.config.image_size,
    gelu=backbone.config.gelu,
    dtype=backbone.config.dtype,
    data=_with_crop(config.data, backbone),
    upstream=_with_crop(config.upstream, backbone),
  )


def _with_crop(part: _Part, backbone: Backbone) -> _Part:
  if part.eval_crop != _BACKBONE or backbone.preprocessing:
    return part
  return dataclasses.replace(part, eval_crop="resize")


def _with_embeddings(config: Config, train: Split) -> Config:
  """If `train` holds embeddings, return `config` with their preprocessing.

  Refuse options that ask for another preprocessing.
  """
  if not train.embedded:
    return config
  prep = train.embedded.origin.preprocessing
  data = config.data
  if data.eval_crop == _BACKBONE:
    data = dataclasses.replace(data, eval_crop=prep.crop, resize=prep.resize)
  expected: dict[str, str | int] = {"eval_crop": prep.crop}
  if prep.resize:
    expected["resize"] = prep.resize
  for key, value in expected.items():
    if getattr(data, key) != value:
      raise ConfigError(
        f"config.data.{key} is {getattr(data, key)!r}, but the embeddings were "
        f"made with {value!r}. Set config.data.{key} to {value!r}, or set "
        f"config.data.eval_crop to {_BACKBONE!r}, which stands for the "
        "eval_crop and resize of the embeddings."
      )
  return dataclasses.replace(config, data=data)


def stated_gelu(config: Config) -> str | None:
  return None if config.gelu == _BACKBONE else config.gelu


def made_gelu(config: Config) -> str:
  """Return the GELU of a backbone that is randomly initialized."""
  return stated_gelu(config) or "tanh"


def with_steps(config: Config, examples: int) -> Config:
  """Compute `total_steps` from `epochs`, if `epochs` is set."""
  if not config.epochs:
    return config
  steps = steps_of(config, examples)
  logger.info(
    "%g epochs of %d examples are %d steps of %d",
    steps * config.batch_size / examples, examples, steps, config.batch_size,
  )  # fmt: skip
  return dataclasses.replace(config, total_steps=steps)


def steps_of(config: Config, examples: int) -> int:
  """Return the number of steps of a run with `examples` training examples."""
  if not config.epochs:
    return config.total_steps
  if config.epochs < 0:
    return max(_LEAST_STEPS, math.ceil(_EPOCHS * examples / config.batch_size))
  # Multiply epochs as decimals: as floats, 0.07 * 100 would round up to 8.
  epochs = fractions.Fraction(str(config.epochs))
  return math.ceil(epochs * examples / config.batch_size)


def require_fit(
  config: Config,
  backbone: Backbone,
  splits: Mapping[str, Split],
  parents: Sequence[Task],
  trials: Sequence[Trial],
  first_head: Task | None = None,
) -> None:
  """Refuse opened inputs that do not fit together; all processes must call."""
  for trial in trials:
    for problem in beyond_the_end(trial.config):
      raise ConfigError(problem)
  _require_new_names(config, parents, trials)
  _require_same_outputs(config, splits)
  for split in splits.values():
    _require_embeddings_of(backbone, config, split)
    _require_prepared_alike(splits["train"], split)
  require_same_data(backbone, splits, parents, first_head)


def load_first_head(
  config: Config, backbone: Backbone, train: Split, trials: Sequence[Trial]
) -> Task | None:
  """Load the task of `config.task.init`; refuse a head unfit for this run."""
  where = f"config.task.init {messages.brief(config.task.init)}"
  if not config.task.init:
    return None
  task = store.load_task(_parent(config.task.init, where), backbone)
  spec = task.spec
  if not spec.learned.on_pooled:
    raise ConfigError(
      f"{where} is a task of the regime {spec.regime!r}, whose head "
      "does not read the pooled features: expected a task of regime 'head'."
    )
  kind, names = config.task.kind, train.class_names
  if (spec.kind.name, spec.num_classes) != (kind, len(names)) or (
    spec.class_names and spec.class_names != names
  ):
    raise ConfigError(
      f"{where} is a task of {spec.num_classes:,} {spec.kind.name} "
      f"({messages.brief(spec.class_names)}), but {train} has {len(names):,} "
      f"{kind} ({messages.brief(names)}): expected the same names in the same "
      "order."
    )
  if spec.kind.units != config.task.units:
    raise ConfigError(
      f"{where} is a task in the units {messages.brief(spec.kind.units)}, but "
      f"config.task.units is {messages.brief(config.task.units)}: expected the "
      "same units."
    )
  for trial in trials:
    _require_begins_as_head(trial.config, backbone, where)
  _warn_of_validation(config, task, where)
  return task


def head_digest(first_head: Task | None) -> list[Any]:
  """Return JSON values that identify the initial head; [] if there is none."""
  if first_head is None:
    return []
  kind = first_head.spec.kind
  return [first_head.digest, kind.temperature, [*kind.mean], [*kind.std]]


def _warn_of_validation(config: Config, task: Task, where: str) -> None:
  """Warn if the initial head may have been trained on validation images."""
  earlier = task.provenance.get("config")
  data = earlier.get("data") if isinstance(earlier, Mapping) else None
  train = data.get("train") if isinstance(data, Mapping) else None
  if config.data.validation and train != config.data.train:
    logger.warning(
      "%s was trained on %s, but this run trains on %s: if its head has seen "
      "images of this run's validation split, %s, then validation flatters the "
      "first steps and the temperatures. Give both runs the same splits.",
      where, messages.brief(train), messages.brief(config.data.train),
      messages.brief(config.data.validation),
    )  # fmt: skip


def _require_begins_as_head(
  config: Config, backbone: Backbone, where: str
) -> None:
  """Refuse a regime whose head does not read pooled features at step 0."""
  regime, problem = config.learned, ""
  if not regime.begins_as_head:
    problem = "reads other features"
  elif regime.has("cls") and config.task.cls_init != "pretrained":
    problem = "begins with a random class token (config.task.cls_init 'normal')"
  elif regime.has("cls") and backbone.config.pooling != "tok":
    problem = (
      "reads a token of its own, while the head of this backbone reads "
      f"the pooled patches (pooling {backbone.config.pooling!r})"
    )
  if problem:
    raise ConfigError(
      f"{where} has a head that reads the backbone's pooled features, but the "
      f"regime {config.regime!r} {problem}. Leave config.task.init out, or "
      "give the regime 'full'. If the backbone has a class token, you can also "
      "give a regime such as 'side_masked'."
    )


def _require_new_names(
  config: Config, parents: Sequence[Task], trials: Sequence[Trial]
) -> None:
  """Refuse a new task with the name of a task that it attends to."""
  names = sweep.exported_names(config, task_name(config), trials)
  taken = sorted(names & {task.spec.name for task in parents})
  if taken:
    raise ConfigError(
      f"new tasks would have names that are already in use: {taken}. Tasks in "
      "config.task.attends_to or config.task.indirect, or their ancestors, "
      "have these names. Give another config.task.name."
    )


def _require_same_outputs(config: Config, splits: Mapping[str, Split]) -> None:
  """Refuse splits with other classes, labels or values than the training split.

  The split of `config.upstream` is exempt: it has the backbone's classes.
  """
  kind, train = config.task.kind, splits["train"]
  for role in _ROLES:
    split = splits.get(role, train)
    if split.kind != kind:
      raise DataError(
        f"config.task.kind is {kind!r}, but {split} has {split.kind}: expected "
        f"a split with {kind}, or another config.task.kind."
      )
    if split.class_names != train.class_names:
      raise DataError(
        f"{split} (used for {role!r}) has {split.num_classes} {kind}, and "
        f"{train} has {train.num_classes}, but their names differ: expected "
        "equal names in the same order."
      )


def task_kind(config: Config, train: Split) -> TaskKind:
  """Return the task's kind, with value statistics; all processes must call."""
  kind, units = config.task.kind, config.task.units
  if not KINDS[kind].needed:
    return TaskKind(name=kind)
  if units and len(units) != train.num_classes:
    raise ConfigError(
      f"config.task.units is {messages.brief(units)}, but {train} has "
      f"{train.num_classes} values: expected a unit for each value, or ()."
    )
  mean, std = processes.on_process_0(
    lambda: [numbers.tolist() for numbers in value_statistics(train)]
  )
  for name, center, spread in zip(train.class_names, mean, std, strict=True):
    value = f"{train}: the value {messages.brief(name)}"
    if not spread:
      raise DataError(
        f"{value} is the same for all examples (to 15 digits): expected values "
        "that differ."
      )
    if abs(center) > MAX_SCALE or not 1 / MAX_SCALE <= spread <= MAX_SCALE:
      raise DataError(
        f"{value} has mean {center:.3g} and standard deviation {spread:.3g}: "
        f"expected at most {MAX_SCALE:g} for both, and at least "
        f"{1 / MAX_SCALE:g} for the deviation. Give the value in another unit."
      )
  return TaskKind(name=kind, mean=tuple(mean), std=tuple(std), units=units)


def _require_embeddings_of(
  backbone: Backbone, config: Config, split: Split
) -> None:
  """Refuse embeddings made by another backbone or with different options."""
  if not split.embedded:
    return
  origin, used = split.embedded.origin, backbone.id
  options = (
    ("image_size", origin.backbone.image_size, used.image_size),
    ("gelu", origin.backbone.gelu, used.gelu),
    ("dtype", origin.dtype, backbone.config.dtype),
  )
  for key, expected, value in options:
    # If the fingerprints differ, raise the `BackboneError` below instead, which
    # names both backbones.
    if value != expected and origin.backbone.fingerprint == used.fingerprint:
      raise ConfigError(
        f"config.{key} is {value!r}, but the embeddings of {split} "
        f"were made with {expected!r}: expected the value of the embeddings."
      )
  width, summary = backbone.config.width, backbone.config.summary_tokens
  shapes = {"pooled": (width,), "layers": (summary, width)}
  if origin.backbone != used or origin.shapes != shapes:
    raise BackboneError(
      f"{split}: the embeddings were made by {origin.backbone}, with the "
      f"shapes {messages.brief(dict(origin.shapes))}, but config.backbone is "
      f"{used}, with the shapes {shapes}: expected the backbone that made the "
      "embeddings."
    )


def _require_prepared_alike(train: Split, split: Split) -> None:
  """Refuse embeddings whose preprocessing differs from the training split's.

  A task records one preprocessing, which all its splits must share.
  """
  if not (train.embedded and split.embedded):
    return
  expected = dataclasses.asdict(train.embedded.origin.preprocessing)
  preprocessing = dataclasses.asdict(split.embedded.origin.preprocessing)
  different = [key for key in expected if preprocessing[key] != expected[key]]
  if different:
    first, second = (
      ", ".join(f"{key} {values[key]!r}" for key in different)
      for values in (preprocessing, expected)
    )
    raise DataError(
      f"{split}: the images of these embeddings were prepared with "
      f"{first}, but the images of {train} with {second}: embed all splits "
      "with the same --task, or all without --task."
    )


def require_same_data(
  backbone: Backbone,
  splits: Mapping[str, Split],
  parents: Sequence[Task],
  first_head: Task | None = None,
) -> None:
  """Raise unless backbone, tasks, classes and files are equal on all processes.

  Modification times are not compared: they differ between copies of a file.
  """
  if jax.process_count() == 1:
    return
  facts: dict[str, Any] = {"backbone": backbone.fingerprint}
  for task in parents:
    facts[f"task {task.spec.name!r}"] = task.digest
  facts["config.task.init"] = head_digest(first_head)
  for name, split in splits.items():
    key = "config.upstream" if name == "upstream" else f"config.data.{name}"
    facts[f"{key}: size"] = split.size
    facts[f"{key}: classes"] = list(split.class_names)
    facts[f"{key}: names and sizes of files"] = split.data_files.sizes()
  processes.require_same("data", facts)


def _code_digest() -> str:
  """Return 16 digits of the SHA-256 of this package's Python files."""
  digest = hashlib.sha256()
  package = Path(__file__).parents[1]
  for file in sorted(package.rglob("*.py")):
    digest.update(file.relative_to(package).as_posix().encode())
    digest.update(file.read_bytes())
  return digest.hexdigest()[:16]
