"""Timed first steps of a user, from an installed wheel."""

import contextlib
import json
import re
import signal
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from release.environments import Environment
from release.errors import ReleaseError

# Step -> seconds.
Seconds = dict[str, float]

_NAMES = """
import sys
import memory_vit as mv
for name in mv.__all__:
  getattr(mv, name)
brought = {"tensorflow", "clu", "matplotlib", "ray"} & sys.modules.keys()
sys.exit(f"the core imports {sorted(brought)}" if brought else 0)
"""
_IS_MISSING = """
import importlib.util, sys
sys.exit(importlib.util.find_spec("tensorflow") is not None)
"""
_RUN_EXPORT = """
import pathlib
import jax, numpy as np
from jax import export
path, = pathlib.Path("exported").glob("*.stablehlo")
model = export.deserialize(bytearray(path.read_bytes()))
out = model.call(np.zeros((2, *model.in_avals[0].shape[1:]), np.float32))
assert all(np.isfinite(logits).all() for logits in out.values()), out
"""
_FEW_STEPS = (
  "--config.total_steps=20", "--config.eval_every=20",
  "--config.checkpoint_every=20",
)  # fmt: skip
# The best of all regimes is exported under the name of the task.
_LEARNED = Path("run/tasks/glyphs-inverted")
_SECONDS_TO_START = 180.0


def core(
  environment: Environment, wheel: Path, golden: Path, image: Path
) -> Seconds:
  """Try the core, and then the server, without TensorFlow.

  Args:
    environment: an empty one.
    wheel: of the release.
    golden: backbone.npz and tasks/ of the tests.
    image: any image file.
  """
  seconds = {"install": environment.install(str(wheel))}
  seconds["import"] = environment.run("-c", "import memory_vit")
  environment.run("-c", _NAMES)
  _require_program(environment, wheel)
  backbone = str(golden / "backbone.npz")
  seconds |= _use(environment, backbone, golden / "tasks", image)
  seconds["install"] += environment.install(f"{wheel}[serve]")
  seconds["serve"] = _serve(environment, backbone, golden / "tasks", image)
  environment.run("-c", _IS_MISSING)
  return seconds


def training(
  environment: Environment, wheel: Path, image: Path, *, full: bool
) -> Seconds:
  """Train as the quickstart does, and use what it has made.

  Args:
    environment: an empty one.
    wheel: of the release.
    image: any image file.
    full: whether all steps are trained, and not 20.
  """
  seconds = {"install": environment.install(f"{wheel}[train,serve]")}
  seconds["import"] = environment.run("-c", "import memory_vit")
  seconds["quickstart"] = environment.run(
    "-m", "memory_vit", "train", "--config=quickstart", "--workdir=run",
    *(() if full else _FEW_STEPS),
  )  # fmt: skip
  seconds["evaluate"] = environment.run(
    "-m", "memory_vit", "evaluate", "--backbone=glyphs", f"--task={_LEARNED}",
    "--report=report",
  )  # fmt: skip
  seconds |= _use(environment, "glyphs", _LEARNED, image)
  seconds["serve"] = _serve(environment, "glyphs", _LEARNED, image)
  return seconds


def _require_program(environment: Environment, wheel: Path) -> None:
  """Refuse a wheel whose `memory-vit` is missing, or of another version."""
  said = environment.printed_by("memory-vit", "--version").strip()
  expected = wheel.name.split("-")[1]
  if said != expected:
    raise ReleaseError(f"memory-vit --version says {said!r}, not {expected!r}.")


def _use(
  environment: Environment, backbone: str, tasks: Path, image: Path
) -> Seconds:
  """Predict an image, and export the tasks as one function."""
  model = (f"--backbone={backbone}", f"--task={tasks}")
  began = time.perf_counter()
  said = environment.output(
    "-m", "memory_vit", "predict", "--json", *model, str(image)
  )
  seconds = {"predict": time.perf_counter() - began}
  (answer,) = [line for line in said.splitlines() if line.startswith("{")]
  if not json.loads(answer)["tasks"]:
    raise ReleaseError(f"no task has answered: {answer}")
  seconds["export"] = environment.run(
    "-m", "memory_vit", "export", *model, "--format=stablehlo", "--out=exported"
  )
  environment.run("-c", _RUN_EXPORT)
  return seconds


def _serve(
  environment: Environment, backbone: str, tasks: Path, image: Path
) -> float:
  """Start a server, ask it, stop it; return the seconds until it answered."""
  began = time.perf_counter()
  with _server(environment, backbone, tasks) as url:
    body, kind = _form(image)
    request = urllib.request.Request(
      f"{url}/v1/predict", body, {"Content-Type": kind}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
      answer = json.load(response)
    taken = time.perf_counter() - began
  if not answer["images"][0].get("tasks"):
    raise ReleaseError(f"no task has answered: {answer}")
  return taken


@contextlib.contextmanager
def _server(
  environment: Environment, backbone: str, tasks: Path
) -> Iterator[str]:
  """A server that is ready, at a port of its own; it has to end with 0."""
  log = environment.work / "server.txt"
  with log.open("wb") as said:
    process = subprocess.Popen(
      environment.command(
        "-m", "memory_vit", "serve", f"--backbone={backbone}",
        f"--task={tasks}", "--port=0", "--batch_sizes=1",
      ),
      cwd=environment.work, env=environment.variables, stdout=said, stderr=said,
    )  # fmt: skip
  try:
    yield _ready(process, log)
    process.send_signal(signal.SIGTERM)
    status = process.wait(timeout=60)
  finally:
    process.kill()
    process.wait()
  if status != -signal.SIGTERM:
    raise ReleaseError(f"the server ended with {status}: {log.read_text()}")


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
  """Wait until a server answers; return its address."""
  ends = time.monotonic() + _SECONDS_TO_START
  while time.monotonic() < ends and process.poll() is None:
    if found := re.search(r"http://[\w.]+:\d+", log.read_text()):
      with contextlib.suppress(OSError):  # 503 as long as it warms up
        for route in ("healthz", "readyz"):
          urllib.request.urlopen(f"{found[0]}/{route}", timeout=10).close()
        return found[0]
    time.sleep(0.1)
  raise ReleaseError(f"the server did not start: {log.read_text()[-3000:]}")


def _form(image: Path) -> tuple[bytes, str]:
  """An image as a browser sends it: body and content type."""
  border = uuid.uuid4().hex
  head = (
    f"--{border}\r\nContent-Disposition: form-data; "
    f'name="images"; filename="{image.name}"\r\n'
    "Content-Type: application/octet-stream\r\n\r\n"
  )
  body = head.encode() + image.read_bytes() + f"\r\n--{border}--\r\n".encode()
  return body, f"multipart/form-data; boundary={border}"
