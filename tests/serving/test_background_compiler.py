"""A server answers while it compiles."""

import asyncio
import contextlib
import re
import threading
import time

import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from served import (
  BYTES,
  client,
  compiled,
  image_files,
  png,
  task_bytes,
  token_file,
)

import memory_vit as mv
from memory_vit.kinds import CLASSES
from memory_vit.prediction import Predictor
from memory_vit.prediction.fixed_shapes import FixedShapes
from memory_vit.serving import ServerSettings, background_compiler, create_app
from memory_vit.serving.attention import AttentionService
from memory_vit.serving.task_folder import TaskFolder

SIZES = (1, 4)
ROOM, GROWN = 128, 256  # for classes
BACKBONE = tiny_backbone(depth=1)
BIRDS = random_task(BACKBONE, "birds", seed=1, classes=3)
PETS = random_task(BACKBONE, "pets", seed=2, classes=5)
LARGE = random_task(BACKBONE, "large", seed=3, classes=200)
IMAGES = [png(i) for i in range(3)]
PATIENCE = 60


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(background_compiler, "_LOOK_SECONDS", 0.02)


@pytest.fixture
def hold(monkeypatch):
  """Let a compilation, by batch size and classes of slots, wait for an event.

  Returns a function that gives an event that is set when the compilation
  begins, and the one for which it waits.
  """
  held, real = {}, FixedShapes.compile

  def waiting(self, program, size, **options):
    classes = program.slots.arrays.parts["head"]["kernel"].shape[-1]
    if events := held.get((size, classes)):
      begun, go = events
      begun.set()
      assert go.wait(PATIENCE)
    real(self, program, size, **options)

  def hold(size, classes=ROOM):
    held[size, classes] = threading.Event(), threading.Event()
    return held[size, classes]

  monkeypatch.setattr(FixedShapes, "compile", waiting)
  yield hold
  for _, go in held.values():
    go.set()  # no thread is left


@contextlib.asynccontextmanager
async def starting(folder):
  """A client of a server that has just been started."""
  model = Predictor.from_model(
    BACKBONE, [BIRDS], batch_sizes=SIZES, slots=4, warm_up=False
  )
  app = create_app(model, ServerSettings(token_file=token_file(folder)))
  async with app.router.lifespan_context(app), client(app) as http:
    yield http


@pytest.fixture
def batches(monkeypatch):
  """The sizes of all batches that are run."""
  sizes, real = [], FixedShapes._run_batch

  def noted(self, batch, *given):
    sizes.append(len(batch))
    return real(self, batch, *given)

  monkeypatch.setattr(FixedShapes, "_run_batch", noted)
  return sizes


async def ready(http):
  """Wait until a server answers; what /readyz then says."""
  async with asyncio.timeout(PATIENCE):
    while (state := await http.get("/readyz")).status_code != 200:
      await asyncio.sleep(0.01)
  return state.json()


async def until(condition):
  async with asyncio.timeout(PATIENCE):
    while not condition():
      await asyncio.sleep(0.01)


def put(http, task, folder):
  """Add a task, beside the test."""
  url, body = f"/v1/tasks/{task.name}", task_bytes(task, folder)
  return asyncio.create_task(http.put(url, content=body, headers=BYTES))


async def predicted(http):
  done = await http.post("/v1/predict", files=image_files(*IMAGES))
  assert done.status_code == 200, done.text
  return done.json()


def by_forward(size):
  """Probabilities by `mv.forward`, in batches of a size: of each image."""
  slots = mv.fill_slots(BACKBONE, [BIRDS], slots=4, cells=8, classes=128)
  found = []
  pixels = mv.preprocess(IMAGES, BIRDS)
  for start in range(0, len(pixels), size):
    batch = np.zeros((size, *pixels.shape[1:]), np.float32)
    part = pixels[start : start + size]
    batch[: len(part)] = part
    logits = mv.forward(BACKBONE, slots, batch)["birds"]
    found += [*np.asarray(logits, np.float64)[: len(part)]]
  return CLASSES.activate(np.stack(found))


def assert_answered_in_batches_of(size, answer):
  for image, expected in zip(answer["images"], by_forward(size), strict=True):
    found = {g["index"]: g["probability"] for g in image["tasks"]["birds"]}
    assert found == dict(enumerate(expected))


async def metrics(http):
  return (await http.get("/metrics")).text


def compilations(text):
  return re.search(r"^memory_vit_compilations (\S+)$", text, re.M)[1]


