"""A sweep is its trials, each as if it had been alone."""

import dataclasses
import json
import math
import os
import signal
import types

import jax
import numpy as np
import pytest
from conftest import tiny_backbone
from run_inputs import run_inputs

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit import plots
from memory_vit.data import batching, datasets
from memory_vit.errors import ConfigError, TrainingError
from memory_vit.evaluation.hits import read_hits
from memory_vit.model import trees
from memory_vit.runtime import checksums, preemption
from memory_vit.train import batches, inputs, passes, run, step, sweep
from memory_vit.train import pack as pack_lib
from memory_vit.train.fit import fit_pack
from memory_vit.train.sweep import PassPlan


def config_of(**sweep_values):
  """The digits, on a backbone that is there, in 4 steps."""
  values = digits.get_config()
  values.batch_size, values.batch_size_eval = 16, 64
  values.total_steps, values.eval_every, values.checkpoint_every = 4, 2, 2
  values.log_every = 2
  for key, value in sweep_values.items():
    values.sweep[key] = value
  return config_lib.from_dict(values.to_dict())


def labels(trials):
  return [trial.label for trial in trials]


def test_lists_of_a_sweep_give_their_product():
  config = config_of(learning_rate=(0.3, 0.1), cells=(1, 5), seed=(0, 1))
  trials = sweep.trials_of(config, "d")
  assert len(trials) == 8
  assert trials[0].name == "d-00"
  assert trials[7].name == "d-07"
  assert trials[1].label == "learning_rate=0.3,cells=1,seed=1"
  alone = trials[6].config
  assert (alone.learning_rate, alone.task.cells, alone.seed) == (0.1, 5, 0)
  assert not alone.sweep.is_on
  # The batches are those of the sweep also for seed 1.
  assert config_lib.data_seed(trials[1].config) == config.seed == 0


@pytest.mark.parametrize(("count", "last"), [(100, "d-99"), (110, "d-109")])
def test_names_of_many_trials_have_equal_length(count, last):
  rates = tuple(0.001 * (i + 1) for i in range(count))
  trials = sweep.trials_of(config_of(learning_rate=rates), "d")
  assert trials[-1].name == last
  assert {len(trial.name) for trial in trials} == {len(last)}


@pytest.mark.slow
def test_trials_get_the_settled_steps_and_image_size(tmp_path, monkeypatch):
  """Of the run that trains them: their schedules end where it does."""
  mv.save_backbone(tiny_backbone(num_classes=5), tmp_path / "tiny.npz")
  config = dataclasses.replace(
    config_of(overrides=({"optim.warmup_steps": 9}, {})),
    backbone=str(tmp_path / "tiny.npz"), epochs=0.2, image_size=0,
  )  # fmt: skip
  examples = datasets.open_split(config.data.name, config.data.train).size
  steps = math.ceil(0.2 * examples / config.batch_size)
  planned = []

  def plan(made, workdir):
    planned.extend([made, *made.trials])
    raise ConfigError("planned")

  monkeypatch.setattr(passes, "plan", plan)
  with pytest.raises(ConfigError, match="planned"):
    run.train_and_evaluate(config, tmp_path / "run")
  assert len(planned) == 3
  for one in planned:
    assert (one.config.total_steps, one.config.image_size) == (steps, 8)
  # Each trial has its own end of what is possible.
  late = config_of(overrides=({"optim.warmup_steps": steps + 1}, {}))
  late = dataclasses.replace(late, backbone=config.backbone, epochs=0.2)
  with pytest.raises(ConfigError, match=f"beyond config.total_steps {steps}"):
    run.train_and_evaluate(late, tmp_path / "late")


def test_each_override_gives_a_trial():
  config = config_of(
    overrides=({"optim.momentum": 0.5}, {"task.memory_norm": False}, {}),
    learning_rate=(0.3,),
  )
  trials = sweep.trials_of(config, "d")
  assert labels(trials) == [
    "momentum=0.5,learning_rate=0.3",
    "memory_norm=False,learning_rate=0.3",
    "learning_rate=0.3",
  ]
  assert trials[0].config.optim.momentum == 0.5
  assert trials[1].config.task.memory_norm is False
  assert trials[2].config.optim.momentum == 0.9


