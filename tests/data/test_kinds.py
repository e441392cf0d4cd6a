"""Labels and values of images, from every source of data."""

import dataclasses
import io
import json
import pathlib

import fake_data
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from configs import base
from memory_vit import config as config_lib
from memory_vit.bulk import readers
from memory_vit.commands import check_data
from memory_vit.config import DataConfig
from memory_vit.data import (
  audit,
  datasets,
  decoded_images,
  image_ops,
  in_memory,
  subset,
)
from memory_vit.data.batching import eval_batches, train_batches
from memory_vit.data.datasets import open_split
from memory_vit.data.indexable import open_indexable
from memory_vit.data.split_ref import SplitRef
from memory_vit.data.tfds_labels import find_target
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.model.task import EvalPreprocessing

PLAIN = EvalPreprocessing(image_size=8)
# Of the pictures 0 to 3, by their grey values.
LABELS = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]], np.float32)
VALUES = np.array([[1.5, -2], [0, 3], [7, 0.25], [-1, 1e3]], np.float32)
NAMES = ("blue", "green", "red")
DTYPES = {"labels": np.float32, "values": np.float64}
PICTURES = [fake_data.picture(i) for i in range(4)]


def names_of(row, names=NAMES):
  return [name for name, is_there in zip(names, row, strict=True) if is_there]


def rows_of(split):
  """The labels of all examples, by their grey values."""
  found = {}
  for i in range(split.size):
    encoded, label = split.source.read(i)
    assert label.dtype == DTYPES[split.kind]
    assert label.shape == (split.num_classes,)
    found[int(image_ops.decode(encoded)[0, 0, 0])] = label
  return np.stack([found[grey] for grey in sorted(found)])


def batched_rows(split):
  """The same, by the batches of an evaluation."""
  found = {}
  for batch in eval_batches(split, PLAIN, batch_size=3):
    assert batch["label"].dtype == DTYPES[split.kind]
    assert batch["label"].shape == (3, split.num_classes)
    greys = np.round(batch["image"].mean((1, 2, 3)) * 127.5 + 127.5)
    for grey, label, mask in zip(
      greys, batch["label"], batch["mask"], strict=True
    ):
      if mask:
        found[int(grey)] = label
  return np.stack([found[grey] for grey in sorted(found)])


def require_rows(split, kind, expected, names):
  assert (split.kind, split.class_names) == (kind, tuple(names))
  np.testing.assert_array_equal(rows_of(split), expected)
  if split.labels is not None:
    assert split.labels.dtype == DTYPES[kind]
    assert split.labels.shape == (split.size, len(names))


FEATURES = tfds.features.FeaturesDict({
  "image": tfds.features.Image(shape=(None, None, 3)),
  "tags": tfds.features.Sequence(tfds.features.ClassLabel(names=NAMES)),
  "has": tfds.features.FeaturesDict(dict.fromkeys(NAMES, np.bool_)),
  "wild": np.bool_,
  "old": tfds.features.ClassLabel(num_classes=2),
  "x": np.float32,
  "y": np.float64,
  "count": np.int64,
  "box": tfds.features.Tensor(shape=(2,), dtype=np.float32),
})  # fmt: skip


@pytest.fixture(scope="module", params=["tfrecord", "array_record"])
def tfds_data(tmp_path_factory, request):
  root = tmp_path_factory.mktemp(request.param)
  examples = [
    {
      "image": PICTURES[i],
      "tags": names_of(LABELS[i]),
      "has": {
        name: bool(is_there)
        for name, is_there in zip(NAMES, LABELS[i], strict=True)
      },
      "wild": bool(LABELS[i, 0]),
      "old": int(LABELS[i, 1]),
      "x": VALUES[i, 0], "y": VALUES[i, 1], "count": i, "box": VALUES[i],
    }
    for i in range(4)
  ]  # fmt: skip
  tfds.dataset_builders.store_as_tfds_dataset(
    name="own", version="1.0.0", features=FEATURES, data_dir=root,
    split_datasets={"train": list(enumerate(examples))},
    file_format=request.param,
  )  # fmt: skip
  return str(root)


