"""Images and labels that Python has, in every form in which it has them."""

import types

import fake_data
import numpy as np
import psutil
import pyarrow as pa
import pytest
import tensorflow as tf
from PIL import Image

import memory_vit as mv
from memory_vit.data import (
  image_ops,
  in_memory,
  open_split,
  oriented,
  raw_images,
)
from memory_vit.data.batching import eval_batches
from memory_vit.errors import DataError
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime import progress_bar

PLAIN = EvalPreprocessing(image_size=8)
NAMES = ("ant", "bee", "cat")
# Black at its end: the zeros are pixels as well.
PIXELS = np.stack([fake_data.noise(i, 9, 8) for i in range(4)])
PIXELS[:, -1] = 0
LABELS = [2, 0, 1, 1]
PAIRS = list(zip(PIXELS, LABELS, strict=True))


def opened(data, **options):
  return in_memory.open_data(data, "own", "train", **options)


def held_out(source):
  return list(in_memory.hold_out(source))


def evaluated(source):
  batches = list(eval_batches(source, PLAIN, batch_size=4))
  real = np.concatenate([batch["mask"] for batch in batches]) > 0
  return [
    np.concatenate([batch[key] for batch in batches])[real]
    for key in ("image", "label")
  ]


class Torch:
  """As much as is used of a data set of torch, whose end is not seen."""

  def __init__(self, examples):
    self.examples = examples

  def __len__(self):
    return len(self.examples)

  def __getitem__(self, index):
    return self.examples[index % len(self)]


class Tensor:
  """As much as is used of a tensor of torch."""

  def __init__(self, values):
    self.values = values

  def __array__(self, dtype=None, copy=None):
    return np.asarray(self.values, dtype)


Tensor.__module__ = "torch"


class Frame:
  """As much as is used of a table of pandas or Polars."""

  def __init__(self, columns):
    self._columns, self.columns = columns, [*columns]

  def __len__(self):
    return len(self._columns[self.columns[0]])

  def __getitem__(self, name):
    return iter(self._columns[name])


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
  root = tmp_path_factory.mktemp("images")
  for i, pixels in enumerate(PIXELS):
    (root / f"{i}.png").write_bytes(fake_data.encode(pixels, "PNG"))
  return [root / f"{i}.png" for i in range(4)]


def forms_of_paths(paths):
  texts = [*map(str, paths)]
  stored = [{"bytes": None, "path": path} for path in texts]
  return {
    "paths": (paths, LABELS),
    "texts": (texts, LABELS),
    "an array of texts": (np.array(texts), LABELS),
    "tf.data of texts": tf.data.Dataset.from_tensor_slices((texts, LABELS)),
    "Hugging Face, not decoded": (stored, LABELS),
    "a table": Frame({"label": LABELS, "image": texts}),
    "a table of Arrow": pa.table({"path": texts, "label": LABELS}),
  }


def every_form():
  # They become the nearest grey levels.
  floats = ((PIXELS - 0.4).clip(0) / 255).astype(np.float32)
  chw = [(Tensor(f.transpose(2, 0, 1)), Tensor(y)) for f, y in zip(
    floats, LABELS, strict=True)]  # fmt: skip
  rows = [{"image": Image.fromarray(p), "label": y} for p, y in PAIRS]
  encoded = [fake_data.encode(p, "PNG") for p in PIXELS]
  return {
    "arrays": (PIXELS, np.array(LABELS)),
    "lists": (list(PIXELS), LABELS),
    "floats": (floats, LABELS),
    "channels first": (PIXELS.transpose(0, 3, 1, 2), LABELS),
    "numbers of 64 bits": (PIXELS.astype(np.int64), LABELS),
    "nested lists": (PIXELS.tolist(), LABELS),
    "a table of images": Frame({"image": PIXELS, "label": LABELS}),
    "columns": {"image": PIXELS, "label": LABELS},
    "pairs": PAIRS,
    "Hugging Face": rows,
    "torch": Torch(chw),
    "stream": iter(PAIRS),
    "files": (encoded, LABELS),
    "tf.data": tf.data.Dataset.from_tensor_slices((PIXELS, LABELS)),
    "tf.data of files": tf.data.Dataset.from_tensor_slices((encoded, LABELS)),
  }


@pytest.mark.parametrize("form", [*every_form(), *forms_of_paths(["x"] * 4)])
def test_every_form_of_a_split_is_the_same_data(form, paths):
  forms = {**every_form(), **forms_of_paths(paths)}
  source = opened(forms[form], class_names=NAMES)
  images, labels = evaluated(source)
  np.testing.assert_array_equal(images, mv.preprocess(list(PIXELS), PLAIN))
  assert labels.tolist() == LABELS
  assert (source.size, source.class_names) == (4, NAMES)


