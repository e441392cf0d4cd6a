"""Whole runs on the embedded digits, with a tiny backbone."""

import dataclasses
import hashlib
import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest import mock

import fake_data
import jax
import numpy as np
import pytest
import quick
from conftest import ROOT, one_device, random_task, tiny_backbone
from PIL import Image

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.commands import evaluate, train
from memory_vit.data import batching, datasets
from memory_vit.errors import (
  ConfigError,
  DataError,
  DivergedError,
  MemoryVitError,
  TaskError,
  TrainingError,
)
from memory_vit.evaluation.hits import read_hits
from memory_vit.model import trees, vit_config
from memory_vit.run_result import read_result
from memory_vit.runtime import files
from memory_vit.runtime.preemption import StopSignal
from memory_vit.tasks import split_forward, store
from memory_vit.tasks.program import Program
from memory_vit.train import evaluate as evaluate_lib
from memory_vit.train import inputs as inputs_lib
from memory_vit.train import (
  passes,
  run,
  settle,
  summary,
  sweep,
  wandb_run,
)
from memory_vit.train import state as state_lib
from memory_vit.train.checkpoints import Checkpoints
from memory_vit.train.fit import PackResult
from memory_vit.train.state import BestParams
from memory_vit.train.step import Step
from memory_vit.train.sweep import PassPlan


def small_backbone(seed=0):
  """One block: how many there are is nothing to a run."""
  return tiny_backbone(seed, num_classes=5, depth=1)


@pytest.fixture(scope="module")
def backbone_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("backbone") / "tiny.npz"
  mv.save_backbone(small_backbone(), path)
  return path


@pytest.fixture(scope="module")
def config(backbone_file):
  """The digits, on a backbone that is there, in 6 steps."""
  values = digits.get_config()
  values.backbone, values.gelu = str(backbone_file), "tanh"
  values.batch_size, values.batch_size_eval = 16, 64
  values.total_steps, values.log_every = 6, 1
  values.eval_every, values.checkpoint_every = 3, 2
  return config_lib.from_dict(values.to_dict())


def changed(config, part, **values):
  part_values = dataclasses.replace(getattr(config, part), **values)
  return dataclasses.replace(config, **{part: part_values})


def silent(config):
  """Without what takes most of the time of a run: its data read again."""
  config = changed(config, "data", test="")
  return changed(config, "upstream", name="")


def arrays(workdir, name="digits-5-9"):
  backbone = mv.load_backbone(workdir.parent / "tiny.npz")
  return trees.flatten(mv.load_task(workdir / "tasks" / name, backbone).params)


def assert_same_bits(a, b):
  assert a.keys() == b.keys()
  for name in a:
    assert np.array_equal(a[name], b[name]), name


@pytest.fixture
def workdir(tmp_path, backbone_file):
  (tmp_path / "tiny.npz").symlink_to(backbone_file)
  return tmp_path / "run"


@pytest.fixture(scope="module")
def finished(config, backbone_file):
  """A run that nothing has disturbed, and its result; not to be changed."""
  workdir = backbone_file.parent / "finished"
  return workdir, run.train_and_evaluate(config, workdir)


@pytest.mark.usefixtures("pictures")
@pytest.mark.slow
def test_attention_of_the_task_is_drawn(config, workdir):
  """On images that it was not trained on; and named at the end."""
  config = changed(config, "upstream", name="")
  config = dataclasses.replace(config, total_steps=2, log_images=3)
  result = run.train_and_evaluate(config, workdir)
  # A row of each image, and nine images in two rows.
  for name, least in (("attention.png", 300), ("answers.png", 200)):
    with Image.open(workdir / name) as picture:
      picture.load()
      assert picture.format == "PNG"
      assert min(picture.size) > least
    named = f"picture       {workdir / name}"
    assert named in summary.summary(result, workdir)
  assert "sweep.png" not in summary.summary(result, workdir)
  # Once more, from its last state, and none: not the one before either.
  run.train_and_evaluate(dataclasses.replace(config, log_images=0), workdir)
  assert not (workdir / "attention.png").exists()
  assert not (workdir / "answers.png").exists()
  assert named not in summary.summary(result, workdir)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--verbose",)])
def test_parameters_are_one_line_unless_verbose(
  config, workdir, flags, capsys, monkeypatch
):
  package = logging.getLogger("memory_vit")
  for name in ("handlers", "propagate", "level"):  # until the test has ended
    monkeypatch.setattr(package, name, getattr(package, name))
  command = ["train", "--config=digits", f"--workdir={workdir}", *flags]
  arguments = train.parse(command)
  config = dataclasses.replace(silent(config), total_steps=2, log_images=0)
  train.execute(dataclasses.replace(arguments, config=config))
  said = capsys.readouterr().err.splitlines()
  assert sum("trained: " in line for line in said) == 1
  rows = [line for line in said if line.startswith("| ")]
  assert bool(rows) == bool(flags)


