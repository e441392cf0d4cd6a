"""Tasks are added, replaced and removed by clients with the token."""

import asyncio
import dataclasses
import io
import json
import logging
import re
import zipfile

import httpx
import jax
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
  serving,
  task_bytes,
  token_file,
  warm_predictor,
  with_tasks,
)

import memory_vit as mv
from memory_vit.errors import ConfigError
from memory_vit.prediction.task_set import answer_digest
from memory_vit.serving import ServerSettings, create_app

CATS = random_task(BACKBONE, "cats", seed=5, classes=4)
GOOD = {"files": image_files(png())}


def test_a_task_is_added_replaced_and_removed(tmp_path):
  async def check(model):
    async with serving(model, token_file=token_file(tmp_path)) as http:
      for content, status, action in (
        (CATS, 201, "add"), (PETS, 200, "replace"),
      ):  # fmt: skip
        body = task_bytes(content, tmp_path)
        done = await http.put("/v1/tasks/mine", content=body, headers=BYTES)
        answer = done.json()
        assert done.status_code == status, answer
        assert answer == {
          "action": action, "name": "mine", "digest": answer_digest(content),
          "grew": False, "compiled": 0,
        }  # fmt: skip
        one = (await http.get("/v1/tasks/mine")).json()
        assert one["classes"] == content.spec.num_classes
        asked = await http.post("/v1/predict", **GOOD)
        task_set = asked.json()["task_set"]
        assert task_set["tasks"]["mine"] == one["digest"] == answer["digest"]
        assert task_set["digest"] == model.task_set.digest
        found = asked.json()["images"][0]["tasks"]
        assert len(found["mine"]) == min(5, content.spec.num_classes)
      # It computes what the task that was sent computes.
      assert found["mine"] != found["birds"]
      same = await http.post("/v1/predict", **GOOD)
      assert same.json()["images"][0]["tasks"]["mine"] == found["mine"]
      done = await http.delete("/v1/tasks/mine", headers=BEARER)
      assert (done.status_code, done.json()["action"]) == (200, "remove")
      assert await names(http) == ["birds"]
      gone = await http.delete("/v1/tasks/mine", headers=BEARER)
      assert (gone.status_code, gone.json()["known"]) == (404, ["birds"])

  with with_tasks(BIRDS) as model:
    asyncio.run(check(model))


@pytest.mark.fault("task-in-use")
def test_a_task_that_others_read_stays(tmp_path):
  reader = random_task(BACKBONE, "reader", attends_to=[BIRDS])
  with with_tasks(BIRDS) as model:
    model.add(reader)

    async def check():
      async with serving(model, token_file=token_file(tmp_path)) as http:
        done = await http.delete("/v1/tasks/birds", headers=BEARER)
        assert done.status_code == 409
        assert "reader" in done.json()["error"]
        assert await names(http) == ["birds", "reader"]

    asyncio.run(check())


@pytest.mark.fault("forged-change")
def test_nobody_changes_tasks_without_the_token(tmp_path, caplog):
  async def check(model, headers, status, **options):
    async with serving(model, **options) as http:
      body = task_bytes(CATS, tmp_path)
      kind = [("Content-Type", "application/octet-stream")]
      typed = httpx.Headers([*httpx.Headers(headers).multi_items(), *kind])
      for done in (
        await http.put("/v1/tasks/cats", content=body, headers=typed),
        await http.delete("/v1/tasks/birds", headers=headers),
      ):
        assert done.status_code == status
        assert list(done.json()) == ["error"]
      assert await names(http) == ["birds", "pets"]

  caplog.set_level(logging.INFO, "memory_vit")
  model, file = warm_predictor(), token_file(tmp_path)
  asyncio.run(check(model, {}, 401, token_file=file))
  asyncio.run(
    check(model, {"Authorization": "Bearer no"}, 401, token_file=file)
  )
  twice = httpx.Headers([*BEARER.items(), ("Authorization", "Bearer no")])
  asyncio.run(check(model, twice, 401, token_file=file))
  asyncio.run(check(model, BEARER, 403))
  lines = [r.getMessage() for r in caplog.records if "audit" in r.name]
  assert len([line for line in lines if "refused" in line]) == 8


