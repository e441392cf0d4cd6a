"""Export: written files, refusals, and nothing left behind after an error."""

import dataclasses
import hashlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from kinds_of_tasks import LABELS, VALUES, activated, tasks_of_kinds

import memory_vit as mv
from memory_vit.commands import export as command
from memory_vit.errors import ExportError, TaskError, TrainingError
from memory_vit.exports import (
  check,
  export,
  export_manifest,
  onnx_file,
  run_exported,
  saved_model,
)
from memory_vit.exports.exported_model import make_model


@pytest.fixture
def in_this_process(monkeypatch):
  """A process takes seconds to start; `test_other_processes.py` starts some."""

  def run(kind, model, images, files=()):
    del files
    (call,) = run_exported.LOADERS[kind][1](model).values()
    found = {name: np.asarray(v) for name, v in call(images).items()}
    seconds = {
      "load_seconds": 0.1, "first_call_seconds": 0.2, "call_seconds": 0.3
    }  # fmt: skip
    return {"serving_default": found}, seconds

  monkeypatch.setattr(check, "run", run)


def names_in(path):
  return sorted(file.name for file in path.rglob("*"))


@pytest.mark.fault("damaged-export")
@pytest.mark.slow
def test_the_manifest_says_what_lies_beside_it(
  backbone, in_this_process, tmp_path
):
  task = random_task(
    backbone, "a", class_names=("cat\n", "Käfer", "<b>"), cells=1
  )
  out = tmp_path / "new" / "out"
  report = mv.export_model(backbone, task, out, format="stablehlo", examples=3)
  values = json.loads((out / "manifest.json").read_text())
  assert values["files"] == report.files
  (file,) = report.files
  content = (out / file).read_bytes()
  assert names_in(out) == ["manifest.json", file]
  assert values["files"][file] == {
    "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()
  }  # fmt: skip
  assert values["backbone"]["fingerprint"] == backbone.fingerprint
  assert values["tasks"][0]["digest"] == task.digest
  assert values["tasks"][0]["class_names"] == ["cat\n", "Käfer", "<b>"]
  signature = values["signatures"]["serving_default"]
  assert signature["inputs"]["images"]["shape"] == ["b", 8, 8, 3]
  assert {n: o["shape"] for n, o in signature["outputs"].items()} == {
    "backbone": ["b", 7], "a": ["b", 3]
  }  # fmt: skip
  compared = values["comparison"]
  assert compared["images"] == 3
  shares = compared["max_difference"]["serving_default"]
  assert set(shares) == {"backbone", "a"}
  assert compared["tolerance"] == {"serving_default": 1e-4}
  assert max(shares.values()) <= 1e-4
  assert values["versions"]["jax"] == jax.__version__
  # What an export wrote is replaced as a whole.
  mv.export_model(backbone, task, out, format="safetensors")
  assert names_in(out) == ["README.md", "a.safetensors", "manifest.json"]
  assert json.loads((out / "manifest.json").read_text())["signatures"] == {}


@pytest.mark.fault("unequal-export")
@pytest.mark.slow
def test_an_export_that_computes_something_else_leaves_nothing(
  backbone, in_this_process, monkeypatch, tmp_path
):
  task, run = random_task(backbone, "a"), check.run

  def wrong(*arguments):
    found, seconds = run(*arguments)
    outputs = found["serving_default"]
    return {"serving_default": {**outputs, "a": outputs["a"] * 1.01}}, seconds

  monkeypatch.setattr(check, "run", wrong)
  with pytest.raises(ExportError, match="differ from mv.forward: a of"):
    mv.export_model(
      backbone, task, tmp_path / "out", format="stablehlo", examples=1
    )
  assert names_in(tmp_path) == []


def test_pixels_that_are_rounded_have_a_tolerance_of_their_own(backbone):
  """Only the signature "encoded" of a SavedModel of floats takes pixels."""
  preprocessing = mv.EvalPreprocessing(image_size=8, interpolation="bicubic")
  task = random_task(backbone, "a", preprocessing=preprocessing)
  program = make_model(backbone, task)
  assert program.backbone.config.platform == "cpu"
  pixels = mv.ImageInput(kind="uint8")
  for images, signature, expected in (
    (mv.ImageInput(), "serving_default", 1e-4),
    (mv.ImageInput(), "encoded", 1e-2),
    (pixels, "serving_default", 1e-2),
  ):
    assert check.tolerance_of(program, images, signature) == expected
  bilinear = make_model(backbone, random_task(backbone, "a"))
  assert check.tolerance_of(bilinear, pixels, "encoded") == 1e-4
  with pytest.raises(ExportError, match=r"a of encoded by 0.02 \(at most 0.01"):
    check.require_within({"encoded": {"a": 0.02}}, {"encoded": 0.01})


