"""Call exports where nothing of this package can be imported."""

import io
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import quick
import tensorflow as tf
from conftest import ROOT, random_task, tiny_backbone
from kinds_of_tasks import activated, tasks_of_kinds
from PIL import Image

import memory_vit as mv
from memory_vit.exports import saved_model

pytestmark = pytest.mark.processes

# Of a server that has another environment: -I leaves out PYTHONPATH and the
# current directory, and an editable installation is found by a hook.
_BLOCKED = """
  import sys
  class Blocked:
    def find_spec(self, name, path=None, target=None):
      if name.split(".")[0] in {blocked!r}:
        raise ModuleNotFoundError(name)
  sys.meta_path.insert(0, Blocked())
  import numpy as np
"""
ENVIRONMENT = {
  "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": quick.XLA_FLAGS,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """Files of a backbone, two tasks (one attends to the other), and one task of
  a regime that composes with nothing.
  """
  path = tmp_path_factory.mktemp("model")
  backbone = tiny_backbone()
  mv.save_backbone(backbone, path / "tiny.npz")
  preprocessing = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
  first = random_task(backbone, "a", preprocessing=preprocessing)
  second = random_task(
    backbone, "file", attends_to=[first], preprocessing=preprocessing, seed=1,
    regime="cls+memory+norms+layers+side",
  )  # fmt: skip
  mv.save_tasks([first, second], path / "tasks")
  alone = random_task(backbone, "alone", regime="adapter", cells=0,
                      bottleneck=3, preprocessing=preprocessing)  # fmt: skip
  mv.save_task(alone, path / "alone")
  return path


def run_export(model, out, *flags):
  return subprocess.run(
    [sys.executable, "-m", "memory_vit", "export",
     f"--backbone={model / 'tiny.npz'}", f"--out={out}", *flags],
    capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT,
  )  # fmt: skip


def call(code, blocked, folder):
  """Run a program of a server, in a folder."""
  code = textwrap.dedent(_BLOCKED.format(blocked=blocked)) + code
  done = subprocess.run(
    [sys.executable, "-I", "-c", code], capture_output=True, text=True,
    cwd=folder, env={**ENVIRONMENT, "HOME": "/nowhere"},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr


def example(first):
  """The code of docs/export.md with this beginning."""
  text = (ROOT / "docs" / "export.md").read_text()
  (code,) = (c for c in text.split("```python\n") if c.startswith(first))
  return code.split("```")[0]


def require_close(file, expected, tolerance=1e-4):
  with np.load(file) as found:
    assert set(found) == set(expected)
    for name, values in expected.items():
      values = np.asarray(values)
      scale = np.abs(values).max()
      np.testing.assert_allclose(found[name], values, atol=tolerance * scale)


def test_stablehlo_is_called_without_this_package(model, images, tmp_path):
  tasks = f"--task={model / 'tasks'}"
  done = run_export(model, tmp_path / "served", tasks, "--format=stablehlo")
  assert done.returncode == 0, done.stderr
  assert "difference, serving_default  backbone" in done.stdout
  np.save(tmp_path / "x.npy", images)
  code = "\n".join(
    (
      "images = np.load('x.npy')",
      example("from jax import export"),
      "np.savez('found.npz', **{'_' + name: v for name, v in outputs.items()})",
    )
  )
  call(code, ("memory_vit", "flax", "tensorflow"), tmp_path)
  backbone = mv.load_backbone(model / "tiny.npz")
  tasks = mv.load_tasks(model / "tasks", backbone)
  expected = mv.forward(backbone, tasks, images)
  require_close(
    tmp_path / "found.npz", {f"_{name}": v for name, v in expected.items()}
  )


def _files():
  rng = np.random.default_rng(3)
  for i in range(11):
    shape = (20 + i, 31 - i, 3) if i % 3 else (20 + i, 31 - i)
    pixels = rng.integers(0, 256, shape).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG" if i % 2 else "JPEG")
    yield file.getvalue()


def test_a_saved_model_is_called_without_jax(model, tmp_path):
  """Images as arrays, and JPEG and PNG files, grey ones too."""
  flags = [f"--task={model / 'tasks'}", "--format=saved_model"]
  done = run_export(model, tmp_path / "out", *flags, "--input=uint8")
  assert done.returncode == 0, done.stderr
  backbone = mv.load_backbone(model / "tiny.npz")
  tasks = mv.load_tasks(model / "tasks", backbone)
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (11, 13, 21, 3)).astype(np.uint8)
  images = mv.preprocess(list(pixels), tasks)
  np.save(tmp_path / "x.npy", pixels)
  files = list(_files())
  for i, content in enumerate(files):
    (tmp_path / f"{i:02}.image").write_bytes(content)
  code = """if True:
    import glob, tensorflow as tf
    x = np.load("x.npy")
    files = [open(name, "rb").read() for name in sorted(glob.glob("*.image"))]
    loaded = tf.saved_model.load("out/saved_model")
    found = {}
    for count in (1, 11):
      for key, given in (("serving_default", {"images": x[:count]}),
                         ("encoded", {"encoded": files[:count]})):
        given = {name: tf.constant(value) for name, value in given.items()}
        out = loaded.signatures[key](**given)
        found.update({f"{key}_{count}_{n}": v for n, v in out.items()})
    np.savez("found.npz", **found)
  """
  call(code, ("memory_vit", "jax", "jaxlib", "flax"), tmp_path)
  expected = {
    f"{key}_{count}_{name}": values
    for count in (1, 11)
    for key, given in (
      ("serving_default", images[:count]),
      ("encoded", mv.preprocess(files[:count], tasks)),
    )
    for name, values in mv.forward(backbone, tasks, given).items()
  }
  require_close(tmp_path / "found.npz", expected)
  manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
  assert manifest["batch_buckets"] == list(saved_model.batch_buckets())
  assert set(manifest["signatures"]) == {"serving_default", "encoded"}


def test_a_saved_model_has_the_activation(tmp_path):
  """Its own comparison, of both signatures, ran in another process."""
  backbone = tiny_backbone(depth=1)
  tasks = tasks_of_kinds(backbone)
  mv.export_model(
    backbone, tasks, tmp_path / "out", format="saved_model", activation=True
  )
  images = np.random.default_rng(0).uniform(-1, 1, (3, 8, 8, 3)).astype("f4")
  loaded = tf.saved_model.load(str(tmp_path / "out" / "saved_model"))
  found = loaded.signatures["serving_default"](images=tf.constant(images))
  for name, expected in activated(backbone, tasks, images).items():
    np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)