@pytest.mark.versions
@pytest.mark.parametrize(
  ("kind", "label", "expected", "names"),
  [
    ("labels", "tags", LABELS, NAMES),
    ("labels", "has", LABELS, NAMES),
    ("labels", "has/red,has/blue", LABELS[:, [2, 0]], ("red", "blue")),
    ("labels", "wild, old", LABELS[:, :2], ("wild", "old")),
    ("values", "x,y", VALUES, ("x", "y")),
    ("values", "box", VALUES, ("box/0", "box/1")),
    ("values", "count", np.arange(4.0)[:, None], ("count",)),
  ],
)
def test_features_of_tfds(tfds_data, kind, label, expected, names):
  split = open_split(
    "own", "train", tfds_data, download=False, kind=kind, label=label
  )
  require_rows(split, kind, expected, names)
  assert split.data_files.facts["kind"] == kind


@pytest.mark.parametrize(
  ("kind", "label", "message"),
  [
    ("labels", "", "config.data.label is '' and config.task.kind is 'labels'"),
    ("values", "", "config.data.label is '' and config.task.kind is 'values'"),
    ("labels", "x", "a Sequence of ClassLabels"),
    ("labels", "nothing", "a Sequence of ClassLabels"),
    ("values", "x,tags", "expected a number, or a Tensor"),
    ("labels", "things/wild", "a Sequence of ClassLabels"),
    ("values", "old", "expected a number"),
    ("values", "image", "expected a number"),
    ("labels", "clevr_count", "a Sequence of ClassLabels"),
  ],
)
def test_features_that_are_no_labels_or_values_are_refused(
  kind, label, message
):
  things = tfds.features.Sequence({"wild": np.bool_})
  features = tfds.features.FeaturesDict({**FEATURES, "things": things})
  with pytest.raises(DataError, match=message):
    find_target("own", features, None, label, kind)


def test_the_only_feature_of_a_kind_needs_no_name():
  features = tfds.features.FeaturesDict(
    {key: FEATURES[key] for key in ("image", "tags", "x")}
  )
  assert find_target("own", features, None, "", "values").class_names == ("x",)
  assert find_target("own", features, None, "", "labels").class_names == NAMES


def test_an_unlabelled_sequence_is_no_empty_one():
  take = find_target("own", FEATURES, None, "tags", "labels").label
  assert np.isnan(take({"tags": tf.constant([0, -1], tf.int64)})).all()
  empty = take({"tags": tf.constant([], tf.int64)})
  np.testing.assert_array_equal(empty, np.zeros(3))


def write_images(root):
  for i, picture in enumerate(PICTURES):
    (root / f"{i}.png").write_bytes(fake_data.encode(picture, "PNG"))
  return root


def numbers_of(row):
  return ",".join(map(str, np.flatnonzero(row))) or "-"


def csv_of(columns):
  rows = [columns, *zip(*columns.values(), strict=True)]
  return "\n".join(",".join(map(str, row)) for row in rows)


PATHS = [f"{i}.png" for i in range(4)]
# {form: (kind, file, contents or columns, config.data.label, expected, names)}
LISTS = {
  "numbers": (
    "labels", "train.txt",
    "\n".join(f"{i}.png {numbers_of(LABELS[i])}" for i in range(4)),
    "", LABELS, "012",
  ),
  "numbers in text": (
    "values", "train.txt",
    "".join(f"{i}.png {x},{y}\n" for i, (x, y) in enumerate(VALUES)),
    "", VALUES, "01",
  ),
  "names in a CSV": (
    "labels", "train.csv",
    csv_of({"path": PATHS, "label": ["|".join(names_of(r)) for r in LABELS]}),
    "", LABELS, NAMES,
  ),
  "columns of a CSV": (
    "labels", "train.csv",
    csv_of({"b": [True, False, False, True], "path": PATHS, "g": [0, 0, 1, 1]}),
    "b,g", LABELS[:, :2], "bg",
  ),
  "a value of a CSV": (
    "values", "train.csv", csv_of({"path": PATHS, "mm": VALUES[:, 0]}),
    "mm", VALUES[:, :1], ("mm",),
  ),
  "values of a CSV": (
    "values", "train.csv",
    csv_of({"y": VALUES[:, 1], "path": PATHS, "x": VALUES[:, 0]}),
    "x,y", VALUES, "xy",
  ),
  "lists of names": (
    "labels", "train.parquet",
    {"path": PATHS, "label": [names_of(row) for row in LABELS]},
    "", LABELS, NAMES,
  ),
  "lists of numbers": (
    "labels", "train.parquet",
    {"path": PATHS, "tags": [np.flatnonzero(r).tolist() for r in LABELS]},
    "tags", LABELS, "012",
  ),
  "lists of values": (
    "values", "train.parquet", {"path": PATHS, "label": VALUES.tolist()},
    "", VALUES, "01",
  ),
  "columns of values": (
    "values", "train.parquet",
    {"path": PATHS, "x": VALUES[:, 0], "y": VALUES[:, 1].astype(np.float64)},
    "y,x", VALUES[:, ::-1], "yx",
  ),
}  # fmt: skip


