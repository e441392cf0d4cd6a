"""Images come as files, bytes, pixels or columns; bad ones are named."""

import dataclasses
import gc
import io
import json
import pickle
import subprocess
import sys
import time
import weakref

import fake_data
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, random_task, tiny_backbone
from kinds_of_tasks import LABELS, tasks_of_kinds

import memory_vit as mv
from memory_vit.errors import ConfigError, DataError, TaskError
from memory_vit.images import preparation, view
from memory_vit.images.memory_limit import MemoryLimit
from memory_vit.images.reader import ImageReader
from memory_vit.prediction import Predictor, compilations
from memory_vit.prediction.fixed_shapes import FixedShapes
from memory_vit.tasks import image_check

NAMES = ("cat", "dog", "日")


@pytest.fixture(scope="module")
def backbone():
  """One block: no test depends on the depth."""
  return tiny_backbone(depth=1)


@pytest.fixture(scope="module")
def tasks(backbone):
  central = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
  return [
    random_task(backbone, "pets", class_names=NAMES, preprocessing=central),
    random_task(backbone, "two", seed=1, classes=2, preprocessing=central),
  ]


@pytest.fixture(scope="module")
def predictor(backbone, tasks):
  return Predictor.from_model(backbone, tasks, batch_sizes=(4,), warm_up=False)


@pytest.fixture
def files(tmp_path):
  paths = [tmp_path / f"{i}.png" for i in range(3)]
  for i, path in enumerate(paths):
    path.write_bytes(fake_data.encode(fake_data.noise(i), "PNG"))
  return paths


def test_every_kind_of_image_is_prepared_as_by_preprocess(
  predictor, tasks, files
):
  expected = mv.preprocess(files, tasks)
  encoded = [path.read_bytes() for path in files]
  pixels = [fake_data.noise(i) for i in range(3)]
  for images in (
    files,
    [str(path) for path in files],
    np.array([str(path) for path in files]),
    encoded,
    np.array(encoded, object),
    pixels,
    np.stack(pixels),
    jnp.stack(pixels),
    list(expected),
    expected,
    (path for path in files),
    [files[0], encoded[1], pixels[2]],
  ):
    found = predictor.prepare(images)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)
  for image in (files[0], encoded[0], pixels[0], expected[0]):
    assert np.array_equal(predictor.prepare(image), expected[:1])


@pytest.mark.fault("bad-image")
def test_a_bad_image_is_named_and_does_not_spoil_others(predictor, files):
  good = predictor.prepare(files[:1])[0]
  bad = [
    ("none.png", r"image 1, 'none.png': No such file"),
    (b"no image", "image 1, of 8 bytes: not a JPEG, PNG"),
    (files[0].read_bytes()[:60], "image 1, of 60 bytes: not a whole PNG file"),
    (np.zeros((8, 8, 2), np.uint8), r"image 1, uint8 \(8, 8, 2\): expected"),
    (np.zeros((8, 8, 3), np.int32), r"image 1, int32 \(8, 8, 3\)"),
    (np.full((8, 8, 3), 1.5), r"image 1, float64 \(8, 8, 3\): .*\[-1, 1\]"),
    (np.full((8, 8, 3), np.nan), "NaN"),
    (np.zeros((9, 9, 3), np.float32), r"image 1, float32 \(9, 9, 3\)"),
    (None, "image 1, of type NoneType"),
  ]
  for image, message in bad:
    with pytest.raises(DataError, match=message):
      predictor.predict([files[0], image, files[1]])
    found = predictor.prepare_each([files[0], image, files[0]])
    assert isinstance(found[1], DataError)
    assert np.array_equal(found[0], good)
    assert np.array_equal(found[2], good)
  for images, message in (
    (np.array([files[0].read_bytes()]), "'S'.*dtype=object"),
    (np.array(str(files[0])), "without an axis"),
    (np.array(b"", object), "without an axis"),
  ):
    with pytest.raises(DataError, match=message):
      predictor.prepare(images)
  for images, message in (
    (7, "image of type int: expected a path, the bytes"),
    ({"image": 7}, "are a dictionary, expected an image or a list"),
  ):
    with pytest.raises(DataError, match=message):
      predictor.prepare(images)
  with pytest.raises(DataError, match="of type list, expected an array"):
    predictor.predict_pixels([good])
  with pytest.raises(DataError, match="values from"):
    predictor.predict_pixels(2 * np.ones((1, 8, 8, 3), np.float32))


