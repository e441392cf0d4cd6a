"""The command: pictures and numbers of a tiny model, into a directory."""

import dataclasses
import json
import os
import sys
import weakref

import fake_data
import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from kinds_of_tasks import tasks_of_kinds
from PIL import Image

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.commands import attention
from memory_vit.data import datasets
from memory_vit.data.split_ref import SplitRef
from memory_vit.looking import cell_removal, image_attention
from memory_vit.looking.attention_shares import attention_shares
from memory_vit.prediction import Predictor
from memory_vit.tasks import model_loading

MARK = {"kind": "memory_vit attention report"}
CENTRAL = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """Two tasks, of which one reads the other; one without memory; images."""
  root = tmp_path_factory.mktemp("attention")
  backbone = tiny_backbone(depth=1)
  mv.save_backbone(backbone, root / "tiny.npz")
  low = task_of(backbone, "low", seed=1)
  child = task_of(backbone, "child", seed=2, attends_to=[low], cells=3)
  bare = task_of(backbone, "bare", seed=3, cells=0, regime="cls_masked")
  mv.save_tasks([low, child, bare], root / "tasks")
  (root / "images").mkdir()
  for i in range(3):
    image = Image.fromarray(fake_data.noise(i))
    image.save(root / "images" / f"{i}.png")
  return root, backbone, [low, child, bare]


def task_of(backbone, name, **options):
  values = digits.get_config()
  values.data.name = "digits:0-4"
  made = config_lib.to_dict(config_lib.from_dict(values.to_dict()))
  source = datasets.open_split("digits:0-4", "test")
  task = random_task(
    backbone, name, classes=5, class_names=source.class_names,
    preprocessing=CENTRAL, **options,
  )  # fmt: skip
  return dataclasses.replace(task, provenance={"config": made, "metrics": {}})


def run(root, out, *arguments, tasks=("low", "child")):
  given = [f"--task={root}/tasks/{name}" for name in tasks]
  return attention.main(
    [f"--backbone={root}/tiny.npz", "--batch_size=2", f"--out={out}", *given]
    + [str(argument) for argument in arguments]
  )


def read(out):
  """The numbers; no NaN is in them, and every file is there."""
  text = (out / "attention.json").read_text()
  values = json.loads(text, parse_constant=pytest.fail)
  there = {p.relative_to(out).as_posix() for p in out.rglob("*.png")}
  assert there == set(values["files"])
  for name in there:
    with Image.open(out / name) as image:
      assert np.asarray(image.convert("L")).std() > 0
  return values


@pytest.mark.slow
def test_figures_of_two_tasks_are_written(model, tmp_path, capsys):
  root, backbone, tasks = model
  out = tmp_path / "out"
  assert run(root, out, "--max_images=1", root / "images") == 0
  values = read(out)
  assert values["schema_version"] == 1
  assert values["backbone"]["fingerprint"] == backbone.fingerprint
  assert sorted(values["files"]) == [
    "differences/0001.0.low.child.png", "overlays/0001.0.child.png",
    "overlays/0001.0.low.png", "shares/child.png", "shares/low.png",
  ]  # fmt: skip
  # The shares are those of all three images, in batches of two.
  paths = [root / "images" / f"{i}.png" for i in range(3)]
  images = mv.preprocess(paths, tasks[0])
  seen = mv.token_attention(backbone, tasks[:2], images)
  for entry in values["tasks"]:
    shares = attention_shares(seen[entry["name"]])
    found = entry["attention"]
    assert found["images"] == 3
    np.testing.assert_allclose(found["memory"], shares.memory, atol=1e-6)
    np.testing.assert_allclose(found["patches"], shares.patches, atol=1e-6)
    assert entry["removal"] is None
  assert list(values["tasks"][1]["attention"]["parent_memory"]) == ["low"]
  (image,) = values["images"]
  assert image["image"] == str(paths[0])
  logits = mv.forward(backbone, tasks[:2], images)["low"][0]
  answer = image["answers"]["low"]
  assert answer["index"] == logits.argmax()
  assert answer["class"] == tasks[0].spec.class_names[answer["index"]]
  shown = capsys.readouterr().out
  assert f"{100 * np.mean(found['patches']):.1f} %" in shown
  assert "attention.json, 5 figures" in shown


@pytest.mark.slow
def test_cells_are_removed_without_images(model, tmp_path, capsys):
  """Cells are removed, and what has none is left out with a word."""
  root, backbone, tasks = model
  out, names = tmp_path / "out", ("low", "child", "bare")
  assert run(
    root, out, "--data=digits:0-4", "--batch_size=128", tasks=names
  ) == 0  # fmt: skip
  values = read(out)
  source = datasets.open_ref(SplitRef("digits:0-4", "", "test"))
  expected = cell_removal.remove_cells(
    backbone, tasks, source, ["low", "child"], batch_size=128
  )
  entries = {entry["name"]: entry for entry in values["tasks"]}
  for name, removal in expected.items():
    found = entries[name]["removal"]
    assert found["data"] == "digits:0-4"
    assert found["examples"] == source.size
    assert found["top1"] == removal.top1
    assert found["cells"]["lost"] == removal.cells.lost.tolist()
    assert found["layers"]["gained"] == removal.layers.gained.tolist()
    assert found["memory"]["difference"] == removal.memory.difference
    without = removal.top1 + removal.memory.difference
    assert found["memory"]["top1"] == pytest.approx(without)
  assert entries["bare"]["removal"] is None
  assert values["left_out"] == [
    {
      "task": "bare", "picture": "removal",
      "reason": "has no memory cells that could be removed",
    }
  ]  # fmt: skip
  assert values["files"] == ["removal/child.png", "removal/low.png"]
  shown = capsys.readouterr().out
  assert "left out: bare has no memory cells" in shown
  assert "digits:0-4 test" in shown