def write_list(root, file, contents):
  if isinstance(contents, dict):
    pq.write_table(pa.table(contents), root / file)
  else:
    (root / file).write_text(contents)


@pytest.mark.parametrize("form", LISTS)
def test_lists_and_tables(tmp_path, form):
  kind, file, contents, label, expected, names = LISTS[form]
  write_list(write_images(tmp_path), file, contents)
  split = open_split("list", "train", str(tmp_path), kind=kind, label=label)
  require_rows(split, kind, expected, names)


@pytest.mark.parametrize(
  ("file", "labels", "names"),
  [
    ("train.csv", ["ant", "bee", "007", "bee"], ("007", "ant", "bee")),
    ("train.csv", [2, 0, 10, 1], ("0", "1", "2", "10")),
    ("train.csv", [7, "007", "0007", 10], ("0007", "007", "10", "7")),
    ("train.csv", ["02139", "00501", "02139", "00501"], ("00501", "02139")),
    ("train.csv", ["1234567890123", "99", "7", "99"],
     ("7", "99", "1234567890123")),
    ("train.parquet", ["ant", "bee", "007", "bee"], ("007", "ant", "bee")),
    ("train.parquet", [2, 0, 2, 1], ("0", "1", "2")),
    ("train.parquet", [2, 0, 10, 1], ("0", "1", "2", "10")),
  ],
)  # fmt: skip
def test_classes_of_tables(tmp_path, file, labels, names):
  columns = {"path": PATHS, "label": labels}
  is_csv = file.endswith("csv")
  write_list(
    write_images(tmp_path), file, csv_of(columns) if is_csv else columns
  )
  split = open_split("list", "train", str(tmp_path))
  assert split.class_names == names
  found = {split.file_name(i)[-5]: int(split.labels[i]) for i in range(4)}
  shown = [names[found[str(i)]] for i in range(4)]
  assert shown == [str(label) for label in labels]
  # A text file in its place is the same data, if labels are numbers.
  (tmp_path / "classes.txt").write_text("\n".join(names))
  lines = [f"{i}.png {found[str(i)]}" for i in range(4)]
  (tmp_path / "test.txt").write_text("\n".join(lines))
  test = open_split("list", "test", str(tmp_path))
  assert test.data_files == split.data_files
  np.testing.assert_array_equal(test.labels, split.labels)


def test_names_of_labels_are_those_of_all_lists(tmp_path):
  """Names that look like numbers are no numbers of others."""
  write_images(tmp_path)
  (tmp_path / "train.csv").write_text("path,label\n0.png,red|3\n1.png,")
  (tmp_path / "test.csv").write_text("path,label\n2.png,3")
  for name, expected in (("train", [[0, 0], [1, 1]]), ("test", [[1, 0]])):
    split = open_split("list", name, str(tmp_path), kind="labels")
    assert split.class_names == ("3", "red")
    assert sorted(split.labels.tolist()) == expected
  (tmp_path / "classes.txt").write_text("a\nb\nc\nd")
  split = open_split("list", "test", str(tmp_path), kind="labels")
  assert split.labels.tolist() == [[0, 0, 0, 1]]
  with pytest.raises(BrokenDataError, match=r"train.csv, row 1: .*'red'"):
    open_split("list", "train", str(tmp_path), kind="labels")


