"""Measure the server under load while its tasks change; and a model per task.

  python -m benchmarks.serve [--backbone=NPZ] [--seconds=120] [--clients=8]
    [--tasks=4] [--mixed] [--json=FILE]

Clients send images to a server process without pause, while another client
adds, replaces and removes tasks; with --mixed they are of several regimes and
kinds. Each answer is compared with `mv.forward` of
the set of tasks that it names, so a lost request or a mixed answer ends the
benchmark. For comparison, every request also goes to servers of one task each,
one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import io
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
from PIL import Image

import memory_vit as mv

_BATCH_SIZES = (1, 8)
_IMAGES = 12
_MOST_PER_REQUEST = 3
_TOLERANCE = 1e-5
_SECONDS_TO_START = 300.0
# {task: {index of an output: probability or value}} for one image.
Answers = dict[str, dict[int, float]]


@dataclasses.dataclass
class Load:
  """Observations of the clients."""

  latencies: list[float] = dataclasses.field(default_factory=list)  # seconds
  busy: int = 0  # answers of status 503, after which a request was repeated
  # {(digest of the set of tasks, image): answers}.
  answers: dict[tuple[str, int], list[Answers]] = dataclasses.field(
    default_factory=dict
  )
  images: int = 0


@dataclasses.dataclass(frozen=True)
class Server:
  """A server process."""

  url: str
  token: str
  process: subprocess.Popen[str]

  async def metric(self, http: httpx.AsyncClient, name: str) -> float:
    """A number of /metrics."""
    text = (await http.get(f"{self.url}/metrics")).text
    found = re.search(rf"^{name} (\S+)$", text, re.M)
    if found is None:
      raise LookupError(name)
    return float(found[1])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measure, print the result, and write --json."""
  arguments = _parser().parse_args(argv)
  backbone = mv.load_backbone(arguments.backbone)
  with tempfile.TemporaryDirectory() as folder:
    result = asyncio.run(_measure(backbone, arguments, Path(folder)))
  text = json.dumps(result, indent=2)
  print(text)
  if arguments.json:
    Path(arguments.json).write_text(text + "\n")
  return result


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--backbone", required=True)
  parser.add_argument("--seconds", type=float, default=120)
  parser.add_argument("--clients", type=int, default=8)
  parser.add_argument("--tasks", type=int, default=4)
  parser.add_argument(
    "--mixed", action="store_true", help="heads, side streams, and values"
  )
  parser.add_argument("--json")
  return parser


async def _measure(
  backbone: mv.Backbone, arguments: argparse.Namespace, folder: Path
) -> dict[str, Any]:
  tasks = [
    random_task(backbone, f"t{i}", i, mixed=arguments.mixed)
    for i in range(arguments.tasks + 2)
  ]
  mv.save_tasks(tasks, folder / "tasks")
  paths = [str(folder / "tasks" / task.name) for task in tasks]
  images = [random_image(i) for i in range(_IMAGES)]
  seconds, clients = arguments.seconds, arguments.clients
  source, given = arguments.backbone, paths[: arguments.tasks]
  with serving(source, given, folder / "many") as server:
    many, memory = await _under_load(
      server, images, tasks, arguments.tasks, seconds, clients
    )
  checked = check(backbone, images, many, memory["sets"])
  with contextlib.ExitStack() as stack:
    each = [
      stack.enter_context(serving(source, [path], folder / Path(path).name))
      for path in given
    ]
    apart = await _one_after_the_other(each, images, seconds / 4, clients)
  return {
    "cpus": os.cpu_count(),
    "load_average": os.getloadavg()[0],
    "clients": clients,
    "seconds": seconds,
    "requests": len(many.latencies),
    "images": many.images,
    "busy": many.busy,
    "changes": memory["changes"],
    **checked,
    "rss_mib": memory["rss_mib"],
    "compilations": memory["compilations"],
    "one_server": percentiles(many.latencies),
    "a_server_per_task": percentiles(apart.latencies),
  }