@pytest.mark.parametrize(
  ("interpolation", "said"),
  [
    ("bilinear", "without antialiasing"),
    ("bilinear_antialias", "bilinear with antialiasing"),
    ("bicubic", "bicubic (a = -0.5) with antialiasing"),
  ],
)
def test_the_manifest_says_how_images_are_resized(
  backbone, interpolation, said
):
  preprocessing = mv.EvalPreprocessing(
    image_size=8, interpolation=interpolation
  )
  task = random_task(backbone, "a", preprocessing=preprocessing)
  report = export_manifest.describe("safetensors", backbone, [task])
  assert report.preprocessing["interpolation"] == interpolation
  assert said in report.preprocessing["resizing"]


def test_difference_is_seen_in_shapes_and_infinite_values():
  one = np.array([[1.0, -4.0]], np.float32)
  assert check.difference(one + np.float32(0.5), one) == 0.125
  assert check.difference(one, one) == 0
  for other in (None, one[0], one[:, :1], one * np.nan, one + np.inf):
    assert check.difference(other, one) == float("inf")
  assert check.difference(one, one * np.nan) == float("inf")


@pytest.mark.parametrize(
  "kind",
  [mv.TaskKind(), mv.TaskKind(name="labels"),
   mv.TaskKind(name="values", mean=(1e6, 0.5), std=(1.0, 1e-3))],
)  # fmt: skip
def test_a_difference_is_that_of_the_logits(kind):
  """A great mean or a small std hides no difference, nor does a saturation."""
  logits = np.array([[0.5, -4.0], [2.0, 1.0]], np.float32)
  right = kind.activate(logits).astype(np.float32)
  assert check.difference(right, logits, kind) < 1e-5
  for place in ((0, 0), (1, 1)):
    other = logits.copy()
    other[place] += 0.25
    wrong = kind.activate(other).astype(np.float32)
    found = check.difference(wrong, logits, kind)
    assert found > check.TOLERANCE["float32"]
  assert check.difference(logits, logits, kind) > 1e-2
  # Of a head that was not trained, one rounding is no difference.
  small = np.full((1, 2), 1e-6, np.float32)
  rounded = np.nextafter(kind.activate(small), np.float32(np.inf))
  assert check.difference(rounded, small, kind) < check.TOLERANCE["float32"]
  assert check.difference(right * np.nan, logits, kind) == float("inf")


def test_an_activation_is_exported_and_described(
  in_this_process, monkeypatch, tmp_path
):
  backbone = tiny_backbone(depth=1)
  tasks = tasks_of_kinds(backbone)
  run, seen = check.run, []

  def kept(kind, model, images, files=()):
    found = run(kind, model, images, files)
    seen.append((images, found[0]["serving_default"]))
    return found

  monkeypatch.setattr(check, "run", kept)
  report = mv.export_model(
    backbone, tasks, tmp_path / "out", format="stablehlo", activation=True
  )
  [(images, found)] = seen
  for name, expected in activated(backbone, tasks, images).items():
    np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)
  values = json.loads((tmp_path / "out" / "manifest.json").read_text())
  assert values["activation"] is report.activation is True
  outputs = values["signatures"]["serving_default"]["outputs"]
  assert {name: one["meaning"] for name, one in outputs.items()} == {
    "backbone": "probabilities of classes", "pets": "probabilities of classes",
    "tags": "probabilities of labels", "size": "values",
  }  # fmt: skip
  described = {task["name"]: task["kind"] for task in values["tasks"]}
  assert described["tags"]["thresholds"] == [*LABELS.thresholds]
  assert described["size"]["units"] == [*VALUES.units]
  assert described["size"]["mean"] == [*VALUES.mean]


def test_values_that_float32_cannot_tell_apart_are_not_activated(backbone):
  """Such as Unix times of one hour."""
  kind = mv.TaskKind(name="values", mean=(1.7e9,), std=(1e3,))
  task = random_task(backbone, "t", classes=1, kind=kind)
  assert not make_model(backbone, task).activated
  with pytest.raises(ExportError, match="mean 1.7e\\+09 .* without activation"):
    make_model(backbone, task, activation=True)


