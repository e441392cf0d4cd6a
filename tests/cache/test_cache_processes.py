"""Whole commands that cache contexts on disk: two of them, and stopped ones."""

import contextlib
import json
import pathlib
import re
import signal

import numpy as np
import pytest
from conftest import tiny_backbone
from faults import Process, Run
from two_processes import joined, kept_port

import memory_vit as mv
from memory_vit.data import datasets
from memory_vit.tasks import manifest, store

pytestmark = pytest.mark.processes

# Of training the two processes cache 17 and 16 rows in batches of 8, so
# that the last batch of the second one is empty; of validation 23 and 16.
SIZE, BATCH = 33, 16

# Every batch that is computed says so.
PATCH = """
import sys, time
from memory_vit.cache.row_file import FileRows
from memory_vit.runtime.preemption import StopSignal
real, done = FileRows.put, []
def put(self, start, inputs, batch):
  real(self, start, inputs, batch)
  done.append(start)
  print(f"computed {len(done)} batches", file=sys.stderr, flush=True)
  after(len(done))
def after(count):
  pass
FileRows.put = put
"""

# The same images in every step as where each process draws from its own rows,
# out of their pixels; they pass the backbone in each step.
FROM_IMAGES = """
import jax
import numpy as np
from memory_vit.config import data_seed
from memory_vit.data import fixed_crops
from memory_vit.train import batches as batches_lib
def batches(inputs, start):
  config, count = inputs.config, jax.process_count()
  seed, share = data_seed(config), config.batch_size // count
  crops = fixed_crops.training_crops(
    inputs.splits["train"], config.data, image_size=config.image_size,
    seed=seed, crops=1,
    interpolation=inputs.preprocessing.interpolation)
  size = len(crops.numbers)
  (whole,) = crops.batches(range(0, size, size), size)
  number = start // count
  while True:
    places = fixed_crops.drawn_places(
      np.arange(number, number + share), size, 1, seed)
    yield {key: whole[key][places] for key in ("image", "label")}
    number += share
batches_lib.image_batches = batches
"""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(tiny_backbone(depth=1, num_classes=5), path)
  return path


def run_of(backbone, workdir, cache_dir=None, **options) -> Run:
  """A run of some steps; `cache_dir` is where it caches its rows."""
  cache = {
    "cache.what": "contexts",
    "cache.where": "disk",
    "cache.dir": cache_dir,
  }
  values = {
    "regime": "cls_masked", "batch_size": BATCH, "batch_size_eval": 32,
    "total_steps": 6, "eval_every": 3, "checkpoint_every": 100,
    "data.train": f"train[:{SIZE}]", "data.validation": "test[:39]",
    "data.test": "test[:20]", "data.train_crop": "resize",
    "data.eval_crop": "resize", "data.resize": 0,
    **(cache if cache_dir else {}), **options,
  }  # fmt: skip
  return Run(backbone, workdir, **values)


@contextlib.contextmanager
def started(run: Run, patch: str = PATCH):
  """Two processes of a run, of a device each."""
  with kept_port() as port, contextlib.ExitStack() as stack:
    yield [
      stack.enter_context(run.start(patch, flags=joined(i, port)))
      for i in range(2)
    ]


def finished(run: Run, patch: str = PATCH) -> list[Process]:
  """Two processes that have come to their end."""
  with started(run, patch) as both:
    for process in both:
      assert process.wait() == 0, process.text
  return both


def trained_arrays(run: Run) -> dict[str, bytes]:
  path = run.workdir / "tasks" / "digits-5-9"
  found = store.read_arrays(path, manifest.read(path))
  assert "cls" in found
  return {name: array.tobytes() for name, array in found.items()}


def accuracies(run: Run) -> list[tuple]:
  found = json.loads((run.workdir / "result.json").read_text())["tasks"]
  return [(t["val"]["score"], t["test"]["score"], t["test"]["loss"])
          for t in found]  # fmt: skip


def computed(process: Process) -> int:
  """The number of batches that passed the backbone to be cached."""
  return process.text.count("computed ")


def file_of(cache_dir: pathlib.Path, role: str, process: int) -> pathlib.Path:
  """The rows of "training" or "validation" of a process."""
  (folder,) = (
    about.parent
    for about in cache_dir.glob("*/about.json")
    if json.loads(about.read_text())["images"]["role"] == role
  )
  return folder / f"{process}.rows"


def headers_of(file: pathlib.Path, count: int) -> np.ndarray:
  """What is before the rows: sum, label, mask and sum of each, int32 (n, 4)."""
  return np.fromfile(file, "<i4", 4 * count).reshape(count, 4)


@pytest.fixture(scope="module")
def together(backbone, tmp_path_factory):
  """A run of two processes that begins with an empty cache."""
  path = tmp_path_factory.mktemp("together")
  run = run_of(backbone, path / "run", path / "cache")
  return run, path / "cache", finished(run)


