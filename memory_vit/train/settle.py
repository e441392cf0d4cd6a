"""Complete the configuration of a run, or refuse it.

`require_sound` refuses what is known to fail before anything is opened.
`settled` completes what a configuration leaves to its backbone and data, once
both are open. `require_fit` then refuses inputs that do not fit together.
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


# The value of options that are left to the backbone.
_BACKBONE = "backbone"
# What `config.epochs` -1 is. Fewer steps are too few for five images per class,
# see docs/own_data.md.
_EPOCHS, _LEAST_STEPS = 50, 25
# Splits that a Python caller may pass.
_ROLES = ("train", "validation", "test")


def task_name(config: Config) -> str:
  """The name of the task, else one from its data: "sun397/tfds" -> "sun397"."""
  if config.task.name:
    return config.task.name
  data = config.data
  name = Path(data.dir).name if data.name in OF_A_DIRECTORY else data.name
  # Letters without their accents: "März" -> "marz", "ß" -> "ss".
  name = unicodedata.normalize("NFKD", name.split("/")[0].casefold())
  name = "".join(c for c in name if not unicodedata.combining(c))
  name = re.sub(r"[^a-z0-9_-]+", "-", name)
  return name.strip("-_")


def with_splits(config: Config, splits: Mapping[str, Split]) -> Config:
  """Name splits that were opened in Python; refuse options that name others."""
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
      "config.data.digest is 'contents', which cannot be had of splits that "
      "are given from Python: expected 'files', and a version in their place."
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
  """Refuse what is known to fail, and make the working directory."""
  require_sound(config, workdir, mesh)
  processes.on_process_0(
    functools.partial(paths.make_directory, workdir, "--workdir")
  )


def require_sound(config: Config, workdir: Path, mesh: Mesh) -> None:
  """Refuse what is known to fail before anything is read or written."""
  paths.place(workdir, "--workdir")
  if not config.data.name:
    raise ConfigError(
      "config.data.name is empty: name a data set, as in "
      "--config=tfds:cifar10 or --config.data.name=cifar10."
    )
  if config.data.name in OF_A_DIRECTORY and not config.data.dir:
    raise ConfigError(
      f"config.data.dir is empty, and config.data.name {config.data.name!r}: "
      "give the directory of your data by --config.data.dir=DATA."
    )
  _require_outside_of_images(config, workdir)
  wandb_run.require_installed(config)
  _require_name(config)
  parent_directories(config)
  require_batches(config, mesh)
  require_memory(config)


def _require_outside_of_images(config: Config, workdir: Path) -> None:
  """Refuse a directory in which a run would add images or classes to a split.

  A later run would read its plots as images, and its directories as classes.
  """
  for ref in configured_splits(config).values():
    if ref.name != "folder" or bucket.is_in(workdir):
      continue
    root = paths.local(ref.dir, "config.data.dir")
    for name in ("train", *split_parts.split_names(ref.split)):
      if workdir.resolve().is_relative_to((root / name).resolve()):
        raise ConfigError(
          f"--workdir is {workdir}, which lies in {root / name}, a split of "
          "the data: expected a directory outside of it."
        )


def parent_directories(config: Config) -> tuple[list[Path], list[Path]]:
  """The tasks that the new one attends to, and all that those attend to."""
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
  """Refuse invalid names of tasks now, and not after training."""
  trials = sweep.trials_of(config, task_name(config))
  exported = sweep.exported_names(config, task_name(config), trials)
  for name in sorted(exported):
    if not is_name(name):
      raise ConfigError(
        f"the task would be called {messages.brief(name)}: give a name by "
        f"config.task.name, of {NAME_RULE}."
      )


def require_batches(config: Config, mesh: Mesh) -> None:
  """Refuse batches that the devices cannot share."""
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
        f"{key} is {size}: the images of a batch, of {config.image_size} px, "
        f"take {takes / 2**30:.1f} GiB, and this host has "
        f"{has / 2**30:.1f} GiB. Expected a smaller one."
      )


def require_same_start(config: Config) -> None:
  """Compare options, code, versions and devices of all processes."""
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
  """Complete what the configuration leaves to its backbone and its data."""
  _require_classes(train)
  config = _with_embeddings(config, train)
  config = with_backbone(config, backbone)
  config = with_steps(config, train.size)
  padded_head.require_width(config.task.padded_classes, train.num_classes)
  return config


def _require_classes(train: Split) -> None:
  """Refuse a single class, for which every model is right."""
  if advice := train.single_class():
    name = messages.brief(train.class_names[0])
    raise DataError(f"{train} has a single class, {name}: {advice}")


def with_backbone(config: Config, backbone: Backbone) -> Config:
  """Complete what the configuration leaves to its backbone.

  `eval_crop` stays "backbone" if the source of the backbone states it.
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
  """Take over, or compare, how the images of embeddings were prepared."""
  if not train.embedded:
    return config
  made = train.embedded.origin.preprocessing
  data = config.data
  if data.eval_crop == _BACKBONE:
    data = dataclasses.replace(data, eval_crop=made.crop, resize=made.resize)
  expected: dict[str, str | int] = {"eval_crop": made.crop}
  if made.resize:
    expected["resize"] = made.resize
  for key, value in expected.items():
    if getattr(data, key) != value:
      raise ConfigError(
        f"config.data.{key} is {getattr(data, key)!r}, and the embeddings were "
        f"made with {value!r}: expected that, or config.data.eval_crop "
        f"{_BACKBONE!r}, which takes over how they were made."
      )
  return dataclasses.replace(config, data=data)


