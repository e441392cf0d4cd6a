"""The benchmark: its baseline is the same model, and it runs to its end."""

import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from conftest import one_device, random_task, tiny_backbone

import memory_vit as mv
from benchmarks import (
  compiled_programs,
  first_result,
  masked_sequence,
  passes,
  peaks,
  timed_programs,
  workloads,
)
from memory_vit.tasks import split_forward
from memory_vit.train import step

TINY = ["--variant=Micro/2", "--image_size=8", "--batch=2", "--rounds=1"]


def some_tasks(backbone):
  """Concatenation, extension, other numbers of cells and classes."""
  return [
    random_task(backbone, "a", seed=1),
    random_task(backbone, "b", seed=2, cells=0, classes=4),
    random_task(backbone, "c", seed=3, cells=3, attends_to=("a",)),
  ]


def masked(backbone, tasks, images):
  return masked_sequence.forward_program(
    backbone.params,
    {task.spec.name: task.params for task in tasks},
    images,
    config=backbone.config,
    specs=tuple(task.spec for task in tasks),
  )


def assert_close(found, expected, atol):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected
  )


def test_baseline_is_the_same_model(backbone, images):
  tasks = some_tasks(backbone)
  found = masked(backbone, tasks, images)
  assert_close(found, mv.forward(backbone, tasks, images), 1e-4)


def test_baseline_without_a_head_and_with_the_exact_gelu(images):
  backbone = tiny_backbone(
    representation_size=5, num_classes=0, gelu="exact", depth=1
  )
  tasks = [random_task(backbone, "a")]
  found = masked(backbone, tasks, images)
  assert found["backbone"].shape == (8, 5)
  assert_close(found, mv.forward(backbone, tasks, images), 1e-4)


def test_baseline_in_bfloat16(images):
  backbone = tiny_backbone(dtype="bfloat16", depth=1)
  tasks = some_tasks(backbone)
  found = masked(backbone, tasks, images)
  assert {y.dtype.name for y in found.values()} == {"float32"}
  assert_close(found, mv.forward(backbone, tasks, images), 0.3)


def gradient(make_regime, backbone, tasks, images):
  specs = tuple(task.spec for task in tasks)
  params = {task.spec.name: task.params for task in tasks}
  cut = make_regime(backbone.config, specs)
  step_fn = step.Step(cut, optax.sgd(0.01), one_device())
  frozen = {"backbone": backbone.params, "tasks": {}}
  batch = {"image": images, "label": np.arange(8) % 3}
  return step_fn.gradient(params, frozen, batch)


@pytest.mark.slow
def test_baseline_has_the_same_loss_and_gradient(images):
  backbone = tiny_backbone(depth=1)
  tasks = some_tasks(backbone)
  found, losses = gradient(
    masked_sequence.masked_sequence_pass, backbone, tasks, images
  )
  expected, metrics = gradient(
    split_forward.make_split_forward, backbone, tasks, images
  )
  assert_close(losses, metrics, 1e-4)
  # Not "a": the package hands a task no gradient from one that reads it.
  for name in ("b", "c"):
    assert_close(found[name], expected[name], 1e-5)
  assert abs(expected["c"]["memory"]).max() > 1e-3


def test_operations_equal_those_of_the_published_model():
  config = mv.vit_config("B/32", num_classes=1000)
  found = workloads.forward_operations(config)
  # 4.41 billion multiply-adds, as torchvision says of its vit_b_32.
  assert found / 2e9 == pytest.approx(4.41, abs=0.05)


