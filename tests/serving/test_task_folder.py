"""Servers that follow one folder of tasks, here in one process."""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from served import (
  BACKBONE,
  BEARER,
  BIRDS,
  BYTES,
  PETS,
  client,
  files,
  image_files,
  names,
  png,
  predictor,
  serving,
  task_bytes,
  token_file,
)

import memory_vit as mv
from memory_vit.errors import ConfigError, TrainingError
from memory_vit.kinds import CLASSES
from memory_vit.prediction import Predictor
from memory_vit.prediction.task_set import answer_digest
from memory_vit.runtime import files as written
from memory_vit.runtime import lock
from memory_vit.serving import ServerSettings, create_app, task_changes
from memory_vit.serving import task_folder as folders
from memory_vit.serving import task_follower as followers
from memory_vit.serving.request_error import RequestError
from memory_vit.tasks import store

CATS = random_task(BACKBONE, "cats", seed=5, classes=4)
# A head, which lies in another kind of slot than the others.
HEAD = random_task(BACKBONE, "cats", seed=6, regime="head", cells=0)
GOOD = {"files": image_files(png())}
NOT_TRIED_AGAIN = 1e6
PATIENCE = 60


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(followers, "POLL_SECONDS", 0.02)


@contextlib.asynccontextmanager
async def servers(folder, *models, **options):
  """Clients of servers that follow FOLDER/state."""
  state = str(folder / "state")
  options = {"token_file": token_file(folder), "state_dir": state, **options}
  async with contextlib.AsyncExitStack() as stack:
    yield [
      await stack.enter_async_context(serving(model, **options))
      for model in models
    ]


async def put(http, name, task, folder):
  body = task_bytes(task, folder)
  return await http.put(f"/v1/tasks/{name}", content=body, headers=BYTES)


async def shows(http, task_set):
  """Wait until a server answers by a set of tasks, that of another answer."""
  async with asyncio.timeout(PATIENCE):
    while (await http.get("/readyz")).json()["task_set"] != task_set:
      await asyncio.sleep(0.01)


async def shown(http):
  return (await http.get("/readyz")).json()["task_set"]


async def problems(http, name):
  """The problems of a server, once it has one of this name."""
  async with asyncio.timeout(PATIENCE):
    while name not in (done := (await http.get("/readyz")).json())["problems"]:
      await asyncio.sleep(0.01)
  assert done["status"] == "ready"
  return done["problems"]


async def no_problems(http):
  """Wait until a server has none, also in its metrics."""
  async with asyncio.timeout(PATIENCE):
    while (await http.get("/readyz")).json()["problems"]:
      await asyncio.sleep(0.01)
  assert "{reason=" not in (await http.get("/metrics")).text


def task_files(folder):
  return folder / "state" / "tasks"


@pytest.mark.fault("two-servers")
def test_a_change_of_one_server_answers_on_the_other(tmp_path):
  """Bitwise identical, under the same digests."""

  async def check():
    models = predictor(BIRDS), predictor()
    async with servers(tmp_path, *models) as clients:
      for i, (name, task) in enumerate((
        ("cats", CATS), ("birds", PETS), ("cats", HEAD), ("cats", None),
        ("cats", BIRDS),
      )):  # fmt: skip
        changing, following = clients[i % 2], clients[1 - i % 2]
        if task is None:
          url = f"/v1/tasks/{name}"
          done = await changing.delete(url, headers=BEARER)
          assert done.json()["digest"] == answer_digest(HEAD)
        else:
          done = await put(changing, name, task, tmp_path)
          assert done.json()["digest"] == answer_digest(task)
        expected = await shown(changing)
        await shows(following, expected)
        answers = [
          (await http.post("/v1/predict", **GOOD)).json() for http in clients
        ]
        assert answers[0] == answers[1]
        assert answers[0]["task_set"] == expected
        if task is not None:
          assert expected["tasks"][name] == answer_digest(task)
          [image] = answers[1]["images"]
          require_right(image["tasks"][name], task)

  asyncio.run(check())


def require_right(guesses, task):
  """Compare with `mv.forward` of the task alone."""
  batch = np.asarray(mv.preprocess([png()], task))
  slots = mv.fill_slots(BACKBONE, task, slots=4)
  logits = np.asarray(mv.forward(BACKBONE, slots, batch)[task.name])
  [expected] = CLASSES.activate(np.asarray(logits, np.float64))
  for guess in guesses:
    assert guess["probability"] == expected[guess["index"]]


