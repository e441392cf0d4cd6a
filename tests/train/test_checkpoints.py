"""Saved states: the newest two are kept, and damaged ones are set aside."""

import logging
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from memory_vit.errors import TrainingError
from memory_vit.runtime import checksums
from memory_vit.train.checkpoints import Checkpoints

pytestmark = pytest.mark.versions


def state_of(step):
  """Arrays as a run has them, other ones in every step."""
  rng = np.random.default_rng(step)
  return {
    "step": jnp.int32(step),
    "params": {"w": jnp.asarray(rng.standard_normal((40, 50)), jnp.float32)},
    "half": jnp.asarray(rng.standard_normal(7), jnp.bfloat16),
    "empty": jnp.zeros((2, 0)),
  }


def assert_is(found, step):
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
    found,
    state_of(step),
  )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """The steps 2 and 4."""
  directory = tmp_path_factory.mktemp("checkpoints") / "c"
  with Checkpoints(directory) as checkpoints:
    for step in (2, 4):
      checkpoints.save(step, state_of(step), {"at": step, "nan": float("nan")})
  return directory


@pytest.fixture
def directory(saved, tmp_path):
  """The steps 2 and 4, to be damaged."""
  return shutil.copytree(saved, tmp_path / "c")


@pytest.fixture
def log(caplog, monkeypatch):
  monkeypatch.setattr(logging.getLogger("memory_vit"), "propagate", True)
  return caplog


def newest(directory):
  """The state from which a run would resume: step, meta, state."""
  with Checkpoints(directory) as checkpoints:
    step = checkpoints.latest()
    if step is None:
      return None
    found = checkpoints.restore(step, state_of(0))
    return step, checkpoints.meta(step)["at"], found


def files(directory, step):
  path = directory / f"{step:08d}"
  return sorted(file for file in path.rglob("*") if file.is_file())


def names(directory):
  return sorted(path.name for path in directory.iterdir())


@pytest.mark.fault("empty-save")
def test_newest_two_states_are_kept(tmp_path):
  with Checkpoints(tmp_path / "c") as checkpoints:
    assert checkpoints.latest() is None
    for step in range(1, 6):
      checkpoints.save(step, state_of(step), {"i": step})
    assert checkpoints.steps() == [4, 5]
    assert names(tmp_path / "c") == ["00000004", "00000005"]
    assert checkpoints.latest() == 5
    assert checkpoints.meta(4) == {"i": 4}
    assert_is(checkpoints.restore(4, state_of(0)), 4)
    with pytest.raises(TrainingError, match=r"step 5 was not saved.*\[4, 5\]"):
      checkpoints.save(5, state_of(5), {})


def recorded(monkeypatch):
  """What is done to files and directories from now on, in its order."""
  done = []

  def record(owner, name, describe):
    real = getattr(owner, name)

    def recording(*args, **options):
      result = real(*args, **options)
      done.append((name, *describe(*args)))
      return result

    monkeypatch.setattr(owner, name, recording)

  def path_of(descriptor):
    return (os.readlink(f"/proc/self/fd/{descriptor}"),)

  record(os, "fsync", path_of)
  record(pathlib.Path, "rename", lambda old, new: (str(old), str(new)))
  record(pathlib.Path, "write_text", lambda path, text: (str(path),))
  record(shutil, "rmtree", lambda path: (str(path),))
  return done


@pytest.mark.fault("power-cut")
def test_state_is_renamed_only_after_it_is_on_disk(directory, monkeypatch):
  """So that a power cut leaves a whole state, whenever it comes."""
  with Checkpoints(directory) as checkpoints:
    done = recorded(monkeypatch)
    checkpoints.save(6, state_of(6), {"at": 6})
    monkeypatch.undo()
  scratch, step = directory / "scratch-00000006", directory / "00000006"
  named = done.index(("rename", str(scratch), str(step)))
  before, after = done[:named], done[named + 1 :]
  assert not any(str(step) in paths for paths in before)
  # All of its files were written through, and the names of all of them.
  synced = {path for what, path in
            (entry[:2] for entry in before) if what == "fsync"}  # fmt: skip
  for path in [step, *step.rglob("*")]:
    lay = scratch / path.relative_to(step)
    # What is in arrays/, the seal, and each directory that holds something.
    assert str(lay) in synced, lay
  # The seal is written when what it seals is there, and then synced.
  sealing = before.index(("write_text", str(scratch / "state.json")))
  arrays = [
    i for i, entry in enumerate(before)
    if entry[0] == "fsync" and "/arrays/" in entry[1]
  ]  # fmt: skip
  assert arrays
  assert max(arrays) < sealing
  assert sealing < before.index(("fsync", str(scratch / "state.json")))
  # Its new name is on the disk before an older step is touched.
  gone = directory / "scratch-old-00000002"
  assert after[0] == ("fsync", str(directory))
  assert after[1:] == [
    ("rename", str(directory / "00000002"), str(gone)),
    ("rmtree", str(gone)),
  ]


