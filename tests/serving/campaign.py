"""Clients of several servers on one folder: they classify, and change tasks.

Each answer is compared with `mv.forward` of the set of tasks that it names. The
environment variables `CHANGES` and `KILLS` set the numbers of both.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import secrets
import time
from pathlib import Path

import httpx
import numpy as np
from conftest import random_task, tiny_backbone
from served import png

import memory_vit as mv
from memory_vit.kinds import CLASSES
from memory_vit.prediction import Predictor
from memory_vit.prediction import task_set as sets
from memory_vit.runtime.checksums import file_digest
from memory_vit.serving.task_folder import TaskFolder

CHANGES = int(os.environ.get("CHANGES", "10"))
KILLS = int(os.environ.get("KILLS", "2"))
CLIENTS = 4
SLOTS = 8
PATIENCE = 400
BACKBONE = tiny_backbone()
TASKS = [
  random_task(BACKBONE, f"t{i}", seed=i, classes=3 + i, cells=1 + i % 3)
  for i in range(7)
]
FIRST = TASKS[:2]
PICTURES = [png(i) for i in range(3)]


def prepare(folder):
  """Write backbone, tasks and token; return the options of a server."""
  mv.save_backbone(BACKBONE, folder / "tiny.npz")
  mv.save_tasks(FIRST, folder / "tasks")
  for i, task in enumerate(TASKS):
    mv.save_task(task, folder / f"{i}.safetensors")
  token = folder / "token"
  token.touch(0o600)
  token.write_text(secrets.token_urlsafe(24))
  return {
    "backbone": str(folder / "tiny.npz"), "task": str(folder / "tasks"),
    "token_file": str(token), "state_dir": str(folder / "state"),
    "batch_sizes": "1", "slots": SLOTS, "top": 10,
  }  # fmt: skip


@dataclasses.dataclass
class Campaign:
  """What clients have seen of servers.

  Attributes:
    folder: of `prepare`.
    servers: has `ready`, the URLs of servers that a client may ask;
      `name(url, headers)`, which of the processes answered; `killed_at`, {URL:
      when one behind it was killed last}; `until_ready()`, names of all; and
      `kill_one(rng, url)`, which starts another one.
    changed: {version: (name, number of its task or None)}.
    answered: {version: when its change was answered}, in seconds.
    took: {version: seconds until its change was answered}.
    maker: {version: the process that answered its change}.
    cut: numbers of changes whose process was killed, by whether they were made.
    at: URL of the last change.
    seen: {process: {version: when it was first seen to answer by it}}.
    last: {process: {version: when the last request that this set answered was
      sent}}.
    answers: {(version, digest, picture): what was answered}.
    requests: that were answered.
    ended: that a killed process did not answer.
  """

  folder: Path
  servers: object
  changed: dict = dataclasses.field(default_factory=dict)
  answered: dict = dataclasses.field(default_factory=dict)
  took: dict = dataclasses.field(default_factory=dict)
  maker: dict = dataclasses.field(default_factory=dict)
  cut: dict = dataclasses.field(
    default_factory=lambda: {"made": 0, "not made": 0}
  )
  at: str = ""
  seen: dict = dataclasses.field(
    default_factory=lambda: collections.defaultdict(dict)
  )
  last: dict = dataclasses.field(
    default_factory=lambda: collections.defaultdict(dict)
  )
  answers: dict = dataclasses.field(
    default_factory=lambda: collections.defaultdict(list)
  )
  requests: int = 0
  ended: int = 0
  is_over: bool = False

  @property
  def stored(self):
    """The set in the folder."""
    return TaskFolder(str(self.folder / "state")).read()

  @contextlib.asynccontextmanager
  async def _load(self):
    """Ask and watch during the body."""
    work = [self._ask(i) for i in range(CLIENTS)]
    work += [self._watch(i) for i in range(3)]
    running = [asyncio.create_task(one) for one in work]
    self.is_over = False
    try:
      yield
    finally:
      self.is_over = True
      await asyncio.gather(*running)

  async def _get(self, http, method, url, path, **sent):
    """An answer; None if the server was killed meanwhile."""
    begun = time.monotonic()
    try:
      done = await http.request(method, url + path, **sent)
      if done.status_code < 500:
        return done
      problem = f"{done.status_code} {done.text}"
    except httpx.TransportError as error:
      problem = repr(error)
    killed_at = self.servers.killed_at.get(url, 0)
    assert killed_at > begun - self.servers.seconds_after_kill, problem
    return None

  async def _ask(self, seed):
    rng, newest = random.Random(seed), collections.Counter()
    async with client() as http:
      while not self.is_over:
        url = rng.choice(self.servers.ready)
        i = rng.randrange(len(PICTURES))
        sent = {"files": [("images", ("a.png", PICTURES[i]))]}
        begun = time.monotonic()
        done = await self._get(http, "POST", url, "/v1/predict", **sent)
        if done is None:
          self.ended += 1
          continue
        assert done.status_code == 200, done.text
        answer = done.json()
        self.requests += 1
        process = self.servers.name(url, done.headers)
        version = answer["task_set"]["version"]
        assert version >= newest[process], "a version went back"
        newest[process] = version
        self._note(process, version, begun)
        key = version, answer["task_set"]["digest"], i
        self.answers[key].append(answer["images"][0]["tasks"])

  async def _watch(self, number):
    """Note when each process answers by which version."""
    async with client() as http:
      while not self.is_over:
        urls = self.servers.ready
        url = urls[number % len(urls)]
        begun = time.monotonic()
        done = await self._get(http, "GET", url, "/readyz")
        if done is not None:
          ready = done.json()
          assert ready["problem"] is None, ready
          process = self.servers.name(url, done.headers)
          self._note(process, ready["task_set"]["version"], begun)
        await asyncio.sleep(0.02)

  def _note(self, process, version, begun):
    last, seen = self.last[process], self.seen[process]
    last[version] = max(begun, last.get(version, 0))
    for one in range(max(seen, default=version - 1) + 1, version + 1):
      seen[one] = time.monotonic()

  async def change(self, rng, http):
    """Make a change through any server; return whether it was made."""
    url = self.at = rng.choice(self.servers.ready)
    before = self.stored
    names = [one.name for one in before.tasks]
    name = rng.choice([task.name for task in TASKS])
    headers = {
      "Authorization": f"Bearer {(self.folder / 'token').read_text()}",
      "Content-Type": "application/octet-stream",
    }
    number, begun = None, time.monotonic()
    if name in names and len(names) > 1 and rng.random() < 0.4:
      sent = {"method": "DELETE"}
    else:
      number = rng.randrange(len(TASKS))
      content = (self.folder / f"{number}.safetensors").read_bytes()
      sent = {"method": "PUT", "content": content}
    path = f"/v1/tasks/{name}"
    done = await self._get(http, url=url, path=path, headers=headers, **sent)
    now = time.monotonic()
    if done is None:  # its process was killed: before or after the change
      version = self.stored.version
      self.cut["not made" if version == before.version else "made"] += 1
      if version == before.version:
        return False
      assert version == before.version + 1
    elif done.status_code == 404:  # another client has removed it
      assert sent["method"] == "DELETE"
      return False
    else:
      assert done.status_code in (200, 201), done.text
      version = done.json()["task_set"]["version"]
      self.answered[version], self.took[version] = now, now - begun
      self.maker[version] = self.servers.name(url, done.headers)
    assert version not in self.changed
    self.changed[version] = name, number
    return True

  async def under_load(self):
    """Make `CHANGES` by two clients, some seconds apart, while others ask."""
    left = CHANGES

    async def run(seed):
      nonlocal left
      rng = random.Random(seed)
      async with client() as http:
        while left > 0:
          left -= 1
          if not await self.change(rng, http):
            left += 1
          await asyncio.sleep(rng.uniform(0, 1.5))

    await self.servers.until_ready()
    async with self._load():
      await asyncio.gather(run(1), run(2))
      await self._all_show()

  async def under_kills(self):
    """Make one change after the other until `KILLS` processes were killed."""
    rng = random.Random(0)

    async def kill():
      for _ in range(KILLS):
        await asyncio.sleep(rng.uniform(0, 0.5))
        await self.servers.kill_one(rng, self.at)

    await self.servers.until_ready()
    async with self._load(), client() as http:
      killing = asyncio.create_task(kill())
      while not killing.done():
        await self.change(rng, http)
      await killing
      await self._all_show()

  async def _all_show(self):
    """Wait until all processes were seen to answer by the newest set."""
    newest = self.stored.version
    names = await self.servers.until_ready()
    async with asyncio.timeout(PATIENCE):
      while not all(newest in self.seen[name] for name in names):
        await asyncio.sleep(0.02)

  def check(self):
    """Compare sets and answers with what they should be.

    Every change is in the set of its version and all later ones, and every
    answer is, to the bit, that of the set whose version and digest it names.
    """
    newest = self.stored
    assert sorted(self.changed) == [*range(2, newest.version + 1)]
    now = {task.name: i for i, task in enumerate(FIRST)}
    by_version = {1: now}
    for version in sorted(self.changed):
      name, number = self.changed[version]
      now = {n: i for n, i in now.items() if n != name}
      by_version[version] = now = (
        now if number is None else {**now, name: number}
      )
    files = TaskFolder(str(self.folder / "state"))
    for one in newest.tasks:
      sent = self.folder / f"{now[one.name]}.safetensors"
      assert (
        file_digest(files.file(one.sha256)) == one.sha256 == file_digest(sent)
      )
    assert {one.name for one in newest.tasks} == now.keys()
    expected = [expected_of(task) for task in TASKS]
    digests = {}
    for (version, digest, picture), answers in self.answers.items():
      wanted = by_version[version]
      if version not in digests:
        digests[version] = digest_of(wanted)
      assert digest == digests[version]
      for answer in answers:
        assert answer.keys() == wanted.keys()
        for name, guesses in answer.items():
          row = expected[wanted[name]][picture]
          assert len(guesses) == len(row)
          for guess in guesses:
            assert guess["probability"] == row[guess["index"]]

  def figures(self):
    """The measurements, for people."""
    behind, over = [], []
    for version, answered in self.answered.items():
      for process, seen in self.seen.items():
        if process == self.maker[version] or min(seen) >= version:
          continue
        if version in seen:
          behind.append(max(0.0, seen[version] - answered))
          sent = [s for v, s in self.last[process].items() if v < version]
          over.append(max(sent) - answered - 1.0 - self.took[version])
    alone = list(self.took.values())
    return {
      "changes": len(self.changed),
      "requests": self.requests,
      "requests that ended with a killed process": self.ended,
      "changes whose process was killed": self.cut,
      "versions seen": len({version for version, *_ in self.answers}),
      "seconds of a change in its own process, median, max": spread(alone),
      "seconds from its answer until another shows it": spread(behind),
      "seconds beyond a poll and the change's own until the last request that "
      "an older set answered": spread(over),
      "of them above 0": f"{sum(s > 0 for s in over)} of {len(over)}",
    }

  def report(self, title):
    """Print and write the measurements."""
    print(f"\n{title}: {json.dumps(self.figures(), indent=1)}")


def spread(values):
  if not values:
    return None
  return [round(float(np.median(values)), 3), round(max(values), 3)]


def client():
  # A connection that was kept alive may end with its server.
  limits = httpx.Limits(max_keepalive_connections=0)
  return httpx.AsyncClient(timeout=PATIENCE, limits=limits)


def expected_of(task):
  """Probabilities of each image, by `mv.forward` of a task alone."""
  slots = mv.fill_slots(BACKBONE, task, slots=SLOTS)
  found = []
  for picture in PICTURES:
    batch = np.asarray(mv.preprocess([picture], task))
    logits = np.asarray(mv.forward(BACKBONE, slots, batch)[task.name])
    found.append(CLASSES.activate(np.asarray(logits, np.float64))[0])
  return found


def digest_of(numbers):
  """The digest of a set, {name: number of its task}."""
  tasks = [sets.named(TASKS[i], name) for name, i in numbers.items()]
  model = Predictor.from_model(BACKBONE, tasks, warm_up=False, slots=SLOTS)
  return model.task_set.digest
