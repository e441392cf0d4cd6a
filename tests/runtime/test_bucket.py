"""Paths of a bucket, its lease, and directories that cannot be renamed."""

import datetime
import os
import threading

import numpy as np
import pytest
from bucket_server import objects
from conftest import random_task

import memory_vit as mv
from memory_vit.commands import inspect
from memory_vit.errors import ConfigError, TaskError, TrainingError
from memory_vit.runtime import bucket, files, lease, paths
from memory_vit.runtime.lock import only_run
from memory_vit.train.checkpoints import Checkpoints


@pytest.fixture
def workdir(bucket_dir):
  return paths.place(bucket_dir, "--workdir")


@pytest.fixture
def listed(storage, bucket_dir):
  """Lists the objects of the directory."""
  return lambda: objects(storage[1], bucket_dir.rpartition("/")[2])


@pytest.mark.parametrize("text", ["gs://", "gs://B", "gs://a", "gs:///x"])
def test_invalid_bucket_addresses_are_refused(text):
  with pytest.raises(ConfigError, match=r"expected gs://BUCKET/DIRECTORY\."):
    paths.place(text, "--workdir")


def test_a_missing_client_is_named(monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
  with pytest.raises(
    ConfigError, match=r"needs gcsfs.* pip install '\.\[gcs\]'"
  ):
    paths.place("gs://bucket/run", "--workdir")


@pytest.mark.parametrize(
  "text",
  ["gs://bucket/x", "gs:/bucket/x", "s3://bucket/x", "memory://x", "file:/x"],
)
def test_addresses_are_refused_where_a_local_path_is_needed(text):
  """Or a folder "s3:" of the current directory would be filled."""
  with pytest.raises(ConfigError, match=f"cache.dir is '{text}'.*a local path"):
    paths.local(text, "config.cache.dir")
  assert paths.local(f"./{text}", "--out").name == "x"


@pytest.mark.processes
def test_paths_of_a_bucket_are_used_as_local_ones(workdir):
  assert paths.place(workdir, "--workdir") is workdir
  assert workdir.absolute() == workdir.resolve() == workdir
  assert list(workdir.iterdir()) == []
  files.write_json(workdir / "a" / "one.json", {"k": 1})
  assert files.read_object(workdir / "a" / "one.json", "k") == {"k": 1}
  (workdir / "two").touch()
  found = [path.relative_to(workdir).as_posix() for path in workdir.rglob("*")]
  assert sorted(found) == ["a", "a/one.json", "two"]
  assert str(workdir / "two").startswith("gs://")
  with pytest.raises(ConfigError, match="is not readable"):
    files.read_object(workdir / "none.json")
  with files.fetched(workdir / "a") as local:
    assert [file.name for file in local.iterdir()] == ["one.json"]


@pytest.mark.processes
def test_forbidden_bucket_is_refused(workdir, backbone, monkeypatch):
  def refuses(*args, **kwargs):
    raise PermissionError(13, "Forbidden: no storage.objects.get")

  monkeypatch.setattr(type(workdir).__mro__[1], "exists", refuses)
  with pytest.raises(ConfigError, match=r"be looked up \(Forbidden.*permiss"):
    mv.load_task(str(workdir / "birds"), backbone)
  monkeypatch.setattr(type(workdir).__mro__[1], "open", refuses)
  with pytest.raises(ConfigError, match=r"where nothing can be.*Forbidden"):
    paths.make_directory(workdir, "--workdir")


@pytest.mark.processes
def test_inspect_says_that_nothing_is_there(workdir, capsys):
  (workdir / "tasks" / "a").write_text("x")
  for place in (workdir / "tasks" / "b", workdir / "none"):
    assert inspect.main([str(place)]) == 2
    said = f"error: {place}: there is nothing at this address.\n"
    assert capsys.readouterr().err == said


def test_a_bucket_that_does_not_exist_is_refused(storage):
  missing = paths.place("gs://no-such-bucket/run", "--workdir")
  with pytest.raises(ConfigError, match="where nothing can be written"):
    paths.make_directory(missing, "--workdir")
  with pytest.raises(TrainingError, match="no-such-bucket/run/a cannot be"):
    files.write_text(missing / "a", "text")


@pytest.mark.processes
def test_links_to_nothing_are_not_copied(workdir, listed):
  outbox = files.Outbox(workdir)
  (outbox.local / "link").symlink_to("nothing")
  (outbox.local / "log").write_text("text")
  outbox.close()
  assert [*listed()] == ["log"]
  assert not outbox.local.exists()


# The lease.


def _run_as(workdir, text):
  """What another process writes to take a lease."""
  (workdir / ".lock").write_text(text)


OTHER = "process 1 on elsewhere, 0123456789abcdef\n"


@pytest.mark.processes
@pytest.mark.fault("two-runs-in-a-bucket")
def test_a_second_run_is_refused_while_the_lease_lives(workdir, listed):
  process = f"process {os.getpid()} on .*renewed its lease . s ago"
  with only_run(workdir):
    with pytest.raises(TrainingError, match=process), only_run(workdir):
      pass
    assert [*listed()] == [".lock"]
  with only_run(workdir):  # and no longer than it is used
    pass
  with pytest.raises(KeyboardInterrupt), only_run(workdir):
    raise KeyboardInterrupt
  with only_run(workdir):
    pass


@pytest.mark.processes
@pytest.mark.fault("two-runs-in-a-bucket")
def test_of_two_that_begin_at_once_one_gets_the_lease(workdir, monkeypatch):
  both_read, read = threading.Barrier(2), lease._Lease._read

  def read_together(self):
    found = read(self)
    both_read.wait(10)
    return found

  outcomes = []

  def begin():
    def refuse(owner):
      raise TrainingError(owner)

    try:
      lease._Lease(workdir / ".lock").take(refuse)
      outcomes.append("has it")
    except (TrainingError, threading.BrokenBarrierError):
      outcomes.append("has it not")

  monkeypatch.setattr(lease._Lease, "_read", read_together)
  monkeypatch.setattr(both_read, "wait", lambda s, w=both_read.wait: w(5))
  threads = [threading.Thread(target=begin) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(outcomes) == ["has it", "has it not"]


@pytest.mark.processes
@pytest.mark.fault("silent-lease")
def test_a_lease_is_taken_over_after_silence_alone(workdir, monkeypatch):
  _run_as(workdir, OTHER)
  with (
    pytest.raises(TrainingError, match="process 1 on elsewhere.*120 s without"),
    only_run(workdir),
  ):
    pass
  assert (workdir / ".lock").read_text() == OTHER
  monkeypatch.setattr(lease, "SILENCE", datetime.timedelta(seconds=0))
  with only_run(workdir) as require_alone:
    require_alone()
    assert (workdir / ".lock").read_text().startswith(f"process {os.getpid()}")


@pytest.mark.processes
@pytest.mark.fault("lost-lease")
@pytest.mark.parametrize("how", ["taken over", "removed"])
def test_a_run_whose_lease_is_gone_is_stopped(workdir, how):
  with only_run(workdir) as require_alone:
    require_alone()
    if how == "removed":
      (workdir / ".lock").unlink()
    else:
      _run_as(workdir, OTHER)
    for _ in range(2):
      with pytest.raises(TrainingError, match="taken over or removed. Ano"):
        require_alone()
  if how == "taken over":  # nor is it freed for others
    assert (workdir / ".lock").read_text() == OTHER
  else:
    assert not (workdir / ".lock").exists()


@pytest.mark.processes
def test_a_lease_is_renewed_while_it_is_held(workdir, listed, monkeypatch):
  monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
  seen, ended = set(), threading.Event()
  with only_run(workdir):
    for _ in range(1000):
      seen.add(listed()[".lock"])
      if len(seen) > 3 or ended.wait(0.01):
        break
  assert len(seen) > 3


def test_nobody_renews_a_lease_that_is_free(monkeypatch):
  """The next run would wait for one that nobody holds."""
  seen = []

  def running():
    return "lease" in [thread.name for thread in threading.enumerate()]

  class Lease:
    def __init__(self, path):
      self.renew = int

    def take(self, refuse):
      pass

    def free(self):
      seen.append(running())

  monkeypatch.setattr(lease, "_Lease", Lease)
  with lease.held("gs://bucket/run", pytest.fail):
    assert running()
  assert seen == [False]


@pytest.mark.processes
def test_a_renewal_whose_answer_was_lost_is_repeated(workdir):
  found = lease._Lease(workdir / ".lock")
  found.take(pytest.fail)
  before = found._generation
  found.renew()
  found._generation = before  # the client sends it again
  found.renew()
  assert found._generation > before


@pytest.mark.processes
@pytest.mark.fault("lost-lease")
def test_a_lease_that_cannot_be_renewed_stops_the_run(workdir, monkeypatch):
  found = lease._Lease(workdir / ".lock")
  found.take(pytest.fail)

  def fails(*args, **kwargs):
    raise ConnectionResetError("no route")

  monkeypatch.setattr(found, "_write", fails)
  with pytest.raises(TrainingError, match="cannot be renewed.*no route"):
    found.renew()


def test_a_lease_that_cannot_be_reached_says_so(monkeypatch):
  def fails(**kwargs):
    raise ValueError("no credentials")

  monkeypatch.setattr("google.cloud.storage.Client", fails)
  path = paths.place("gs://bucket/run/.lock", "--workdir")
  with pytest.raises(TrainingError, match="cannot be taken .*no credentials"):
    lease._Lease(path).take(pytest.fail)


@pytest.mark.processes
@pytest.mark.parametrize("text", ["precious", "precious" * 1000])
def test_an_object_of_others_is_no_lease(workdir, text):
  _run_as(workdir, text)
  with (
    pytest.raises(TrainingError, match="holds unknown text"),
    only_run(workdir),
  ):
    pass
  assert (workdir / ".lock").read_text() == text


# Saved states.

STATE = {"a": np.arange(6.0), "b": np.ones(2, np.float32)}


@pytest.mark.processes
@pytest.mark.fault("half-written-in-a-bucket")
def test_a_half_written_state_is_not_read(workdir, listed):
  with Checkpoints(workdir) as checkpoints:
    checkpoints.save(1, STATE, {"meta": 1})
    checkpoints.save(2, STATE, {"meta": 2})
    (workdir / "00000002" / "state.json").unlink()  # it is written last
    assert checkpoints.steps() == [1]
    assert checkpoints.latest() == 1
    checkpoints.save(2, STATE, {"meta": 3})  # over the half one
    assert checkpoints.latest() == 2
  (workdir / "00000002" / "state.json").unlink()
  with Checkpoints(workdir) as checkpoints:
    assert not any(name.startswith("00000002") for name in listed())
    assert checkpoints.latest() == 1
    restored = checkpoints.restore(1, STATE)
    np.testing.assert_array_equal(restored["a"], STATE["a"])


@pytest.mark.processes
@pytest.mark.fault("half-written-in-a-bucket")
def test_a_state_is_deleted_from_its_last_object_on(workdir, monkeypatch):
  with Checkpoints(workdir) as checkpoints:
    checkpoints.save(1, STATE, {})
    checkpoints.save(2, STATE, {})

    def dies(self, missing_ok=False):
      raise KeyboardInterrupt

    monkeypatch.setattr(bucket.BucketPath, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
      checkpoints.save(3, STATE, {})
    assert checkpoints.steps() == [2, 3]
    assert (workdir / "00000001" / "arrays").exists()


@pytest.mark.processes
def test_a_damaged_state_in_a_bucket_is_set_aside(workdir, listed):
  with Checkpoints(workdir) as checkpoints:
    checkpoints.save(1, STATE, {})
    checkpoints.save(2, STATE, {})
    (workdir / "00000002" / "arrays" / "_METADATA").write_text("{}")
    assert checkpoints.latest() == 1
  assert "corrupt-00000002/state.json" in listed()
  assert not any(name.startswith("00000002") for name in listed())


# Tasks.


@pytest.mark.processes
@pytest.mark.fault("half-written-in-a-bucket")
@pytest.mark.parametrize("cut", [1, 2])
def test_incomplete_task_is_replaced(workdir, backbone, monkeypatch, cut):
  task = random_task(backbone, name="birds")
  mv.save_task(task, workdir / "birds")
  upload, calls = bucket.upload, []

  def dies(file, path):
    calls.append(path.name)
    if len(calls) == cut:
      raise KeyboardInterrupt
    upload(file, path)

  with monkeypatch.context() as patch:
    patch.setattr(bucket, "upload", dies)
    with pytest.raises(KeyboardInterrupt):
      mv.save_task(task, workdir / "birds")
  assert calls == ["arrays.safetensors", "task.json"][:cut]
  with pytest.raises(TaskError, match="is not a task"):
    mv.load_task(str(workdir / "birds"), backbone)
  mv.save_task(task, str(workdir / "birds"))
  assert mv.load_task(str(workdir / "birds"), backbone).digest == task.digest


@pytest.mark.processes
def test_tasks_are_saved_to_and_loaded_from_a_bucket(
  workdir, backbone, tmp_path, capsys
):
  tasks = [random_task(backbone, name=name) for name in ("birds", "cars")]
  mv.save_tasks(tasks, str(workdir / "tasks"))
  mv.save_task(tasks[0], workdir / "one.safetensors")
  found = mv.load_tasks(str(workdir / "tasks"), backbone)
  assert [task.digest for task in found] == [task.digest for task in tasks]
  assert mv.load_task(workdir / "one.safetensors", backbone).name == "birds"
  (workdir / "notes" / "a.txt").write_text("mine")
  with pytest.raises(TaskError, match=r"holds unknown files \('a\.txt'\)"):
    mv.save_task(tasks[0], workdir / "notes")
  (workdir / "tasks" / "cars" / "more.txt").touch()
  with pytest.raises(TaskError, match=r"unknown files \['more\.txt'\]"):
    mv.load_task(str(workdir / "tasks" / "cars"), backbone)
