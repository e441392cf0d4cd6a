"""Data that is not what a run began with is noticed, and what differs named."""

import json
import os
import pathlib
import shutil
import signal
import types

import fake_data
import jax
import pytest
from conftest import tiny_backbone
from faults import Run

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.data import data_files
from memory_vit.data.data_record import DataRecord
from memory_vit.data.datasets import find_data_files, open_split
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import TrainingError
from memory_vit.runtime import processes
from memory_vit.train import settle
from memory_vit.train import state as state_lib


def write_pictures(root):
  """12 pictures of two classes to train on, 4 to test."""
  for split, count in (("train", 12), ("test", 4)):
    for label in "ab":
      (root / split / label).mkdir(parents=True)
      for i in range(count):
        picture = fake_data.noise(100 * len(split) + 20 * ord(label) + i, 9, 9)
        content = fake_data.encode(picture, "PNG")
        (root / split / label / f"{i}.png").write_bytes(content)
  return root


def record_of(root, directory, by="files", **splits):
  splits = splits or {"train": "train", "test": "test"}
  sources = {
    key: open_split("folder", split, str(root)) for key, split in splits.items()
  }
  return DataRecord(
    directory=directory / "inventory",
    by=by,
    data_files={key: reader.data_files for key, reader in sources.items()},
  )


@pytest.fixture
def pictures(tmp_path):
  return write_pictures(tmp_path / "pictures")


# --- what is done to the data -------------------------------------------------


def replace_all(root):
  for i, file in enumerate(sorted(root.glob("train/*/*.png"))):
    picture = fake_data.noise(7000 + i, 9, 9)
    file.write_bytes(fake_data.encode(picture, "PNG"))


def swap_labels(root):
  (root / "train/a").rename(root / "train/c")
  (root / "train/b").rename(root / "train/a")
  (root / "train/c").rename(root / "train/b")


def move_two(root):
  (root / "train/a/3.png").rename(root / "train/b/from-a-3.png")
  (root / "train/b/5.png").rename(root / "train/a/from-b-5.png")


def rename_one(root):
  (root / "train/a/3.png").rename(root / "train/a/three.png")


def replace_a_test_picture(root):
  shutil.copyfile(root / "test/a/0.png", root / "test/b/1.png")


def touch(root):
  for file in root.glob("*/*/*.png"):
    os.utime(file, ns=(5, 5))


CHANGES = {
  replace_all: ("train: 24 changed (of 24 files)", "changed: train/a/0.png, "),
  swap_labels: (
    "train: 24 changed (of 24 files)", "changed: train/a/0.png, ",
    "and 19 more",
  ),
  move_two: (
    "train: 2 missing, 2 new (of 24 files)",
    "missing: train/a/3.png, train/b/5.png",
    "new: train/a/from-b-5.png, train/b/from-a-3.png",
  ),
  rename_one: (
    "train: 1 missing, 1 new (of 24 files)", "missing: train/a/3.png",
    "new: train/a/three.png",
  ),
  replace_a_test_picture: (
    "test: 1 changed (of 8 files)", "changed: test/b/1.png",
  ),
}  # fmt: skip


# --- whole commands -----------------------------------------------------------

# In the midst of a run, with steps 5 and 10 saved.
KILLED = """
import os, signal
from memory_vit.runtime.preemption import StopSignal
taken = []
def kills(self):
  taken.append(1)
  if len(taken) == 13:
    os.kill(os.getpid(), signal.SIGKILL)
  return False
StopSignal.is_wanted = kills
"""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(tiny_backbone(num_classes=5, depth=1), path)
  return path


def run_on(backbone, root, workdir, **options):
  options = {
    "data.name": "folder", "data.dir": root, "data.train": "train",
    "data.validation": "", "task.name": "ab", "total_steps": 20,
    "batch_size_eval": 8, "checkpoint_every": 5, **options,
  }  # fmt: skip
  return Run(backbone, workdir, **options)


@pytest.fixture(scope="module")
def killed(backbone, tmp_path_factory):
  """(a run that was killed, its pictures); not to be changed."""
  path = tmp_path_factory.mktemp("killed")
  root = write_pictures(path / "pictures")
  run = run_on(backbone, root, path / "run")
  with run.start(KILLED) as process:
    assert process.wait() == -signal.SIGKILL, process.text
  assert run.steps() == [5, 10]
  return run, root