@pytest.mark.fault("two-servers")
def test_changes_at_once_lose_none(tmp_path):
  async def check():
    models = predictor(slots=8), predictor(slots=8)
    async with servers(tmp_path, *models) as clients:
      tasks = [*itertools.product(clients, (BIRDS, PETS, CATS))]
      done = await asyncio.gather(
        *(
          put(http, f"t{i}", task, tmp_path)
          for i, (http, task) in enumerate(tasks)
        )
      )
      assert [one.status_code for one in done] == 6 * [201]
      expected = {f"t{i}": answer_digest(t) for i, (_, t) in enumerate(tasks)}
      for http, model in zip(clients, models, strict=True):
        while model.task_set.digests != expected:
          await asyncio.sleep(0.01)
        assert (await shown(http))["tasks"] == expected

  asyncio.run(check())


@pytest.mark.fault("two-servers")
def test_a_file_that_is_put_into_the_folder_answers(tmp_path):
  """As the tasks of a folder that was filled before the first server came."""
  folder = task_files(tmp_path)
  mv.save_task(CATS, folder / "mine.safetensors")
  (folder / "note.txt").touch()

  async def check():
    async with servers(tmp_path, predictor()) as [http]:
      assert await names(http) == ["mine"]
      mv.save_task(PETS, folder / "pets.safetensors")
      mv.save_task(BIRDS, folder / "mine.safetensors")
      tasks = {"mine": answer_digest(BIRDS), "pets": answer_digest(PETS)}
      while (await shown(http))["tasks"] != tasks:
        await asyncio.sleep(0.01)
      (folder / "mine.safetensors").unlink()
      while await names(http) != ["pets"]:
        await asyncio.sleep(0.01)

  asyncio.run(check())


@pytest.mark.fault("two-servers")
def test_only_changed_files_are_read(tmp_path, monkeypatch):
  read = []
  real = store.load_task

  def noting(path, backbone):
    read.append(path.name)
    return real(path, backbone)

  monkeypatch.setattr(store, "load_task", noting)

  async def check():
    async with servers(tmp_path, predictor(BIRDS, PETS), predictor()) as (
      one, other,
    ):  # fmt: skip
      files = ["birds.safetensors", "pets.safetensors"]
      assert sorted(read) == sorted(2 * files)
      read.clear()
      await put(one, "cats", CATS, tmp_path)
      await shows(other, await shown(one))
      assert read == [".part.safetensors", "cats.safetensors"]

  asyncio.run(check())


@pytest.mark.fault("two-servers")
def test_tasks_of_two_moments_are_never_mixed(tmp_path, monkeypatch):
  """Files that change while others are read are read again."""
  state = ServerSettings(state_dir=str(tmp_path / "state"))
  model = predictor(BIRDS, PETS)
  app = create_app(model, state)
  follower, real = app.state.service.follower, store.load_task
  folder, seen = task_files(tmp_path), []

  def meanwhile(path, backbone):
    if not seen:  # an older birds beside this pets would be a mixed set
      mv.save_task(CATS, folder / "birds.safetensors")
      mv.save_task(BIRDS, folder / "pets.safetensors")
    seen.append(path.name)
    return real(path, backbone)

  mv.save_task(CATS, folder / "pets.safetensors")
  monkeypatch.setattr(store, "load_task", meanwhile)
  follower.look()
  assert sorted(seen) == ["birds.safetensors", *2 * ["pets.safetensors"]]
  expected = {"birds": answer_digest(CATS), "pets": answer_digest(BIRDS)}
  assert model.task_set.digests == expected


@pytest.mark.fault("server-restart")
def test_tasks_are_there_after_a_restart(tmp_path, caplog):
  """--task counts only for the first server of a folder."""
  reader = random_task(BACKBONE, "aaa", attends_to=[CATS])

  async def change(model):
    async with servers(tmp_path, model) as [http]:
      for name, task in (
        ("cats", CATS), ("gone", CATS), ("aaa", reader), ("birds", PETS),
      ):  # fmt: skip
        done = await put(http, name, task, tmp_path)
        assert done.status_code in (200, 201), done.text
      await http.delete("/v1/tasks/gone", headers=BEARER)

  first = predictor(BIRDS)
  asyncio.run(change(first))
  assert first.task_set.digests.keys() == {"birds", "cats", "aaa"}
  assert not caplog.records
  state = ServerSettings(state_dir=str(tmp_path / "state"))
  again = predictor(BIRDS, slots=1)
  create_app(again, state)
  assert again.task_set.digest == first.task_set.digest
  assert "birds of --task are not used" in caplog.text
  kept = task_files(tmp_path) / "cats.safetensors"
  assert kept.read_bytes() == task_bytes(CATS, tmp_path)
  for path in task_files(tmp_path).iterdir():
    path.unlink()
  again = predictor(BIRDS)
  create_app(again, state)
  assert again.task_set.names == ()