@pytest.mark.fault("many-pixels")
def test_limits_hold_before_anything_is_decoded(
  predictor, files, backbone, monkeypatch
):
  encoded = fake_data.encode(fake_data.noise(0, 300, 300), "PNG")
  small = Predictor.from_model(
    backbone, (), batch_sizes=(1,), memory_mib=1, warm_up=False
  )
  [found] = small.prepare_each([encoded])
  assert "decoding the image may take 1 MiB, more than the 1 MiB" in str(found)
  assert "MiB of memory_mib that are not reserved" in str(found)
  small.prepare(files[0])
  monkeypatch.setattr(preparation, "MAX_FILE_BYTES", len(encoded) - 1)
  [found] = predictor.prepare_each([encoded])
  assert "the file has more than" in str(found)


@pytest.mark.fault("many-pixels")
def test_memory_of_an_image_is_reserved_before_it_is_read(
  predictor, files, monkeypatch
):
  """Also for a path and for pixels."""
  asked, heads = [], []
  taken, needed = MemoryLimit.taken, preparation.bytes_needed

  def noted(self, size):
    asked.append(size)
    return taken(self, size)

  def watched(*args):
    heads.append(1)
    time.sleep(0.01)
    most.append(len(heads))
    found = needed(*args)
    heads.pop()
    return found

  most = []
  monkeypatch.setattr(MemoryLimit, "taken", noted)
  monkeypatch.setattr(preparation, "bytes_needed", watched)
  size = files[0].stat().st_size
  encoded = files[0].read_bytes()
  room = needed(io.BytesIO(encoded), predictor.preprocessing)
  predictor.prepare([encoded])
  predictor.prepare([files[0]])
  assert asked == [size + room, 2 * size + room]
  pixels = fake_data.noise(0, 30, 20)
  predictor.prepare([pixels])
  assert asked[2:] == [
    2 * pixels.size + view.view_bytes(30, 20, predictor.preprocessing)
  ]
  # A header may be a whole file: threads read one after the other.
  predictor.prepare([encoded, files[0], encoded, files[0]])
  assert len(most) == 6
  assert max(most) == 1


def test_pixels_that_are_refused_compile_nothing():
  for value, message in (
    (300, "values from 300 to 300; expected finite"),
    (np.nan, "no finite value, 105 NaN and 0 infinite"),
    (np.inf, "no finite value, 0 NaN and 105 infinite"),
  ):
    images = np.full((1, 7, 5, 3), value, np.float32)
    with (
      compilations.counted() as tally,
      pytest.raises(DataError, match=message),
    ):
      image_check.begin(images)()
    assert tally.count == 0


def test_images_are_prepared_a_batch_at_a_time(
  backbone, tasks, files, monkeypatch
):
  """The memory of prepared images does not grow with their number."""
  predictor = Predictor.from_model(
    backbone, tasks, batch_sizes=(2,), warm_up=False
  )
  events = []
  each, run = ImageReader.each, FixedShapes._run_batch

  def noted_each(self, images, *args):
    events.append(f"prepare {len(images)}")
    return each(self, images, *args)

  def noted_run(self, batch, *args):
    events.append(f"run {len(batch)}")
    return run(self, batch, *args)

  monkeypatch.setattr(ImageReader, "each", noted_each)
  monkeypatch.setattr(FixedShapes, "_run_batch", noted_run)
  predictor.predict(files)
  assert events == ["prepare 2", "run 2", "prepare 1", "run 2"]
  with pytest.raises(DataError, match=r"image 3, 'none.png'"):
    predictor.predict([*files, "none.png"])


def test_a_snapshot_says_how_images_are_prepared(backbone, tasks, files):
  predictor = Predictor.from_model(
    backbone, (), batch_sizes=(4,), warm_up=False
  )
  before = predictor.task_set
  expected = predictor.prepare(files)
  predictor.add(tasks[0])
  assert not np.array_equal(predictor.prepare(files), expected)
  assert np.array_equal(predictor.prepare(files, task_set=before), expected)
  [found, *_] = predictor.prepare_each(files, task_set=before)
  assert np.array_equal(found, expected[0])