@pytest.fixture
def copied(killed, backbone, tmp_path):
  """A copy of it, whose pictures lie elsewhere and are as old."""
  run, root = killed
  shutil.copytree(run.workdir, tmp_path / "run")
  shutil.copytree(root, tmp_path / "pictures")
  copy = run_on(backbone, tmp_path / "pictures", tmp_path / "run")
  return copy, tmp_path / "pictures"


@pytest.mark.fault("changed-run")
@pytest.mark.processes
@pytest.mark.parametrize(
  "change",
  [
    replace_all,
    move_two,
    # What the command says of them is what `test_every_change_is_named` finds.
    *(
      pytest.param(change, marks=pytest.mark.nightly)
      for change in (swap_labels, rename_one, replace_a_test_picture)
    ),
  ],
  ids=lambda change: change.__name__,
)
def test_resuming_with_other_data_is_refused(copied, change):
  run, root = copied
  change(root)
  refused = run.start()
  assert refused.wait() == 2, refused.text
  assert "began with other data" in refused.text
  assert "--allow_changed_data" in refused.text
  assert "Traceback" not in refused.text
  for words in CHANGES[change]:
    assert words in refused.text
  assert run.steps() == [5, 10]
  assert not (run.workdir / "result.json").exists()


@pytest.mark.fault("changed-run")
@pytest.mark.processes
def test_resuming_with_moved_data_gives_the_same_bits(
  killed, copied, backbone, tmp_path
):
  whole = run_on(backbone, killed[1], tmp_path / "whole")
  whole.finish()
  copy, _ = copied
  assert copy.finish().resumed == 10
  found, expected = copy.state(), whole.state()
  assert found["arrays"] == expected["arrays"]
  assert found["meta"] == expected["meta"]
  result = json.loads((copy.workdir / "result.json").read_text())
  assert result["config_changes"] == []
  assert result["data"].keys() == {"train", "test"}


@pytest.mark.fault("changed-run")
@pytest.mark.processes
def test_resuming_with_other_data_is_possible_if_allowed(copied):
  run, root = copied
  move_two(root)
  (root / "train/a/7.png").unlink()
  assert run.finish("--allow_changed_data").resumed == 10
  result = json.loads((run.workdir / "result.json").read_text())
  (change,) = result["config_changes"]
  assert (change["step"], change["key"]) == (10, "data of train")
  assert change["from"] != change["to"] == result["data"]["train"]["sha256"]
  assert change["what"][0] == "3 missing, 2 new (of 24 files)"
  # From now on these are its data, and nothing of it is forgotten.
  assert run.finish().resumed == 20
  again = json.loads((run.workdir / "result.json").read_text())
  assert again["config_changes"] == result["config_changes"]


@pytest.mark.processes
def test_touched_files_with_equal_contents_resume(backbone, pictures, tmp_path):
  options = {"data.digest": "contents"}
  run = run_on(backbone, pictures, tmp_path / "run", **options)
  with run.start(KILLED) as process:
    assert process.wait() == -signal.SIGKILL, process.text
  touch(pictures)
  assert run.finish().resumed == 10


# --- what is compared ---------------------------------------------------------


def found_later(record):
  """What a saved state holds of it, once its tables are kept."""
  record.keep()
  return json.loads(json.dumps(record.compared))


@pytest.mark.fault("changed-run")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("by", ["files", "contents"])
def test_every_change_is_named(pictures, tmp_path, change, by):
  found = found_later(record_of(pictures, tmp_path, by))
  assert record_of(pictures, tmp_path, by).differences(found) == {}
  change(pictures)
  lines = [
    line
    for split, (first, *more) in record_of(pictures, tmp_path, by)
    .differences(found)
    .items()
    for line in (f"{split}: {first}", *more)
  ]
  assert len(lines) <= 3
  for words in CHANGES[change]:
    assert words in "\n".join(lines)


