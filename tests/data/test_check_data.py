"""The command that walks a data set and says what is wrong with it."""

import contextlib
import dataclasses
import json
import os
import re
import shutil

import fake_data
import pytest
import tensorflow_datasets as tfds
from fake_data import encode, noise
from faults import Process, main_of

from configs import base
from memory_vit import config as config_lib
from memory_vit.commands import check_data
from memory_vit.data import audit, open_split, watchdog
from memory_vit.errors import BrokenDataError, ConfigError, DataError


def config_of(name, directory, **data):
  values = base.get_config()
  values.data.name, values.data.dir = name, str(directory)
  values.data.train, values.data.validation = "train", ""
  values.data.update(data)
  return config_lib.from_dict(values.to_dict())


def write(root, files):
  """{"train/a/0.png": bytes}."""
  for name, content in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
  return root


def pictures(split, count, seed):
  return {
    f"{split}/{label}/{i}.png": encode(noise(seed + 50 * j + i, 9, 8), "PNG")
    for j, label in enumerate("ab")
    for i in range(count)
  }


def kinds(entry):
  found = {}
  for problem in entry["problems"]:
    found.setdefault(problem["kind"], []).append(problem["where"])
  return found


def test_clean_folder(tmp_path):
  write(tmp_path, pictures("train", 4, 0) | pictures("test", 2, 500))
  report = audit.audit_data(config_of("folder", tmp_path))
  assert report["clean"] is True
  train, test = report["splits"]
  assert (train["role"], test["role"]) == ("train", "test")
  assert train["per_class"] == {"a": 4, "b": 4}
  assert train["labels"] == (0, 1)
  assert (test["examples"], test["classes"], test["repeated"]) == (4, 2, 0)
  assert train["smallest"] == train["largest"] == (8, 9)
  assert train["kinds"] == {"PNG RGB": 8}
  assert report["duplicates"] == [
    {"splits": ["train", "test"], "count": 0, "pairs": []}
  ]
  json.dumps(report)
  assert check_data.text(report).endswith("\nclean")


@pytest.mark.fault("broken-image")
def test_every_problem_of_a_folder_is_reported(tmp_path):
  rgb = fake_data.Image.fromarray(noise(900))
  turned = fake_data.Image.Exif()
  turned[0x0112] = 3
  files = pictures("train", 3, 0) | pictures("test", 2, 500)
  files |= {
    "train/a/text.png": b"no picture",
    "train/a/half.jpg": encode(noise(1), "JPEG")[:400],
    "train/b/pixel.png": encode(noise(2, 1, 1), "PNG"),
    "train/b/line.png": encode(noise(3, 5000, 1), "PNG"),
    "train/b/long.png": encode(noise(4, 400, 5), "PNG"),
    "train/a/cmyk.jpg": encode(rgb.convert("CMYK"), "JPEG"),
    "train/a/turned.jpg": encode(rgb, "JPEG", exif=turned),
    "train/c/only.png": b"\x89PNG\r\n\x1a\n",
    "test/a/from-train.png": files["train/b/1.png"],
    "test/b/again.png": files["test/a/0.png"],
  }
  write(tmp_path, files)
  report = audit.audit_data(config_of("folder", tmp_path))
  assert report["clean"] is False
  train, test = report["splits"]

  def files_of(kind):
    return sorted(
      where.rpartition("/train/")[2].rstrip(")") for where in kinds(train)[kind]
    )

  assert files_of("cannot be read") == [
    "a/half.jpg",
    "a/text.png",
    "c/only.png",
  ]
  assert files_of("one pixel wide or high") == ["b/line.png", "b/pixel.png"]
  assert files_of("more than 32 times as long as wide") == ["b/long.png"]
  assert kinds(train)["class without an image"] == ["c"]
  shown = check_data.text(report)
  assert re.search(r"^train .* 0 to 6  ", shown, re.MULTILINE)
  assert train["per_class"] == {"a": 5, "b": 6, "c": 0}
  assert train["kinds"] == {"PNG RGB": 9, "JPEG CMYK": 1, "JPEG RGB": 1}
  assert train["turned"] == 1
  assert (train["smallest"], train["largest"]) == ((1, 1), (1, 5000))
  assert kinds(test) == {}
  assert test["repeated"] == 1
  [found] = report["duplicates"]
  [(first, second)] = found["pairs"]
  assert first.endswith("train/b/1.png)")
  assert second.endswith("test/a/from-train.png)")
  shown = check_data.text(report)
  assert "train: cannot be read: 3" in shown
  assert "not a whole JPEG" in shown
  assert "; 1 turned, as EXIF says" in shown
  assert "train and test share 1 files:" in shown
  assert shown.endswith("NOT clean: see above")