@pytest.mark.slow
def test_labels_and_values_are_shown_and_have_no_removal(
  model, tmp_path, capsys
):
  root, backbone, _ = model
  tasks = [
    dataclasses.replace(
      task, spec=dataclasses.replace(task.spec, preprocessing=CENTRAL)
    )
    for task in tasks_of_kinds(backbone)[1:]
  ]
  mv.save_tasks(tasks, tmp_path / "tasks")
  out, image = tmp_path / "out", root / "images" / "0.png"
  assert attention.main([
    f"--backbone={root}/tiny.npz", f"--task={tmp_path}/tasks",
    f"--out={out}", str(image), "--data=digits:0-4",
  ]) == 0  # fmt: skip
  values = read(out)
  [answered] = values["images"]
  found = Predictor.from_model(
    backbone, tasks, batch_sizes=(1,), warm_up=False
  ).predict([image])
  chances = {g.index: g.probability for g in found.labels("tags")[0]}
  assert {
    one["index"]: pytest.approx(one["probability"], 1e-5)
    for one in answered["answers"]["tags"]["labels"]
  } == chances
  shown = [one["value"] for one in answered["answers"]["size"]["values"]]
  assert shown == pytest.approx(found.values("size")[0].tolist(), 1e-5)
  reasons = {one["task"]: one["reason"] for one in values["left_out"]}
  assert reasons == {
    "tags": "is a task of labels, which has no accuracy",
    "size": "is a task of values, which has no accuracy",
  }


@pytest.mark.slow
def test_the_split_that_is_evaluated_is_shown(model, tmp_path, capsys):
  root, _, _ = model
  out, data = tmp_path / "out", "--data=digits:0-4"
  # Of no image a batch of any size takes no memory.
  assert run(
    root, out, data, "--split=train", "--batch_size=512",
    "--memory_mib=1", tasks=["low"],
  ) == 0  # fmt: skip
  shown = capsys.readouterr().out
  assert "digits:0-4 train" in shown
  assert shown.endswith("attention.json, 1 figure\n")
  assert read(out)["tasks"][0]["removal"]["split"] == "train"


@pytest.mark.fault("report-directory")
def test_foreign_directory_is_left_as_it_is(model, tmp_path, capsys):
  root, _, _ = model
  mine = tmp_path / "mine"
  mine.mkdir()
  (mine / "notes.txt").write_text("dear")
  assert run(root, mine, root / "images") == 2
  assert "holds unknown files ('notes.txt')" in capsys.readouterr().err
  assert [p.name for p in mine.iterdir()] == ["notes.txt"]
  # A list of files is believed only for what it names.
  values = {**MARK, "files": ["shares/a.png"]}
  (mine / "attention.json").write_text(json.dumps(values))
  assert run(root, mine, root / "images") == 2
  assert (mine / "notes.txt").read_text() == "dear"


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "no image is given: give an IMAGE"),
    (["--data=digits:0-4", "--batch_size=3"], "a multiple of 8, the number of"),
    (["--data=other=digits", "x.png"], "there is no task 'other'"),
    (["--data=backbone=digits", "x.png"], "there is no task 'backbone'"),
    (["--max_images=1001", "x.png"], "expected int"),
    (["--", "-x.png", "--nope"], "no image could be read"),
  ],
)
def test_unusable_command_lines_are_refused(
  model, tmp_path, capsys, arguments, message
):
  root, _, _ = model
  assert run(root, tmp_path / "out", *arguments) == 2
  assert message in capsys.readouterr().err
  assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_unreadable_images_are_named(model, tmp_path, capsys):
  """As often as it is given; in names of other bytes they are escaped."""
  root, _, _ = model
  bad, good = (os.fsencode(tmp_path) + name for name in (b"/b\xff", b"/g\xff"))
  with open(bad, "wb") as file:
    file.write(b"no image")
  with open(good, "wb") as file:
    file.write((root / "images" / "0.png").read_bytes())
  out, (bad, good) = tmp_path / "out", map(os.fsdecode, (bad, good))
  assert run(root, out, bad, good, bad, tasks=["low"]) == 1
  shown = capsys.readouterr()
  assert shown.err.count(f"skipped {tmp_path}/b\\xff: not a JPEG") == 2
  assert "\n2 images could not be read\n" in shown.out
  values = read(out)
  assert [one["image"] for one in values["skipped"]] == (
    [f"{tmp_path}/b\\xff"] * 2
  )
  assert [image["image"] for image in values["images"]] == [
    f"{tmp_path}/g\\xff"
  ]


