"""The benchmark for a GPU: one part that fails ends nothing but itself."""

import json
import os
import sys
import time

import pytest

from benchmarks import accelerator
from benchmarks.accelerator import Job


def job(program, **options):
  return Job(("-c", program), **options)


def written(values):
  return job(f"import sys; open(sys.argv[1][7:], 'w').write({values!r})")


def run(jobs, out, **options):
  return accelerator.run_section("some", jobs, out, **options)


@pytest.mark.processes
def test_failing_section_ends_alone(tmp_path, monkeypatch, capsys):
  jobs = {
    "crash": [job("import os; os.abort()"), written('{"device": "X"}')],
    "missing": [job("import no_such_library.part")],
    "good": [written('{"cpus": 3}')],
  }
  monkeypatch.setattr(accelerator, "sections", lambda small: jobs)
  assert accelerator.main([f"--out={tmp_path}/out"]) == 1
  crash, missing, good = (
    json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in jobs
  )
  assert "status -6" in crash["state"]
  assert crash["results"] == [None, {"device": "X"}]
  assert missing["state"] == "no_such_library is not installed"
  assert (good["state"], good["results"]) == ("done", [{"cpus": 3}])
  page = (tmp_path / "out" / "results.md").read_text()
  assert page.startswith("# Measured on X\n")
  assert "| missing | no_such_library is not installed |" in page
  # What was measured before stays on the page.
  assert accelerator.main([f"--out={tmp_path}/out", "--only=go"]) == 0
  assert (tmp_path / "out" / "results.md").read_text().count("| crash |") == 1
  assert accelerator.main([f"--out={tmp_path}/out", "--only=none"]) == 2


@pytest.mark.processes
def test_hanging_job_is_ended_with_its_children(tmp_path):
  child = "import time; time.sleep(60)"
  began = time.monotonic()
  found = run(
    [
      job(
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "print(p.pid, flush=True); time.sleep(60)"
      ),
      job("print('never')"),
    ],
    tmp_path,
    limit=2.0,
  )
  assert time.monotonic() - began < 30
  assert "time limit" in found["state"]
  pid = int((tmp_path / "some.log").read_text().split()[0])
  for _ in range(100):
    try:
      os.kill(pid, 0)
      # Nobody may have collected it yet.
      with open(f"/proc/{pid}/stat") as file:
        if file.read().split()[2] == "Z":
          break
    except (ProcessLookupError, FileNotFoundError):
      break
    time.sleep(0.05)
  else:
    pytest.fail("the child lives")


def test_gpu_runs_every_section_smallest_first():
  sections = accelerator.sections(small=False)
  first = list(sections)[:5]
  assert first == ["device", *(f"{kind}-B32-bfloat16" for kind in (
    "infer", "cached", "train", "compared"
  ))]  # fmt: skip
  for model in ("B32", "B16", "L14"):
    for dtype in ("float32", "bfloat16"):
      assert f"infer-{model}-{dtype}" in sections
  for name in accelerator._TESTS:
    assert (accelerator.ROOT / "tests" / name).is_file()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.processes
def test_every_section_runs_with_small_models(tmp_path):
  """On the CPU, with models that have hardly any weights."""
  assert accelerator.main([f"--out={tmp_path}", "--small"]) == 0, [
    (path.name, path.read_text()[-2000:]) for path in tmp_path.glob("*.log")
  ]
  page = (tmp_path / "results.md").read_text()
  assert page.startswith("# Measured on cpu\n")
  for row in (
    "infer_2", "read_2", "kept_train_1", "masked_sequence_infer_2",
    "full_finetune", "first call of train_1, s", "peak memory of train_1",
  ):  # fmt: skip
    assert f"| {row} |" in page
  assert "| original outputs, 2_tasks | equal to the bit |" in page
  assert "clients 16" in page
  assert "times what files gives" in page
  assert " passed" in page
  assert "failed" not in page.partition("## Tests")[0]
  assert sys.executable not in page
