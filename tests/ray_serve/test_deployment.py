"""Names of ledgers, and their actors, without a cluster."""

import asyncio
import dataclasses
import types

import pytest
from conftest import random_task, tiny_backbone

import memory_vit as mv
from memory_vit.errors import ConfigError, TaskError
from memory_vit.ray_serve.arguments import Arguments, deployed
from memory_vit.serving.task_store import TaskStore

pytest.importorskip("ray.serve", reason="ray is not installed")
BACKBONE = tiny_backbone()


def name_of(path, **given):
  from memory_vit.ray_serve.deployment import contents_of, ledger_name

  arguments = {"backbone": "a.npz", "task": [str(path)], **given}
  what = deployed(Arguments.model_validate(arguments))
  return ledger_name("app", what, contents_of(what.model.tasks))


@pytest.mark.parametrize("format", ["directory", "safetensors"])
def test_tasks_replaced_in_place_have_another_ledger(tmp_path, format):
  suffix = ".safetensors" if format == "safetensors" else ""
  path = tmp_path / f"birds{suffix}"
  mv.save_task(random_task(BACKBONE, "birds", seed=0), path, format=format)
  before = name_of(path)
  assert name_of(path) == before
  mv.save_task(random_task(BACKBONE, "birds", seed=1), path, format=format)
  after = name_of(path)
  assert after != before
  # A directory of tasks as well.
  mv.save_task(
    random_task(BACKBONE, "pets", seed=3), tmp_path / f"pets{suffix}",
    format=format,
  )  # fmt: skip
  assert name_of(tmp_path) != after


def test_sizes_and_limits_leave_the_ledger(tmp_path, monkeypatch):
  """So that what clients added is there after a new deployment."""
  from memory_vit.ray_serve import deployment

  path = tmp_path / "birds"
  mv.save_task(random_task(BACKBONE, "birds"), path)
  name = name_of(path)
  for given in (
    {"memory_mib": 99}, {"batch_sizes": [1, 2]}, {"slots": 9}, {"cells": 8},
    {"dtype": "bfloat16"}, {"change_timeout": 7}, {"num_replicas": 3},
  ):  # fmt: skip
    assert name_of(path, **given) == name, given
  for given in (
    {"backbone": "b.npz"}, {"image_size": 64}, {"state_dir": "/elsewhere"},
  ):  # fmt: skip
    assert name_of(path, **given) != name, given
  monkeypatch.setattr(deployment, "PROTOCOL", deployment.PROTOCOL + 1)
  assert name_of(path) != name


def test_tasks_that_are_not_there_are_refused_when_deployed(tmp_path):
  with pytest.raises(TaskError, match="missing"):
    name_of(tmp_path / "missing")


def test_who_cannot_be_reached_for_a_moment_is_not_dead():
  from ray.exceptions import ActorUnavailableError, RayActorError

  from memory_vit.ray_serve.ledger_actor import is_alive

  def handle(error):
    async def fail():
      raise error

    return types.SimpleNamespace(
      __ray_ready__=types.SimpleNamespace(remote=fail)
    )

  away = ActorUnavailableError("The actor is unavailable", None)
  assert asyncio.run(is_alive(handle(away)))
  assert not asyncio.run(is_alive(handle(RayActorError())))


@dataclasses.dataclass
class Context:
  was_current_actor_reconstructed: bool = True


def test_a_ledger_that_nobody_asks_holds_no_directory(tmp_path, monkeypatch):
  """Ray may restart one after the last replica has gone."""
  import ray

  from memory_vit.ray_serve.ledger_actor import LedgerActor

  monkeypatch.setattr(ray, "get_runtime_context", Context)

  async def check():
    actor = LedgerActor(str(tmp_path))
    other = TaskStore(str(tmp_path))
    with pytest.raises(ConfigError, match="is using it"):
      await actor.kept()
    other.close()
    assert await actor.kept() == []  # it tries again
    with pytest.raises(ConfigError, match="is using it"):
      TaskStore(str(tmp_path))
    actor._watching.cancel()
    actor._store.close()

  asyncio.run(check())
