"""Servers that follow one folder of tasks, here in one process."""

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
import time
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
from memory_vit.errors import ConfigError, TaskError, TrainingError
from memory_vit.kinds import CLASSES
from memory_vit.prediction import Predictor
from memory_vit.runtime import files as written
from memory_vit.runtime import lock
from memory_vit.serving import ServerSettings, create_app, task_changes
from memory_vit.serving import task_folder as folders
from memory_vit.serving import task_follower as followers

CATS = random_task(BACKBONE, "cats", seed=5, classes=4)
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


async def shows(http, version):
  """The set of tasks of a server, once it has this version."""
  async with asyncio.timeout(PATIENCE):
    while True:
      ready = (await http.get("/readyz")).json()
      if ready["task_set"]["version"] >= version:
        return ready["task_set"]
      await asyncio.sleep(0.01)


async def has_problem(http):
  """The answer of /readyz, once it has a problem."""
  async with asyncio.timeout(PATIENCE):
    while not (done := await http.get("/readyz")).json()["problem"]:
      await asyncio.sleep(0.01)
  return done


def digests(model):
  return {one.name: one.digest for one in model.task_set.describe()}


def stored(folder):
  return json.loads((folder / "state" / "set.json").read_text())


@pytest.mark.fault("two-servers")
def test_a_change_of_one_server_answers_on_the_other(tmp_path):
  """Bitwise identical, under the same version and digest."""

  async def check():
    models = predictor(BIRDS), predictor()
    async with servers(tmp_path, *models) as (one, other):
      version = 1
      for name, task in (
        ("cats", CATS), ("birds", PETS), ("cats", None), ("cats", BIRDS),
      ):  # fmt: skip
        changing, following = (one, other) if version % 2 else (other, one)
        if task is None:
          url = f"/v1/tasks/{name}"
          done = await changing.delete(url, headers=BEARER)
        else:
          done = await put(changing, name, task, tmp_path)
        version += 1
        expected = done.json()["task_set"]
        assert expected["version"] == version
        assert await shows(following, version) == expected
        answers = [
          (await http.post("/v1/predict", **GOOD)).json()
          for http in (one, other)
        ]
        assert answers[0] == answers[1]
        assert answers[0]["task_set"] == expected
        if task is not None:
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
def test_changes_at_once_have_one_order(tmp_path):
  async def check():
    models = predictor(slots=8), predictor(slots=8)
    async with servers(tmp_path, *models) as clients:
      done = await asyncio.gather(
        *(
          put(http, f"t{i}", task, tmp_path)
          for i, (http, task) in enumerate(
            itertools.product(clients, (BIRDS, PETS, CATS))
          )
        )
      )
      assert [one.status_code for one in done] == 6 * [201]
      versions = [one.json()["task_set"]["version"] for one in done]
      assert sorted(versions) == [2, 3, 4, 5, 6, 7]
      sets = [await shows(http, 7) for http in clients]
      assert sets[0] == sets[1]
      assert sorted(sets[0]["names"]) == [f"t{i}" for i in range(6)]

  asyncio.run(check())


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

  async def same(model):
    async with servers(tmp_path, model):
      return digests(model), model.task_set.version

  first = predictor(BIRDS)
  asyncio.run(change(first))
  assert digests(first).keys() == {"birds", "cats", "aaa"}
  assert not caplog.records
  # Slots that were freed stay free, also where so many are not reserved.
  again = predictor(BIRDS, slots=1)
  assert asyncio.run(same(again)) == (digests(first), 6)
  assert again.task_set.slots == first.task_set.slots
  assert "birds of --task are not used" in caplog.text
  [cats] = [t for t in stored(tmp_path)["tasks"] if t["name"] == "cats"]
  kept = tmp_path / "state" / "tasks" / f"{cats['sha256']}.safetensors"
  assert kept.read_bytes() == task_bytes(CATS, tmp_path)
  kept.write_bytes(task_bytes(PETS, tmp_path))
  with pytest.raises(TaskError, match="'cats' in --state_dir is damaged"):
    create_app(predictor(), ServerSettings(state_dir=str(tmp_path / "state")))


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
  """The old set answers, and the next version is tried."""
  monkeypatch.setattr(followers, "_AGAIN_SECONDS", NOT_TRIED_AGAIN)
  real = Predictor.make_ready

  def without_room(self, by_slot, version):
    if self is models[1] and version == 2:
      raise RuntimeError("out of memory")
    return real(self, by_slot, version)

  monkeypatch.setattr(Predictor, "make_ready", without_room)
  models = predictor(BIRDS), predictor()

  async def check():
    async with servers(tmp_path, *models) as (one, other):
      await put(one, "cats", CATS, tmp_path)
      done = await has_problem(other)
      ready = done.json()
      assert (done.status_code, ready["status"]) == (200, "ready")
      assert (ready["task_set"]["version"], ready["newest"]) == (1, 2)
      assert ready["problem"] == "out of memory"
      metrics = (await other.get("/metrics")).text
      assert "memory_vit_task_set_version 1.0" in metrics
      assert "memory_vit_task_set_newest 2.0" in metrics
      assert 'task_set_problem{reason="out of memory"} 1.0' in metrics
      answer = (await other.post("/v1/predict", **GOOD)).json()
      assert answer["task_set"]["version"] == 1
      await asyncio.sleep(0.2)
      assert caplog.text.count("still answers: out of memory") == 1
      await put(one, "pets", PETS, tmp_path)
      assert await shows(other, 3) == await shows(one, 3)
      ready = (await other.get("/readyz")).json()
      assert (ready["newest"], ready["problem"]) == (3, None)
      assert "{reason=" not in (await other.get("/metrics")).text

  asyncio.run(check())