@pytest.mark.fault("frozen-backbone")
@pytest.mark.versions
def test_result_of_a_run_equals_its_exported_task(config, finished):
  workdir, result = finished
  assert result.to_json() == json.loads((workdir / "result.json").read_text())
  (task_result,) = result.tasks
  assert {*dataclasses.asdict(task_result)} >= {
    "name", "regime", "cells", "learning_rate", "seed", "steps",
    "trainable_params", "val", "test", "chance", "majority",
  }  # fmt: skip
  # cls 32, memory 1 * 5 * 32, head 32 * 5 + 5.
  assert task_result.trainable_params == 32 + 160 + 165
  assert result.backbone.outputs_bit_equal is True
  assert 0 <= result.backbone.accuracy_before <= 1
  assert result.backbone.accuracy_before == result.backbone.accuracy_after
  assert result.images_per_second > 0
  stored = json.loads((workdir / "config.json").read_text())
  assert config_lib.from_dict(stored) == config
  assert list(workdir.glob("events.out.tfevents.*"))

  # The exported task gives the accuracy that is reported, counted here again.
  backbone = mv.load_backbone(config.backbone)
  task = mv.load_task(workdir / "tasks" / "digits-5-9", backbone)
  assert task.spec.class_names == ("5", "6", "7", "8", "9")
  assert task.provenance["metrics"] == dataclasses.asdict(task_result)
  assert task.provenance["config"]["seed"] == config.seed
  source = datasets.open_split("digits:5-9", "test")
  hits, labels = [], []
  for batch in batching.eval_batches(
    source, task.spec.preprocessing, batch_size=64
  ):
    out = mv.forward(backbone, [task], batch["image"])["digits-5-9"]
    right = np.asarray(out).argmax(-1) == batch["label"]
    hits += list(right[batch["mask"] > 0])
    labels += list(batch["label"][batch["mask"] > 0])
  assert len(hits) == source.size == task_result.test.examples
  assert np.mean(hits) == task_result.test.accuracy
  stored_hits = read_hits(workdir)["digits-5-9"]
  assert list(stored_hits.right) == hits
  assert stored_hits.counted.all()
  assert task_result.chance == 1 / 5
  assert task_result.majority == max(np.bincount(labels)) / len(labels)


def newest(workdir):
  """The newest saved state: step, digests of all arrays, and what is beside."""
  path = max((workdir / "checkpoints").glob("[0-9]*"))
  saved = json.loads((path / "state.json").read_text())["saved"]
  meta = saved["meta"]
  del meta["timed"], meta["config"]["config.checkpoint_every"]
  return path.name, saved["arrays"], meta


@pytest.mark.fault("resumed-run")
@pytest.mark.versions
def test_resumed_run_equals_uninterrupted(
  config, workdir, finished, monkeypatch
):
  """Parameters, optimiser, and place in the data: the last state is the same.

  It resumes after an odd step, and takes some further steps.
  """
  config = dataclasses.replace(config, checkpoint_every=3)
  steps = []
  real_step = Step.__call__

  def stops_in_step_5(self, *args):
    steps.append(1)
    if len(steps) == 5:
      raise KeyboardInterrupt
    return real_step(self, *args)

  monkeypatch.setattr(Step, "__call__", stops_in_step_5)
  with pytest.raises(KeyboardInterrupt):
    run.train_and_evaluate(config, workdir)
  assert not (workdir / "result.json").exists()
  assert newest(workdir)[0] == "00000003"
  run.train_and_evaluate(config, workdir)
  # 4 steps, the one that failed, and those after the saved step 3.
  assert len(steps) == 5 + 3
  whole, result = finished
  name, arrays_of_it, _ = newest(workdir)
  assert name == "00000006"
  # The momentum of every part is among them.
  assert sum("opt_state" in path for path in arrays_of_it) >= 4
  assert newest(workdir) == newest(whole)
  assert_same_bits(arrays(workdir), arrays(whole))
  assert read_result(workdir).tasks == result.tasks


def test_finished_run_is_not_trained_again(
  config, workdir, finished, monkeypatch
):
  whole, first = finished
  shutil.copytree(whole, workdir)
  before = arrays(workdir)
  monkeypatch.setattr(Step, "__call__", None)
  library = mock.MagicMock()
  monkeypatch.setattr(wandb_run, "wandb", library)
  monkeypatch.setattr(wandb_run, "require_installed", lambda config: None)
  config = changed(config, "wandb", project="pets")
  again = run.train_and_evaluate(config, workdir)
  assert_same_bits(arrays(workdir), before)
  # Nothing was refused, and so Weights & Biases hears of it.
  library.init.assert_called_once()
  library.init.return_value.finish.assert_called_once_with(exit_code=0)
  # Nor has it become faster.
  assert again == first


