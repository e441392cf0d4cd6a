import errno
import fcntl
import os

import pytest

from memory_vit.errors import TrainingError
from memory_vit.lock import only_run


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


def test_what_a_dead_process_wrote_is_no_obstacle(tmp_path):
  (tmp_path / ".lock").write_text("process 1 on elsewhere\n")
  with only_run(tmp_path):
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()}")


def test_a_lock_is_free_after_an_error(tmp_path):
  with pytest.raises(KeyboardInterrupt), only_run(tmp_path):
    raise KeyboardInterrupt
  with only_run(tmp_path):
    pass


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
  def fails(file, how):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", fails)
  with (
    pytest.raises(TrainingError, match="has no locks.*another one"),
    only_run(tmp_path),
  ):
    pass
