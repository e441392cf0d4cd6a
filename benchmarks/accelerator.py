"""Run all measurements on a GPU or TPU, unattended, section by section.

  python -m benchmarks.accelerator --out=DIR [--only=SECTION ...] [--list]
    [--small]

Each section runs other benchmarks in processes of their own, and ends after
eight minutes, so one that crashes, runs out of memory or hangs stops only
itself. Nothing is installed or downloaded: weights, tasks and pixels are
random. A missing library is named, and what needs it is left out.

DIR receives SECTION.json, SECTION.log and, after every section, results.md,
which shows all results in DIR and the name of the device. --only takes prefixes
of section names; --small runs tiny models, to test this on a CPU.

This process never touches the device, which may allow only one process.
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit.runtime.tables import markdown_table

ROOT = Path(__file__).resolve().parent.parent
_SECONDS = 480.0
# The most important first: images of a batch, dtype.
_SETTINGS = (
  ("B/32", 512, "bfloat16"),
  ("B/32", 512, "float32"),
  ("B/16", 256, "bfloat16"),
  ("B/16", 256, "float32"),
  ("L/14", 64, "bfloat16"),
  ("L/14", 64, "float32"),
)
_SMALL = (("Micro/8", 2, "float32"),)
# Section -> prefixes of the names of its programs in `passes`.
_PROGRAMS = {
  "infer": ("encode", "infer"),
  "cached": ("read",),
  "train": ("train", "kept_train"),
  "compared": ("masked_sequence", "full_finetune"),
}
# Tests that compute on a device, and are fast.
_TESTS = (
  "tasks/test_slots.py", "model/test_two_streams.py", "model/test_task_mask.py",
  "model/test_api.py", "train/test_step.py", "runtime/test_mesh.py",
  "looking/test_token_attention.py", "prediction/test_predictor.py",
)  # fmt: skip
_ABOUT_DEVICE = """
import json, platform, sys
import jax
device = jax.devices()[0]
found = {
  "device": device.device_kind, "devices": len(jax.devices()),
  "platform": device.platform, "jax": jax.__version__,
  "python": platform.python_version(), "memory": device.memory_stats(),
}
open(sys.argv[1].removeprefix("--json="), "w").write(json.dumps(found))
"""
_MISSING = re.compile(r"No module named '([\w.]+)'")


@dataclasses.dataclass(frozen=True)
class Job:
  """A process of a section: `python ARGUMENTS`, with --json if it `writes`."""

  arguments: tuple[str, ...]
  writes: bool = True


def sections(small: bool) -> dict[str, list[Job]]:
  """The jobs of every section, in order."""
  tiny = ("--image_size=32", "--rounds=2") if small else ()
  counts = ("--tasks", "2", "--train_tasks", "1") if small else ()
  settings = _SMALL if small else _SETTINGS
  found = {"device": [Job(("-c", _ABOUT_DEVICE))]}
  for place, (variant, batch, dtype) in enumerate(settings):
    model = (f"--variant={variant}", *tiny)
    passes = (
      "-m", "benchmarks.passes", f"--batch={batch}", f"--dtype={dtype}",
      "--more", "--compile_seconds=300", *model, *counts,
    )  # fmt: skip
    name = f"{variant.replace('/', '')}-{dtype}"
    for kind, programs in _PROGRAMS.items():
      timed = Job((*passes, "--no_peaks", "--what", *programs))
      found[f"{kind}-{name}"] = [timed]
    if dtype == settings[0][2]:
      found[f"memory-{name}"] = [Job((*passes, "--what"))]
    if place == 0:
      images = "--images=4" if small else "--images=512"
      forward = Job((*passes, "--no_peaks", "--what"))
      predictor = Job(("-m", "benchmarks.predictor", images, *model))
      reading = ("--size=32", "--batches=2", "--rounds=1") if small else ()
      found["predictor"] = [predictor]
      found["input"] = [Job(("-m", "benchmarks.input", *reading)), forward]
      found["tests"] = _tests(small)
  return found


def _tests(small: bool) -> list[Job]:
  """Fast tests, and slow ones of bitwise identity, while time remains."""
  chosen = ("-m", "pytest", "-q", "--continue-on-collection-errors", "-m")
  fast = [f"tests/{name}" for name in (_TESTS[:1] if small else _TESTS)]
  jobs = [Job((*chosen, "not slow and not processes", *fast), writes=False)]
  if not small:
    slow = (*chosen, "not processes", "tests/model/test_same_bits.py")
    jobs.append(Job(slow, writes=False))
  return jobs


def main(argv: Sequence[str] | None = None) -> int:
  """Measure the chosen sections; returns 1 if something failed."""
  arguments = _arguments(argv)
  known = sections(arguments.small)
  wanted = [n for n in known if n.startswith((*(arguments.only or [""]),))]
  if arguments.list or not wanted:
    print("\n".join(known))
    return 0 if arguments.list else 2
  out = Path(arguments.out)
  out.mkdir(parents=True, exist_ok=True)
  failed = False
  for name in wanted:
    found = run_section(name, known[name], out)
    failed = failed or found["state"] != "done"
    print(f"{name:28} {found['state']}, {found['seconds']:.0f} s", flush=True)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "results.md").write_text(page(_read(out, known)))
  return int(failed)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.accelerator",
    description=(__doc__ or "").split("\n")[0],
  )
  add = parser.add_argument
  add("--out", required=True, metavar="DIR")
  add("--only", action="append", metavar="SECTION")
  add("--list", action="store_true", help="list the sections, run none")
  add("--small", action="store_true", help="tiny models, on any device")
  return parser.parse_args(argv)


def run_section(
  name: str, jobs: Sequence[Job], out: Path, limit: float = _SECONDS
) -> dict[str, Any]:
  """Run its jobs one after the other, and report the status of each."""
  began, results, states = time.monotonic(), [], []
  with (out / f"{name}.log").open("w+", encoding="utf-8") as log:
    for job in jobs:
      left = limit - (time.monotonic() - began)
      place = log.tell()
      state, result = _run(job, log, left)
      log.seek(place)
      said = log.read()
      if state != "done" and (missing := _MISSING.findall(said)):
        state = f"{missing[-1]} is not installed"
      states.append(state)
      if not job.writes:  # the last line of pytest counts
        result = {"said": said.strip().splitlines()[-1:]}
      results.append(result)
  bad = [state for state in states if state != "done"]
  return {
    "section": name,
    "state": "; ".join(bad) or "done",
    "seconds": round(time.monotonic() - began, 1),
    "results": results,
  }


def _run(job: Job, log: Any, seconds: float) -> tuple[str, Any]:
  """Run a process and its children, at most this long."""
  # If nothing can be installed, libraries may lie elsewhere.
  paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  environment = {
    **os.environ,
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": os.pathsep.join(paths),
  }
  if not job.writes:
    # Tests take the CPU by default, and compare to 1e-5: no TF32.
    environment.setdefault("JAX_PLATFORMS", "")
    environment.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
  with tempfile.TemporaryDirectory() as scratch:
    file = Path(scratch) / "result.json"
    command = [sys.executable, *job.arguments]
    if job.writes:
      # First, as a list of names would swallow it.
      at = command.index("--what") if "--what" in command else len(command)
      command.insert(at, f"--json={file}")
    process = subprocess.Popen(
      command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
      start_new_session=True,
    )  # fmt: skip
    try:
      status = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
      return "stopped at its time limit", None
    finally:
      if process.poll() is None:  # with its children
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status:
      return f"ended with status {status}", _json(file)
    return "done", _json(file)


def _json(file: Path) -> Any:
  return json.loads(file.read_text()) if file.exists() else None


def _read(out: Path, known: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Read the results in a directory, in the order of the sections."""
  files = (out / f"{name}.json" for name in known)
  return [json.loads(file.read_text()) for file in files if file.exists()]