@pytest.mark.slow
def test_options_settled_by_backbone_and_data_are_recorded(
  config, workdir, monkeypatch
):
  given = dataclasses.replace(
    silent(config), image_size=0, epochs=0.15, gelu="backbone"
  )
  examples = datasets.open_split(config.data.name, config.data.train).size
  steps = math.ceil(0.15 * examples / config.batch_size)
  result = run.train_and_evaluate(given, workdir)
  assert result.tasks[0].steps == steps != config.total_steps
  stored = json.loads((workdir / "config.json").read_text())
  expected = dataclasses.replace(
    given, image_size=8, total_steps=steps, gelu="tanh"
  )
  assert config_lib.from_dict(stored) == expected
  made = json.loads((workdir / "tasks/digits-5-9/task.json").read_text())
  assert made["spec"]["preprocessing"]["image_size"] == 8
  assert made["provenance"]["config"] == stored
  with Checkpoints(workdir / "checkpoints") as checkpoints:
    saved = checkpoints.meta(steps)["config"]
  assert saved["config.image_size"] == 8
  assert saved["config.total_steps"] == steps
  # Both the recorded and the given configuration resume the run.
  monkeypatch.setattr(Step, "__call__", None)
  in_steps = dataclasses.replace(expected, epochs=0.0)
  for same in (given, in_steps):
    again = run.train_and_evaluate(same, workdir)
    assert again.tasks == result.tasks
  smaller = dataclasses.replace(given, image_size=6)
  with pytest.raises(TrainingError, match=r"config.image_size: 8, now 6"):
    run.train_and_evaluate(smaller, workdir)


@pytest.mark.fault("falling-accuracy")
@pytest.mark.slow
def test_best_state_is_exported(config, workdir, monkeypatch):
  """Accuracy falls after step 3: that state is the result, not the last."""
  real = evaluate_lib.evaluate
  states = []

  def falling(inputs, tasks, source, cached, **options):
    found = real(inputs, tasks, source, cached, **options)
    if source is inputs.splits["validation"]:
      states.append(jax.device_get(tasks[0].params))
      score = 0.9 if len(states) == 1 else 0.2
      was = found["digits-5-9"]
      scores = dataclasses.replace(was.scores, score=score)
      found["digits-5-9"] = dataclasses.replace(was, scores=scores)
    return found

  monkeypatch.setattr(evaluate_lib, "evaluate", falling)
  result = run.train_and_evaluate(silent(config), workdir)
  assert result.tasks[0].best_step == 3
  assert result.tasks[0].steps == 6
  assert result.tasks[0].val.score == 0.9
  assert_same_bits(arrays(workdir), trees.flatten(states[0]))


@pytest.mark.fault("nan-accuracy")
@pytest.mark.slow
def test_last_state_is_exported_without_validation(config, workdir):
  config = changed(silent(config), "data", validation="")
  # Of a run that ended before it had saved anything.
  workdir.mkdir()
  (workdir / "config.json").write_text("{}")
  result = run.train_and_evaluate(config, workdir)
  made = json.loads((workdir / "config.json").read_text())
  assert made == json.loads(json.dumps(config_lib.to_dict(config)))
  (task,) = result.tasks
  assert task.steps == task.best_step == 6
  assert task.val.accuracy is task.test.accuracy is None
  assert task.test.examples == 0
  assert result.backbone.accuracy_before is None
  assert result.backbone.outputs_bit_equal is None


@pytest.mark.fault("changed-outputs")
@pytest.mark.slow
def test_changed_outputs_of_the_backbone_are_reported(
  config, workdir, monkeypatch
):
  """Of a program that is broken as soon as a task is in the pass."""
  real = Program.__call__

  def broken(self, backbone, images):
    out = real(self, backbone, images)
    if self.slots:
      assert "digits-5-9" in out
      # By one bit, of one class; and then what is greatest by far.
      out["backbone"] = out["backbone"].at[0, 0].add(change)
    return out

  monkeypatch.setattr(Program, "__call__", broken)
  config = changed(config, "data", test="")
  config = dataclasses.replace(config, total_steps=1)
  for change in (np.float32(1e-6), np.float32(1e6)):
    found = run.train_and_evaluate(config, workdir).backbone
    assert found.outputs_bit_equal is False
    same = found.accuracy_before == found.accuracy_after
    assert same == (change < 1)


