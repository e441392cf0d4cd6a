"""Two processes that read embeddings: each caches its own share of the rows."""

import contextlib
import json

import fake_embeddings
import numpy as np
import pytest
from faults import Run
from two_processes import joined, kept_port

from memory_vit.tasks import manifest, store

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  root = tmp_path_factory.mktemp("embedded")
  fake_embeddings.write_backbone(root)
  data = fake_embeddings.write_images(root)
  fake_embeddings.embedded(root, "embedded/train", data / "train")
  fake_embeddings.embedded(root, "embedded/test", data / "test")
  return root


def finished(place, workdir, name, directory, processes=2, **options) -> Run:
  """Processes of a run, of a device each, that have come to their end."""
  # An odd number of rows, of which one process has more than the other.
  run = Run(place / "tiny.npz", workdir, **{
    "regime": "head", "batch_size": 8, "batch_size_eval": 8, "total_steps": 9,
    "eval_every": 3, "checkpoint_every": 100, "task.name": "pets",
    "data.name": name, "data.dir": place / directory,
    "data.train": "train[:25]", "data.validation": "train[25:]",
    "data.test": "test", "data.train_crop": "resize", "data.flip": False,
    "data.eval_crop": "backbone", "data.resize": 0, "cache.what": "features",
    **options,
  })  # fmt: skip
  with kept_port() as port, contextlib.ExitStack() as stack:
    flags = [joined(i, port) for i in range(processes)]
    begun = [
      stack.enter_context(run.start(flags=some))
      for some in (flags if processes > 1 else [[]])
    ]
    for process in begun:
      assert process.wait() == 0, process.text
  return run


def trained_arrays(run: Run) -> dict[str, np.ndarray]:
  path = run.workdir / "tasks" / "pets"
  return dict(store.read_arrays(path, manifest.read(path)))


def test_two_processes_train_the_same_task_from_embeddings_and_images(
  place, tmp_path
):
  """The same images in every step; other programs computed the numbers."""
  images = finished(place, tmp_path / "images", "folder", "data")
  rows = finished(place, tmp_path / "rows", "embeddings", "embedded")
  expected, found = trained_arrays(images), trained_arrays(rows)
  assert expected.keys() == found.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5)
  results = [
    json.loads((run.workdir / "result.json").read_text())["tasks"][0]
    for run in (images, rows)
  ]
  first, second = results
  assert first["val"]["score"] == second["val"]["score"]
  for key in ("score", "examples"):
    assert first["test"][key] == second["test"][key]
  loss = first["test"]["loss"]
  assert second["test"]["loss"] == pytest.approx(loss, 1e-4)


@pytest.mark.parametrize("validation", ["train[25:]", ""])
def test_two_processes_solve_the_head_that_one_solves(
  place, tmp_path, validation
):
  """Also its cross-validation is over the images of both."""
  closed = {
    "total_steps": 1, "optim.name": "ridge", "data.validation": validation,
    # What is shared of the options of `finished`.
    "learning_rate": 0.1,
  }  # fmt: skip
  runs = [
    finished(
      place, tmp_path / str(n), "embeddings", "embedded", processes=n, **closed
    )
    for n in (1, 2)
  ]
  one, two = map(trained_arrays, runs)
  for name, value in one.items():
    np.testing.assert_allclose(two[name], value, rtol=1e-3, atol=1e-5)
  first, second = (
    json.loads((run.workdir / "result.json").read_text())["tasks"][0]
    for run in runs
  )
  assert first["val"]["examples"] == second["val"]["examples"] > 0
  assert second["test"]["score"] == first["test"]["score"]
  if validation:
    heat = first["temperature"]
    assert second["temperature"] == pytest.approx(heat, rel=1e-3)