def test_a_file_may_name_what_a_column_holds(tmp_path):
  write_images(tmp_path)
  (tmp_path / "train.csv").write_text("path,mm\n0.png,1")
  (tmp_path / "classes.txt").write_text("width")
  split = open_split("list", "train", str(tmp_path), kind="values", label="mm")
  assert split.class_names == ("width",)


CSV = "path,label,x\n"


@pytest.mark.parametrize(
  ("kind", "file", "contents", "label", "message"),
  [
    ("labels", "train.txt", "0.png 1,,2", "", "line 1: .*PATH LABELS"),
    ("labels", "train.txt", "0.png 0,0", "", "line 1: .*one label twice"),
    ("labels", "train.txt", "0.png 01", "", "line 1: .*PATH LABELS"),
    ("labels", "train.txt", "0.png -\n1.png -", "", "no example has a label"),
    ("values", "train.txt", "0.png 1,x", "", "line 1: its label is .*a number"),
    ("values", "train.txt", "0.png 1\n1.png 1,2", "", "line 2: .*2 numbers"),
    ("values", "train.txt", "0.png nan", "", "line 1: its label is .*a number"),
    ("values", "train.txt", "0.png 1e300", "", r"has values \[1e\+300\].*0.p"),
    ("values", "train.txt", "0.png 1", "x", "label is 'x', a column of a"),
    ("classes", "train.csv", CSV + "0.png,,1", "", "row 1: its label is ''"),
    ("classes", "train.csv", CSV + "0.png,a,1", "label,x", "names several col"),
    ("classes", "train.csv", CSV + "0.png,,", "", "row 1: its label is ''"),
    ("classes", "train.csv", CSV + "0.png,a,1,b", "", "row 1 has 4 cells, but"),
    ("classes", "train.csv", CSV + "../0.png,a,1", "", "row 1: .*leads out"),
    ("classes", "train.csv", CSV + "0.png,a,1\n0.png,a,1", "", "row 2: .*sec"),
    ("classes", "train.csv", CSV + "0.png,a,1", "y", "has 0 columns 'y'.*'x'"),
    ("classes", "train.csv", "path,label,label\n", "", "has 2 columns 'label'"),
    ("classes", "train.csv", "", "", "has 0 columns 'path', expected one"),
    ("labels", "train.csv", CSV + "0.png,2,1", "label,x", "has labels.*2.0"),
    ("labels", "train.csv", CSV + '0.png,"[[1]]",', "", "row 1: its label is"),
    ("labels", "train.csv", CSV + f"0.png,{'[' * 10**5},", "", "row 1: its"),
    ("values", "train.csv", CSV + "0.png,red,1", "", "row 1: .* is 'red'"),
    ("values", "train.parquet", {"path": ["0.png"], "label": [None]}, "",
     "row 1: its label is None"),
    ("values", "train.parquet", {"path": [None], "label": [1]}, "",
     "row 1: None is not a path"),
    ("labels", "train.parquet", "no Parquet", "", "or is not a Parquet file"),
  ],
)  # fmt: skip
@pytest.mark.fault("wrong-label")
def test_unusable_lists_are_refused(
  tmp_path, kind, file, contents, label, message
):
  write_list(write_images(tmp_path), file, contents)
  with pytest.raises(DataError, match=f"(?s){message}"):
    open_split("list", "train", str(tmp_path), kind=kind, label=label)


def test_two_lists_of_one_split_are_refused(tmp_path):
  (tmp_path / "train.txt").write_text("0.png 0")
  (tmp_path / "train.csv").write_text("path,label\n0.png,0")
  with pytest.raises(DataError, match=r"two lists.*train\.csv.*train\.txt"):
    open_split("list", "train", str(tmp_path))


class Tags:
  """As much as is used of `datasets.Dataset`, with a sequence of classes."""

  def __init__(self, rows):
    label = type("ClassLabel", (), {"names": NAMES})()
    self.features = {"label": type("Sequence", (), {"feature": label})()}
    self._rows = rows

  def __len__(self):
    return len(self._rows)

  def __getitem__(self, index):
    return self._rows[index]


