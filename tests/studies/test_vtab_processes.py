"""VTAB-1k on two processes, which share the work of every run."""

import json
import subprocess
import sys

import pytest
import two_processes as two
import vtab_miniature
from conftest import tiny_backbone

import memory_vit as mv

pytestmark = pytest.mark.processes


def test_two_processes_measure_a_benchmark(tmp_path):
  """From the search to all tasks in one model, compared with each alone."""
  data, backbone = tmp_path / "data", tmp_path / "vit.npz"
  vtab_miniature.write_folder(data, ["kitti"], train=8, held_out=4, test=4)
  mv.save_backbone(tiny_backbone(num_classes=5, depth=1), backbone)
  flags = [
    f"--dir={data}", f"--backbone={backbone}", f"--workdir={tmp_path / 'run'}",
    "--only=kitti", "--regimes=cls_masked", "--seeds=1", "--config.epochs=1",
    "--config.batch_size=8", "--config.batch_size_eval=8",
    "--config.sweep.learning_rate=(0.1,)",
  ]  # fmt: skip
  with two.kept_port() as port:
    commands = [
      {
        "args": [
          sys.executable, "-m", "studies.vtab", *flags,
          *two.joined(process, port),
        ],
        "cwd": two.ROOT, "text": True, "env": two.environment(2),
        "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
      }
      for process in range(2)
    ]  # fmt: skip
    with two.started(commands) as processes:
      first, second = two.ends(processes)
  assert (first.status, second.status) == (0, 0), first.stderr + second.stderr
  report = (tmp_path / "run" / "report.md").read_text().strip()
  # Gloo writes there as well.
  assert report in first.stdout
  assert report not in second.stdout
  together = json.loads((tmp_path / "run" / "together.json").read_text())
  assert together["found"]["verified"]
