"""Results of a run, and what one that was killed leaves beside its states."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import pytest
from conftest import random_task
from run_inputs import run_inputs

import memory_vit as mv
from memory_vit.config import Config, DataConfig
from memory_vit.kinds import class_sums as metrics
from memory_vit.kinds.scores import Scores
from memory_vit.run_result import RunResult
from memory_vit.runtime import files
from memory_vit.tasks import store
from memory_vit.train import results, summary
from memory_vit.train.fit import PackResult
from memory_vit.train.state import BestParams
from memory_vit.train.sweep import PassPlan, Trial


@pytest.fixture
def workdir(backbone, tmp_path):
  """A task, and what lies beside it where `save_task` is killed."""
  mv.save_task(random_task(backbone, "pets"), tmp_path / "tasks" / "pets")
  return tmp_path


def names(directory):
  return sorted(path.name for path in directory.iterdir())


@pytest.mark.fault("kill-during-write")
def test_partly_written_task_is_removed(workdir):
  tasks = workdir / "tasks"
  for name in (".pets-a1_b2c3d", ".birds-00000000", ".a-b-abcdefgh"):
    (tasks / name / "new").mkdir(parents=True)
    (tasks / name / "new" / "task.json").write_text("{")
    (tasks / name / "lock").write_bytes(files.SCRATCH_MARK)
  # Killed once the new one had its place.
  shutil.copytree(tasks / "pets", tasks / ".pets-a1_b2c3e" / "old")
  (tasks / ".pets-a1_b2c3e" / "lock").write_bytes(files.SCRATCH_MARK)
  results.tidy(workdir)
  assert names(tasks) == ["pets"]


@pytest.mark.fault("kill-during-write")
def test_task_moved_aside_by_a_killed_save_is_put_back(workdir, backbone):
  """Killed between the two renamings: it is nowhere else."""
  tasks = workdir / "tasks"
  scratch = tasks / ".pets-a1b2c3d4"
  scratch.mkdir()
  (tasks / "pets").rename(scratch / "old")
  (scratch / "new").mkdir()
  (scratch / "lock").write_bytes(files.SCRATCH_MARK)
  results.tidy(workdir)
  assert names(tasks) == ["pets"]
  assert store.load_task(tasks / "pets", backbone).spec.name == "pets"


def test_foreign_files_are_left_alone(workdir, tmp_path_factory):
  tasks, outside = workdir / "tasks", tmp_path_factory.mktemp("outside")
  (outside / "new").mkdir()
  (tasks / ".link-abcdefgh").symlink_to(outside)
  (tasks / ".notes-20260101").mkdir()
  (tasks / ".notes-20260101" / "todo.txt").write_text("")
  (tasks / ".file-abcdefgh").write_text("")
  (tasks / ".pets-SHOUTING").mkdir()
  (workdir / ".hidden").write_text("")
  before = names(tasks), names(workdir)
  results.tidy(workdir)
  assert (names(tasks), names(workdir)) == before
  assert names(outside) == ["new"]


def test_partly_written_files_are_removed(workdir):
  for name in (
    ".backbone.npz.0123abcd.part", f".seen-by-all-{'0a' * 8}", ".lock",
  ):  # fmt: skip
    (workdir / name).write_text("")
  results.tidy(workdir)
  assert names(workdir) == [".lock", "tasks"]
  results.tidy(workdir / "new")  # a run that has written nothing yet


def test_summary_states_test_images_without_finite_outputs(
  backbone, tmp_path, monkeypatch
):
  """And the file of the results is JSON, which has no NaN."""
  task = random_task(backbone, "pets")
  logits = jnp.zeros((3, task.spec.num_classes)).at[1].set(jnp.nan)
  labels, mask = jnp.zeros(3, int), jnp.ones(3)
  sums = metrics.add(None, metrics.batch_sums(logits, labels, mask))
  tested = {"pets": metrics.evaluation_of(sums)}
  monkeypatch.setattr(results, "evaluate", lambda *args, **options: tested)
  pack = PackResult(
    tasks={"pets": task},
    best={"pets": BestParams(1, task.params, Scores(score=0.5))},
    lost={},
  )
  config = Config(
    image_size=8, data=DataConfig(name="digits:5-9", train="train[:20]")
  )
  inputs = run_inputs(config, backbone, test=object())
  inputs = dataclasses.replace(inputs, trials=(Trial("pets", {}, config),))
  plan = PassPlan((("pets",),))
  (trained,) = results.evaluate_trained(inputs, plan, [pack])
  assert trained.result.test.not_finite == 1
  result = RunResult(tasks=(trained.result,), wall_seconds=1.0)
  text = json.dumps(result.to_json(), allow_nan=False)
  assert json.loads(text)["tasks"][0]["test"]["loss"] is None
  said = "pets: outputs for 1 test image are not finite: they count as mistakes"
  assert said in summary.summary(result, tmp_path)