def python_forms():
  """{form: (kind, the labels of each image, class_names)}."""
  numbers = [np.flatnonzero(row).tolist() for row in LABELS]
  named = [names_of(row) for row in LABELS]
  return {
    "names": ("labels", named, NAMES),
    "numbers": ("labels", numbers, NAMES),
    "matrix": ("labels", LABELS.astype(np.int64), NAMES),
    "booleans": ("labels", LABELS.astype(bool).tolist(), NAMES),
    "tensor": ("labels", tf.constant(LABELS), NAMES),
    "vectors": ("values", VALUES, ("x", "y")),
    "lists": ("values", VALUES.tolist(), ("x", "y")),
    "a value": ("values", VALUES[:, 0], ("x",)),
    "unnamed": ("values", VALUES, ("0", "1")),
  }


@pytest.mark.parametrize("form", python_forms())
def test_data_of_python_are_read(form):
  kind, given, names = python_forms()[form]
  stated = () if form == "unnamed" else names
  expected = LABELS if kind == "labels" else VALUES[:, : len(names)]
  split = in_memory.open_data(
    (PICTURES, given), "own", "train", stated, kind=kind
  )
  require_rows(split, kind, expected, names)
  train, held_out = in_memory.hold_out(split)
  assert (train.labels.shape, held_out.kind) == ((3, len(names)), kind)
  pairs = list(zip(PICTURES, list(given), strict=True))
  split = open_indexable(
    pairs, name="own", version="1", class_names=stated, kind=kind
  )
  require_rows(split, kind, expected, names)


def test_label_names_of_python_data_are_read():
  named = [names_of(row) for row in LABELS]
  split = in_memory.open_data((PICTURES, named), "own", "train", kind="labels")
  require_rows(split, "labels", LABELS, NAMES)
  rows = [
    {"image": picture, "label": np.flatnonzero(row).tolist()}
    for picture, row in zip(PICTURES, LABELS, strict=True)
  ]
  for split in (
    in_memory.open_data(Tags(rows), "own", "train", kind="labels"),
    open_indexable(Tags(rows), name="own", version="1", kind="labels"),
  ):
    require_rows(split, "labels", LABELS, NAMES)
  rows = [{**row, "label": i} for i, row in enumerate(rows)]
  split = open_indexable(Tags(rows), name="own", version="1", kind="values")
  assert split.class_names == ("0",)


@pytest.mark.parametrize(
  ("kind", "label", "message"),
  [
    ("labels", [1, 1], "one label twice"),
    ("labels", [0, 3], "its label is 3, expected 0 to 2.*blue, green, red"),
    ("labels", ["pink"], "its label is 'pink'"),
    ("labels", np.array([0, 1]), "has 2 numbers, expected 3"),
    ("labels", np.array([0, 0.5, 1]), r"labels \[0.0, 0.5, 1.0\].*0 or 1"),
    ("labels", None, "its label is None"),
    ("values", [1, 2], "has 2 numbers, expected 3"),
    ("values", [1, np.nan, 2], "expected finite numbers"),
    ("values", [], "its label is .*a number such as"),
    ("values", {"x": 1}, "its label is .*a number such as"),
    ("classes", [1], "its label is"),
  ],
)
@pytest.mark.fault("wrong-label")
def test_unusable_labels_of_python_are_refused(kind, label, message):
  right = {"labels": ["red"], "values": [1, 2, 3], "classes": 0}[kind]
  pictures, labels = PICTURES[:2], [right, label]
  with pytest.raises(DataError, match=f"(?s)example 1.*{message}|{message}"):
    in_memory.open_data((pictures, labels), "own", "all", NAMES, kind=kind)
  with pytest.raises(BrokenDataError, match=f"(?s){message}"):
    open_indexable(
      [(PICTURES[0], label)], name="own", version="1", class_names=NAMES,
      kind=kind,
    )  # fmt: skip


