"""Lists of images: what they hold, in which order, and what is wrong."""

import os
import pathlib

import fake_data
import numpy as np
import pytest

from memory_vit import config as config_lib
from memory_vit.config import DataConfig
from memory_vit.data import audit, data_files, datasets, file_list
from memory_vit.data.batching import eval_batches, train_batches
from memory_vit.data.datasets import open_split
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.model.task import EvalPreprocessing

PLAIN = EvalPreprocessing(image_size=8)


def write_list(root, lists, classes=None):
  """Writes {"train": "images/0.png 1\\n"}, and the pictures of all lines.

  The picture images/7.png has the grey value 7.
  """
  (root / "images").mkdir(parents=True)
  for stem, text in lists.items():
    (root / f"{stem}.txt").write_text(text)
    for line in text.splitlines():
      name, _ = line.rsplit(maxsplit=1)
      grey = fake_data.picture(int(pathlib.Path(name).stem))
      (root / name).write_bytes(fake_data.encode(grey, "PNG"))
  if classes is not None:
    (root / "classes.txt").write_text(classes)
  return root


def lines(numbers, classes=3):
  return "".join(f"images/{i}.png {i % classes}\n" for i in numbers)


@pytest.fixture
def prepared(tmp_path):
  """The layout in which the field hands out VTAB."""
  return write_list(
    tmp_path / "set",
    {
      "train80": lines(range(80)),
      "val20": lines(range(80, 100)),
      "train80val20": lines(range(100)),
      "test": lines(range(100, 110)),
    },
  )


def contents(reader):
  """[(grey value, label)], in order; of examples that can be read."""
  found = []
  for batch in eval_batches(reader, PLAIN, batch_size=8):
    for image, label in zip(
      batch["image"][batch["mask"] > 0], batch["label"][batch["mask"] > 0],
      strict=True,
    ):  # fmt: skip
      found.append((round(float(image.mean()) * 127.5 + 127.5), int(label)))
  return found


def test_lists_hold_what_their_lines_say(prepared):
  for junk in ("._train80.txt", ".test.csv", "~$val20.csv"):  # no lists
    (prepared / junk).write_bytes(b"\0\5\x16\7")
  for split, numbers in (
    ("train80", range(80)), ("val20", range(80, 100)),
    ("train80val20", range(100)), ("test", range(100, 110)),
    ("train80+val20", range(100)),
  ):  # fmt: skip
    reader = open_split("list", split, str(prepared))
    assert sorted(contents(reader)) == [(i, i % 3) for i in numbers]
    assert reader.class_names == ("0", "1", "2")


@pytest.mark.slow
def test_slices_are_fair_disjoint_and_those_of_a_folder(prepared):
  """The order is that of the names' hashes, whatever that of the lines."""
  first = contents(open_split("list", "train80[:50%]", str(prepared)))
  second = contents(open_split("list", "train80[50%:]", str(prepared)))
  assert sorted(first + second) == [(i, i % 3) for i in range(80)]
  assert np.bincount([label for _, label in first]).min() > 7
  (prepared / "train80.txt").write_text(lines(reversed(range(80))))
  again = contents(open_split("list", "train80[:50%]", str(prepared)))
  assert again == first
  # A folder with the same relative names has the same order.
  folder = prepared.parent / "folder"
  for i in range(9):
    (folder / "train" / "abc"[i % 3]).mkdir(parents=True, exist_ok=True)
    picture = fake_data.encode(fake_data.picture(i), "PNG")
    (folder / "train" / "abc"[i % 3] / f"{i}.png").write_bytes(picture)
  listed = [f"train/{'abc'[i % 3]}/{i}.png {i % 3}" for i in range(9)]
  (folder / "train.txt").write_text("\n".join(listed))
  as_folder = contents(open_split("folder", "train", str(folder)))
  assert contents(open_split("list", "train", str(folder))) == as_folder


def test_training_reads_lists(prepared):
  reader = open_split("list", "val20", str(prepared))
  batches = train_batches(
    reader, DataConfig(), image_size=8, batch_size=20, seed=0
  )
  epoch = sorted(int(label) for label in next(batches)["label"])
  assert epoch == sorted(i % 3 for i in range(80, 100))


def test_classes_have_the_names_of_their_file(tmp_path):
  root = write_list(
    tmp_path / "set", {"train": lines([0, 1])}, "ant\nbee \nréd fox\n"
  )
  # With it, the lists that are not read may be anything.
  (root / "README.txt").write_text("This is no list.\n")
  reader = open_split("list", "train", str(root))
  assert reader.class_names == ("ant", "bee", "réd fox")