def test_a_saved_model_resizes_files_with_antialiasing(tmp_path):
  """By TensorFlow alone, where evaluation calls Pillow."""
  backbone = tiny_backbone()
  preprocessing = mv.EvalPreprocessing(
    image_size=8, crop="central", resize=9, interpolation="bicubic"
  )
  task = random_task(backbone, "a", preprocessing=preprocessing)
  report = mv.export_model(
    backbone, task, tmp_path / "out", format="saved_model"
  )
  assert report.comparison["tolerance"] == {
    "serving_default": 1e-4, "encoded": 1e-2
  }  # fmt: skip
  files = list(_files())
  for i, content in enumerate(files):
    (tmp_path / f"{i:02}.image").write_bytes(content)
  code = """if True:
    import glob, tensorflow as tf
    files = [open(name, "rb").read() for name in sorted(glob.glob("*.image"))]
    call = tf.saved_model.load("out/saved_model").signatures["encoded"]
    np.savez("found.npz", **call(encoded=tf.constant(files)))
  """
  call(code, ("memory_vit", "jax", "jaxlib", "flax", "PIL"), tmp_path)
  expected = mv.forward(backbone, task, mv.preprocess(files, task))
  require_close(tmp_path / "found.npz", expected, 1e-2)


def test_batches_are_split_into_compiled_sizes(
  model, images, tmp_path, monkeypatch
):
  """As with jax 0.11, for any jax; by the example of the docs."""
  monkeypatch.setattr(saved_model, "batch_buckets", lambda: (1, 4))
  backbone = mv.load_backbone(model / "tiny.npz")
  task = mv.load_task(model / "tasks" / "a", backbone)
  out = tmp_path / "served"
  mv.export_model(backbone, task, out, format="saved_model", examples=7)
  monkeypatch.chdir(tmp_path)
  files = list(_files())
  values = {"images": np.asarray(images), "files": files}
  exec(example("import tensorflow"), values)
  assert values["outputs"]["a"].shape == (len(files), 3)  # those of the files
  call = values["model"].signatures["serving_default"]
  for count in (1, 3, 8, 6):
    found = call(images=tf.constant(np.asarray(images[:count])))
    for name, expected in mv.forward(backbone, task, images[:count]).items():
      np.testing.assert_allclose(found[name], expected, atol=1e-4, rtol=1e-4)


def test_the_command_line_of_tensorflow_runs_a_saved_model(
  model, images, tmp_path
):
  """It stands for TensorFlow Serving: both call a signature by its names."""
  flags = [f"--task={model / 'alone'}", "--format=saved_model"]
  done = run_export(model, tmp_path / "out", *flags, "--dtype=bfloat16")
  assert done.returncode == 0, done.stderr
  np.save(tmp_path / "x.npy", images)
  subprocess.run(
    [os.path.join(os.path.dirname(sys.executable), "saved_model_cli"), "run",
     "--dir", tmp_path / "out" / "saved_model", "--tag_set", "serve",
     "--signature_def", "serving_default",
     "--inputs", f"images={tmp_path / 'x.npy'}", "--outdir", tmp_path / "run"],
    check=True, capture_output=True,
  )  # fmt: skip
  outputs = np.load(tmp_path / "run" / "alone.npy")
  assert outputs.shape == (8, 3)
  manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
  assert manifest["comparison"]["tolerance"] == {
    "serving_default": 3e-2,
    "encoded": 3e-2,
  }
  outputs_named = manifest["signatures"]["serving_default"]["outputs"]
  assert list(outputs_named) == ["alone"]


def test_a_model_that_cannot_be_exported_is_one_line(model, tmp_path):
  both = [f"--task={model / 'alone'}", f"--task={model / 'tasks'}"]
  done = run_export(model, tmp_path / "out", *both, "--format=stablehlo")
  assert done.returncode == 2
  assert len(done.stderr.splitlines()) == 1
  assert "cannot share a pass" in done.stderr
  assert list(tmp_path.iterdir()) == []