@pytest.mark.parametrize(
  "activation", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_scores_of_tasks_that_reject_images_are_exported(
  backbone, tmp_path, in_this_process, monkeypatch, activation
):
  pets, tags, _ = tasks_of_kinds(backbone)
  kind = mv.TaskKind(temperature=3.0, unknown=0.25)
  spec = dataclasses.replace(pets.spec, kind=kind)
  exported = make_model(
    backbone, [dataclasses.replace(pets, spec=spec), tags],
    activation=activation,
  )  # fmt: skip
  assert exported.names == ("backbone", "pets", "tags", "pets.known_score")
  assert exported.outputs()["pets.known_score"] == 1
  side = backbone.config.image_size
  images = np.random.default_rng(0).uniform(-1, 1, (3, side, side, 3))
  images = jnp.asarray(images, jnp.float32)
  found = exported.run(exported.weights, images)
  logits = mv.forward(backbone, pets, images)["pets"]
  np.testing.assert_allclose(
    found["pets.known_score"], logits.max(axis=1, keepdims=True), rtol=1e-5
  )
  if activation:
    expected = kind.activate(np.asarray(logits))
    np.testing.assert_allclose(found["pets"], expected, rtol=1e-5)
  report = mv.export_model(
    backbone, exported.tasks, tmp_path / "out", format="stablehlo",
    activation=activation,
  )  # fmt: skip
  outputs = report.signatures["serving_default"].outputs
  assert "below 0.25" in outputs["pets.known_score"].meaning


def test_raw_outputs_are_named_by_their_kind(backbone):
  headless = tiny_backbone(num_classes=0)
  for model, original in ((backbone, "logits"), (headless, "features")):
    exported = make_model(model, tasks_of_kinds(model))
    meanings = export._meanings(exported)
    assert [meanings.get(name, "logits") for name in exported.names] == [
      original, "logits", "logits", "standardized values"
    ]  # fmt: skip
  exported = make_model(headless, tasks_of_kinds(headless), activation=True)
  assert "backbone" not in exported.activated  # features are no classes


def test_a_process_that_fails_is_quoted(tmp_path, monkeypatch):
  said = "Traceback ...\nOSError: no\x1b such file"
  monkeypatch.setattr(
    check.subprocess, "run",
    lambda *a, **k: subprocess.CompletedProcess(a, 1, "", said),
  )  # fmt: skip
  with pytest.raises(ExportError, match=r"status 1\): OSError: no\\x1b such"):
    check.run("onnx", tmp_path / "model.onnx", np.zeros(1))


@pytest.mark.fault("unequal-export")
@pytest.mark.parametrize("format", ["stablehlo", "safetensors"])
def test_export_does_not_replace_foreign_files(backbone, tmp_path, format):
  task = random_task(backbone, "a")
  out = tmp_path / "out"
  out.mkdir()
  mine = out / "mine\n.txt"
  mine.write_text("mine")
  manifest = out / "manifest.json"
  (tmp_path / "link").symlink_to(out)
  for files in ("[]", '{"other": {}}'):
    manifest.write_text(f'{{"kind": "memory_vit export", "files": {files}}}')
    for path in (out, tmp_path / "link", mine):
      with pytest.raises(ExportError, match="holds unknown files") as error:
        mv.export_model(backbone, task, path, format=format)
      assert "\n" not in str(error.value)
  assert mine.read_text() == "mine"


def test_export_keeps_files_that_appear_meanwhile(
  backbone, tmp_path, monkeypatch
):
  """The new export lies beside it."""
  task, out = random_task(backbone, "a"), tmp_path / "out"
  mv.export_model(backbone, task, out, format="safetensors")
  (out / ".DS_Store").write_text("")
  mv.export_model(backbone, task, out, format="safetensors")
  files_of_one = names_in(out)
  to_text = export.model_card.to_text

  def meanwhile(tasks):
    (out / "notes.txt").write_text("mine")
    return to_text(tasks)

  monkeypatch.setattr(export.model_card, "to_text", meanwhile)
  with pytest.raises(TrainingError, match=r"holds unknown files.*notes\.txt"):
    mv.export_model(backbone, task, out, format="safetensors")
  assert (out / "notes.txt").read_text() == "mine"
  (kept,) = tmp_path.glob("out.new-*")
  assert names_in(kept) == files_of_one


def test_export_refuses_the_current_directory(backbone, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ExportError, match="--out is .* the current directory"):
    mv.export_model(
      backbone, random_task(backbone, "a"), ".", format="stablehlo"
    )
  assert [*tmp_path.iterdir()] == []


def test_a_task_for_the_hub_is_read_back_from_its_directory(backbone, tmp_path):
  first = random_task(backbone, "a")
  second = random_task(backbone, "b", attends_to=[first])
  mv.export_model(backbone, [first], tmp_path / "one", format="safetensors")
  assert names_in(tmp_path / "one") == [
    "README.md", "a.safetensors", "manifest.json"
  ]  # fmt: skip
  loaded = mv.load_task(tmp_path / "one", backbone)
  assert loaded.digest == first.digest
  both = tmp_path / "both"
  mv.export_model(backbone, [first, second], both, format="safetensors")
  assert [t.digest for t in mv.load_tasks(both, backbone)] == [
    first.digest, second.digest
  ]  # fmt: skip
  with pytest.raises(TaskError, match="has 2 tasks: .*mv.load_tasks"):
    mv.load_task(both, backbone)
  with pytest.raises(TaskError, match="another backbone"):
    mv.load_task(tmp_path / "one", tiny_backbone(seed=1))
  with pytest.raises(TaskError, match="another backbone"):
    mv.export_model(
      tiny_backbone(seed=1), first, tmp_path / "no", format="safetensors"
    )
  (both / "a.safetensors").unlink()
  (both / "a.safetensors").symlink_to(tmp_path / "one" / "a.safetensors")
  (both / "b.safetensors").unlink()
  with pytest.raises(TaskError, match="is a link"):
    mv.load_task(both, backbone)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"format": "tflite"}, "format is 'tflite', expected one of stablehlo"),
    (
      {"format": "stablehlo", "examples": 0},
      "examples is 0, expected at least 1",
    ),
    (
      {"format": "safetensors", "images": mv.ImageInput(kind="uint8")},
      "not a function that takes images",
    ),
  ],
)
def test_unusable_export_options_are_refused(
  backbone, tmp_path, options, message
):
  task = random_task(backbone, "a")
  with pytest.raises(ExportError, match=message):
    mv.export_model(backbone, task, tmp_path / "out", **options)
  assert names_in(tmp_path) == []