def refused_bodies(folder):
  """Bodies that are no task of this backbone, and a word of the refusal."""
  body = task_bytes(CATS, folder)
  other = tiny_backbone(seed=9)
  archive = io.BytesIO()
  with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
    file.writestr("cats.safetensors", bytes(2**24))
  header = int.from_bytes(body[:8], "little")
  changed = body[: 8 + header] + bytes(4) + body[8 + header + 4 :]
  return {
    "empty": (b"", "not a task"),
    "text": (b"what is this?", "not a task"),
    "truncated": (body[:-100], "cannot be read"),
    "cut in its header": (body[:100], "not a task"),
    "changed": (changed, "damaged"),
    "longer": (body + b"x", "cannot be read"),
    "a bomb": (archive.getvalue(), "not a task"),
    "a header of terabytes": (b"\xff" * 8 + body[8:], "not a task"),
    "a pickle": (b"\x80\x04cos\nsystem\n.", "not a task"),
    "of another backbone": (
      task_bytes(random_task(other, "other"), folder), "fingerprint",
    ),
    "too large": (bytes(2**20 + 1), "more than 1 MiB"),
  }  # fmt: skip


@pytest.mark.fault("bad-upload")
def test_unusable_uploads_are_refused(tmp_path):
  """In one line, without paths of the server; nothing changes."""

  async def check(model):
    state = tmp_path / "state"
    options = {
      "token_file": token_file(tmp_path), "state_dir": str(state),
      "max_task_mib": 1,
    }  # fmt: skip
    async with serving(model, **options) as http:
      shown = model.task_set
      before = files(state)
      for case, (body, message) in refused_bodies(tmp_path).items():
        done = await http.put("/v1/tasks/cats", content=body, headers=BYTES)
        error = done.json()["error"]
        status = 413 if case == "too large" else 422
        assert (done.status_code, error.count("\n")) == (status, 0), error
        assert message in error, (case, error)
        assert str(tmp_path) not in error
      assert model.task_set is shown
      left = files(state)
      assert left == before
      assert (await http.post("/v1/predict", **GOOD)).status_code == 200

  asyncio.run(check(warm_predictor()))


@pytest.mark.fault("path-escape")
@pytest.mark.parametrize(
  "name",
  ["A", "backbone", "%2e%2e", "a%2Fb", "a%00b", "x" * 65, "%0Aaudit", "é"],
)
def test_invalid_names_are_refused(tmp_path, name, caplog):
  caplog.set_level(logging.INFO, "memory_vit")

  async def check(model):
    async with serving(model, token_file=token_file(tmp_path)) as http:
      body = task_bytes(CATS, tmp_path)
      put = await http.put(f"/v1/tasks/{name}", content=body, headers=BYTES)
      delete = await http.delete(f"/v1/tasks/{name}", headers=BEARER)
      assert {put.status_code, delete.status_code} <= {404, 405, 422}
      assert await names(http) == ["birds", "pets"]

  asyncio.run(check(warm_predictor()))
  assert all("\n" not in r.getMessage() for r in caplog.records)


