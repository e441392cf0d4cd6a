"""Agreement of processes that cache rows; other processes are simulated."""

import json
import shutil

import jax
import pytest

from memory_vit.cache import cache_folder, free_space
from memory_vit.errors import ConfigError
from memory_vit.runtime import lock, processes
from memory_vit.runtime.preemption import StopSignal


class WaitError(Exception):
  """Another run holds the lock."""


def wait(*args):
  raise WaitError


@pytest.mark.fault("cache-two-runs")
@pytest.mark.parametrize("index", [0, 1])
def test_process_0_holds_the_lock_for_all_processes(
  index, tmp_path, monkeypatch
):
  """So no run holds what another one waits for."""
  stop = StopSignal()
  monkeypatch.setattr(stop, "check", wait)
  monkeypatch.setattr(
    processes, "on_process_0",
    lambda action: json.dumps(action() if index == 0 else None),
  )  # fmt: skip

  def entered(first, second):
    with first:
      try:
        with second:
          return True
      except WaitError:
        return False

  for own_is_first in (True, False):
    pair = [
      cache_folder.locked(tmp_path, stop),
      lock.one_at_a_time(tmp_path / ".lock", wait, "config.cache.dir"),
    ]
    found = entered(*(pair if own_is_first else reversed(pair)))
    assert found is (index == 1)


def asked_by_others(monkeypatch, *others):
  """Each other process asks what `others` make of what this one does."""
  monkeypatch.setattr(
    processes, "gather", lambda mine: [mine, *(o(*mine) for o in others)]
  )


@pytest.mark.fault("cache-no-room")
@pytest.mark.parametrize("where", ["disk", "host"])
def test_processes_of_a_host_need_space_together(where, tmp_path, monkeypatch):
  usage = shutil._ntuple_diskusage(2**40, 2**40, 1_000)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  memory = type("Memory", (), {"available": 1_000})
  monkeypatch.setattr("psutil.virtual_memory", lambda: memory)

  def beside(key, needed, free, name):
    return [key, 401, free, name]

  def elsewhere(key, needed, free, name):
    return [f"{key}2", 401, free, name]

  free_space.require_free_space("contexts", 600, where, tmp_path / "new")
  asked_by_others(monkeypatch, elsewhere)
  free_space.require_free_space("contexts", 600, where, tmp_path)
  asked_by_others(monkeypatch, elsewhere, beside)
  with pytest.raises(ConfigError) as error:
    free_space.require_free_space("contexts", 600, where, tmp_path)
  assert "take 1,001 bytes" in str(error.value)
  assert "(of processes 0, 2) has 1,000 bytes free" in str(error.value)


@pytest.mark.fault("cache-no-room")
def test_all_processes_end_if_one_has_no_space(tmp_path, monkeypatch):
  """Nobody waits for one that has ended."""
  asked_by_others(monkeypatch, lambda *mine: ["far away", 7, 6, "the disk"])
  with pytest.raises(ConfigError) as error:
    free_space.require_free_space("contexts", 0, "disk", tmp_path)
  assert "take 7 bytes" in str(error.value)
  assert "the disk (of process 1) has 6 bytes free" in str(error.value)


def test_processes_of_a_host_share_disk_and_memory_but_no_devices(
  tmp_path, monkeypatch
):
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