@contextlib.contextmanager
def damaging(folder, monkeypatch):
  """Damage the files of tasks as they are written."""
  real = folders.TaskFolder.publish

  def damaged(self, new, old, parts):
    for part in parts.values():
      part.write_bytes(task_bytes(PETS, folder))
    real(self, new, old, parts)

  with monkeypatch.context() as patch:
    patch.setattr(folders.TaskFolder, "publish", damaged)
    yield


@pytest.mark.fault("two-servers")
def test_damaged_files_can_be_removed_one_by_one(tmp_path, monkeypatch):
  """The old set answers until the last of them is removed."""
  reader = random_task(BACKBONE, "reader", attends_to=[BIRDS])

  async def check():
    models = predictor(BIRDS, reader), predictor()
    async with servers(tmp_path, *models) as (one, other):
      with damaging(tmp_path, monkeypatch):
        await put(one, "cats", CATS, tmp_path)
        await put(one, "dogs", CATS, tmp_path)
      await has_problem(other)
      for name in ("birds", "reader"):  # cats and dogs may attend to it
        refused = await other.delete(f"/v1/tasks/{name}", headers=BEARER)
        assert refused.status_code == 409
      done = await other.delete("/v1/tasks/cats", headers=BEARER)
      assert done.json()["task_set"] == {
        "version": 4, "names": ["birds", "reader", "dogs"], "digest": "",
      }  # fmt: skip
      assert (await shows(one, 4))["names"] == ["birds", "reader", "dogs"]
      assert await names(other) == ["birds", "reader"]
      await other.delete("/v1/tasks/dogs", headers=BEARER)
      assert await shows(one, 5) == await shows(other, 5)
      assert await names(other) == ["birds", "reader"]

  asyncio.run(check())


@pytest.mark.fault("two-servers")
def test_a_damaged_file_is_named_and_can_be_removed(tmp_path, monkeypatch):
  monkeypatch.setattr(followers, "_AGAIN_SECONDS", 0.05)

  async def check():
    models = predictor(BIRDS), predictor()
    async with servers(tmp_path, *models) as (one, other):
      with damaging(tmp_path, monkeypatch):
        await put(one, "cats", CATS, tmp_path)
      problem = (await has_problem(other)).json()["problem"]
      assert "file of task 'cats' in --state_dir is damaged" in problem
      refused = await put(other, "new", PETS, tmp_path)
      assert refused.status_code == 500
      assert "Nothing has changed" in refused.json()["error"]
      done = await other.delete("/v1/tasks/cats", headers=BEARER)
      assert done.json()["task_set"]["version"] == 3
      assert await shows(one, 3) == await shows(other, 3)
      # One that is mended is found without another change.
      await put(one, "cats", CATS, tmp_path)
      assert await shows(other, 4) == await shows(one, 4)

  asyncio.run(check())


