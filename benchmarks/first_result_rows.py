"""The rows of `first_result`, each of which is a whole process.

It is run as a script, with the package of any checkout in PYTHONPATH, and
imports neither that package nor jax before the row does: jax reads the place of
the cache of programs when it is imported.
"""

import json
import logging
import os
import re
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import NoReturn

_IMAGES = 50
_TASKS = ("letters", "digits")
# What jax logs of each program, and of one that it has read from the cache.
_COMPILED = re.compile(r"Finished XLA compilation of .* in ([\d.]+) sec")
_CACHED = "Persistent compilation cache hit"
_LOGGERS = ("jax._src.dispatch", "jax._src.compiler")


class _Programs(logging.Handler):
  """Counts programs, and the seconds of compiling or reading them."""

  count = cached = 0
  seconds = 0.0

  def emit(self, record: logging.LogRecord) -> None:
    message = record.getMessage()
    self.cached += message.startswith(_CACHED)
    if found := _COMPILED.match(message):
      self.count += 1
      self.seconds += float(found[1])

  def report(self) -> None:
    found = {
      "compiled": self.count - self.cached,
      "cached": self.cached,
      "program_seconds": self.seconds,
      "modules": len(sys.modules),
    }
    print(f"\n{json.dumps(found)}", flush=True)


_programs = _Programs()


def prepare(data: Path) -> None:
  """Write the images and tasks that the rows read."""
  import jax
  import numpy as np
  from PIL import Image

  import memory_vit as mv

  backbone = mv.load_backbone("glyphs")
  for name in _TASKS:
    task = mv.init_task(jax.random.key(0), backbone, name=name, num_classes=26)
    mv.save_task(task, data / name)
  rng = np.random.default_rng(0)
  for i in range(_IMAGES):
    file = data / "images" / "train" / ("a", "b")[i % 2] / f"{i}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (24, 24, 3), np.uint8)
    Image.fromarray(pixels).save(file)


def python(data: Path) -> None:
  """The first snippet of the README, up to its first result."""
  del data
  import numpy as np

  import memory_vit as mv

  backbone = mv.load_backbone("glyphs")
  pixels = np.random.default_rng(0).integers(0, 256, (200, 24, 24, 3), np.uint8)
  pixels[::2, :12] = 0
  labels = ["dark", "bright"] * 100
  result = mv.train_task(
    backbone, (pixels, labels), name="light", regime="side_masked", epochs=5
  )
  print(result.accuracy)


def quickstart(data: Path) -> None:
  """`make quickstart`, once it is installed."""
  del data
  _command("train", "--config=quickstart", "--workdir=run")


def dry_run(data: Path) -> None:
  """A dry run on a folder of images."""
  _train_folder(data / "images", "--dry_run")


def first_check(data: Path) -> None:
  """A run that is refused: its folder of images does not exist."""
  _train_folder(data / "misspelt")


def server(data: Path) -> None:
  """A server with two tasks, until it says that it is ready."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  url = f"http://127.0.0.1:{port}/readyz"
  threading.Thread(target=_end_when_ready, args=(url,), daemon=True).start()
  tasks = [f"--task={data / name}" for name in _TASKS]
  _command("serve", "--backbone=glyphs", f"--port={port}", *tasks)


def _end_when_ready(url: str) -> None:
  """End this process once a URL answers 200."""
  while True:
    try:
      with urllib.request.urlopen(url):
        break
    except OSError:  # no connection yet, or another status
      time.sleep(0.05)
  _report_and_leave(0)


_leave = os._exit


def _report_and_leave(status: int) -> NoReturn:
  _programs.report()
  _leave(status)


def _train_folder(images: Path, *more: str) -> None:
  _command(
    "train", "--config=folder", "--config.backbone=glyphs", "--workdir=run",
    f"--config.data.dir={images}", "--config.data.test=", *more,
  )  # fmt: skip


def _command(*arguments: str) -> None:
  from memory_vit.__main__ import main

  sys.exit(main(arguments))


# With the exit status.
ROWS = {
  python: 0, quickstart: 0, dry_run: 0, server: 0, first_check: 2,
}  # fmt: skip


def main() -> None:
  """Run a row; the last line that begins with a brace is what it took."""
  what, data = sys.argv[1:]
  for name in _LOGGERS:
    logger = logging.getLogger(name)
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_programs)
    logger.propagate = False
  os._exit = _report_and_leave  # a command that fails may end at once
  try:
    {f.__name__: f for f in (prepare, *ROWS)}[what](Path(data))
  finally:
    _programs.report()


if __name__ == "__main__":
  main()