def test_a_damaged_file_is_named_without_what_tensorflow_says_around(tmp_path):
  jpeg = encode(noise(1, 60, 60), "JPEG")
  png = encode(noise(1, 60, 60), "PNG")
  bad = {"train/a/x.jpg": jpeg[:400], "train/a/y.png": png[:500]}
  write(tmp_path, pictures("train", 2, 0) | bad)
  config = config_of("folder", tmp_path, test="")
  report = audit.audit_data(config)
  details = {p["detail"] for p in report["splits"][0]["problems"]}
  assert len(details) == 2
  for detail in details:
    assert detail.startswith(("not a whole JPEG file", "not a whole PNG file"))


def test_images_of_deeper_folders_and_what_is_skipped(tmp_path):
  deeper = {
    name.replace("/a/", "/a/sub/"): content
    for name, content in pictures("train", 4, 0).items()
  }
  write(tmp_path, deeper | {"train/b/x.txt": b"", "train/b/.DS_Store": b""})
  config = config_of("folder", tmp_path, test="")
  report = audit.audit_data(config)
  assert report["clean"]
  [train] = report["splits"]
  assert train["per_class"] == {"a": 4, "b": 4}
  [line] = train["skipped"]
  assert "1 hidden (b/.DS_Store), 1 with other suffixes (b/x.txt)" in line
  assert line in check_data.text(report)


@pytest.mark.fault("broken-image")
def test_hidden_files_of_other_systems_are_skipped(tmp_path):
  """What macOS, Synology, Windows and Jupyter leave there is left out."""
  junk = dict.fromkeys(
    [
      "__MACOSX/a/._0.png", "a/._0.png", "a/@eaDir/0.png/SYNO_THUMB_M.jpg",
      "a/Thumbs.db", "b/desktop.ini", "b/.ipynb_checkpoints/0-checkpoint.png",
      "b/~$notes.png", "a/.DS_Store",
    ],
    b"junk",
  )  # fmt: skip
  junk = {f"train/{name}": content for name, content in junk.items()}
  write(tmp_path, pictures("train", 3, 0) | pictures("test", 2, 500) | junk)
  report = audit.audit_data(config_of("folder", tmp_path))
  assert report["clean"]
  [train, test] = report["splits"]
  assert train["per_class"] == {"a": 3, "b": 3}
  [line] = train["skipped"]
  assert "8 hidden (" in line
  assert "__MACOSX" in line
  # A class without an image, or that train lacks, does not hide the rest.
  for name in ("test/b/0.png", "test/b/1.png"):
    (tmp_path / name).rename(tmp_path / name.replace(".png", ".txt"))
  write(tmp_path, {"test/c/0.png": b"junk", "test/a/0.png": b"junk"})
  report = audit.audit_data(config_of("folder", tmp_path))
  [train, test] = report["splits"]
  assert train["problems"] == []
  [broken] = kinds(test)["cannot be read"]
  assert broken.endswith("test/a/0.png)")
  unknown, empty = kinds(test)["refused"]
  assert unknown.endswith("test has classes that train/ does not have: ['c'].")
  assert "has no images (.jpg, .jpeg" in empty
  for line in (unknown, empty):
    assert line in check_data.text(report)
  with pytest.raises(BrokenDataError, match="does not have: .'c'"):
    open_split("folder", "test", str(tmp_path))


@pytest.mark.fault("wrong-label")
def test_a_single_class_is_a_problem(tmp_path):
  write(tmp_path, {
    name.replace("train/", "train/all/"): content
    for name, content in pictures("train", 4, 0).items()
  })  # fmt: skip
  report = audit.audit_data(config_of("folder", tmp_path, test=""))
  assert not report["clean"]
  [where] = kinds(report["splits"][0])["a single class"]
  assert where == "'all'"
  assert "train/all/CLASS" in check_data.text(report)


