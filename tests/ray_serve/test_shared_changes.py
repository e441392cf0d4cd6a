"""Two replicas of the application, one ledger: no Ray, all in one process."""

import asyncio
import contextlib
import dataclasses
import threading
import time

import httpx
import jax
import numpy as np
import pytest
from conftest import random_task, tiny_backbone

import memory_vit as mv
from memory_vit.prediction import Predictor
from memory_vit.ray_serve.ledger import Ledger, Patience
from memory_vit.ray_serve.ledger_calls import LedgerLost
from memory_vit.ray_serve.shared_changes import SharedTaskChanges
from memory_vit.serving import ServerSettings, create_app
from memory_vit.serving.task_store import TaskStore

PATIENCE = Patience(ready=30, shown=0.5, news=1, founding=0.05, alive=0.05)
SECRET = "a token of 24 characters"
BEARER = {"Authorization": f"Bearer {SECRET}"}
BYTES = {**BEARER, "Content-Type": "application/octet-stream"}
BACKBONE = tiny_backbone()
BIRDS, PETS, CATS, DOGS = (
  random_task(BACKBONE, name, seed=i, classes=3)
  for i, name in enumerate(("birds", "pets", "cats", "dogs"))
)


class Cluster:
  """A ledger that can be lost, and replicas that reach it by its calls."""

  def __init__(self, folder, store=None, patience=PATIENCE):
    self.folder, self.store, self.patience = folder, store, patience
    self._token = folder / "token"
    self._token.touch(0o600)
    self._token.write_text(SECRET)
    self.dead, self.models, self.changes = set(), {}, {}
    self.begin_ledger()

  def begin_ledger(self):
    self._ledger = Ledger(self.store, self._is_alive, self.patience)
    self._lost = asyncio.Event()

  def lose_ledger(self):
    """End it: all calls fail, and the next ones reach another one."""
    self._lost.set()
    self.begin_ledger()

  async def _is_alive(self, handle):
    return handle not in self.dead

  def __getattr__(self, method):
    async def call(*arguments):
      lost = asyncio.create_task(self._lost.wait())
      asked = asyncio.create_task(getattr(self._ledger, method)(*arguments))
      await asyncio.wait({lost, asked}, return_when="FIRST_COMPLETED")
      if not asked.done():
        asked.cancel()
        raise LedgerLost
      lost.cancel()
      return asked.result()

    return call

  @contextlib.asynccontextmanager
  async def replica(self, name, *tasks, backbone=BACKBONE, timeout=None):
    """A client of one that is ready."""
    model = self.models[name] = Predictor.from_model(
      backbone, tasks, warm_up=False, batch_sizes=(1,), slots=4
    )

    def changes(*given):
      made = SharedTaskChanges(
        *given, ledger=self, member=name, handle=name, change_timeout=timeout,
        is_kept=self.store is not None,
      )  # fmt: skip
      self.changes[name] = made
      return made

    settings = ServerSettings(token_file=str(self._token))
    app = create_app(model, settings, changes)
    async with app.router.lifespan_context(app):
      await app.state.service.settled()
      assert app.state.service.state == "ready", app.state.service.problem
      transport = httpx.ASGITransport(app, raise_app_exceptions=False)
      async with httpx.AsyncClient(
        transport=transport, base_url="http://test", timeout=30
      ) as http:
        yield http

  def file(self, task):
    path = self.folder / f"{task.name}.safetensors"
    mv.save_task(task, path, format="safetensors")
    return path.read_bytes()

  async def put(self, http, task):
    url = f"/v1/tasks/{task.name}"
    return await http.put(url, content=self.file(task), headers=BYTES)


async def task_set(http):
  return (await http.get("/v1/tasks")).json()["task_set"]


async def with_two(folder, check, patience=PATIENCE):
  cluster = Cluster(folder, patience=patience)
  async with (
    cluster.replica("a", BIRDS, PETS) as a,
    cluster.replica("b", BIRDS, PETS) as b,
  ):
    await check(cluster, a, b)