def random_task(
  backbone: mv.Backbone, name: str, seed: int, *, mixed: bool = False
) -> mv.Task:
  """A task of 10 outputs, as if it had been trained: of classes, with 5 cells.

  If they are `mixed`, a task with an even `seed` has a side stream as well,
  others are heads, and every third is of values.
  """
  kind, regime = mv.TaskKind(), "memory_masked"
  if mixed:
    regime = "head" if seed % 2 else "cls+memory+norms+layers+side"
    if seed % 3 == 2:
      numbers = tuple(np.arange(1.0, 11).tolist())
      kind = mv.TaskKind(name="values", mean=numbers, std=numbers)
  task = mv.init_task(
    jax.random.key(seed),
    backbone,
    name=name,
    num_classes=10,
    kind=kind,
    regime=regime,
  )
  rng = np.random.default_rng(seed)
  params = jax.tree.map(
    lambda a: (0.3 * rng.standard_normal(a.shape)).astype(np.float32),
    task.params,
  )
  return mv.Task(task.spec, params)


def random_image(seed: int) -> bytes:
  """A generated image, as a JPEG file."""
  rng = np.random.default_rng(seed)
  small = rng.integers(0, 256, (9, 12, 3), np.uint8)
  file = io.BytesIO()
  Image.fromarray(small).resize((400, 300)).save(file, "JPEG")
  return file.getvalue()


