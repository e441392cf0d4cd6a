"""The result of a run is its best state by validation, the first of equals."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
from conftest import class_evaluation, one_device, random_task

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.train import fit, passes, results, sweep
from memory_vit.train.fit import PackResult
from memory_vit.train.state import BestParams, Steps
from memory_vit.train.step import TrainState
from memory_vit.train.sweep import PassPlan


def trained(accuracies, skips=(), losses=types.MappingProxyType({})):
  """The best of each name, whose only parameter counts its updates.

  Args:
    accuracies: {name: on validation after each step}.
    skips: (name, step) of the updates that are not finite.
    losses: {name: on validation after every step}; by default 1.
  """

  def step_fn(state, frozen, batch):
    step = int(state.step) + 1
    skipped = {name: float((name, step) in skips) for name in accuracies}
    params = {
      n: {"w": p["w"] + 1 - skipped[n]} for n, p in state.params.items()
    }
    metrics = {
      name: {"loss": 1.0, "accuracy": 0.0, "skipped": s, "learning_rate": 0.1}
      for name, s in skipped.items()
    }
    evaluated[0] = step
    return TrainState(jnp.int32(step), params, ()), metrics

  def validate(params):
    return {
      name: class_evaluation(values[evaluated[0] - 1], losses.get(name, 1.0))
      for name, values in accuracies.items()
    }

  evaluated, total = [0], len(next(iter(accuracies.values())))
  params = {name: {"w": np.float32(0)} for name in accuracies}
  batches = ({"image": np.zeros((1, 1))} for _ in range(total))
  _, past = fit.fit(
    step_fn, TrainState(jnp.int32(0), params, ()), batches, title="run",
    frozen=None, mesh=one_device(), batch_size=1,
    steps=Steps(total=total, log=1, evaluate=1),
    evaluate=validate,
  )  # fmt: skip
  return past


def evaluated(inputs, packs, monkeypatch):
  """What `results.evaluate_trained` says of packs of one group."""
  monkeypatch.setattr(passes, "of_group", lambda inputs, trials: inputs)
  plan = PassPlan(tuple(tuple(pack.best) for pack in packs))
  return results.evaluate_trained(inputs, plan, packs)


def test_best_state_is_the_earliest_of_equal_scores():
  past = trained({"a": [0.2, 0.7, 0.7, 0.1, 0.7], "b": [0.5, 0.5, 0.5, 0.6, 0]})
  assert (past.best["a"].step, past.best["a"].scores.score) == (2, 0.7)
  assert past.best["a"].params["w"] == 2
  assert past.best["b"].step == 4


def test_diverged_trial_never_becomes_best_again():
  """It gets good updates after three that were not; those do not count."""
  skips = {("a", step) for step in (2, 3, 4)}
  past = trained({"a": [0.3, 0.3, 0.3, 0.9, 0.9, 0.9], "b": [0.1] * 6}, skips)
  assert past.lost == {"a": 4}
  assert (past.best["a"].step, past.best["a"].scores.score) == (1, 0.3)
  assert past.best["a"].params["w"] == 1
  # Its neighbour is as it was.
  assert (past.best["b"].step, past.lost.get("b")) == (1, None)


def test_best_trial_is_chosen_by_validation(backbone, tmp_path, monkeypatch):
  """Better scores of other trials on the test split are ignored."""
  config = config_lib.Config(
    data=config_lib.DataConfig(name="d"),
    sweep=config_lib.SweepConfig(learning_rate=(0.1, 0.2, 0.3)),
  )
  trials = sweep.trials_of(config, "d")
  validation = dict(zip(("d-00", "d-01", "d-02"), (0.5, 0.8, 0.6), strict=True))
  test = dict(zip(("d-00", "d-01", "d-02"), (0.9, 0.2, 0.7), strict=True))
  # Two passes: the better one is not in the first.
  packs = [
    PackResult(
      tasks={name: random_task(backbone, name) for name in names},
      best={
        name: BestParams(3, scores=class_evaluation(validation[name]).scores)
        for name in names
      },
      lost={}, skipped={}, changes=(), examples=0, seconds=0.0,
    )
    for names in (("d-00",), ("d-01", "d-02"))
  ]  # fmt: skip

  asked = []

  def evaluate(inputs, tasks, source, *, also, predictions_of):
    asked.append((also, predictions_of))
    assert source == "the test split"
    return {
      task.spec.name: dataclasses.replace(
        class_evaluation(test[task.spec.name]),
        predictions=task if task.spec.name == predictions_of else None,
      )
      for task in tasks
    }

  inputs = types.SimpleNamespace(
    config=config,
    backbone=backbone,
    parents=(),
    trials=trials,
    splits={"test": "the test split"},
  )
  monkeypatch.setattr(results, "evaluate", evaluate)
  trained = evaluated(inputs, packs, monkeypatch)
  # Plots are made of the predictions of the best, from this very pass.
  assert asked == [(("hits",), "d-01"), (("hits", "predictions"), "d-01")]
  ranked = results.rank(trained, config, "d")
  assert ranked[0].predictions is ranked[0].task
  assert [trial.predictions for trial in ranked[1:]] == [None, None]
  found = [trial.result for trial in ranked]
  assert [r.name for r in found] == ["d-01", "d-02", "d-00"]
  assert [r.val.accuracy for r in found] == [0.8, 0.6, 0.5]
  assert [r.test.accuracy for r in found] == [0.2, 0.7, 0.9]
  assert [r.exported for r in found] == ["tasks/d", None, None]
  assert found[0].learning_rate == 0.2
  # It is exported under the name of the task.
  (exported,) = results.export(inputs, "d", ranked, tmp_path)
  best = next(t for t in packs[1].tasks.values() if t.spec.name == "d-01")
  assert exported.spec.name == "d"
  assert exported.provenance["metrics"]["val"]["score"] == 0.8
  jax.tree.map(np.testing.assert_array_equal, exported.params, best.params)


def test_tie_on_validation_score_is_broken_by_loss(monkeypatch):
  """Two right of three each: the one that is surer of what is right is best."""
  past = trained({"d-00": [0.5], "d-01": [0.5], "d-02": [0.25]}, losses={
    "d-00": 2.0, "d-01": 1.0, "d-02": 0.5,
  })  # fmt: skip
  task = types.SimpleNamespace(
    params={},
    spec=types.SimpleNamespace(
      name="d", cells=1, num_classes=2, kind=mv.TaskKind()
    ),
  )
  asked = []

  def evaluate(inputs, tasks, source, *, also, predictions_of):
    asked.append(predictions_of)
    return {}

  config = config_lib.Config()
  trials = [sweep.Trial(name, {}, config) for name in past.best]
  pack = PackResult(tasks=dict.fromkeys(past.best, task), best=past.best,
                    lost={})  # fmt: skip
  inputs = types.SimpleNamespace(
    config=config, trials=trials, splits={"test": "it"}
  )
  monkeypatch.setattr(results, "evaluate", evaluate)
  found = evaluated(inputs, [pack], monkeypatch)
  assert asked == ["d-01"]
  assert [t.trial.name for t in results.rank(found, config, "d")] == [
    "d-01", "d-00", "d-02",
  ]  # fmt: skip
  assert found[0].result.val.loss == 2.0
  assert found[0].result.val.examples == 9
