"""Tables as Excel, pandas and people write them: what a cell means."""

import os
import re
import types

import fake_data
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import random_task
from faults import Process, main_of

import memory_vit as mv
from configs import base
from memory_vit import config as config_lib
from memory_vit.commands import check_data
from memory_vit.data import audit, file_list, in_memory
from memory_vit.data.datasets import open_split
from memory_vit.errors import BrokenDataError, DataError


@pytest.fixture
def place(tmp_path):
  """Four images."""
  fake_data.write_folder(tmp_path, {"im": [f"{i}.png" for i in range(4)]})
  return tmp_path


def opened(place, split="train", **options):
  return open_split("list", split, str(place), **options)


def contents(split):
  """{image: what it is labelled with}."""
  names = [split.file_name(i).rpartition("/")[2] for i in range(split.size)]
  if split.kind == "classes":
    labels = [split.class_names[i] for i in split.labels]
  else:
    labels = split.labels.tolist()
  return dict(sorted(zip(names, labels, strict=True)))


def write(place, cells, file="train.csv"):
  rows = [("path", "label"), *((f"im/{i}.png", c) for i, c in enumerate(cells))]
  text = "".join(f'{path},"{cell}"\n' for path, cell in rows)
  (place / file).write_text(text)
  return place


@pytest.mark.parametrize(
  ("kind", "cells", "expected"),
  [
    ("classes", [" cat", "cat  ", "cat\u00a0", "\tdog"], "cat cat cat dog"),
    ("classes", ["e\u0301", "é", "e\u200b", "\ufeffe"], "é é e e"),
    ("classes", ["e \u200b", "\ufeff e", "a", "b"], "e e a b"),
    ("classes", ["3.0", "1.0", "1.00", "2"], "3 1 1 2"),
    ("classes", ["3.0", "cat", "3", "3"], "3.0 cat 3 3"),
    ("classes", ["007", "7", "-1", "a"], "007 7 -1 a"),
    ("classes", ["TRUE", "FALSE", "a,b", "a|b"], "TRUE FALSE a,b a|b"),
    ("values", ["5,13", "-0,5", "12,5", "1"], [5.13, -0.5, 12.5, 1]),
    ("values", [" 5.13", "1e3", "\u22125", "+.5"], [5.13, 1000, -5, 0.5]),
    ("values", ["0,125", "1,5", "TRUE", "false"], [0.125, 1.5, 1, 0]),
  ],
)
def test_cells_are_read_as_labels_of_their_kind(place, kind, cells, expected):
  split = opened(write(place, cells), kind=kind)
  found = list(contents(split).values())
  if kind == "classes":
    assert found == expected.split()
    assert split.class_names == tuple(sorted(set(found)))
  else:
    np.testing.assert_array_equal(found, np.float64(expected)[:, None])


@pytest.mark.fault("wrong-label")
@pytest.mark.parametrize(
  ("kind", "cells", "message"),
  [
    ("classes", ["0.5", "1", "2"], "the label 0.5 is not a class.*'values'"),
    ("classes", ["1", "-1"], "the label -1 is not a class.*without a label"),
    ("classes", ["1E+05", "7"], "the label 1E.05 is not a class"),
    ("classes", ["cat", " "], "row 2: its label is ' ', expected an integer"),
    ("values", ["1.5", "1,200"], "row 2: .*'1,200', whose comma may separate"),
    ("values", ["-1,200,300"], "row 1: .*whose comma may separate"),
    ("values", ["1,5", "2.500"], "row 2: .*'2.500', but other rows have"),
    ("values", ["1.200,5"], "row 1: its label is '1.200,5', expected a number"),
    ("values", ["1\u2009234"], "row 1: .*expected a number such as 1234.5"),
    ("values", ["1", "2", ""], "row 3: its label is '', expected a number"),
    ("values", ["5%"], "row 1: its label is '5%', expected .*a unit"),
    ("values", ["5 mm"], "row 1: .*expected a number"),
    ("values", ["NaN"], "row 1: its label is 'NaN', expected a number"),
    ("values", ["inf"], "row 1: its label is 'inf', expected a number"),
    ("values", ["1_000"], "row 1: .*expected a number"),
    ("values", ["1|2"], "row 1: .*or several numbers, such as .1.5, 2. or"),
    ("labels", ["a|b", "a|a "], "row 2: .*one label twice"),
    ("labels", ["a||b"], "row 1: .*expected a list of numbers or names"),
  ],
)
def test_unusable_cells_are_refused(place, kind, cells, message):
  with pytest.raises(BrokenDataError, match=message) as error:
    opened(write(place, cells), kind=kind)
  assert "\n" not in str(error.value)