@contextlib.contextmanager
def serving(
  backbone: str,
  tasks: Sequence[str],
  folder: Path,
  *options: str,
  compiled: bool = True,
) -> Iterator[Server]:
  """Run a server process; the body begins when it is ready, or compiled too."""
  folder.mkdir(parents=True)
  token = secrets.token_urlsafe(24)
  file = folder / "token"
  file.touch(0o600)
  file.write_text(token)
  command = [
    sys.executable, "-m", "memory_vit", "serve", f"--backbone={backbone}",
    *(f"--task={path}" for path in tasks), "--port=0", "--top=10",
    f"--token_file={file}", "--slots=8",
    f"--batch_sizes={','.join(map(str, _BATCH_SIZES))}", *options,
  ]  # fmt: skip
  with (
    (folder / "log").open("w") as log,
    subprocess.Popen(
      command, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process,
  ):
    try:
      line = process.stdout.readline() if process.stdout else ""
      found = re.search(r"http://\S+", line)
      if found is None:
        raise RuntimeError((folder / "log").read_text()[-2000:])
      wait_until_ready(found[0], compiled)
      yield Server(found[0], token, process)
    finally:
      process.terminate()
      if process.wait(60) != -signal.SIGTERM:
        print((folder / "log").read_text()[-2000:], file=sys.stderr)
        raise RuntimeError(f"the server ended with {process.returncode}")


def wait_until_ready(url: str, compiled: bool = True) -> None:
  until = time.monotonic() + _SECONDS_TO_START
  while time.monotonic() < until:
    with contextlib.suppress(httpx.TransportError):
      done = httpx.get(f"{url}/readyz")
      if done.status_code == 200 and not (
        compiled and done.json()["compiling"]
      ):
        return
    time.sleep(0.1)
  raise RuntimeError("the server does not become ready")


async def _under_load(
  server: Server,
  images: Sequence[bytes],
  tasks: Sequence[mv.Task],
  first: int,
  seconds: float,
  clients: int,
) -> tuple[Load, dict[str, Any]]:
  """Send requests and changes concurrently; also measures memory."""
  load = Load()
  async with _client() as http:
    sets = {
      await _digest(server, http): {task.name: task for task in tasks[:first]}
    }
    until = time.monotonic() + seconds
    asking = [
      asyncio.create_task(_ask(server.url, images, load, until, i))
      for i in range(clients)
    ]
    changing = asyncio.create_task(change(server, http, tasks, sets, until))
    await asyncio.sleep(seconds / 10)
    name = "process_resident_memory_bytes"
    before = await server.metric(http, name)
    changes, *_ = await asyncio.gather(changing, *asking)
    after = await server.metric(http, name)
    compiled = await server.metric(http, "memory_vit_compilations")
  return load, {
    "sets": sets,
    "changes": changes,
    "rss_mib": [round(before / 2**20), round(after / 2**20)],
    "compilations": int(compiled),
  }


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[httpx.AsyncClient]:
  async with httpx.AsyncClient(timeout=120) as http:
    yield http


async def _ask(
  url: str, images: Sequence[bytes], load: Load, until: float, seed: int
) -> None:
  """A client: one request after the other."""
  rng = random.Random(seed)
  async with _client() as http:
    while time.monotonic() < until:
      count = rng.randint(1, _MOST_PER_REQUEST)
      chosen = rng.choices(range(len(images)), k=count)
      begun = time.monotonic()
      answer = await _predict(http, url, [images[i] for i in chosen], load)
      load.latencies.append(time.monotonic() - begun)
      _note(load, answer, chosen)


async def _predict(
  http: httpx.AsyncClient, url: str, encoded: Sequence[bytes], load: Load
) -> Mapping[str, Any]:
  """The answer to a request, which is repeated while the server is busy."""
  files = [("images", (f"{i}.jpg", one)) for i, one in enumerate(encoded)]
  while True:
    done = await http.post(f"{url}/v1/predict", files=files)
    if done.status_code == 200:
      found: Mapping[str, Any] = done.json()
      return found
    if done.status_code != 503:
      raise RuntimeError(f"a request was lost: {done.status_code} {done.text}")
    load.busy += 1
    await asyncio.sleep(float(done.headers["retry-after"]))


def _note(load: Load, answer: Mapping[str, Any], chosen: Sequence[int]) -> None:
  digest, names = answer["task_set"]["digest"], answer["task_set"]["tasks"]
  if len(answer["images"]) != len(chosen):
    raise RuntimeError("an image was lost")
  for i, image in zip(chosen, answer["images"], strict=True):
    if sorted(image["tasks"]) != sorted(names):
      raise RuntimeError(f"tasks differ from those of the set {digest}")
    found = {
      name: _by_output(answer) for name, answer in image["tasks"].items()
    }
    load.answers.setdefault((digest, i), []).append(found)
    load.images += 1


def _by_output(answer: Any) -> dict[int, float]:
  if isinstance(answer, dict):
    return dict(enumerate(one["value"] for one in answer["values"]))
  return {guess["index"]: guess["probability"] for guess in answer}


async def _digest(server: Server, http: httpx.AsyncClient) -> str:
  """The digest of the set of tasks that answers."""
  tasks = (await http.get(f"{server.url}/v1/tasks")).json()
  return str(tasks["task_set"]["digest"])


async def change(
  server: Server,
  http: httpx.AsyncClient,
  tasks: Sequence[mv.Task],
  sets: dict[str, dict[str, mv.Task]],
  until: float,
) -> int:
  """Add, replace and remove tasks; records each set, and returns how many."""
  rng = random.Random(0)
  with tempfile.TemporaryDirectory() as folder:
    files = []
    for task in tasks:
      path = Path(folder) / f"{task.name}.safetensors"
      mv.save_task(task, path, format="safetensors")
      files.append(path.read_bytes())
  headers = {
    "Authorization": f"Bearer {server.token}",
    "Content-Type": "application/octet-stream",
  }
  names = [task.name for task in tasks]
  [current], changes = [*map(dict, sets.values())], 0
  while time.monotonic() < until:
    name = rng.choice(names)
    url = f"{server.url}/v1/tasks/{name}"
    if name in current and len(current) > 1 and rng.random() < 0.5:
      done = await http.delete(url, headers=headers)
      del current[name]
    else:  # any task under this name
      i = rng.randrange(len(tasks))
      done = await http.put(url, content=files[i], headers=headers)
      current[name] = tasks[i]
    if done.status_code not in (200, 201):
      raise RuntimeError(f"a change failed: {done.status_code} {done.text}")
    sets[await _digest(server, http)] = dict(current)
    changes += 1
    await asyncio.sleep(0.5)
  return changes


def check(
  backbone: mv.Backbone,
  files: Sequence[bytes],
  load: Load,
  sets: Mapping[str, Mapping[str, mv.Task]],
) -> dict[str, Any]:
  """Compare each answer with `mv.forward`; raises if one differs."""
  images = mv.preprocess(files, next(iter(next(iter(sets.values())).values())))
  expected: dict[str, dict[str, np.ndarray]] = {}
  worst, equal, total = 0.0, 0, 0
  for (digest, i), answers in load.answers.items():
    if digest not in expected:
      expected[digest] = _activated(backbone, sets[digest], images)
    for answer in answers:
      if answer.keys() != expected[digest].keys():
        raise RuntimeError(f"an answer mixes the set {digest} with others")
      for name, found in answer.items():
        row = np.array([found[c] for c in range(len(found))])
        # In each batch size that the server may have used.
        right = expected[digest][name][:, i]
        differences = (np.abs(right - row) / np.maximum(1, np.abs(row))).max(
          axis=-1
        )
        worst, total = max(worst, float(differences.max())), total + 1
        equal += bool((differences == 0).any())
        if differences.max() > _TOLERANCE:
          raise RuntimeError(
            f"set {digest}, {name}, image {i}: off by {differences}"
          )
  return {
    "checked": total,
    "worst_difference": worst,
    "equal_to_the_bit": round(equal / total, 4),
    "sets_seen": len({digest for digest, _ in load.answers}),
  }


def _activated(
  backbone: mv.Backbone, tasks: Mapping[str, mv.Task], images: np.ndarray
) -> dict[str, np.ndarray]:
  """{task: float64 (2, b, c)} by `mv.forward`, in batches of 1 and of 8."""
  named = [
    mv.Task(dataclasses.replace(task.spec, name=name), task.params)
    for name, task in tasks.items()
  ]
  slots = mv.fill_slots(backbone, named, slots=8)
  found: dict[str, list[list[np.ndarray]]] = {name: [] for name in tasks}
  for size in _BATCH_SIZES:
    for shares in found.values():
      shares.append([])
    for image in images:
      batch = np.zeros((size, *image.shape), np.float32)
      batch[0] = image
      out = mv.forward(backbone, slots, batch)
      for name in tasks:
        logits = np.asarray(out[name][:1])
        activated = tasks[name].spec.kind.activate(logits.astype(np.float64))
        found[name][-1].append(activated[0])
  return {name: np.array(shares) for name, shares in found.items()}


async def _one_after_the_other(
  servers: Sequence[Server],
  images: Sequence[bytes],
  seconds: float,
  clients: int,
) -> Load:
  """Send each request to all servers, one after the other."""
  load, until = Load(), time.monotonic() + seconds

  async def ask(seed: int) -> None:
    rng = random.Random(seed)
    async with _client() as http:
      while time.monotonic() < until:
        count = rng.randint(1, _MOST_PER_REQUEST)
        chosen = [rng.choice(images) for _ in range(count)]
        begun = time.monotonic()
        for server in servers:
          await _predict(http, server.url, chosen, load)
        load.latencies.append(time.monotonic() - begun)

  await asyncio.gather(*map(ask, range(clients)))
  return load


def percentiles(latencies: Sequence[float]) -> dict[str, float]:
  """Percentiles of latencies in milliseconds, given seconds; their number."""
  values = 1e3 * np.array(latencies)
  return {
    "requests": len(latencies),
    "p50_ms": round(float(np.percentile(values, 50)), 1),
    "p99_ms": round(float(np.percentile(values, 99)), 1),
  }


if __name__ == "__main__":
  main()