@pytest.mark.fault("server-restart")
def test_a_damaged_task_and_its_readers_are_named_at_the_start(tmp_path):
  reader = random_task(BACKBONE, "reader", attends_to=[CATS])
  create_app(
    predictor(BIRDS, CATS, reader),
    ServerSettings(state_dir=str(tmp_path / "state")),
  )
  damaged = task_files(tmp_path) / "cats.safetensors"
  damaged.write_bytes(damaged.read_bytes()[:-4])
  (task_files(tmp_path) / "Bad\udcff.safetensors").touch()
  (task_files(tmp_path) / "loop.safetensors").symlink_to("loop.safetensors")
  (task_files(tmp_path) / "gone.safetensors").symlink_to("nowhere")

  async def check():
    async with servers(tmp_path, predictor(BIRDS)) as [http]:
      assert await names(http) == ["birds"]
      found = (await http.get("/readyz")).json()["problems"]
      assert found.keys() == {"cats", "reader", "Bad\\xff", "loop", "gone"}
      assert "cats.safetensors cannot be read" in found["cats"]
      assert "'cats'" in found["reader"]
      metrics = (await http.get("/metrics")).text
      assert 'memory_vit_task_problem{reason="cats.safetensors' in metrics
      done = await put(http, "pets", PETS, tmp_path)
      assert done.status_code == 201
      refused = await http.delete("/v1/tasks/cats", headers=BEARER)
      assert (refused.status_code, "reader" in refused.text) == (409, True)
      # Once it is whole again, both answer.
      done = await put(http, "cats", CATS, tmp_path)
      assert done.status_code == 201
      assert {*await names(http)} == {"birds", "pets", "cats", "reader"}

  asyncio.run(check())


@pytest.mark.fault("two-servers")
def test_a_server_of_another_model_refuses_to_start(tmp_path):
  state = ServerSettings(state_dir=str(tmp_path / "state"))
  create_app(predictor(BIRDS), state)
  before = files(tmp_path)
  other = Predictor.from_model(tiny_backbone(seed=9), warm_up=False)
  side = BACKBONE.config.image_size
  central = mv.EvalPreprocessing(image_size=side, crop="central", resize=9)
  task = random_task(BACKBONE, "central", preprocessing=central)
  for model, word in ((other, "fingerprint"), (predictor(task), "central")):
    with pytest.raises(ConfigError, match="another --state_dir.*") as refused:
      create_app(model, state)
    assert word in str(refused.value)
  assert files(tmp_path) == before


@pytest.mark.fault("two-servers")
def test_a_server_that_cannot_show_the_newest_set_says_so(
  tmp_path, monkeypatch, caplog
):
  """The old set answers, and the next one is tried."""
  monkeypatch.setattr(followers, "_AGAIN_SECONDS", NOT_TRIED_AGAIN)
  real = Predictor.make_ready

  def without_room(self, by_slot):
    if self is models[1] and len(by_slot) == 2:
      raise RuntimeError("out of memory")
    return real(self, by_slot)

  monkeypatch.setattr(Predictor, "make_ready", without_room)
  models = predictor(BIRDS), predictor()

  async def check():
    async with servers(tmp_path, *models) as (one, other):
      await put(one, "cats", CATS, tmp_path)
      assert await problems(other, "*") == {"*": "out of memory"}
      metrics = (await other.get("/metrics")).text
      assert 'task_problem{reason="out of memory",task="*"} 1.0' in metrics
      answer = (await other.post("/v1/predict", **GOOD)).json()
      assert list(answer["task_set"]["tasks"]) == ["birds"]
      await asyncio.sleep(0.2)
      assert caplog.text.count("--state_dir: out of memory") == 1
      await put(one, "pets", PETS, tmp_path)
      await shows(other, await shown(one))
      await no_problems(other)

  asyncio.run(check())