@pytest.mark.parametrize(
  ("labels", "classes", "numbers"),
  [
    (["cat", "ant", "bee", "bee"], NAMES, LABELS),
    (np.array(["cat", "ant", "bee", "bee"]), NAMES, LABELS),
    (tf.constant(["cat", "ant", "bee", "bee"]), NAMES, LABELS),
    (np.array(LABELS, np.uint8), ("0", "1", "2"), LABELS),
    ([True, False, True, True], ("0", "1"), [1, 0, 1, 1]),
  ],
)
def test_classes_are_found_among_the_labels(labels, classes, numbers):
  source = opened((PIXELS, labels))
  assert source.class_names == classes
  assert source.labels.tolist() == numbers


def test_names_of_labels_are_those_of_the_training_split():
  train = opened((PIXELS, ["cat", "ant", "bee", "bee"]))
  test = opened((PIXELS[:1], ["bee"]), class_names=train.class_names)
  assert test.labels.tolist() == [1]
  with pytest.raises(
    DataError, match="example 1: its label is 'dog'.*ant, bee"
  ):
    opened((PIXELS[:2], ["bee", "dog"]), class_names=train.class_names)


def test_data_that_state_other_classes_are_refused():
  data = type("TorchVision", (list,), {"classes": ["bee", "ant", "cat"]})(PAIRS)
  assert opened(data).class_names == ("bee", "ant", "cat")
  with pytest.raises(DataError, match="of the data are bee, ant, cat"):
    opened(data, class_names=NAMES)


FLOATS = PIXELS.astype(np.float32)


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (
      (FLOATS, LABELS),
      r"example 0: its image is of type ndarray, shape \(9, 8, 3\) and dtype "
      "float32, with values from 0 to 249: expected .* by x / 255,",
    ),
    ((FLOATS / 127.5 - 1, LABELS), r"mv.preprocess returns, by \(x \+ 1\) / 2"),
    ((FLOATS * np.nan, LABELS), "with values from nan to nan"),
    ((PIXELS.astype(np.int64) * 9, LABELS), "dtype int64, with values from 0"),
    ((PIXELS > 9, LABELS), r"dtype bool: expected"),
    (([None] * 4, LABELS), "of type NoneType, shape .*: expected a path"),
    ((PIXELS.reshape(4, -1), LABELS), r"shape \(216,\) and dtype uint8"),
    ((["gone.png"] * 4, LABELS), "is the path 'gone.png': No such file"),
    (
      type(
        "Rows",
        (),
        {"__len__": lambda s: 2, "__getitem__": lambda s, i: {}[str(i)]},
      )(),
      r"a Rows, from which `data\[0\]` cannot be read \(KeyError: '0'\): exp",
    ),
    (
      tf.data.Dataset.from_tensor_slices((PIXELS, LABELS)).repeat(),
      r"'own', split 'train': .* has no end: leave out `repeat\(\)`",
    ),
    (
      tf.data.Dataset.from_tensor_slices((PIXELS, LABELS)).batch(2),
      r"shape \(2, 9, 8, 3\).* a batch: .*`unbatch\(\)`",
    ),
    (Frame({"img": [1], "label": [1]}), r"keys are \['img', 'label'\]"),
    ((PIXELS, LABELS[:3]), "4, but the labels are a list of length 3: "),
    ((PIXELS, np.eye(4)), "one-hot labels, the argmax"),
    ((PIXELS, [0.5] * 4), "its label is 0.5, expected an integer or the name"),
    ((PIXELS, [-1] * 4), "the label -1 is not a class.*without a label"),
    ([(Image.new("I", (8, 8)), 0)], "mode I, whose range of values is not"),
    ([(Image.new("F", (8, 8), 7), 0)], "with values from 7 to 7: expected"),
    ([PIXELS, LABELS], "of type ndarray, expected .* tuple .images, labels"),
    ((PIXELS, ["a", None, "b", "c"]), "example 1: its label is None"),
    (__file__, "is a file: expected the folder DATA/train, or paths"),
    ([(PIXELS, LABELS)], "It is a batch: give single images"),
    ([(PIXELS[0, 0, 0, 0], 0)], r"type uint8, shape \(\) and dtype uint8"),
    ([{"img": PIXELS[0], "label": 0}], r"the keys are \['img', 'label'\]"),
    ({"img": PIXELS, "label": LABELS}, r"the keys are \['img', 'label'\]"),
    ([], "has no example"),
    (7, "of type int: expected"),
    ("nowhere/train", "image folder .* is not there"),
  ],
)
def test_data_that_cannot_be_used_are_refused(data, message):
  with pytest.raises(DataError, match=message):
    opened(data)