@pytest.mark.fault("special-file")
def test_special_files_do_not_hang_the_check(tmp_path):
  write(tmp_path, pictures("train", 3, 0) | pictures("test", 2, 500))
  os.mkfifo(tmp_path / "train/a/pipe.png")
  (tmp_path / "test/b/zero.png").symlink_to("/dev/zero")
  report = audit.audit_data(config_of("folder", tmp_path))
  train, test = report["splits"]
  assert [p["detail"] for p in train["problems"] + test["problems"]] == [
    "not a regular file, but a pipe", "not a regular file, but a device",
  ]  # fmt: skip
  assert (train["per_class"], test["per_class"]) == (
    {"a": 3, "b": 3}, {"a": 2, "b": 2},
  )  # fmt: skip


def test_stalled_reading_ends_the_check(tmp_path, monkeypatch):
  """By the limit of the configuration, for every so many pictures."""
  write(tmp_path, pictures("train", 3, 0))
  waited = []

  @contextlib.contextmanager
  def limit(seconds, what):
    waited.append((seconds, what))
    yield

  monkeypatch.setattr(watchdog, "limit", limit)
  monkeypatch.setattr("memory_vit.data.split._AT_ONCE", 4)
  config = config_of("folder", tmp_path, test="")
  config = dataclasses.replace(config, stall_timeout=7.0)
  (entry,) = audit.audit_data(config)["splits"]
  assert entry["per_class"] == {"a": 3, "b": 3}
  what = f"data set 'folder {tmp_path.name}', split 'train', from example"
  assert waited == [(7.0, f"{what} 0 on"), (7.0, f"{what} 4 on")]


@pytest.mark.fault("control-characters")
def test_file_names_that_are_not_utf_8_are_reported(tmp_path):
  write(tmp_path, pictures("train", 2, 0))
  odd = os.fsdecode(b"\xff\xfe.png")
  shutil.copy(tmp_path / "train/a/0.png", tmp_path / "train/a" / odd)
  (tmp_path / "train/b" / odd).write_bytes(b"no picture")
  config = config_of("folder", tmp_path, test="")
  report = audit.audit_data(config)
  (entry,) = report["splits"]
  assert entry["per_class"] == {"a": 3, "b": 2}
  (problem,) = entry["problems"]
  assert "train/b/\\xff\\xfe.png)" in problem["where"]
  json.dumps(report).encode("utf-8")
  check_data.text(report).encode("utf-8")
  (tmp_path / "train" / os.fsdecode(b"cat\xff")).mkdir()
  (entry,) = audit.audit_data(config)["splits"]
  (problem,) = entry["problems"]
  assert r"train/cat\xff is not UTF-8" in problem["where"]


def test_imbalance_is_reported_but_clean(tmp_path):
  files = pictures("train", 10, 0)
  config = config_of("folder", tmp_path, test="")
  for i in range(2, 10):
    del files[f"train/b/{i}.png"]
  write(tmp_path, files)
  (entry,) = audit.audit_data(config)["splits"]
  assert entry["balance"] == {
    "fewest": ("b", 2), "most": ("a", 10), "ratio": 5.0, "share": 10 / 12,
    "imbalanced": False,
  }  # fmt: skip
  (tmp_path / "train/b/1.png").unlink()
  report = audit.audit_data(config)
  assert report["clean"] is True
  assert report["splits"][0]["balance"]["imbalanced"] is True
  assert "--config.optim.class_weights=balanced" in check_data.text(report)
  shown = check_data.text(report)
  assert "images per class from 1 (b) to 10 (a), ratio 10.0" in shown
  assert "always predicting 'a' is right for 90.9 %" in shown
  json.dumps(report)


FEATURES = tfds.features.FeaturesDict(
  {
    "image": tfds.features.Image(shape=(None, None, 3)),
    "label": tfds.features.ClassLabel(num_classes=3),
  }
)


