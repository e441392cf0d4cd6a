"""Measure /healthz and small requests while a server is attacked or compiles.

  python -m benchmarks.small_requests [--seconds=10] [--only=NAME] [--json=FILE]

The server has the glyph ViT of the package. Attacks of the first kind ask for
large answers: /healthz must never take more than 0.3 s. Those of the second
kind take long to decode: of small requests (one PNG of 24 pixels), the slowest
of a hundred must not take more than twice the quiet time, plus 50 ms. Then a
server without a cache of programs compiles: at its start, from being ready on,
and for a task for which slots grow. It takes about six minutes; attacks.py
measures memory and ordinary requests.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import functools
import http.client
import io
import json
import multiprocessing
import os
import struct
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import jax
import numpy as np
from PIL import Image

import memory_vit as mv
from benchmarks import serve
from benchmarks.attacks import form
from memory_vit.runtime.tables import markdown_table

_MOST_HEALTH_SECONDS = 0.3
_FORM = {"Content-Type": "multipart/form-data; boundary=attacks"}
_JSON = {"Content-Type": "application/json"}
_CLASSES, _LABELS = 20_000, 100_000
_IMAGES = 32


@dataclasses.dataclass(frozen=True)
class Attack:
  """A request that several clients repeat without a pause.

  Clients that leave read no answer.
  """

  clients: int
  body: bytes = b""
  headers: dict[str, str] = dataclasses.field(default_factory=dict)
  path: str = "/v1/predict"
  leaves: bool = False


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
  """Measure, print tables, and write --json."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--seconds", type=float, default=10, help="each attack")
  parser.add_argument("--only", action="append", choices=[*ATTACKS, COMPILING])
  parser.add_argument("--json")
  arguments = parser.parse_args(argv)
  names = arguments.only or [*ATTACKS, COMPILING]
  rows, compiling = [], []
  with tempfile.TemporaryDirectory() as folder:
    for kind, tasks in ((_HEALTH, _large_tasks), (_SMALL, _small_task)):
      if not (some := [name for name in names if name in kind]):
        continue
      place = Path(folder) / tasks.__name__
      paths = [str(path) for path in tasks(place)]
      with serve.serving("glyphs", paths, place / "server") as server:
        quiet = _measured(server.url, None, arguments.seconds)
        for name in some:
          row = _row(name, server.url, quiet, arguments.seconds)
          rows.append(row)
          print(json.dumps(row), flush=True)
    if COMPILING in names:
      compiling = _while_compiling(
        Path(folder) / "compiling", arguments.seconds
      )
  for some in filter(None, (rows, compiling)):
    print(table(some))
  if arguments.json:
    text = json.dumps(rows + compiling, indent=2)
    Path(arguments.json).write_text(text + "\n")
  return rows + compiling


def table(rows: Sequence[dict[str, Any]]) -> str:
  """The rows as Markdown."""
  cells = [[str(value) for value in row.values()] for row in rows]
  return markdown_table(list(rows[0]), cells)


def _row(
  name: str, url: str, quiet: Measured, seconds: float
) -> dict[str, Any]:
  found = _measured(url, ATTACKS[name](), seconds)
  most = 2 * _percentile(quiet.small, 99) + 0.05
  holds = (
    max(found.health) <= _MOST_HEALTH_SECONDS
    if name in _HEALTH
    else _percentile(found.small, 99) <= most
  )
  return {
    "attack": name,
    "attackers": dict(sorted(found.attackers.items())),
    "small requests": dict(sorted(found.statuses.items())),
    "healthz max ms": _ms(max(found.health)),
    "quiet": _ms(max(quiet.health)),
    "small p50 ms": _ms(_percentile(found.small, 50)),
    "p99": _ms(_percentile(found.small, 99)),
    "quiet p50": _ms(_percentile(quiet.small, 50)),
    "quiet p99": _ms(_percentile(quiet.small, 99)),
    "bound": "healthz 300" if name in _HEALTH else f"p99 {_ms(most)}",
    "holds": holds,
  }


def _while_compiling(folder: Path, seconds: float) -> list[dict[str, Any]]:
  """Without a cache: from readiness on, in quiet, and while slots grow."""
  few, large = _growing_tasks(folder)
  with (
    mock.patch.dict(os.environ, {"MEMORY_VIT_COMPILE_CACHE": "off"}),
    serve.serving(
      "glyphs", [str(few)], folder / "server", "--batch_sizes=1,8,32",
      compiled=False,
    ) as server,
  ):  # fmt: skip
    with _measuring(server.url) as start:
      serve.wait_until_ready(server.url)
    quiet = _measured(server.url, None, seconds)
    headers = {
      "Authorization": f"Bearer {server.token}",
      "Content-Type": "application/octet-stream",
    }
    with _measuring(server.url) as growing:
      path, body = "/v1/tasks/large", large.read_bytes()
      status = _request(server.url, "PUT", path, body, headers)
  if status != 201:
    raise RuntimeError(f"the task was not added: {status}")
  return [
    {
      "compiling": name,
      "seconds": round(found.seconds, 1),
      "small requests": dict(found.statuses),
      "healthz max ms": _ms(max(found.health)),
      "small p50 ms": _ms(_percentile(found.small, 50)),
      "p99": _ms(_percentile(found.small, 99)),
      "max": _ms(max(found.small)),
    }
    for name, found in (
      ("nothing", quiet), ("after the start", start), ("slots grow", growing),
    )
  ]  # fmt: skip