def test_all_lists_have_the_same_classes(tmp_path):
  """Those of `train`, as in a folder; without it, those of all lists."""
  lists = {"train9": lines([0, 1]), "test": lines([5]), "val": lines([1])}
  root = write_list(tmp_path / "set", lists)
  assert open_split("list", "train9", str(root)).num_classes == 3
  (root / "train9.txt").rename(root / "train.txt")
  (root / "notes.txt").write_text("It is not read.")
  for split in ("train", "val", "train+val"):
    assert open_split("list", split, str(root)).class_names == ("0", "1")
  with pytest.raises(
    BrokenDataError,
    match=r"test.txt, line 1: its label is 2.*train.txt unless",
  ):
    open_split("list", "test", str(root))
  (root / "classes.txt").write_text("a\nb\nc")
  assert open_split("list", "test", str(root)).labels.tolist() == [2]


def test_lines_as_editors_write_them(tmp_path):
  root = write_list(tmp_path / "set", {"train": lines(range(3))})
  (root / "images/two words.png").write_bytes(
    fake_data.encode(fake_data.picture(9), "PNG")
  )
  (root / "train.txt").write_bytes(
    b"\xef\xbb\xbfimages/0.png 0\r\n\r\n./images//1.png\t1\r\n"
    b"images/two words.png   2"
  )
  reader = open_split("list", "train", str(root))
  assert sorted(contents(reader)) == [(0, 0), (1, 1), (9, 2)]