def test_a_value_that_is_not_finite_is_found_on_the_way():
  split = open_indexable(
    [*zip(PICTURES, [1, 2, np.inf, 3], strict=True)],
    name="own", version="1", kind="values",
  )  # fmt: skip
  with pytest.raises(BrokenDataError, match=r"values \[inf\]; .*example 2"):
    batched_rows(split)
  with pytest.raises(BrokenDataError, match=r"values \[inf\]; .*example 2"):
    subset.value_statistics(split)


def test_kinds_that_a_source_lacks_are_refused(tmp_path):
  fake_data.write_folder(tmp_path, {"train/a": ["0.png"], "train/b": ["1.png"]})
  for name, kind in (
    ("folder", "labels"), ("digits", "values"), ("glyphs:inverted", "labels"),
    ("glyphs:angle", "classes"), ("list", "numbers"),
  ):  # fmt: skip
    with pytest.raises(DataError, match=f"config.task.kind is '{kind}', but"):
      open_split(name, "train", str(tmp_path), kind=kind)
  with pytest.raises(DataError, match="config.task.kind is 'labels'"):
    in_memory.open_data(tmp_path / "train", "own", "train", kind="labels")
  with pytest.raises(DataError, match="kind is 'label', expected one of"):
    open_indexable(
      [(PICTURES[0], 0)], name="a", version="1", class_names="ab", kind="label"
    )


def test_labels_of_the_digits():
  classes = open_split("digits:2-7", "test")
  split = open_split("digits:2-7", "test", kind="labels")
  assert split.class_names == ("even", "above 4", "prime")
  for digit, label in zip(classes.labels + 2, split.labels, strict=True):
    assert label.tolist() == [digit % 2 == 0, digit > 4, digit in (2, 3, 5, 7)]


def test_angles_of_the_glyphs():
  split = open_split("glyphs:angle", "train", kind="values")
  assert (split.class_names, split.labels.shape) == (("angle",), (3600, 1))
  assert (split.labels.min(), split.labels.max()) == pytest.approx(
    (-45, 45), abs=0.1
  )
  assert abs(split.labels.mean()) < 0.1
  upright = open_split("glyphs:inverted", "train")
  for i in (5, 8):
    turned, glyph = (
      Image.open(io.BytesIO(source.source.read(i)[0]))
      for source in (split, upright)
    )
    apart = [
      np.abs(
        np.asarray(turned.rotate(angle), float)[7:-7, 7:-7]
        - np.asarray(glyph, float)[7:-7, 7:-7]
      ).mean()
      for angle in (-split.labels[i, 0], split.labels[i, 0])
    ]
    assert apart[0] < 0.7 * apart[1]


def config_of(name, directory, kind, **data):
  values = base.get_config()
  values.data.name, values.data.dir = name, str(directory)
  values.data.train, values.data.validation, values.data.test = "train", "", ""
  values.data.update(data)
  values.task.kind = kind
  return config_lib.from_dict(values.to_dict())


def test_counts_and_statistics_leave_out_the_unreadable(tmp_path):
  write_images(tmp_path)
  lines = [f"{i}.png {numbers_of(LABELS[i])}" for i in range(4)]
  (tmp_path / "train.txt").write_text("\n".join([*lines, "gone.png 0,1,2"]))
  split = open_split("list", "train", str(tmp_path), max_bad=1, kind="labels")
  counts = subset.class_counts(split)
  assert (counts.dtype, counts.tolist()) == (np.int64, [2, 2, 2])
  text = "".join(f"{i}.png {x},{y}\n" for i, (x, y) in enumerate(VALUES))
  (tmp_path / "train.txt").write_text(f"{text}gone.png 1e9,1e9")
  split = open_split("list", "train", str(tmp_path), max_bad=1, kind="values")
  mean, std = subset.value_statistics(split)
  np.testing.assert_allclose(mean, [1.875, 250.3125], rtol=1e-12)
  expected = VALUES.astype(np.float64).std(axis=0)
  np.testing.assert_allclose(std, expected, rtol=1e-12)
  assert mean.dtype == std.dtype == np.float64


