"""The dense way, written apart from the package: one sequence and one mask.

Everything is in one sequence [INP and CLS, C_1 .. C_t], with the memories
M_1 .. M_t behind it as further keys, and Table 1 of the paper as the mask.
Nothing is imported from the package but the shapes in a configuration.
"""

import jax
import jax.numpy as jnp
import numpy as np


def to_rank_of(x, a):
  """`a`, with axes in front: it belongs to the last axes of `x`."""
  return jnp.expand_dims(a, range(x.ndim - jnp.ndim(a)))


def dense(p, x):
  return x @ p["kernel"] + to_rank_of(x, p["bias"])


def layer_norm(p, x, scale=0.0, bias=0.0):
  """What `scale` and `bias` (s, d) say is added to those of every token."""
  mean = x.mean(-1, keepdims=True)
  variance = ((x - mean) ** 2).mean(-1, keepdims=True)
  normed = (x - mean) / jnp.sqrt(variance + 1e-6)
  scale = to_rank_of(x, p["scale"]) + to_rank_of(x, scale)
  return normed * scale + to_rank_of(x, p["bias"]) + to_rank_of(x, bias)


def patches(p, images, size):
  b, height, width, _ = images.shape
  grid = images.reshape(b, height // size, size, width // size, size, 3)
  grid = grid.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, size * size * 3)
  return grid @ p["kernel"].reshape(size * size * 3, -1) + p["bias"][None, None]


def may_attend(tasks, tokens):
  """Table 1, rows are queries; `tasks` are (name, cells, names it reads)."""
  columns = ["base"] * tokens + [f"C {name}" for name, _, _ in tasks]
  for name, cells, _ in tasks:
    columns += [f"M {name}"] * cells
  rows = [{"base"}] * tokens
  for name, _, reads in tasks:
    rows.append({"base"} | {f"{x} {n}" for n in (name, *reads) for x in "CM"})
  return np.array([[column in row for column in columns] for row in rows])


def block(p, z, memory, mask, *, memory_norm, gelu, own=None):
  """One block; z is (b, s, d), memory (sum of cells, d), own as `norms_of`."""
  own = own or {"scale": (0.0, 0.0), "bias": (0.0, 0.0)}
  normed = layer_norm(p["LayerNorm_0"], z, own["scale"][0], own["bias"][0])
  cells = layer_norm(p["LayerNorm_0"], memory)
  cells = jnp.where(memory_norm[:, None], cells, memory)
  keys_from = jnp.concatenate(
    [normed, jnp.broadcast_to(cells, (z.shape[0], *cells.shape))], axis=1
  )
  a = p["MultiHeadDotProductAttention_0"]

  def project(name, x):
    return jnp.tensordot(x, a[name]["kernel"], 1) + a[name]["bias"][None, None]

  q, k = project("query", normed), project("key", keys_from)
  v = project("value", keys_from)
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
  scores = jnp.where(mask[None, None], scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
  z = z + jnp.einsum("bqhd,hdo->bqo", mixed, a["out"]["kernel"])
  z = z + a["out"]["bias"][None, None]
  m = p["MlpBlock_0"]
  y = layer_norm(p["LayerNorm_1"], z, own["scale"][1], own["bias"][1])
  y = jax.nn.gelu(dense(m["Dense_0"], y), approximate=gelu == "tanh")
  return z + dense(m["Dense_1"], y)


def norms_of(tasks, tokens, depth, width):
  """What every token adds to 2 l + 1 LayerNorms: (2 l + 1, s, d) each."""
  none = jnp.zeros((2 * depth + 1, width))
  rows = [{"scale": none, "bias": none}] * tokens
  rows += [task.get("norms", rows[0]) for task in tasks]
  return {k: jnp.stack([r[k] for r in rows], 1) for k in ("scale", "bias")}


def forward(config, params, tasks, images):
  """Logits of the original head and of every task.

  Args:
    config: shapes.
    params: {"backbone": ..., "tasks": {name: ...}}.
    tasks: (name, names that it reads, memory_norm) of every task.
    images: (b, side, side, 3).
  """
  p = params["backbone"]
  own = [params["tasks"][name] for name, _, _ in tasks]
  x = patches(p["embedding"], images, config.patch_size)
  b, _, d = x.shape
  position = p["Transformer"]["posembed_input"]["pos_embedding"]
  x = jnp.concatenate([jnp.broadcast_to(p["cls"], (b, 1, d)), x], 1) + position
  tokens = x.shape[1]
  classes = [t["cls"][None, None] + position[:, :1] for t in own]
  z = jnp.concatenate(
    [x, *(jnp.broadcast_to(c, (b, 1, d)) for c in classes)], 1
  )

  cells = [t["memory"].shape[1] for t in own]
  mask = may_attend(
    [(n, m, reads) for (n, reads, _), m in zip(tasks, cells, strict=True)],
    tokens,
  )
  norm = np.repeat([norm for _, _, norm in tasks], cells).astype(bool)
  norms = norms_of(own, tokens, config.depth, d)
  for i in range(config.depth):
    memory = [jnp.zeros((0, d)), *(t["memory"][i] for t in own)]
    z = block(
      p["Transformer"][f"encoderblock_{i}"],
      z,
      jnp.concatenate(memory),
      mask,
      memory_norm=norm,
      gelu=config.gelu,
      own={k: a[2 * i : 2 * i + 2] for k, a in norms.items()},
    )
  last = {k: a[-1] for k, a in norms.items()}
  z = layer_norm(p["Transformer"]["encoder_norm"], z, **last)
  original = z[:, 0]
  if "pre_logits" in p:
    original = jnp.tanh(dense(p["pre_logits"], original))
  out = {"backbone": dense(p["head"], original)}
  for i, (name, _, _) in enumerate(tasks):
    out[name] = dense(own[i]["head"], z[:, tokens + i])
  return out