@pytest.mark.fault("compiling-server")
def test_the_smallest_batches_answer_until_others_are_compiled(
  tmp_path, hold, batches
):
  """Bitwise as `mv.forward` in these batches."""
  _, go = hold(4)

  async def check():
    async with starting(tmp_path) as http:
      state = await ready(http)
      assert state["batch_sizes"] == [1]
      assert state["compiling"] == ["batch sizes", "attention"]
      text = await metrics(http)
      assert 'memory_vit_batch_size_compiled{size="1"} 1.0' in text
      assert 'memory_vit_batch_size_compiled{size="4"} 0.0' in text
      batches.clear()
      assert_answered_in_batches_of(1, await predicted(http))
      assert batches == [1] * len(IMAGES)
      assert "memory_vit_batch_fill_sum 1.0" in await metrics(http)
      # A task that fits does not wait, and a request for attention compiles.
      assert (await put(http, PETS, tmp_path)).status_code == 201
      done = await http.post("/v1/attention", files=image_files(png()))
      assert done.status_code == 200
      go.set()
      await compiled(http)
      state = await ready(http)
      assert (state["batch_sizes"], state["compiling"]) == ([1, 4], [])
      assert 'size_compiled{size="4"} 1.0' in await metrics(http)
      batches.clear()
      assert_answered_in_batches_of(4, await predicted(http))
      assert batches == [4]

  asyncio.run(check())


def test_a_change_before_the_server_is_ready_waits(tmp_path, hold):
  begun, go = hold(1)

  async def check():
    async with starting(tmp_path) as http:
      adding = put(http, PETS, tmp_path)
      await until(begun.is_set)
      assert (await http.get("/readyz")).json()["batch_sizes"] == []
      done, _ = await asyncio.wait({adding}, timeout=0.5)
      assert not done
      go.set()
      assert (await adding).status_code == 201

  asyncio.run(check())


@pytest.mark.fault("growing-room")
def test_nobody_else_waits_for_a_task_that_needs_larger_slots(tmp_path, hold):
  begun, go = hold(4, GROWN)

  async def check():
    async with starting(tmp_path) as http:
      await compiled(http)
      adding = put(http, LARGE, tmp_path)
      await until(begun.is_set)
      assert [*(await predicted(http))["task_set"]["tasks"]] == ["birds"]
      done = await http.post("/v1/attention", files=image_files(png()))
      assert [*done.json()["tasks"]] == ["birds"]
      tasks = (await http.get("/v1/tasks")).json()["tasks"]
      assert [task["name"] for task in tasks] == ["birds"]
      assert (await ready(http))["batch_sizes"] == [1, 4]
      assert not adding.done()
      go.set()
      assert (await adding).json()["grew"]
      assert [*(await predicted(http))["task_set"]["tasks"]] == [
        "birds",
        "large",
      ]
      # The programs of attention follow.
      await compiled(http)
      before = await metrics(http)
      done = await http.post("/v1/attention", files=image_files(png()))
      assert [*done.json()["tasks"]] == ["birds", "large"]
      assert compilations(await metrics(http)) == compilations(before)

  asyncio.run(check())


def test_a_batch_size_that_a_new_set_lacks_is_compiled(
  tmp_path, hold, monkeypatch
):
  """The old set got it after the new one was made, and before it was shown."""
  _, go = hold(4)
  real = TaskFolder.show_part

  async def check():
    async with starting(tmp_path) as http:
      model = http._transport.app.state.service.predictor

      def show_late(self, name):
        go.set()
        while model.compiled_sizes != SIZES:
          time.sleep(0.01)
        real(self, name)

      monkeypatch.setattr(TaskFolder, "show_part", show_late)
      await ready(http)
      assert (await put(http, LARGE, tmp_path)).json()["grew"]
      await compiled(http)
      assert (await ready(http))["batch_sizes"] == [1, 4]

  asyncio.run(check())


@pytest.mark.fault("compiling-server")
@pytest.mark.parametrize("what", ["batch sizes", "attention"])
def test_what_cannot_be_compiled_is_named_and_requests_are_answered(
  tmp_path, monkeypatch, caplog, batches, what
):
  def no_memory(*_, **__):
    raise MemoryError("no memory for it")

  def compile_small(self, program, size, **options):
    real(self, program, size, **options) if size == 1 else no_memory()

  if what == "batch sizes":
    real = FixedShapes.compile
    monkeypatch.setattr(FixedShapes, "compile", compile_small)
  else:
    monkeypatch.setattr(AttentionService, "_weights", no_memory)

  async def check():
    async with starting(tmp_path) as http:
      await compiled(http)
      state = await ready(http)
      assert state["compilation_problems"] == {what: "no memory for it"}
      assert state["batch_sizes"] == ([1] if "sizes" in what else [1, 4])
      assert (
        f'problem{{programs="{what}",reason="no memory for it"}} 1.0'
      ) in await metrics(http)
      batches.clear()
      # Slots can grow; nothing is tried again.
      done = await put(http, LARGE, tmp_path)
      assert done.json()["grew"]
      assert batches == [*state["batch_sizes"], 1]  # the last with a grey image
      answer = await predicted(http)
      assert [*answer["task_set"]["tasks"]] == ["birds", "large"]
      await compiled(http)

  asyncio.run(check())
  logged = [r for r in caplog.records if "cannot be compiled" in r.message]
  assert len(logged) == 1
  assert "MemoryError" in caplog.text
