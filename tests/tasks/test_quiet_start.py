"""A quiet start: new memory takes little of its token's attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import random_task, tiny_backbone

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.data import batching, datasets
from memory_vit.errors import ConfigError, TaskError
from memory_vit.runtime import sharding
from memory_vit.tasks import inference, split_forward
from memory_vit.tasks.quiet_start import quieted
from memory_vit.train import sweep
from memory_vit.train.run_context import RunContext
from memory_vit.train.trainer import Trainer


def new_task(backbone, cells=5, **options):
  return mv.init_task(
    jax.random.key(1), backbone, name="a", num_classes=3, cells=cells, **options
  )


def of_layer(backbone, i):
  p = backbone.params["Transformer"][f"encoderblock_{i}"]
  return p, p["MultiHeadDotProductAttention_0"]


def project(a, name, x):
  return jnp.tensordot(x, a[name]["kernel"], 1) + a[name]["bias"][None]


def first_queries(backbone, task):
  """Of the token in the first layer, the same for all images: (h, k)."""
  p, a = of_layer(backbone, 0)
  position = backbone.params["Transformer"]["posembed_input"]["pos_embedding"]
  c = task.params["cls"][None] + position[0, :1]
  normed = oracle.layer_norm(p["LayerNorm_0"], c, backbone.config)
  return project(a, "query", normed)[0], project(a, "key", normed)[0]


def first_share(backbone, task, images):
  """Of the first layer's attention, what goes to the cells: a mean."""
  p, a = of_layer(backbone, 0)
  query, own = first_queries(backbone, task)
  _, context = mv.encode(backbone, images)
  cells = oracle.layer_norm(
    p["LayerNorm_0"], task.params["memory"][0], backbone.config
  )
  scores = [
    jnp.einsum("hk,bhsk->bhs", query, context[0][0]),
    jnp.einsum("hk,hk->h", query, own)[None, :, None],
    jnp.einsum("hk,mhk->hm", query, project(a, "key", cells))[None],
  ]
  b = len(images)
  scores = [jnp.broadcast_to(s, (b, *s.shape[1:])) for s in scores]
  scores = jnp.concatenate(scores, -1) / np.sqrt(query.shape[-1])
  weights = jax.nn.softmax(scores)[:, :, -len(cells) :]
  return float(weights.sum(-1).mean())


def close(found, expected):
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_memory_lies_against_the_queries(backbone, images):
  """By hand, where no LayerNorm comes between memory and its keys."""
  task = new_task(backbone, memory_norm=False)
  quiet = mv.quiet_memory(backbone, task, images)
  query, _ = first_queries(backbone, task)
  _, a = of_layer(backbone, 0)
  raises = np.einsum("dhk,hk->d", a["key"]["kernel"], query)
  raises /= np.linalg.norm(raises)
  drawn = np.asarray(task.params["memory"][0])
  own = np.linalg.norm(drawn, axis=1, keepdims=True)
  close(quiet.params["memory"][0], drawn - own * raises)


