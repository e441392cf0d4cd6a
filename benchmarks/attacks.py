"""Attack the server, and measure ordinary requests at the same time.

  python -m benchmarks.attacks [--seconds=60] [--settle=30] [--only=NAME]
    [--backbone=NPZ --task=DIR] [--json=FILE]

Each attack has a server of its own, on this machine. It repeats a few requests
that are small or cheap to send, and expensive to answer, beside 20 ordinary
requests a minute. Without --backbone the model is tiny and random.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import http.client
import io
import itertools
import json
import re
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
from PIL import Image

import memory_vit as mv
from benchmarks import serve
from memory_vit.model.backbone import init_backbone
from memory_vit.runtime.tables import markdown_table

_CLIENTS = 4
_BETWEEN_ORDINARY = 3.0
_BOUNDARY = "attacks"
_FORM = f"multipart/form-data; boundary={_BOUNDARY}"
_LARGE = (8000, 8000)
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Attack:
  """A hostile request, and an ordinary one as large (bytes or pixels)."""

  body: bytes
  ordinary: bytes
  content_type: str = _FORM


@dataclasses.dataclass
class Seen:
  """Measurements of ordinary requests during an attack."""

  # Status and seconds of ordinary requests; the status is 0 without an answer.
  statuses: list[int] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)
  health: list[float] = dataclasses.field(default_factory=list)  # seconds
  memory: list[float] = dataclasses.field(default_factory=list)  # MiB
  # {status: number of hostile requests}.
  attacks: dict[int, int] = dataclasses.field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
  """Run the attacks, print a table, and write --json."""
  arguments = _parser().parse_args(argv)
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    backbone, task = arguments.backbone, arguments.task
    if not backbone:
      backbone, task = _tiny_model(Path(folder))
    for name in arguments.only or ATTACKS:
      place = Path(folder) / name.replace(" ", "_")
      with serve.serving(backbone, [task] if task else [], place) as server:
        row = _row(name, server.url, arguments.seconds, arguments.settle)
      rows.append(row)
      print(json.dumps(row), flush=True)
  print(table(rows))
  if arguments.json:
    Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")
  return rows


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--seconds", type=float, default=60, help="each attack")
  parser.add_argument(
    "--settle", type=float, default=30, help="seconds until memory is compared"
  )
  parser.add_argument("--only", action="append", choices=ATTACKS)
  parser.add_argument("--backbone")
  parser.add_argument("--task")
  parser.add_argument("--json")
  return parser


def tiny_backbone() -> mv.Backbone:
  config = mv.ViTConfig(
    width=32, depth=2, mlp_dim=48, num_heads=2, patch_size=2, image_size=8,
    num_classes=7,
  )  # fmt: skip
  return init_backbone(config, jax.random.key(0))


def _tiny_model(folder: Path) -> tuple[str, str]:
  backbone = tiny_backbone()
  mv.save_backbone(backbone, folder / "tiny.npz")
  mv.save_task(serve.random_task(backbone, "pets", 0), folder / "pets")
  return str(folder / "tiny.npz"), str(folder / "pets")


def _row(name: str, url: str, seconds: float, settle: float) -> dict[str, Any]:
  """One attack on a fresh server."""
  attack, small = ATTACKS[name](), form(_jpeg(300, 400))
  for body in (small, attack.ordinary):
    with _repeated(url, body, _FORM, Seen()):
      time.sleep(2 * _BETWEEN_ORDINARY)
  before = _memory(url)
  seen = Seen()
  with (
    _repeated(url, attack.body, attack.content_type, seen),
    _in_threads(_watch, url, seen),
  ):
    until = time.monotonic() + seconds
    while (begun := time.monotonic()) < until:
      seen.statuses.append(_post(url, small, _FORM))
      seen.seconds.append(time.monotonic() - begun)
      time.sleep(max(0.0, begun + _BETWEEN_ORDINARY - time.monotonic()))
  time.sleep(settle)
  return {
    "attack": name,
    "requests": sum(seen.attacks.values()),
    "answered": {str(key): seen.attacks[key] for key in sorted(seen.attacks)},
    "ordinary": len(seen.statuses),
    "of status 200": seen.statuses.count(200),
    "slowest s": round(max(seen.seconds), 2),
    "healthz s": round(max(seen.health), 2),
    "MiB before": round(before),
    "at most": round(max(seen.memory)),
    "after": round(_memory(url)),
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """The rows as Markdown."""
  cells = [
    [
      ", ".join(f"{n} x {status}" for status, n in value.items())
      if isinstance(value, dict)
      else str(value)
      for value in row.values()
    ]
    for row in rows
  ]
  return markdown_table(list(rows[0]), cells)


@contextlib.contextmanager
def _repeated(
  url: str, body: bytes, content_type: str, seen: Seen
) -> Iterator[None]:
  """Repeat a request by several clients until the body ends."""
  with contextlib.ExitStack() as stack:
    for _ in range(_CLIENTS):
      stack.enter_context(_in_threads(_send, url, body, content_type, seen))
    yield


@contextlib.contextmanager
def _in_threads(function: Callable[..., None], *given: Any) -> Iterator[None]:
  """Call a function every second until the body ends."""
  ended = threading.Event()

  def work() -> None:
    while not ended.is_set():
      function(*given)
      ended.wait(1.0 if function is _send else 0.2)

  thread = threading.Thread(target=work)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


def _send(url: str, body: bytes, content_type: str, seen: Seen) -> None:
  status = _post(url, body, content_type)
  seen.attacks[status] = seen.attacks.get(status, 0) + 1


def _watch(url: str, seen: Seen) -> None:
  begun = time.monotonic()
  _get(url, "/healthz")
  seen.health.append(time.monotonic() - begun)
  seen.memory.append(_memory(url))


def _memory(url: str) -> float:
  """The resident set of the server in MiB."""
  found = re.search(
    r"^process_resident_memory_bytes (\S+)$", _get(url, "/metrics"), re.M
  )
  return float(found[1]) / _MIB if found else float("nan")


def _get(url: str, path: str) -> str:
  with contextlib.closing(_connection(url)) as connection:
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def _post(url: str, body: bytes, content_type: str) -> int:
  """Status of the answer; 0 if the connection ends without one."""
  with contextlib.closing(_connection(url)) as connection:
    try:
      connection.request(
        "POST", "/v1/predict", body, {"Content-Type": content_type}
      )
      answer = connection.getresponse()
      answer.read()
    except (OSError, http.client.HTTPException):
      return 0
    return answer.status


def _connection(url: str) -> http.client.HTTPConnection:
  place = urlsplit(url)
  return http.client.HTTPConnection(
    place.hostname or "", place.port, timeout=120
  )


# The bodies.


def form(*images: bytes, fields: Sequence[str] = ()) -> bytes:
  """The body of a form of images, and of fields named "tasks"."""
  head = f"--{_BOUNDARY}\r\nContent-Disposition: form-data; name="
  parts = [f'{head}"tasks"\r\n\r\n{field}\r\n'.encode() for field in fields]
  for image in images:
    parts.append(f'{head}"images"; filename="a"\r\n\r\n'.encode())
    parts += [image, b"\r\n"]
  return b"".join([*parts, f"--{_BOUNDARY}--\r\n".encode()])


def _jpeg(height: int, width: int, **options: Any) -> bytes:
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
  return _saved(Image.fromarray(pixels), "JPEG", **options)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


@functools.cache
def _of_bytes(mebibytes: float) -> bytes:
  """A form of ordinary images of about this size."""
  image = _jpeg(1000, 1500, quality=95)
  return form(*[image] * max(1, min(32, round(mebibytes * _MIB / len(image)))))


@functools.cache
def _of_pixels() -> bytes:
  return form(*[_saved(Image.new("RGB", _LARGE), "JPEG")] * 4)


def _commas() -> Attack:
  names = itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2)
  field = (",".join(map("".join, names)) * 33)[:65_000]
  return Attack(form(b"x", fields=[field] * 990), _of_bytes(61))


def _content_type() -> Attack:
  parameters = "".join(f";a{i}=" for i in range(7_000))[:60_000]
  body = form(_jpeg(30, 40))
  return Attack(body, _of_bytes(0), _FORM + parameters)


def _scans() -> Attack:
  flat = _saved(Image.new("RGB", _LARGE), "JPEG", progressive=True)
  last = flat[flat.rindex(b"\xff\xda") : -2]
  return Attack(form(*[flat[:-2] + last * 53 + flat[-2:]] * 4), _of_pixels())


def _large() -> Attack:
  """The most expensive request that is accepted, as far as we know."""
  image = _saved(Image.new("RGBA", _LARGE), "WEBP", method=0)
  return Attack(form(*[image] * 4), _of_pixels())


def _filling() -> Attack:
  image = _jpeg(30, 40)
  filled = image[:2] + b"\xff" * (60 * _MIB) + image[2:]
  return Attack(form(filled), _of_bytes(60))


def _segments() -> Attack:
  image = _jpeg(30, 40)
  filled = image[:2] + b"\xff\xe0\0\2" * 200_000 + image[2:]
  return Attack(form(*[filled] * 8), _of_bytes(6))


def _chunks() -> Attack:
  image = _saved(Image.new("RGB", (40, 30)), "PNG")
  chunk = b"teST" + struct.pack(">I", zlib.crc32(b"teST"))
  start = image.index(b"IDAT") - 4
  filled = image[:start] + (bytes(4) + chunk) * 1_000_000 + image[start:]
  return Attack(form(filled), _of_bytes(12))


def _comments() -> Attack:
  image = _saved(Image.new("L", (40, 30)), "GIF")
  start = image.index(b",", 13 + (3 << (image[10] & 7) + 1))
  filled = image[:start] + b"!\xfe\1a\0" * 400_000 + image[start:]
  return Attack(form(*[filled] * 4), _of_bytes(8))


ATTACKS: dict[str, Callable[[], Attack]] = {
  "commas in a form": _commas,
  "parameters of Content-Type": _content_type,
  "scans of a JPEG": _scans,
  "64 megapixels": _large,
  "fill bytes of a JPEG": _filling,
  "segments of a JPEG": _segments,
  "chunks of a PNG": _chunks,
  "comments of a GIF": _comments,
}


if __name__ == "__main__":
  main()