def stated_gelu(config: Config) -> str | None:
  return None if config.gelu == _BACKBONE else config.gelu


def made_gelu(config: Config) -> str:
  """The GELU of a randomly initialized backbone."""
  return stated_gelu(config) or "tanh"


def with_steps(config: Config, examples: int) -> Config:
  """Set `total_steps` from `epochs`, if these are set."""
  if not config.epochs:
    return config
  steps = steps_of(config, examples)
  logger.info(
    "%g epochs of %d examples are %d steps of %d",
    steps * config.batch_size / examples, examples, steps, config.batch_size,
  )  # fmt: skip
  return dataclasses.replace(config, total_steps=steps)


def steps_of(config: Config, examples: int) -> int:
  """The number of steps of a run with `examples` training examples."""
  if not config.epochs:
    return config.total_steps
  if config.epochs < 0:
    return max(_LEAST_STEPS, math.ceil(_EPOCHS * examples / config.batch_size))
  # The decimal number: in binary, 0.07 of 100 is a little more than 7.
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
  """Load the task of `config.task.init`; refuse a head that does not suit."""
  where = f"config.task.init {messages.brief(config.task.init)}"
  if not config.task.init:
    return None
  task = store.load_task(_parent(config.task.init, where), backbone)
  spec = task.spec
  if not spec.learned.on_pooled:
    raise ConfigError(
      f"{where} is a task of the regime {spec.regime!r}, whose head reads "
      "other features than the backbone's: expected one of 'head'."
    )
  kind, names = config.task.kind, train.class_names
  if (spec.kind.name, spec.num_classes) != (kind, len(names)) or (
    spec.class_names and spec.class_names != names
  ):
    raise ConfigError(
      f"{where} is a task of {spec.num_classes:,} {spec.kind.name} "
      f"({messages.brief(spec.class_names)}), and {train} has {len(names):,} "
      f"{kind} ({messages.brief(names)}): expected the same, in this order."
    )
  if spec.kind.units != config.task.units:
    raise ConfigError(
      f"{where} is a task in the units {messages.brief(spec.kind.units)}, and "
      f"config.task.units is {messages.brief(config.task.units)}: expected the "
      "same."
    )
  for trial in trials:
    _require_begins_as_head(trial.config, backbone, where)
  _warn_of_validation(config, task, where)
  return task


def head_digest(first_head: Task | None) -> list[Any]:
  """What training that begins with a head depends on, as JSON values."""
  if first_head is None:
    return []
  kind = first_head.spec.kind
  return [first_head.digest, kind.temperature, [*kind.mean], [*kind.std]]


def _warn_of_validation(config: Config, task: Task, where: str) -> None:
  """Warn if validation may hold images on which the head was trained."""
  made = task.provenance.get("config")
  data = made.get("data") if isinstance(made, Mapping) else None
  train = data.get("train") if isinstance(data, Mapping) else None
  if config.data.validation and train != config.data.train:
    logger.warning(
      "%s was trained on %s, and this run on %s: if images of its validation, "
      "%s, are among the former, validation flatters the first steps, and "
      "temperatures. Give both the same splits.",
      where, messages.brief(train), messages.brief(config.data.train),
      messages.brief(config.data.validation),
    )  # fmt: skip


def _require_begins_as_head(
  config: Config, backbone: Backbone, where: str
) -> None:
  """Refuse a regime whose first features are not the backbone's."""
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
      f"{where} gives the head of a run that would begin otherwise: the regime "
      f"{config.regime!r} {problem}. Expected '', or a regime such as "
      "'side_masked' on a backbone with a class token, or 'full'."
    )