def page(found: Sequence[Mapping[str, Any]]) -> str:
  """All results as Markdown."""
  results = {each["section"]: each["results"] for each in found}
  every = [r for each in results.values() for r in each if r]
  device = next((r["device"] for r in every if "device" in r), "unknown device")
  lines = [f"# Measured on {device}", ""]
  lines += _facts(results.get("device", [None])[0])
  states = [(f["section"], f["state"], f"{f['seconds']:.0f}") for f in found]
  lines += [markdown_table(("section", "state", "seconds"), states), ""]
  passes = [r for r in every if "seconds_forward" in r]
  if passes:
    lines += ["## In forward passes of the plain ViT", ""]
    lines += ["Median of the rounds, quartiles in brackets.", ""]
    lines += _passes(passes)
  for name in ("predictor", "input"):
    for result in filter(None, results.get(name, [])[:1]):
      lines += [f"## {name.capitalize()}", "", *_facts(result)]
  lines += _input_over_forward(results.get("input", []))
  for result in filter(None, results.get("tests", [])):
    lines += ["## Tests", "", *result["said"], ""]
  return "\n".join(lines)


def _passes(results: Sequence[Mapping[str, Any]]) -> list[str]:
  """A row for every program and number, a column for every model and dtype."""
  models: dict[str, dict[str, Any]] = {}
  for result in results:
    title = "{variant} {dtype}, batch {batch}".format(**result)
    models.setdefault(title, {}).update(_cells(result))
  rows = list(dict.fromkeys(row for cells in models.values() for row in cells))
  rows.sort(key=lambda row: row.startswith(("peak", "first", "original")))
  table = [[row, *(m.get(row, "") for m in models.values())] for row in rows]
  return [markdown_table(("", *models), table), ""]


