"""The command: one model, each task on its own data, compared with alone."""

import dataclasses
import json
import re

import fake_data
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
import tensorflow as tf
from conftest import one_device, random_task, tiny_backbone

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.commands import console, data_options, evaluate
from memory_vit.data import batching, datasets
from memory_vit.data.graph_source import GraphSource
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import ConfigError, TaskError
from memory_vit.evaluation import evaluate as evaluate_lib
from memory_vit.evaluation import verify
from memory_vit.kinds import CLASSES
from memory_vit.runtime import files, sharding
from memory_vit.tasks.program import Program

CENTRAL = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
# What the command says of every evaluation.
ENTRY = {
  "data": "d", "directory": "", "split": "test", "examples": 8, "skipped": 0,
  "not_finite": 0, "score": 0.5, "kind": "classes",
  "metrics": {"top1": 0.5, "top5": 1.0}, "per_output": {"accuracy": [0.5] * 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """Tasks that know their data sets, as a run would have made them."""
  root = tmp_path_factory.mktemp("evaluate")
  backbone = tiny_backbone(num_classes=5, depth=1)
  mv.save_backbone(backbone, root / "tiny.npz")
  low = task_of(backbone, "low", "digits:0-4", seed=1)
  high = task_of(backbone, "high", "digits:5-9", seed=2, cells=3)
  child = task_of(backbone, "child", "digits:0-4", seed=3, attends_to=[high])
  mv.save_tasks([low, high, child], root / "tasks")
  return root, backbone, [low, high, child]


def task_of(backbone, name, data_name, **options):
  values = digits.get_config()
  values.data.name = data_name
  made = config_lib.to_dict(config_lib.from_dict(values.to_dict()))
  source = datasets.open_split(data_name, "test")
  task = random_task(
    backbone, name, classes=5, class_names=source.class_names,
    preprocessing=CENTRAL, **options,
  )  # fmt: skip
  return dataclasses.replace(task, provenance={"config": made, "metrics": {}})


def run(root, *arguments):
  return evaluate.main(
    [f"--backbone={root}/tiny.npz", "--batch_size=64", *arguments]
  )


def accuracy_by_hand(backbone, tasks, name, data_name):
  source = datasets.open_split(data_name, "test")
  hits = []
  for batch in batching.eval_batches(source, CENTRAL, batch_size=64):
    out = mv.forward(backbone, tasks, batch["image"])[name]
    hits += list((out.argmax(-1) == batch["label"])[batch["mask"] > 0])
  return np.mean(hits), len(hits)


@pytest.mark.fault("many-tasks")
@pytest.mark.slow
def test_every_task_on_its_own_data(model, capsys):
  root, backbone, tasks = model
  assert run(root, f"--task={root}/tasks", f"--json={root}/out.json",
             "--verify") == 0  # fmt: skip
  result = json.loads((root / "out.json").read_text())
  shown = capsys.readouterr().out
  entries = {entry["name"]: entry for entry in result["tasks"]}
  assert list(entries) == ["child", "high", "low"]  # as they lie there
  for name, where in (
    ("low", "digits:0-4"), ("high", "digits:5-9"), ("child", "digits:0-4"),
  ):  # fmt: skip
    expected, examples = accuracy_by_hand(backbone, tasks, name, where)
    assert entries[name]["score"] == pytest.approx(expected)
    assert entries[name]["metrics"]["top1"] == entries[name]["score"]
    assert entries[name]["examples"] == examples
    assert entries[name]["data"] == where
    assert entries[name]["alone"]["score"] == entries[name]["score"]
    assert entries[name]["alone"]["max_difference"] < 1e-5
    assert f"{100 * expected:.2f} %" in shown
  upstream = result["backbone"]["upstream"]
  assert upstream["outputs_bit_equal"] is True
  assert 0 <= upstream["score"] <= 1
  assert upstream["score"] == upstream["score_plain"]
  assert result["verified"] is True
  assert result["timing"]["together"] > 0
  assert "verified: yes" in shown


def test_original_outputs_on_data_of_other_classes(model, capsys):
  """Digits have 10 classes, and the backbone 5: bits alone are compared."""
  root = model[0]
  file = root / "found.json"
  run(
    root, f"--task={root}/tasks/low", "--verify", "--data=backbone=digits",
    "--split=backbone=test[:64]", f"--json={file}",
  )  # fmt: skip
  upstream = json.loads(file.read_text())["backbone"]["upstream"]
  assert upstream["outputs_bit_equal"] is True
  assert upstream["score"] is upstream["score_plain"] is None
  said = "original outputs, digits (64 images): equal to the bit: yes"
  assert said in capsys.readouterr().out


def split_of(kind):
  """Ten images of classes, labels or values."""
  rng = np.random.default_rng(0)
  numbers = {
    "classes": np.arange(10, dtype=np.int32) % 3,
    "labels": rng.integers(0, 2, (10, 3)).astype(np.float32),
    "values": (2.9 * rng.random((10, 3))).astype(np.float32),
  }[kind]
  images = fake_data.numbered_source(10)
  return dataclasses.replace(
    images, kind=kind, class_names=("a", "b", "c"), labels=numbers,
    source=GraphSource(
      lambda i: (images.source.fetch(i)[0], tf.gather(tf.constant(numbers), i))
    ),
  )  # fmt: skip


@pytest.mark.fault("many-tasks")
@pytest.mark.slow
def test_tasks_of_all_kinds_share_a_pass(model, tmp_path, monkeypatch, capsys):
  root, backbone, _ = model
  kinds = {
    "classes": CLASSES,
    "labels": mv.TaskKind(name="labels", thresholds=(0.1, 0.5, 0.9)),
    "values": mv.TaskKind(
      name="values", mean=(0, 1, 2), std=(1, 2, 3), units=("mm",) * 3
    ),
  }
  tasks = [
    random_task(
      backbone, name, seed=seed, classes=3, class_names=("a", "b", "c"),
      kind=kind, preprocessing=CENTRAL,
    )
    for seed, (name, kind) in enumerate(kinds.items())
  ]  # fmt: skip
  mv.save_tasks(tasks, tmp_path / "tasks")
  monkeypatch.setattr(
    data_options, "open_split", lambda ref, _: split_of(ref.kind)
  )
  out = tmp_path / "out.json"
  assert run(
    root, f"--task={tmp_path}/tasks", "--data=mixed", "--split=test",
    "--data=backbone=", "--verify", "--batch_size=8", f"--json={out}",
    f"--report={tmp_path}/report", "--report_images=1",
  ) == 0  # fmt: skip
  entries = {t["name"]: t for t in json.loads(out.read_text())["tasks"]}
  images = batching.eval_images(split_of("classes"), CENTRAL, range(10))
  outputs = mv.forward(backbone, tasks, images)
  by_hand = {
    name: (np.asarray(outputs[name]), split_of(name).labels) for name in kinds
  }
  guess, label = by_hand["classes"]
  assert entries["classes"]["score"] == (guess.argmax(-1) == label).mean()
  scores, has = by_hand["labels"]
  average = sklearn.metrics.average_precision_score(has, scores)
  assert entries["labels"]["metrics"]["map"] == pytest.approx(average)
  predicted = 1 / (1 + np.exp(-scores)) >= (0.1, 0.5, 0.9)
  f1 = sklearn.metrics.f1_score(has, predicted, average="macro")
  assert entries["labels"]["metrics"]["f1_macro"] == pytest.approx(f1)
  standard, right = by_hand["values"]
  found = np.array([0, 1, 2]) + standard * (1, 2, 3)
  r2 = sklearn.metrics.r2_score(right, found)
  numbers = entries["values"]["metrics"]
  assert numbers["r2"] == pytest.approx(r2, rel=1e-4)
  mae = np.abs(right - found).mean()
  assert numbers["mae"] == pytest.approx(mae, rel=1e-4)
  for name, score in (("labels", "map"), ("values", "r2")):
    assert entries[name]["score"] == entries[name]["metrics"][score]
    assert entries[name]["alone"]["verified"] is True
    alone = entries[name]["alone"]["score"]
    assert alone == pytest.approx(entries[name]["score"], rel=1e-4)
    assert (tmp_path / "report" / name / "report.html").is_file()
  shown = capsys.readouterr().out
  for said in (
    f"{100 * average:.2f} %", f"{r2:.4g}", f"{mae:.4g} mm", "macro F1",
    "verified: yes",
  ):  # fmt: skip
    assert said in shown
  # Data of another kind are refused before any evaluation.
  monkeypatch.setattr(
    data_options, "open_split", lambda *_: split_of("classes")
  )
  given = (f"--task={tmp_path}/tasks/labels", "--data=mixed", "--split=test")
  assert run(root, *given) == 2
  said = (
    "'labels' has 3 labels (a, b, c, ...), but the data set 'numbered' has 3 c"
  )
  assert said in capsys.readouterr().err


@pytest.mark.slow
def test_each_pass_is_that_of_a_predictor(model, monkeypatch):
  """All of one shape, also the last, which is filled up; the same bits."""
  _, backbone, tasks = model
  real, passes = Program.__call__, []

  def noted(self, backbone, images):
    out = real(self, backbone, images)
    passes.append((np.asarray(images), out))
    return out

  monkeypatch.setattr(Program, "__call__", noted)
  source = datasets.open_ref(SplitRef("digits:0-4", "", "test"))
  verify.Evaluator(backbone, tasks, one_device(), 64).evaluate(
    source, ["low", "child"], verify=False
  )
  assert len(passes) == -(-source.size // 64)
  assert source.size % 64
  predictor = mv.Predictor.from_model(
    backbone, tasks, batch_sizes=(64,), slots=1, warm_up=False
  )
  for i, (images, out) in enumerate(passes):
    assert len(images) == 64
    whole = images[: source.size - 64 * i]
    found = predictor.predict_pixels(whole, original=True)
    logits = {**found.logits, "backbone": found.original}
    assert logits.keys() == out.keys()
    for name, expected in out.items():
      np.testing.assert_array_equal(logits[name], expected[: len(whole)])


@pytest.mark.parametrize(
  "regime", ["head_cls", pytest.param("memory", marks=pytest.mark.slow)]
)
def test_a_task_that_composes_with_nothing_is_evaluated_alone(
  model, tmp_path, capsys, regime
):
  """By the program that tests it at the end of its run."""
  root, backbone, (low, *_) = model
  cells = 2 if regime == "memory" else 0
  task = task_of(backbone, "lone", "digits:5-9", regime=regime, cells=cells)
  mv.save_task(task, tmp_path / "lone")
  given = (f"--task={tmp_path}/lone", f"--json={tmp_path}/out.json")
  report = [f"--report={tmp_path}/report"] if regime == "memory" else []
  assert run(root, *given, *report) == 0
  result = json.loads((tmp_path / "out.json").read_text())
  [entry] = result["tasks"]
  mesh = sharding.make_mesh()
  params = sharding.put_backbone(backbone.params, mesh)
  placed = dataclasses.replace(backbone, params=params)
  trained = evaluate_lib.evaluate_source(
    evaluate_lib.predict_fn(placed, [task], mesh),
    datasets.open_ref(SplitRef("digits:5-9", "", "test")),
    CENTRAL, batch_size=64, mesh=mesh,
  )["lone"].scores  # fmt: skip
  assert entry["examples"] == trained.examples == 177
  assert entry["score"] == trained.accuracy
  assert entry["loss"] == trained.loss
  page = tmp_path / "report" / "lone" / "report.html"
  assert page.is_file() == bool(report)
  capsys.readouterr()
  assert run(root, *given, "--verify") == 2
  assert f"has the regime '{regime}', which needs a" in capsys.readouterr().err
  assert run(root, *given, f"--task={root}/tasks/low") == 2
  assert "it cannot share a pass. Give it alone" in capsys.readouterr().err


def test_nothing_is_compared_with_a_task_that_composes_with_nothing(model):
  """From Python as by the command: no other program could be compared."""
  _, backbone, _ = model
  task = random_task(
    backbone, "lone", classes=5, regime="probe", cells=0, bottleneck=3,
    preprocessing=CENTRAL,
  )  # fmt: skip
  source = datasets.open_ref(SplitRef("digits:0-4", "", "test"))
  evaluator = verify.Evaluator(backbone, [task], one_device(), 64)
  refused = "'lone' has the regime 'probe', which needs a separate pass"
  with pytest.raises(ConfigError, match=refused):
    evaluator.evaluate(source, ["lone"], verify=True)
  with pytest.raises(ConfigError, match=refused):
    evaluator.upstream(source, CENTRAL)
  shared = random_task(backbone, "shared", classes=5)
  with pytest.raises(ConfigError, match=refused):
    verify.require_comparable([shared.spec, task.spec])
  other = tiny_backbone(seed=7)
  with pytest.raises(TaskError, match="belongs to another backbone"):
    verify.Evaluator(other, [task], one_device(), 64)


@pytest.mark.slow
def test_changed_outputs_are_found(model, monkeypatch, capsys):
  """A model in which a neighbour is felt, or the original changes."""
  root, *_ = model
  task = f"--task={root}/tasks/low"
  real = Program.__call__

  def leaking(factor_task, factor_original):
    def forward(*args, **options):
      out = real(*args, **options)
      return {
        name: value * (factor_original if name == "backbone" else factor_task)
        for name, value in out.items()
      }

    return forward

  monkeypatch.setattr(Program, "__call__", leaking(1.001, 1.0))
  assert run(root, task, "--verify") == 1
  monkeypatch.setattr(Program, "__call__", leaking(1.0, 1.0 + 1e-6))
  assert run(root, task, "--verify") == 1
  assert "plain ViT: NO" in capsys.readouterr().out
  monkeypatch.setattr(Program, "__call__", leaking(float("nan"), 1.0))
  assert run(root, task, "--verify") == 1
  monkeypatch.undo()
  assert run(root, task, "--verify") == 0


@pytest.mark.fault("non-finite-outputs")
@pytest.mark.slow
def test_outputs_that_are_not_finite_are_reported(model, monkeypatch, capsys):
  """And the file is JSON, which has no NaN and no infinity."""
  root, *_ = model
  file = root / "not-finite.json"
  real = Program.__call__

  def forward(*args, **options):
    out = real(*args, **options)
    return {name: value.at[0].set(np.nan) for name, value in out.items()}

  def constant(name):
    raise AssertionError(f"{name} is no JSON")

  monkeypatch.setattr(Program, "__call__", forward)
  monkeypatch.setattr(verify, "median_seconds", lambda functions: dict.fromkeys(
    functions, 1.0
  ))  # fmt: skip
  arguments = (f"--task={root}/tasks/low", f"--json={file}")
  assert run(root, *arguments, "--split=test[:9]") == 0
  result = json.loads(file.read_text(), parse_constant=constant)
  (entry,) = result["tasks"]
  assert (entry["examples"], entry["not_finite"]) == (9, 1)
  assert entry["loss"] is None
  said = capsys.readouterr().out
  assert "low: outputs for 1 image of digits:0-4 are not finite" in said
  found = {**ENTRY, "not_finite": 2, "score_plain": 0.5,
           "outputs_bit_equal": True}  # fmt: skip
  result["backbone"]["upstream"] = found
  entry["alone"] = {"score": 0.5, "max_difference": None,
                    "outputs_bit_equal": True}  # fmt: skip
  said = evaluate.text({**result, "verified": True})
  assert "original task: outputs for 2 images of d are not finite" in said


@pytest.mark.slow
def test_folders_are_named_by_their_directory(model, tmp_path, capsys):
  """By the name of their directory: of both the data set is "folder"."""
  root, backbone, _ = model
  kinds, file = ("cats", "dogs"), tmp_path / "out.json"
  for kind in kinds:
    tree = {f"{split}/{c}": ["1.png"] for split in ("train", "test")
            for c in "ab"}  # fmt: skip
    fake_data.write_folder(tmp_path / kind, tree)
    task = random_task(
      backbone, kind, classes=2, class_names=("a", "b"), preprocessing=CENTRAL
    )
    mv.save_task(task, tmp_path / "tasks" / kind)
  assert run(
    root, "--data=folder", f"--json={file}", "--split=test",
    *(f"--task={tmp_path}/tasks/{kind}" for kind in kinds),
    *(f"--data_dir={kind}={tmp_path}/{kind}" for kind in kinds),
  ) == 0  # fmt: skip
  found = json.loads(file.read_text())["tasks"]
  assert [(entry["data"], entry["directory"]) for entry in found] == [
    ("folder", "cats"), ("folder", "dogs")
  ]  # fmt: skip
  rows = capsys.readouterr().out.splitlines()[2:4]
  for row, kind in zip(rows, kinds, strict=True):
    assert row.split()[:4] == [kind, "folder", kind, "test"]
  (tmp_path / "dogs/train/c").mkdir()
  (tmp_path / "dogs/train/c/1.png").write_bytes(b"")
  assert run(
    root, "--data=folder", f"--task={tmp_path}/tasks/dogs",
    f"--data_dir={tmp_path}/dogs", "--split=test",
  ) == 2  # fmt: skip
  assert (
    "the data set 'folder dogs' has 3 classes (a, b, c, "
    in capsys.readouterr().err
  )


def test_images_of_no_class_are_told_from_others(model, tmp_path, capsys):
  root, backbone, [low, *_] = model
  folder = fake_data.write_folder(
    tmp_path / "unknown", {"any": ["a.png", "b.jpg", "c.png"]}
  )
  (folder / "any" / "bad.png").write_bytes(b"no image")
  images = mv.preprocess(
    [folder / "any" / name for name in ("a.png", "b.jpg", "c.png")], low
  )
  scores = np.asarray(mv.forward(backbone, low, jnp.asarray(images))["low"])
  scores = scores.max(axis=1)
  spec = dataclasses.replace(
    low.spec, kind=mv.TaskKind(unknown=float(np.sort(scores)[1]) + 1e-4)
  )
  mv.save_task(dataclasses.replace(low, spec=spec), tmp_path / "low")
  arguments = [f"--task={tmp_path / 'low'}", f"--json={tmp_path / 'out.json'}"]
  assert run(root, *arguments, f"--unknown_data={folder}") == 0
  [entry] = json.loads((tmp_path / "out.json").read_text())["tasks"]
  known = []
  for batch in batching.eval_batches(
    datasets.open_split("digits:0-4", "test"), CENTRAL, batch_size=64
  ):
    logits = np.asarray(mv.forward(backbone, low, batch["image"])["low"])
    known += [*logits.max(axis=1)[batch["mask"] > 0]]
  known = np.array(known)
  found = entry["unknown_data"]
  area = (known[:, None] > scores[None]).mean()
  assert found["area"] == pytest.approx(area, abs=1e-6)
  assert (found["images"], found["skipped"]) == (3, 1)
  assert found["rejected"] == pytest.approx(2 / 3)
  rejected = (known < spec.kind.unknown).mean()
  assert entry["rejection"]["rejected"] == pytest.approx(rejected)
  shown = capsys.readouterr().out
  assert f"area under the ROC curve {area:.3f}; 66.67 % are rejected" in shown
  assert "1 image could not be used" in shown
  (tmp_path / "empty").mkdir()
  for wrong, message in (
    (tmp_path / "none", "is not a directory"),
    (tmp_path / "empty", "holds no images"),
  ):
    assert run(root, *arguments, f"--unknown_data={wrong}") == 2
    assert re.search(message, capsys.readouterr().err)


def test_json_file_holds_no_nan(tmp_path):
  file = tmp_path / "out.json"
  with pytest.raises(ValueError, match="not JSON compliant"):
    files.write_json(file, {"loss": float("nan")})
  assert not file.exists()


@pytest.mark.slow
def test_changed_outputs_in_one_batch_are_found(model, monkeypatch):
  """In the first of three; the others are equal."""
  root, *_ = model
  real, calls = Program.__call__, []

  def forward(*args, **options):
    out = real(*args, **options)
    calls.append(1)
    if len(calls) == 1:
      out = {**out, "backbone": out["backbone"] * (1 + 1e-6)}
    return out

  monkeypatch.setattr(Program, "__call__", forward)
  assert run(root, f"--task={root}/tasks/low", "--verify") == 1
  assert len(calls) > 2


@pytest.mark.slow
def test_other_splits_are_evaluated_and_bad_input_is_refused(
  model, tmp_path, capsys
):
  root, backbone, (low, high, child) = model
  out = tmp_path / "out.json"
  # The digits come with a package: what a task says of them is followed.
  arguments = (f"--task={root}/tasks/low", f"--json={out}")
  assert run(root, *arguments, "--split=train[:50]") == 0
  (entry,) = json.loads(out.read_text())["tasks"]
  assert (entry["split"], entry["examples"]) == ("train[:50]", 50)

  def refused(*arguments):
    capsys.readouterr()
    assert run(root, *arguments) == 2
    return capsys.readouterr().err

  assert "'child' attends to 'high'" in refused(f"--task={root}/tasks/child")
  assert "neither a task nor" in refused(f"--task={tmp_path}/none")
  assert "same name: ['low']" in refused(*[f"--task={root}/tasks/low"] * 2)
  assert "no split 'tset'" in refused(f"--task={root}/tasks/low",
                                      "--split=tset")  # fmt: skip
  assert "--batch_size is 12" in refused(f"--task={root}/tasks/low",
                                         "--batch_size=12")  # fmt: skip
  assert "(No such file or directory)" in refused(
    f"--task={root}/tasks/low", "--json=/no/such/x.json"
  )
  thesis = tmp_path / "thesis.txt"
  thesis.write_text("mine")
  assert "thesis.txt" in refused(f"--task={root}/tasks/low",
                                 f"--json={thesis}")  # fmt: skip
  assert thesis.read_text() == "mine"
  unknown = dataclasses.replace(high, provenance={})
  mv.save_task(unknown, tmp_path / "unknown")
  assert "names no data set" in refused(f"--task={tmp_path}/unknown")
  assert "--cache_gib: the value is 'nan'" in refused(
    "--task=x", "--cache_gib=nan"
  )
  assert "there is no task 'hgih'" in refused(f"--task={tmp_path}/unknown",
                                              "--data=hgih=digits")  # fmt: skip
  given = (f"--task={tmp_path}/unknown", "--data=digits:5-9")
  assert run(root, *given, "--split=high=test[:9]", f"--json={out}") == 0
  (entry,) = json.loads(out.read_text())["tasks"]
  assert (entry["data"], entry["examples"]) == ("digits:5-9", 9)
  spec = dataclasses.replace(low.spec, class_names=tuple("abcde"))
  mv.save_task(mv.Task(spec, low.params, low.provenance), tmp_path / "other")
  assert "has 5 classes (a, b, c, ...)" in refused(f"--task={tmp_path}/other")


@pytest.mark.fault("bad-workdir")
def test_json_option_replaces_only_its_own_files(tmp_path):
  """What is there must begin as what this command writes."""
  file, own = tmp_path / "thesis.txt", {"backbone": {}, "tasks": []}
  for text in ("my thesis", '{"name": "my package"}', "{}"):
    file.write_text(text)
    with pytest.raises(ConfigError, match="thesis.txt.*exists"):
      console.json_file(str(file), "backbone")
    assert file.read_text() == text
  files.write_json(file, own)
  assert console.json_file(str(file), "backbone") == file
  with pytest.raises(ConfigError, match="exists"):
    console.json_file(str(file), "splits")
  file.write_text("")  # of `mktemp`
  assert console.json_file(str(file), "backbone") == file


def test_top5_of_five_classes_is_not_shown():
  entry = {**ENTRY, "metrics": {"top1": 0.5, "top5": 0.875}}
  result = {
    "tasks": [
      {**entry, "name": "five", "per_output": {"accuracy": [0.5] * 5}},
      {**entry, "name": "six", "per_output": {"accuracy": [0.5] * 6}},
    ],
    "timing": {"batch_size": 8, "plain": 1.0, "tasks": 2, "together": 1.1,
               "one_by_one": 2.0},
  }  # fmt: skip
  rows = evaluate.text(result).splitlines()[2:4]
  assert [row.split()[-2:] for row in rows] == [["%", "-"], ["87.50", "%"]]


def test_each_kind_has_its_table():
  entry = {**ENTRY, "name": "c"}
  labels = {**entry, "kind": "labels", "name": "l", "not_finite": 2,
            "metrics": {"map": 0.25, "f1_macro": None}}  # fmt: skip
  numbers = {"r2": 0.75, "spearman": None, "mae": 1.5, "rmse": 2.25}
  one = {**entry, "metrics": numbers, "kind": "values", "units": ["mm"],
         "name": "v"}  # fmt: skip
  mixed = {**one, "units": ["mm", "g"], "name": "w"}
  timing = {"batch_size": 8, "plain": 1.0, "tasks": 1, "together": 1.1}
  said = evaluate.text({"tasks": [mixed, labels, entry, one], "timing": timing})
  tables = [table.splitlines() for table in said.split("\n\n")]
  assert tables[0][0].split()[-2:] == ["top-1", "top-5"]
  assert tables[1][0].split()[-3:] == ["mAP", "macro", "F1"]
  assert tables[1][2].split()[-3:] == ["25.00", "%", "-"]
  assert tables[2][0].split()[-4:] == ["R2", "Spearman", "MAE", "RMSE"]
  assert tables[2][2].split()[-4:] == ["0.75", "-", "1.5", "2.25"]
  assert tables[2][3].split()[-5:] == ["-", "1.5", "mm", "2.25", "mm"]
  assert "l: outputs for 2 images of d are not finite: no label" in said


def test_a_task_alone_is_timed_once():
  """One pass for all of one task, and one after the other, are the same."""
  entry = {**ENTRY, "skipped": 1, "name": "a"}
  timing = {"batch_size": 8, "plain": 1.0, "tasks": 1, "together": 1.1,
            "one_by_one": 1.2}  # fmt: skip
  said = evaluate.text({"tasks": [entry], "timing": timing})
  assert "a: 1 image of d could not be read" in said
  assert said.endswith("1 task in one pass 1.10 times that")
  timing["tasks"] = 2
  said = evaluate.text({"tasks": [entry, entry], "timing": timing})
  assert said.endswith("2 tasks in one pass 1.10 times that, one after the "
                       "other 1.20 times")  # fmt: skip
