"""The routes: their answers and refusals."""

import asyncio
import base64
import dataclasses
import gc
import io
import json
import logging
import re
import struct
import threading
import weakref
import zlib

import httpx
import jax
import numpy as np
import pytest
from conftest import random_task, run_program
from kinds_of_tasks import LABELS, tasks_of_kinds
from PIL import Image
from served import (
  BACKBONE,
  BEARER,
  BIRDS,
  BYTES,
  PETS,
  SECRET,
  client,
  image_files,
  png,
  serving,
  task_bytes,
  token_file,
  warm_predictor,
  with_tasks,
)

import memory_vit as mv
from memory_vit.errors import DataError
from memory_vit.kinds import CLASSES
from memory_vit.prediction import Predictor
from memory_vit.prediction.predictions import Predictions
from memory_vit.serving import (
  ServerSettings,
  answering,
  attention,
  create_app,
  lanes,
  schemas,
  service,
)
from memory_vit.serving.attention import AttentionService
from memory_vit.serving.page_files import page_response

pytestmark = pytest.mark.versions

GOOD = {"files": image_files(png())}


@pytest.fixture
def ready():
  """The warm predictor, for tests that change no task."""
  return warm_predictor()


def expected(task, content, rows):
  """Probabilities of a task alone, in a batch of this number of rows."""
  image = mv.preprocess(content, task)
  batch = np.zeros((rows, *image.shape), np.float32)
  batch[0] = image
  slots = mv.fill_slots(BACKBONE, task, slots=4)
  logits = np.asarray(mv.forward(BACKBONE, slots, batch)[task.name])
  return CLASSES.activate(np.asarray(logits[:1], np.float64))[0]


def probabilities(guesses, count):
  """Probabilities of an answer, by class."""
  found = np.zeros(count)
  for guess in guesses:
    found[guess["index"]] = guess["probability"]
  return found


def test_answer_equals_forward(ready):
  async def check():
    async with serving(ready) as http:
      done = await http.post("/v1/predict", files=image_files(png(3)))
      assert done.status_code == 200
      answer = done.json()
      assert list(answer["task_set"]["tasks"]) == ["birds", "pets"]
      [image] = answer["images"]
      assert image["name"] == "0.png"
      for task, count in ((BIRDS, 3), (PETS, 5)):
        guesses = image["tasks"][task.name]
        found = probabilities(guesses, count)
        np.testing.assert_array_equal(found, expected(task, png(3), 1))
        shares = [guess["probability"] for guess in guesses]
        assert shares == sorted(shares, reverse=True)

  asyncio.run(check())


def test_json_and_forms_get_the_same_answer(ready):
  async def check():
    async with serving(ready) as http:
      contents = [png(i) for i in range(3)]
      form = await http.post(
        "/v1/predict",
        files=image_files(*contents),
        data={"tasks": "pets", "top": "2", "original": "true"},
      )
      images = [
        {"name": f"{i}.png", "data": base64.b64encode(c).decode()}
        for i, c in enumerate(contents)
      ]
      body = {"images": images, "tasks": ["pets"], "top": 2, "original": True}
      both = await http.post("/v1/predict", json=body)
      assert form.json() == both.json()
      assert len(form.json()["images"]) == 3
      for image in form.json()["images"]:
        assert {k: len(v) for k, v in image["tasks"].items()} == {"pets": 2}
        assert len(image["original"]) == 2

  asyncio.run(check())


@pytest.mark.fault("unknown-task")
def test_an_unknown_task_is_never_answered_silently(ready):
  async def check():
    async with serving(ready) as http:
      for asked in ("cats", "birds,cats", "../birds", "backbone"):
        done = await http.post("/v1/predict", **GOOD, data={"tasks": asked})
        assert done.status_code == 404
        assert done.json()["known"] == ["birds", "pets"]
      one = await http.get("/v1/tasks/cats")
      assert (one.status_code, one.json()["known"]) == (404, ["birds", "pets"])

  asyncio.run(check())


def test_a_task_that_is_named_twice_is_answered_once(ready, monkeypatch):
  asked = []
  real = Predictions.activated

  def activated(self, name):
    asked.append((name, threading.current_thread()))
    return real(self, name)

  monkeypatch.setattr(Predictions, "activated", activated)

  async def check():
    async with serving(ready) as http:
      named = json_body(tasks=["pets", "birds", "pets"] * 99)
      named["json"]["images"][0]["data"] = base64.b64encode(png()).decode()
      done = await http.post("/v1/predict", **named)
      assert list(done.json()["images"][0]["tasks"]) == ["pets", "birds"]
    assert [name for name, _ in asked] == ["pets", "birds"]
    # Beside the event loop, which others wait for.
    assert threading.current_thread() not in [thread for _, thread in asked]

  asyncio.run(check())


@pytest.mark.fault("leaving-client")
def test_client_that_disconnects_is_no_fault(ready, tmp_path, caplog):
  async def check():
    options = {"token_file": token_file(tmp_path)}
    app = create_app(ready, ServerSettings(**options))
    async with app.router.lifespan_context(app), client(app) as http:
      while (await http.get("/readyz")).status_code != 200:
        await asyncio.sleep(0.01)

      async def receive():
        return {"type": "http.disconnect"}

      statuses = []

      async def send(message):
        statuses.append(message.get("status"))

      for method, path, kind in (
        ("POST", "/v1/predict", b"application/json"),
        ("POST", "/v1/predict", b"multipart/form-data; boundary=a"),
        ("PUT", "/v1/tasks/cats", b"application/octet-stream"),
      ):
        scope = {
          "type": "http", "method": method, "path": path, "query_string": b"",
          "headers": [
            (b"content-type", kind),
            (b"authorization", BEARER["Authorization"].encode()),
          ],
        }  # fmt: skip
        await app(scope, receive, send)
      assert [status for status in statuses if status] == [499] * 3

  asyncio.run(check())
  assert not any(record.exc_info for record in caplog.records)


