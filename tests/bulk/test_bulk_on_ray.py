"""Run bulk jobs on a real Ray cluster: the same rows, whoever is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import fake_data
import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, random_task, tiny_backbone
from ray_clusters import ENVIRONMENT, children_of, end, environment

import memory_vit as mv
from memory_vit.bulk import ray_engine, run
from memory_vit.commands import predict

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.processes]

IMAGES = 400
BROKEN = (17, 90)
SHARD = 10
PATIENCE = 600


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A model, images (two of them broken), and the expected rows."""
  root = tmp_path_factory.mktemp("ray")
  mv.save_backbone(tiny_backbone(), root / "tiny.npz")
  backbone = mv.load_backbone(root / "tiny.npz")
  mv.save_tasks([random_task(backbone, "digits")], root / "tasks")
  (root / "images").mkdir()
  for i in range(IMAGES):
    content = fake_data.encode(fake_data.noise(i, 200, 200), "PNG")
    content = content[:-40] if i in BROKEN else content
    (root / "images" / f"{i:03}.png").write_bytes(content)
  assert predict.main(flags(root, root / "expected")) == 1
  return root


def flags(root, output, *more):
  return [
    f"--backbone={root / 'tiny.npz'}", f"--task={root / 'tasks'}",
    f"--input={root / 'images'}", f"--output={output}", "--batch_size=4",
    f"--shard_images={SHARD}", "--logits", *more,
  ]  # fmt: skip


def start(root, output, log, *more):
  """Starts the command with two workers on its own cluster."""
  command = [
    sys.executable, "-m", "memory_vit", "predict",
    *flags(root, output, "--engine=ray", "--workers=2", *more),
  ]  # fmt: skip
  with log.open("w") as file:
    return subprocess.Popen(
      command,
      cwd=ROOT,
      stdout=file,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      env=environment(),
    )


def shards(output):
  return sorted(path.name for path in output.glob("part-*.parquet"))


def wait_for_shards(process, output, count, log):
  end = time.monotonic() + PATIENCE
  while len(shards(output)) < count:
    assert process.poll() is None, log.read_text()
    assert time.monotonic() < end, log.read_text()
    time.sleep(0.02)


def require_the_same_rows(output, root):
  """No row is lost or duplicated, and the order is that of the input."""
  found = pq.read_table(output)
  assert found["id"].to_pylist() == list(range(IMAGES))
  assert found.equals(pq.read_table(root / "expected"))
  assert len(dict(run.unreadable(str(output)))) == len(BROKEN)


@pytest.mark.fault("worker-killed")
def test_a_killed_worker_loses_nothing(place, tmp_path):
  output, log = tmp_path / "out", tmp_path / "log"
  process = start(place, output, log)
  try:
    wait_for_shards(process, output, 2, log)
    workers = children_of(process, "ray::")
    killed = [
      pid for pid in workers if "MapWorker" in _arguments(pid)
    ] or workers
    assert killed, log.read_text()
    os.kill(killed[0], signal.SIGKILL)
    there = len(shards(output))
    assert process.wait(PATIENCE) == 1, log.read_text()
  finally:
    end(process, PATIENCE)
  assert there < IMAGES / SHARD  # it was killed in the middle
  require_the_same_rows(output, place)


@pytest.mark.fault("bulk-killed")
def test_a_killed_command_is_resumed(place, tmp_path):
  output, log = tmp_path / "out", tmp_path / "log"
  process = start(place, output, log)
  try:
    wait_for_shards(process, output, 2, log)
  finally:
    end(process, PATIENCE)
  before = {name: (output / name).stat().st_mtime_ns for name in shards(output)}
  assert 2 <= len(before) < IMAGES / SHARD
  # In this process: who makes the rest does not matter.
  assert predict.main(flags(place, output)) == 1
  for name, time_ns in before.items():
    assert (output / name).stat().st_mtime_ns == time_ns
  require_the_same_rows(output, place)


@pytest.mark.fault("no-worker")
@pytest.mark.filterwarnings("default")  # of Ray itself
def test_workers_without_a_place_end_the_command(
  place, tmp_path, monkeypatch, capsys
):
  """Ray Data alone would wait forever."""
  for key, value in ENVIRONMENT.items():
    monkeypatch.setenv(key, value)
  monkeypatch.setattr(ray_engine, "_MOST_WAIT", 1)
  more = ["--engine=ray", "--workers=1", "--worker_gpus=10000"]
  assert predict.main(flags(place, tmp_path / "out", *more)) == 2
  assert "does not have enough resources" in capsys.readouterr().err


_PIPELINE = """
import json, sys
import ray
import memory_vit as mv

backbone, tasks, *paths = sys.argv[1:]
ray.init(
  object_store_memory=200 * 2**20, include_dashboard=False, num_cpus=2
)
config = mv.PredictorConfig(backbone, (tasks,), batch_sizes=(4,))
found = ray.data.from_items([{"path": path} for path in paths]).map_batches(
  mv.Predictor,
  fn_constructor_args=(config,),
  batch_size=4,
  compute=ray.data.ActorPoolStrategy(size=1),
)
rows = {row["path"]: row["digits/logits"].tolist() for row in found.iter_rows()}
print("ROWS" + json.dumps(rows))
"""


def test_the_predictor_is_a_class_for_map_batches(place, tmp_path):
  """A pipeline of Ray Data gets the logits of `predict`."""
  expected = {
    row["path"]: row["digits/logits"]
    for row in pq.read_table(place / "expected").to_pylist()
    if not row["error"]
  }
  paths = sorted(expected)[:8]
  done = subprocess.run(
    [
      sys.executable, "-c", _PIPELINE, place / "tiny.npz", place / "tasks",
      *paths,
    ],
    cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
    env=environment(),
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  [line] = [x for x in done.stdout.splitlines() if x.startswith("ROWS")]
  rows = json.loads(line.removeprefix("ROWS"))
  assert sorted(rows) == paths
  for path in paths:
    np.testing.assert_array_equal(rows[path], expected[path])


def _arguments(pid):
  with open(f"/proc/{pid}/cmdline", "rb") as file:
    return file.read().decode(errors="replace")