def test_configuration_without_a_sweep_gives_one_trial():
  config = config_of()
  (trial,) = sweep.trials_of(config, "d")
  assert (trial.name, trial.label, trial.config) == ("d", "", config)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"overrides": ({"batch_size": 8},)}, "'batch_size' cannot vary"),
    ({"overrides": ({"optim.momentm": 1},)}, "'optim.momentm' cannot vary"),
    ({"overrides": ({"seed": 1},), "seed": (2,)}, "'seed' is varied by a list"),
    ({"overrides": ({"seed": "1"},)}, "config.seed is '1', expected"),
    ({"learning_rate": (0.1, 0.1)}, "the same: .*'learning_rate': 0.1"),
    ({"overrides": ({}, {"optim.momentum": 0.9})}, "are the same: {} and"),
    (
      {"learning_rate": (0.1, -1.0)},
      r"sweep.learning_rate\[1\] is -1.0, expected",
    ),
    ({"regime": ("head", "head")}, "lists a regime twice"),
    ({"overrides": ({"regime": "head"},)}, "'regime' cannot vary"),
    ({"cells": (1, -1)}, r"config.sweep.cells\[1\] is -1, expected"),
  ],
)
def test_invalid_sweeps_are_refused(values, message):
  with pytest.raises(ConfigError, match=message):
    sweep.trials_of(config_of(**values), "d")


def test_choosing_the_best_trial_requires_validation():
  config = config_of(learning_rate=(0.3, 0.1))
  blind = dataclasses.replace(config.data, validation="")
  with pytest.raises(ConfigError, match="needs config.data.validation"):
    sweep.trials_of(dataclasses.replace(config, data=blind), "d")


def test_seeds_are_refused_with_a_random_backbone():
  config = config_of(seed=(0, 1))
  made = dataclasses.replace(config, backbone="random:Micro/2")
  with pytest.raises(ConfigError, match="would change the backbone as well"):
    sweep.trials_of(made, "d")


