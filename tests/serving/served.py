"""A tiny model behind the application, and a client of it."""

import asyncio
import contextlib
import functools
import io

import httpx
import numpy as np
from conftest import random_task, tiny_backbone
from PIL import Image

import memory_vit as mv
from memory_vit.prediction import Predictor
from memory_vit.serving import ServerSettings, create_app

SECRET = "a token of 24 characters"
BEARER = {"Authorization": f"Bearer {SECRET}"}
BYTES = {**BEARER, "Content-Type": "application/octet-stream"}
SIZES = (1, 4)
BACKBONE = tiny_backbone()
BIRDS = random_task(BACKBONE, "birds", seed=1, classes=3)
PETS = random_task(BACKBONE, "pets", seed=2, classes=5)


def predictor(*tasks, **options):
  """A predictor that is not warm yet."""
  options = {"batch_sizes": SIZES, "slots": 4, **options}
  return Predictor.from_model(BACKBONE, tasks, warm_up=False, **options)


@functools.cache
def warm_predictor():
  """A predictor of birds and pets for all tests: it compiles nothing more.

  A test that changes its tasks restores them: `with_tasks`.
  """
  found = predictor(BIRDS, PETS)
  found.warm_up()
  return found


@contextlib.contextmanager
def with_tasks(*tasks):
  """The warm predictor, with these tasks until the body ends."""
  model = warm_predictor()
  sizes = model.task_set.sizes

  def show(wanted):
    for name in reversed(model.task_set.names):
      model.remove(name)
    for task in wanted:
      model.add(task)

  show(tasks)
  try:
    yield model
  finally:
    show((BIRDS, PETS))
    if model.task_set.sizes != sizes:
      warm_predictor.cache_clear()  # what has grown rounds otherwise


def png(seed=0, side=8):
  """A random image as a PNG file."""
  rng = np.random.default_rng(seed)
  pixels = rng.integers(0, 256, (side, side, 3), np.uint8)
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, "PNG")
  return file.getvalue()


def image_files(*contents):
  """Files of a form for httpx."""
  return [("images", (f"{i}.png", c)) for i, c in enumerate(contents)]


def task_bytes(task, folder):
  """A task as one file."""
  path = folder / f"{task.name}-upload.safetensors"
  mv.save_task(task, path, format="safetensors")
  return path.read_bytes()


def files(folder):
  """All files below a folder, sorted."""
  return sorted(path for path in folder.rglob("*") if path.is_file())


def token_file(folder):
  """A file with `SECRET` that only its owner may read."""
  path = folder / "token"
  path.write_text(SECRET)
  path.chmod(0o600)
  return str(path)


@contextlib.asynccontextmanager
async def serving(model, **options):
  """A client of an application that is ready, with all programs compiled."""
  app = create_app(model, ServerSettings(**options))
  async with app.router.lifespan_context(app), client(app) as http:
    await compiled(http)
    yield http


async def compiled(http):
  """Wait until a server is ready, and compiles nothing more."""
  async with asyncio.timeout(60):
    while True:
      state = await http.get("/readyz")
      if state.status_code == 200 and not state.json()["compiling"]:
        return
      assert (await http.get("/healthz")).status_code == 200
      await asyncio.sleep(0.05)


def client(app):
  """A client; an error of the application is status 500."""
  transport = httpx.ASGITransport(app, raise_app_exceptions=False)
  return httpx.AsyncClient(transport=transport, base_url="http://test")


async def names(http):
  """Names of the tasks that answer."""
  return [
    task["name"] for task in (await http.get("/v1/tasks")).json()["tasks"]
  ]
