"""Heads on the pooled output of a backbone share the pass of other tasks."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from families import FAMILIES, ONE_FIRST

import memory_vit as mv
from memory_vit.errors import TaskError
from memory_vit.model.regimes import REGIMES
from memory_vit.prediction import compilations
from memory_vit.runtime import sharding
from memory_vit.tasks import inference
from memory_vit.tasks.program import Program, make_program
from memory_vit.tasks.split_forward import make_split_forward


def head_of(backbone, name, **options):
  return random_task(backbone, name, regime="head", cells=0, **options)


def same_bits(a, b):
  return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
  "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", ONE_FIRST)
def test_heads_change_nothing_and_answer_as_in_training(family, dtype, images):
  backbone = tiny_backbone(dtype=dtype, **FAMILIES[family])
  heads = [head_of(backbone, f"h{i}", seed=i, classes=2 + i) for i in range(3)]
  tokens = [random_task(backbone, f"m{i}", seed=i) for i in range(2)]
  tokens.append(random_task(backbone, "child", attends_to=tokens[:1]))
  plain = mv.forward(backbone, [], images)["backbone"]
  apart = mv.forward(backbone, tokens, images)
  alone = mv.forward(backbone, heads, images)
  mixed = [heads[0], tokens[0], heads[1], *tokens[1:], heads[2]]
  together = mv.forward(backbone, mv.concatenate(mixed), images)
  assert list(together) == ["backbone", *(task.name for task in mixed)]
  for found in (apart, alone, together):
    assert same_bits(found["backbone"], plain)
  for task in mixed:
    expected = {**apart, **alone}[task.name]
    assert same_bits(together[task.name], expected), task.name
  for head in heads:
    split = make_split_forward(backbone.config, (head.spec,))
    frozen = {"backbone": backbone.params, "tasks": {}}
    trained = split.logits(
      {head.name: head.params}, frozen, split.prepare(frozen, images)
    )[head.name]
    assert together[head.name].shape == trained.shape
    np.testing.assert_allclose(
      together[head.name], trained, rtol=0, atol=1e-5 * np.abs(trained).max()
    )
  # The module of Flax has the two halves of the same parameters.
  module = mv.MemoryViT(backbone.config, mixed)
  params = {
    "backbone": backbone.params,
    "tasks": {task.name: task.params for task in mixed},
  }
  for name, logits in module.apply({"params": params}, images).items():
    scale = np.abs(together[name]).max()
    np.testing.assert_allclose(
      logits, together[name], rtol=0, atol=1e-5 * scale, err_msg=name
    )


def products_in(backbone, tasks, images):
  """The number of matrix products of the program that reads these tasks."""
  slots = mv.fill_slots(backbone, tasks)
  _, context = mv.encode(backbone, images)
  text = str(
    jax.make_jaxpr(
      lambda arrays, context: inference.read_program.__wrapped__(
        backbone.params, arrays, context, config=backbone.config
      )
    )(slots.arrays, context)
  )
  return text.count("dot_general")


def test_all_heads_cost_one_product_and_no_token(backbone, images):
  heads = [head_of(backbone, f"h{i}", seed=i) for i in range(9)]
  tokens = [random_task(backbone, f"m{i}", seed=i) for i in range(2)]
  assert products_in(backbone, heads[:1], images) == 1
  assert products_in(backbone, heads, images) == 1
  of_tokens = products_in(backbone, tokens, images)
  assert of_tokens > 10
  assert products_in(backbone, [*tokens, *heads], images) == of_tokens + 1
  arrays = mv.fill_slots(backbone, [*tokens, *heads]).arrays
  assert arrays.parts["cls"].shape[0] == len(tokens)
  assert mv.fill_slots(backbone, heads).arrays.parts == {}


def test_a_head_is_read_from_a_context_that_was_kept(backbone, images):
  head, token = head_of(backbone, "h"), random_task(backbone, "m")
  _, context = mv.encode(backbone, images)
  kept = jax.device_put(jax.device_get(context))
  found = mv.read(backbone, [head, token], kept)
  expected = mv.forward(backbone, [head, token], images)
  for name in ("h", "m"):
    assert same_bits(found[name], expected[name])


def test_no_task_attends_to_a_head(backbone, images):
  head, token = head_of(backbone, "h"), random_task(backbone, "m")
  for task, parent in ((token, head), (head, token)):
    spec = dataclasses.replace(task.spec, attends_to=(parent.name,))
    reader = mv.Task(spec, task.params)
    with pytest.raises(TaskError, match="expected both to have a class token"):
      mv.concatenate(parent, reader)
  for looked in (mv.token_attention, mv.attention_rollout):
    with pytest.raises(TaskError, match="regime 'head', which gives it no"):
      looked(backbone, [token, head], images)


def test_what_takes_another_pass_is_refused_beside_a_head(backbone, images):
  head = head_of(backbone, "h")
  probe = random_task(backbone, "p", regime="probe", cells=0, bottleneck=3)
  with pytest.raises(
    TaskError, match="'p' has the regime 'probe', which reads"
  ):
    mv.concatenate(head, probe)
  names = [name for name, regime in REGIMES.items() if regime.composes]
  with pytest.raises(TaskError, match=f"share a pass: {', '.join(names)}"):
    mv.concatenate(head, probe)
  assert "head" in names


def test_a_predictor_adds_replaces_and_removes_heads(backbone):
  rng = np.random.default_rng(0)
  pixels = rng.uniform(-1, 1, (5, 8, 8, 3)).astype(np.float32)
  first, second = (head_of(backbone, n, seed=i) for i, n in enumerate("ab"))
  token, other = (random_task(backbone, n, seed=i) for i, n in enumerate("mn"))
  predictor = mv.Predictor.from_model(
    backbone, [token], batch_sizes=(4,), slots=2
  )
  before = predictor.predict_pixels(pixels, original=True)

  def answers(*tasks):
    """What the predictor says, of which the bits of the others have stayed."""
    found = predictor.predict_pixels(pixels, original=True)
    assert same_bits(found.original, before.original)
    assert same_bits(found.logits["m"], before.logits["m"])
    assert set(found.logits) == {"m", *(task.name for task in tasks)}
    slots = mv.fill_slots(backbone, [token, *tasks], slots=2)
    expected = mv.forward(backbone, slots, pixels[:4])
    for name, logits in found.logits.items():
      assert same_bits(logits[:4], expected[name]), name
    return found

  assert predictor.add(first).grew
  answers(first)
  change = predictor.add(second)  # for which there is room
  assert (change.grew, change.compiled) == (False, 0)
  answers(first, second)
  assert predictor.add(other).compiled == 0
  slots = predictor.task_set.slots
  assert slots == {"m": 0, "n": 1, "a": -1, "b": -2}
  assert predictor.remove("a").compiled == 0
  left = answers(second, other)
  # A task of another regime takes a free slot of its own kind.
  renamed = mv.rename(other, "n", "b")["b"]
  predictor.remove("n")
  assert predictor.replace("b", renamed).grew  # heads are left out again
  assert predictor.task_set.slots == {"m": 0, "b": 1}
  found = answers(renamed)
  assert same_bits(found.logits["b"], left.logits["n"])
  assert predictor.replace("b", second).grew
  assert predictor.task_set.slots == {"m": 0, "b": -1}
  assert same_bits(answers(second).logits["b"], left.logits["b"])


def test_tasks_are_refused_in_slots_of_the_other_kind(backbone):
  head, token = head_of(backbone, "h"), random_task(backbone, "m")
  predictor = mv.Predictor.from_model(
    backbone, [head, token], batch_sizes=(4,), warm_up=False
  )
  assert predictor.task_set.names == ("m", "h")
  for by_slot in ({0: head}, {-1: token}, {0: token, 1: head}):
    with pytest.raises(TaskError, match="-1, -2, ... for the regime 'head'"):
      predictor.make_ready(by_slot)
  ready, _ = predictor.make_ready({1: token, -2: head})
  predictor.show(ready)
  assert predictor.task_set.slots == {"m": 1, "h": -2}


def test_a_predictor_of_heads_alone_runs_no_token(backbone):
  heads = [head_of(backbone, f"h{i}", seed=i) for i in range(2)]
  predictor = mv.Predictor.from_model(backbone, heads, batch_sizes=(4,))
  assert predictor.task_set.program.slots.arrays.parts == {}
  rng = np.random.default_rng(0)
  pixels = rng.uniform(-1, 1, (4, 8, 8, 3)).astype(np.float32)
  expected = mv.forward(backbone, heads, pixels)
  with compilations.counted() as tally:
    found = predictor.predict_pixels(pixels, original=True)
  assert tally.count == 0
  assert same_bits(found.original, expected["backbone"])
  for head in heads:
    assert same_bits(found.logits[head.name], expected[head.name])
  change = predictor.add(random_task(backbone, "m"))
  assert change.grew
  assert change.compiled > 0


@pytest.mark.parametrize(
  "devices", [1, pytest.param(8, marks=pytest.mark.slow)]
)
def test_original_outputs_beside_256_heads(backbone, devices):
  rng = np.random.default_rng(0)
  images = rng.uniform(-1, 1, (8, 8, 8, 3)).astype(np.float32)
  heads = [head_of(backbone, f"h{i}", seed=i) for i in range(256)]
  tasks = [*heads, random_task(backbone, "m")]
  mesh = sharding.make_mesh(jax.devices()[:devices])
  params = sharding.put_backbone(backbone.params, mesh)
  placed = dataclasses.replace(backbone, params=params)
  rows = sharding.shard_batch(images, mesh)
  program = sharding.put(make_program(backbone, tasks), mesh)
  found = program(placed, rows)
  plain = sharding.put(Program(), mesh)(placed, rows)["backbone"]
  assert same_bits(found["backbone"], plain)
  _, context = mv.encode(backbone, images)
  for head in heads[::51]:
    kernel, bias = (head.params["head"][k] for k in ("kernel", "bias"))
    np.testing.assert_allclose(
      found[head.name], np.asarray(context.pooled) @ kernel + bias, atol=1e-5
    )