@pytest.mark.parametrize("at_once", [1, 2, 4, 5, 7, 100])
def test_every_trial_is_in_exactly_one_pass(at_once):
  config = config_of(cells=(20, 1, 5, 10, 2, 0, 3))
  trials = sweep.trials_of(config, "d")
  passes = sweep.packs_of(trials, at_once)
  sizes = [len(p) for p in passes]
  assert max(sizes) <= at_once
  assert len(passes) == -(-7 // at_once)
  flat = [trial for p in passes for trial in p]
  assert sorted(v.name for v in flat) == [v.name for v in trials]
  cells = [v.config.task.cells for v in flat]
  # Of one pass, the order of the configuration; of several, by cells.
  assert len(passes) == 1 or cells == sorted(cells)


def test_number_of_trials_per_pass_fits_into_memory():
  assert sweep.at_once(10, 3, 10) == 1
  assert sweep.at_once(10, 3, 12) == 1
  assert sweep.at_once(10, 3, 19) == 4
  with pytest.raises(ConfigError, match="expected a smaller config.batch_size"):
    sweep.at_once(11, 3, 10)
  assert sweep.free_bytes(0.5) == 2**29


def test_sweep_uses_half_of_host_or_nine_tenths_of_device_memory(monkeypatch):
  """Half of a machine's, for all its devices; of an accelerator's 9 tenths."""
  free = types.SimpleNamespace(available=64 * 2**20)
  monkeypatch.setattr(sweep.psutil, "virtual_memory", lambda: free)
  assert sweep.free_bytes(0) == 32 * 2**20 // jax.local_device_count()
  stats = {"bytes_limit": 1_100, "bytes_in_use": 100}
  device = types.SimpleNamespace(memory_stats=lambda: stats)
  monkeypatch.setattr(sweep.jax, "local_devices", lambda: [device])
  assert sweep.free_bytes(0) == 900


def inputs_of(config):
  return run_inputs(config, tiny_backbone(num_classes=5, depth=1))


def test_class_weights_reach_all_processes(monkeypatch):
  """What process 0 counts goes to the others as JSON."""
  optim = dataclasses.replace(config_of().optim, class_weights="balanced")
  config = dataclasses.replace(config_of(), optim=optim)
  alone = inputs_of(config).frozen["outputs"]
  monkeypatch.setattr(
    inputs.processes, "on_process_0", lambda run: json.loads(json.dumps(run()))
  )
  sent = inputs_of(config).frozen["outputs"]
  assert len(jax.tree.leaves(sent)) == 1
  for ours, theirs in zip(*map(jax.tree.leaves, (alone, sent)), strict=True):
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_resized_training_images_equal_evaluation_images():
  """With data.train_crop=resize, training sees the pixels of evaluation."""
  config = config_of()
  data = dataclasses.replace(
    config.data, train_crop="resize", flip=False, eval_crop="backbone"
  )
  config = dataclasses.replace(config, data=data, image_size=12)
  plain = inputs_of(config)
  stated = mv.EvalPreprocessing(image_size=12, interpolation="bicubic")
  bicubic = run_inputs(
    config, dataclasses.replace(plain.backbone, preprocessing=stated)
  )
  for made, interpolation in ((plain, "bilinear"), (bicubic, "bicubic")):
    assert made.preprocessing.interpolation == interpolation
    evaluated = batching.eval_batches(
      made.splits["train"], made.preprocessing, batch_size=64
    )
    known = {image.tobytes() for b in evaluated for image in b["image"]}
    for image in next(batches.train_batches(made, 0))["image"]:
      assert image.tobytes() in known


@pytest.mark.slow
def test_trials_of_a_sweep_equal_runs_alone(tmp_path):
  """Other rates, cells, seeds, clips: trained parameters and best steps."""
  config = config_of(
    overrides=(
      {"learning_rate": 0.3, "task.cells": 3, "optim.grad_clip": 0.1,
       "task.memory_std": 0.5, "optim.clip_by": "part",
       "optim.memory_factor": 3.0},
      {"learning_rate": 0.1, "task.cells": 0, "optim.name": "adamw",
       "seed": 4, "optim.label_smoothing": 0.1},
    )
  )  # fmt: skip
  trials = sweep.trials_of(config, "d")
  together = fit_pack(inputs_of(config), trials, tmp_path / "all")
  for trial in trials:
    alone = fit_pack(
      inputs_of(trial.config),
      sweep.trials_of(trial.config, trial.name),
      tmp_path / trial.name,
    )
    found, expected = together.best[trial.name], alone.best[trial.name]
    assert (found.step, found.scores.score) == (
      expected.step,
      expected.scores.score,
    )
    assert found.params["memory"].shape[1] == trial.config.task.cells
    rate = pack_lib.start(inputs_of(config), trials).step.schedules[trial.name]
    shown = max(float(rate(step)) for step in range(config.total_steps))
    assert shown == pytest.approx(trial.config.learning_rate, rel=0.05)
    start = pack_lib.create_task(inputs_of(config), trial).params
    for name, value in trees.flatten(expected.params).items():
      close = trees.flatten(found.params)[name]
      np.testing.assert_allclose(close, value, rtol=1e-5, atol=1e-6)
      moved = np.abs(value - trees.flatten(start)[name]).max(initial=0)
      assert value.size == 0 or moved > 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["head", "probe"])
def test_heads_of_a_sweep_equal_heads_trained_alone(tmp_path, regime):
  """They share the features, and nothing else."""
  config = dataclasses.replace(
    config_of(learning_rate=(0.3, 0.1)), regime=regime, total_steps=2
  )
  trials = sweep.trials_of(config, "d")
  together = fit_pack(inputs_of(config), trials, tmp_path / "all")
  for trial in trials:
    alone = fit_pack(
      inputs_of(trial.config),
      sweep.trials_of(trial.config, trial.name),
      tmp_path / trial.name,
    )
    found, expected = together.best[trial.name], alone.best[trial.name]
    assert found.scores.score == expected.scores.score
    np.testing.assert_allclose(
      found.params["head"]["kernel"], expected.params["head"]["kernel"],
      rtol=1e-5, atol=1e-6,
    )  # fmt: skip
  first, second = (together.best[v.name].params["head"] for v in trials)
  assert not np.allclose(first["kernel"], second["kernel"])