def _ms(seconds: float) -> int:
  return round(1e3 * seconds)


def _percentile(seconds: Sequence[float], percent: float) -> float:
  return float(np.percentile(seconds, percent))


@dataclasses.dataclass
class Measured:
  """Seconds of requests, and of all; statuses are 0 without an answer."""

  seconds: float = 0
  health: list[float] = dataclasses.field(default_factory=list)
  small: list[float] = dataclasses.field(default_factory=list)
  statuses: Counter[int] = dataclasses.field(default_factory=Counter)
  attackers: Counter[int] = dataclasses.field(default_factory=Counter)


def _measured(url: str, attack: Attack | None, seconds: float) -> Measured:
  """Measure while other processes attack; without an attack in quiet."""
  # A process of its own: its Python must not delay what is measured.
  context = multiprocessing.get_context("spawn")
  statuses = context.SimpleQueue()
  attacking = context.Process(
    target=_attack, args=(url, attack, seconds, statuses)
  )
  if attack:
    attacking.start()
    statuses.get()  # it has begun
  with _measuring(url) as found:
    time.sleep(seconds)
  if attack:
    found.attackers = statuses.get()
    attacking.join()
  return found


@contextlib.contextmanager
def _measuring(url: str) -> Iterator[Measured]:
  """Measure until the body ends."""
  found, since = Measured(), time.monotonic()
  body = form(_png(Image.new("RGB", (24, 24), "red")), fields=["few"])

  def health() -> None:
    begun = time.monotonic()
    _request(url, "GET", "/healthz")
    found.health.append(time.monotonic() - begun)

  def small() -> None:
    begun = time.monotonic()
    status = _request(url, "POST", "/v1/predict", body, _FORM)
    found.statuses[status] += 1
    if status == 200:
      found.small.append(time.monotonic() - begun)

  with _repeated(health, 0.02), _repeated(small, 0.05), _repeated(small, 0.05):
    yield found
  found.seconds = time.monotonic() - since


@contextlib.contextmanager
def _repeated(function: Callable[[], None], pause: float) -> Iterator[None]:
  ended = threading.Event()

  def work() -> None:
    while not ended.wait(pause):
      function()

  thread = threading.Thread(target=work)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