def test_a_chosen_part_has_its_labels():
  split = open_split("digits", "train", kind="labels")
  chosen = subset.choose(split, subset.Subset(first=30))
  assert chosen.labels.shape == (30, 3)
  batches = train_batches(
    chosen, DataConfig(), image_size=8, batch_size=30, seed=0
  )
  labels = next(batches)["label"]
  assert sorted(labels.tolist()) == sorted(chosen.labels.tolist())
  assert subset.class_counts(chosen).tolist() == labels.sum(axis=0).tolist()


def test_decoded_images_have_their_labels():
  kind, given, names = python_forms()["matrix"]
  images = [fake_data.encode(p, "PNG") for p in PICTURES]
  images[1] = b"no picture"
  split = in_memory.open_data((images, given), "own", "all", names, kind=kind)
  split = dataclasses.replace(split, max_bad=1)
  decoded = decoded_images.cache_decoded(split, 8)
  np.testing.assert_array_equal(batched_rows(decoded), LABELS[[0, 2, 3]])


def test_check_data_reports_labels_and_values(tmp_path):
  write_images(tmp_path)
  lines = [f"{i}.png {numbers_of(LABELS[i])}" for i in range(3)]
  (tmp_path / "train.txt").write_text("\n".join(lines))
  (tmp_path / "classes.txt").write_text("blue\ngreen\nred\npink")
  report = audit.audit_data(config_of("list", tmp_path, "labels"))
  [entry] = report["splits"]
  assert entry["per_class"] == {"blue": 1, "green": 1, "red": 1, "pink": 0}
  assert entry["balance"]["share"] == 1 / 3
  [problem] = entry["problems"]
  assert problem["kind"] == "label without an image"
  assert problem["where"] == "pink"
  shown = check_data.text(report)
  assert "images per label from 1 (blue) to 1 (blue)" in shown
  (tmp_path / "train.txt").write_text(
    "".join(f"{i}.png {x},7,1,1\n" for i, x in enumerate(VALUES[:, 0]))
  )
  report = audit.audit_data(config_of("list", tmp_path, "values"))
  [entry] = report["splits"]
  assert entry["values"]["blue"] == pytest.approx(
    {"min": -1, "mean": 1.875, "max": 7, "std": VALUES[:, 0].std()}
  )
  assert entry["per_class"] == {}
  problems = [(p["kind"], p["where"]) for p in entry["problems"]]
  assert problems == [
    ("constant value", name) for name in ("green", "red", "pink")
  ]
  shown = check_data.text(report)
  assert "blue: -1 to 7, mean 1.875, standard deviation" in shown
  json.dumps(report)


def test_check_data_reports_wrong_values():
  pairs = [(p, v) for p, v in zip(PICTURES, VALUES[:, 0], strict=True)]
  pairs[2] = (PICTURES[2], float("nan"))
  found = audit._Contents(
    open_indexable(pairs, name="own", version="1", kind="values")
  )
  examples = found.split.source.examples(audit._Examined(), range(len(pairs)))
  for index, example in enumerate(examples):
    found.add(index, example)
  entry = audit._as_json(found, all_classes=True)
  [problem] = entry["problems"]
  assert (problem["kind"], problem["index"]) == ("value is not finite", 2)
  assert entry["values"]["0"]["max"] == 1.5


def test_labels_of_a_list_change_the_digest(tmp_path):
  write_images(tmp_path)
  found = []
  for kind, text in (
    ("classes", "0"), ("labels", "0"), ("values", "0"), ("values", "2"),
    ("values", "1,2"),
  ):  # fmt: skip
    (tmp_path / "train.txt").write_text(f"0.png {text}")
    ref = SplitRef("list", str(tmp_path), "train", kind=kind)
    found.append(datasets.find_data_files(ref).table("files")["facts"])
  texts = [json.dumps(each) for each in found]
  assert len({*texts}) == len(texts)


def test_labels_of_parquet_files_that_are_embedded(tmp_path):
  """`embed` writes labels as text, which a split of embeddings reads."""
  path = pathlib.Path(tmp_path) / "images.parquet"
  columns = {"image": [b"x"] * 2, "label": [["a, b", "c"], []]}
  pq.write_table(pa.table(columns), path)
  rows = readers.read_container(path, range(2), 0, readers.Columns())
  assert [row.label for row in rows] == ['["a, b", "c"]', "[]"]