@pytest.mark.fault("non-finite-update")
@pytest.mark.slow
def test_diverged_trial_leaves_others_unchanged(tmp_path, monkeypatch):
  """One diverges; the other ends as alone, also when it is resumed."""
  # Steps multiply its kernels: the third by more than float32 can hold.
  huge = {
    "learning_rate": 1e6, "optim.name": "adamw", "optim.weight_decay": 1e6,
    "optim.memory_factor": 1e6, "task.memory_std": 1e3,
  }  # fmt: skip
  config = dataclasses.replace(config_of(overrides=({}, huge)), total_steps=6)
  trials = sweep.trials_of(config, "d")
  alone = fit_pack(inputs_of(config), trials[:1], tmp_path / "alone")

  real_step, steps = step.Step.__call__, []

  def stops_in_step_4(self, *args):
    steps.append(1)
    if len(steps) == 4:
      raise KeyboardInterrupt
    return real_step(self, *args)

  monkeypatch.setattr(step.Step, "__call__", stops_in_step_4)
  with pytest.raises(KeyboardInterrupt):
    fit_pack(inputs_of(config), trials, tmp_path / "both")
  both = fit_pack(inputs_of(config), trials, tmp_path / "both")
  assert len(steps) == 4 + 4  # from the saved step 2 on
  assert both.lost == {"d-01": 5}  # the third update in a row
  assert both.skipped == {"d-01": 3}
  assert both.best["d-01"].step == 2  # as it was before
  found, expected = both.best["d-00"], alone.best["d-00"]
  assert (found.step, found.scores.score) == (
    expected.step,
    expected.scores.score,
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    found.params,
    expected.params,
  )
  with pytest.raises(TrainingError, match="of 'd-01' is not finite"):
    fit_pack(inputs_of(config), trials[1:], tmp_path / "lost")


@pytest.mark.slow
def test_memory_estimate_counts_contexts_and_images(tmp_path):
  """Contexts and images are in memory beside what the gradient needs."""
  config = config_of(cells=(3, 5))
  trials = sweep.trials_of(config, "d")
  one, two = (passes.pack_bytes(inputs_of(config), trials[:n]) for n in (1, 2))
  # 16 images of 8 px thrice; in one layer, keys and values of 17 tokens of
  # width 32, for a batch of evaluation of 64; all float32.
  held = 3 * 16 * (8 * 8 * 3 + 1) * 4 + 64 * 2 * 17 * 32 * 4
  assert held < one < two < 4 * held
  more = dataclasses.replace(config, batch_size_eval=256)
  assert (
    passes.pack_bytes(inputs_of(more), trials[:1]) - one
    == 3 * 64 * 2 * 17 * 32 * 4
  )


@pytest.mark.parametrize(
  ("gib", "asked", "packs"),
  [
    (5.0, [[0, 0, 3, 3]], [4]),
    (4.9, [[0, 0, 3, 3], [3], [3, 3], [0, 0, 3, 3]], [2, 2]),
  ],
)
@pytest.mark.parametrize("cells", [(0, 3), (3, 0)])
def test_memory_is_estimated_once_if_all_trials_fit(
  monkeypatch, gib, asked, packs, cells
):
  """Else of the longest, alone and in pairs, and compiled."""
  plan, found = planned(monkeypatch, gib, cells)
  assert found == asked
  assert [len(pack) for pack in plan.passes] == packs
  assert plan.bytes_per_trial == (None if len(asked) == 1 else 2**30)


@pytest.mark.parametrize(
  ("gib", "packs"), [(3.1, [4]), (2.9, [2, 2]), (1.3, [1] * 4)]
)
def test_pack_that_may_fit_is_compiled(monkeypatch, gib, packs):
  """Compiled, all take 0.6 of the estimate."""
  plan, asked = planned(monkeypatch, gib, (0, 3), share=0.6)
  assert [len(pack) for pack in plan.passes] == packs
  assert len(asked) == 4
  assert plan.bytes_of_one == pytest.approx(1.2 * 2**30, rel=1e-6)


