"""Commands cache what JAX compiles, and compute the same with it."""

import os
import subprocess
import sys

import fake_data
import pytest
import quick
from conftest import ROOT, random_task, tiny_backbone

import memory_vit as mv
from memory_vit.errors import ConfigError
from memory_vit.runtime import compilation

JAX = "JAX_COMPILATION_CACHE_DIR"


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """The root of an empty cache, which the environment names."""
  for name in (JAX, "MEMORY_VIT_COMPILE_CACHE"):
    monkeypatch.setenv(name, "")  # so that it is put back as it was
    monkeypatch.delenv(name)
  monkeypatch.setenv("MEMORY_VIT_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache"


def test_programs_are_cached_per_machine(cache, monkeypatch):
  compilation.enable_cache()
  folder = cache / "xla" / compilation._machine()
  assert os.environ[JAX] == str(folder)
  assert folder.stat().st_mode & 0o777 == 0o700
  monkeypatch.setenv(JAX, "elsewhere")
  compilation.enable_cache()
  assert os.environ[JAX] == "elsewhere"


def test_compile_cache_can_be_turned_off(cache, monkeypatch):
  monkeypatch.setenv("MEMORY_VIT_COMPILE_CACHE", "off")
  compilation.enable_cache()
  assert JAX not in os.environ
  assert not cache.exists()
  monkeypatch.setenv("MEMORY_VIT_COMPILE_CACHE", "no")
  with pytest.raises(ConfigError, match="is 'no', expected 'on' or 'off'"):
    compilation.enable_cache()


@pytest.mark.fault("compile-cache")
def test_unwritable_compile_cache_is_not_used(cache):
  cache.write_text("a file where the folder would be")
  compilation.enable_cache()
  assert JAX not in os.environ


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
  compilation.enable_cache()
  assert len(list(folder.iterdir())) == 4


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
  del environment[JAX]

  def start(**more):
    return subprocess.Popen(
      command, cwd=ROOT, env={**environment, **more}, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip

  plain = start(MEMORY_VIT_COMPILE_CACHE="off").communicate()
  assert plain[1] == ""
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