def assert_complete(result, infer, train):
  for name in ("encode", *infer, *train):
    assert result[f"{name}_over_forward"] > 0
    low, high = result[f"{name}_over_forward_quartiles"]
    assert 0 < low <= high
  for key in ("seconds_forward", "images_per_second_forward",
              "tflops_forward", "forward_over_matrix_products"):  # fmt: skip
    assert result[key] > 0
  assert (result["device"], result["dtype"]) == ("cpu", "float32")
  assert (result["variant"], result["batch"]) == ("Micro/2", 2)
  assert all(result["outputs_bit_equal"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
  "more", [pytest.param([], marks=pytest.mark.nightly), ["--more"]]
)
def test_result_is_complete_and_written(more, tmp_path, capsys):
  file = tmp_path / "result.json"
  counts = ["--tasks", "3", "--train_tasks", "1"]
  result = passes.main([*TINY, *counts, *more, f"--json={file}"])
  infer = ("infer_3", "masked_sequence_infer_3")
  train = ("train_1", "kept_train_1", "masked_sequence_train_1")
  assert_complete(result, infer, train)
  assert set(result["outputs_bit_equal"]) == {
    "3_tasks", "plain_program"
  }  # fmt: skip
  assert ("full_finetune_over_forward" in result) == bool(more)
  for name in ("train_1", "full_finetune"):
    assert result[f"peak_bytes_{name}"] > 0
    assert result[f"peak_bytes_{name}_is"] == peaks.RESIDENT_SET
  assert result["peak_bytes_train_1"] < result["peak_bytes_full_finetune"]
  assert json.loads(file.read_text()) == result
  assert "masked_sequence_infer_3 " in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--more"]])
def test_defaults_are_the_programs_of_the_page(more):
  """Programs of the page on costs; none of them is compiled."""
  arguments = passes._arguments([*TINY, *more])
  names = {*passes._programs(passes._setting(arguments), arguments)}
  infer, train = (1, 4, 16, 64), (1, 20)
  assert names >= {f"infer_{n}" for n in infer}
  assert names >= {
    f"masked_sequence_infer_{n}" for n in (infer if more else (64,))
  }
  assert names >= {f"train_{n}" for n in train}
  assert names >= {
    f"masked_sequence_train_{n}" for n in (train if more else (1,))
  }
  assert ("full_finetune" in names) == bool(more)


def test_unreadable_memory_peak_gives_no_number(monkeypatch):
  monkeypatch.setattr(peaks, "_CLEAR", Path("/nowhere/clear_refs"))
  peak = peaks.measure(None, "train_1")
  assert peak.bytes is None
  assert "resident set" in peak.how


@pytest.mark.slow
def test_failing_process_leaves_no_number():
  peak = peaks.in_process([*TINY, "--cells=-1"], "train_1")
  assert peak.bytes is None
  assert "ended with" in peak.how


@pytest.mark.processes
def test_first_results_are_timed_with_and_without_cached_programs(
  tmp_path, capsys
):
  file = tmp_path / "result.json"
  options = ["--only=server", "--only=first_check", "--rounds=1"]
  result = first_result.main([*options, f"--out={file}"])
  assert json.loads(file.read_text()) == result
  [server], [check] = (result[row][str(peaks.ROOT)] for row in result)
  assert server["cold"]["compiled"] > server["warm"]["compiled"]
  assert server["cold"]["cached"] == 0 < server["warm"]["cached"]
  assert check["cold"]["compiled"] == 0 < check["cold"]["cpu_seconds"]
  assert "| first_check | " in capsys.readouterr().out


def test_failing_program_ends_alone():
  """As for lack of memory; and what there is no time for is named."""

  def fails():
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

  good = lambda: lambda: np.zeros(1)  # noqa: E731
  programs = {"forward": good, "x": good, "full": lambda: fails, "last": good}
  ready, failed = passes._compiled(programs, math.inf)
  assert list(ready) == ["forward", "x", "last"]
  assert failed == {"full": "RESOURCE_EXHAUSTED: Out of memory"}
  ready, failed = passes._compiled(programs, 0.0)
  assert list(ready) == ["forward", "x"]
  assert list(failed) == ["full", "last"]
  with pytest.raises(jax.errors.JaxRuntimeError):
    passes._compiled({"forward": lambda: fails}, math.inf)


def test_programs_are_timed_on_the_device_that_is_here(tmp_path, capsys):
  only = ("plain", "encode", "gradient 1", "update 1")
  (found,) = timed_programs.main(
    ["--variant=Micro/32", "--dtype=float32", "--batch=2", "--rounds=1",
     "--layers=1", f"--json={tmp_path}/x.json"]
    + [f"--only={name}" for name in only]
  )  # fmt: skip
  assert [found] == json.loads((tmp_path / "x.json").read_text())
  assert tuple(found["rows"]) == only
  times = {name: row["ms"] for name, row in found["rows"].items()}
  assert all(ms > 0 for ms in times.values())
  (total,) = re.findall(r"\*\*train 1\*\* .*?\| (\S+)", capsys.readouterr().out)
  expected = times["encode"] + times["gradient 1"] + times["update 1"]
  assert float(total) == pytest.approx(expected, abs=0.005)
  with pytest.raises(SystemExit, match="--only=x, expected one of plain"):
    timed_programs.main(["--only=x"])
  (found,) = timed_programs.main(["--only=plain", "--compile_seconds=0"])
  assert not found["rows"]
  assert "plain: no time was left" in capsys.readouterr().out


@pytest.mark.slow
def test_all_programs_for_absent_devices_are_lowered():
  """Programs of the package and of peers; no compiler for TPUs is here."""
  config = mv.vit_config("Micro/8", image_size=16, num_classes=10)
  target = compiled_programs.Target(config, 8, one_device())
  found = compiled_programs.programs(target)
  flops = {
    name: program.lower().cost_analysis()["flops"]
    for name, program in found.items()
  }
  assert all(flops.values())
  for parts in compiled_programs.SUMS.values():
    assert flops.keys() >= set(parts)
  # The same ViT, but for classes.
  assert flops["vit_jax, plain"] == pytest.approx(flops["plain"], rel=0.1)
  assert 1.8 < flops["LoRA 8, gradient"] / flops["vit_jax, plain"] < 2.6