def test_unusable_image_inputs_are_refused():
  with pytest.raises(ExportError, match="input is 'int8', expected one of"):
    mv.ImageInput(kind="int8")
  with pytest.raises(ExportError, match="floats have the image size"):
    mv.ImageInput(size=(8, 8))


def test_onnx_refuses_models_that_would_not_run(backbone):
  require = onnx_file.require_possible
  program = _program(tiny_backbone(dtype="bfloat16"), "a")
  with pytest.raises(ExportError, match="no bfloat16 kernels"):
    require(program, mv.ImageInput())
  with pytest.raises(ExportError, match="needs --input_size"):
    require(_program(backbone, "a"), mv.ImageInput(kind="uint8"))
  with pytest.raises(
    ExportError, match="a task has the name of the model's input"
  ):
    require(_program(backbone, "images"), mv.ImageInput())
  require(_program(backbone, "a"), mv.ImageInput(kind="uint8", size=(4, 5)))


def _program(backbone, name):
  return make_model(backbone, random_task(backbone, name))


@pytest.mark.parametrize(
  ("module", "missing"),
  [(onnx_file, "jax2onnx"), (saved_model, "tensorflow")],
)
def test_a_library_that_is_missing_is_named(module, missing, monkeypatch):
  monkeypatch.setitem(sys.modules, missing, None)
  loads_it = "memory_vit.data.quiet_tensorflow"
  monkeypatch.delitem(sys.modules, loads_it, raising=False)
  with pytest.raises(ExportError, match=f"{missing}, which is not .*pip"):
    module.require_installed()


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--format=tf"], "invalid choice: 'tf'"),
    (["--input=uint8", "--input_size=4"], "expected HEIGHTxWIDTH"),
    (["--input_size=4x5"], "floats have the image size"),
    (["--batch_size=9999"], "examples is 9999"),
    (["--format=orbax", "--activation"], "Leave --activation out"),
  ],
)
def test_export_command_names_errors_in_one_line(flags, message, capsys):
  given = ["--backbone=none.npz", "--task=none", "--out=out",
           "--format=stablehlo", *flags]  # fmt: skip
  assert command.main(given) == 2
  said = capsys.readouterr().err
  assert message in said
  assert len(said.splitlines()) == 1