def _require_new_names(
  config: Config, parents: Sequence[Task], trials: Sequence[Trial]
) -> None:
  """Refuse a task with the name of one that it attends to."""
  names = sweep.exported_names(config, task_name(config), trials)
  taken = sorted(names & {task.spec.name for task in parents})
  if taken:
    raise ConfigError(
      f"config.task.name: {taken} are names of tasks in config.task.attends_to "
      "or config.task.indirect, or of what those attend to. Give the new task "
      "another one."
    )


def _require_same_outputs(config: Config, splits: Mapping[str, Split]) -> None:
  """Refuse splits of other classes, labels or values than the training split.

  That of `config.upstream` has the classes of the backbone.
  """
  kind, train = config.task.kind, splits["train"]
  for role in _ROLES:
    split = splits.get(role, train)
    if split.kind != kind:
      raise DataError(
        f"config.task.kind is {kind!r}, but {split} has {split.kind}: expected "
        f"{kind}, or another config.task.kind."
      )
    if split.class_names != train.class_names:
      raise DataError(
        f"the split for {role!r}, {split}, has {split.num_classes} {kind} "
        f"other than the {train.num_classes} of {train}."
      )


def task_kind(config: Config, train: Split) -> TaskKind:
  """The kind of the task, with statistics of values; all must call."""
  kind, units = config.task.kind, config.task.units
  if not KINDS[kind].needed:
    return TaskKind(name=kind)
  if units and len(units) != train.num_classes:
    raise ConfigError(
      f"config.task.units is {messages.brief(units)}, and {train} has "
      f"{train.num_classes} values: expected a unit for each, or ()."
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
        f"{value} has mean {center:.3g} and standard deviation {spread:.3g}, "
        f"expected at most {MAX_SCALE:g}, and {1 / MAX_SCALE:g} or more for "
        "the deviation: give it in another unit."
      )
  return TaskKind(name=kind, mean=tuple(mean), std=tuple(std), units=units)


def _require_embeddings_of(
  backbone: Backbone, config: Config, split: Split
) -> None:
  """Refuse embeddings that this backbone would not compute."""
  if not split.embedded:
    return
  made, found = split.embedded.origin, backbone.id
  options = (
    ("image_size", made.backbone.image_size, found.image_size),
    ("gelu", made.backbone.gelu, found.gelu),
    ("dtype", made.dtype, backbone.config.dtype),
  )
  for key, expected, value in options:
    # If the weights differ, they are the cause.
    if value != expected and made.backbone.fingerprint == found.fingerprint:
      raise ConfigError(
        f"config.{key} is {value!r}, and the embeddings of {split} "
        f"were made with {expected!r}: expected that."
      )
  width, summary = backbone.config.width, backbone.config.summary_tokens
  shapes = {"pooled": (width,), "layers": (summary, width)}
  if made.backbone != found or made.shapes != shapes:
    raise BackboneError(
      f"{split}: the embeddings are of {made.backbone}, with values of "
      f"the shapes {messages.brief(dict(made.shapes))}, and config.backbone is "
      f"{found}, which makes {shapes}: expected the one that made them."
    )


def _require_prepared_alike(train: Split, split: Split) -> None:
  """Refuse embeddings of images that were prepared otherwise than train's.

  A task records one preprocessing, which all its splits must have.
  """
  if not (train.embedded and split.embedded):
    return
  expected = dataclasses.asdict(train.embedded.origin.preprocessing)
  found = dataclasses.asdict(split.embedded.origin.preprocessing)
  different = [key for key in expected if found[key] != expected[key]]
  if different:
    first, second = (
      ", ".join(f"{key} {values[key]!r}" for key in different)
      for values in (found, expected)
    )
    raise DataError(
      f"{split}: the images of these embeddings were prepared with "
      f"{first}, and those of {train} with {second}: embed all splits "
      "with the same --task, or all without one."
    )


def require_same_data(
  backbone: Backbone,
  splits: Mapping[str, Split],
  parents: Sequence[Task],
  first_head: Task | None = None,
) -> None:
  """Compare backbone, tasks, classes and files between all processes.

  Not modification times: copies on several hosts differ in them.
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
  """SHA-256 of this package on this host."""
  digest = hashlib.sha256()
  package = Path(__file__).parents[1]
  for file in sorted(package.rglob("*.py")):
    digest.update(file.relative_to(package).as_posix().encode())
    digest.update(file.read_bytes())
  return digest.hexdigest()[:16]