@pytest.mark.fault("bad-image")
def test_a_bad_image_does_not_spoil_the_others(ready):
  async def check():
    async with serving(ready) as http:
      files = image_files(png(0), b"no picture", png(1)[:-40], png(2))
      done = await http.post("/v1/predict", files=files)
      assert done.status_code == 200
      images = done.json()["images"]
      assert ["error" in image for image in images] == [
        False,
        True,
        True,
        False,
      ]
      assert "not a JPEG" in images[1]["error"]
      alone = await http.post("/v1/predict", files=image_files(png(2)))
      np.testing.assert_allclose(
        probabilities(images[3]["tasks"]["birds"], 3),
        probabilities(alone.json()["images"][0]["tasks"]["birds"], 3),
        atol=1e-6,
      )
      bad = await http.post("/v1/predict", files=files[1:3])
      assert bad.status_code == 422
      assert len(bad.json()["images"]) == 2
      assert bad.json()["error"].startswith("none of 2 images can be read")

  asyncio.run(check())


def large_png():
  """A small file whose header claims 10 gigapixels."""

  def chunk(kind, content):
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check

  header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
  data = zlib.compress(bytes(100_000))
  return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data)


@pytest.mark.fault("many-pixels")
def test_many_pixels_are_refused_before_they_are_decoded(ready, monkeypatch):
  """Small files of large images would block all other requests."""
  file = io.BytesIO()
  Image.new("L", (1_000, 600)).save(file, "PNG")
  decoded = []
  real = type(ready).prepare_each

  def noted(self, images, *rest, **options):
    decoded.append(len(images))
    return real(self, images, *rest, **options)

  monkeypatch.setattr(type(ready), "prepare_each", noted)

  async def check():
    async with serving(ready, max_megapixels=1) as http:
      two = image_files(file.getvalue(), file.getvalue())
      done = await http.post("/v1/predict", files=two)
      assert (done.status_code, decoded) == (413, [])
      assert "1 megapixels together" in done.json()["error"]
      one = await http.post("/v1/predict", files=two[:1])
      assert (one.status_code, decoded) == (200, [1])

  asyncio.run(check())


async def idle(http):
  """Wait until no request is at work; return the metrics."""
  text = ""
  while "queue_images 0.0" not in text:
    await asyncio.sleep(0.01)
    text = (await http.get("/metrics")).text
  return text


@pytest.mark.fault("leaving-client")
def test_abandoned_requests_are_not_decoded_further(ready, monkeypatch):
  decoded, go = [], threading.Event()

  def slow(self, images, first, **_):
    decoded.append(first)
    assert go.wait(20)
    return [DataError("none")] * len(images)

  monkeypatch.setattr(lanes, "_HEAVY", 1)
  monkeypatch.setattr(type(ready), "prepare_each", slow)

  async def check():
    async with serving(ready, timeout=0.5) as http:
      files = image_files(*[png()] * 32)
      assert (await http.post("/v1/predict", files=files)).status_code == 504
      await idle(http)
      go.set()
      await asyncio.sleep(0.1)

  asyncio.run(check())
  assert len(decoded) <= 1  # a part that was begun


@pytest.mark.fault("many-pixels")
@pytest.mark.parametrize(
  ("images", "status"),
  [
    ([png(side=40)], 200),
    ([png(i, side=20) for i in range(4)], 200),
    ([png(i, side=10) for i in range(16)], 200),
    ([bytes(3 * 40 * 40)], 422),
  ],
  ids=["large", "four", "sixteen", "no image"],
)
def test_small_requests_do_not_wait_for_large_ones(
  ready, monkeypatch, images, status
):
  """Whether their images are large, many or broken, or the requests many."""
  held, real, together = threading.Event(), type(ready).prepare_each, []

  def slow(self, images, first, *, large):
    if large:
      together.append(len(images))
      assert held.wait(30)
    return real(self, images, first, large=large)

  monkeypatch.setattr(lanes, "_HEAVY", 40 * 40)
  monkeypatch.setattr(type(ready), "prepare_each", slow)

  async def check():
    async with serving(ready, max_queue=1024) as http:
      files = image_files(*images)
      waiting = [
        asyncio.create_task(http.post("/v1/predict", files=files))
        for _ in range(9)
      ]
      try:
        async with asyncio.timeout(20):
          while not together:
            await asyncio.sleep(0.01)
          done = await http.post("/v1/predict", files=image_files(png()))
        assert done.status_code == 200
        assert not any(one.done() for one in waiting)
      finally:
        held.set()
      answers = await asyncio.gather(*waiting)
      assert {answer.status_code for answer in answers} == {status}
      assert max(together) <= lanes.HEAVY_THREADS  # in parts

  asyncio.run(check())


