"""Programs that JAX compiles are cached, and compute the same."""

import json
import os
import subprocess
import sys

import fake_data
import jax
import pytest
import quick
from conftest import ROOT, random_task, tiny_backbone
from jax.experimental.compilation_cache import compilation_cache

import memory_vit as mv
from memory_vit.errors import ConfigError
from memory_vit.runtime import compilation

SWITCH = "MEMORY_VIT_COMPILE_CACHE"
DIRECTORY = "jax_compilation_cache_dir"
THRESHOLD = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """The root of an empty cache, which the environment names."""
  for name in (DIRECTORY.upper(), THRESHOLD.upper(), SWITCH):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("MEMORY_VIT_CACHE", str(tmp_path / "cache"))
  before = {name: getattr(jax.config, name) for name in (DIRECTORY, THRESHOLD)}
  jax.config.update(DIRECTORY, None)
  compilation_cache.reset_cache()
  yield tmp_path / "cache"
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.mark.versions
def test_programs_are_cached_per_machine(cache):
  """Also if jax has compiled others before."""
  jax.jit(lambda a: a + 1)(1.0)
  compilation.enable_cache()
  folder = cache / "xla" / compilation._machine()
  assert jax.config.jax_compilation_cache_dir == str(folder)
  assert folder.stat().st_mode & 0o777 == 0o700
  jax.config.update(THRESHOLD, 0.0)
  jax.jit(named)(1.0)
  assert [*folder.glob("jit_named-*")]


def named(a):
  return a + 2


def test_a_cache_of_the_user_stays(cache):
  jax.config.update(DIRECTORY, "elsewhere")
  compilation.enable_cache()
  assert jax.config.jax_compilation_cache_dir == "elsewhere"
  assert not cache.exists()


def test_a_threshold_of_the_user_stays(cache, monkeypatch):
  jax.config.update(THRESHOLD, 7.0)  # as jax reads it from the environment
  monkeypatch.setenv(THRESHOLD.upper(), "7")
  compilation.enable_cache()
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 7.0


def test_every_backbone_brings_the_cache(cache, tmp_path):
  backbone = mv.random_backbone("Micro/2", image_size=8, key=jax.random.key(0))
  assert jax.config.jax_compilation_cache_dir is not None
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  jax.config.update(DIRECTORY, None)
  mv.load_backbone(tmp_path / "vit.npz")
  assert jax.config.jax_compilation_cache_dir is not None


def test_compile_cache_can_be_turned_off(cache, monkeypatch):
  monkeypatch.setenv(SWITCH, "off")
  compilation.enable_cache()
  assert jax.config.jax_compilation_cache_dir is None
  assert not cache.exists()
  monkeypatch.setenv(SWITCH, "no")
  with pytest.raises(ConfigError, match="is 'no', expected 'on' or 'off'"):
    compilation.enable_cache()


@pytest.mark.fault("compile-cache")
def test_unwritable_compile_cache_is_not_used(cache):
  cache.write_text("a file where the folder would be")
  compilation.enable_cache()
  assert jax.config.jax_compilation_cache_dir is None


def test_the_oldest_programs_are_deleted(cache, monkeypatch):
  monkeypatch.setattr(compilation, "MAX_BYTES", 100)
  folder = cache / "xla" / "machine"
  folder.mkdir(parents=True)
  for i in range(10):
    (folder / f"{i}-cache").write_bytes(bytes(11))
    os.utime(folder / f"{i}-cache", (i, i))
  compilation.enable_cache()
  left = sorted(path.name for path in folder.iterdir())
  assert left == [f"{i}-cache" for i in (6, 7, 8, 9)]
  jax.config.update(DIRECTORY, None)
  compilation.enable_cache()
  assert len(list(folder.iterdir())) == 4


def test_cache_stays_on_if_another_process_deletes_a_program(cache):
  folder = cache / "xla" / "machine"
  folder.mkdir(parents=True)
  (folder / "listed-cache").symlink_to("deleted")
  compilation.enable_cache()
  assert jax.config.jax_compilation_cache_dir