def test_columns_in_and_columns_out(predictor, files):
  expected = predictor.predict(files)
  encoded = np.array([path.read_bytes() for path in files], object)
  paths = np.array([str(path) for path in files])
  pixels = np.stack([fake_data.noise(i) for i in range(3)])
  several = np.empty(3, object)
  several[:] = list(predictor.prepare(files))
  ids = np.array([7, 8, 9])
  for columns, kept in (
    ({"image": encoded, "id": ids, "path": paths}, {"id", "path"}),
    ({"image": pixels, "id": ids}, {"id"}),
    ({"path": paths}, {"path"}),
    ({"pixels": predictor.prepare(files), "image": ids}, {"image"}),
    ({"pixels": several}, set()),
  ):
    found = predictor(columns)
    made = {key for key in found if "/" in key}
    assert found.keys() - made == kept
    for name in kept:
      assert found[name] is columns[name]
    for name, classes in (("pets", 3), ("two", 2)):
      assert found[f"{name}/logits"].dtype == np.float32
      assert np.array_equal(found[f"{name}/logits"], expected.logits[name])
      probabilities = expected.probabilities(name).astype(np.float32)
      assert np.array_equal(found[f"{name}/probabilities"], probabilities)
      top = expected.top(name)
      shape = (3, classes)
      for column, dtype in (
        ("top_indices", np.int32), ("top_probabilities", np.float32)
      ):  # fmt: skip
        assert found[f"{name}/{column}"].dtype == dtype
        assert found[f"{name}/{column}"].shape == shape
      for row, guesses in enumerate(top):
        assert found[f"{name}/top_indices"][row].tolist() == [
          guess.index for guess in guesses
        ]
        assert found[f"{name}/top_classes"][row].tolist() == [
          guess.class_name for guess in guesses
        ]
    assert len(made) == 10
  assert isinstance(predictor(files), type(expected))


def test_columns_of_labels_and_values(backbone, files):
  tasks = tasks_of_kinds(backbone)
  predictor = Predictor.from_model(
    backbone, tasks, batch_sizes=(4,), warm_up=False
  )
  expected = predictor.predict(files)
  found = predictor({"path": [str(path) for path in files]})
  chances = expected.probabilities("tags")
  assert np.array_equal(found["tags/probabilities"], chances.astype("f4"))
  assert found["tags/labels"].dtype == bool
  assert np.array_equal(found["tags/labels"], chances >= LABELS.thresholds)
  assert np.array_equal(found["size/values"], expected.values("size"))
  kinds = {"tags/": {"logits", "probabilities", "labels"},
           "size/": {"logits", "values"}}  # fmt: skip
  for start, columns in kinds.items():
    assert {k[5:] for k in found if k.startswith(start)} == columns
  assert np.array_equal(found["size/logits"], expected.logits["size"])


def test_unusable_columns_are_refused(predictor, files, backbone, tasks):
  with pytest.raises(DataError, match="'id'. Expected a column 'image'"):
    predictor({"id": np.arange(3)})
  with pytest.raises(DataError, match="both have columns named 'pets/logits'"):
    predictor({"path": [str(files[0])], "pets/logits": np.zeros(1)})
  with pytest.raises(DataError, match="image 0, 'none.png'"):
    predictor({"path": ["none.png"]})
  with pytest.raises(
    DataError, match="column 'pixels' cannot be stacked.*of one shape"
  ):
    predictor({"pixels": [np.zeros((8, 8, 3)), np.zeros((9, 8, 3))]})
  empty = predictor({"image": np.empty(0, object)})
  assert empty["pets/logits"].shape == (0, 3)
  assert empty["pets/top_classes"].shape == (0, 3)
  one = Predictor.from_model(
    backbone, tasks, batch_sizes=(4,), warm_up=False, features=True, top=1
  )
  found = one({"path": [str(files[0])]})
  assert found["features"].shape == (1, 1, 2, 32)
  assert found["pets/top_indices"].shape == (1, 1)


@pytest.fixture
def saved(backbone, tasks, tmp_path):
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  mv.save_tasks(tasks, tmp_path / "tasks")
  return mv.PredictorConfig(
    str(tmp_path / "vit.npz"),
    (str(tmp_path / "tasks"),),
    batch_sizes=(4,),
    slots=2,
  )