def test_outputs_are_compared_on_data_of_other_classes(config, workdir, caplog):
  """Their accuracy would mean nothing: digits have 10 classes, the head 5."""
  config = changed(silent(config), "upstream", name="digits")
  config = dataclasses.replace(config, total_steps=1)
  with caplog.at_level(logging.INFO):
    result = run.train_and_evaluate(config, workdir)
  assert result.backbone.outputs_bit_equal is True
  assert result.backbone.accuracy_before is None
  assert result.backbone.accuracy_after is None
  assert "has 10 classes, but the head of the backbone has 5: " in caplog.text
  said = summary.summary(result, workdir)
  assert "original outputs unchanged (bitwise): yes" in said


def breaks_in(steps, monkeypatch):
  """Images of these steps are not finite."""
  real_step = Step.__call__

  def breaks(self, state, frozen, batch):
    if int(state.step) + 1 in steps:
      batch = {**batch, "image": batch["image"] * np.nan}
    return real_step(self, state, frozen, batch)

  monkeypatch.setattr(Step, "__call__", breaks)


@pytest.mark.fault("non-finite-update")
@pytest.mark.slow
def test_three_non_finite_updates_stop_the_run(config, workdir, monkeypatch):
  # Not seen in a progress line: the check before saving has to notice.
  config = dataclasses.replace(silent(config), log_every=100)
  with monkeypatch.context() as context:
    breaks_in((3, 4, 5), context)
    with pytest.raises(TrainingError, match="at step 5: .*is not fin") as error:
      run.train_and_evaluate(config, workdir)
  source = datasets.open_split(config.data.name, config.data.train)
  for number in (3, 4, 5):
    names = batching.train_examples(source, seed=0, batch_size=16, step=number)
    assert f"step {number}: {', '.join(names[:8])}, ..." in str(error.value)
  with Checkpoints(workdir / "checkpoints") as checkpoints:
    assert checkpoints.steps() == [3, 4]  # of which nothing was taken over
    assert checkpoints.meta(4)["skipped"]["digits-5-9"]["row"] == [3, 4]
  # It resumes there, on the same images, which were not at fault.
  (task,) = run.train_and_evaluate(config, workdir).tasks
  assert task.best_step in (3, 6)
  assert task.skipped_updates == 2


@pytest.mark.slow
def test_one_non_finite_update_is_skipped(config, workdir, monkeypatch):
  breaks_in((2,), monkeypatch)
  (task,) = run.train_and_evaluate(config, workdir).tasks
  assert task.skipped_updates == 1


def test_named_examples_of_a_step_are_those_of_its_batch():
  reader = datasets.open_split("digits:5-9", "train")
  options = {"seed": 3, "batch_size": 8}
  plain = config_lib.DataConfig(train_crop="small", resize=8, flip=False)
  batches = batching.train_batches(
    reader, plain, image_size=8, start=8, **options
  )
  found = batching.train_examples(reader, step=2, **options)
  labels = [int(reader.source.read(int(index))[1]) for index in found]
  assert labels == list(next(batches)["label"])


CENTRAL = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)


def saved(backbone, directory, name, **options):
  task = random_task(backbone, name, preprocessing=CENTRAL, **options)
  mv.save_task(task, directory / name)
  return task


@pytest.mark.slow
def test_run_extends_an_exported_task(config, workdir, backbone_file):
  backbone = mv.load_backbone(backbone_file)
  parent = saved(backbone, workdir.parent, "parent")
  path = str(workdir.parent / "parent")
  config = changed(config, "task", attends_to=(path,), name="child")
  config = dataclasses.replace(config, total_steps=2, eval_every=2)
  result = run.train_and_evaluate(config, workdir)
  child = mv.load_task(workdir / "tasks" / "child", backbone)
  assert child.spec.attends_to == ("parent",)
  assert child.spec.parent_digests == (parent.digest,)
  assert result.backbone.outputs_bit_equal
  images = np.zeros((1, 8, 8, 3), np.float32)
  with pytest.raises(TaskError, match="'parent', which is not among"):
    mv.forward(backbone, [child], images)
  other = random_task(backbone, "parent", seed=9, preprocessing=CENTRAL)
  with pytest.raises(TaskError, match="another version of task 'parent'"):
    mv.forward(backbone, [child, other], images)
  same = changed(config, "task", name="parent")
  with pytest.raises(ConfigError, match=r"already in use: \['parent'\]"):
    run.train_and_evaluate(same, workdir.parent / "same")
  # The directory may move, what lies in it may not change.
  mv.save_task(other, path)
  with pytest.raises(TrainingError, match="different parents"):
    run.train_and_evaluate(config, workdir)


