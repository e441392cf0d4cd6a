"""The compute dtype "auto", and what commands print about it."""

import types

import jax
import pytest
from conftest import random_task, tiny_backbone

import memory_vit as mv
from memory_vit.commands import bulk_options, console, predict
from memory_vit.config import Config
from memory_vit.errors import ConfigError
from memory_vit.runtime import dtypes
from memory_vit.train import settle


@pytest.fixture
def device(monkeypatch):
  """Sets the first device of jax."""

  def set_device(platform, **attributes):
    found = types.SimpleNamespace(
      platform=platform, device_kind=f"a {platform}", **attributes
    )
    monkeypatch.setattr(jax, "devices", lambda: [found])

  return set_device


@pytest.mark.parametrize(
  ("platform", "attributes", "expected"),
  [
    ("tpu", {}, "bfloat16"),
    ("gpu", {"compute_capability": "7.5"}, "float32"),
    ("gpu", {"compute_capability": "8.0"}, "bfloat16"),
    ("gpu", {"compute_capability": "10.0"}, "bfloat16"),
    ("gpu", {"compute_capability": "gfx942"}, "float32"),
    ("gpu", {}, "float32"),
  ],
)
def test_fastest_dtype_of_accelerators(device, platform, attributes, expected):
  device(platform, **attributes)
  found, reason = dtypes.fastest()
  assert found == expected
  assert f"a {platform}" in reason
  assert dtypes.resolve("auto") == expected
  assert dtypes.resolve("float32") == "float32"


@pytest.mark.parametrize(
  ("flags", "expected"),
  [
    ("fpu amx_bf16 amx_tile", "bfloat16"),
    ("avx512f avx512_bf16", "bfloat16"),
    ("fpu avx512f avx2", "float32"),
    ("", "float32"),
  ],
)
def test_fastest_dtype_of_processors(
  device, monkeypatch, tmp_path, flags, expected
):
  device("cpu")
  listed = tmp_path / "cpuinfo"
  listed.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t:\n")
  monkeypatch.setattr(dtypes, "CPUINFO", listed)
  monkeypatch.setattr(jax, "__version_info__", (0, 9, 2))
  assert dtypes.fastest()[0] == "float32"
  monkeypatch.setattr(jax, "__version_info__", (0, 10, 0))
  assert dtypes.fastest()[0] == expected
  monkeypatch.setattr(dtypes, "CPUINFO", tmp_path / "absent")
  assert dtypes.fastest()[0] == "float32"


def test_commands_explain_their_dtype(monkeypatch, capsys):
  monkeypatch.setattr(dtypes, "fastest", lambda: ("bfloat16", "it has units"))

  def said(function, given):
    found = function(given)
    return found, capsys.readouterr().err

  compute, recommend = console.compute_dtype, console.recommend_dtype
  reason = "--dtype=auto is bfloat16: it has units\n"
  assert said(compute, "auto") == ("bfloat16", reason)
  assert said(compute, None) == ("float32", "")
  advice = "--dtype=bfloat16 would be faster: it has units\n"
  assert said(recommend, None) == (None, advice)
  for given in ("auto", "float32", "bfloat16"):
    assert said(recommend, given) == (None, "")
  monkeypatch.setattr(dtypes, "fastest", lambda: ("float32", "it has none"))
  assert said(recommend, None) == (None, "")


def test_workers_of_ray_choose_no_dtype_of_their_own(monkeypatch, capsys):
  monkeypatch.setattr(dtypes, "fastest", lambda: ("bfloat16", "it has units"))

  def chosen(dtype):
    arguments = types.SimpleNamespace(engine="ray", dtype=dtype)
    return bulk_options.compute_dtype(arguments)

  assert [chosen(None), chosen("bfloat16")] == ["float32", "bfloat16"]
  assert capsys.readouterr().err == ""
  with pytest.raises(ConfigError, match="float32 or --dtype=bfloat16"):
    chosen("auto")


def test_auto_is_recorded_as_the_chosen_dtype(monkeypatch, tmp_path):
  monkeypatch.setattr(dtypes, "fastest", lambda: ("bfloat16", "it has units"))
  mv.save_backbone(tiny_backbone(), tmp_path / "a.npz")
  loaded = mv.load_backbone(tmp_path / "a.npz", dtype="auto")
  assert loaded.config.dtype == "bfloat16"
  run = settle.with_backbone(Config(dtype="auto"), loaded)
  assert run.dtype == "bfloat16"
  config = mv.PredictorConfig(str(tmp_path / "a.npz"), dtype="auto")
  predictor = mv.Predictor(config, warm_up=False)
  assert predictor.backbone.config.dtype == "bfloat16"
  with pytest.raises(ConfigError, match="dtype is 'auto'"):
    tiny_backbone(dtype="auto")


def test_predict_recommends_once_if_there_are_many_images(
  monkeypatch, tmp_path, capsys
):
  from PIL import Image

  monkeypatch.setattr(dtypes, "fastest", lambda: ("bfloat16", "it has units"))
  backbone = tiny_backbone()
  mv.save_backbone(backbone, tmp_path / "a.npz")
  mv.save_task(random_task(backbone, "a"), tmp_path / "task")
  Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
  argv = [f"--backbone={tmp_path / 'a.npz'}", f"--task={tmp_path / 'task'}"]

  def said(images, *more):
    images = [str(tmp_path / "a.png")] * images
    assert predict.main([*argv, *images, *more]) == 0
    return capsys.readouterr().err.count("would be faster")

  assert predict._MANY == 100
  monkeypatch.setattr(predict, "_MANY", 3)
  assert said(3, "--batch_size=2") == 0
  assert said(7, "--batch_size=2") == 1
  assert said(4, "--dtype=float32") == 0
  assert said(4, "--dtype=auto") == 0