def test_freed_memory_goes_back_to_the_system(ready, monkeypatch):
  monkeypatch.setattr(service, "_TRIM_SECONDS", 0.001)

  async def check():
    given_back = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
      service,
      "trim_memory",
      lambda: loop.call_soon_threadsafe(given_back.set),
    )
    async with serving(ready):
      await asyncio.wait_for(given_back.wait(), 10)

  asyncio.run(check())


def test_garbage_is_collected_however_rarely_python_does_it():
  class Node:
    pass

  gc.disable()
  try:
    node = Node()
    node.itself, found = node, weakref.ref(node)
    del node
    assert found()
    service.trim_memory()
    assert found() is None
  finally:
    gc.enable()


def json_body(**values):
  return {"json": {"images": [{"data": ""}], **values}}


def raw(content, kind="application/json"):
  return {"content": content, "headers": {"Content-Type": kind}}


def cut_form(size):
  """The first bytes of a form of two images, sent as the whole body."""
  whole = httpx.Request("POST", "/", files=image_files(png(), png()))
  return raw(whole.read()[:size], whole.headers["content-type"])


REFUSED = {
  "no body": ({}, 415, "expected multipart/form-data"),
  "another type": (raw(png(), "image/png"), 415, "the body is 'image/png'"),
  "no form": (raw(b"x", "multipart/form-data"), 400, "boundary"),
  "broken form": (
    raw(b"--a\r\nwhat\r\n", "multipart/form-data; boundary=a"), 400, "the form",
  ),
  "compressed": (
    {"content": b"x", "headers": {
      "Content-Type": "application/json", "Content-Encoding": "gzip"}},
    415, "the Content-Encoding of the body is 'gzip'",
  ),
  "a compressed form": (
    {**GOOD, "headers": {"Content-Encoding": "br"}}, 415, "is 'br'",
  ),
  "compressed twice": (
    {**json_body(), "headers": [
      ("Content-Encoding", "identity"), ("Content-Encoding", "gzip")]},
    415, "is 'identity, gzip'",
  ),
  "UTF-16": (
    raw('{"images": []}'.encode("utf-16")), 422, "the body is UTF-16",
  ),
  "two BOMs": (raw(b"\xef\xbb\xbf" * 2 + b"{}"), 422, "the body: Inv"),
  "padding in base64": (
    json_body(images=[{"data": "eA==eA=="}]), 422, "not valid b",
  ),
  "base64 for URLs": (json_body(images=[{"data": "_-8="}]), 422, "'+' and '/'"),
  "no JSON": (raw(b'{"images": '), 422, "the body: Invalid JSON"),
  "deep JSON": (raw(b"[" * 100_000), 422, "the body"),
  "a list": (raw(b"[]"), 422, "the body"),
  "not UTF-8": (raw(b'{"images": "\xff"}'), 422, "the body"),
  "no images": ({"json": {"images": []}}, 422, "images: List should"),
  "no base64": (json_body(images=[{"data": "%"}]), 422, "not valid base64"),
  "a typing error": (json_body(task=["birds"]), 422, "task: Extra"),
  "top": (json_body(top=0), 422, "top: Input should be greater"),
  "top as text": (json_body(top="3"), 422, "top: Input should be a valid int"),
  "top as truth": (json_body(top=True), 422, "top: Input should be a valid"),
  "top as float": (json_body(top=1.0), 422, "top: Input should be a valid"),
  "truth as number": (json_body(original=1), 422, "original: Input should be"),
  "base64 without a name": (
    {"json": {"images": ["eA=="]}}, 422,
    'expected {"images": [{"name": "a.jpg", "data": BASE64}]}',
  ),
  "a long type": (
    raw(b"", "multipart/form-data; boundary=a" + "; a=b" * 999), 415,
    "more than 1,000 bytes",
  ),
  "many bad images": (raw(b'{"images": [' + b"{}," * 300 + b"{}]}"), 422,
    "images.0.data: Field required;"),
  "many values": (raw(b"[" + b"0," * 300_000 + b"0]"), 413, "many values"),
  "many names": (json_body(tasks=["a"] * 1_025), 422, "tasks: List should"),
  "a charset": (
    raw(b"", "multipart/form-data; boundary=a; charset=punycode"), 415,
    "'punycode'",
  ),
  "no tasks": (json_body(tasks=[]), 422, "tasks: List should"),
  "top of a form": ({**GOOD, "data": {"top": "many"}}, 422, "top: Input"),
  "form field": ({**GOOD, "data": {"task": "birds"}}, 422, "field 'task'"),
  "image as text": ({"files": [("images", (None, "x"))]}, 422, "-F images=@"),
  "tasks as file": (
    {"files": [*GOOD["files"], ("tasks", ("a", b"birds"))]}, 422, "tasks:",
  ),
  "many images": ({"files": image_files(*[b"x"] * 9)}, 413, "more than 8"),
  "many in JSON": (json_body(images=[{"data": ""}] * 9), 413, "more than 8"),
  "many parts": (
    {"files": image_files(*[b"x"] * 500)}, 413, "Too many files",
  ),
  "long field": ({**GOOD, "data": {"tasks": "x" * 10**6}}, 413, "the form"),
  "many fields": ({**GOOD, "data": {"tasks": ["a"] * 50}}, 413, "Too many f"),
  "many commas": (
    {**GOOD, "data": {"tasks": ["a," * 999] * 2}}, 413, "at most 1024 names",
  ),
  "top twice in a form": ({**GOOD, "data": {"top": ["1", "2"]}}, 422, "top"),
  "original twice in a form": (
    {**GOOD, "data": {"original": ["true", "false"]}}, 422, "this field twice",
  ),
  "a form cut after an image": (cut_form(-40), 400, "last boundary"),
  "a form cut in an image": (cut_form(80), 400, "last boundary"),
  "large body": ({"files": image_files(bytes(2**20 + 1))}, 413, "1 MiB"),
  "gigapixels": ({"files": image_files(large_png())}, 422, "megapixels"),
  "truncated": ({"files": image_files(png()[:-40])}, 422, "cut or damaged"),
  "empty": ({"files": image_files(b"")}, 422, "not a JPEG"),
  "a pickle": ({"files": image_files(b"\x80\x04N.")}, 422, "not a JPEG"),
}  # fmt: skip