@pytest.mark.slow
def test_parent_of_a_parent_is_found_beside_it_or_by_option(
  config, workdir, backbone_file
):
  """It is found beside the one that reads it, or where somebody says it is."""
  backbone = mv.load_backbone(backbone_file)
  root = workdir.parent
  a = saved(backbone, root, "a")
  saved(backbone, root / "other", "b", attends_to=[a])
  config = changed(
    silent(config), "task", attends_to=(str(root / "other" / "b"),), name="c"
  )
  with pytest.raises(TaskError, match="'b' in .* attends to 'a', which is not"):
    run.train_and_evaluate(config, workdir)
  run.train_and_evaluate(
    changed(config, "task", indirect=(str(root / "a"),)), workdir
  )
  # All that the task needs lies beside it, and is found there by the next run.
  first = mv.load_tasks(workdir / "tasks", backbone)
  assert [task.name for task in first] == ["a", "b", "c"]
  assert first[0].digest == a.digest
  assert first[2].spec.attends_to == ("b",)
  config = changed(
    config, "task", attends_to=(str(workdir / "tasks" / "b"),), name="d"
  )
  run.train_and_evaluate(config, root / "second")
  second = mv.load_tasks(root / "second" / "tasks", backbone)
  assert [task.name for task in second] == ["a", "b", "d"]


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["adapter_memory", "head", "full"])
def test_accuracy_of_other_regimes_is_that_of_the_exported_task(
  config, workdir, backbone_file, regime
):
  config = dataclasses.replace(config, regime=regime)
  result = run.train_and_evaluate(config, workdir)
  (entry,) = result.tasks
  assert entry.regime == regime
  # With a head, the original outputs are computed in the same pass.
  expected = True if regime == "head" else None
  assert result.backbone.outputs_bit_equal is expected
  backbone = mv.load_backbone(backbone_file)
  task = mv.load_task(workdir / "tasks" / "digits-5-9", backbone)
  assert entry.trainable_params == trees.count(task.params)
  source = datasets.open_split("digits:5-9", "test")
  hits = []
  cut = split_forward.make_split_forward(backbone.config, (task.spec,))
  frozen = {"backbone": backbone.params, "tasks": {}}
  for batch in batching.eval_batches(
    source, task.spec.preprocessing, batch_size=64
  ):
    inputs = cut.prepare(frozen, jax.numpy.asarray(batch["image"]))
    out = cut.logits({task.spec.name: task.params}, frozen, inputs)
    right = np.asarray(out[task.spec.name]).argmax(-1) == batch["label"]
    hits += list(right[batch["mask"] > 0])
  assert np.mean(hits) == entry.test.accuracy
  # As the command finds it, of the task alone.
  exported = workdir / "tasks" / "digits-5-9"
  given = [f"--backbone={backbone_file}", f"--task={exported}"]
  numbers = workdir.parent / f"{regime}.json"
  assert evaluate.main([*given, "--batch_size=64", f"--json={numbers}"]) == 0
  [evaluated] = json.loads(numbers.read_text())["tasks"]
  assert evaluated["score"] == entry.test.accuracy
  if regime == "full":  # a ViT that anybody can load
    model = mv.load_backbone(workdir / "digits-5-9.npz")
    assert model.config.num_classes == 5
    np.testing.assert_allclose(
      mv.forward(model, [], batch["image"])["backbone"],
      out[task.spec.name],
      atol=1e-5,
    )


@pytest.mark.slow
def test_random_backbone_is_trained_and_exported(config, workdir):
  config = dataclasses.replace(
    config, backbone="random:Micro/2", regime="full", total_steps=2
  )
  config = changed(config, "upstream", name="")
  run.train_and_evaluate(config, workdir)
  made = mv.load_backbone(workdir / "digits-5-9.npz")
  assert made.config.variant == "Micro/2"
  assert made.config.num_classes == 5


@pytest.mark.slow
def test_sweep_continues_after_a_diverged_pass(config, workdir):
  """Of a regime whose trials are alone in their passes."""
  config = dataclasses.replace(
    config, regime="head_cls", total_steps=8, eval_every=8
  )
  config = changed(config, "upstream", name="")
  # A step multiplies kernels by the rate times that: too much for the fourth.
  config = changed(config, "optim", name="adamw", weight_decay=1e6)
  rates = changed(config, "sweep", learning_rate=(1e6, 1e-6))
  result = run.train_and_evaluate(rates, workdir)
  (entry,) = result.tasks
  assert entry.learning_rate == 1e-6
  assert list(result.sweep.lost) == ["digits-5-9-00"]
  assert result.sweep.trials == 2
  lost = changed(config, "sweep", learning_rate=(1e6, 1e5))
  with pytest.raises(TrainingError, match="is not finite"):
    run.train_and_evaluate(lost, workdir.parent / "lost")