@pytest.mark.fault("path-escape")
def test_paths_stay_below_the_task_root(tmp_path):
  root, outside = tmp_path / "root", tmp_path / "outside"
  mv.save_task(CATS, root / "cats")
  mv.save_task(CATS, outside / "cats")
  (root / "link").symlink_to(outside / "cats")
  # Its name begins like that of the root.
  mv.save_task(CATS, tmp_path / "root-private" / "cats")
  (root / "plain").mkdir()
  (root / "here").symlink_to(root / "cats")

  async def put(http, path):
    return await http.put("/v1/tasks/cats", json={"path": path}, headers=BEARER)

  async def check(model):
    options = {"token_file": token_file(tmp_path), "task_root": str(root)}
    async with serving(model, **options) as http:
      for path in (
        "../outside/cats", str(outside / "cats"), "link", "none", "a\0b",
        "/etc/passwd", "cats/../../outside/cats",
        "../root-private/cats", str(tmp_path / "root-private" / "cats"),
      ):  # fmt: skip
        done = await put(http, path)
        assert done.status_code == 422
        assert "no such task below --task_root" in done.json()["error"]
      assert "not a task" in (await put(http, "plain")).json()["error"]
      listed = (await put(http, "cats/task.json")).json()["error"]
      assert listed.startswith("'cats/task.json' is not a task: it is a file ")
      for path in ("cats", str(root / "cats"), "here"):
        assert (await put(http, path)).status_code in (200, 201)
      await http.delete("/v1/tasks/cats", headers=BEARER)
    async with serving(model, token_file=options["token_file"]) as http:
      done = await put(http, "cats")
      assert (done.status_code, "--task_root" in done.text) == (403, True)

  with with_tasks(BIRDS) as model:
    asyncio.run(check(model))


@pytest.mark.fault("bad-server-start")
def test_unusable_directories_are_refused(tmp_path):
  (tmp_path / "file").touch()
  for options, message in (
    ({"task_root": str(tmp_path / "none")}, "--task_root"),
    ({"state_dir": str(tmp_path / "file")}, "--state_dir"),
  ):
    with pytest.raises(ConfigError, match=message):
      create_app(warm_predictor(), ServerSettings(**options))


@pytest.mark.fault("path-escape")
def test_each_change_is_a_line_of_the_audit(tmp_path, caplog):
  caplog.set_level(logging.INFO, "memory_vit")

  async def check(model):
    async with serving(model, token_file=token_file(tmp_path)) as http:
      body = task_bytes(CATS, tmp_path)
      await http.put("/v1/tasks/cats", content=body, headers=BYTES)
      await http.delete("/v1/tasks/cats", headers=BEARER)
      await http.put("/v1/tasks/cats", content=b"", headers=BYTES)
      await http.put("/v1/tasks/CATS", content=body, headers=BYTES)
      await http.delete("/v1/tasks/CATS", headers=BEARER)
      await http.put("/v1/tasks/cats", json={"path": 1}, headers=BEARER)
      await http.put("/v1/tasks/cats", json={"path": "cats"}, headers=BEARER)
      await http.put("/v1/tasks/cats", content=b"x", headers=BEARER)

  with with_tasks(BIRDS) as model:
    asyncio.run(check(model))
  lines = [r.getMessage() for r in caplog.records if "audit" in r.name]
  when = r"audit \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
  who = r"name='cats' client=127\.0\.0\.1:\d+"
  other = who.replace("cats", "CATS")
  digest = answer_digest(CATS)
  for line, pattern in zip(
    lines,
    (
      rf"{when} add {who} digest={digest}",
      rf"{when} remove {who} digest={digest}",
      rf"{when} put {who} refused: .*not a task.*",
      rf"{when} put {other} refused: task name 'CATS': .*",
      rf"{when} remove {other} refused: task name 'CATS': .*",
      rf"{when} put {who} refused: path: .*",
      rf"{when} put {who} refused: .*without --task_root=DIR.*",
      rf"{when} put {who} refused: the body is of no type.*",
    ),
    strict=True,
  ):
    assert re.fullmatch(pattern, line), line


def overflowing(task):
  """The same task with finite parameters, but outputs that overflow."""
  params = jax.tree.map(lambda a: np.full(a.shape, 3e38, a.dtype), task.params)
  return dataclasses.replace(task, params=params)