@pytest.mark.fault("cache-damaged-of-two")
def test_two_processes_train_the_same_task_with_and_without_a_cache(
  together, backbone, tmp_path
):
  run, cache_dir, both = together
  plain = run_of(backbone, tmp_path / "images")
  assert [computed(p) for p in finished(plain, PATCH + FROM_IMAGES)] == [0, 0]
  assert trained_arrays(run) == trained_arrays(plain)
  assert accuracies(run) == accuracies(plain)
  # Three batches of training, two of validation, on each.
  assert [computed(process) for process in both] == [5, 5]
  assert len(list(cache_dir.iterdir())) == 2
  labels = [
    headers_of(file_of(cache_dir, "training", i), count)[:, 1].tolist()
    for i, count in enumerate((17, 16))
  ]
  # Each has every second record, in their order.
  reader = datasets.open_split("digits:5-9", f"train[:{SIZE}]")
  whole = [int(reader.source.read(i)[1]) for i in range(SIZE)]
  assert labels == [whole[0::2], whole[1::2]]


@pytest.mark.fault("cache-damaged-of-two")
def test_second_run_of_two_processes_computes_no_rows(
  together, backbone, tmp_path
):
  first, cache_dir, _ = together
  run = run_of(backbone, tmp_path / "again", cache_dir)
  assert [computed(process) for process in finished(run)] == [0, 0]
  assert trained_arrays(run) == trained_arrays(first)
  assert accuracies(run) == accuracies(first)


@pytest.mark.fault("cache-damaged-of-two")
def test_damaged_row_of_one_of_two_processes_is_computed_again(
  together, backbone, tmp_path
):
  """By both, as its images pass the backbone together; one says why."""
  first, cache_dir, _ = together
  damaged = file_of(cache_dir, "training", 1)
  whole = damaged.read_bytes()
  middle = len(whole) // 2
  changed = bytes([whole[middle] ^ 1])
  damaged.write_bytes(whole[:middle] + changed + whole[middle + 1 :])
  run = run_of(backbone, tmp_path / "again", cache_dir)
  both = finished(run)
  assert [computed(process) for process in both] == [1, 1]
  said = ["damaged rows: 1. They are recomputed." in p.text for p in both]
  assert said == [False, True]
  assert damaged.read_bytes() == whole
  assert trained_arrays(run) == trained_arrays(first)


# However slow the machine is, the signal comes behind so many batches.
STOPS = (
  PATCH
  + """
def after(count):
  while count == 3 and current_stop._signal is None:
    time.sleep(0.01)
listens = StopSignal.listening
def listening(self):
  global current_stop
  current_stop = self
  return listens(self)
StopSignal.listening = listening
"""
)


@pytest.mark.fault("cache-signal")
def test_signal_while_rows_are_computed_loses_no_batch(backbone, tmp_path):
  whole = run_of(backbone, tmp_path / "whole")
  whole.finish()
  run = run_of(backbone, tmp_path / "run", tmp_path / "cache")
  with run.start(STOPS, fresh=True) as process:
    process.wait_for("computed 3 batches")
    process.signal(signal.SIGTERM)
    assert process.wait() == 75, process.text
    assert "Traceback" not in process.text
  assert run.steps() == []
  rest = run.start(PATCH)
  assert rest.wait() == 0, rest.text
  # Two batches of validation and three of training, of which three were there.
  assert computed(rest) == 2
  assert trained_arrays(run) == trained_arrays(whole)
  assert accuracies(run) == accuracies(whole)


# Both continue slowly until they have agreed where to stop.
SLOWLY = (
  PATCH
  + """
def after(count):
  if count > 3:
    time.sleep(0.1)
"""
)


@pytest.mark.fault("cache-signal")
def test_signal_to_one_of_two_processes_stops_both_at_one_batch(
  backbone, tmp_path
):
  options = {
    "data.train": "train[:400]", "batch_size": 4, "data.validation": "",
    "total_steps": 5, "eval_every": 5,
  }  # fmt: skip
  cache_dir = tmp_path / "cache"
  run = run_of(backbone, tmp_path / "run", cache_dir, **options)
  with started(run, SLOWLY) as both:
    both[1].wait_for("computed 5 batches")
    both[1].signal(signal.SIGTERM)
    for process in both:
      assert process.wait() == 75, process.text
      assert "Traceback" not in process.text
  counts = [computed(process) for process in both]
  assert counts[0] == counts[1] < 100
  for i in range(2):
    headers = headers_of(file_of(cache_dir, "training", i), 200)
    assert headers.any(axis=1).sum() == 2 * counts[i]
  rest = finished(run)
  assert [computed(process) for process in rest] == [100 - counts[0]] * 2
  assert not re.search("damaged", "".join(process.text for process in rest))
  again = run_of(backbone, tmp_path / "whole", tmp_path / "other", **options)
  assert [computed(process) for process in finished(again)] == [100, 100]
  assert trained_arrays(run) == trained_arrays(again)