def test_several_labels_and_values_of_a_cell(place):
  write(place, ["b|a", "a, b ", "-", " c|b"])
  split = opened(place, kind="labels")
  assert split.class_names == ("a", "b", "c")
  assert list(contents(split).values()) == [
    [1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 1, 1]
  ]  # fmt: skip
  write(place, ["[1, 2]", "[1.5,2]"])
  assert opened(place, kind="values").class_names == ("0", "1")
  write(place, ["1"], "test.csv")
  with pytest.raises(
    BrokenDataError, match=r"test.csv, row 1: .*expected 2.*train.csv unless"
  ):
    opened(place, "test", kind="values")
  write(place, ["1"])
  write(place, ["[1, 2]"], "test.csv")
  with pytest.raises(
    BrokenDataError, match=r"test.csv, row 1: .*2 numbers.*label.*train.csv un"
  ):
    opened(place, "test", kind="values")


HEADER, ROWS = ("path", "label"), [("im/0.png", "réd"), ("im/1.png", "a;b,c")]


def as_csv(delimiter=",", end="\n", header=HEADER, rows=ROWS):
  def line(cells):
    return delimiter.join(
      f'"{c}"' if set(",;\t|\n") & {*c} else c for c in cells
    )

  return "".join(line(row) + end for row in [header, *rows])


def parquet_bytes(**columns):
  sink = pa.BufferOutputStream()
  pq.write_table(pa.table(columns), sink)
  return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("train.csv", as_csv(";").encode("utf-8-sig")),
    ("train.csv", as_csv("\t", "\r\n").encode("utf-16")),
    ("train.txt", as_csv("\t", "\r\n").encode("utf-16")),
    ("train.txt", as_csv("\t").encode()),
    ("train.tsv", as_csv("\t").encode()),
    ("train.CSV", as_csv("|", "\r").encode()),
    ("train.csv", ("sep=;\r\n" + as_csv(";", "\r\n")).encode("utf-8-sig")),
    ("train.csv", ('"sep=\t"\n' + as_csv("\t")).encode()),
    ("train.csv", as_csv(header=("Path ", " LABEL")).encode()),
    ("train.csv", as_csv(end=",,\n").encode() + b",,,\n\n , ,\n"),
    (
      "train.csv",
      as_csv(
        header=("note", *HEADER, "label2"),
        rows=[("two\nlines", *row) for row in ROWS],
      ).encode(),
    ),
    ("train.csv", as_csv(rows=[(f" {p} ", f"{n} ") for p, n in ROWS]).encode()),
    (
      "train.PARQUET",
      parquet_bytes(path=["im/0.png", "im/1.png"], Label=["réd", "a;b,c"]),
    ),
  ],
  ids=[
    "semicolons", "UTF-16", "Excel's Unicode text", "Excel's text", "tabs",
    "bars and old Mac", "Excel's sep", "sep in quotes", "header",
    "empty columns and rows", "line breaks", "white space", "Parquet",
  ],
)  # fmt: skip
def test_dialects_of_csv_are_read(place, name, content):
  (place / name).write_bytes(content)
  for junk in ("._train.csv", "~$train.csv", ".~lock.train.csv#", ".train.txt"):
    (place / junk).write_bytes(b"\0\5\x16\7")
  split = opened(place)
  assert split.class_names == ("a;b,c", "réd")
  assert contents(split) == {"0.png": "réd", "1.png": "a;b,c"}
  (place / "Classes.TXT").write_text("réd \na;b,c\n")
  assert opened(place).class_names == ("réd", "a;b,c")


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (
      as_csv().encode("cp1252"),
      r"is not UTF-8 \(byte 0xe9\): save it as UTF-8",
    ),
    (as_csv().encode("utf-16")[:-1], "is not UTF-16"),
    (
      b"im/0.png,cat\nim/1.png,dog\n",
      "has 0 columns 'path'.*'im/0.png', 'cat'",
    ),
    (b"filename,label\n", "has 0 columns 'path'.*config.data.path names"),
    (b"path,label\nim/0.png,5,13\n", "row 1 has 3 cells.*has 2.*in quotes"),
    (
      b'path,label\nim/0.png,"cat\nim/1.png,dog\n',
      "cannot be read: unexpected",
    ),
    (b"Path,path,label,Label,LABEL\nx,im/0.png,a,b,c\n", None),
    (b"Path,PATH,label\n", "has 2 columns 'path'"),
  ],
)
def test_unusable_tables_are_refused(place, content, message):
  (place / "train.csv").write_bytes(content)
  if message is None:
    assert contents(opened(place)) == {"0.png": "a"}
    return
  with pytest.raises(DataError, match=message) as error:
    opened(place)
  assert "\n" not in str(error.value)


