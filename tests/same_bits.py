"""Compares the original outputs with those of a plain ViT, to the bit.

A process of its own, in which XLA compiles as it does for everybody: what
`quick.py` switches off for the other tests is what could change a bit.

  python tests/same_bits.py '[{"width": 128, ..., "batch": 3}, ...]'

prints the names of all that differed, and how much was compared, as JSON.
"""

import json
import sys

import jax
import numpy as np
from plain_vit import PlainViT, with_flax_biases

import memory_vit as mv
from memory_vit.model import trees
from memory_vit.model.backbone import backbone_shapes


def backbone_of(setting):
  """From a file, or with random weights that make every layer matter."""
  if "file" in setting:
    return mv.load_backbone(setting["file"], dtype=setting["dtype"])
  variant = setting.get("variant")
  shape = {"num_classes": 7, "dtype": setting["dtype"]}
  if variant:
    config = mv.vit_config(variant, image_size=setting["image_size"], **shape)
  else:
    options = {**setting["shape"], **shape, **setting.get("family", {})}
    config = mv.ViTConfig(**options)
  rng = np.random.default_rng(0)
  size = 2 / np.sqrt(config.width)

  def draw(path, leaf):
    values = rng.standard_normal(leaf.shape).astype(np.float32)
    return values * size + np.float32(path[-1].key == "scale")

  params = jax.tree_util.tree_map_with_path(draw, backbone_shapes(config))
  return mv.Backbone(config, params, trees.fingerprint(params))


def tasks_of(backbone, count):
  """Of three regimes' shapes; every fourth reads the one before it."""
  rng, tasks = np.random.default_rng(1), []
  for i in range(count):
    task = mv.init_task(
      jax.random.key(i), backbone, name=f"t{i}", num_classes=3 + i % 3,
      cells=i % 4, attends_to=tasks[-1:] if i % 4 == 3 else (),
    )  # fmt: skip
    params = jax.tree.map(
      lambda a: rng.standard_normal(a.shape).astype(np.float32), task.params
    )
    tasks.append(mv.Task(task.spec, params))
    if i % 4 == 3:  # its digest is that of what it learned
      tasks[-1] = mv.Task(task.spec, params)
  return tasks


def ways(backbone, tasks, images, jits):
  """{name: the original outputs}, as a user may ask for them."""
  yield "forward", mv.forward(backbone, tasks, images)["backbone"]
  slots = mv.fill_slots(backbone, tasks) if tasks else []
  if tasks:
    yield "slots", mv.forward(backbone, slots, images)["backbone"]
  if not jits:
    return
  whole = jax.jit(lambda images: mv.forward(backbone, tasks, images))
  yield "jit of forward", whole(images)["backbone"]
  if tasks:
    whole = jax.jit(lambda images: mv.forward(backbone, slots, images))
    yield "jit of forward, with slots", whole(images)["backbone"]
  module = mv.MemoryViT(backbone.config, tuple(t.spec for t in tasks))
  params = {
    "backbone": backbone.params,
    "tasks": {task.spec.name: task.params for task in tasks},
  }
  out = jax.jit(module.apply)({"params": params}, images)
  yield "jit of MemoryViT", out["backbone"]


def compare(setting):
  """What differs in one setting, and how many comparisons were made."""
  backbone = with_flax_biases(backbone_of(setting))
  size = backbone.config.image_size
  shape = (setting["batch"], size, size, 3)
  images = np.random.default_rng(2).uniform(-1, 1, shape).astype(np.float32)
  if setting.get("family"):  # of which there is no plain one: without tasks
    plain = mv.forward(backbone, [], images)["backbone"]
  else:
    plain = PlainViT(backbone.config).jitted(backbone.params, images)
  plain = np.asarray(plain)
  assert np.ptp(plain) > 0.01
  assert plain.dtype == np.float32
  tasks, differ, compared = tasks_of(backbone, max(setting["counts"])), [], 1
  if not np.array_equal(mv.encode(backbone, images)[0], plain):
    differ.append("encode")
  for count in setting["counts"]:
    jits = count in setting["jits"]
    for way, found in ways(backbone, tasks[:count], images, jits):
      compared += 1
      if np.asarray(found).tobytes() != plain.tobytes():
        differ.append(f"{way}, {count} tasks")
  return differ, compared


def main():
  settings = json.loads(sys.argv[1])
  assert len(jax.devices()) == 1
  found = [compare(setting) for setting in settings]
  print(json.dumps(found))


if __name__ == "__main__":
  main()
