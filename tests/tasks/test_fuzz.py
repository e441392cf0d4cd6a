"""Thousands of damaged files are refused with our errors, or read to the bit.

A hundred of each kind in the fast suite; `make nightly` runs them all.
"""

import collections
import contextlib
import io
import json
import os
import signal
import time
import warnings

import jax
import mutations
import numpy as np
import published_models
import pytest
from conftest import random_task, tiny_backbone
from marks import NIGHTLY
from memory import peak_rss, start_rss

import memory_vit as mv
from memory_vit.errors import BackboneError, TaskError
from memory_vit.model import trees
from memory_vit.model.task import TaskSpec
from memory_vit.runtime import schema
from memory_vit.runtime.messages import escaped
from memory_vit.tasks import store

FEW = 100
# Of models, in `make nightly`; a campaign has more.
MANY = int(os.environ.get("MEMORY_VIT_FUZZ_MODELS", "600"))
# Seconds; a case may be slow on a busy machine.
SECONDS = 300
# Memory for one case: a task or file of a few KB, and copies.
MOST_TAKEN = 256 * 2**20
greatest = {}


@pytest.fixture(scope="module")
def saved(backbone, tmp_path_factory):
  """A task, its files, and the files of another one."""
  root = tmp_path_factory.mktemp("saved")
  task = random_task(backbone, "pets", class_names=("cat", "dog", "日"))
  mv.save_task(task, root / "pets")
  mv.save_task(random_task(backbone, "cars", seed=3, cells=1), root / "cars")
  pets, cars = (mutations.read_files(root / name) for name in ("pets", "cars"))
  return mv.load_task(root / "pets", backbone), pets, cars


@contextlib.contextmanager
def no_hang():
  """End a case that takes too long, if Python can still be reached."""

  def late(*_):
    raise TimeoutError(f"a case took more than {SECONDS} s")

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(SECONDS)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def outcome(load, error, same) -> str:
  """Load something: "refused", or "same" after `same` has checked it."""
  loaded, refusal = None, ""
  before, began = start_rss(), time.perf_counter()
  with no_hang(), warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
      loaded = load()
    except error as raised:
      refusal = str(raised)
  taken, seconds = peak_rss() - before, time.perf_counter() - began
  assert taken < MOST_TAKEN, f"{taken:,} bytes"
  greatest["MiB"] = max(greatest["MiB"], taken >> 20)
  greatest["s"] = max(greatest["s"], round(seconds, 1))
  if refusal:
    # Messages about a backbone list what is missing, line by line.
    assert error is BackboneError or "\n" not in refusal
    assert all(escaped(line) == line for line in refusal.split("\n"))
    assert len(refusal) < 2_500
    return "refused"
  same(loaded)
  return "same"


def require_same_params(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, found, expected)))


def run(cases, one, capfd):
  """Run cases; failures name the number of their case."""
  counts = collections.Counter()
  greatest.update({"MiB": 0, "s": 0.0})
  for case in cases:
    try:
      counts[one(np.random.default_rng(case))] += 1
    except BaseException as error:
      error.add_note(f"case {case}")
      raise
  assert capfd.readouterr() == ("", "")
  print(dict(counts), "a case takes at most", greatest)
  return counts


@pytest.mark.fault("damaged-task")
@pytest.mark.parametrize(
  "cases",
  [range(FEW), pytest.param(range(10_000, 11_500), marks=NIGHTLY)],
  ids=len,
)
def test_damaged_tasks_are_equal_or_refused(
  backbone, saved, tmp_path, capfd, cases
):
  task, files, other = saved

  def same(loaded):
    assert loaded.spec == task.spec
    assert loaded.provenance == task.provenance
    require_same_params(loaded.params, task.params)

  def one(rng):
    changed = mutations.damaged_task(files, other, rng)
    mutations.write_files(tmp_path / "task", changed)
    return outcome(
      lambda: mv.load_task(tmp_path / "task", backbone), TaskError, same
    )

  assert run(cases, one, capfd)["refused"] > 0.9 * len(cases)


@pytest.mark.fault("damaged-task")
@pytest.mark.parametrize(
  "cases",
  [range(FEW), pytest.param(range(12_000, 12_500), marks=NIGHTLY)],
  ids=len,
)
def test_forged_tasks_are_as_declared_or_refused(
  backbone, saved, tmp_path, capfd, cases
):
  """With matching digests: the parameters are the same, or it is refused."""
  task, files, _ = saved

  def one(rng):
    changed = mutations.forged_task(files, rng)
    mutations.write_files(tmp_path / "task", changed)

    def same(loaded):
      said = json.loads(changed["task.json"])["spec"]
      assert loaded.spec == schema.build(TaskSpec, said, "spec", TaskError)
      require_same_params(loaded.params, task.params)

    return outcome(
      lambda: mv.load_task(tmp_path / "task", backbone), TaskError, same
    )

  counts = run(cases, one, capfd)
  assert min(counts["refused"], counts["same"]) > 0.05 * len(cases)