def test_the_column_of_the_paths_and_one_list_alone(place):
  text = "Image,n\n" + "".join(f"im/{i}.png,{i % 2}\n" for i in range(4))
  (place / "labels.csv").write_text(text)
  with pytest.raises(DataError, match=r"has 'labels'.*train='labels\[:80%\]'"):
    opened(place, path="image", label="n")
  train, rest = (
    contents(opened(place, f"labels[{part}]", path="image", label="n"))
    for part in (":50%", "50%:")
  )
  assert train | rest == {f"{i}.png": str(i % 2) for i in range(4)}
  assert contents(opened(place, "labels", path="IMAGE", label="N")) == (
    train | rest
  )
  for label in ("image", "n,n", "n,image,n"):
    with pytest.raises(DataError, match=f"label is '{label}'.*different col"):
      opened(place, "labels", path="image", label=label, kind="labels")
  with pytest.raises(DataError, match="a column of a table, but data set"):
    open_split("digits", "train", path="image")
  (place / "labels.csv").unlink()
  (place / "train.txt").write_text("im/0.png 0")
  with pytest.raises(DataError, match="config.data.path is 'image', a column"):
    opened(place, path="image")


@pytest.mark.fault("broken-image")
def test_list_with_the_name_all_is_refused(place):
  write(place, "abab", "all.csv")
  with pytest.raises(DataError, match="a split 'all', which means all splits"):
    opened(place, "all")


def test_paths_of_other_systems_are_read_or_explained(place):
  rows = [
    (str(place / "im/0.png"), "here"), ("im/./1.png", "here"),
    (r"im\2.png", "written on Windows. Use /"),
    ("im/3.PNG", "not there, but '3.png' is .other case"),
    ("im/cafe\u0301.png", "not there, but 'café.png' is .*Unicode"),
    ("im/9.png", "it is not there$"),
  ]  # fmt: skip
  (place / "im/2.png").rename(place / "im/café.png")
  (place / "train.csv").write_text(as_csv(rows=rows))
  split = opened(place, max_bad=4)
  reasons = {split.file_name(i): why for i, why in split.unreadable.items()}
  assert len(reasons) == 4
  (place / "link").symlink_to(place)
  assert len(opened(place / "link", max_bad=4).unreadable) == 4
  for path, message in rows[2:]:
    [why] = [w for p, w in reasons.items() if p.endswith(path)]
    assert re.search(message, why)
  (place / "train.csv").write_text(as_csv(rows=rows[2:]))
  with pytest.raises(
    BrokenDataError, match=r"none of its 4 .*: .*is not there"
  ):
    opened(place, max_bad=4)