@pytest.mark.fault("bad-request")
def test_bad_input_is_refused_in_one_line(ready):
  """The next good request is answered."""

  async def check():
    limits = {"max_images": 8, "max_body_mib": 1, "max_task_mib": 1}
    async with serving(ready, **limits) as http:
      for case, (request, status, message) in REFUSED.items():
        done = await http.post("/v1/predict", **request)
        error = done.json()["error"]
        assert (done.status_code, error.count("\n")) == (status, 0), (
          case,
          error,
        )
        assert message in error, case
        good = await http.post("/v1/predict", **GOOD)
        assert good.status_code == 200, case

  asyncio.run(check())


@pytest.mark.fault("large-answer")
def test_the_outputs_of_an_answer_are_bounded(monkeypatch):
  """Images x outputs: no thread runs while JSON is written."""
  monkeypatch.setattr(answering, "MOST_OUTPUTS", 20)
  strict = mv.TaskKind(name="labels", thresholds=(0.9999,) * 3)
  none = random_task(BACKBONE, "none", seed=3, cells=1, kind=strict)
  tasks = *tasks_of_kinds(BACKBONE), none

  async def check(model):
    async with serving(model) as http:
      for count, asked, outputs in (
        (6, {"tasks": "pets"}, 18),
        (7, {"tasks": "pets"}, 21),
        (10, {"tasks": "pets", "top": "2"}, 20),
        (10, {"tasks": "size"}, 20),
        (11, {"tasks": "size", "top": "1"}, 22),  # values have no top
        (10, {"tasks": "tags"}, 20),
        (11, {"tasks": "tags"}, 22),
        (11, {"tasks": "tags", "top": "1"}, 11),
        (3, {"tasks": "size", "original": "true"}, 21),
        (7, {"tasks": "size,none"}, 21),  # without labels it counts as one
      ):
        # Equal images: each has two labels.
        files = image_files(*[png()] * count)
        done = await http.post("/v1/predict", files=files, data=asked)
        assert done.status_code == (200 if outputs <= 20 else 413), asked
        if outputs > 20:
          error = done.json()["error"]
          assert f"have {outputs} classes, labels and values" in error
          assert "at most 20" in error
          assert "fewer images" in error

  with with_tasks(*tasks) as model:
    asyncio.run(check(model))