def _attack(url: str, attack: Attack, seconds: float, statuses: Any) -> None:
  """Repeat a request by all clients; put what was answered."""
  found: Counter[int] = Counter()
  until = time.monotonic() + seconds
  statuses.put(None)

  def work() -> None:
    while time.monotonic() < until:
      method = "POST" if attack.body else "GET"
      found[
        _request(
          url, method, attack.path, attack.body, attack.headers, attack.leaves
        )
      ] += 1

  threads = [threading.Thread(target=work) for _ in range(attack.clients)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  statuses.put(found)


def _request(
  url: str,
  method: str,
  path: str,
  body: bytes = b"",
  headers: dict[str, str] | None = None,
  leaves: bool = False,
) -> int:
  """Status of the answer; 0 without one."""
  place = urlsplit(url)
  connection = http.client.HTTPConnection(
    place.hostname or "", place.port, timeout=300
  )
  with contextlib.closing(connection):
    try:
      connection.request(method, path, body or None, headers or {})
      if leaves:
        time.sleep(0.05)
        return 0
      answer = connection.getresponse()
      answer.read()
    except (OSError, http.client.HTTPException):
      return 0
    return answer.status


# The tasks.


def _large_tasks(folder: Path) -> Iterator[Path]:
  """20,000 classes, 100,000 labels whose thresholds are 0, 20,000 values."""
  labels = mv.TaskKind(name="labels", thresholds=(0.0,) * _LABELS)
  numbers = (1.0,) * _CLASSES
  values = mv.TaskKind(name="values", mean=numbers, std=numbers)
  yield from _saved_tasks(
    folder,
    ("few", 10, {}),
    ("classes", _CLASSES, {}),
    ("labels", _LABELS, {"kind": labels}),
    ("values", _CLASSES, {"kind": values}),
  )


def _small_task(folder: Path) -> Iterator[Path]:
  yield from _saved_tasks(folder, ("few", 10, {}))


def _growing_tasks(folder: Path) -> tuple[Path, Path]:
  """A small task, and a file of one that needs larger slots."""
  few, large = _saved_tasks(folder, ("few", 10, {}), ("large", 200, {}))
  file = large.with_suffix(".safetensors")
  mv.save_task(mv.load_task(large, mv.load_backbone("glyphs")), file)
  return few, file


def _saved_tasks(
  folder: Path, *tasks: tuple[str, int, dict[str, Any]]
) -> Iterator[Path]:
  backbone = mv.load_backbone("glyphs")
  for name, outputs, options in tasks:
    task = mv.init_task(
      jax.random.key(0), backbone, name=name, num_classes=outputs, cells=1,
      class_names=[f"the name of output {i}" for i in range(outputs)],
      **options,
    )  # fmt: skip
    mv.save_task(task, folder / name)
    yield folder / name


# The attacks.


def _png(image: Image.Image) -> bytes:
  file = io.BytesIO()
  image.save(file, "PNG")
  return file.getvalue()


def _asking(images: int, clients: int, **values: Any) -> Attack:
  """JSON with small images, which asks for large answers."""
  image = {"data": base64.b64encode(_png(Image.new("RGB", (24, 24)))).decode()}
  body = json.dumps({"images": [image] * images, **values}).encode()
  return Attack(clients, body, _JSON)


def _large_json() -> Attack:
  """Base64 in lines, of 60 MiB."""
  data = base64.encodebytes(bytes(44 * 2**20)).decode()
  body = json.dumps({"images": [{"data": data}]}).encode()
  return Attack(2, body, _JSON)


@functools.cache
def interlaced(width: int, height: int) -> bytes:
  """A black PNG of 16 bits with alpha, in seven passes (Adam7)."""
  passes = (
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4),
    (1, 0, 2, 2), (0, 1, 1, 2),
  )  # fmt: skip
  packed = zlib.compressobj(9)
  parts = []
  for x, y, across, down in passes:
    columns, rows = -(-(width - x) // across), -(-(height - y) // down)
    parts.append(packed.compress(bytes((1 + 8 * columns) * rows)))
  data = b"".join([*parts, packed.flush()])
  header = struct.pack(">IIBBBBB", width, height, 16, 6, 0, 0, 1)
  chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
  return b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(content))
    + kind
    + content
    + struct.pack(">I", zlib.crc32(kind + content))
    for kind, content in chunks
  )


@functools.cache
def animated(width: int, height: int) -> bytes:
  """A WebP file of 30 images."""
  first, *rest = (
    Image.new("RGB", (width, height), (i, 0, 0)) for i in range(30)
  )
  file = io.BytesIO()
  first.save(file, "WEBP", save_all=True, append_images=rest, method=0)
  return file.getvalue()


def _decoding(
  image: bytes, count: int, clients: int, leaves: bool = False
) -> Attack:
  body = form(*[image] * count)
  return Attack(clients, body, _FORM, leaves=leaves)


_HEALTH: dict[str, Callable[[], Attack]] = {
  "20,000 classes, the largest top": functools.partial(
    _asking, _IMAGES, 4, tasks=["classes"], top=2**20
  ),
  "20,000 classes, most outputs": functools.partial(
    _asking, _IMAGES, 6, tasks=["classes"], top=1_560
  ),
  "100,000 labels": functools.partial(_asking, _IMAGES, 6, tasks=["labels"]),
  "100,000 labels, most outputs": functools.partial(
    _asking, 1, 6, tasks=["labels"], top=50_000
  ),
  "20,000 values, most outputs": functools.partial(
    _asking, 2, 6, tasks=["values"]
  ),
  "a task of 100,000 labels": lambda: Attack(6, path="/v1/tasks/labels"),
  "base64 of 60 MiB": _large_json,
}
_SMALL: dict[str, Callable[[], Attack]] = {
  "32 interlaced PNGs": lambda: _decoding(interlaced(1700, 1700), _IMAGES, 4),
  "32 animated WebPs": lambda: _decoding(animated(1990, 2000), _IMAGES, 4),
  "8 clients of 32 PNGs": lambda: _decoding(interlaced(1700, 1700), _IMAGES, 8),
  "100 clients of one PNG": lambda: _decoding(interlaced(1700, 1700), 1, 100),
  "100 clients of a small PNG": lambda: _decoding(interlaced(600, 600), 1, 100),
  "32 PNGs, of clients that leave": lambda: _decoding(
    interlaced(1700, 1700), _IMAGES, 4, leaves=True
  ),
}
ATTACKS = {**_HEALTH, **_SMALL}
COMPILING = "compiling"


if __name__ == "__main__":
  main()
