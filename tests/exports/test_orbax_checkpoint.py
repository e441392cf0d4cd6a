"""Parameters that orbax alone restores, without this package."""

import dataclasses
import json
import subprocess
import sys
import types

import numpy as np
import pytest
from conftest import random_task

import memory_vit as mv
from memory_vit.commands import export
from memory_vit.config import Config
from memory_vit.errors import ExportError, TrainingError
from memory_vit.exports import orbax_checkpoint
from memory_vit.model import trees
from memory_vit.run_result import TrialResult
from memory_vit.train import results

pytestmark = pytest.mark.versions

# Another program: it has two devices less, and prints what it finds.
READ = """
import json, sys
import numpy as np
import orbax.checkpoint
from flax import traverse_util

params = orbax.checkpoint.StandardCheckpointer().restore(sys.argv[1])
flat = traverse_util.flatten_dict(params, sep="/")
np.savez(sys.argv[2], **flat)
kinds = sorted({type(leaf).__name__ for leaf in flat.values()})
ours = [name for name in sys.modules if name.startswith("memory_vit")]
print(json.dumps({"kinds": kinds, "ours": ours}))
"""


def read_by_orbax(path, tmp_path):
  """The flat tree that orbax alone restores, in a process of its own."""
  out = tmp_path / "read.npz"
  done = subprocess.run(
    [sys.executable, "-c", READ, str(path), str(out)],
    capture_output=True, text=True, check=False, cwd=tmp_path,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == {"kinds": ["ndarray"], "ours": []}
  with np.load(out, allow_pickle=False) as found:
    return dict(found)


def require_same(found, expected):
  flat = trees.flatten(expected)
  assert found.keys() == flat.keys()
  for name, array in flat.items():
    assert found[name].dtype == np.asarray(array).dtype
    np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.fixture
def model(backbone, tmp_path):
  """A backbone and two tasks, one of them without memory."""
  pets = random_task(backbone, "pets", cells=3)
  head = random_task(backbone, "head", seed=1, cells=0)
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  mv.save_tasks([pets, head], tmp_path / "tasks")
  return [f"--backbone={tmp_path / 'vit.npz'}", f"--task={tmp_path / 'tasks'}"]


def test_orbax_alone_restores_the_whole_model(
  backbone, model, tmp_path, capsys
):
  out = tmp_path / "out"
  argv = [*model, "--format=orbax", f"--out={out}"]
  assert export.main(argv) == 0
  assert "orbax" in capsys.readouterr().out
  tasks = mv.load_tasks(tmp_path / "tasks", backbone)
  params = {task.name: task.params for task in tasks}
  assert params["head"].pop("memory").size == 0  # orbax refuses it
  expected = {"backbone": backbone.params, "tasks": params}
  require_same(read_by_orbax(out / "orbax", tmp_path), expected)
  manifest = json.loads((out / "manifest.json").read_text())
  assert manifest["format"] == "orbax"
  assert any(name.startswith("orbax/") for name in manifest["files"])
  assert export.main(argv) == 0  # what an export wrote is replaced
  # What is not an export is left as it is.
  (out / "orbax" / "mine").write_text("mine")
  assert export.main(argv) == 2
  assert (out / "orbax" / "mine").read_text() == "mine"


@pytest.mark.parametrize("regime", ["memory_masked", "full"])
def test_a_run_leaves_what_it_trained(backbone, tmp_path, regime):
  """Without a second copy of a task that holds a whole backbone."""
  memory = regime == "memory_masked"
  task = random_task(backbone, "pets", cells=3 * memory, regime=regime)
  result = TrialResult(
    name="pets", regime=regime, cells=3 * memory, learning_rate=0.1,
    exported="tasks/pets",
  )  # fmt: skip
  trained = results.TrainedTrial(None, task, result)
  for exports in (False, True):
    config = Config(export_orbax=exports)
    inputs = types.SimpleNamespace(config=config, backbone=backbone, parents=())
    trained = dataclasses.replace(
      trained, trial=types.SimpleNamespace(config=config)
    )
    for _ in range(1 + exports):  # a run that goes on replaces it
      results.export(inputs, "pets", [trained], tmp_path)
    there = (tmp_path / "orbax").exists()
    assert there == (exports and memory)
  if memory:
    found = read_by_orbax(tmp_path / "orbax" / "pets", tmp_path)
    require_same(found, mv.load_task(tmp_path / "tasks/pets", backbone).params)


def test_orbax_export_refuses_pixel_input(backbone, tmp_path):
  with pytest.raises(ExportError, match="--format=orbax with --input=uint8"):
    mv.export_model(
      backbone, random_task(backbone, "a"), tmp_path / "out", format="orbax",
      images=mv.ImageInput(kind="uint8"),
    )  # fmt: skip


def test_failed_orbax_write_is_named_and_leaves_nothing(
  backbone, tmp_path, monkeypatch
):
  """Orbax raises ValueError on a full disk; nothing is left."""

  def fails(tree, path):
    raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

  monkeypatch.setattr(orbax_checkpoint, "write", fails)
  with pytest.raises(TrainingError, match=r"cannot be written: .*No space"):
    mv.export_model(
      backbone, random_task(backbone, "a"), tmp_path / "out", format="orbax"
    )
  assert not list(tmp_path.iterdir())