@pytest.mark.fault("two-servers")
def test_a_file_that_is_damaged_is_named_and_can_be_removed(
  tmp_path, monkeypatch
):
  """The task that was loaded before answers, until its file is mended."""
  monkeypatch.setattr(followers, "_AGAIN_SECONDS", 0.05)

  async def check():
    models = predictor(BIRDS), predictor()
    async with servers(tmp_path, *models) as (one, other):
      await put(one, "cats", CATS, tmp_path)
      await shows(other, before := await shown(one))
      file = task_files(tmp_path) / "cats.safetensors"
      content = file.read_bytes()
      file.write_bytes(content[:-100])
      for http in (one, other):
        assert "cannot be read" in (await problems(http, "cats"))["cats"]
        assert await shown(http) == before
      file.write_bytes(content)
      for http in (one, other):
        await no_problems(http)
      file.write_bytes(b"")
      await problems(other, "cats")
      done = await other.delete("/v1/tasks/cats", headers=BEARER)
      assert done.json()["digest"] == answer_digest(CATS)
      await shows(one, await shown(other))
      assert await names(one) == ["birds"]
      await no_problems(one)

  asyncio.run(check())


@pytest.mark.fault("two-servers")
def test_a_folder_that_is_gone_is_neither_followed_nor_changed(tmp_path):
  """As if its disk were not mounted; the tasks answer on."""

  async def check():
    async with servers(tmp_path, predictor(BIRDS)) as [http]:
      folder = task_files(tmp_path)
      folder.rename(tmp_path / "away")
      before = files(tmp_path / "state")
      assert "cannot be read" in (await problems(http, "*"))["*"]
      for done in (
        await put(http, "pets", PETS, tmp_path),
        await http.delete("/v1/tasks/birds", headers=BEARER),
      ):
        assert done.status_code == 500, done.text
        assert "no change" in done.json()["error"]
      assert await names(http) == ["birds"]
      assert files(tmp_path / "state") == before
      (tmp_path / "away").rename(folder)
      await no_problems(http)
      assert (await put(http, "pets", PETS, tmp_path)).status_code == 201

  asyncio.run(check())


class Killed(BaseException):
  """Ends a process, as kill -9 does."""


def cut_off(monkeypatch, number):
  """Raise `Killed` at an operation on files; return how many there were."""
  count = itertools.count()

  def cutting(real):
    def operation(*given, **options):
      if next(count) == number:
        raise Killed
      return real(*given, **options)

    return operation

  for place, name in (
    (Path, "write_bytes"), (Path, "replace"), (Path, "rename"),
    (Path, "mkdir"), (written, "sync"),
  ):  # fmt: skip
    monkeypatch.setattr(place, name, cutting(getattr(place, name)))
  # A killed process removes nothing.
  monkeypatch.setattr(Path, "unlink", lambda path, **_: None)
  monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
  return count


@pytest.mark.fault("server-killed")
@pytest.mark.parametrize("change", ["first", "add", "replace"])
def test_every_server_starts_after_a_kill_between_any_two_writes(
  tmp_path, monkeypatch, change
):
  """With the old tasks or the new ones; what is left goes with a change."""
  settings = ServerSettings(state_dir=str(tmp_path / "state"))
  name = {"add": "cats", "replace": "birds"}.get(change, "")
  old = {} if change == "first" else {"birds": answer_digest(BIRDS)}
  new = {"birds": answer_digest(BIRDS), "pets": answer_digest(PETS)}
  if name:
    new = {**old, name: answer_digest(CATS)}
  found = []
  for number in itertools.count():
    shutil.rmtree(tmp_path / "state", ignore_errors=True)
    if name:
      model = predictor(BIRDS)
      service = create_app(model, settings).state.service
    with monkeypatch.context() as patch:
      count = cut_off(patch, number)
      with contextlib.suppress(Killed):
        if name:
          service.follower.put(name, task_bytes(CATS, tmp_path), "it")
        else:
          create_app(predictor(BIRDS, PETS), settings)
    model = predictor()
    service = create_app(model, settings).state.service
    found.append(model.task_set.digests)
    service.follower.put("last", task_bytes(PETS, tmp_path), "it")
    assert {path.name for path in files(tmp_path / "state")} == {
      ".lock", *(f"{name}.safetensors" for name in model.task_set.names),
    }  # fmt: skip
    if next(count) <= number:
      break
  assert len(found) >= 4
  turn = found.index(new)
  assert found == turn * [old] + (len(found) - turn) * [new]