def test_trial_that_does_not_fit_alone_is_refused_by_what_it_takes(monkeypatch):
  with pytest.raises(ConfigError, match=r"trial takes 1\.20 GiB, but 1\.10"):
    planned(monkeypatch, 1.1, (0, 3), share=0.6)


def planned(monkeypatch, gib, cells, share=1.0):
  """The plan of four trials of 1 GiB and 1 GiB together, and what was asked."""
  config = config_of(learning_rate=(0.3, 0.01), cells=cells, memory_gib=gib)
  asked = []

  def estimate(inputs, trials, compiled=None):
    asked.append(sorted(trial.config.task.cells for trial in trials))
    return (share if compiled else 1) * (1 + len(trials)) * 2**30

  monkeypatch.setattr(passes, "pack_bytes", estimate)
  return passes.make_plan(inputs_of(config)), asked


@pytest.mark.parametrize("place", ["00000002", "pass-01/00000001"])
@pytest.mark.parametrize("names", ["abc", "abd", "ab"])
def test_resumed_sweep_uses_its_saved_plan(tmp_path, monkeypatch, place, names):
  """Whatever memory is free now; of other trials it is another run."""
  new, saved = PassPlan((tuple(names),)), PassPlan((("c", "a"), ("b",)), 7)
  monkeypatch.setattr(passes, "make_plan", lambda *args: new)
  run_of = types.SimpleNamespace(
    trials=[sweep.Trial(name, {"x": name}, None) for name in names]
  )
  assert passes.plan(run_of, tmp_path) == new
  # Only a state that can be read has a plan.
  for file in (tmp_path / "checkpoints/00000001/state.json",
               tmp_path / "checkpoints" / place / "arrays/0"):  # fmt: skip
    file.parent.mkdir(parents=True)
    file.write_text("")
  meta = json.loads(json.dumps({"plan": dataclasses.asdict(saved)}))
  checksums.seal(tmp_path / "checkpoints" / place, {"meta": meta})
  if names == "abc":
    assert passes.plan(run_of, tmp_path) == saved
  else:
    with pytest.raises(TrainingError, match=r"trials \['a', 'b', 'c'\], but"):
      passes.plan(run_of, tmp_path)


@pytest.fixture
def swept(tmp_path):
  """A configuration of four trials whose backbone is a file."""
  backbone = tiny_backbone(num_classes=5, depth=1)
  mv.save_backbone(backbone, tmp_path / "tiny.npz")
  config = config_of(learning_rate=(0.3, 0.01), cells=(0, 3), export="all")
  return dataclasses.replace(config, backbone=str(tmp_path / "tiny.npz"))


@pytest.mark.slow
def test_sweep_reports_and_exports_every_trial(swept, tmp_path):
  two = ({"learning_rate": 0.3, "task.cells": 0},
         {"learning_rate": 0.01, "task.cells": 3})  # fmt: skip
  values = dataclasses.replace(
    swept.sweep, learning_rate=(), cells=(), overrides=two
  )
  config = dataclasses.replace(swept, sweep=values)
  result = run.train_and_evaluate(config, tmp_path / "one")
  assert result.sweep.trials == 2
  assert result.sweep.passes == 1
  entries = result.tasks
  accuracies = [entry.val.accuracy for entry in entries]
  assert accuracies == sorted(accuracies, reverse=True)
  assert entries[0].exported == "tasks/digits-5-9"
  assert {(e.learning_rate, e.cells) for e in entries} == {
    (0.3, 0), (0.01, 3)
  }  # fmt: skip
  assert result.backbone.outputs_bit_equal is True
  assert (tmp_path / "one" / "sweep.png").stat().st_size > 1000
  backbone = mv.load_backbone(swept.backbone)
  tasks = mv.load_tasks(tmp_path / "one" / "tasks", backbone)
  names = {task.spec.name for task in tasks}
  assert names == {"digits-5-9", "digits-5-9-00", "digits-5-9-01"}
  best = next(t for t in tasks if t.spec.name == "digits-5-9")
  assert best.provenance["config"]["learning_rate"] == (
    entries[0].learning_rate
  )
  assert best.provenance["metrics"]["name"] == "digits-5-9"
  for entry in entries:
    label = f"learning_rate={entry.learning_rate},cells={entry.cells}"
    scalars = plots.read_scalars(tmp_path / "one" / "sweep" / label)
    _, top1 = scalars["validation/top1"]
    assert max(top1) == pytest.approx(entry.val.accuracy)
  hits = read_hits(tmp_path / "one")
  assert {name: float(found.right.mean()) for name, found in hits.items()} == {
    entry.name: pytest.approx(entry.test.accuracy) for entry in entries
  }