@pytest.mark.slow
def test_queries_of_later_layers_are_those_of_the_images(backbone, images):
  """Layer 2, on images that the first has mixed into the token."""
  task = new_task(backbone, memory_norm=False)
  other = mv.quiet_memory(backbone, task, -images).params["memory"]
  found = mv.quiet_memory(backbone, task, images).params["memory"]
  assert np.array_equal(found[0], other[0])  # no image has been read yet
  assert not np.allclose(found[1], other[1], atol=1e-4)
  # A mean: the order of the images is nothing, nor how often they are there.
  twice = jnp.concatenate([images[::-1], images])
  close(mv.quiet_memory(backbone, task, twice).params["memory"], found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_new_memory_takes_less_attention(images, seed):
  backbone = tiny_backbone(seed, width=64)
  task = new_task(backbone, cells=5)
  quiet = mv.quiet_memory(backbone, task, images)
  drawn = first_share(backbone, task, images)
  assert drawn > 0.15  # 5 of 22
  assert first_share(backbone, quiet, images) < 0.2 * drawn


@pytest.mark.slow
def test_nothing_else_changes(backbone, images):
  parent = random_task(backbone, "parent")
  task = new_task(
    backbone, attends_to=[parent], regime="cls+memory+norms+layers+side"
  )
  quiet = mv.quiet_memory(backbone, task, images, parents=[parent])
  assert quiet.spec == task.spec
  assert quiet.params.keys() == task.params.keys()
  for part in {*task.params} - {"memory"}:
    jax.tree.map(
      np.testing.assert_array_equal, quiet.params[part], task.params[part]
    )
  # Cells stay as random as they were drawn.
  moved = np.asarray(quiet.params["memory"] - task.params["memory"])
  length = np.linalg.norm(task.params["memory"], axis=-1)
  close(np.linalg.norm(moved, axis=-1), length)
  again = mv.quiet_memory(backbone, task, images, parents=[parent])
  assert again.digest == quiet.digest != task.digest
  # What the token reads of its parent is a part of its queries.
  _, context = mv.encode(backbone, images)
  alone = dataclasses.replace(
    task, spec=dataclasses.replace(task.spec, attends_to=(), parent_digests=())
  )
  without = quieted(backbone, alone, (), context).params["memory"]
  assert not np.allclose(without[1], quiet.params["memory"][1], atol=1e-4)
  # A task that it does not read is nothing to it.
  beside = quieted(backbone, alone, [parent], context).params["memory"]
  close(beside, without)


def test_what_has_no_quiet_start(backbone, images):
  for regime in ("memory", "cls_masked"):
    task = new_task(backbone, cells=2 * (regime == "memory"), regime=regime)
    with pytest.raises(TaskError, match="has no quiet start: its regime is"):
      mv.quiet_memory(backbone, task, images)
  child = new_task(backbone, attends_to="parent")
  with pytest.raises(TaskError, match="attends to 'parent', which is not"):
    mv.quiet_memory(backbone, child, images)
  with pytest.raises(TaskError, match="belongs to another backbone"):
    mv.quiet_memory(tiny_backbone(1), new_task(backbone), images)
  values = digits.get_config()
  values.task.memory_init, values.regime = "quiet", "memory_propagated"
  with pytest.raises(ConfigError, match="'memory_propagated' cannot be"):
    config_lib.from_dict(values.to_dict())
  values.regime = "head"  # which has no memory, however that would start
  config_lib.from_dict(values.to_dict())


def trainer_of(config, devices):
  backbone = tiny_backbone(depth=1, width=16)
  mesh = sharding.make_mesh(jax.devices()[:devices])
  placed = sharding.put_backbone(backbone.params, mesh)
  return Trainer(
    config=config,
    context=RunContext(mesh),
    backbone=dataclasses.replace(backbone, params=placed),
    train=datasets.open_split(config.data, "train[:64]", 60.0, False),
  )


def config_of(**changes):
  values = digits.get_config()
  values.pretrain.variant, values.batch_size = "", 16
  for key, value in changes.items():
    values.update_from_flattened_dict({key.replace("__", "."): value})
  return config_lib.from_dict(values.to_dict())


@pytest.mark.slow
def test_a_run_starts_from_its_first_batch():
  """In a sweep each trial as alone, and as those who never ask for it."""
  config = config_of(task__memory_init="quiet")
  trainer = trainer_of(config, 1)
  (trial,) = sweep.trials_of(config, "a")
  found = trainer.start([trial]).tasks["a"]
  batches = batching.train_batches(
    trainer.train, config.data, image_size=8, batch_size=16, seed=config.seed
  )
  images = next(batches)["image"]
  batches.close()
  drawn = trainer.new_task(trial)
  expected = mv.quiet_memory(trainer.backbone, drawn, images)
  assert found.digest == expected.digest != drawn.digest
  swept = config_of(
    sweep__overrides=({}, {"task.memory_init": "quiet"}), sweep__seed=(0, 3)
  )
  trials = sweep.trials_of(swept, "a")
  tasks = trainer_of(swept, 1).start(trials).tasks
  for trial in trials:
    if (
      trial.config.seed == config.seed
      and trial.config.task.memory_init == "quiet"
    ):
      assert tasks[trial.name].digest == found.digest
    elif trial.config.task.memory_init == "normal":
      assert tasks[trial.name].digest == trainer.new_task(trial).digest


@pytest.mark.slow
def test_a_start_on_many_devices_is_that_on_one():
  (trial,) = sweep.trials_of(config_of(task__memory_init="quiet"), "a")
  one, many = (
    trainer_of(trial.config, devices).start([trial]).tasks["a"].params["memory"]
    for devices in (1, 8)
  )
  close(many, one)


@pytest.mark.slow
def test_a_start_takes_no_more_images_than_pass_at_once():
  trial = sweep.trials_of(
    config_of(task__memory_init="quiet", optim__accumulation_steps=4), "a"
  )
  trainer = trainer_of(trial[0].config, 1)
  sizes = []

  def encode(params, images, *, config):
    sizes.append(len(images))
    return inference.encode_program(params, images, config=config)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(split_forward, "encode_program", encode)
    trainer.start(trial)
  assert sizes == [4]


@pytest.mark.slow
def test_on_a_trained_backbone(data_dir):
  """Five drawn cells take more of it than the 37 tokens of an image."""
  backbone = mv.load_backbone(data_dir / "glyphs_p4.npz", image_size=24)
  values = config_lib.DataConfig(
    name="glyph_rotation", dir=str(data_dir / "tfds"), flip=False,
    train_crop="small",
  )  # fmt: skip
  batches = batching.train_batches(
    datasets.open_split(values, "train", 60.0, False), values, image_size=24,
    batch_size=64, seed=0,
  )  # fmt: skip
  images = next(batches)["image"]
  batches.close()
  task = new_task(backbone, cells=5)
  quiet = mv.quiet_memory(backbone, task, images)
  shares = [first_share(backbone, t, images) for t in (task, quiet)]
  print(f"of the first layer: {shares[0]:.1%}, then {shares[1]:.1%}")
  assert shares[0] > 0.5
  assert shares[1] < 0.03