@pytest.mark.fault("server-disk-full")
@pytest.mark.parametrize("place", ["write", "sync"])
@pytest.mark.parametrize(
  ("number", "status"), [(errno.ENOSPC, 507), (errno.EIO, 500)]
)
def test_a_full_disk_changes_nothing(
  tmp_path, monkeypatch, caplog, place, number, status
):
  caplog.set_level(logging.INFO, "memory_vit")
  error = OSError(number, os.strerror(number))

  def write_full(path, content):
    path.touch()
    raise error

  def sync_full(path):
    raise error

  async def check():
    models = predictor(BIRDS), predictor()
    async with servers(tmp_path, *models) as (one, other):
      before = {p: p.read_bytes() for p in files(tmp_path / "state")}
      body = task_bytes(PETS, tmp_path)
      with monkeypatch.context() as patch:
        if place == "write":
          patch.setattr(Path, "write_bytes", write_full)
        else:
          patch.setattr(written, "sync", sync_full)
        for name in ("cats", "birds"):
          url = f"/v1/tasks/{name}"
          done = await one.put(url, content=body, headers=BYTES)
          assert done.status_code == status, done.text
          assert os.strerror(number) in done.json()["error"]
      assert before == {p: p.read_bytes() for p in files(tmp_path / "state")}
      for model in models:
        assert model.task_set.digests == {"birds": answer_digest(BIRDS)}
      await put(one, "cats", CATS, tmp_path)
      await shows(other, await shown(one))

  asyncio.run(check())
  refused = [r.getMessage() for r in caplog.records if "audit" in r.name]
  assert sum("refused: the folder of tasks" in line for line in refused) == 2


@pytest.mark.fault("server-disk-full")
def test_a_task_can_be_removed_on_a_full_disk(tmp_path, monkeypatch):
  """Its file is removed, and what a killed change left."""
  error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def full(*_):
    raise error

  async def check():
    async with servers(tmp_path, predictor(BIRDS, PETS)) as [http]:
      left = tmp_path / "state" / ".part.safetensors"
      left.write_bytes(b"half")
      for place, name in (
        (Path, "write_bytes"), (os, "pwrite"), (written, "sync"),
      ):  # fmt: skip
        monkeypatch.setattr(place, name, full)
      done = await http.delete("/v1/tasks/pets", headers=BEARER)
      assert done.status_code == 200, done.text
      assert await names(http) == ["birds"]
      assert {path.name for path in files(tmp_path / "state")} == {
        ".lock", "birds.safetensors",
      }  # fmt: skip

  asyncio.run(check())


@pytest.mark.fault("server-disk-full")
def test_a_read_only_folder_is_named(tmp_path, monkeypatch):
  """At a change, if it was writable at the start."""
  real = os.open

  def refused(path, flags, *given, **options):
    if Path(path).name == ".lock" and flags & os.O_RDWR:
      raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    return real(path, flags, *given, **options)

  async def check():
    async with servers(tmp_path, predictor(BIRDS)) as [http]:
      monkeypatch.setattr(os, "open", refused)
      for done in (
        await put(http, "cats", CATS, tmp_path),
        await http.delete("/v1/tasks/birds", headers=BEARER),
      ):
        assert done.status_code == 500
        assert "Read-only file system): no change" in done.json()["error"]
      assert await names(http) == ["birds"]

  asyncio.run(check())


@pytest.mark.fault("server-disk-full")
def test_a_task_of_a_path_needs_room_as_well():
  """Its file is copied; the answer names no path of the server."""
  error = TrainingError("/state/tasks/.part.safetensors cannot be written")
  error.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  refusal = task_changes._refusal(error, "put")
  assert refusal.status == 507
  assert "/state" not in refusal.message