def test_intact_state_is_restored(directory):
  step, at, found = newest(directory)
  assert (step, at) == (4, 4)
  assert_is(found, 4)
  assert names(directory) == ["00000002", "00000004"]


def halve(data):
  return data[: len(data) // 2]


@pytest.mark.fault("damaged-state")
@pytest.mark.parametrize(
  "damage",
  [None, lambda data: b"", halve, lambda data: data[:-1]],
  ids=["deleted", "empty", "half", "one byte less"],
)
def test_damage_to_any_file_falls_back_to_the_previous_state(
  saved, tmp_path, damage, log
):
  """The step is set aside, and the one before it is used."""
  count = len(files(saved, 4))
  assert count > 8
  for i in range(count):
    directory = shutil.copytree(saved, tmp_path / str(i))
    file = files(directory, 4)[i]
    if damage is None:
      file.unlink()
    else:
      file.write_bytes(damage(file.read_bytes()))
    log.clear()
    step, at, found = newest(directory)
    assert (step, at) == (2, 2), file
    assert_is(found, 2)
    assert names(directory) == ["00000002", "corrupt-00000004"]
    assert "going back to step 2" in log.text


def flip(file, bit):
  data = bytearray(file.read_bytes())
  data[bit // 8] ^= 1 << bit % 8
  file.write_bytes(data)


@pytest.mark.fault("flipped-bit")
@pytest.mark.slow
def test_any_flipped_bit_falls_back_to_the_previous_state(saved, tmp_path):
  """At 20 places of the largest file, and one of every other."""
  rng = np.random.default_rng(0)
  largest = max(files(saved, 4), key=lambda file: file.stat().st_size)
  chosen = [largest] * 20 + files(saved, 4)
  for i, original in enumerate(chosen):
    directory = shutil.copytree(saved, tmp_path / str(i))
    file = directory / original.relative_to(saved)
    flip(file, int(rng.integers(8 * file.stat().st_size)))
    step, at, found = newest(directory)
    assert (step, at) == (2, 2), file
    assert_is(found, 2)


@pytest.mark.fault("flipped-bit")
def test_flipped_bit_is_found_by_checksums_of_arrays(directory, monkeypatch):
  """Orbax itself takes most flipped bits for values."""
  monkeypatch.setattr(checksums, "require_whole", lambda path: None)
  largest = max(files(directory, 4), key=lambda file: file.stat().st_size)
  flip(largest, 4 * largest.stat().st_size)
  with pytest.raises(
    TrainingError, match="do not match their saved SHA-256|cannot be"
  ):
    newest(directory)


@pytest.mark.fault("no-whole-state")
def test_run_does_not_start_over_if_all_states_are_damaged(directory):
  for step in (2, 4):
    flip(files(directory, step)[-1], 100)
  for _ in range(2):  # nor at the second attempt
    with pytest.raises(TrainingError, match="no saved state .*intact") as error:
      newest(directory)
    assert "00000002 is damaged" in str(error.value)
    assert "00000004 is damaged" in str(error.value)
    assert names(directory) == ["00000002", "00000004"]


@pytest.mark.fault("no-whole-state")
def test_run_does_not_start_over_beside_a_corrupt_state(directory):
  flip(files(directory, 4)[-1], 100)
  newest(directory)
  shutil.rmtree(directory / "00000002")
  with pytest.raises(TrainingError, match="intact(.|\n)*corrupt-00000004"):
    newest(directory)


@pytest.mark.fault("kill-during-save", "foreign-state")
def test_foreign_files_beside_states_are_left_alone(directory, tmp_path):
  for path in (directory, tmp_path / "empty"):
    path.mkdir(exist_ok=True)
    (path / "7").mkdir()
    (path / "9").write_text("no step")
    (path / "notes").mkdir()
    (path / "scratch-00000006").mkdir()  # a process was killed while saving
    (path / "scratch-00000006" / "state.json").write_text("{}")
  assert newest(directory)[0] == 4
  assert names(directory) == ["00000002", "00000004", "7", "9", "notes"]
  assert newest(tmp_path / "empty") is None
  assert names(tmp_path / "empty") == ["7", "9", "notes"]


@pytest.mark.fault("step-saved-again")
def test_state_set_aside_as_corrupt_is_saved_again(directory):
  for count in (1, 2):
    flip(files(directory, 4)[0], 30)
    with Checkpoints(directory) as checkpoints:
      assert checkpoints.latest() == 2
      checkpoints.save(4, state_of(4), {"at": 4})
    assert newest(directory)[:2] == (4, 4)
    assert len(list(directory.glob("corrupt-*"))) == count


@pytest.mark.fault("kill-during-delete")
def test_interrupted_deletion_leaves_no_partial_state(directory, monkeypatch):
  """Killed in the middle of it, as far as the directory can tell."""
  with Checkpoints(directory) as checkpoints:
    monkeypatch.setattr(
      shutil, "rmtree", lambda path: (path / "state.json").unlink()
    )
    checkpoints.save(6, state_of(6), {"at": 6})
  monkeypatch.undo()
  assert names(directory) == ["00000004", "00000006", "scratch-old-00000002"]
  assert newest(directory)[0] == 6
  assert names(directory) == ["00000004", "00000006"]


@pytest.mark.fault("kill-at-file-operation")
def test_leftovers_of_a_kill_are_deleted_at_the_next_start(directory):
  """Killed between the name of a new state and the end of the oldest."""
  third = directory / "00000006"
  shutil.copytree(directory / "00000004", third)
  outside = directory.parent / "outside"
  shutil.copytree(third, outside)
  (directory / "scratch-00000008").symlink_to(outside)
  (directory / "scratch-1").write_text("")
  with Checkpoints(directory) as checkpoints:
    assert names(directory) == ["00000002", "00000004", "00000006"]
    assert checkpoints.latest() == 6
  assert names(directory) == ["00000004", "00000006"]
  assert (outside / "state.json").exists()


@pytest.mark.fault("kill-at-file-operation")
def test_oldest_state_is_kept_until_a_newer_one_is_intact(directory):
  for step in (6, 8):
    shutil.copytree(directory / "00000004", directory / f"{step:08d}")
    flip(files(directory, step)[0], 30)
  assert newest(directory)[0] == 4
  assert names(directory) == [
    "00000002", "00000004", "corrupt-00000006", "corrupt-00000008",
  ]  # fmt: skip


def test_file_in_place_of_the_directory_is_an_error(tmp_path):
  (tmp_path / "c").write_text("")
  with pytest.raises(TrainingError, match="cannot hold the states"):
    Checkpoints(tmp_path / "c")


@pytest.mark.fault("disk-full")
def test_failed_save_leaves_earlier_states_intact(directory, monkeypatch):
  with Checkpoints(directory) as checkpoints:

    def fails(checkpointer, path, args):
      path.mkdir()
      (path / "half").write_text("of it")
      raise ValueError("OUT_OF_RANGE: Error writing")  # as orbax does

    with monkeypatch.context() as context:
      context.setattr(ocp.Checkpointer, "save", fails)
      with pytest.raises(
        TrainingError, match="step 6 cannot be written(.|\n)*r"
      ):
        checkpoints.save(6, state_of(6), {"at": 6})
    assert checkpoints.latest() == 4
    checkpoints.save(6, state_of(6), {"at": 6})
  assert newest(directory)[:2] == (6, 6)


@pytest.mark.fault("other-structure")
@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      {"half": jnp.zeros(7, jnp.float32)},
      "half: .*bfloat16.*expected .*float32",
    ),
    ({"half": jnp.zeros(8, jnp.bfloat16)}, r"half: .*\[7\].*expected .*\[8\]"),
    ({"more": jnp.zeros(1)}, "more: None, expected"),
    ({"params": {}}, "params/w: .*expected None"),
  ],
)
def test_state_of_another_structure_is_refused(directory, change, message):
  with (
    Checkpoints(directory) as checkpoints,
    pytest.raises(
      TrainingError, match=f"another configuration(.|\n)*{message}"
    ),
  ):
    checkpoints.restore(4, {**state_of(0), **change})