def test_a_change_by_one_replica_is_that_of_all(tmp_path):
  async def check(cluster, a, b):
    grey = np.zeros((1, *[BACKBONE.config.image_size] * 2, 3), np.float32)
    assert await task_set(a) == await task_set(b)
    for change, names in (
      (cluster.put(a, CATS), ["birds", "pets", "cats"]),
      (b.delete("/v1/tasks/birds", headers=BEARER), ["pets", "cats"]),
      (cluster.put(b, DOGS), ["dogs", "pets", "cats"]),
      (cluster.put(a, DOGS), ["dogs", "pets", "cats"]),
    ):
      done = await change
      assert done.status_code in (200, 201), done.text
      told = done.json()["task_set"]
      assert told["names"] == names  # in the same slots
      assert told == await task_set(a) == await task_set(b)
      assert (done.json()["grew"], done.json()["compiled"]) == (False, 0)
    one, other = (m.predict_pixels(grey) for m in cluster.models.values())
    for name in one.logits:
      np.testing.assert_array_equal(one.logits[name], other.logits[name])
    assert told["version"] == 5
    gone = await b.delete("/v1/tasks/birds", headers=BEARER)
    assert (gone.status_code, sorted(gone.json()["known"])) == (
      404, ["cats", "dogs", "pets"],
    )  # fmt: skip

  asyncio.run(with_two(tmp_path, check))


def test_changes_of_two_replicas_at_once(tmp_path):
  async def check(cluster, a, b):
    done = await asyncio.gather(
      cluster.put(a, CATS),
      cluster.put(b, DOGS),
      a.delete("/v1/tasks/birds", headers=BEARER),
      b.delete("/v1/tasks/pets", headers=BEARER),
    )
    assert [d.status_code for d in done] == [201, 201, 200, 200]
    versions = [d.json()["task_set"]["version"] for d in done]
    assert sorted(versions) == [2, 3, 4, 5]
    assert await task_set(a) == await task_set(b)
    assert set((await task_set(a))["names"]) == {"cats", "dogs"}

  asyncio.run(with_two(tmp_path, check))


def overflowing(task):
  params = jax.tree.map(lambda a: np.full(a.shape, 3e38, a.dtype), task.params)
  return dataclasses.replace(task, params=params)


def test_what_one_replica_cannot_take_is_taken_by_none(tmp_path, monkeypatch):
  async def check(cluster, a, b):
    before = await task_set(a)

    def no_room(*_):
      raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
      patch.setattr(cluster.models["b"], "make_ready", no_room)
      done = await cluster.put(a, CATS)
      assert done.status_code == 500
      assert "replica b cannot take it: RESOURCE_EXH" in done.json()["error"]
    over = await cluster.put(b, overflowing(CATS))
    assert (over.status_code, "not finite" in over.text) == (422, True)
    assert before == await task_set(a) == await task_set(b)
    done = await cluster.put(a, CATS)
    assert done.json()["task_set"]["version"] == before["version"] + 1

  asyncio.run(with_two(tmp_path, check))


@pytest.mark.slow
def test_a_replica_that_is_late_is_named(tmp_path):
  async def check(cluster, a, b):
    before = await task_set(a)
    cluster.changes["b"]._following.cancel()  # it lives, and asks no more
    done = await cluster.put(a, CATS)
    assert (done.status_code, "in time: b." in done.text) == (503, True)
    assert int(done.headers["retry-after"]) > 0
    assert before == await task_set(a) == await task_set(b)
    cluster.dead.add("b")
    assert (await cluster.put(a, CATS)).status_code == 201

  patience = dataclasses.replace(PATIENCE, ready=0.5)
  asyncio.run(with_two(tmp_path, check, patience))


def test_each_replica_says_how_long_its_changes_may_take(tmp_path):
  """Such as of a new deployment, with the ledger of the one before it."""

  async def check():
    cluster = Cluster(tmp_path)
    async with (
      cluster.replica("a", BIRDS),
      cluster.replica("b", BIRDS, timeout=0.3) as b,
    ):
      cluster.changes["a"]._following.cancel()
      async with asyncio.timeout(10):  # the ledger would wait for 30
        done = await cluster.put(b, CATS)
      assert (done.status_code, "in time: a." in done.text) == (503, True)

  asyncio.run(check())