def test_a_config_builds_the_same_predictor(
  saved, backbone, tasks, files, tmp_path
):
  config = pickle.loads(pickle.dumps(saved))
  assert config == saved
  predictor = Predictor(config, warm_up=False)
  assert predictor.config == saved
  assert predictor.batch_sizes == (4,)
  found = predictor.predict(files, original=True)
  slots = mv.fill_slots(backbone, tasks)
  batch = np.concatenate([mv.preprocess(files, tasks), np.zeros((1, 8, 8, 3))])
  expected = mv.forward(backbone, slots, batch.astype(np.float32))
  assert np.array_equal(found.original, expected["backbone"][:3])
  for name, logits in found.logits.items():
    assert np.array_equal(logits, expected[name][:3])
  # From a file as well as from a directory of tasks.
  mv.save_task(tasks[0], tmp_path / "a.safetensors", format="safetensors")
  change = predictor.add(str(tmp_path / "a.safetensors"), name="again")
  again = predictor.predict(files).logits["again"]
  assert change.names == ("pets", "two", "again")
  np.testing.assert_allclose(again, found.logits["pets"], rtol=1e-5, atol=1e-5)
  predictor.replace("two", tmp_path / "a.safetensors")
  with pytest.raises(pickle.PicklingError, match="hand its config over"):
    pickle.dumps(predictor)
  none = dataclasses.replace(saved, tasks=())
  empty = Predictor(none, warm_up=False)
  assert empty.task_set.names == ()
  # Of a task that comes later; the position embeddings are resized.
  sized = dataclasses.replace(none, image_size=12)
  assert Predictor(sized, warm_up=False).backbone.config.image_size == 12
  small = random_task(tiny_backbone(depth=1), "small")
  with pytest.raises(TaskError, match="PredictorConfig.*image_size=8"):
    Predictor(sized, warm_up=False).add(small)
  with pytest.raises(ConfigError, match="image_size is 12, but the tasks.* 8"):
    Predictor(dataclasses.replace(saved, image_size=12), warm_up=False)
  with pytest.raises(ConfigError, match="dtype"):
    Predictor(dataclasses.replace(saved, dtype="int8"), warm_up=False)


@pytest.mark.processes
def test_a_pickled_config_in_a_fresh_process(saved, files, tmp_path):
  """Bitwise identical answers, without TensorFlow."""
  found = Predictor(saved, warm_up=False).predict(files)
  (tmp_path / "config.pickle").write_bytes(pickle.dumps(saved))
  code = """
import json, pickle, sys
import memory_vit as mv
config = pickle.load(open(sys.argv[1], "rb"))
predictor = mv.Predictor(config)
found = predictor.predict(sys.argv[2:])
assert "tensorflow" not in sys.modules
print(json.dumps({
  "compilations": predictor.compilations,
  "logits": {n: v.tobytes().hex() for n, v in found.logits.items()},
}))
"""
  done = subprocess.run(
    [sys.executable, "-c", code, tmp_path / "config.pickle", *files],
    cwd=ROOT, stdout=subprocess.PIPE, check=True,
  )  # fmt: skip
  other = json.loads(done.stdout)
  assert other["compilations"] == 0
  assert other["logits"] == {
    name: logits.tobytes().hex() for name, logits in found.logits.items()
  }


@pytest.mark.fault("bad-request")
def test_unreadable_image_is_not_kept_alive(backbone):
  """Errors that threads return hold no image until garbage is collected."""
  model = Predictor.from_model(backbone, warm_up=False)
  bad = np.zeros((0, 5, 3), np.uint8)
  held = weakref.ref(bad)
  gc.disable()
  try:
    [error] = model.prepare_each([bad])
    assert isinstance(error, DataError)
    del bad
    for _ in range(100):  # until the thread has forgotten it, too
      if held() is None:
        break
      time.sleep(0.01)
    assert held() is None
  finally:
    gc.enable()


def test_columns_of_a_task_that_rejects_images(backbone, files):
  calm = random_task(backbone, "calm", kind=mv.TaskKind(temperature=4.0))
  logits = (
    mv.Predictor.from_model(backbone, [calm], batch_sizes=(4,), warm_up=False)
    .predict(files)
    .logits["calm"]
  )
  scores = logits.max(axis=1)
  kind = mv.TaskKind(temperature=4.0, unknown=float(np.median(scores)) + 1e-6)
  wary = dataclasses.replace(
    calm, spec=dataclasses.replace(calm.spec, name="wary", kind=kind)
  )
  predictor = Predictor.from_model(
    backbone, [calm, wary], batch_sizes=(4,), warm_up=False
  )
  found = predictor({"path": [str(path) for path in files]})
  assert "calm/unknown" not in found
  assert found["wary/unknown"].dtype == bool
  np.testing.assert_array_equal(found["wary/known_score"], scores)
  np.testing.assert_array_equal(found["wary/unknown"], scores < kind.unknown)
  assert 0 < found["wary/unknown"].sum() < len(files)
  np.testing.assert_array_equal(found["wary/logits"], found["calm/logits"])
  warm = np.exp(logits.astype(np.float64) / 4)
  np.testing.assert_allclose(
    found["wary/probabilities"], warm / warm.sum(axis=1, keepdims=True),
    rtol=1e-5,
  )  # fmt: skip
  predictions = predictor.predict(files)
  [first, *_] = predictions.answers("wary", 2)
  assert first == {
    "classes": predictions.answers("calm", 2)[0],
    "unknown": bool(scores[0] < kind.unknown),
    "known_score": float(scores[0]),
  }
