"""Splits of embeddings: which rows, in which order, and what is wrong."""

import shutil

import fake_data
import fake_embeddings
import numpy as np
import pyarrow as pa
import pytest
from fake_embeddings import CLASSES, TEST, TRAIN

from memory_vit import config as config_lib
from memory_vit.cache.plan import FixedEmbeddings
from memory_vit.data import (
  batching,
  data_files,
  datasets,
  read_embeddings,
  subset,
)
from memory_vit.data.datasets import open_split
from memory_vit.data.split_ref import SplitRef, Subset
from memory_vit.errors import BrokenDataError, DataError

TEST_FILE = "test/part-00000-of-00001.parquet"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A backbone, images, and their embeddings, of train in three shards."""
  root = tmp_path_factory.mktemp("embedded")
  fake_embeddings.write_backbone(root)
  data = fake_embeddings.write_images(root)
  fake_embeddings.embedded(root, "all/train", data / "train")
  fake_embeddings.embedded(root, "all/test", data / "test")
  return root


@pytest.fixture
def place(made, tmp_path):
  """A copy, to be changed."""
  shutil.copytree(made / "all", tmp_path / "all")
  return tmp_path / "all"


def opened(directory, split="train", **options):
  return open_split("embeddings", split, str(directory), **options)


def names(reader):
  return [reader.file_name(i) for i in range(reader.size)]


def values(reader, name="pooled"):
  """The values of all examples, in their order."""
  views = FixedEmbeddings.of(
    reader, np.arange(reader.size), "head" if name == "pooled" else "probe"
  )
  [batch] = views.batches(range(0, reader.size, reader.size), reader.size)
  return batch["inputs"][name][views.places]


def test_slices_are_those_of_the_image_folder(made):
  """Order, classes, labels, and what each slice holds."""
  for split in ("train", "train[:60%]", "test[2:]+train[-3:]", "test"):
    found = opened(made / "all", split)
    images = open_split("folder", split, str(made / "data"))
    assert names(found) == names(images)
    assert found.class_names == images.class_names == CLASSES
    np.testing.assert_array_equal(found.labels, images.labels)


def test_an_output_alone_is_the_training_split(made, tmp_path):
  for where in (made / "all" / "train", made / "all" / "test"):
    found = opened(where, "train[4:]")
    assert found.split == "train[4:]"
    assert found.class_names == CLASSES
  assert opened(made / "all" / "train").size == TRAIN * len(CLASSES)
  assert opened(made / "all" / "test").size == TEST * len(CLASSES)


def test_a_row_is_that_of_its_image(made):
  """Over the files of two outputs, whose rows are in another order."""
  whole = {}
  for output in ("all/train", "all/test"):
    found = read_embeddings(made / output)
    for name in ("pooled", "layers"):
      pairs = zip(found.paths, getattr(found, name), strict=True)
      whole |= {(path, name): value for path, value in pairs}
  reader = opened(made / "all", "test[3:]+train[5:30]")
  for name in ("pooled", "layers"):
    expected = [whole[path, name] for path in names(reader)]
    np.testing.assert_array_equal(values(reader, name), expected)


def test_some_examples_can_be_read_alone(made):
  """As where batches of rows are missing; behind the last is nothing."""
  reader = opened(made / "all")
  records = np.arange(1, reader.size, 2)  # of the second of two processes
  views = FixedEmbeddings.of(reader, records, "head")
  assert sorted(views.numbers) == [*records]
  whole = [*views.batches(range(0, 25, 5), 5)]
  part = [*views.batches(range(10, 25, 5), 5)]
  for first, second in zip(whole[2:], part, strict=True):
    for key in ("label", "mask"):
      np.testing.assert_array_equal(first[key], second[key])
    np.testing.assert_array_equal(
      first["inputs"]["pooled"], second["inputs"]["pooled"]
    )
  masks = np.concatenate([batch["mask"] for batch in whole])
  np.testing.assert_array_equal(masks, np.arange(25) < len(records))
  labels = np.concatenate([batch["label"] for batch in whole])
  np.testing.assert_array_equal(labels[views.places], reader.labels[records])


def test_the_order_does_not_depend_on_where_images_lie(made, place):
  """A folder that was moved, or is seen elsewhere by the workers."""

  def moved(table, about):
    paths = [
      path.replace(str(made / "data"), "/mnt/há/elsewhere")
      for path in table["path"].to_pylist()
    ]
    return fake_embeddings.column_set(table, "path", paths), about

  before = opened(made / "all", "train[:9]")
  for file in place.glob("train/*.parquet"):
    fake_embeddings.rewritten(file, moved)
  after = opened(place, "train[:9]")
  assert [name.split("/")[-2:] for name in names(after)] == [
    name.split("/")[-2:] for name in names(before)
  ]


def with_column(name, change):
  """A change of tables: every value of a column by a function of its path."""

  def rewrite(table, about):
    rows = zip(table["path"].to_pylist(), table[name].to_pylist(), strict=True)
    found = [change(path, value) for path, value in rows]
    return fake_embeddings.column_set(table, name, found), about

  return rewrite


def broken(path):
  return path.endswith("train/ants/03.png") or path.endswith("bees/07.png")


def test_rows_with_an_error_are_left_out_and_counted(place, caplog):
  """Their values are none, and their label does not matter."""
  for file in place.glob("train/*.parquet"):
    for name, value in (
      ("error", "it is\n truncated"), ("label", None), ("pooled", None),
    ):  # fmt: skip
      fake_embeddings.rewritten(
        file, with_column(name, lambda p, v, new=value: new if broken(p) else v)
      )
  reader = opened(place, "train+test")
  assert reader.size == (TRAIN + TEST) * len(CLASSES) - 2
  assert not any(map(broken, names(reader)))
  assert "2 of 48 rows are left out" in caplog.text
  assert len(reader.left_out) == 2
  [line] = [e for e in reader.left_out if "ants" in e]
  assert line.endswith("ants/03.png has no embedding: it is\n truncated")
  assert values(reader).shape == (46, 32)
  caplog.clear()
  assert not opened(place, "test").left_out
  assert not caplog.text


def test_slices_hold_the_same_images_where_some_are_broken(made, place):
  """A folder finds them when it is read; its slices are of all images."""
  for file in place.glob("train/*.parquet"):
    fake_embeddings.rewritten(
      file, with_column("error", lambda p, v: "cut" if broken(p) else v)
    )
  left_out = []
  for split in ("train[:9]", "train[9:20]", "train[20:]", "train[-60%:]+test"):
    expected = names(open_split("folder", split, str(made / "data")))
    reader = opened(place, split)
    assert names(reader) == [p for p in expected if not broken(p)]
    bad = [path for path in expected if broken(path)]
    assert [line.split()[3] for line in reader.left_out] == bad
    left_out += bad
  assert len(set(left_out)) == 2
  whole = names(open_split("folder", "train", str(made / "data")))
  at = [*map(broken, whole)].index(True)
  with pytest.raises(BrokenDataError, match="has no embedding") as error:
    opened(place, f"train[{at}:{at + 1}]")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("kind", "texts", "names", "rows"),
  [
    ("labels", ['["a, b", "c"]', "c", "-"], ("a, b", "c"), "11 01 00"),
    ("labels", ["[0, 2]", "1|2", "2"], ("0", "1", "2"), "101 011 001"),
    ("values", ["1", "[0.0]", "1.0"], ("0",), "1 0 1"),
  ],
)  # fmt: skip
def test_labels_and_values_in_texts(place, kind, texts, names, rows):
  written = dict(zip(CLASSES, texts, strict=True))
  expected = {
    name: [float(number) for number in row]
    for name, row in zip(CLASSES, rows.split(), strict=True)
  }
  for file in place.glob("t*/*.parquet"):
    fake_embeddings.rewritten(
      file, with_column("label", lambda p, v: written[v])
    )
  for split in ("train", "test[2:]"):
    found = opened(place, split, kind=kind)
    assert (found.kind, found.class_names) == (kind, names)
    assert found.labels.dtype == (float if kind == "values" else np.float32)
    for path, label in zip(found_names(found), found.labels, strict=True):
      assert label.tolist() == expected[path]
  [batch] = FixedEmbeddings.of(found, np.arange(4), "head").batches(
    range(0, 4, 4), 4
  )
  assert batch["label"].dtype == found.labels.dtype
  assert sorted(batch["label"].tolist()) == sorted(found.labels[:4].tolist())
  if kind == "labels":
    counts = found.labels.sum(axis=0).tolist()
    assert subset.class_counts(found).tolist() == counts


def found_names(reader):
  """The class that each image had."""
  return [
    next(name for name in CLASSES if f"/{name}/" in path)
    for path in names(reader)
  ]


def test_texts_that_are_no_values_are_refused(place):
  words = "'ants'.*config.task.kind is 'values'"
  with pytest.raises(BrokenDataError, match=words):
    opened(place, kind="values")
  for file in place.glob("test/*.parquet"):
    fake_embeddings.rewritten(file, with_column("label", lambda p, v: "[NaN]"))
  for file in place.glob("train/*.parquet"):
    fake_embeddings.rewritten(file, with_column("label", lambda p, v: "1"))
  assert opened(place, kind="values").num_classes == 1
  with pytest.raises(BrokenDataError, match="expected finite numbers"):
    opened(place, "test", kind="values")


@pytest.mark.parametrize(
  ("labels", "names"),
  [
    (("10", "9 ", "1"), ("1", "9", "10")),
    (("007", "7", "10"), ("007", "10", "7")),
    (("e\u0301", "é\u00a0", "\te"), ("e", "é")),
  ],
)
def test_classes_are_in_the_order_of_a_folder(
  place, tmp_path, caplog, labels, names
):
  written = dict(zip(CLASSES, labels, strict=True))
  for file in place.glob("t*/*.parquet"):
    fake_embeddings.rewritten(
      file, with_column("label", lambda p, v: written[v])
    )
  assert opened(place).class_names == names
  assert read_embeddings(place / "train").class_names() == names
  assert ("as names" in caplog.text) == (names[0] == "1")
  for name in labels:
    fake_data.write_folder(
      tmp_path / "data/train", {name: [f"{len(name)}.png"]}
    )
  folder = open_split("folder", "train", str(tmp_path / "data"))
  assert folder.class_names == names


def test_values_that_are_missing_are_refused(place):
  for file in place.glob("train/*.parquet"):
    fake_embeddings.rewritten(
      file, with_column("pooled", lambda p, v: None if broken(p) else v)
    )
  with pytest.raises(DataError, match="1 rows have no 'pooled'"):
    values(opened(place))
  assert values(opened(place), "layers").shape == (33, 2, 32)


def test_missing_splits_of_embeddings_are_refused(place, tmp_path):
  with pytest.raises(DataError, match=r"no split 'val'.*'test', 'train'"):
    opened(place, "val")
  with pytest.raises(DataError, match="no split 'test'.*has 'train'"):
    opened(place / "train", "test")
  shutil.rmtree(place / "train")
  with pytest.raises(DataError, match="no split 'train'.*directory has 'test'"):
    opened(place, "test")
  for where in ("", tmp_path / "nothing"):
    with pytest.raises(DataError, match="set config.data.dir to the --output"):
      opened(where)
  with pytest.raises(DataError, match="offers no choice of labels"):
    datasets.open_ref(SplitRef("embeddings", str(place), "test", label="label"))


@pytest.mark.fault("damaged-embeddings")
def test_incomplete_output_is_refused(place):
  [*_, last] = sorted(place.glob("train/*.parquet"))
  whole = last.read_bytes()
  last.write_bytes(whole[:-1])
  with pytest.raises(DataError, match="cannot be read"):
    opened(place)
  last.unlink()
  with pytest.raises(DataError, match="of-00003.*expected all shards of a run"):
    opened(place)


@pytest.mark.fault("damaged-embeddings")
def test_damaged_values_are_noticed(place):
  """By the checksums of the pages: nobody learns from other bits."""
  whole = read_embeddings(place / "train").pooled
  file = sorted(place.glob("train/*.parquet"))[1]
  content = bytearray(file.read_bytes())
  # Of a row that the statistics in front of a page do not repeat.
  [row] = [r for r in whole[16:32] if content.count(r.tobytes()) == 1][:1]
  content[content.index(row.tobytes())] ^= 1
  file.write_bytes(content)
  reader = opened(place)
  with pytest.raises(DataError, match="00001-of-00003.parquet cannot be read"):
    values(reader)


def changed_about(**changes):
  return lambda table, about: (table, {**about, **changes})


@pytest.mark.fault("damaged-embeddings")
@pytest.mark.parametrize(
  ("change", "expected"),
  [
    (changed_about(dtype="bfloat16"), "shards of 2 runs"),
    (changed_about(plan="another"), "shards of 2 runs"),
    (changed_about(rows="predictions"), "holds no embeddings"),
    (changed_about(values={"dtype": "int8", "shapes": {}}), "no embeddings"),
    (
      changed_about(values={"dtype": "float32", "shapes": {"pooled": [-32]}}),
      "holds no embeddings",
    ),
    (
      changed_about(values={"dtype": "bfloat16", "shapes": {"pooled": [32]}}),
      "column 'pooled' is .*fixed_size_binary.128.*expected",
    ),
    (changed_about(backbone={"fingerprint": 3}), "metadata"),
    (changed_about(backbone=[]), "metadata"),
    (changed_about(preprocessing="resize"), "metadata"),
    (changed_about(values=[]), "holds no embeddings"),
    (
      changed_about(values={"dtype": "float32", "shapes": {"pooled": 32}}),
      "holds no embeddings",
    ),
    (
      lambda table, about: (
        fake_embeddings.column_set(table, "path", [None] * len(table)),
        about,
      ),
      "has rows without a path",
    ),
    (
      lambda table, about: (
        table.set_column(
          table.schema.get_field_index("label"),
          "label",
          pa.array([b"\xff"] * len(table)).view(pa.string()),
        ),
        about,
      ),
      "cannot be read",
    ),
    (
      lambda table, about: (table.drop_columns("label"), about),
      "column 'label' is 'missing', expected string",
    ),
  ],
)
def test_files_with_other_metadata_are_refused(place, change, expected):
  file = sorted(place.glob("train/*.parquet"))[1]
  fake_embeddings.rewritten(file, change)
  with pytest.raises(DataError, match=expected) as error:
    opened(place)
  assert "\n" not in str(error.value)


@pytest.mark.fault("damaged-embeddings")
@pytest.mark.parametrize(
  ("files", "change", "split", "error", "words"),
  [
    (
      "train/*.parquet",
      with_column("label", lambda p, v: None if broken(p) else v),
      "train", BrokenDataError, "2 of 33 rows have no label.*--label_column",
    ),
    (
      TEST_FILE, with_column("label", lambda p, v: f"{v}s"),
      "test", BrokenDataError, "of 'test'.* those of 'train': .* is 'antss'",
    ),
    (
      TEST_FILE, changed_about(dtype="bfloat16"),
      "train+test", DataError, "were made in different ways",
    ),
  ],
  ids=["no label", "another class", "another dtype"],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(
  place, files, change, split, error, words
):
  for file in place.glob(files):
    fake_embeddings.rewritten(file, change)
  with pytest.raises(error, match=words) as raised:
    opened(place, split)
  assert "\n" not in str(raised.value)


def test_embeddings_cannot_be_read_as_images(made):
  reader = opened(made / "all")
  data = config_lib.DataConfig(name="embeddings", train_crop="resize")
  with pytest.raises(DataError, match="holds embeddings and no images"):
    next(
      batching.train_batches(reader, data, image_size=8, batch_size=8, seed=0)
    )


def test_few_of_each_class(made):
  """Their rows, and not only their labels, are those that were chosen."""
  ref = SplitRef("embeddings", str(made / "all"), "train",
                 subset=Subset(per_class=2, seed=1))  # fmt: skip
  few = datasets.open_ref(ref)
  assert [*subset.class_counts(few)] == [2, 2, 2]
  images = datasets.open_ref(
    SplitRef("folder", str(made / "data"), "train",
             subset=Subset(per_class=2, seed=1))
  )  # fmt: skip
  assert names(few) == names(images)
  whole = opened(made / "all")
  all_values = dict(zip(names(whole), values(whole), strict=True))
  np.testing.assert_array_equal(
    values(few), [all_values[name] for name in names(few)]
  )


@pytest.mark.fault("changed-embeddings")
def test_changes_are_noticed_when_a_run_goes_on(place):
  """Another label is another data set, though no file has come or gone."""
  before = opened(place).data_files
  for file in sorted(place.glob("train/*.parquet"))[:1]:
    fake_embeddings.rewritten(
      file, with_column("label", lambda p, v: "bees" if broken(p) else v)
    )
  after = opened(place).data_files
  assert before.facts != after.facts
  assert before.files == after.files
  assert sorted(after.files) == [
    f"train/part-{i:05}-of-00003.parquet" for i in range(3)
  ]
  said = data_files.differences(before.table("files"), after.table("files"))
  assert len(said) == 1
  assert said[0].startswith(data_files.LISTED)


@pytest.mark.fault("changed-embeddings")
def test_another_run_of_embed_is_noticed(place):
  """By hosts with copies that have equal names and sizes, too."""
  before = opened(place).data_files
  for file in place.glob("train/*.parquet"):
    fake_embeddings.rewritten(file, changed_about(plan=64 * "0"))
  after = opened(place).data_files
  assert [*before.facts] == [*after.facts]
  [key] = [k for k, v in before.facts.items() if v != after.facts[k]]
  assert after.facts[key] == [64 * "0"]


@pytest.mark.fault("changed-embeddings")
@pytest.mark.parametrize("output", ["", "train"])
def test_embeddings_may_be_moved_while_a_run_is_stopped(place, output):
  """They are the same below a directory of another name."""
  before = opened(place / output).data_files.table("files")
  moved = place.parent / "elsewhere"
  shutil.copytree(place, moved)
  after = opened(moved / output).data_files.table("files")
  assert data_files.differences(before, after) == []
  assert before == after
  for file in moved.rglob("*.parquet"):
    file.touch()
  after = opened(moved / output).data_files.table("files")
  assert before != after