def test_tasks_that_were_replaced_on_disk_are_said(tmp_path, caplog):
  async def check(cluster, a, b):
    await cluster.put(a, CATS)
    other = dataclasses.replace(
      DOGS, spec=dataclasses.replace(DOGS.spec, name="pets")
    )
    before = await task_set(a)
    async with cluster.replica("same", BIRDS, PETS, CATS):
      assert "that was given is not" not in caplog.text
    async with cluster.replica("new", BIRDS, other) as new:
      assert await task_set(new) == before
    assert "task 'pets' that was given is not" in caplog.text

  asyncio.run(with_two(tmp_path, check))


def test_a_replica_that_starts_has_the_tasks_of_now(tmp_path):
  async def check(cluster, a, b):
    await cluster.put(a, CATS)
    await a.delete("/v1/tasks/birds", headers=BEARER)
    async with cluster.replica("new", BIRDS, PETS) as new:
      assert await task_set(new) == await task_set(a)
      await cluster.put(b, DOGS)
      assert await task_set(new) == await task_set(a)
      assert "dogs" in (await task_set(new))["names"]
    # It has left: nobody waits for it.
    assert (await cluster.put(b, CATS)).status_code == 200

  asyncio.run(with_two(tmp_path, check))


@pytest.mark.slow
def test_what_was_given_up_is_not_kept_on_the_device(tmp_path, monkeypatch):
  """A set that others refused; and one that was ready too late."""

  def no_room(*_):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

  async def only_current(cluster, name):
    changes = cluster.changes[name]
    async with asyncio.timeout(5):
      while changes._board.proposal is not None:
        await asyncio.sleep(0.01)
    ready = [one.task_set for one in changes._ready.values()]
    assert ready == [cluster.models[name].task_set]

  async def check(cluster, a, b):
    assert (await cluster.put(a, DOGS)).status_code == 201
    with monkeypatch.context() as patch:
      patch.setattr(cluster.models["b"], "make_ready", no_room)
      assert (await cluster.put(a, CATS)).status_code == 500
    for name in "ab":
      await only_current(cluster, name)
    real = cluster.models["b"].make_ready

    def slow(*arguments):
      time.sleep(1.5)
      return real(*arguments)

    with monkeypatch.context() as patch:
      patch.setattr(cluster.models["b"], "make_ready", slow)
      done = await cluster.put(a, CATS)
      assert (done.status_code, "in time: b." in done.text) == (503, True)
      for name in "ab":
        await only_current(cluster, name)

  patience = dataclasses.replace(PATIENCE, ready=1)
  asyncio.run(with_two(tmp_path, check, patience))


@pytest.mark.slow
def test_a_change_that_is_gone_is_no_fault(tmp_path, monkeypatch, caplog):
  """Its ledger was lost before this replica had the file."""

  async def check(cluster, a, b):
    before = await task_set(a)
    real = cluster.changes["b"]._ledger.content

    async def lost(content):
      cluster.lose_ledger()
      return await real(content)

    monkeypatch.setattr(cluster, "content", lost, raising=False)
    done = await cluster.put(a, CATS)
    monkeypatch.undo()
    assert (done.status_code, "is not known" in done.text) == (503, True)
    assert (await cluster.put(b, DOGS)).status_code == 201
    assert (await task_set(a))["names"] == [*before["names"], "dogs"]
    assert "Traceback" not in caplog.text

  asyncio.run(with_two(tmp_path, check))


def test_a_lost_ledger_loses_no_change(tmp_path):
  async def check(cluster, a, b):
    await cluster.put(a, CATS)
    before = await task_set(a)
    cluster.lose_ledger()
    # One that starts first does not bring its own set back.
    async with cluster.replica("new", BIRDS, PETS) as new:
      assert before == await task_set(new) == await task_set(b)
      done = await cluster.put(new, DOGS)
      assert done.json()["task_set"]["version"] == before["version"] + 1
      assert done.json()["task_set"] == await task_set(a) == await task_set(b)

  asyncio.run(with_two(tmp_path, check))


