"""The exported function computes what `mv.forward` computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_task, run_program, tiny_backbone
from fake_data import noise
from make_golden import DATA

import memory_vit as mv
from memory_vit.errors import ExportError, TaskError
from memory_vit.evaluation.preprocess import preprocess
from memory_vit.exports import resize, stablehlo
from memory_vit.exports.exported_model import flat_weights, make_model
from memory_vit.exports.image_input import ImageInput
from memory_vit.images import view
from memory_vit.model.task import INTERPOLATIONS

pytestmark = pytest.mark.versions

TOLERANCE = 1e-5


def exported(backbone, tasks, path, images=None):
  """Written to a file, and read by jax alone."""
  program = make_model(backbone, tasks)
  stablehlo.write(program, path, images or ImageInput())
  content = (path / "model.stablehlo").read_bytes()
  return jax.export.deserialize(bytearray(content))


def require_close(found, expected, share=TOLERANCE):
  assert set(found) == set(expected)
  for name, values in expected.items():
    assert found[name].shape == values.shape
    greatest = np.abs(np.asarray(found[name]) - np.asarray(values)).max()
    assert greatest <= share * np.abs(np.asarray(values)).max(), name


if jax.__version_info__ >= (0, 10):  # one that is older need not read it

  def test_a_file_of_an_older_jax_is_read():
    """As docs/export.md says of jax 0.10; resizing of any size included.

    Once a newer jax refuses it, say so there, and store a newer file.
    """
    stored = DATA / "jax_0.10.2"
    expected = dict(np.load(stored / "expected.npz"))
    pixels = expected.pop("images")
    content = bytearray((stored / "model.stablehlo").read_bytes())
    assert b"/site-packages/" not in content  # nor other paths of a machine
    with jax.default_matmul_precision("highest"):
      found = jax.export.deserialize(content).call(pixels)
    require_close(found, expected)


def test_one_file_computes_all_tasks_for_any_batch(backbone, images, tmp_path):
  """Two independent tasks, and one that attends to the first."""
  first = random_task(backbone, "images", classes=3)
  second = random_task(backbone, "0-b_", classes=130, cells=9, seed=1)
  third = random_task(
    backbone, "c", seed=2, attends_to=[first],
    regime="cls+memory+norms+layers+side",
  )  # fmt: skip
  tasks = [second, first, third]
  loaded = exported(backbone, tasks, tmp_path)
  for batch in (1, 7):
    require_close(
      loaded.call(images[:batch]), mv.forward(backbone, tasks, images[:batch])
    )
  assert set(loaded.platforms) == {"cpu", "cuda", "tpu"}
  # In the order of the tasks, where JAX sorts names.
  assert list(make_model(backbone, tasks).outputs().items()) == [
    ("backbone", 7), ("0-b_", 130), ("images", 3), ("c", 3)
  ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["full", "memory", "probe"])
def test_a_regime_that_composes_with_nothing_is_exported_alone(
  backbone, images, tmp_path, regime
):
  cells = 2 if regime == "memory" else 0
  task = random_task(
    backbone, "a", regime=regime, cells=cells,
    bottleneck=3 if regime == "probe" else 0,
  )  # fmt: skip
  expected = run_program(backbone, [task], images)
  require_close(exported(backbone, task, tmp_path).call(images), expected)
  assert set(expected) == {"a"}
  with pytest.raises(TaskError, match="cannot share a pass"):
    make_model(backbone, [task, random_task(backbone, "b")])


def test_a_fine_tuned_backbone_takes_the_place_of_the_original(backbone):
  task = random_task(backbone, "a", regime="full", cells=0)
  program = make_model(backbone, task)
  whole = sum(leaf.nbytes for leaf in jax.tree.leaves(backbone.params))
  assert program.weight_bytes < 1.2 * whole
  held = {leaf.tobytes() for leaf in flat_weights(program)}
  for leaf in jax.tree.leaves(task.params["backbone"]):
    assert np.asarray(leaf).tobytes() in held


@pytest.mark.parametrize(
  "crop", [("resize", 0), ("central", 11), ("central_rounded", 11)]
)
def test_pixels_of_any_size_are_prepared_as_in_evaluation(crop):
  rng = np.random.default_rng(0)
  preprocessing = mv.EvalPreprocessing(
    image_size=8, crop=crop[0], resize=crop[1]
  )
  prepare = jax.jit(lambda pixels: resize.prepare(pixels, preprocessing))
  for height, width in ((5, 40), (97, 31)):
    pixels = rng.integers(0, 256, (2, height, width, 3)).astype(np.uint8)
    found = prepare(pixels)
    expected = preprocess(list(pixels), preprocessing)
    np.testing.assert_allclose(found, expected, atol=2e-5)


# Enlarged, tall (Pillow 13 would begin with the height), reduced, as it is, and
# long (of which the crop leaves out the most).
@pytest.mark.parametrize(
  "crop", [("resize", 0), ("central", 37), ("central_rounded", 43)]
)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS[1:])
def test_antialiased_pixels_are_those_of_pillow(interpolation, crop):
  preprocessing = mv.EvalPreprocessing(
    image_size=32, crop=crop[0], resize=crop[1], interpolation=interpolation
  )
  prepare = jax.jit(lambda pixels: resize.prepare(pixels, preprocessing))
  shapes = ((20, 27), (97, 31), (301, 250), (32, 32), (40, 400))
  differences = []
  for seed, shape in enumerate(shapes):
    pixels = noise(seed, *shape)
    expected = view.eval_view(pixels, preprocessing)
    differences.append((prepare(pixels[None])[0] - expected) * 127.5)
  levels = np.abs(np.stack(differences))
  # Where a sum lies in the middle between two levels.
  assert levels.max() < 1.01
  assert (levels > 0.5).mean() < 0.01


def test_a_large_image_is_resized_in_its_place():
  """Float32 positions would be off by parts of a pixel."""
  preprocessing = mv.EvalPreprocessing(
    image_size=8, crop="central", resize=600, interpolation="bicubic"
  )
  pixels = noise(0, 512, 16384)
  found = jax.jit(lambda p: resize.prepare(p, preprocessing))(pixels[None])
  expected = view.eval_view(pixels, preprocessing)
  assert (np.abs(found[0] - expected) * 127.5 > 0.5).mean() < 0.01


@pytest.mark.parametrize(
  "interpolation",
  [
    INTERPOLATIONS[0],
    *(pytest.param(i, marks=pytest.mark.slow) for i in INTERPOLATIONS[1:]),
  ],
)
def test_pixels_are_an_input_if_asked_for(backbone, tmp_path, interpolation):
  preprocessing = mv.EvalPreprocessing(
    image_size=8, crop="central", resize=9, interpolation=interpolation
  )
  task = random_task(backbone, "a", preprocessing=preprocessing)
  loaded = exported(backbone, task, tmp_path, ImageInput(kind="uint8"))
  rng = np.random.default_rng(0)
  for shape in ((1, 20, 30, 3), (3, 31, 9, 3)):
    pixels = rng.integers(0, 256, shape).astype(np.uint8)
    images = mv.preprocess(list(pixels), task)
    share = 1e-4 if interpolation == "bilinear" else 1e-2
    expected = mv.forward(backbone, task, images)
    require_close(loaded.call(pixels), expected, share)


@pytest.mark.slow
def test_bfloat16_is_computed_if_asked_for(images, tmp_path):
  backbone = tiny_backbone(dtype="bfloat16")
  task = random_task(backbone, "a")
  loaded = exported(backbone, task, tmp_path)
  assert "bf16" in loaded.mlir_module()
  outputs = loaded.call(images)
  require_close(outputs, mv.forward(backbone, task, images), 5e-2)
  assert outputs["a"].dtype == jnp.float32


def test_a_process_without_a_cpu_is_told_what_to_do(backbone, monkeypatch):
  def unknown(**backend):
    raise RuntimeError(f"Unknown backend {backend}")

  monkeypatch.setattr(jax, "local_devices", unknown)
  with pytest.raises(ExportError, match="JAX_PLATFORMS=cuda,cpu"):
    make_model(backbone, random_task(backbone, "a"))


def test_another_backbone_is_refused():
  other = tiny_backbone(seed=1)
  for regime in ("full", "cls_masked"):
    task = random_task(tiny_backbone(), "a", regime=regime, cells=0)
    with pytest.raises(TaskError, match="another backbone"):
      make_model(other, task)
