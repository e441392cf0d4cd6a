"""What processes of a run that keep rows agree on; the others are made up."""

import shutil
import threading
import time
from collections.abc import Callable

import jax
import pytest

from memory_vit.errors import ConfigError
from memory_vit.frozen import free_space
from memory_vit.frozen.splits import Kept
from memory_vit.runtime import processes

# Far more than threads need that do next to nothing.
PATIENCE = 10


class Group:
  """The two processes of a run, as threads that meet each other."""

  here = threading.local()

  def __init__(self, kept: Kept, folder) -> None:
    self._kept, self._folder = kept, folder
    self._meeting = threading.Barrier(2)
    self.finished: list[int] = []

  @classmethod
  def on_process_0(cls, action: Callable[[], None]) -> None:
    """As that of `processes`."""
    if cls.here.index == 0:
      action()
    cls.here.group.meet()

  def meet(self) -> None:
    """A collective operation."""
    self._meeting.wait(PATIENCE)

  def start(self, index: int) -> threading.Thread:
    """Start a process, which locks its folder for a while."""

    def run() -> None:
      Group.here.group, Group.here.index = self, index
      with self._kept._locked(self._folder / f"{index}.lock"):
        self.meet()  # computes rows, with the other one
      self.finished.append(index)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread

  def wait_for_one(self) -> None:
    """Wait until a process waits for the other one."""
    end = time.monotonic() + PATIENCE
    while not self._meeting.n_waiting and time.monotonic() < end:
      time.sleep(0.001)
    assert self._meeting.n_waiting == 1


@pytest.mark.fault("kept-two-runs")
@pytest.mark.filterwarnings(
  # A thread that gave up, where the test fails anyway.
  "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
def test_two_runs_never_wait_for_each_other(tmp_path, monkeypatch):
  """Each has one process that comes first: to its own folder, or to none."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: Group.here.index)
  monkeypatch.setattr(processes, "on_process_0", Group.on_process_0)
  end = time.monotonic() + PATIENCE

  def wait(self, owner):
    assert time.monotonic() < end, f"still waiting for {owner}"
    time.sleep(0.001)

  monkeypatch.setattr(Kept, "_wait", wait)
  kept = Kept(
    config=None, backbone=None, preprocessing=None, record=None, mesh=None,
    stop=None,
  )  # fmt: skip
  first, second = Group(kept, tmp_path), Group(kept, tmp_path)
  threads = [first.start(0)]
  first.wait_for_one()
  threads.append(second.start(1))
  second.wait_for_one()
  threads += [second.start(0), first.start(1)]
  for thread in threads:
    thread.join(2 * PATIENCE)
  assert sorted(first.finished) == sorted(second.finished) == [0, 1]


def asked_by_others(monkeypatch, *others):
  """Each other process asks what `others` make of what this one does."""
  monkeypatch.setattr(
    processes, "gather", lambda mine: [mine, *(o(*mine) for o in others)]
  )


@pytest.mark.fault("kept-no-room")
@pytest.mark.parametrize("where", ["disk", "host"])
def test_processes_of_a_host_need_room_together(where, tmp_path, monkeypatch):
  usage = shutil._ntuple_diskusage(2**40, 2**40, 1_000)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  memory = type("Memory", (), {"available": 1_000})
  monkeypatch.setattr("psutil.virtual_memory", lambda: memory)

  def beside(key, needed, free, name):
    return [key, 401, free, name]

  def elsewhere(key, needed, free, name):
    return [f"{key}2", 401, free, name]

  free_space.require_room("contexts", 600, where, tmp_path / "new")
  asked_by_others(monkeypatch, elsewhere)
  free_space.require_room("contexts", 600, where, tmp_path)
  asked_by_others(monkeypatch, elsewhere, beside)
  with pytest.raises(ConfigError) as error:
    free_space.require_room("contexts", 600, where, tmp_path)
  assert "take 1,001 bytes" in str(error.value)
  assert "(of processes 0, 2) has 1,000 free" in str(error.value)


@pytest.mark.fault("kept-no-room")
def test_all_processes_end_where_one_has_no_room(tmp_path, monkeypatch):
  """Nobody waits for one that has ended."""
  asked_by_others(monkeypatch, lambda *mine: ["far away", 7, 6, "the disk"])
  with pytest.raises(ConfigError) as error:
    free_space.require_room("contexts", 0, "disk", tmp_path)
  assert "take 7 bytes" in str(error.value)
  assert "the disk (of process 1) has 6 free" in str(error.value)


def test_who_fills_the_same_room(tmp_path, monkeypatch):
  stats = {"bytes_limit": 100, "bytes_in_use": 40}
  device = type("Device", (), {"memory_stats": lambda self: stats})()
  monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
  found = {}
  for index, host in ((0, "a"), (1, "a"), (2, "b")):
    monkeypatch.setattr(jax, "process_index", lambda i=index: i)
    monkeypatch.setattr(free_space.socket, "gethostname", lambda h=host: h)
    found[index] = {
      where: free_space.place_of(where, tmp_path)
      for where in ("device", "host", "disk")
    }
  assert found[0]["device"].free == 120
  for where in ("host", "disk"):
    assert found[0][where].key == found[1][where].key != found[2][where].key
  assert len({found[i]["device"].key for i in found}) == 3
  assert len({place.key for place in found[0].values()}) == 3