def test_who_compiles_while_the_ledger_is_lost_is_heard(tmp_path, monkeypatch):
  """It alone knows a change that was confirmed; another one is starting."""

  async def check():
    cluster = Cluster(tmp_path)
    loop, going_on = asyncio.get_running_loop(), threading.Event()
    compiling = asyncio.Event()
    async with cluster.replica("a", BIRDS, PETS) as a:
      await cluster.put(a, CATS)
      before = await task_set(a)
      real = cluster.models["a"].make_ready

      def slow(*arguments):
        loop.call_soon_threadsafe(compiling.set)
        going_on.wait(20)
        return real(*arguments)

      with monkeypatch.context() as patch:
        patch.setattr(cluster.models["a"], "make_ready", slow)
        change = asyncio.create_task(cluster.put(a, DOGS))
        await compiling.wait()
        cluster.lose_ledger()
        async with cluster.replica("new", BIRDS, PETS) as new:
          found = await task_set(new)
          going_on.set()
          assert found == before == await task_set(a)
          assert (await change).status_code == 503

  asyncio.run(check())


@pytest.mark.slow
def test_a_new_ledger_asks_anew(tmp_path):
  """Nobody takes its first proposal for one that was judged before."""

  async def check(cluster, a, b):
    await cluster.put(a, CATS)
    before = await task_set(a)
    cluster.lose_ledger()
    over = await cluster.put(a, overflowing(DOGS))
    assert (over.status_code, "not finite" in over.text) == (422, True)
    assert before == await task_set(a) == await task_set(b)

  asyncio.run(with_two(tmp_path, check))


@pytest.mark.slow
def test_a_ledger_lost_during_a_change_says_that_it_is_open(
  tmp_path, monkeypatch
):
  async def check(cluster, a, b):
    real = cluster.models["b"].make_ready

    def slow(*arguments):
      cluster._loop.call_soon_threadsafe(cluster.lose_ledger)
      return real(*arguments)

    cluster._loop = asyncio.get_running_loop()
    with monkeypatch.context() as patch:
      patch.setattr(cluster.models["b"], "make_ready", slow)
      done = await cluster.put(a, CATS)
    assert (done.status_code, "is not known" in done.text) == (503, True)
    assert (await cluster.put(b, CATS)).status_code in (200, 201)
    assert await task_set(a) == await task_set(b)
    assert "cats" in (await task_set(a))["names"]

  asyncio.run(with_two(tmp_path, check))


@pytest.mark.slow
def test_state_dir_survives_the_cluster(tmp_path):
  reader = random_task(BACKBONE, "aaa", attends_to=[CATS])

  async def first():
    store = TaskStore(str(tmp_path / "state"))
    cluster = Cluster(tmp_path, store)
    async with cluster.replica("a", BIRDS) as a:
      for task in (CATS, reader, DOGS):
        assert (await cluster.put(a, task)).status_code == 201
      await a.delete("/v1/tasks/dogs", headers=BEARER)
      found = await task_set(a)
    store.close()
    return found

  async def second():
    store = TaskStore(str(tmp_path / "state"))
    cluster = Cluster(tmp_path, store)
    async with cluster.replica("b", BIRDS) as b:
      found = await task_set(b)
      await b.delete("/v1/tasks/aaa", headers=BEARER)
    kept = [name for name, _ in store.kept()]
    store.close()
    return found, kept

  before = asyncio.run(first())
  after, kept = asyncio.run(second())
  assert set(after["names"]) == {"birds", "cats", "aaa"}
  assert after["digest"] == before["digest"]
  assert kept == ["cats"]


def test_what_a_new_cluster_could_not_restore_is_refused(tmp_path):
  """What was deployed is there again then, beside what was added."""
  probe = random_task(
    BACKBONE, "probe", regime="probe", cells=0, bottleneck=3
  )  # fmt: skip

  async def check():
    store = TaskStore(str(tmp_path / "state"))
    cluster = Cluster(tmp_path, store)
    async with cluster.replica("a", BIRDS) as a:
      gone = await a.delete("/v1/tasks/birds", headers=BEARER)
      assert gone.status_code == 200
      before = await task_set(a)
      done = await cluster.put(a, probe)
      assert done.status_code == 409
      assert "start again: birds, given by" in done.json()["error"]
      assert await task_set(a) == before
    store.close()

  asyncio.run(check())


def test_who_cannot_use_the_tasks_does_not_start(tmp_path):
  """Of another backbone: it says why, and the others go on."""

  async def check(cluster, a, b):
    starting = cluster.replica("other", backbone=tiny_backbone(seed=9))
    with pytest.raises(AssertionError, match="fingerprint"):
      await starting.__aenter__()
    assert (await cluster.put(a, CATS)).status_code == 201

  asyncio.run(with_two(tmp_path, check))