def test_diverged_pass_is_not_trained_again(tmp_path, monkeypatch):
  """Of several: the others have their results, and it takes no time again."""

  calls, rate = [], 1.0

  def fit_pack(inputs, trials, directory, **options):
    calls.append(trials[0].name)
    if trials[0].name == "a":
      raise DivergedError("not finite", {"a": 3})
    best = {"b": BestParams()}
    return PackResult(tasks={"b": 1}, best=best, lost={}, seconds=1.0)

  monkeypatch.setattr(passes, "fit_pack", fit_pack)
  monkeypatch.setattr(
    passes,
    "describe",
    lambda inputs, trials: {"trials": [t.name for t in trials], "rate": rate},
  )
  config = config_lib.Config()
  trials = tuple(sweep.Trial(name, {"x": name}, config) for name in "ab")
  inputs = types.SimpleNamespace(trials=trials)
  monkeypatch.setattr(passes, "of_group", lambda inputs, trials: inputs)
  plan = PassPlan((("a",), ("b",)))
  for expected in (["a", "b"], ["a", "b", "b"]):
    first, second = passes.fit_passes(inputs, plan, tmp_path)
    assert (first.tasks, first.lost) == ({}, {"a": 3})
    assert second.tasks == {"b": 1}
    assert calls == expected
  # Of another configuration nothing is known.
  rate = 2.0
  passes.fit_passes(inputs, plan, tmp_path)
  assert calls[3:] == ["a", "b"]
  with pytest.raises(DivergedError):
    passes.fit_passes(inputs, PassPlan((("a",),)), tmp_path)


@pytest.mark.slow
def test_interrupted_full_regime_equals_uninterrupted(
  config, tmp_path, monkeypatch
):
  """From random weights, in the regime `full`."""
  monkeypatch.setitem(vit_config.VARIANTS, "Micro", (16, 1, 16, 2))
  config = dataclasses.replace(
    silent(config), backbone="random:Micro/4", regime="full", total_steps=4
  )

  def made(workdir):
    run.train_and_evaluate(config, workdir)
    return mv.load_backbone(workdir / "digits-5-9.npz")

  whole = made(tmp_path / "whole")
  assert whole.config.num_classes == 5
  steps = []
  real_step = Step.__call__

  def stops_in_step_4(self, *args):
    steps.append(1)
    if len(steps) == 4:
      raise KeyboardInterrupt
    return real_step(self, *args)

  monkeypatch.setattr(Step, "__call__", stops_in_step_4)
  with pytest.raises(KeyboardInterrupt):
    made(tmp_path / "interrupted")
  assert not (tmp_path / "interrupted" / "digits-5-9.npz").exists()
  again = made(tmp_path / "interrupted")
  # 3 steps, the one that failed, and the one after the saved step 3.
  assert len(steps) == 4 + 1
  assert whole.fingerprint == again.fingerprint


@pytest.mark.slow
def test_profile_ends_with_the_run(config, workdir):
  """Asked for at step 4 of 6, where five steps are not left."""
  config = dataclasses.replace(config, profile_at=4)
  run.train_and_evaluate(config, workdir)
  (profile,) = workdir.rglob("*.xplane.pb")
  assert profile.stat().st_size > 0
  jax.profiler.start_trace(str(workdir))  # none is running any more
  jax.profiler.stop_trace()


def checksums(workdir):
  """{file: SHA-256}, without .lock, which names the process."""
  files = (path for path in workdir.rglob("*") if path.is_file())
  return {
    str(path.relative_to(workdir)): hashlib.sha256(path.read_bytes()).digest()
    for path in files
    if path.name != ".lock"
  }


@pytest.mark.fault("changed-run")
def test_refused_runs_leave_the_earlier_run_unchanged(
  config, workdir, finished, monkeypatch
):
  with pytest.raises(ConfigError, match="batch_size is 12, .* 8, .* devices"):
    run.train_and_evaluate(dataclasses.replace(config, batch_size=12), workdir)
  shutil.copytree(finished[0], workdir, dirs_exist_ok=True)
  before = checksums(workdir)
  library = mock.MagicMock()
  monkeypatch.setattr(wandb_run, "wandb", library)
  monkeypatch.setattr(wandb_run, "require_installed", lambda config: None)
  config = changed(config, "wandb", project="pets")
  other = workdir.parent / "other.npz"
  mv.save_backbone(small_backbone(seed=3), other)
  with pytest.raises(TrainingError, match="began on the backbone with finger"):
    run.train_and_evaluate(
      dataclasses.replace(config, backbone=str(other)), workdir
    )
  wider = changed(config, "task", cells=7)
  with pytest.raises(
    TrainingError, match=r"different config(.|\n)*config.task.cells: 5, now 7"
  ):
    run.train_and_evaluate(wider, workdir)
  stored = json.loads((workdir / "config.json").read_text())
  assert stored["task"]["cells"] == config.task.cells
  elsewhere = changed(config, "data", name="folder", dir=str(workdir / "none"))
  with pytest.raises(DataError, match="is not there"):
    run.train_and_evaluate(elsewhere, workdir)
  monkeypatch.setattr(passes, "pack_bytes", lambda *args: 1)
  several = changed(config, "sweep", learning_rate=(0.1, 0.3))
  with pytest.raises(TrainingError, match="began with the trials"):
    run.train_and_evaluate(several, workdir)
  # The earlier run is as it was, also in Weights & Biases.
  assert checksums(workdir) == before
  assert not library.init.called