@pytest.mark.fault("two-servers")
@pytest.mark.parametrize("content", [None, "{}", '{"version": 1', "older"])
def test_another_set_json_is_neither_followed_nor_changed(tmp_path, content):
  """Such as a restored one; a server does not start with a damaged one."""
  path = tmp_path / "state" / "set.json"

  async def check():
    async with servers(tmp_path, predictor(BIRDS)) as [http]:
      first = path.read_text()
      await put(http, "cats", CATS, tmp_path)
      if content is None:
        path.unlink()
      else:
        path.write_text(first if content == "older" else content)
      before = files(tmp_path)
      ready = (await has_problem(http)).json()
      assert ready["task_set"]["version"] == 2
      for done in (
        await put(http, "pets", PETS, tmp_path),
        await http.delete("/v1/tasks/cats", headers=BEARER),
      ):
        assert done.status_code == 500
        assert "Nothing has changed" in done.json()["error"]
      assert await names(http) == ["birds", "cats"]
      assert [p for p in files(tmp_path) if "upload" not in p.name] == [
        p for p in before if "upload" not in p.name
      ]

  asyncio.run(check())
  if content in ("{}", '{"version": 1'):
    with pytest.raises(ConfigError, match=r"set\.json cannot be read"):
      create_app(predictor(), ServerSettings(state_dir=str(tmp_path / "state")))
    assert path.read_text() == content


class Killed(BaseException):
  """Ends a change, as kill -9 does."""


@pytest.mark.fault("server-killed")
@pytest.mark.parametrize("step", ["file", "set"])
def test_a_change_that_is_cut_off_leaves_the_old_set(
  tmp_path, monkeypatch, step
):
  """The file of its task may stay; a later change removes it."""
  real = Path.replace

  def cut(self, target):
    if (target.name == "set.json") == (step == "set"):
      raise Killed
    return real(self, target)

  state = tmp_path / "state"
  app = create_app(predictor(BIRDS), ServerSettings(state_dir=str(state)))
  folder, follower = app.state.service._folder, app.state.service.follower
  before = folder.read()
  left = state / "tasks" / ".left.part.safetensors"
  left.write_bytes(task_bytes(CATS, tmp_path))
  with monkeypatch.context() as patch:
    patch.setattr(Path, "replace", cut)
    with pytest.raises(Killed):
      follower.put("cats", CATS, left)
  assert folder.read() == before
  model = predictor()
  follower = create_app(
    model, ServerSettings(state_dir=str(state))
  ).state.service.follower
  assert model.task_set.names == ("birds",)
  note = state / "tasks" / "note.txt"
  note.touch()
  for path in (state / "tasks").iterdir():
    os.utime(path, (0, 0))
  # Only now does the time of grace of its file begin.
  with folder.part() as part:
    part.write_bytes(task_bytes(PETS, tmp_path))
    follower.put("birds", PETS, part)
  birds, pets = before.tasks[0].sha256, folder.read().tasks[0].sha256
  kept = {f"{birds}.safetensors", f"{pets}.safetensors", "note.txt"}
  assert {path.name for path in (state / "tasks").iterdir()} == kept
  os.utime(folder.file(birds), (0, time.time() - folders.GRACE_SECONDS - 1))
  follower.remove("birds")
  assert {path.name for path in (state / "tasks").iterdir()} == {
    f"{pets}.safetensors", "note.txt",
  }  # fmt: skip