def test_digest_by_contents_sees_what_digest_by_files_does_not(
  pictures, tmp_path
):
  by_files = found_later(record_of(pictures, tmp_path))
  by_contents = found_later(record_of(pictures, tmp_path, "contents"))
  file = pictures / "train/a/0.png"
  times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
  # As many other bytes, as old: only the contents tell.
  file.write_bytes(file.read_bytes()[::-1])
  os.utime(file, ns=times)
  now = record_of(pictures, tmp_path)
  assert now.differences(by_files) == {}
  now_changed = {
    "train": ["1 changed (of 24 files)", "  changed: train/a/0.png"]
  }
  assert now.differences(by_contents) == now_changed
  # It is compared as it was saved, whatever is asked for now.
  file.write_bytes(file.read_bytes()[::-1])
  now = record_of(pictures, tmp_path, "contents")
  assert now.differences(by_contents) == {}
  assert now.differences(by_files) == now_changed


def test_changes_are_noticed_in_parts_of_a_split(pictures, tmp_path):
  """A picture that comes or goes moves others over the border of two parts."""
  splits = {"train": "train[:50%]", "validation": "train[50%:]"}
  found = found_later(record_of(pictures, tmp_path, **splits))
  assert record_of(pictures, tmp_path, **splits).differences(found) == {}
  (pictures / "train/a/0.png").unlink()
  differ = record_of(pictures, tmp_path, **splits).differences(found)
  text = json.dumps(differ)
  assert "missing: train/a/0.png" in text


def test_added_or_removed_splits_are_refused(pictures, tmp_path):
  differ = record_of(pictures, tmp_path).differences({})
  assert differ.keys() == {"train", "test"}
  assert differ["train"] == ["this split was added"]
  found = found_later(record_of(pictures, tmp_path))
  differ = record_of(pictures, tmp_path, train="train").differences(found)
  assert differ == {"test": ["this split was removed"]}


def test_change_is_noticed_without_a_usable_inventory(pictures, tmp_path):
  """That the data are others is known without it."""
  found = found_later(record_of(pictures, tmp_path))
  rename_one(pictures)
  file = tmp_path / "inventory" / f"{found['train']['sha256']}.json"
  content = file.read_text()
  for damaged in (content.replace("a/3.png", "a/4.png"), "[", None):
    file.unlink() if damaged is None else file.write_text(damaged)
    differ = record_of(pictures, tmp_path).differences(found)
    assert "the changes are unknown" in differ["train"][0]


def test_special_files_are_recorded_unread(pictures, tmp_path):
  os.mkfifo(pictures / "train/a/pipe.png")
  (pictures / "train/a/zero.png").symlink_to("/dev/zero")
  shutil.copy(pictures / "train/a/0.png", pictures / b"train/a/\xff.png".decode(
    "utf-8", "surrogateescape"))  # fmt: skip
  reader = open_split("folder", "train", str(pictures), max_bad=2)
  table = reader.data_files.table("contents")
  assert table["files"]["train/a/pipe.png"] == [-1, "no regular file"]
  assert table["files"]["train/a/zero.png"] == [-1, "no regular file"]
  assert len(table["files"]["train/a/\udcff.png"][1]) == 64
  assert json.loads(data_files.text_of(table)) == table


class FakeCheckpoints:
  """A run of step 5, whose example 23 could not be read."""

  directory = "checkpoints"

  def __init__(self, files):
    self.saved = {
      "format": state_lib.FORMAT, "fingerprint": "f", "config": {},
      "parents": {}, "attends_to": {}, "trials": {},
      "data": {"classes": ["a", "b"]}, "files": files,
      "best": {}, "lost": {}, "skipped": {}, "pending": False, "changes": [],
      "timed": [0, 0.0], "left_out": {"train": [23]}, "drawn_by": 1,
    }  # fmt: skip

  def latest(self):
    return 5

  def meta(self, step):
    return self.saved

  def restore(self, step, like):
    return {"state": like["state"], "best": {}}