@pytest.mark.fault("changed-run")
@pytest.mark.slow
def test_learning_rate_may_change_only_with_more_steps(
  config, workdir, finished
):
  shutil.copytree(finished[0], workdir)
  before = checksums(workdir)
  faster = dataclasses.replace(config, learning_rate=0.2)
  with pytest.raises(
    TrainingError, match="all of its 6 steps, .*config.learning_rate would"
  ):
    run.train_and_evaluate(faster, workdir)
  assert checksums(workdir) == before
  longer = dataclasses.replace(faster, total_steps=8)
  result = run.train_and_evaluate(longer, workdir)
  assert result.tasks[0].steps == 8
  assert list(result.config_changes) == [
    {"step": 6, "key": "config.total_steps", "from": 6, "to": 8},
    {"step": 6, "key": "config.learning_rate", "from": 0.3, "to": 0.2},
  ]
  stored = json.loads((workdir / "config.json").read_text())
  assert config_lib.from_dict(stored) == longer
  # From now on that is its configuration, and the change is not forgotten.
  again = run.train_and_evaluate(longer, workdir)
  assert again.config_changes == result.config_changes
  shorter = dataclasses.replace(longer, total_steps=7)
  with pytest.raises(TrainingError, match="is at step 8, beyond"):
    run.train_and_evaluate(shorter, workdir)


@pytest.mark.fault("disk-full")
@pytest.mark.slow
def test_full_disk_error_names_the_file(config, workdir, finished, monkeypatch):
  """On a full disk: everything that a run leaves, beside its states."""
  shutil.copytree(finished[0], workdir)
  before = (workdir / "result.json").read_text()
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

  def refused(name, module, target):
    real = getattr(module, target)

    def full(*args):
      if isinstance(args[0], Path) and args[0].name != name:
        return real(*args)
      resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
      try:
        return real(*args)
      finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as context:
      context.setattr(module, target, full)
      with pytest.raises(
        TrainingError, match=f"{name} cannot be written: .*oo"
      ):
        run.train_and_evaluate(config, workdir)

  refused("tasks/digits-5-9", store, "save_task")
  refused("hits.json", files, "write_json")
  refused("result.json", files, "write_json")
  assert (workdir / "result.json").read_text() == before
  assert not (workdir / "result.tmp").exists()
  assert not list((workdir / "tasks").glob(".*"))
  again = run.train_and_evaluate(config, workdir)
  assert again.to_json() == json.loads(before)


def test_skipped_files_of_a_folder_are_logged_once(
  config, tmp_path, monkeypatch
):
  """Of a folder that two splits are slices of."""
  names = [f"{i}.png" for i in range(6)]
  fake_data.write_folder(tmp_path, {f"train/{c}": names for c in "abcde"})
  (tmp_path / "train/a/notes.txt").write_text("")
  given = changed(
    config, "data", name="folder", dir=str(tmp_path), train="train[:60%]",
    validation="train[60%:]", test="",
  )  # fmt: skip
  given = changed(given, "upstream", name="")
  lines = []
  monkeypatch.setattr(
    inputs_lib.logger, "info", lambda line, *_: lines.append(line)
  )
  inputs_lib.open_inputs(given, tmp_path / "run", one_device(), StopSignal())
  [line] = [line for line in lines if "skipped" in line]
  assert line.endswith("/train: skipped 1 with other suffixes (a/notes.txt)")


@pytest.mark.fault("wrong-label")
def test_folder_with_a_single_class_is_refused(config, tmp_path):
  """As of images that lie one folder too deep."""
  fake_data.write_folder(tmp_path / "data", {"train/all/a": ["0.png", "1.png"]})
  given = changed(
    config, "data", name="folder", dir=str(tmp_path / "data"), train="train",
    validation="", test="",
  )  # fmt: skip
  given = changed(given, "upstream", name="")
  with pytest.raises(
    DataError, match=r"a single class, 'all'.*train/all/CLASS"
  ):
    run.train_and_evaluate(given, tmp_path / "run")