def numbers_everywhere(place, labels):
  """Splits with the same labels: of a list, Parquet, Python, a folder."""
  write(place, labels)
  yield opened(place)
  (place / "train.csv").unlink()
  paths = [f"im/{i}.png" for i in range(len(labels))]
  pq.write_table(
    pa.table({"path": paths, "label": labels}), place / "x.parquet"
  )
  yield opened(place, "x")
  pixels = np.stack([fake_data.picture(i) for i in range(len(labels))])
  for given in (labels, np.array(labels), [*map(str, labels)]):
    yield in_memory.open_data((pixels, given), "own", "train")
  for i, label in enumerate(labels):
    folder = place / "data/train" / str(label)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{i}.png").write_bytes((place / f"im/{i}.png").read_bytes())
  yield open_split("folder", "train", str(place / "data"))


@pytest.mark.parametrize(
  ("labels", "names"),
  [
    ([1, 0, 2, 1], "0 1 2"),
    ([3, 1, 2, 1], "1 2 3"),
    ([101, 9, 100000, 9], "9 101 100000"),
    ([i % 12 for i in range(24)], " ".join(map(str, range(12)))),
  ],
)
def test_numbers_have_one_order_everywhere(place, labels, names, caplog):
  for i in range(4, len(labels)):
    content = fake_data.encode(fake_data.picture(i), "PNG")
    (place / f"im/{i}.png").write_bytes(content)
  for split in numbers_everywhere(place, labels):
    assert split.class_names == tuple(names.split())
    found = [split.class_names[label] for label in split.labels]
    assert sorted(found) == sorted(map(str, labels))
  said = [line for line in caplog.text.splitlines() if "as names" in line]
  assert len(said) == 0 if names.startswith("0 ") else len(said) == 2


def test_numbers_of_known_classes():
  """Labels of a validation split, or of data to evaluate a task on."""
  pixels = np.stack([fake_data.picture(i) for i in range(4)])

  def labels_of(given, names):
    split = in_memory.open_data((pixels[: len(given)], given), "a", "v", names)
    return split.labels.tolist()

  assert labels_of([3, 1], ("1", "2", "3")) == [2, 0]
  assert labels_of([1, 2], ("1", "2", "3")) == [0, 1]
  assert labels_of([0, 2], ("1", "2", "3")) == [0, 2]
  assert labels_of([1, 0], ("a", "b")) == [1, 0]
  with pytest.raises(DataError, match="its label is 4"):
    labels_of([4, 0], ("1", "2", "3"))


def test_tasks_keep_their_classes(place, backbone):
  """Older tasks have another order, and classes without an image."""
  task = random_task(
    backbone, "old", classes=4, class_names=("0", "1", "10", "9")
  )
  folder = place / "data/train"
  for i, name in enumerate(("1", "10", "9")):
    (folder / name).mkdir(parents=True)
    (place / f"im/{i}.png").rename(folder / name / f"{i}.png")
  split = open_split("folder", "train", str(place / "data"))
  assert split.class_names == ("1", "9", "10")
  found = mv.evaluate_tasks(backbone, task, str(folder))
  assert found["old"].examples == 3
  names = task.spec.class_names
  split = in_memory.open_data(str(folder), "a", "b", names)
  assert split.class_names == names
  assert contents(split) == {"0.png": "1", "1.png": "10", "2.png": "9"}
  fetched = [int(split.source.read(i)[1]) for i in range(3)]
  assert fetched == split.labels.tolist()