# What it compiles, and does not read from the cache.
TRAINING = """
import json, sys
import jax, jax.monitoring
import numpy as np
compiled = []
jax.monitoring.register_event_duration_secs_listener(
  lambda event, seconds, **of: compiled.append([of.get("fun_name"), seconds])
  if event == "/jax/core/compile/backend_compile_duration" else None
)
cached = []
jax.monitoring.register_event_listener(
  lambda event, **_: cached.append(event)
  if event == "/jax/compilation_cache/cache_hits" else None
)
import memory_vit as mv
name, task, other = sys.argv[1:]
backbone = mv.load_backbone(name)
rng = np.random.default_rng(0)
pixels = rng.integers(0, 256, (40, 8, 8, 3), np.uint8)
result = mv.train_task(
  backbone, (pixels, [other, "b"] * 20), name=task, epochs=2, batch_size=16,
  learning_rate=(0.1, 0.3), regime="side_masked", progress=False,
)
mv.evaluate_tasks(backbone, result.task, (pixels, [other, "b"] * 20),
                  batch_size=16, progress=False)
predictor = mv.Predictor.from_model(backbone, result.task, batch_sizes=(1,))
leaves = jax.tree.leaves(result.task.params)
params = [np.asarray(leaf).tobytes().hex() for leaf in leaves]
print(json.dumps([len(compiled) - len(cached), len(cached), params]))
"""


@pytest.mark.processes
def test_a_second_process_compiles_nothing_in_python(tmp_path):
  """Nor does a task of another name, with a class of another name."""
  mv.save_backbone(tiny_backbone(depth=1), tmp_path / "vit.npz")
  environment = {
    **os.environ, "MEMORY_VIT_CACHE": str(tmp_path / "cache"),
    "XLA_FLAGS": quick.XLA_FLAGS, THRESHOLD.upper(): "0",
  }  # fmt: skip
  del environment[DIRECTORY.upper()]

  def run(*names):
    done = subprocess.run(
      [sys.executable, "-c", TRAINING, str(tmp_path / "vit.npz"), *names],
      cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, text=True,
      check=True, capture_output=True,
    )  # fmt: skip
    assert done.stderr == ""  # also of TensorFlow, with progress=False
    return json.loads(done.stdout)

  compiled, cached, params = run("pets", "a")
  assert compiled > 20
  assert run("pets", "a") == [0, compiled + cached, params]
  assert run("birds", "aaa") == [0, compiled + cached, params]


@pytest.mark.fault("compile-cache")
@pytest.mark.processes
def test_the_same_bits_from_compiled_and_from_kept_programs(tmp_path):
  """Two processes at once, one after them, and one with a torn file."""
  backbone = tiny_backbone(depth=1)
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  mv.save_task(random_task(backbone, "pets"), tmp_path / "pets")
  content = fake_data.encode(fake_data.noise(0, 8, 8), "PNG")
  (tmp_path / "a.png").write_bytes(content)
  command = [
    sys.executable, "-m", "memory_vit", "predict", "--json",
    f"--backbone={tmp_path / 'vit.npz'}", f"--task={tmp_path / 'pets'}",
    str(tmp_path / "a.png"),
  ]  # fmt: skip
  environment = {
    **os.environ, "MEMORY_VIT_CACHE": str(tmp_path / "cache"),
    "XLA_FLAGS": quick.XLA_FLAGS,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }  # fmt: skip
  del environment[DIRECTORY.upper()]

  def start(**more):
    return subprocess.Popen(
      command, cwd=ROOT, env={**environment, **more}, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip

  plain = start(MEMORY_VIT_COMPILE_CACHE="off").communicate()
  assert not (tmp_path / "cache").exists()
  at_once = [start(), start()]
  assert [process.communicate() for process in at_once] == [plain, plain]
  kept = list((tmp_path / "cache" / "xla").glob("*/jit_*-cache"))
  assert len(kept) >= 3  # backbone, tasks, memory
  assert start().communicate() == plain
  assert len(list((tmp_path / "cache" / "xla").glob("*/jit_*-cache"))) == len(
    kept
  )
  for file in kept:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  assert start().communicate()[0] == plain[0]
