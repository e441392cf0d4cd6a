"""`evaluate --report`: from the same pass, of the same numbers."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import random_task, tiny_backbone
from fake_data import write_folder

import memory_vit as mv
from memory_vit.commands import evaluate
from memory_vit.evaluation import verify
from memory_vit.kinds import class_sums
from memory_vit.tasks.program import Program


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """Two tasks on a folder of 12 images, each of one grey."""
  root = tmp_path_factory.mktemp("report")
  backbone = tiny_backbone(num_classes=3, depth=1)
  mv.save_backbone(backbone, root / "tiny.npz")
  classes = ("<b>", "=b", "c")
  for split in ("train", "test"):
    write_folder(
      root / "data",
      {f"{split}/{n}": [f"{i}.png" for i in range(4)] for n in classes},
    )
  tasks = [
    random_task(backbone, name, seed=seed, classes=3, class_names=classes)
    for seed, name in enumerate(("first", "second"))
  ]
  mv.save_tasks(tasks, root / "tasks")
  return root, backbone, tasks


def run(root, *arguments):
  return evaluate.main(
    [
      f"--backbone={root}/tiny.npz", "--batch_size=8", "--split=test",
      "--data=folder", f"--data_dir={root}/data", f"--task={root}/tasks",
      *arguments,
    ]
  )  # fmt: skip


@pytest.mark.slow
def test_a_report_is_of_the_pass_that_is_verified(
  model, tmp_path, monkeypatch, capsys
):
  root, backbone, tasks = model
  real, passes = Program.__call__, []

  def counted(*arguments, **options):
    passes.append(1)
    return real(*arguments, **options)

  monkeypatch.setattr(Program, "__call__", counted)
  compiled, predicted = class_sums._compiled, []

  def counted_too(function, on_all):
    predicted.extend([1] * (function is class_sums.predict_examples))
    return compiled(function, on_all)

  monkeypatch.setattr(class_sums, "_compiled", counted_too)
  monkeypatch.setattr(verify, "median_seconds", lambda functions: dict.fromkeys(
    functions, 1.0
  ))  # fmt: skip
  out, report = tmp_path / "out.json", tmp_path / "report"
  assert run(root, "--verify", f"--json={out}", f"--report={report}",
             "--data=backbone=", "--report_images=2") == 0  # fmt: skip
  assert len(passes) == 2  # 12 images in batches of 8
  # Of both tasks, and not of what each says alone.
  assert len(predicted) == 2 * 2
  assert f"report: {report}/index.html" in capsys.readouterr().out
  entries = {t["name"]: t for t in json.loads(out.read_text())["tasks"]}
  for task in tasks:
    folder = report / task.name
    found = json.loads((folder / "metrics.json").read_text())
    entry = entries[task.name]
    assert found["metrics"]["top1"]["share"] == entry["score"]
    assert found["metrics"]["loss"] == pytest.approx(entry["loss"], rel=1e-5)
    assert found["per_class"]["recall"] == entry["per_output"]["accuracy"]
    assert found["alone"] == entry["alone"]
    assert found["task"]["digest"] == task.digest
    assert found["backbone"]["fingerprint"] == backbone.fingerprint
    assert found["backbone"]["dtype"] == "float32"
    rows = pq.read_table(folder / "predictions.parquet").to_pylist()
    assert len({row["file"] for row in rows}) == 12
    for row in rows:
      # The file of a row is the image that was predicted.
      image = mv.preprocess(root / "data" / row["file"], task)
      logits = np.asarray(mv.forward(backbone, tasks, image[None])[task.name])
      assert row["top_indices"] == np.argsort(-logits[0]).tolist()
      assert row["label"] == row["file"].split("/")[-2]
      shares = np.exp(logits[0]) / np.exp(logits[0]).sum()
      assert row["top_probabilities"][0] == pytest.approx(max(shares), rel=1e-4)
    text = (folder / "report.html").read_text()
    assert str(root) not in text  # it may be sent to others
    assert text.count('alt="An image of ') == min(
      2, sum(not row["correct"] for row in rows)
    )


def test_unwritable_output_is_refused_before_the_evaluation(
  model, tmp_path, monkeypatch, capsys
):
  root, *_ = model
  monkeypatch.setattr(evaluate, "_choose", None)  # nothing is opened

  def refused(*arguments):
    assert run(root, *arguments) == 2
    return capsys.readouterr().err

  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "notes.txt").write_text("mine")
  said = refused(f"--report={tmp_path}/mine")
  assert "unknown files ('notes.txt')" in said
  said = refused(f"--report={tmp_path}/new", f"--json={tmp_path}/new/x.json")
  assert "(No such file or directory)" in said
  (tmp_path / "new").mkdir()
  said = refused(f"--report={tmp_path}/new", f"--json={tmp_path}/new/x.json")
  assert "is inside --report" in said
  said = refused(f"--report={tmp_path}/same", f"--json={tmp_path}/same")
  assert "or is the same path" in said
  assert "expected int" in refused("--report_images=-1")