@pytest.mark.slow
def test_interrupted_sweep_in_two_passes_equals_one_pass(
  swept, tmp_path, monkeypatch
):
  """As with less memory in two passes, interrupted between them: the same."""
  entries = run.train_and_evaluate(swept, tmp_path / "one").tasks
  monkeypatch.setattr(sweep, "free_bytes", lambda gib: 0)
  monkeypatch.setattr(sweep, "at_once", lambda *sizes: 2)
  real_step, taken = step.Step.__call__, []

  def preempted_in_the_second_pass(self, *args):
    taken.append(1)
    if len(taken) == 4 + 3:
      os.kill(os.getpid(), signal.SIGTERM)
    return real_step(self, *args)

  monkeypatch.setattr(step.Step, "__call__", preempted_in_the_second_pass)
  stop = preemption.StopSignal()
  with pytest.raises(preemption.Interrupted), stop.listening():
    run.train_and_evaluate(swept, tmp_path / "two", stop)
  again = run.train_and_evaluate(swept, tmp_path / "two")
  assert len(taken) == 2 * 4  # each step of each pass once
  assert again.sweep.passes == 2
  by_name = {entry.name: entry for entry in again.tasks}
  for entry in entries:
    found = by_name[entry.name]
    assert found.test.accuracy == entry.test.accuracy
    assert found.val.accuracy == entry.val.accuracy

  wider = dataclasses.replace(
    swept, sweep=dataclasses.replace(swept.sweep, seed=(0, 1))
  )
  with pytest.raises(TrainingError, match="began with the trials"):
    run.train_and_evaluate(wider, tmp_path / "two")


def test_regimes_can_vary_in_a_sweep():
  config = config_of(
    regime=("head", "memory_masked", "cls+side"), cells=(1, 5),
    learning_rate=(0.3, 0.1),
  )  # fmt: skip
  trials = sweep.trials_of(config, "d")
  # Of cells, only the regime that has some has two.
  assert labels(trials)[:3] == [
    "regime=head,learning_rate=0.3", "regime=head,learning_rate=0.1",
    "regime=memory_masked,learning_rate=0.3,cells=1",
  ]  # fmt: skip
  assert len(trials) == 2 + 4 + 2
  kinds = sweep.by_pass_group(trials)
  assert [{t.config.regime for t in kind} for kind in kinds] == [
    {"head"}, {"memory_masked", "cls+side"},
  ]  # fmt: skip
  assert sweep.exported_names(config, "d", trials) >= {
    "d", "d-head", "d-cls-side",
  }  # fmt: skip


def test_configuration_of_a_trial_is_complete_and_valid():
  """Though of its options only those that vary are checked."""
  config = config_of(regime=("head", "cls+side"), learning_rate=(1, 0.1))
  for trial in sweep.trials_of(config, "d"):
    values = config_lib.to_dict(trial.config)
    assert config_lib.from_dict(values) == trial.config
    assert trial.config.replaced({}) == trial.config
    assert type(trial.config.learning_rate) is float
  assert config == config_of(
    regime=("head", "cls+side"), learning_rate=(1, 0.1)
  )


