"""Load a backbone, and the tasks to run on it."""

from __future__ import annotations

from collections.abc import Sequence

from memory_vit.backbones import load
from memory_vit.errors import ConfigError
from memory_vit.model import backbone as backbones
from memory_vit.model import task as task_sets
from memory_vit.tasks import compose, find, store


def load_model(
  backbone: str,
  tasks: Sequence[str],
  dtype: str,
  *,
  any_regime: bool = False,
  image_size: int | None = None,
) -> tuple[backbones.Backbone, tuple[task_sets.Task, ...]]:
  """Load tasks, and the backbone with the image size and GELU of the tasks."""
  saved_tasks = find.find_tasks(tasks)
  if not saved_tasks:
    return load.load_backbone(backbone, image_size, dtype), ()
  specs = [described.spec for _, described in saved_tasks]
  # Before the backbone is downloaded, check that the tasks can share a pass.
  # With `any_regime`, skip this check if there is only one task: tasks of every
  # regime can run in a pass without other tasks.
  if len(saved_tasks) > 1 or not any_regime:
    compose.require_specs_fit(specs)
  wanted = specs[0].backbone
  if image_size not in (None, wanted.image_size):
    raise ConfigError(
      f"image_size is {image_size}, but the tasks were trained at "
      f"{wanted.image_size}: leave image_size out."
    )
  published = load.read_published(backbone)
  # If the backbone's files state its config, the GELU comes from that config,
  # and `load_described` refuses tasks that were trained with another GELU. If
  # the files state no config, the GELU comes from the tasks.
  gelu = None if published.states_config else wanted.gelu
  loaded = backbones.rounded(
    load.to_backbone(published, wanted.image_size, dtype, gelu=gelu)
  )
  read = tuple(store.load_described(*saved, loaded) for saved in saved_tasks)
  compose.require_one_pass(read)
  return loaded, read
