"""A probe: attention over the class token and the mean patch of all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import random_task, run_program, tiny_backbone
from families import FAMILIES

import memory_vit as mv
from memory_vit.errors import TaskError
from memory_vit.model.parts.probe import probe_features
from memory_vit.tasks import inference

OF_ONE_TOKEN = [
  name for name, o in FAMILIES.items() if not o.get("class_tokens", 1)
]


def close(found, expected):
  scale = float(np.abs(expected).max())
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=3e-5 * scale)


def summary_of(backbone, images):
  """An independent implementation: the plain sequence, block by block."""
  config, p = backbone.config, backbone.params
  z, _ = oracle.first_tokens(p, images, config)
  if config.pre_norm:
    z = oracle.layer_norm(p["Transformer"]["pre_norm"], z, config)
  s, d = z.shape[1:]
  plain = {"scale": jnp.ones(1), "bias": jnp.zeros(1)}
  tokens = []
  for i in range(config.depth):
    z = oracle.block(
      p["Transformer"][f"encoderblock_{i}"], z, jnp.zeros((0, d)),
      np.ones((s, s), bool), memory_norm=np.zeros(0, bool), config=config,
    )  # fmt: skip
    first = config.class_tokens + config.registers
    tokens += [z[:, 0]] * bool(config.class_tokens) + [z[:, first:].mean(1)]
  return oracle.layer_norm(plain, jnp.stack(tokens, 1), config)


def dense_logits(task, summary):
  """Token by token, and feature by feature."""
  p = {k: np.asarray(v, np.float64) for k, v in task["probe"].items()}
  b, n, d = summary.shape
  out = np.zeros((b, d))
  for image in range(b):
    x = np.asarray(summary[image], np.float64)
    values = [
      x[i] * p["scale"][i] + (x[i] @ p["down"][i]) @ p["up"][i]
      for i in range(n)
    ]
    for feature in range(d):
      query = feature // -(-d // 8)
      scores = x @ p["query"][query] / np.sqrt(d) + p["bias"][query]
      weights = np.exp(scores) / np.exp(scores).sum()
      out[image, feature] = sum(
        w * value[feature] for w, value in zip(weights, values, strict=True)
      )
  return out @ task["head"]["kernel"] + task["head"]["bias"]


def probe_task(backbone, **options):
  return random_task(
    backbone, "a", regime="probe", cells=0, bottleneck=3, **options
  )


@pytest.mark.parametrize("family", ["", "siglip", "dinov3", "mean"])
def test_probe_equals_the_dense_oracle(images, family):
  backbone = tiny_backbone(width=20, num_heads=1, **FAMILIES.get(family, {}))
  task = probe_task(backbone)
  expected = jax.jit(lambda: summary_of(backbone, images))()
  found = inference.summary_program(
    backbone.params, images, config=backbone.config
  )
  tokens = 1 if family in OF_ONE_TOKEN else 2
  assert found.shape == (8, 2 * tokens, 20)
  close(found, expected)
  logits = run_program(backbone, [task], images)["a"]
  close(logits, dense_logits(task.params, expected))


@pytest.mark.slow
def test_new_probe_is_the_mean_of_all_tokens(backbone, images):
  task = mv.init_task(
    jax.random.key(0), backbone, name="a", num_classes=3, cells=0,
    regime="probe", bottleneck=2,
  )  # fmt: skip
  summary = inference.summary_program(
    backbone.params, images, config=backbone.config
  )
  features = probe_features(task.params["probe"], summary)
  close(features, summary.mean(1))
  assert np.any(task.params["probe"]["down"])


def test_a_probe_and_a_head_share_a_pass(backbone, images):
  tasks = [probe_task(backbone), random_task(backbone, "b", cells=0,
                                             regime="head")]  # fmt: skip
  both = run_program(backbone, tasks, images)
  for task in tasks:
    alone = run_program(backbone, [task], images)
    assert np.array_equal(both[task.name], alone[task.name])


def test_a_saved_probe_fits_its_backbone_alone(backbone, images, tmp_path):
  task = probe_task(backbone)
  mv.save_task(task, tmp_path / "a.safetensors", format="safetensors")
  loaded = mv.load_task(tmp_path / "a.safetensors", backbone)
  assert loaded.digest == task.digest
  # It claims this backbone, and was made for another depth.
  deeper = probe_task(tiny_backbone(depth=3))
  lying = mv.Task(task.spec, deeper.params)
  mv.save_task(lying, tmp_path / "b")
  with pytest.raises(TaskError, match="not fit the backbone: .*probe/bias"):
    mv.load_task(tmp_path / "b", backbone)
  # Its parts are of different depths.
  mixed = {**task.params["probe"], "scale": deeper.params["probe"]["scale"]}
  with pytest.raises(TaskError, match="arrays do not match the spec"):
    mv.save_task(
      mv.Task(task.spec, {**task.params, "probe": mixed}), tmp_path / "c"
    )