@pytest.mark.fault("two-servers")
def test_a_request_waits_for_the_task_that_it_wants(tmp_path, monkeypatch):
  """So clients read their own changes from any server."""
  monkeypatch.setattr(followers, "POLL_SECONDS", 1e6)  # a request looks itself

  async def check():
    models = predictor(BIRDS), predictor()
    async with servers(tmp_path, *models, timeout=20.0) as (one, other):
      for path, task in (("/v1/predict", CATS), ("/v1/attention", PETS)):
        done = await put(one, "new", task, tmp_path)
        digest = done.json()["digest"]
        old = await other.post(path, **GOOD)
        assert old.json()["task_set"]["tasks"].get("new") != digest
        wanted = {"x-wait-for": f"new={digest}"}
        done = await other.post(path, **GOOD, headers=wanted)
        assert done.json()["task_set"]["tasks"]["new"] == digest
      await one.delete("/v1/tasks/new", headers=BEARER)
      done = await other.post(path, **GOOD, headers={"x-wait-for": "new=none"})
      assert list(done.json()["task_set"]["tasks"]) == ["birds"]
      for text in ("", "new", "new=1", f"N={digest}", f"new={digest},", "²"):
        bad = [(b"x-wait-for", text.encode("latin-1"))]
        done = await other.post("/v1/predict", **GOOD, headers=bad)
        assert done.status_code == 400, text
        assert "x-wait-for" in done.json()["error"]
    async with servers(tmp_path, predictor(), timeout=0.1) as [http]:
      wanted = {"x-wait-for": f"birds={digest}"}
      done = await http.post("/v1/predict", **GOOD, headers=wanted)
      assert (done.status_code, done.headers["retry-after"]) == (503, "1")
      assert answer_digest(BIRDS) in done.json()["error"]

  asyncio.run(check())


@pytest.mark.fault("two-servers")
def test_a_change_does_not_wait_for_ever_for_another(tmp_path, monkeypatch):
  monkeypatch.setattr(folders, "_LOCK_SECONDS", 0.05)

  def refuse(owner):
    raise AssertionError(owner)

  async def check():
    async with servers(tmp_path, predictor(BIRDS)) as [http]:
      path = tmp_path / "state" / ".lock"
      with lock.one_at_a_time(path, refuse, "--state_dir"):
        done = await put(http, "cats", CATS, tmp_path)
        assert (done.status_code, done.headers["retry-after"]) == (503, "5")
        assert "is changing the tasks" in done.json()["error"]
        answer = await http.post("/v1/predict", **GOOD)
        assert answer.status_code == 200
      assert (await put(http, "cats", CATS, tmp_path)).status_code == 201

  asyncio.run(check())


@pytest.mark.fault("forged-change")
def test_one_of_several_servers_without_a_folder_changes_nothing(tmp_path):
  settings = ServerSettings(token_file=token_file(tmp_path))
  app = create_app(predictor(BIRDS), settings, refuse_changes="give state_dir")

  async def check():
    async with app.router.lifespan_context(app), client(app) as http:
      done = await put(http, "cats", CATS, tmp_path)
      assert (done.status_code, done.json()) == (
        403, {"error": "give state_dir"},
      )  # fmt: skip
      assert (await http.get("/v1/tasks")).json()["changes"] is False

  asyncio.run(check())


def test_files_that_a_closing_server_removes_are_no_change(monkeypatch, caplog):
  """Whoever made the application may go on with the predictor."""
  model = predictor(BIRDS)
  service = create_app(model, ServerSettings()).state.service
  folder, look = service.follower._folder, service.follower.look
  real = folder.close

  def close():  # `shutil.rmtree` removes the files first
    folder.path("birds").unlink()
    look()
    real()
    look()

  monkeypatch.setattr(folder, "close", close)
  service.close()
  assert model.task_set.names == ("birds",)
  assert not caplog.records


def test_a_look_that_outlasts_the_server_shows_nothing(tmp_path, monkeypatch):
  model = predictor(BIRDS)
  state = ServerSettings(state_dir=str(tmp_path / "state"))
  service = create_app(model, state).state.service
  mv.save_task(PETS, task_files(tmp_path) / "pets.safetensors")
  real = model.make_ready

  def close_meanwhile(by_slot):
    service.close()
    return real(by_slot)

  monkeypatch.setattr(model, "make_ready", close_meanwhile)
  service.follower.look()
  assert model.task_set.names == ("birds",)
  with pytest.raises(RequestError, match="the server is stopping"):
    service.follower.remove("birds")
  assert (task_files(tmp_path) / "birds.safetensors").exists()


def test_files_of_a_server_without_a_folder_are_removed(tmp_path, monkeypatch):
  monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
  app = create_app(predictor(BIRDS), ServerSettings())
  assert [path.name for path in files(tmp_path)] == [
    ".lock", "birds.safetensors",
  ]  # fmt: skip
  app.state.service.close()
  assert not list(tmp_path.iterdir())
  shutil.rmtree(tmp_path)