@pytest.mark.fault("wrong-label")
@pytest.mark.parametrize(
  ("text", "number", "message"),
  [
    (b"images/0.png", 1, "expected PATH LABEL"),
    (b"images/0.png 0\nimages/1.png x\n", 2, "expected PATH LABEL"),
    (b"images/0.png -1\n", 1, "expected PATH LABEL"),
    (b"images/0.png 1.0\n", 1, "expected PATH LABEL"),
    ("images/0.png ٣\n".encode(), 1, "expected PATH LABEL"),
    (b"\n\n0\n", 3, "expected PATH LABEL"),
    (b"/etc/passwd 0\n", 1, "leads out of the folder"),
    (b"images/../../0.png 0\n", 1, "leads out of the folder"),
    (b"\n.. 0\n", 2, "leads out of the folder"),
    (b". 0\n", 1, "leads out of the folder"),
    (b"images/\x000.png 0\n", 1, "is not a path"),
    (b"images/0.png 0\n./images/0.png 0\n", 2, "a second time"),
    (b"images/0.png 007\n", 1, "expected PATH LABEL"),
    (b"C:/images/0.png 0\n", 1, "leads out of the folder"),
    (b"C:\\images\\0.png 0\n", 1, "leads out of the folder"),
    (b"a" * 5001 + b" 0\n", 1, "more than 5,000 bytes"),
    (b"\x1b]0;owned\x07.png\n", 1, r"\\x1b\]0;owned"),
  ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path, text, number, message):
  root = write_list(tmp_path / "set", {})
  (root / "train.txt").write_bytes(text)
  with pytest.raises(
    BrokenDataError, match=rf"train.txt, line {number}: .*{message}"
  ):
    open_split("list", "train", str(root))


@pytest.mark.parametrize(
  ("classes", "message"),
  [
    (b"", "classes.txt.*is empty"),
    (b"ant\nant\n", "classes.txt.*line 2: 'ant' is .*expected the name"),
    (b"ant\n\nbee\n", "classes.txt.*line 2: '' is .*expected"),
    (b"\xff\n", "classes.txt.*line 1: .*UTF-8"),
    (b"ant\nbee\n", "train.txt, line 2: its label is 2, expected 0 to 1"),
  ],
)
def test_unusable_class_names_are_refused(tmp_path, classes, message):
  root = write_list(tmp_path / "set", {"train": lines([0, 2])})
  (root / "classes.txt").write_bytes(classes)
  with pytest.raises(BrokenDataError, match=message):
    open_split("list", "train", str(root))


def test_every_text_file_is_a_list_if_classes_have_no_names(prepared):
  (prepared / "README.txt").write_text("Pictures of pets.\n")
  with pytest.raises(BrokenDataError, match=r"README.txt, line 1.*classes.txt"):
    open_split("list", "test", str(prepared))


def test_special_and_oversized_lists_are_refused(tmp_path, monkeypatch):
  root = write_list(tmp_path / "set", {"train": lines([0])})
  os.mkfifo(root / "test.txt")
  with pytest.raises(BrokenDataError, match="test.txt: .*but a pipe"):
    open_split("list", "test", str(root))
  (root / "test.txt").unlink()
  monkeypatch.setattr(file_list, "_MOST_BYTES", 10)
  with pytest.raises(BrokenDataError, match="15 bytes, expected at most 10"):
    open_split("list", "train", str(root))
  monkeypatch.setattr(file_list, "_MOST_BYTES", 2**20)
  monkeypatch.setattr(file_list, "_MOST_LINES", 1)
  (root / "train.txt").write_text(lines([0, 0]))
  with pytest.raises(BrokenDataError, match="line 2: more than 1 lines"):
    open_split("list", "train", str(root))


@pytest.mark.parametrize(
  ("split", "message"),
  [
    ("train", "no split 'train': .*'test', 'train80'"),
    ("train80+nothing", "no split 'nothing'"),
    ("test[:0]", "is empty"),
    ("train80[:81]", "incompatible with 80"),
    ("train80[:", "no split"),
    ("classes", "no split 'classes'"),
  ],
)
def test_missing_splits_of_lists_are_refused(prepared, split, message):
  (prepared / "classes.txt").write_text("a\nb\nc\n")
  with pytest.raises(DataError, match=message):
    open_split("list", split, str(prepared))


@pytest.mark.parametrize("directory", ["", "not/there"])
def test_missing_folder_of_lists_is_refused(directory):
  with pytest.raises(DataError, match="config.data.dir"):
    open_split("list", "train", directory)


@pytest.mark.fault("broken-image")
def test_special_files_in_lists_are_never_read(tmp_path):
  root = write_list(tmp_path / "set", {"train": lines(range(2))})
  os.mkfifo(root / "images/pipe.png")
  (root / "images/device.png").symlink_to("/dev/zero")
  (root / "train.txt").write_text(
    lines(range(2)) + "images/pipe.png 0\nimages/device.png 1\nimages 2\n"
    "images/gone.png 0\nno/such.png 1\nimages/0.png/1.png 2\n"
  )
  with pytest.raises(BrokenDataError) as error:
    open_split("list", "train", str(root))
  for line in (
    "pipe.png) cannot be read: not a regular file, but a pipe",
    "device.png) cannot be read: not a regular file, but a device",
    "images) cannot be read: not a regular file, but a folder",
    "images/gone.png) cannot be read: it is not there",
    "no/such.png) cannot be read: it is not there (No such file",
    "images/0.png/1.png) cannot be read: it is not there (Not a directory",
  ):
    assert line in str(error.value)
  reader = open_split("list", "train", str(root), max_bad=6)
  assert sorted(contents(reader)) == [(0, 0), (1, 1)]


def test_every_problem_of_lists_is_reported(prepared):
  (prepared / "images/100.png").unlink()
  (prepared / "images/7.png").write_bytes(b"no picture")
  (prepared / "val20.txt").write_text(lines(range(79, 100)))
  values = config_lib.to_dict(config_lib.Config())
  values["data"] |= {
    "name": "list", "dir": str(prepared), "train": "train80",
    "validation": "val20",
  }  # fmt: skip
  report = audit.audit_data(config_lib.from_dict(values))
  assert not report["clean"]
  problems = [split["problems"] for split in report["splits"]]
  assert [len(found) for found in problems] == [1, 0, 1]
  assert "images/7.png" in problems[0][0]["where"]
  assert problems[2][0]["detail"] == "it is not there"
  (shared, *_) = report["duplicates"]
  assert (shared["splits"], shared["count"]) == (["train", "validation"], 1)
  (prepared / "test.txt").write_text("no list\n")
  report = audit.audit_data(config_lib.from_dict(values))
  assert "test.txt, line 1" in report["splits"][2]["problems"][0]["where"]


def test_lists_name_files_that_are_not_utf_8(tmp_path):
  root = write_list(tmp_path / "set", {"train": lines([0])})
  (root / "images/0.png").rename(root / "images" / os.fsdecode(b"\xff.png"))
  (root / "train.txt").write_bytes(b"images/\xff.png 0\n")
  reader = open_split("list", "train", str(root))
  assert contents(reader) == [(0, 0)]
  assert reader.file_name(0).endswith("/images/\\xff.png")


def test_changes_of_labels_and_of_images_are_noticed(prepared):
  def table():
    found = datasets.find_data_files(SplitRef("list", str(prepared), "val20"))
    return found.table("contents")

  before = table()
  assert len(before["files"]) == 20
  text = (prepared / "val20.txt").read_text()
  # Neither another order nor another time makes other data of it.
  (prepared / "val20.txt").write_text(
    "\n".join(sorted(text.splitlines(), reverse=True))
  )
  assert data_files.differences(before, table()) == []
  (prepared / "val20.txt").write_text(text.replace("80.png 2", "80.png 1"))
  (line,) = data_files.differences(before, table())
  assert line.startswith("listed paths and labels: ")
  (prepared / "val20.txt").write_text(text.replace("/80.png", "/a/80.png"))
  (prepared / "images/a").mkdir()
  (prepared / "images/80.png").rename(prepared / "images/a/80.png")
  count, labels, missing, new = data_files.differences(before, table())
  assert count == "1 missing, 1 new (of 20 files)"
  assert missing.strip() == "missing: images/80.png"
  assert new.strip() == "new: images/a/80.png"
