"""Refuses runs that are bound to fail, before anything is read or trained."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import psutil
from jax.sharding import Mesh

from memory_vit.config import EMBEDDINGS, Config, beyond_the_end
from memory_vit.data.reader import Reader
from memory_vit.data.split_ref import OF_A_DIRECTORY
from memory_vit.errors import BackboneError, ConfigError, DataError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import NAME_PATTERN
from memory_vit.runtime import messages, paths, processes, sharding
from memory_vit.tasks.ancestors import ancestor_directories
from memory_vit.train import resolve, sweep, wandb_run
from memory_vit.train.sweep import Trial
from memory_vit.train.trainer import Trainer


def require_possible(config: Config, workdir: Path, mesh: Mesh) -> None:
  """Refuse what can be known to fail, and make the working directory."""
  require_sound(config, workdir, mesh)
  processes.on_process_0(
    functools.partial(paths.make_directory, workdir, "--workdir")
  )


def require_sound(config: Config, workdir: Path, mesh: Mesh) -> None:
  """Refuse what can be known to fail before anything is read or written."""
  if "://" in str(workdir) or ":/" in str(workdir):
    raise ConfigError(f"--workdir is {workdir}, expected a local directory.")
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
  if config.pretrain.variant and not config.pretrain.data.name:
    raise ConfigError(
      "config.pretrain.data.name is empty: name the data set that the backbone "
      "learns."
    )
  wandb_run.require_installed(config)
  _require_name(config)
  parent_directories(config)
  _require_batches(config, mesh)
  require_memory(config)


def parent_directories(config: Config) -> tuple[list[Path], list[Path]]:
  """The tasks that the new one attends to, and all that those attend to.

  Raises:
    ConfigError: for what the operating system takes for no path.
    TaskError: for what is no task, and where one that is needed is not found.
  """
  attends_to, indirect = (
    [paths.local(p, f"config.task.{key}") for p in getattr(config.task, key)]
    for key in ("attends_to", "indirect")
  )
  return attends_to, ancestor_directories(attends_to, indirect)


def _require_name(config: Config) -> None:
  """Refuse what would be no name of a task once it is trained."""
  for name in sorted(sweep.exported_names(config, resolve.task_name(config))):
    if not NAME_PATTERN.fullmatch(name):
      raise ConfigError(
        f"the task would be called {messages.brief(name)}: give a name "
        f"by config.task.name, of the form {NAME_PATTERN.pattern}."
      )


def _require_batches(config: Config, mesh: Mesh) -> None:
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
  if config.pretrain.variant:
    sharding.require_divisible(
      config.pretrain.batch_size, mesh, "config.pretrain.batch_size"
    )


def require_memory(config: Config) -> None:
  """Refuse a batch whose images alone this host cannot hold."""
  if config.data.name == EMBEDDINGS:  # there are none
    return
  image = 3 * 4 * config.image_size**2  # float32 RGB
  has = psutil.virtual_memory().total
  sizes = {
    "config.batch_size": config.batch_size,
    "config.batch_size_eval": config.batch_size_eval,
  }
  if config.pretrain.variant:
    sizes["config.pretrain.batch_size"] = config.pretrain.batch_size
  for key, size in sizes.items():
    takes = size // jax.process_count() * image
    if takes > has:
      raise ConfigError(
        f"{key} is {size}: the images of a batch, of {config.image_size} px, "
        f"take {takes / 2**30:.1f} GiB, and this host has "
        f"{has / 2**30:.1f} GiB. Expected a smaller one."
      )


def require_classes(train: Reader) -> None:
  """Refuse a single class, which every model is right about.

  Raises:
    DataError: says what may be wrong with the folders.
  """
  if advice := train.source.single_class():
    name = messages.brief(train.class_names[0])
    raise DataError(f"{train.source} has a single class, {name}: {advice}")


def require_embeddings_of(
  backbone: Backbone, config: Config, reader: Reader
) -> None:
  """Refuse embeddings that this backbone would not make, as it is configured.

  Data of images pass.

  Raises:
    BackboneError: where they are of another backbone.
    ConfigError: where an option makes it compute something else.
  """
  if not reader.source.embedded:
    return
  made, found = reader.source.embedded.origin, backbone.id
  options = (
    ("image_size", made.backbone.image_size, found.image_size),
    ("gelu", made.backbone.gelu, found.gelu),
    ("dtype", made.dtype, backbone.config.dtype),
  )
  for key, expected, value in options:
    # With other weights, that is not what is wrong.
    if value != expected and made.backbone.fingerprint == found.fingerprint:
      raise ConfigError(
        f"config.{key} is {value!r}, and the embeddings of {reader.source} "
        f"were made with {expected!r}: expected that."
      )
  width, summary = backbone.config.width, backbone.config.summary_tokens
  shapes = {"pooled": (width,), "layers": (summary, width)}
  if made.backbone != found or made.shapes != shapes:
    raise BackboneError(
      f"{reader.source}: the embeddings are of {made.backbone}, with values of "
      f"the shapes {messages.brief(dict(made.shapes))}, and config.backbone is "
      f"{found}, which makes {shapes}: expected the one that made them."
    )


def require_prepared_alike(train: Reader, reader: Reader) -> None:
  """Refuse embeddings of images that were prepared otherwise than train's.

  A task carries how its training images are prepared, and it is measured on
  images that are prepared so. Data of images pass.

  Raises:
    DataError: with what differs.
  """
  if not (train.source.embedded and reader.source.embedded):
    return
  expected = dataclasses.asdict(train.source.embedded.origin.evaluation)
  found = dataclasses.asdict(reader.source.embedded.origin.evaluation)
  different = [key for key in expected if found[key] != expected[key]]
  if different:
    first, second = (
      ", ".join(f"{key} {values[key]!r}" for key in different)
      for values in (found, expected)
    )
    raise DataError(
      f"{reader.source}: the images of these embeddings were prepared with "
      f"{first}, and those of {train.source} with {second}: embed all splits "
      "with the same --task, or all without one."
    )


def require_within(trials: Sequence[Trial]) -> None:
  """Refuse what would come after the steps that epochs turned out to be."""
  for trial in trials:
    for problem in beyond_the_end(trial.config):
      raise ConfigError(problem)


def require_names(trainer: Trainer, name: str) -> None:
  """Refuse a task that would be called as one that it reads."""
  parents = {task.spec.name for task in trainer.parents}
  taken = sorted(parents & sweep.exported_names(trainer.config, name))
  if taken:
    raise ConfigError(
      f"config.task.name: {taken} are names of tasks in config.task.attends_to "
      "or config.task.indirect, or of what those attend to. Give the new task "
      "another one."
    )