def test_examples_left_out_of_other_data_are_forgotten(pictures, tmp_path):
  """Its numbers are those of other pictures, or of none."""
  state = types.SimpleNamespace(params={})

  def resumed(found, allow_changed_data=False):
    record = record_of(pictures, tmp_path, train="train")
    source = open_split("folder", "train", str(pictures), max_bad=1)
    meta = {**FakeCheckpoints(found).saved, "files": record.compared}
    _, past = state_lib.resume(
      FakeCheckpoints(found), state, meta, {"train": source},
      state_lib.Steps(total=9, log=1), record, allow_changed_data,
    )  # fmt: skip
    return [*source.unreadable], past.changes

  found = found_later(record_of(pictures, tmp_path, train="train"))
  assert resumed(found) == ([23], ())
  (pictures / "train/a/3.png").unlink()
  with pytest.raises(TrainingError, match="began with other data"):
    resumed(found)
  left_out, (change,) = resumed(found, allow_changed_data=True)
  assert left_out == []
  assert change["what"][0] == "1 missing (of 24 files)"
  # Without what earlier versions did not save, it has to be allowed as well.
  with pytest.raises(TrainingError, match="--allow_changed_data"):
    resumed({})


def test_hosts_agree_on_the_code(monkeypatch):
  compared = []
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(
    processes, "require_same", lambda what, facts: compared.append(facts)
  )
  config = config_lib.Config()
  settle.require_same_start(config)
  read = pathlib.Path.read_bytes
  monkeypatch.setattr(
    pathlib.Path, "read_bytes",
    lambda path: read(path) + b" " * (path.name == "step.py"),
  )  # fmt: skip
  settle.require_same_start(config)
  first, changed = compared
  differ = [key for key in first if first[key] != changed[key]]
  assert differ == ["code of memory_vit (SHA-256)"]


def test_hosts_agree_on_names_and_sizes(pictures, monkeypatch):
  """Not on times, in which copies differ."""
  compared = []
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(
    processes, "require_same", lambda what, facts: compared.append(facts)
  )
  backbone = types.SimpleNamespace(fingerprint="f")
  for change in (None, touch, rename_one):
    if change:
      change(pictures)
    source = open_split("folder", "train", str(pictures))
    settle.require_same_data(backbone, {"train": source}, ())
  first, touched, renamed = compared
  assert first == touched
  differ = [key for key in first if first[key] != renamed[key]]
  assert differ == ["config.data.train: names and sizes of files"]


def test_inventory_of_the_first_process_is_used_by_all(
  pictures, tmp_path, monkeypatch
):
  """Another one takes its word, and looks at nothing."""
  first = record_of(pictures, tmp_path)
  digests = first.digests
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  said = json.dumps({"result": digests})
  monkeypatch.setattr(processes, "_gather", lambda text: [said, text])
  other = DataRecord(
    directory=tmp_path, data_files={"train": data_files.DataFiles()}
  )
  assert other.digests == digests


def test_changes_of_tfds_data_are_noticed(tmp_path):
  directory = fake_data.write_tfds(
    tmp_path, "cifar10", {"train": [0, 1, 2] * 4, "test": [3, 4]}
  )

  def record():
    reader = open_split("cifar10", "train", str(tmp_path))
    assert reader.data_files == find_data_files(
      SplitRef("cifar10", str(tmp_path), "train")
    )
    return DataRecord(
      directory=tmp_path / "inventory",
      data_files={"train": reader.data_files},
    )

  found = found_later(record())
  assert record().differences(found) == {}
  fake_data.reshard(directory, "train", [6, 6])
  (lines,) = record().differences(found).values()
  assert lines[0] == "1 missing, 2 new (of 1 files)"
  assert "'shard lengths': [12]" in lines[1]
  assert "missing: cifar10-train.tfrecord-00000-of-00001" in lines[2]


def test_digits_are_identified_by_their_bytes(tmp_path, monkeypatch):
  def record(split):
    reader = open_split("digits:5-9", split)
    return DataRecord(
      directory=tmp_path, data_files={"train": reader.data_files}
    )

  found = found_later(record("train"))
  assert record("train").differences(found) == {}
  (lines,) = record("train[1:]").differences(found).values()
  assert "pictures: " in lines[0]


def test_some_of_many_changed_files_are_named():
  files = {f"train/{i % 9}/{i}.png": [100, i] for i in range(9000)}
  before = {"by": "files", "facts": {}, "files": files}
  grown = {name: [101, mark] for name, (_, mark) in files.items()}
  lines = data_files.differences(before, {**before, "files": grown})
  assert lines[0] == "9,000 changed (of 9,000 files)"
  assert len(lines) == 2
  assert lines[1].count(".png") == 5
  assert lines[1].endswith("and 8995 more")