@pytest.mark.fault("large-answer")
def test_the_bounds_of_answers_are_stated(ready, monkeypatch):
  async def check():
    async with serving(ready) as http:
      over = json_body(top=50_001)
      done = await http.post("/v1/predict", **over)
      assert done.status_code == 422
      assert "less than or equal to 50000" in done.json()["error"]
      found = (await http.get("/openapi.json")).json()
      body = found["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
      for of_type in body.values():
        properties = of_type["schema"]["properties"]
        assert "50,000 classes, labels and values" in str(properties["top"])
      answer = found["components"]["schemas"]["PredictAnswer"]
      assert "50,000" in answer["properties"]["images"]["description"]
      # Two layers of 16 patches.
      monkeypatch.setattr(attention, "MOST_WEIGHTS", 2 * 18)
      done = await http.post("/v1/attention", **GOOD)
      assert done.status_code == 413
      assert "2 tasks has 72 weights, expected at most 36" in done.text
      assert "name at most 1 tasks" in done.text
      one = await http.post("/v1/attention", **GOOD, data={"tasks": "pets"})
      assert list(one.json()["tasks"]) == ["pets"]

  asyncio.run(check())


@pytest.mark.fault("large-answer")
def test_the_timeout_holds_for_the_json_of_an_answer(ready, monkeypatch):
  go = threading.Event()
  real = answering.Answering._json

  def slow(self, *given):
    assert go.wait(20)
    return real(self, *given)

  monkeypatch.setattr(answering.Answering, "_json", slow)

  async def check():
    async with serving(ready, timeout=0.3) as http:
      waiting = asyncio.create_task(http.post("/v1/predict", **GOOD))
      assert (await http.get("/healthz")).status_code == 200
      assert (await waiting).status_code == 504
      await idle(http)
      go.set()
      assert (await http.post("/v1/predict", **GOOD)).status_code == 200

  asyncio.run(check())


GETS = (
  "/healthz", "/readyz", "/metrics", "/v1/tasks", "/v1/tasks/birds", "/",
  "/docs", "/page.js", "/page.css", "/openapi.json",
)  # fmt: skip


def test_head_is_get_without_the_body(ready):
  """Load balancers and monitors probe by it."""

  async def check():
    app = create_app(ready, ServerSettings())
    async with app.router.lifespan_context(app), client(app) as http:
      while (await http.get("/readyz")).status_code != 200:
        await asyncio.sleep(0.01)
      for path in (*GETS, "/v1/tasks/cats", "/nothing"):
        head, get = await http.head(path), await http.get(path)
        assert head.status_code == get.status_code, path
        assert head.content == b""
        same = "content-type", "content-security-policy"
        assert [head.headers.get(n) for n in same] == [
          get.headers.get(n) for n in same
        ]
      assert (await http.head("/v1/predict")).status_code == 405
      app.state.service.stopping = True
      assert (await http.head("/readyz")).status_code == 503
      text = (await http.get("/metrics")).text
      assert 'method="HEAD",route="/readyz",status="503"' in text
      paths = (await http.get("/openapi.json")).json()["paths"]
      assert not any("head" in of for of in paths.values())

  asyncio.run(check())


def test_docs_lead_to_the_schema_without_other_hosts(ready):
  async def check():
    async with serving(ready) as http:
      done = await http.get("/docs")
      assert 'href="openapi.json"' in done.text
      assert not re.search(r"(src|href)=.?(https?:)?//", done.text)

  asyncio.run(check())


def test_json_as_other_programs_write_it(ready):
  """PowerShell writes a BOM, browsers data URLs, and MIME breaks lines."""
  plain = base64.b64encode(png()).decode()
  lines = base64.encodebytes(png()).decode()
  assert lines.count("\n") > 1

  async def check():
    async with serving(ready) as http:
      answers = []
      for data, before in (
        (plain, b""),
        (plain, b"\xef\xbb\xbf"),
        (lines, b""),
        (lines.replace("\n", "\r\n"), b""),
        (f"data:image/png;base64,{plain}", b""),
        (f"data:image/png;name=a.png;base64,\n{lines}", b""),
        (f"data:;base64,{plain}", b""),
      ):
        body = before + json.dumps({"images": [{"data": data}]}).encode()
        done = await http.post("/v1/predict", **raw(body))
        assert done.status_code == 200, (data[:40], done.text)
        answers.append(done.json()["images"])
      assert all(answer == answers[0] for answer in answers)

  asyncio.run(check())


@pytest.mark.fault("leaving-client")
@pytest.mark.parametrize(
  ("path", "part", "slow"),
  [
    ("/v1/predict", Predictor, "prepare_each"),
    ("/v1/predict", Predictor, "predict_pixels"),
    ("/v1/attention", AttentionService, "_compute"),
    ("/v1/predict?wait", None, ""),
  ],
)
def test_a_client_that_leaves_frees_its_place_at_once(
  ready, monkeypatch, caplog, path, part, slow
):
  """Status 499 in the log, not that of an answer that nobody got."""
  go, begun = threading.Event(), threading.Event()
  path, _, waits = path.partition("?")
  if part:
    real = getattr(part, slow)

    def held(*given, **options):
      begun.set()
      assert go.wait(20)
      return real(*given, **options)

    monkeypatch.setattr(part, slow, held)
  form = httpx.Request("POST", "http://test", files=image_files(png()))
  headers = [(b"content-type", form.headers["content-type"].encode())]
  if waits:
    headers.append((b"x-wait-for", b"cats=" + 64 * b"0"))
    begun.set()
  scope = {
    "type": "http", "method": "POST", "path": path, "query_string": b"",
    "headers": headers,
  }  # fmt: skip
  statuses = []

  async def check():
    app = create_app(ready, ServerSettings())
    async with app.router.lifespan_context(app), client(app) as http:
      while (await http.get("/readyz")).status_code != 200:
        await asyncio.sleep(0.01)
      messages = [{"type": "http.request", "body": form.read()}]

      async def receive():
        if messages:
          return messages.pop()
        while not begun.is_set():
          await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

      async def send(message):
        statuses.append(message.get("status"))

      async with asyncio.timeout(10):
        await app(scope, receive, send)
        await idle(http)
      go.set()
      done = await http.post(path, **GOOD)
      assert done.status_code == 200

  asyncio.run(check())
  assert statuses[0] == 499
  assert not any(record.exc_info for record in caplog.records)


def test_unknown_routes_are_refused(ready):
  async def check():
    async with serving(ready) as http:
      for method, path, status in (
        ("GET", "/v2/tasks", 404), ("GET", "/page/../app.py", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404), ("DELETE", "/v1/predict", 405),
        ("PUT", "/v1/tasks/a/", 404), ("GET", "/v1/tasks/", 404),
      ):  # fmt: skip
        done = await http.request(method, path)
        assert done.status_code == status
        assert list(done.json()) == ["error"]
      done = await http.request("OPTIONS", "/v1/predict")
      assert (done.status_code, done.headers["allow"]) == (405, "POST")

  asyncio.run(check())


def test_attention_of_a_task_is_answered(ready):
  async def check():
    async with serving(ready) as http:
      done = await http.post("/v1/attention", files=image_files(png(1)))
      assert done.status_code == 200, done.text
      answer = done.json()
      sides, view = (answer["rows"], answer["columns"]), answer["view"]
      assert sides == (4, 4)
      assert mv.preprocess(png(1), BIRDS).shape == (8, 8, 3)
      seen = Image.open(io.BytesIO(base64.b64decode(view.partition(",")[2])))
      np.testing.assert_allclose(
        np.asarray(seen) / 127.5 - 1, mv.preprocess(png(1), BIRDS), atol=1e-6
      )
      real = mv.token_attention(
        BACKBONE, [BIRDS, PETS], mv.preprocess([png(1)], BIRDS)
      )
      for name, found in answer["tasks"].items():
        image = real[name].image[0]
        np.testing.assert_allclose(found["patches"], image[:, -16:], atol=2e-6)
        np.testing.assert_allclose(
          found["class_token"], image[:, :-16].sum(-1), atol=2e-6
        )
        np.testing.assert_allclose(
          np.sum(found["patches"], 1) + found["class_token"] + found["rest"],
          1, atol=1e-4,
        )  # fmt: skip
      for request, status in (
        ({"files": image_files(b"bad")}, 422),
        ({"files": image_files(png(), png())}, 413),
        ({**GOOD, "data": {"tasks": "cats"}}, 404),
        ({**GOOD, "data": {"tasks": "pets"}}, 200),
      ):
        done = await http.post("/v1/attention", **request)
        assert done.status_code == status
      assert list(done.json()["tasks"]) == ["pets"]

  asyncio.run(check())


def test_attention_is_warm_and_counted(ready, monkeypatch):
  warmed = []
  real = AttentionService._compile

  def noted(self):
    real(self)
    warmed.append(self)

  monkeypatch.setattr(AttentionService, "_compile", noted)

  async def check():
    async with serving(ready) as http:
      assert len(warmed) == 1
      before = warmed[0].compilations, ready.compilations
      done = await http.post("/v1/attention", **GOOD)
      assert done.status_code == 200
      assert (warmed[0].compilations, ready.compilations) == before
      # Fields that it would not read are refused.
      for unread in ({"top": "2"}, {"original": "true"}):
        done = await http.post("/v1/attention", **GOOD, data=unread)
        assert (done.status_code, "top and" in done.text) == (422, True)
      weights = AttentionService._weights

      def compiling(self, pixels, task_set):
        jax.jit(lambda x: x * 3)(pixels)
        return weights(self, pixels, task_set)

      monkeypatch.setattr(AttentionService, "_weights", compiling)
      await http.post("/v1/attention", **GOOD)
      assert warmed[0].compilations == 1
      text = (await http.get("/metrics")).text
      count = ready.compilations + warmed[0].compilations
      assert f"memory_vit_compilations {count:.1f}" in text

  asyncio.run(check())


def test_attention_queue_is_limited(ready, monkeypatch):
  go = threading.Event()
  real = AttentionService._compute
  monkeypatch.setattr(
    AttentionService, "_compute", lambda *given: go.wait(20) and real(*given)
  )

  async def check():
    async with serving(ready) as http:
      asked = [
        asyncio.create_task(http.post("/v1/attention", **GOOD))
        for _ in range(9)
      ]
      done, _ = await asyncio.wait(
        asked, timeout=10, return_when="FIRST_COMPLETED"
      )
      assert [(await one).status_code for one in done] == [503]
      go.set()
      statuses = [(await one).status_code for one in asked]
      assert sorted(statuses) == [200] * 8 + [503]

  asyncio.run(check())


@pytest.mark.fault("failing-pass")
def test_internal_faults_are_only_logged(ready, monkeypatch):
  async def check():
    async with serving(ready) as http:
      with monkeypatch.context() as patch:
        patch.setattr(type(ready), "predict_pixels", lambda *_, **__: 1 / 0)
        done = await http.post("/v1/predict", **GOOD)
      assert done.status_code == 500
      assert done.json() == {"error": "the server failed; its log says how."}
      assert (await http.post("/v1/predict", **GOOD)).status_code == 200

  asyncio.run(check())


def test_server_without_tasks_gives_only_original_outputs():
  async def check(model):
    async with serving(model) as http:
      done = await http.post("/v1/predict", **GOOD, data={"original": "true"})
      [image] = done.json()["images"]
      assert image["tasks"] == {}
      assert len(image["original"]) == 5

  with with_tasks() as model:
    asyncio.run(check(model))


def test_a_head_is_served_beside_other_tasks(tmp_path):
  head = random_task(BACKBONE, "head", regime="head", cells=0)

  async def check(model):
    token = {"token_file": token_file(tmp_path)}
    async with serving(model, **token) as http:
      asked = {"files": image_files(png(3)), "data": {"original": "true"}}
      before = (await http.post("/v1/predict", **asked)).json()["images"][0]
      done = await http.put(
        "/v1/tasks/head", content=task_bytes(head, tmp_path), headers=BYTES
      )
      assert done.status_code == 201, done.text
      [image] = (await http.post("/v1/predict", **asked)).json()["images"]
      assert image["original"] == before["original"]
      assert image["tasks"]["birds"] == before["tasks"]["birds"]
      np.testing.assert_array_equal(
        probabilities(image["tasks"]["head"], 3), expected(head, png(3), 1)
      )
      # It has no token that would attend to the image.
      done = await http.post("/v1/attention", **GOOD)
      assert set(done.json()["tasks"]) == {"birds"}
      done = await http.post("/v1/attention", **GOOD, data={"tasks": "head"})
      assert done.status_code == 422
      assert "'head', which has no token" in done.json()["error"]
      shown = {
        t["name"]: t for t in (await http.get("/v1/tasks")).json()["tasks"]
      }
      assert [shown[name]["slot"] for name in ("birds", "head")] == [0, -1]

  with with_tasks(BIRDS) as model:
    asyncio.run(check(model))


def test_a_task_that_composes_with_nothing_is_served_alone(tmp_path):
  probe = random_task(
    BACKBONE, "probe", regime="probe", cells=0, bottleneck=3
  )  # fmt: skip

  async def check(model):
    token = {"token_file": token_file(tmp_path)}
    async with serving(model, **token) as http:
      done = await http.post("/v1/predict", **GOOD, data={"original": "true"})
      assert done.status_code == 200, done.text
      [image] = done.json()["images"]
      pixels = jax.device_put(mv.preprocess([png()], probe))
      logits = run_program(BACKBONE, [probe], pixels)["probe"]
      np.testing.assert_allclose(
        probabilities(image["tasks"]["probe"], 3),
        CLASSES.activate(np.asarray(logits, np.float64))[0],
        atol=1e-5,
      )
      assert len(image["original"]) == 5
      done = await http.post("/v1/attention", **GOOD)
      assert done.status_code == 422
      assert "'probe', which has no token" in done.json()["error"]
      done = await http.put(
        "/v1/tasks/birds", content=task_bytes(BIRDS, tmp_path), headers=BYTES
      )
      assert done.status_code == 422
      assert "it cannot share a pass" in done.json()["error"]

  with with_tasks(probe) as model:
    asyncio.run(check(model))


@pytest.mark.fault("leaving-client")
def test_request_beyond_the_timeout_ends(ready, monkeypatch):
  go = threading.Event()
  real = type(ready).predict_pixels

  def slow(self, *args, **options):
    go.wait()
    return real(self, *args, **options)

  async def check():
    async with serving(ready, timeout=0.05) as http:
      with monkeypatch.context() as patch:
        patch.setattr(type(ready), "predict_pixels", slow)
        done = await http.post("/v1/predict", **GOOD)
        assert done.status_code == 504
        assert "within 0.05 seconds" in done.json()["error"]
        go.set()
      text = await idle(http)  # it is computed, for nobody
      assert 'images_total{result="answered"}' not in text

  asyncio.run(check())


def test_server_is_ready_after_the_warm_up(ready, monkeypatch):
  go = threading.Event()
  monkeypatch.setattr(type(ready), "warm_up", lambda *_: go.wait() and 0)

  async def check():
    app = create_app(ready, ServerSettings())
    async with app.router.lifespan_context(app), client(app) as http:
      assert (await http.get("/healthz")).status_code == 200
      state = await http.get("/readyz")
      assert (state.status_code, state.json()["status"]) == (503, "warming up")
      early = await http.post("/v1/predict", **GOOD)
      assert early.status_code == 503
      assert int(early.headers["retry-after"]) >= 1
      go.set()
      while (await http.get("/readyz")).status_code != 200:
        await asyncio.sleep(0.01)
      assert (await http.post("/v1/predict", **GOOD)).status_code == 200
      app.state.service.stopping = True
      state = await http.get("/readyz")
      assert (state.status_code, state.json()["status"]) == (503, "stopping")

  asyncio.run(check())


@pytest.mark.fault("failing-pass")
def test_a_warm_up_that_fails_is_seen(ready, monkeypatch, caplog):
  monkeypatch.setattr(type(ready), "warm_up", lambda *_: 1 / 0)

  async def check():
    app = create_app(ready, ServerSettings())
    async with app.router.lifespan_context(app), client(app) as http:
      while (await http.get("/healthz")).status_code == 200:
        await asyncio.sleep(0.01)
      assert (await http.get("/healthz")).json() == {"status": "failed"}
      assert (await http.post("/v1/predict", **GOOD)).status_code == 503

  asyncio.run(check())
  assert "ZeroDivisionError" in caplog.text


def test_metrics_count_what_happened(ready):
  async def check():
    async with serving(ready) as http:
      await http.post("/v1/predict", files=image_files(png(), b"bad"))
      await http.post("/v1/predict", **GOOD, data={"tasks": "none"})
      text = (await http.get("/metrics")).text
      values = dict(re.findall(r"^(memory_vit_\S+) (\S+)$", text, re.M))
      route = 'method="POST",route="/v1/predict"'
      counted = {
        f'memory_vit_requests_total{{{route},status="200"}}': 1,
        f'memory_vit_requests_total{{{route},status="404"}}': 1,
        f"memory_vit_request_seconds_count{{{route}}}": 2,
        'memory_vit_images_total{result="answered"}': 1,
        'memory_vit_images_total{result="refused"}': 1,
        "memory_vit_batch_fill_sum": 1,
        "memory_vit_batch_fill_count": 1,
        "memory_vit_queue_images": 0,
        "memory_vit_compilations": ready.compilations,
        "memory_vit_tasks": 2,
        "memory_vit_ready": 1,
      }
      assert {name: float(values[name]) for name in counted} == counted

  asyncio.run(check())


@pytest.mark.fault("page-text")
def test_logs_say_nothing_of_what_was_sent(ready, caplog):
  async def check():
    async with serving(ready) as http:
      secret = [("images", ("secret-name.png", png()))]
      with caplog.at_level(logging.INFO, "memory_vit"):
        await http.post("/v1/predict", files=secret)
        await http.get("/secret-path?secret=query")

  asyncio.run(check())
  lines = [
    record.getMessage()
    for record in caplog.records
    if record.name == "memory_vit.serving.requests"
  ]
  assert [line.split()[1:4] for line in lines] == [
    ["POST", "/v1/predict", "200"], ["GET", "none", "404"],
  ]  # fmt: skip
  assert "secret" not in caplog.text


def test_openapi_describes_each_route(ready):
  async def check():
    async with serving(ready) as http:
      found = (await http.get("/openapi.json")).json()
      routes = {(m, p) for p, of in found["paths"].items() for m in of}
      assert routes == {
        ("get", "/healthz"), ("get", "/readyz"), ("get", "/metrics"),
        ("post", "/v1/predict"), ("post", "/v1/attention"),
        ("get", "/v1/tasks"), ("get", "/v1/tasks/{name}"),
        ("put", "/v1/tasks/{name}"), ("delete", "/v1/tasks/{name}"),
      }  # fmt: skip
      body = found["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
      assert body.keys() == {"multipart/form-data", "application/json"}
      # The example is a request that works.
      [example] = body["application/json"]["schema"]["examples"]
      done = await http.post("/v1/predict", json=example)
      assert done.status_code == 200
      change = found["paths"]["/v1/tasks/{name}"]["put"]
      assert change["security"] == [{"token": []}]
      assert not re.search(r'"\$ref": "#/\$defs', json.dumps(found))
      # The declared models describe what is answered.
      schemas.PredictAnswer.model_validate(done.json())
      tasks = (await http.get("/v1/tasks")).json()
      schemas.TasksAnswer.model_validate(tasks)
      task = (await http.get("/v1/tasks/birds")).json()
      schemas.ServedTask.model_validate(task)
      looks = (await http.post("/v1/attention", **GOOD)).json()
      schemas.AttentionAnswer.model_validate(looks)
      answer = found["paths"]["/v1/predict"]["post"]["responses"]["200"]
      schema = answer["content"]["application/json"]["schema"]
      assert schema == {"$ref": "#/components/schemas/PredictAnswer"}

  asyncio.run(check())


def test_images_of_no_class_are_answered_as_unknown():
  kind = mv.TaskKind(temperature=2.0, unknown=1e6)
  pets, *others = tasks_of_kinds(BACKBONE)
  spec = dataclasses.replace(pets.spec, kind=kind)
  tasks = (dataclasses.replace(pets, spec=spec), *others)

  async def check(model):
    async with serving(model, top=1) as http:
      done = await http.post("/v1/predict", **GOOD)
      one = (await http.get("/v1/tasks/pets")).json()
    schemas.PredictAnswer.model_validate(done.json())
    schemas.ServedTask.model_validate(one)
    assert (one["kind"]["temperature"], one["kind"]["unknown"]) == (2.0, 1e6)
    [image] = done.json()["images"]
    return image["tasks"]["pets"]

  with with_tasks(*tasks) as model:
    found = asyncio.run(check(model))
    [answer] = model.predict([png()]).answers("pets", 1)
  assert found == answer
  assert found["unknown"]
  assert len(found["classes"]) == 1


def test_labels_and_values_are_answered_with_thresholds_and_units():
  """`top` limits classes and labels; by default all labels are answered."""
  tasks = tasks_of_kinds(BACKBONE)

  async def check(model):
    async with serving(model, top=1) as http:
      done = await http.post("/v1/predict", **GOOD)
      few = await http.post("/v1/predict", **GOOD, data={"top": "1"})
      tasks_of = (await http.get("/v1/tasks")).json()
      one = (await http.get("/v1/tasks/tags")).json()
      found = (await http.get("/openapi.json")).json()
    schemas.PredictAnswer.model_validate(done.json())
    schemas.TasksAnswer.model_validate(tasks_of)
    schemas.ServedTask.model_validate(one)
    assert {"PredictedLabels", "PredictedValues"} <= (
      found["components"]["schemas"].keys()
    )
    assert [t["kind"] for t in tasks_of["tasks"]] == [
      {"name": name} for name in ("classes", "labels", "values")
    ]
    assert one["kind"]["thresholds"] == [*LABELS.thresholds]
    [image], [of_few] = done.json()["images"], few.json()["images"]
    return image["tasks"], of_few["tasks"]

  with with_tasks(*tasks) as model:
    found, few = asyncio.run(check(model))
    predictions = model.predict([png()])
  assert len(found["pets"]) == 1
  assert found["tags"] == {
    "labels": [
      {"label": g.class_name, "index": g.index, "probability": g.probability}
      for g in predictions.labels("tags")[0]
    ]
  }
  assert len(found["tags"]["labels"]) == 2
  assert few == {**found, "tags": {"labels": found["tags"]["labels"][:1]}}
  [(angle, height)] = predictions.values("size").tolist()
  assert found["size"] == {
    "values": [
      {"name": "angle", "value": angle, "unit": "degrees"},
      {"name": "height", "value": height, "unit": "mm"},
    ]
  }


@pytest.mark.fault("page-text")
def test_the_page_loads_nothing_from_elsewhere(ready):
  async def check():
    async with serving(ready) as http:
      for path, kind in (
        ("/", "html"),
        ("/page.js", "java"),
        ("/page.css", "css"),
      ):
        done = await http.get(path)
        assert done.status_code == 200
        assert kind in done.headers["content-type"]
        assert not re.search(r"https?://|//\w+\.", done.text)
        policy = done.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
      # Names of strangers are text, and never HTML.
      assert "innerHTML" not in (await http.get("/page.js")).text
      assert not re.search(r"<script>|\son\w+=", (await http.get("/")).text)

  asyncio.run(check())
  assert SECRET not in page_response("page.js").body.decode()
