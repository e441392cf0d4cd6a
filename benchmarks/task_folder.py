"""Measure three servers on one folder, while tasks change and one is killed.

  python -m benchmarks.task_folder [--changes=10] [--kills=1]

A client adds, replaces and removes tasks through any of three server processes,
while others send images to all of them. Each answer is compared, to the bit,
with `mv.forward` of the tasks whose digests it names; these must be the tasks
that the folder had at one time, and no process may go back. Otherwise, and if a
server loses a request without being killed, the benchmark ends.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import memory_vit as mv
from benchmarks import attacks, serve
from memory_vit.kinds import CLASSES
from memory_vit.prediction.task_set import answer_digest

PATIENCE = 400.0
_SERVERS = 3
_CLIENTS = 4
_SLOTS = 8
_IMAGES = 3
# {name: number of its task}.
State = dict[str, int]


@dataclasses.dataclass
class Model:
  """A tiny backbone in a folder, its tasks, and what they answer."""

  folder: Path

  def __post_init__(self) -> None:
    backbone = attacks.tiny_backbone()
    self.tasks = [serve.random_task(backbone, f"t{i}", i) for i in range(7)]
    mv.save_backbone(backbone, self.folder / "tiny.npz")
    backbone = mv.load_backbone(self.folder / "tiny.npz")
    mv.save_tasks(self.tasks[:2], self.folder / "tasks")
    self.token = secrets.token_urlsafe(24)
    (self.folder / "token").touch(0o600)
    (self.folder / "token").write_text(self.token)
    self.images = [serve.random_image(i) for i in range(_IMAGES)]
    self.contents = []
    for task in self.tasks:
      file = self.folder / "task.safetensors"
      mv.save_task(task, file)
      self.contents.append(file.read_bytes())
    self.digests = [*map(answer_digest, self.tasks)]
    self.expected = [self._expected(backbone, task) for task in self.tasks]

  def _expected(self, backbone: mv.Backbone, task: mv.Task) -> list[np.ndarray]:
    """Probabilities of each image, by `mv.forward` of a task alone."""
    slots = mv.fill_slots(backbone, task, slots=_SLOTS)
    found = []
    for image in self.images:
      batch = np.asarray(mv.preprocess([image], task))
      logits = np.asarray(mv.forward(backbone, slots, batch)[task.name])
      found.append(CLASSES.activate(logits.astype(np.float64))[0])
    return found

  @property
  def options(self) -> dict[str, Any]:
    """Options of a server."""
    return {
      "backbone": str(self.folder / "tiny.npz"),
      "task": str(self.folder / "tasks"),
      "token_file": str(self.folder / "token"),
      "state_dir": str(self.folder / "state"),
      "batch_sizes": "1",
      "slots": _SLOTS,
      "top": 10,
    }

  def stored(self) -> State:
    """The tasks in the folder."""
    return {
      path.stem: self.contents.index(path.read_bytes())
      for path in (self.folder / "state" / "tasks").glob("*.safetensors")
    }


class Processes:
  """Server processes of this machine, each on its port.

  Attributes:
    ready: URLs that a client may ask.
    killed_at: {URL: when a process behind it was killed last}.
    seconds_after_kill: in which a request may still end with that process.
  """

  seconds_after_kill = 0.0

  def __init__(self, model: Model) -> None:
    self._model = model
    self.running: dict[str, subprocess.Popen[bytes]] = {}
    self.ready: list[str] = []
    self.killed_at: dict[str, float] = {}

  def start(self, url: str) -> None:
    options = {**self._model.options, "port": url.rpartition(":")[2]}
    command = [sys.executable, "-m", "memory_vit", "serve"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with (self._model.folder / "log").open("a") as log:
      self.running[url] = subprocess.Popen(command, stdout=log, stderr=log)

  async def until_ready(self) -> None:
    async with client() as http, asyncio.timeout(PATIENCE):
      for url, process in self.running.items():
        while url not in self.ready:
          _require(process.poll() is None, self.log)
          with contextlib.suppress(httpx.TransportError):
            if (await http.get(f"{url}/readyz")).status_code == 200:
              self.ready.append(url)
          await asyncio.sleep(0.05)

  @property
  def log(self) -> str:
    return (self._model.folder / "log").read_text()[-2000:]

  def name(self, url: str, headers: Mapping[str, str]) -> Any:
    """The process that gave an answer."""
    return url, self.running[url].pid

  async def kill_one(self, rng: random.Random, url: str) -> None:
    """Kill a server, perhaps the one at `url`, and start it again."""
    url = rng.choice([*self.ready, url])
    self.ready.remove(url)
    self.killed_at[url] = time.monotonic()
    self.running[url].kill()
    await asyncio.to_thread(self.running[url].wait)
    self.start(url)
    await self.until_ready()


@contextlib.contextmanager
def processes(model: Model) -> Iterator[Processes]:
  """Run servers; at the end each must end by SIGTERM."""
  found = Processes(model)
  with contextlib.ExitStack() as ports:
    for _ in range(_SERVERS):
      free = ports.enter_context(socket.socket())
      free.bind(("127.0.0.1", 0))
      found.start(f"http://127.0.0.1:{free.getsockname()[1]}")
  try:
    yield found
    for process in found.running.values():
      process.send_signal(signal.SIGTERM)
    ends = {process.wait(PATIENCE) for process in found.running.values()}
    _require(ends == {-signal.SIGTERM}, found.log)
  finally:
    for process in found.running.values():
      process.kill()


class Campaign:
  """Clients that ask several servers while tasks change.

  Attributes:
    servers: as `Processes`; several may be behind one URL.
  """

  def __init__(self, model: Model, servers: Any) -> None:
    self._model, self._servers = model, servers
    self._history: list[State] = [{"t0": 0, "t1": 1}]
    # Of each client and process, one after the other.
    self._answers: dict[Any, list[dict[str, Any]]] = collections.defaultdict(
      list
    )
    self._at = ""  # the URL of the last change
    self._is_over = False
    self._cut = collections.Counter[str]()
    self._changes = self._kills = self._ended = self._right = 0
    self._seconds: dict[str, list[float]] = collections.defaultdict(list)

  async def under_load(self, changes: int) -> None:
    """Make changes, and see each on another server."""
    rng = random.Random(0)
    async with self._load(), client() as http:
      for number in range(changes):
        begun = time.monotonic()
        name, maker = await self._change(rng, http)
        answered = time.monotonic()
        self._seconds["change"].append(answered - begun)
        way = "waiting for it" if number % 2 else "until another shows it"
        if number % 2:
          await self._wait_for(name, rng, http)
        else:
          await self._followed(maker, rng, http)
        self._seconds[way].append(time.monotonic() - answered)

  async def under_kills(self, kills: int) -> None:
    """Kill servers one after the other, while tasks change."""
    rng = random.Random(1)

    async def kill() -> None:
      for _ in range(kills):
        await asyncio.sleep(rng.uniform(0, 0.5))
        await self._servers.kill_one(rng, self._at)
        self._kills += 1

    async with self._load(), client() as http:
      killing = asyncio.create_task(kill())
      while not killing.done():
        await self._change(rng, http)
      await killing

  @contextlib.asynccontextmanager
  async def _load(self) -> AsyncIterator[None]:
    """Send images during the body, and until all servers show its last set."""
    await self._servers.until_ready()
    self._is_over = False
    asking = [asyncio.create_task(self._ask(i)) for i in range(_CLIENTS)]
    try:
      yield
      await self._all_follow()
    finally:
      self._is_over = True
      await asyncio.gather(*asking)

  async def _all_follow(self) -> None:
    """Wait until all processes show the last set, and no problems."""
    rounds = 0
    async with client() as http, asyncio.timeout(PATIENCE):
      while rounds < 4 * _SERVERS:  # of replicas, behind one address, as well
        rounds += 1
        for url in self._servers.ready:
          found = (await http.get(f"{url}/readyz")).json()
          _require(found["problems"] == {}, found)
          if found["task_set"]["tasks"] != self._digests():
            rounds = 0
        await asyncio.sleep(0.02)

  def _digests(self, state: State | None = None) -> dict[str, str]:
    """Digests of a state, by default the last one."""
    state = self._history[-1] if state is None else state
    return {name: self._model.digests[i] for name, i in state.items()}

  async def _get(
    self, http: httpx.AsyncClient, method: str, url: str, path: str, **sent: Any
  ) -> httpx.Response | None:
    """An answer; None if the server was killed meanwhile."""
    begun = time.monotonic()
    try:
      done = await http.request(method, url + path, **sent)
      if done.status_code < 500:
        return done
      problem = f"{done.status_code} {done.text}"
    except httpx.TransportError as error:
      problem = repr(error)
    killed_at = self._servers.killed_at.get(url, 0.0)
    _require(killed_at > begun - self._servers.seconds_after_kill, problem)
    return None

  async def _ask(self, number: int) -> None:
    rng = random.Random(number)
    async with client() as http:
      while not self._is_over:
        url = rng.choice(self._servers.ready)
        await self._predict(http, number, url, rng.randrange(_IMAGES))

  async def _predict(
    self,
    http: httpx.AsyncClient,
    number: int,
    url: str,
    image: int,
    headers: Mapping[str, str] | None = None,
  ) -> None:
    files = [("images", ("a.jpg", self._model.images[image]))]
    sent = {"files": files, "headers": headers}
    done = await self._get(http, "POST", url, "/v1/predict", **sent)
    if done is None:
      self._ended += 1
      return
    _require(done.status_code == 200, done.text)
    process = self._servers.name(url, done.headers)
    answer = {**done.json(), "image": image}
    self._answers[number, process].append(answer)

  async def _change(
    self, rng: random.Random, http: httpx.AsyncClient
  ) -> tuple[str, Any]:
    """Make a change through any server; return its name and the process."""
    url = self._at = rng.choice(self._servers.ready)
    before = self._history[-1]
    name = f"t{rng.randrange(len(self._model.tasks))}"
    after = {n: i for n, i in before.items() if n != name}
    sent: dict[str, Any] = {"method": "DELETE"}
    if name not in before or not after or rng.random() < 0.6:
      after[name] = rng.randrange(len(self._model.tasks))
      content = self._model.contents[after[name]]
      sent = {"method": "PUT", "content": content}
    headers = {
      "Authorization": f"Bearer {self._model.token}",
      "Content-Type": "application/octet-stream",
    }
    path = f"/v1/tasks/{name}"
    done = await self._get(http, url=url, path=path, headers=headers, **sent)
    stored = self._model.stored()
    if done is None:  # its process was killed: before or after the change
      _require(stored in (before, after), stored)
      self._cut["made" if stored == after else "not made"] += 1
    else:
      _require(done.status_code in (200, 201), done.text)
      _require(stored == after, stored)
      self._changes += 1
    self._history.append(stored)
    return name, done and self._servers.name(url, done.headers)

  async def _wait_for(
    self, name: str, rng: random.Random, http: httpx.AsyncClient
  ) -> None:
    """Ask another server for an answer by the last change."""
    url = rng.choice([u for u in self._servers.ready if u != self._at] or
                     self._servers.ready)  # fmt: skip
    digest = self._digests().get(name, "none")
    headers = {"x-wait-for": f"{name}={digest}"}
    await self._predict(http, -1, url, 0, headers)
    last = [a[-1] for (number, _), a in self._answers.items() if number == -1]
    _require(any(a["task_set"]["tasks"] == self._digests() for a in last), last)

  async def _followed(
    self, maker: Any, rng: random.Random, http: httpx.AsyncClient
  ) -> None:
    """Wait until another process shows the last change by itself."""
    async with asyncio.timeout(PATIENCE):
      while True:
        url = rng.choice(self._servers.ready)
        done = await http.get(f"{url}/readyz")
        shown = done.json()["task_set"]["tasks"]
        is_other = self._servers.name(url, done.headers) != maker
        if is_other and shown == self._digests():
          return
        await asyncio.sleep(0.02)

  def check(self) -> None:
    """Compare all answers with what they should be."""
    states = [self._digests(state) for state in self._history]
    set_digests: dict[str, str] = {}
    for answers in self._answers.values():
      at = 0
      for answer in answers:
        shown = answer["task_set"]
        while at < len(states) and states[at] != shown["tasks"]:
          at += 1
        _require(at < len(states), f"never stored, or went back: {shown}")
        key = json.dumps(shown["tasks"], sort_keys=True)
        known = set_digests.setdefault(key, shown["digest"])
        _require(known == shown["digest"], shown)
        [image] = answer["images"]
        _require(image["tasks"].keys() == shown["tasks"].keys(), image)
        for name, guesses in image["tasks"].items():
          number = self._model.digests.index(shown["tasks"][name])
          row = self._model.expected[number][answer["image"]]
          found = {guess["index"]: guess["probability"] for guess in guesses}
          _require(found == dict(enumerate(row)), (name, found))
        self._right += 1
    _require(len({*set_digests.values()}) == len(set_digests), set_digests)

  def figures(self) -> dict[str, Any]:
    """The measurements, for people."""
    return {
      "changes": self._changes,
      "requests": sum(map(len, self._answers.values())),
      "of them compared and right": self._right,
      "kills": self._kills,
      "requests that ended with a killed process": self._ended,
      "changes whose process was killed": dict(self._cut),
      "seconds, median and max": {
        name: [round(float(np.median(some)), 3), round(max(some), 3)]
        for name, some in self._seconds.items()
      },
    }


def _require(ok: bool, found: object) -> None:
  if not ok:
    raise RuntimeError(f"the servers did what they must not: {found}")


def client() -> httpx.AsyncClient:
  # A connection that was kept alive may end with its server.
  limits = httpx.Limits(max_keepalive_connections=0)
  return httpx.AsyncClient(timeout=PATIENCE, limits=limits)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measure, and print the result."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--changes", type=int, default=10)
  parser.add_argument("--kills", type=int, default=1)
  arguments = parser.parse_args(argv)
  with tempfile.TemporaryDirectory() as folder:
    model = Model(Path(folder))
    with processes(model) as servers:
      campaign = Campaign(model, servers)
      asyncio.run(campaign.under_load(arguments.changes))
      asyncio.run(campaign.under_kills(arguments.kills))
    campaign.check()
  result = campaign.figures()
  print(json.dumps(result, indent=2))
  return result


if __name__ == "__main__":
  main()