def test_task_is_named_after_its_data(config):
  names = {
    "cifar100": {"name": "cifar100"},
    "sun397": {"name": "sun397/tfds:4.0.0"},
    "digits-0-4": {"name": "digits:0-4"},
    "my-pets": {"name": "folder", "dir": "/data/My Pets/"},
    "dtd": {"name": "list", "dir": "vtab/dtd"},
    "meine-bilder-marz-2": {"name": "folder", "dir": "Meine Bilder (März) 2"},
    "strasse": {"name": "folder", "dir": "Straße"},
  }
  for expected, values in names.items():
    data = config_lib.DataConfig(**values)
    named = dataclasses.replace(config.task, name="")
    given = dataclasses.replace(config, data=data, task=named)
    assert settle.task_name(given) == expected
  task = dataclasses.replace(config.task, name="mine")
  assert settle.task_name(dataclasses.replace(config, task=task)) == "mine"


@pytest.mark.fault("changed-run", "wrong-label")
@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"attends_to": {"a": "1", "b": "2"}}, "different attends_to.*\n  b: None"),
    ({"parents": {"a": "3"}}, "different parents"),
    ({"data": {"classes": ["x"], "train": 9}}, "different data.*\n  train: 8"),
    ({"data": {"classes": ["y"], "train": 8}}, r"classes: \['x'\], now"),
    ({"fingerprint": "g"}, "began on the backbone"),
    ({"drawn_by": 2}, "began with 1 processes, but now there are 2"),
  ],
)
def test_resuming_refuses_another_backbone_parents_or_data(
  tmp_path, changes, message
):
  began = {
    "fingerprint": "f", "config": {}, "parents": {"a": "1"}, "trials": {},
    "attends_to": {"a": "1"}, "data": {"classes": ["x"], "train": 8},
    "files": {}, "left_out": {}, "drawn_by": 1,
  }  # fmt: skip
  state_lib.require_same(began, dict(began), tmp_path)
  with pytest.raises(TrainingError, match=message):
    state_lib.require_same(began, {**began, **changes}, tmp_path)


COMMAND = (
  sys.executable, "-m", "memory_vit.main",
  "--config=configs/digits.py",
)  # fmt: skip


def command(config, workdir, **options):
  options = {"backbone": config.backbone, **options}
  flags = [f"--config.{key}={value}" for key, value in options.items()]
  environment = {**os.environ, "XLA_FLAGS": quick.XLA_FLAGS}
  return {
    "args": [*COMMAND, f"--workdir={workdir}", *flags],
    "cwd": ROOT, "env": environment, "text": True,
  }  # fmt: skip


@pytest.mark.fault("random-kill")
@pytest.mark.nightly  # `test_random_kills_change_no_bit` has three kills
@pytest.mark.processes
def test_killed_process_resumes_bitwise(config, workdir):
  options = {"total_steps": 300, "checkpoint_every": 10, "log_every": 1}
  options |= {"batch_size": 16, "eval_every": 150}
  whole = workdir.parent / "whole"
  subprocess.run(**command(config, whole, **options), check=True)
  with subprocess.Popen(
    **command(config, workdir, **options), stderr=subprocess.PIPE
  ) as process:
    for line in process.stderr:
      if "step 30/" in line:  # a trained step: it is not compiling any more
        time.sleep(np.random.default_rng().uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        break
    process.stderr.read()
  assert process.returncode == -signal.SIGKILL
  assert not (workdir / "result.json").exists()
  subprocess.run(**command(config, workdir, **options), check=True)
  assert_same_bits(arrays(workdir), arrays(whole))


def test_reading_options_are_not_compared_on_resuming(config):
  """An option that is new here leaves runs of older versions alone."""
  values = config_lib.to_dict(config)
  older = json.loads(json.dumps(values))
  del older["data"]["max_bad"], older["stall_timeout"], older["mesh"]
  assert state_lib.what_matters(older) == state_lib.what_matters(values)


@pytest.mark.processes
def test_bad_input_is_one_line_and_status_2(config, workdir):
  for options, message in (
    ({"backbone": "no.npz"}, "no file 'no.npz'"),
    ({"data.name": "no_such_set"}, "no_such_set"),
    ({"task.cells": -1}, "config.task.cells is -1"),
    ({"task.sells": 1}, "nearest: config.task.cells"),
  ):
    done = subprocess.run(
      **command(config, workdir, **options), check=False, capture_output=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    errors = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
  assert issubclass(TrainingError, MemoryVitError)
