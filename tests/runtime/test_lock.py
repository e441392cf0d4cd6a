import contextlib
import errno
import fcntl
import os
import re

import pytest

from memory_vit.errors import ConfigError, TrainingError
from memory_vit.runtime.lock import one_at_a_time, only_run


def test_a_second_run_is_refused(tmp_path):
  workdir = tmp_path / "new" / "run"
  with only_run(workdir):
    with (
      pytest.raises(TrainingError, match=f"process {os.getpid()} on ."),
      only_run(workdir),
    ):
      pass
    with only_run(tmp_path / "other"):
      pass
  with only_run(workdir):  # and not longer than it is used
    assert (workdir / ".lock").exists()


@pytest.mark.fault("two-runs")
@pytest.mark.parametrize("host", ["x", "elsewhere." * 25])
def test_lock_of_a_dead_process_is_taken_over(tmp_path, host):
  (tmp_path / ".lock").write_text(f"process 1 on {host}\n")
  for _ in range(2):  # nothing is left of a longer line
    with only_run(tmp_path):
      text = (tmp_path / ".lock").read_text()
      assert re.fullmatch(rf"process {os.getpid()} on .+\n", text)


def test_a_lock_is_free_after_an_error(tmp_path):
  with pytest.raises(KeyboardInterrupt), only_run(tmp_path):
    raise KeyboardInterrupt
  with only_run(tmp_path):
    pass


@pytest.mark.fault("two-runs")
def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
  def fails(file, how):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", fails)
  with (
    pytest.raises(TrainingError, match="has no locks.*with locks, or mount"),
    only_run(tmp_path),
  ):
    pass


@pytest.mark.fault("foreign-lock")
@pytest.mark.parametrize(
  ("put", "text"),
  [
    ("link", "precious"), ("dangling link", ""), ("hard link", "precious"),
    ("hard link", ""), ("directory", ""), ("pipe", ""), ("text", ""),
  ],
)  # fmt: skip
def test_foreign_file_as_lock_is_left_as_it_is(tmp_path, put, text):
  """Another user with access to the directory could name any file."""
  victim, lock = tmp_path / "victim.txt", tmp_path / "run" / ".lock"
  victim.write_text(text)
  lock.parent.mkdir()
  {
    "link": lambda: lock.symlink_to(victim),
    "dangling link": lambda: lock.symlink_to(tmp_path / "nothing"),
    "hard link": lambda: lock.hardlink_to(victim),
    "directory": lock.mkdir,
    "pipe": lambda: os.mkfifo(lock),
    "text": lambda: lock.write_text("process of thinking\n"),
  }[put]()
  with pytest.raises(TrainingError) as error, only_run(lock.parent):
    pass
  assert f"{lock} cannot be the lock that keeps" in str(error.value)
  assert "\n" not in str(error.value)
  assert victim.read_text() == text
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    "run", "victim.txt",
  ]  # fmt: skip
  if put == "text":
    assert lock.read_text() == "process of thinking\n"


@pytest.mark.parametrize("fault", ["text", "directory", "no locks", "no room"])
def test_lock_error_names_its_option(fault, tmp_path, monkeypatch):
  """Other directories than --workdir have locks, too."""

  def fails(file, how):
    raise OSError(errno.ENOLCK, "No locks available")

  path = tmp_path / ".lock"
  if fault == "text":
    path.write_text("of another program")
  elif fault == "directory":
    path.mkdir()
  elif fault == "no room":
    path = tmp_path / "absent" / ".lock"
  else:
    monkeypatch.setattr(fcntl, "flock", fails)
  with (
    pytest.raises(TrainingError, match=r"config\.cache\.dir") as error,
    one_at_a_time(path, pytest.fail, "config.cache.dir"),
  ):
    pass
  assert "--workdir" not in str(error.value)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  for path in ("file", "file/run", "x" * 300):
    with (
      pytest.raises(ConfigError, match="--workdir .* nothing can be written"),
      only_run(tmp_path / path),
    ):
      pass


@pytest.mark.fault("lost-lock")
@pytest.mark.parametrize("again", [False, True])
def test_a_lock_that_is_taken_away_is_noticed(tmp_path, again):
  """Otherwise a second run would start, and both would write."""
  with only_run(tmp_path) as require_held:
    require_held()
    (tmp_path / ".lock").unlink()
    with contextlib.ExitStack() as second:
      if again:
        second.enter_context(only_run(tmp_path))
      with pytest.raises(TrainingError, match="was removed or replaced"):
        require_held()


def test_waiting_process_is_told_the_lock_holder(tmp_path):
  path, seen = tmp_path / ".lock", []
  with contextlib.ExitStack() as first:
    first.enter_context(one_at_a_time(path, pytest.fail, "--output"))

    def wait(owner):
      seen.append(owner)
      if len(seen) == 2:
        first.close()

    with one_at_a_time(path, wait, "--output"):
      pass
  assert len(seen) == 2
  assert {*seen} == {path.read_text().strip()}
  assert seen[0].startswith(f"process {os.getpid()} on ")