def test_broken_records_are_reported_with_their_shard(tmp_path):
  directory = fake_data.write_adhoc(
    tmp_path, "own", FEATURES, {"train": [0, 1, 2] * 4, "test": [0]}
  )
  fake_data.reshard(directory, "train", [6, 6])
  [first, second] = sorted(directory.glob("*train*"))
  fake_data.flip_bit(first, fake_data.record_start(first, 2) + 20)
  second.write_bytes(second.read_bytes()[:-1])
  report = audit.audit_data(config_of("own", tmp_path))
  train, test = report["splits"]
  places = kinds(train)["cannot be read"]
  assert f"{first}, record 2 of 6" in places[0]
  assert f"{second}, record 5 of 6" in places[1]
  details = [p["detail"] for p in train["problems"]]
  assert "checksum" in details[0]
  assert "last good record: 4" in details[1]
  assert sum(train["per_class"].values()) == 10
  assert test["problems"] == []


@pytest.mark.fault("wrong-label")
def test_wrong_labels_are_reported(tmp_path):
  labels = [0, 1, 2, 0, -1, 1]  # the first that is read is not the -1
  fake_data.write_adhoc(
    tmp_path, "own", FEATURES, {"train": labels, "test": [-1]}, "array_record"
  )
  report = audit.audit_data(config_of("own", tmp_path))
  train, test = report["splits"]
  [problem] = train["problems"]
  assert problem["kind"] == "label is not a class"
  assert problem["detail"] == "-1, expected 0 to 2"
  assert train["labels"] == (-1, 2)
  assert sum(train["per_class"].values()) == 5
  assert "labels -1: an unlabelled" in kinds(test)["cannot be opened"][0]
  assert not report["clean"]


def test_configured_or_given_splits_are_checked(tmp_path):
  config = config_of("digits:0-4", "")
  upstream = dataclasses.replace(config.upstream, name="digits:5-9")
  config = dataclasses.replace(config, upstream=upstream)
  found = audit.splits_to_audit(config, ())
  assert [(role, ref.split) for role, ref in found.items()] == [
    ("train", "train"), ("test", "test"), ("upstream", "test"),
  ]  # fmt: skip
  found = audit.splits_to_audit(config, ["train[:5]", "test"])
  assert list(found) == ["train[:5]", "test"]
  report = audit.audit_data(config, ["train[:5]", "train[4:8]"])
  assert [e["examples"] for e in report["splits"]] == [5, 4]
  # Splits that overlap share files.
  assert report["duplicates"][0]["count"] == 1
  assert not report["clean"]


def test_bad_usage_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="config.data.name is empty"):
    audit.audit_data(config_of("", ""))
  with pytest.raises(DataError, match="no split 'val'"):
    audit.audit_data(config_of("digits", ""), ["val"])
  with pytest.raises(DataError, match="not there"):
    audit.audit_data(config_of("folder", tmp_path / "no"))


@pytest.mark.fault("broken-image")
@pytest.mark.processes
def test_exit_status(tmp_path):
  write(tmp_path, pictures("train", 3, 0) | pictures("test", 2, 500))

  def status(*arguments):
    command = ["check_data", *arguments]
    with Process(main_of("memory_vit"), command, tmp_path / "log") as process:
      process.wait()
    assert "Traceback" not in process.text
    return process.status, process.printed + process.text

  config = ("--config=configs/folder.py", f"--config.data.dir={tmp_path}",
            "--config.data.train=train",
            "--config.data.validation=")  # fmt: skip
  file = tmp_path / "report.json"
  assert status(*config, f"--json={file}")[0] == 0
  assert json.loads(file.read_text())["clean"] is True
  (tmp_path / "train/a/0.png").write_bytes(b"no picture")
  code, shown = status(*config, f"--json={file}")
  assert code == 1
  assert "train/a/0.png): not a JPEG" in shown
  assert json.loads(file.read_text())["clean"] is False
  thesis = tmp_path / "thesis.txt"
  thesis.write_text("mine")
  for arguments, message in (
    ((*config, f"--json={thesis}"), "thesis.txt"),
    ((), "--config"),
    (("--config=configs/no.py",), "configs/no.py"),
    ((*config, "--unknown"), "unknown"),
    ((*config, "left over"), "left over"),
    ((*config, "--split=nope"), "no split 'nope'"),
    ((*config, f"--json={tmp_path}/no/x.json"), "--json"),
    ((*config, "--config.data.nme=x"), "nme"),
  ):
    code, shown = status(*arguments)
    assert code == 2, arguments
    assert message in shown
