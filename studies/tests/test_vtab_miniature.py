"""The whole command on a miniature of VTAB-1k."""

import dataclasses
import json
import logging

import jax
import pytest
import vtab_miniature
from conftest import tiny_backbone

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.commands import console, evaluate
from memory_vit.configs import vtab as vtab_config
from studies.vtab import __main__ as vtab
from studies.vtab import layout, report
from studies.vtab.tasks import TASKS

# Programs whose size depends on the model.
_LARGE = ("_gradient", "_update", "encode_program", "read_program")


@pytest.fixture(scope="module")
def backbone_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(tiny_backbone(depth=1), path)
  return path


@pytest.fixture
def small_test_splits(monkeypatch):
  """Give the benchmark the number of test images of the miniature."""
  tasks = tuple(dataclasses.replace(task, test_examples=12) for task in TASKS)
  monkeypatch.setattr(report, "TASKS", tasks)


def run_command(data, backbone_file, workdir, *argv, epochs=20):
  """Run the command in this process; return its exit status."""
  given = [
    f"--dir={data}", f"--backbone={backbone_file}",
    f"--workdir={workdir}", "--seeds=2", "--config.batch_size=8",
    "--config.batch_size_eval=8", f"--config.epochs={epochs}",
    "--config.sweep.learning_rate=(0.003,0.03)", *argv,
  ]  # fmt: skip
  return console.run_command(lambda: vtab.run(given))


@pytest.mark.slow
@pytest.mark.usefixtures("small_test_splits")
def test_command_trains_all_tasks_of_the_prepared_folder(
  backbone_file, tmp_path, capsys, caplog
):
  """Trained, tested, in one model; two with more regimes and seeds."""
  data = vtab_miniature.write_folder(tmp_path / "data", train=16, test=12)
  every, two = tmp_path / "every", tmp_path / "two"
  regimes = ["--regimes=cls_masked", "--seeds=1"]
  several = ["--regimes=head,cls_masked", "--only=kitti,sun397"]
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    assert run_command(data, backbone_file, every, *regimes, epochs=10) == 0
    assert run_command(data, backbone_file, two, *several, epochs=10) == 0

  numbers = json.loads((every / "report.json").read_text())
  assert not numbers["missing"]
  first = {s["task"]: s["tests"][0] for s in numbers["scores"]}
  assert len(numbers["scores"]) == len(first) == 19
  mean = numbers["means"]["cls_masked"]["of_tasks"]
  assert mean == pytest.approx(sum(first.values()) / 19)
  require_together(numbers["together"], first)
  text = (every / "report.md").read_text()
  assert "No means" not in text
  (row,) = (line for line in text.splitlines() if "all in one model |" in line)
  assert row.count("|  |") == 0
  assert "those of the plain ViT: yes" in text

  require_several(two)
  # Tasks of 2 to 397 classes: for each regime a search, and a final run at each
  # of two rates. What reads masked tasks: search, tests of one task and of two,
  # all 19 in one model, both, and each alone.
  messages = [r.getMessage() for r in caplog.records]
  counts = {
    name: sum(f"Compiling jit({name})" in text for text in messages)
    for name in _LARGE
  }
  assert 1 <= counts["_update"] <= 2 * 3
  assert 1 <= counts["_gradient"] <= 2 * 3
  assert 1 <= counts["read_program"] <= 6

  # The second time nothing runs; the tasks are those that were tested.
  before = {p: p.stat().st_mtime_ns for p in every.rglob("result.json")}
  assert run_command(data, backbone_file, every, *regimes, epochs=10) == 0
  assert {p: p.stat().st_mtime_ns for p in every.rglob("result.json")} == before
  capsys.readouterr()
  argv = [
    f"--backbone={backbone_file}", f"--task={every}/tasks/cls_masked/kitti",
    "--data=list", f"--data_dir={data}/kitti", "--split=test",
    f"--json={tmp_path}/kitti.json",
  ]  # fmt: skip
  assert evaluate.main(argv) == 0
  found = json.loads((tmp_path / "kitti.json").read_text())
  assert found["tasks"][0]["score"] == pytest.approx(first["kitti"])