@pytest.mark.fault("wrong-label")
def test_two_labels_in_lists_of_0_and_1(place):
  """Numbers of labels, or 1 and 0 for each: only other types tell."""
  paths = [f"im/{i}.png" for i in range(4)]
  hot = [[1, 0], [0, 1], [1, 0], [1, 0]]
  for kind in (pa.int8(), pa.int64(), pa.float32(), pa.bool_()):
    for type_ in (pa.list_(kind), pa.list_(kind, 2)):
      column = pa.array(hot, pa.list_(pa.int8())).cast(pa.list_(kind))
      table = pa.table({"path": paths, "label": column.cast(type_)})
      pq.write_table(table, place / "train.parquet")
      if pa.types.is_integer(kind):
        with pytest.raises(BrokenDataError, match="list<bool> of Parquet"):
          opened(place, kind="labels")
      else:
        assert opened(place, kind="labels").labels.sum(0).tolist() == [3, 1]
  write(place, ["[1, 0]", "[0, 1]"], "test.csv")
  (place / "train.parquet").unlink()
  with pytest.raises(BrokenDataError, match=r"\[true, false\]"):
    opened(place, "test", kind="labels")


def test_sizes_are_limited_before_they_are_made(place, monkeypatch):
  write(place, ["0", "1048575", "0"])
  assert opened(place, kind="labels").labels.shape == (3, 2)
  (place / "classes.txt").write_text("\n".join(map(str, range(2**16))))
  free = types.SimpleNamespace(available=2**20)
  monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
  refusal = "3 examples with 65,536 labels .* 0.0 GiB"
  with pytest.raises(DataError, match=refusal):
    opened(place, kind="labels")
  monkeypatch.undo()
  (place / "train.csv").unlink()
  (place / "classes.txt").unlink()
  table = pa.table({"path": ["im/0.png"] * 2**17, "label": [0] * 2**17})
  pq.write_table(table, place / "train.parquet")
  with pytest.raises(BrokenDataError, match="row 2: .*a second time"):
    opened(place)
  monkeypatch.setattr(file_list, "_MOST_LINES", 2**17 - 1)
  with pytest.raises(BrokenDataError, match="131,072 rows, expected at most"):
    opened(place)


@pytest.mark.fault("special-file")
def test_special_files_as_lists_are_refused(place):
  for name, make in (
    ("train.csv", os.mkfifo),
    ("train.parquet", lambda path: path.symlink_to("/dev/zero")),
    ("train.txt", lambda path: path.symlink_to("/dev/zero")),
  ):
    make(place / name)
    with pytest.raises(BrokenDataError, match=f"{name}: not a regular file"):
      opened(place)
    (place / name).unlink()


@pytest.mark.processes
def test_equal_path_and_label_columns_are_refused_on_the_command_line(place):
  write(place, ["a", "b"])
  command = [
    "check_data", "--config=configs/folder.py", "--config.data.name=list",
    f"--config.data.dir={place}", "--config.data.label=path",
  ]  # fmt: skip
  with Process(main_of("memory_vit"), command, place / "log") as process:
    process.wait()
  assert process.status == 2
  assert "Traceback" not in process.text
  assert "config.data.label is 'path'" in process.text


def test_check_data_reports_columns(place):
  write(place, [" cat", "3.0", "cat", "dog"])
  values = base.get_config()
  values.data.update(name="list", dir=str(place), train="train")
  values.data.validation = values.data.test = ""
  report = audit.audit_data(config_lib.from_dict(values.to_dict()))
  shown = check_data.text(report)
  assert (
    "train.csv: column 'path' holds paths: 'im/0.png' is 'im/0.png'" in shown
  )
  assert (
    "train.csv: column 'label' holds classes: ' cat' is 'cat', '3.0' is '3.0', "
    "'cat' is 'cat'"
  ) in shown
  for kind, cell, expected in (
    ("values", "1,5", "column 'label' holds values: '1,5' is [1.5]"),
    ("labels", "b|a", "column 'label' holds labels: 'b|a' is ['a', 'b']"),
  ):
    values.task.kind = kind
    write(place, [cell] * 4)
    report = audit.audit_data(config_lib.from_dict(values.to_dict()))
    assert f"{expected}\n" in check_data.text(report)
