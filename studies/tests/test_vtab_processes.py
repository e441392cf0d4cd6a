"""VTAB-1k on two processes, which share the work of every run."""

import contextlib
import json

import pytest
import two_processes as two
import vtab_miniature
from conftest import tiny_backbone
from faults import Process, main_of

import memory_vit as mv

pytestmark = pytest.mark.processes


def test_two_processes_run_a_benchmark(tmp_path):
  """From the search to all tasks in one model, compared with each alone."""
  data, backbone = tmp_path / "data", tmp_path / "vit.npz"
  vtab_miniature.write_folder(data, ["kitti"], train=8, held_out=4, test=4)
  mv.save_backbone(tiny_backbone(num_classes=5, depth=1), backbone)
  flags = [
    f"--dir={data}", f"--backbone={backbone}", f"--workdir={tmp_path / 'run'}",
    "--only=kitti", "--regimes=cls_masked", "--seeds=1", "--config.epochs=1",
    "--config.batch_size=8", "--config.batch_size_eval=8",
    "--config.sweep.learning_rate=(0.1,)", "--config.log_images=0",
  ]  # fmt: skip
  with two.kept_port() as port, contextlib.ExitStack() as stack:
    first, second = [
      stack.enter_context(
        Process(
          main_of("studies.vtab"),
          [*flags, *two.joined(i, port)],
          tmp_path / f"{i}",
          devices=2,
        )
      )
      for i in range(2)
    ]
    for process in (first, second):
      assert process.wait() == 0, process.text
  report = (tmp_path / "run" / "report.md").read_text().strip()
  # Gloo writes there as well.
  assert report in first.printed
  assert report not in second.printed
  together = json.loads((tmp_path / "run" / "together.json").read_text())
  assert together["found"]["verified"]