def test_standard_input_is_read_as_it_comes(model, tmp_path, monkeypatch):
  """Neither the paths nor the results of a million images form a list."""
  root, _, _ = model
  path, asked = os.fsencode(root / "images" / "0.png"), []
  seen, kept = weakref.WeakSet(), []

  def lines():
    for i in range(9):
      asked.append(i)
      kept.append(len(seen))
      yield path + b"\n"

  def shares_of(looks):
    shares = attention_shares(looks)
    seen.add(shares)
    return shares

  class Input:
    buffer = lines()

  monkeypatch.setattr(sys, "stdin", Input)
  loaded = []
  load = model_loading.load_model

  def noted(*arguments):
    loaded.append(len(asked))
    return load(*arguments)

  monkeypatch.setattr(model_loading, "load_model", noted)
  monkeypatch.setattr(image_attention, "attention_shares", shares_of)
  out = tmp_path / "out"
  assert run(root, out, "--max_images=1", "-", tasks=["low"]) == 0
  assert loaded == [1]
  assert max(kept) <= 1
  values = read(out)
  assert values["tasks"][0]["attention"]["images"] == 9
  assert len(values["images"]) == 1


def test_refusal_comes_before_loading(model, tmp_path, capsys, monkeypatch):
  root, _, _ = model
  out, image = tmp_path / "out", root / "images" / "0.png"
  monkeypatch.setattr(attention.data_options, "open_all", None)
  monkeypatch.setattr(cell_removal, "_MOST_VARIANTS", 3)
  assert run(root, out, "--data=digits:0-4", "--batch_size=8") == 2
  assert "expected at most 3. Leave the task out" in capsys.readouterr().err
  monkeypatch.setattr(attention, "model_loading", None)
  assert run(
    root, out, image, "--batch_size=2048", "--memory_mib=1"
  ) == 2  # fmt: skip
  assert "2048 images of 8 pixels a side do not fit" in capsys.readouterr().err


@pytest.mark.fault("unfinished-report")
def test_an_earlier_report_stays_where_there_is_nothing_to_show(
  model, tmp_path, capsys
):
  root, _, _ = model
  out, bad = tmp_path / "out", tmp_path / "bad.png"
  (out / "shares").mkdir(parents=True)
  (out / "shares" / "a.png").write_bytes(b"old")
  text = json.dumps({**MARK, "files": ["shares/a.png"]})
  (out / "attention.json").write_text(text)
  bad.write_bytes(b"no image")
  assert run(root, out, bad, tasks=["low"]) == 2
  said = capsys.readouterr().err
  assert "bad.png" in said
  assert "no image could be read" in said
  assert run(root, out, "--data=digits:0-4", "--batch_size=8",
             tasks=["bare"]) == 2  # fmt: skip
  assert "no task of classes has memory cells" in capsys.readouterr().err
  assert (out / "shares" / "a.png").read_bytes() == b"old"
  assert (out / "attention.json").read_text() == text


def test_too_many_figures_are_refused(model, tmp_path, capsys, monkeypatch):
  root, _, _ = model
  monkeypatch.setattr(attention, "_MOST_FIGURES", 8)
  monkeypatch.setattr(attention, "model_loading", None)  # it is said before
  out = tmp_path / "out"
  assert run(root, out, "--max_images=3", root / "images") == 2
  # Of three images those of two tasks and their pair, and two of shares.
  assert "would have 11 figures, expected at most 8" in capsys.readouterr().err
  data = "--data=digits:0-4", "--batch_size=8"
  assert run(root, out, "--max_images=2", root / "images", *data) == 2
  said = capsys.readouterr().err
  assert "would have 10 figures" in said
  assert "2 memory ablations" in said


@pytest.mark.slow
def test_tasks_without_a_token_are_left_out(model, tmp_path, capsys):
  root, backbone, _ = model
  head = random_task(
    backbone, "head", regime="head", cells=0, preprocessing=CENTRAL
  )
  mv.save_task(head, tmp_path / "head")
  arguments = [
    f"--backbone={root}/tiny.npz", f"--task={tmp_path}/head",
    f"--out={tmp_path}/out", str(root / "images" / "0.png"),
  ]  # fmt: skip
  assert attention.main(arguments) == 2
  shown = capsys.readouterr().err
  assert "head has the regime 'head', which gives a task no class" in shown
  assert attention.main([*arguments, f"--task={root}/tasks/low"]) == 0
  assert "left out: head has the regime 'head'" in capsys.readouterr().out
  values = read(tmp_path / "out")
  assert [task["name"] for task in values["tasks"]] == ["low"]
  assert [gap["task"] for gap in values["left_out"]] == ["head"]


def test_an_extended_task_needs_its_parent(model, tmp_path, capsys):
  root, _, _ = model
  assert run(root, tmp_path / "out", root / "images", tasks=["child"]) == 2
  assert "task 'child' attends to 'low'" in capsys.readouterr().err