def require_together(together, tested):
  """All tasks in one model, each as it was tested alone."""
  assert together["verified"]
  assert together["tasks"].keys() == tested.keys()
  for name, found in together["tasks"].items():
    assert found["alone"]["outputs_bit_equal"]
    assert found["alone"]["score"] == pytest.approx(tested[name], abs=1e-6)


def require_several(run):
  """Two tasks by two regimes, with two seeds each."""
  numbers = json.loads((run / "report.json").read_text())
  assert len(numbers["scores"]) == 2 * 2
  assert numbers["means"]["head"]["of_tasks"] is None
  for score in numbers["scores"]:
    assert len(score["tests"]) == 2
    # The colour identifies every class that was trained on.
    if score["task"] == "kitti":
      assert sum(score["tests"]) / 2 > 0.5
  # These have no random initialization: seeds differ by order of images.
  for name in ("kitti", "sun397"):
    losses = {
      json.loads(file.read_text())["found"]["loss"]
      for file in run.glob(f"runs/{name}/cls_masked/seed-*/test.json")
    }
    assert len(losses) == 2, name


@pytest.mark.nightly
@pytest.mark.slow
def test_command_trains_tasks_of_tfds_data_sets(
  backbone_file, tmp_path, monkeypatch, capsys
):
  """All 19 open with their classes; those with computed labels train."""
  monkeypatch.setattr(layout, "TRAINED", 16)
  monkeypatch.setattr(layout, "HELD_OUT", 8)
  data = vtab_miniature.write_tfds(tmp_path / "data")
  run = tmp_path / "run"
  # Opens every split of all of them, and refuses other classes.
  assert run_command(data, backbone_file, run, "--dry_run") == 0
  assert "left out" not in capsys.readouterr().out
  names = "clevr_count,clevr_dist,kitti,dsprites_ori,smallnorb_ele"
  argv = [f"--only={names}", "--regimes=norms_layers_masked"]
  assert run_command(data, backbone_file, run, *argv) == 0
  numbers = json.loads((run / "report.json").read_text())
  tested = {s["task"]: s["test_examples"] for s in numbers["scores"]}
  assert tested == {
    "clevr_count": 8, "clevr_dist": 8, "kitti": 12, "dsprites_ori": 10,
    "smallnorb_ele": 12,
  }  # fmt: skip
  assert numbers["together"]["verified"]
  assert numbers["means"]["norms_layers_masked"]["of_tasks"] is None


@pytest.mark.slow
def test_dry_run_writes_nothing(backbone_file, tmp_path, capsys):
  names = ["kitti", "svhn"]
  data = vtab_miniature.write_folder(tmp_path / "data", names, train=8, test=4)
  run = tmp_path / "run"
  argv = ["--regimes=head", "--dry_run", "--only=kitti,dtd"]
  assert run_command(data, backbone_file, run, *argv) == 0
  out = capsys.readouterr().out
  assert "3 runs, 0 of them finished." in out
  assert "dtd is left out: there is no dtd" in out
  assert "svhn" not in out
  assert not run.exists()


def test_bad_flags_are_an_error_in_one_line(tmp_path, capsys):
  for argv, problem in (
    (["--only=cifar,pets"], "'pets': VTAB-1k has no such task"),
    (["--regimes=heads"], "'heads' is no regime"),
    (["--seeds=0"], "--seeds='0': expected their number"),
    (["--seeds=x"], "--seeds='x': expected their number"),
    (["--config.data.name=cifar10"], "config.data.name is 'cifar10'"),
    ([], "has no data of cifar, caltech101"),
  ):
    status = run_command(tmp_path, "no.npz", tmp_path / "run", *argv)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert problem in err
    assert len(err.splitlines()) == 1
  assert not (tmp_path / "run").exists()


def test_configuration_of_a_task_is_found_by_name():
  """By name, for `memory-vit train`."""
  config = config_lib.from_dict(vtab_config.get_config("kitti").to_dict())
  assert (config.task.name, config.data.name) == ("kitti", "list")
  assert (config.data.train, config.data.test) == ("train800val200", "test")
  assert config.data.validation == ""
  assert not config.sweep.is_on
  whole = config_lib.from_dict(vtab_config.get_config().to_dict())
  # Every task is padded: Sun397 too.
  assert whole.task.padded_classes == 398 > max(t.classes for t in TASKS)