def test_sweep_with_parents_refuses_a_regime_without():
  config = config_of(regime=("memory_masked", "head"))
  task = dataclasses.replace(config.task, attends_to=("some/task",))
  with pytest.raises(ConfigError, match="'head' cannot use"):
    sweep.trials_of(dataclasses.replace(config, task=task), "d")


def test_regimes_share_all_inputs_but_the_cache(monkeypatch):
  """Images are decoded and the backbone is rounded once for all of them."""
  rounded, decoded = [], []
  monkeypatch.setattr(
    inputs, "rounded", lambda backbone: rounded.append(backbone) or backbone
  )
  monkeypatch.setattr(
    inputs, "cache_decoded", lambda split, *_: decoded.append(split) or split
  )
  config = config_of(regime=("cls_masked", "memory_masked", "head"))
  config = dataclasses.replace(
    config,
    data=dataclasses.replace(config.data, train_crop="resize", flip=False),
    cache=dataclasses.replace(config.cache, what="contexts"),
  )
  whole = inputs_of(config)
  names = [trial.name for trial in whole.trials]
  plan = PassPlan(tuple((name,) for name in names))
  masked, heads = passes.packs_by_group(whole, plan)
  for (group, packs), regime, expected in (
    (masked, "cls_masked", names[:2]), (heads, "head", names[2:]),
  ):  # fmt: skip
    assert group.config.regime == regime
    assert [trial.name for _, [trial] in packs] == expected
    assert [number for number, _ in packs] == [names.index(n) for n in expected]
    assert group.frozen is whole.frozen
    assert group.decoded() is whole.decoded()
  assert [group.cache.config.cache.what for group, _ in (masked, heads)] == [
    "contexts", "features",
  ]  # fmt: skip
  assert (len(rounded), len(decoded)) == (1, 1)


def test_trials_are_ordered_by_memory_use():
  config = config_of(
    regime=("cls_masked", "side_masked", "memory_masked"), cells=(5, 1)
  )
  trials = sorted(sweep.trials_of(config, "d"), key=sweep.size)
  assert [t.config.regime for t in trials] == [
    "cls_masked", "memory_masked", "memory_masked", "side_masked",
  ]  # fmt: skip
  assert [t.config.task.cells for t in trials[1:3]] == [1, 5]


def test_each_trial_caches_the_inputs_of_its_regime():
  config = config_of(regime=("head", "side_masked", "full"))
  for what in ("contexts", "features"):
    cache = dataclasses.replace(config.cache, what=what)
    data = dataclasses.replace(config.data, train_crop="resize", flip=False)
    trials = sweep.trials_of(
      dataclasses.replace(config, cache=cache, data=data), "d"
    )
    assert [t.config.cache.what for t in trials] == [
      "features", "contexts", "none",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", ["none", "contexts"])
def test_sweep_of_regimes_equals_each_run_alone(swept, tmp_path, what):
  """They share a pass where they can; the best of each is exported."""
  regimes = ("head", "memory_masked", "side_masked", "adapter")
  config = dataclasses.replace(
    swept,
    sweep=config_of(regime=regimes, learning_rate=()).sweep,
    cache=dataclasses.replace(swept.cache, what=what),
    data=dataclasses.replace(swept.data, train_crop="resize", flip=False),
  )
  result = run.train_and_evaluate(config, tmp_path / "all")
  backbone = mv.load_backbone(swept.backbone)
  assert result.sweep.passes == 3
  assert result.backbone.outputs_bit_equal is True
  best, *others = result.tasks
  assert best.exported == "tasks/digits-5-9"
  assert {t.exported for t in others} == {
    f"tasks/digits-5-9-{t.regime}" for t in others
  }
  for trial in sweep.trials_of(config, "digits-5-9"):
    found = next(t for t in result.tasks if t.name == trial.name)
    assert found.regime == trial.config.regime
    directory = tmp_path / trial.config.regime
    (alone,) = run.train_and_evaluate(trial.config, directory).tasks
    assert found.test.accuracy == alone.test.accuracy
    assert found.val.loss == pytest.approx(alone.val.loss, rel=1e-4)
    made = mv.load_task(tmp_path / "all" / found.exported, backbone)
    assert made.spec.regime == trial.config.regime