def _cells(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """(row, text) of one result of `passes`."""
  yield "forward pass, ms", f"{1000 * result['seconds_forward']:.2f}"
  yield "images/s", f"{result['images_per_second_forward']:,.0f}"
  yield "TFLOP/s", f"{result['tflops_forward']:.1f}"
  share = result["forward_over_matrix_products"]
  yield "of large matrix products", f"{100 * share:.0f} %"
  for key, value in result.items():
    if key.endswith("_over_forward"):
      low, high = result[f"{key}_quartiles"]
      name = key.removesuffix("_over_forward")
      yield name, f"{value:.2f} ({low:.2f} to {high:.2f})"
      first = result["seconds_of_first_call"][name]
      yield f"first call of {name}, s", f"{first:.1f}"
    elif key.startswith("peak_bytes_") and f"{key}_is" in result:
      how = result[f"{key}_is"]
      yield (
        key.replace("_bytes_", " memory of "),
        how if value is None else f"{value / 2**20:,.0f} MiB",
      )
  for name, why in result["failed"].items():
    yield name, why.replace("|", "/")
  for name, equal in result["outputs_bit_equal"].items():
    yield f"original outputs, {name}", "equal to the bit" if equal else "DIFFER"


def _input_over_forward(results: Sequence[Any]) -> list[str]:
  """Compare the speed of the forward pass with that of the input."""
  if len(results) < 2 or None in results:
    return []
  read, forward = results
  speed = forward["images_per_second_forward"]
  return [
    f"A forward pass takes {speed:,.0f} images/s: "
    + ", ".join(
      f"{speed / read[f'images_per_second_{way}']:.1f} times what {way} gives"
      for way in ("files", "kept")
    )
    + f" with {read['cpus']} CPUs.",
    "",
  ]


def _facts(values: Mapping[str, Any] | None) -> list[str]:
  """Values as a list; those within values behind them."""
  rows = [f"- {key}: {_shown(v)}" for key, v in (values or {}).items()]
  return [*rows, ""]


def _shown(value: Any) -> str:
  if isinstance(value, Mapping):
    return ", ".join(f"{key} {_shown(v)}" for key, v in value.items())
  if isinstance(value, list):
    return "; ".join(map(_shown, value))
  return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
  sys.exit(main())