def test_a_stream_says_how_far_it_is_read(monkeypatch, caplog):
  monkeypatch.setattr(progress_bar, "SILENCE_SECONDS", 0.0)
  with caplog.at_level("INFO"):
    opened(iter(PAIRS))
  said = [line for line in caplog.messages if line.startswith("reading")]
  assert [line.partition(" [")[0] for line in said] == [
    f"reading 'own', split 'train': {count} images" for count in range(1, 5)
  ]


def test_data_beyond_the_free_memory_are_refused_soon(monkeypatch):
  asked = []

  class Huge(Torch):
    def __len__(self):
      return 10**6

    def __getitem__(self, index):
      asked.append(index)
      return PAIRS[index % 4]

  free = types.SimpleNamespace(available=10**8)
  monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
  with pytest.raises(DataError, match="memory-vit train --config=folder"):
    opened(Huge(PAIRS))
  assert len(asked) == 100


def test_a_tenth_is_held_out_of_all_classes_and_always_the_same():
  pixels = np.stack([fake_data.picture(i, 8, 8) for i in range(60)])
  source = opened((pixels, np.repeat([0, 1, 2], 20)))  # sorted by class
  train, tenth = held_out(source)
  assert (train.size, tenth.size) == (54, 6)
  assert len(set(tenth.labels)) == 3
  shown = [evaluated(part)[0].mean((1, 2, 3)) for part in (train, tenth)]
  levels = np.round(np.concatenate(shown) * 127.5 + 127.5)
  assert sorted(levels) == [*range(60)]
  again = held_out(source)[1]
  np.testing.assert_array_equal(evaluated(again)[0].mean((1, 2, 3)), shown[1])
  assert train.describe(0).endswith("of the given examples)")
  with pytest.raises(DataError, match="one example"):
    held_out(opened(PAIRS[:1]))


@pytest.mark.slow
def test_a_folder_is_held_out_as_the_configuration_does(tmp_path):
  fake_data.write_folder(
    tmp_path,
    {f"train/{name}": [f"{i}.png" for i in range(7)] for name in NAMES},
  )
  parts = held_out(opened(tmp_path / "train"))
  for part, split in zip(parts, ("[:90%]", "[90%:]"), strict=True):
    reader = open_split("folder", f"train{split}", str(tmp_path))
    assert part.split == reader.split
    np.testing.assert_array_equal(evaluated(part)[0], evaluated(reader)[0])


def test_other_data_have_another_digest(monkeypatch):
  def digest(data):
    return opened(data).data_files.table("files")

  exif = Image.Exif()
  exif[0x0112] = 6
  turned = [fake_data.encode(p, "PNG", exif=exif) for p in PIXELS], LABELS
  tables = [
    digest(data)
    for data in (
      (PIXELS, LABELS), PAIRS, (PIXELS, LABELS[::-1]), (PIXELS[::-1], LABELS)
    )
  ]  # fmt: skip
  before = digest(turned)
  for module in (raw_images, oriented):  # as another process has it
    monkeypatch.setattr(module, "MAGIC", module.MAGIC[::-1])
  assert digest((PIXELS, LABELS)) == tables[0]
  assert digest(turned) == before
  assert tables[0] == tables[1]
  assert tables[0] != tables[2] != tables[3] != tables[0]


GREY = np.arange(0, 240, 4, dtype=np.uint8).reshape(6, 10)


@pytest.mark.parametrize(
  "image",
  [
    Image.fromarray(GREY),
    *(Image.fromarray(GREY).convert(m) for m in ("LA", "P", "RGBX", "HSV")),
    Image.fromarray(GREY).convert("LA").convert("La"),
    Image.fromarray(GREY).convert("RGBA").convert("RGBa"),
    Image.fromarray(GREY.astype(np.uint16) * 257),
    Image.frombytes("I;16B", (10, 6), (GREY.astype(">u2") * 257).tobytes()),
    Image.fromarray(GREY.astype(np.float32) / 255),
  ],
  ids=lambda image: image.mode,
)
def test_images_of_pillow_are_read_whatever_their_mode(image):
  split = in_memory.open_data([(image, 0)] * 3, "own", "train", ("a", "b"))
  file, _ = split.source.read(0)
  expected = np.repeat(GREY[:, :, None], 3, axis=2)
  np.testing.assert_array_equal(image_ops.decode(file), expected)