@pytest.mark.fault("lying-metadata")
@pytest.mark.parametrize(
  "cases",
  [range(FEW, FEW + 60), pytest.param(range(20_000, 20_700), marks=NIGHTLY)],
  ids=len,
)
def test_forged_arrays_are_as_declared_or_refused(
  backbone, saved, tmp_path, capfd, cases
):
  """With matching digests: it is what task.json declares, or refused."""
  task, files, _ = saved

  def one(rng):
    changed = mutations.forged_arrays(files, rng)
    mutations.write_files(tmp_path / "task", changed)

    def same(loaded):
      said = json.loads(changed["task.json"])
      assert loaded.spec == schema.build(
        TaskSpec, said["spec"], "spec", TaskError
      )
      flat = trees.flatten(loaded.params)
      found = {k: mutations.declared(np.asarray(v)) for k, v in flat.items()}
      assert found == said["arrays"]
      if said["spec"]["num_classes"] == task.spec.num_classes:
        require_same_params(loaded.params, task.params)

    def load():
      store.inspect_task(tmp_path / "task")  # without a backbone
      return mv.load_task(tmp_path / "task", backbone)

    return outcome(load, TaskError, same)

  counts = run(cases, one, capfd)
  assert counts["refused"] > 0.5 * len(cases)
  assert counts["same"] > 0.05 * len(cases)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
  """The .npz file of a small backbone, compressed and not."""
  backbone = tiny_backbone(depth=1, width=8, mlp_dim=8, num_classes=3)
  plain, packed = io.BytesIO(), io.BytesIO()
  arrays = trees.flatten(backbone.params)
  np.savez(plain, **arrays)
  np.savez_compressed(packed, **arrays)
  return backbone, [plain.getvalue(), packed.getvalue()]


@pytest.mark.fault("lying-npz")
@pytest.mark.parametrize(
  "cases",
  [range(FEW), pytest.param(range(30_000, 30_400), marks=NIGHTLY)],
  ids=len,
)
def test_damaged_npz_files_are_equal_or_refused(
  weights, tmp_path, capfd, cases
):
  backbone, contents = weights
  file = tmp_path / "vit.npz"

  def same(loaded):
    assert loaded.fingerprint == backbone.fingerprint
    require_same_params(loaded.params, backbone.params)

  def one(rng):
    content = contents[rng.integers(2)]
    for _ in range(rng.integers(1, 3)):
      content = mutations.damaged(content, rng)
    file.write_bytes(content)
    return outcome(lambda: mv.load_backbone(file), BackboneError, same)

  assert run(cases, one, capfd)["refused"] > 0.5 * len(cases)


@pytest.mark.fault("lying-npz")
@pytest.mark.parametrize(
  "cases",
  [range(FEW), pytest.param(range(40_000, 40_400), marks=NIGHTLY)],
  ids=len,
)
def test_forged_npz_files_are_valid_or_refused(weights, tmp_path, capfd, cases):
  """With matching checksums: NumPy reads the same."""
  _, contents = weights
  file = tmp_path / "vit.npz"

  def same(loaded):
    flat = trees.flatten(loaded.params)
    with np.load(file, allow_pickle=False) as archive:
      assert set(archive.files) == flat.keys()
      for name, found in flat.items():
        expected = archive[name].astype(np.float32)
        assert np.isfinite(expected).all()
        assert np.array_equal(found, expected)

  def one(rng):
    file.write_bytes(mutations.rewritten_npz(contents[0], rng))
    return outcome(lambda: mv.load_backbone(file), BackboneError, same)

  counts = run(cases, one, capfd)
  assert min(counts["refused"], counts["same"]) > 0.05 * len(cases)


@pytest.mark.fault("lying-model")
@pytest.mark.parametrize(
  "cases",
  [range(FEW), pytest.param(range(50_000, 50_000 + MANY), marks=NIGHTLY)],
  ids=len,
)
def test_damaged_models_are_valid_or_refused(tmp_path, capfd, cases):
  """config.json, shards and index: accepted only if the model is valid."""
  path = published_models.write_shards(tmp_path / "vit")
  files = mutations.read_files(path)
  expected = mv.load_backbone(path)

  def same(loaded):
    for leaf in jax.tree.leaves(loaded.params):
      assert np.isfinite(leaf).all()
    if loaded.fingerprint == expected.fingerprint:
      require_same_params(loaded.params, expected.params)

  def one(rng):
    changed = mutations.damaged_model(files, rng)
    mutations.write_files(path, changed)
    return outcome(lambda: mv.load_backbone(path), BackboneError, same)

  counts = run(cases, one, capfd)
  assert min(counts["refused"], counts["same"]) > 0.05 * len(cases)