@pytest.mark.fault("overflowing-task")
def test_a_task_that_overflows_is_refused(tmp_path):
  state = tmp_path / "state"

  async def check(model):
    options = {
      "token_file": token_file(tmp_path), "state_dir": str(state),
    }  # fmt: skip
    async with serving(model, **options) as http:
      before = {path: path.read_bytes() for path in files(state)}
      body = task_bytes(overflowing(CATS), tmp_path)
      compiled = model.compilations
      for name in ("cats", "birds"):
        done = await http.put(f"/v1/tasks/{name}", content=body, headers=BYTES)
        assert done.status_code == 422, done.text
        assert "not finite" in done.json()["error"]
      assert model.compilations == compiled
      [bird] = model.task_set.describe()
      assert bird.digest == BIRDS.digest
      assert {path: path.read_bytes() for path in files(state)} == before

  with with_tasks(BIRDS) as model:
    asyncio.run(check(model))


@pytest.mark.fault("server-stop")
def test_a_server_that_stops_changes_no_task(tmp_path):
  async def check(model):
    settings = ServerSettings(token_file=token_file(tmp_path))
    app = create_app(model, settings)
    async with app.router.lifespan_context(app), client(app) as http:
      await app.state.service.settled()
      app.state.service.stopping = True
      body = task_bytes(CATS, tmp_path)
      put = await http.put("/v1/tasks/cats", content=body, headers=BYTES)
      delete = await http.delete("/v1/tasks/birds", headers=BEARER)
      assert (put.status_code, delete.status_code) == (503, 503)
      assert await names(http) == ["birds", "pets"]

  asyncio.run(check(warm_predictor()))


@pytest.mark.fault("changing-tasks")
def test_a_task_that_goes_while_its_request_is_decoded_is_named(monkeypatch):
  async def check(model):
    real = type(model).prepare_each

    def going(self, *given, **options):
      if "cats" in self.task_set.names:
        self.remove("cats")
      return real(self, *given, **options)

    monkeypatch.setattr(type(model), "prepare_each", going)
    async with serving(model) as http:
      done = await http.post("/v1/predict", **GOOD, data={"tasks": "cats"})
      assert (done.status_code, done.json()["known"]) == (404, ["birds"])

  with with_tasks(BIRDS, CATS) as model:
    asyncio.run(check(model))


@pytest.mark.fault("overflowing-task")
def test_a_task_that_overflows_does_not_spoil_others():
  async def check(model):
    async with serving(model) as http:
      done = await http.post("/v1/predict", **GOOD)
      assert done.status_code == 200, done.text
      [image] = done.json()["images"]
      assert list(image["tasks"]) == ["birds"]
      assert "not finite" in image["task_errors"]["cats"]

  with with_tasks(BIRDS, overflowing(CATS)) as model:
    asyncio.run(check(model))


def test_json_bodies_of_changes_are_checked(tmp_path):
  async def check(model):
    async with serving(model, token_file=token_file(tmp_path)) as http:
      for body, kind, status in (
        (b"{}", "application/json", 422),
        (json.dumps({"path": ""}).encode(), "application/json", 422),
        (b"x", "text/plain", 415),
      ):
        headers = {**BEARER, "Content-Type": kind}
        done = await http.put("/v1/tasks/a", content=body, headers=headers)
        assert done.status_code == status

  asyncio.run(check(warm_predictor()))


def test_a_compressed_task_is_refused(tmp_path):
  async def check(model):
    async with serving(model, token_file=token_file(tmp_path)) as http:
      content = task_bytes(CATS, tmp_path)
      for encoding, status in (("gzip", 415), ("identity", 201)):
        headers = {**BYTES, "Content-Encoding": encoding}
        done = await http.put(
          "/v1/tasks/cats", content=content, headers=headers
        )
        assert done.status_code == status, done.text
        if status == 415:
          assert "Content-Encoding of the body is 'gzip'" in done.text
          assert done.headers["accept-encoding"] == "identity"

  with with_tasks(BIRDS) as model:
    asyncio.run(check(model))