@pytest.mark.fault("server-disk-full")
@pytest.mark.parametrize("place", ["upload", "file", "set"])
@pytest.mark.parametrize(
  ("number", "status"), [(errno.ENOSPC, 507), (errno.EIO, 500)]
)
def test_a_full_disk_changes_nothing(
  tmp_path, monkeypatch, caplog, place, number, status
):
  caplog.set_level(logging.INFO, "memory_vit")
  error = OSError(number, os.strerror(number))

  def open_full(self, mode="r", *args, **kwargs):
    if mode == "xb":
      raise error
    return real_open(self, mode, *args, **kwargs)

  def sync_full(path):
    if (place == "set") == path.name.startswith(".set.json"):
      raise error
    return real_sync(path)

  real_open, real_sync = Path.open, written.sync

  async def check():
    models = predictor(BIRDS), predictor()
    async with servers(tmp_path, *models) as (one, other):
      before = {p: p.read_bytes() for p in files(tmp_path / "state")}
      body = task_bytes(PETS, tmp_path)
      with monkeypatch.context() as patch:
        if place == "upload":
          patch.setattr(Path, "open", open_full)
        else:
          patch.setattr(written, "sync", sync_full)
        sent = [("PUT", "cats"), ("PUT", "birds")]
        for method, name in sent + [("DELETE", "birds")] * (place != "upload"):
          content = {"content": body} if method == "PUT" else {}
          done = await one.request(
            method, f"/v1/tasks/{name}", headers=BYTES, **content
          )
          assert done.status_code == status, done.text
          assert os.strerror(number) in done.json()["error"]
      assert before == {p: p.read_bytes() for p in files(tmp_path / "state")}
      for model in models:
        assert digests(model) == {"birds": BIRDS.digest}
      done = await put(one, "cats", CATS, tmp_path)
      assert await shows(other, 2) == done.json()["task_set"]

  asyncio.run(check())
  refused = [r.getMessage() for r in caplog.records if "audit" in r.name]
  count = sum("refused: the folder of tasks" in line for line in refused)
  assert count == (2 if place == "upload" else 3)


@pytest.mark.fault("server-disk-full")
def test_a_task_of_a_path_needs_room_as_well():
  """Its file is copied; the answer names no path of the server."""
  error = TrainingError("/state/tasks/.part.safetensors cannot be written")
  error.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  refusal = task_changes._refusal(error, "put")
  assert refusal.status == 507
  assert "/state" not in refusal.message


@pytest.mark.fault("two-servers")
def test_a_request_waits_for_the_version_that_it_wants(tmp_path, monkeypatch):
  """So clients read their own changes from any server."""
  monkeypatch.setattr(followers, "POLL_SECONDS", 1e6)  # a request looks itself

  async def check():
    models = predictor(BIRDS), predictor()
    async with servers(tmp_path, *models, timeout=20.0) as (one, other):
      for version, path in ((2, "/v1/predict"), (3, "/v1/attention")):
        await put(one, f"t{version}", CATS, tmp_path)
        old = await other.post(path, **GOOD)
        assert old.json()["task_set"]["version"] == version - 1
        wanted = {"x-min-version": str(version)}
        done = await other.post(path, **GOOD, headers=wanted)
        assert done.json()["task_set"]["version"] == version
      for text in ("", "-1", "1.0", "x", "²", "9" * 16):
        bad = httpx_headers(text)
        done = await other.post("/v1/predict", **GOOD, headers=bad)
        assert done.status_code == 400, text
        assert "x-min-version" in done.json()["error"]
    async with servers(tmp_path, predictor(), timeout=0.1) as [http]:
      wanted = {"x-min-version": "4"}
      done = await http.post("/v1/predict", **GOOD, headers=wanted)
      assert (done.status_code, done.headers["retry-after"]) == (503, "1")
      assert "answers by 3 of 3" in done.json()["error"]

  asyncio.run(check())


def httpx_headers(text):
  return [(b"x-min-version", text.encode("latin-1"))]


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


def test_what_a_server_without_a_folder_wrote_goes(tmp_path, monkeypatch):
  monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
  app = create_app(predictor(BIRDS), ServerSettings())
  assert len(files(tmp_path)) == 3
  app.state.service.remove_files()
  assert not list(tmp_path.iterdir())
  shutil.rmtree(tmp_path)
