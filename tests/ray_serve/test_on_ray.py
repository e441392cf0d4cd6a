"""`serve run` on a real cluster: two replicas, one set of tasks."""

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from PIL import Image
from ray_clusters import children_of, end, environment

import memory_vit as mv
from memory_vit.prediction.predictions import softmax

pytest.importorskip("ray.serve", reason="ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.processes]

PATIENCE = 400
SECRET = "a token of 24 characters"
BEARER = {"Authorization": f"Bearer {SECRET}"}
BYTES = {**BEARER, "Content-Type": "application/octet-stream"}
REPLICAS = 2
BACKBONE = tiny_backbone()
BIRDS, PETS, CATS, DOGS = (
  random_task(BACKBONE, name, seed=i, classes=3 + i)
  for i, name in enumerate(("birds", "pets", "cats", "dogs"))
)


def picture(seed):
  rng = np.random.default_rng(seed)
  file = io.BytesIO()
  Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(file, "PNG")
  return file.getvalue()


PICTURES = [picture(i) for i in range(3)]


@dataclasses.dataclass
class Served:
  """A cluster that runs, and the tasks of each set that it had, by digest.

  `newest` are those of the last one.
  """

  url: str
  process: subprocess.Popen
  folder: Path
  sets: dict
  newest: dict

  def note(self, digest, tasks):
    self.sets[digest] = self.newest = tasks

  def log(self):
    return (self.folder / "log").read_text()


# As on a terminal: shells let what is in the background ignore Ctrl-C.
_HEED_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
  folder = tmp_path_factory.mktemp("serve")
  mv.save_backbone(BACKBONE, folder / "tiny.npz")
  mv.save_tasks([BIRDS, PETS], folder / "tasks")
  token = folder / "token"
  token.touch(0o600)
  token.write_text(SECRET)
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  arguments = {
    "backbone": str(folder / "tiny.npz"), "task": [str(folder / "tasks")],
    "token_file": str(token), "state_dir": str(folder / "state"),
    "batch_sizes": [1], "slots": 4, "num_replicas": REPLICAS, "num_cpus": 0.1,
  }  # fmt: skip
  application = {
    "name": "tasks", "route_prefix": "/", "args": arguments,
    "import_path": "memory_vit.ray_serve:application",
  }  # fmt: skip
  (folder / "config.yaml").write_text(  # JSON is YAML
    json.dumps(
      {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
      }
    )  # fmt: skip
  )
  serve = Path(sys.executable).parent / "serve"
  with (folder / "log").open("w") as log:
    process = subprocess.Popen(
      [sys.executable, "-c", _HEED_INTERRUPTS, serve, "run", "config.yaml"],
      cwd=folder, env=environment(),
      stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
  found = Served(f"http://127.0.0.1:{port}", process, folder, {}, {})
  try:
    asyncio.run(until_ready(found))
    yield found
  finally:
    end(process, PATIENCE)


@contextlib.asynccontextmanager
async def client(served):
  async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE) as http:
    yield http


async def until_ready(served):
  """Wait for all replicas; the set that they answer by."""
  async with client(served) as http:
    limit = time.monotonic() + PATIENCE
    while True:
      assert served.process.poll() is None, served.log()
      assert time.monotonic() < limit, served.log()
      try:
        sets = await of_all_replicas(http, tries=30)
      except httpx.TransportError:
        sets = {}
      if len(sets) == REPLICAS:
        break
      await asyncio.sleep(0.5)
  if not served.sets:
    [first] = {one["digest"] for one in sets.values()}
    served.note(first, {"birds": BIRDS, "pets": PETS})


async def of_all_replicas(http, tries=200):
  """{replica: its set of tasks}, of replicas that answer 200."""
  found = {}
  for _ in range(tries):
    done = await http.get("/readyz")
    if done.status_code == 200:
      found[done.headers["x-replica"]] = done.json()["task_set"]
    if len(found) == REPLICAS:
      break
  return found


def file_of(task, folder):
  path = folder / f"{task.name}.safetensors"
  mv.save_task(task, path, format="safetensors")
  return path.read_bytes()


async def changed(served, http, name, task=None):
  """Change a task, and remember the set; a replica that died is no answer."""
  url = f"/v1/tasks/{name}"
  while True:
    if task is None:
      done = await http.delete(url, headers=BEARER)
    else:
      content = file_of(task, served.folder)
      done = await http.put(url, content=content, headers=BYTES)
    if done.status_code < 500:
      break
    await asyncio.sleep(0.2)
  assert done.status_code in (200, 201), done.text
  told = done.json()["task_set"]
  others = {n: one for n, one in served.newest.items() if n != name}
  served.note(told["digest"], others | ({name: task} if task else {}))
  return told


def expected(task, content):
  """Probabilities of a picture, by `mv.forward` of its task alone."""
  batch = np.asarray(mv.preprocess([content], task))
  slots = mv.fill_slots(BACKBONE, task, slots=4)
  logits = np.asarray(mv.forward(BACKBONE, slots, batch)[task.name])
  return softmax(logits, task.name)[0]


def require_answers(served, answers):
  """Each is to the bit that of the set which it names."""
  known = {}
  for number, answer in answers:
    tasks = served.sets[answer["task_set"]["digest"]]
    [image] = answer["images"]
    assert image["tasks"].keys() == tasks.keys()
    for name, guesses in image["tasks"].items():
      key = number, tasks[name].digest
      if key not in known:
        known[key] = expected(tasks[name], PICTURES[number])
      for guess in guesses:
        assert guess["probability"] == known[key][guess["index"]]


def test_changes_reach_all_replicas_before_they_are_confirmed(served):
  """While others ask: no request is lost, and each has one set for answer."""
  answers, replicas, confirmed, going = [], set(), [1], True

  async def ask(http, number):
    while going:
      least = confirmed[-1]
      files = [("images", ("a.png", PICTURES[number]))]
      done = await http.post("/v1/predict", files=files)
      assert done.status_code == 200, done.text
      replicas.add(done.headers["x-replica"])
      answers.append((number, done.json()))
      assert done.json()["task_set"]["version"] >= least

  async def check():
    nonlocal going
    async with client(served) as http:
      asking = [asyncio.create_task(ask(http, i)) for i in range(3)]
      for name, task in (
        ("cats", CATS), ("dogs", DOGS), ("cats", PETS), ("birds", None),
        ("dogs", None), ("cats", CATS),
      ):  # fmt: skip
        told = await changed(served, http, name, task)
        confirmed.append(told["version"])
        sets = await of_all_replicas(http)
        assert len(sets) == REPLICAS
        assert all(one == told for one in sets.values())
        await asyncio.sleep(0.3)
      going = False
      await asyncio.gather(*asking)

  asyncio.run(check())
  assert confirmed == [1, 2, 3, 4, 5, 6, 7]
  assert len(replicas) == REPLICAS
  assert len({answer["task_set"]["digest"] for _, answer in answers}) > 3
  require_answers(served, answers)
  kept = {path.stem for path in (served.folder / "state/tasks").iterdir()}
  assert kept == {"cats"}


def test_what_overflows_is_refused_by_all(served):
  params = jax.tree.map(lambda a: np.full(a.shape, 3e38, a.dtype), CATS.params)
  task = dataclasses.replace(CATS, params=params)

  async def check():
    async with client(served) as http:
      before = await of_all_replicas(http)
      for name in ("cats", "new"):
        content = file_of(task, served.folder)
        done = await http.put(
          f"/v1/tasks/{name}", content=content, headers=BYTES
        )
        assert (done.status_code, "not finite" in done.text) == (422, True)
      for _ in range(5):
        found = await of_all_replicas(http)
        assert found == before

  asyncio.run(check())


def test_two_changes_at_once_have_one_order(served):
  async def check():
    async with client(served) as http:
      done = await asyncio.gather(
        *(
          http.put(
            f"/v1/tasks/{task.name}", headers=BYTES,
            content=file_of(task, served.folder),
          )
          for task in (BIRDS, DOGS)
        )
      )  # fmt: skip
      told = sorted(
        (one.json()["task_set"] for one in done), key=lambda s: s["version"]
      )
      assert told[1]["version"] == told[0]["version"] + 1
      for one in (await of_all_replicas(http)).values():
        assert one == told[1]
      added = {"birds": BIRDS, "dogs": DOGS}
      served.note(told[1]["digest"], served.newest | added)

  asyncio.run(check())


def test_a_replica_that_was_killed_comes_back_with_the_tasks_of_now(served):
  async def check():
    async with client(served) as http:
      before = await of_all_replicas(http)
      killed, *_ = children_of(served.process, "ray::ServeReplica")
      os.kill(killed, signal.SIGKILL)
      # Nobody waits for who is dead.
      told = await changed(served, http, "pets")
    await until_ready(served)
    async with client(served) as http:
      after = await of_all_replicas(http)
      assert len(after.keys() - before.keys()) == 1
      assert all(one == told for one in after.values())
      answers = []
      for number in range(3):
        files = [("images", ("a.png", PICTURES[number]))]
        done = await http.post("/v1/predict", files=files)
        answers.append((number, done.json()))
    require_answers(served, answers)

  asyncio.run(check())


def test_a_ledger_that_was_killed_loses_no_change(served):
  async def check():
    async with client(served) as http:
      before = await of_all_replicas(http)
      [killed] = children_of(served.process, "ray::LedgerActor")
      os.kill(killed, signal.SIGKILL)
      told = await changed(served, http, "pets", PETS)
      after = await of_all_replicas(http)
    versions = {one["version"] for one in before.values()}
    assert versions == {told["version"] - 1}
    assert before.keys() == after.keys()
    assert all(one == told for one in after.values())

  asyncio.run(check())


def test_it_ends(served):
  """At Ctrl-C; what was added is kept for the next cluster."""
  served.process.send_signal(signal.SIGINT)
  served.process.wait(PATIENCE)
  kept = {path.stem for path in (served.folder / "state/tasks").iterdir()}
  assert kept == {"birds", "cats", "dogs", "pets"}
  assert re.search(r"audit \S+ remove name='birds' client=127", served.log())
