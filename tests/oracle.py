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


def layer_norm(p, x, config, scale=0.0, bias=0.0):
  """What `scale` and `bias` (s, d) say is added to those of every token."""
  mean = x.mean(-1, keepdims=True)
  variance = ((x - mean) ** 2).mean(-1, keepdims=True)
  normed = (x - mean) / jnp.sqrt(variance + config.layer_norm_epsilon)
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


def gelu(z, kind):
  if kind == "tanh":
    return z / 2 * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
  if kind == "quick":
    return z / (1 + jnp.exp(-1.702 * z))
  return z / 2 * (1 + jax.scipy.special.erf(z / np.sqrt(2)))


def mlp(p, z, config):
  hidden = dense(p["Dense_0"], z)
  if config.mlp == "swiglu":
    gate = dense(p["gate"], z)
    hidden = hidden * gate / (1 + jnp.exp(-gate))
  else:
    hidden = gelu(hidden, config.gelu)
  return dense(p["Dense_1"], hidden)


def turned(x, config):
  """Queries or keys (b, s, h, k), those of the patches as complex numbers.

  Of k / 2 pairs the first half turns with the row of a patch, the second with
  its column: by half a turn times base^(-4 i / k) from the middle to the edge
  of a patch that lies there, twice that from -1 to 1.
  """
  if config.positions != "rope":
    return x
  side, pairs = config.image_size // config.patch_size, x.shape[-1] // 2
  first = config.class_tokens + config.registers
  angles = np.zeros((x.shape[1], pairs))
  for row in range(side):
    for column in range(side):
      for i in range(pairs):
        place = (row, column)[i >= pairs // 2]
        frequency = config.rope_base ** (-(i % (pairs // 2)) / (pairs // 2))
        center = (place + 0.5) / side * 2 - 1
        angles[first + row * side + column, i] = 2 * np.pi * center * frequency
  z = (x[..., :pairs] + 1j * x[..., pairs:]) * np.exp(1j * angles)[
    None, :, None
  ]
  return jnp.concatenate([z.real, z.imag], -1).astype(x.dtype)


def block(
  p, z, memory, mask, *, memory_norm, config, own=None, seen=None, side=None
):
  """One block; z is (b, s, d), memory (sum of cells, d), own as `norms_of`.

  The weights of its attention, (b, h, s, keys), are appended to `seen`. What
  `side` makes of unturned keys and values of the first tokens, {a query: what
  it alone reads more of them}, is added to those.
  """
  own = own or {"scale": (0.0, 0.0), "bias": (0.0, 0.0)}
  normed = layer_norm(
    p["LayerNorm_0"], z, config, own["scale"][0], own["bias"][0]
  )
  cells = layer_norm(p["LayerNorm_0"], memory, config)
  cells = jnp.where(memory_norm[:, None], cells, memory)
  keys_from = jnp.concatenate(
    [normed, jnp.broadcast_to(cells, (z.shape[0], *cells.shape))], axis=1
  )
  a = p["MultiHeadDotProductAttention_0"]

  def project(name, x):
    return jnp.tensordot(x, a[name]["kernel"], 1) + a[name]["bias"][None, None]

  q = turned(project("query", normed), config)
  unturned, v = project("key", keys_from), project("value", keys_from)
  k = turned(unturned, config)
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
  more = side(unturned, v) if side else {}
  for i, (keys, _) in more.items():
    added = jnp.einsum("bhd,bkhd->bhk", q[:, i], keys) / np.sqrt(q.shape[-1])
    scores = scores.at[:, :, i, : keys.shape[1]].add(added)
  scores = jnp.where(mask[None, None], scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1)
  if seen is not None:
    seen.append(weights)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
  for i, (_, values) in more.items():
    of_query = weights[:, :, i, : values.shape[1]]
    mixed = mixed.at[:, i].add(jnp.einsum("bhk,bkhd->bhd", of_query, values))
  z = z + jnp.einsum("bqhd,hdo->bqo", mixed, a["out"]["kernel"])
  z = z + a["out"]["bias"][None, None]
  y = layer_norm(p["LayerNorm_1"], z, config, own["scale"][1], own["bias"][1])
  return z + mlp(p["MlpBlock_0"], y, config)


def first_tokens(p, images, config):
  """Class tokens, registers and patches, and the position of a class."""
  x = patches(p["embedding"], images, config.patch_size)
  b, n, d = x.shape
  table = jnp.zeros((1, config.class_tokens + n, d))
  if config.positions == "learned":
    table = p["Transformer"]["posembed_input"]["pos_embedding"]
  of_classes = table[:, : config.class_tokens]
  parts = [x + table[:, config.class_tokens :]]
  if config.registers:
    parts = [p["registers"], *parts]
  if config.class_tokens:
    parts = [p["cls"] + of_classes, *parts]
  x = jnp.concatenate(
    [jnp.broadcast_to(a, (b, *a.shape[1:])) for a in parts], 1
  )
  return x, of_classes[:, :1] if config.class_tokens else jnp.zeros((1, 1, d))


def pooled(p, x, config):
  """Features of the backbone, of its tokens in front of the last LayerNorm."""
  last = p["Transformer"]["encoder_norm"]
  if config.pooling == "tok":
    return layer_norm(last, x, config)[:, 0]
  if config.pooling == "gap":
    x = x[:, config.class_tokens + config.registers :]
    if config.norm_after_pooling:
      return layer_norm(last, x.mean(1), config)
    return layer_norm(last, x, config).mean(1)
  m, x = p["MAPHead_0"], layer_norm(last, x, config)
  a = m["MultiHeadDotProductAttention_0"]
  q, k, v = (
    jnp.einsum("bsd,dhk->bshk", z, a[name]["kernel"])
    + a[name]["bias"][None, None]
    for name, z in (("query", m["probe"]), ("key", x), ("value", x))
  )
  scores = jnp.einsum("qhk,bshk->bhqs", q[0], k) / np.sqrt(q.shape[-1])
  mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, axis=-1), v)
  y = jnp.einsum("bqhk,hkd->bqd", mixed, a["out"]["kernel"])
  y = y + a["out"]["bias"][None, None]
  z = layer_norm(m["LayerNorm_0"], y, config)
  # Its MLP never has a gate.
  z = gelu(dense(m["MlpBlock_0"]["Dense_0"], z), config.gelu)
  return (y + dense(m["MlpBlock_0"]["Dense_1"], z))[:, 0]


def norms_of(tasks, tokens, depth, width):
  """What every token adds to 2 l + 1 LayerNorms: (2 l + 1, s, d) each."""
  none = jnp.zeros((2 * depth + 1, width))
  rows = [{"scale": none, "bias": none}] * tokens
  rows += [task.get("norms", rows[0]) for task in tasks]
  return {k: jnp.stack([r[k] for r in rows], 1) for k in ("scale", "bias")}


class Sides:
  """The side streams of tasks, by the equations in `model/parts/side.py`."""

  def __init__(self, tasks, tokens, config):
    self.tasks, self.tokens, self.config, self.layer = tasks, tokens, config, 0
    self.carried = [0.0] * len(tasks)

  def __call__(self, keys, values):
    """{number of a task's token: keys and values (b, s, h, k) that it adds}."""
    found, shape = {}, keys[:, : self.tokens].shape
    plain = {"scale": 1.0, "bias": 0.0}
    rows = [
      self.normed(plain, a[:, : self.tokens].reshape(*shape[:2], -1))
      for a in (keys, values)
    ]
    for i, task in enumerate(self.tasks):
      if "side" not in task:
        continue
      p = jax.tree.map(lambda a: a[self.layer], task["side"])
      s = dense(p["down"], jnp.concatenate(rows, -1))
      if "conv" in p:
        s = self.carried[i] = self.mixed(p, self.carried[i] + s)
        s = self.normed(plain, s)
      up = [s @ p["up"][name] for name in ("keys", "values")]
      found[self.tokens + i] = [a.reshape(shape) for a in up]
    self.layer += 1
    return found

  def mixed(self, p, s):
    n, side = self.config.num_patches, int(self.config.num_patches**0.5)
    grid = self.normed(p["conv_norm"], s[:, -n:])
    grid = jax.lax.conv_general_dilated(
      grid.reshape(len(s), side, side, -1), p["conv"][:, :, None], (1, 1),
      "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
      feature_group_count=s.shape[-1],
    )  # fmt: skip
    s = s.at[:, -n:].add(grid.reshape(len(s), n, -1))
    hidden = dense(p["mlp"]["Dense_0"], self.normed(p["mlp_norm"], s))
    return s + dense(p["mlp"]["Dense_1"], gelu(hidden, "tanh"))

  def normed(self, p, x):
    scale, bias = (jnp.broadcast_to(p[k], x.shape) for k in ("scale", "bias"))
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-6) * scale + bias


def of_layers(weights, seen, config):
  """A token after each block (b, d), normalised, times the weights (l, d)."""
  if weights is None:
    return 0.0
  plain = {"scale": jnp.ones(1), "bias": jnp.zeros(1)}
  states = jnp.stack([layer_norm(plain, x, config) for x in seen])
  return jnp.einsum("lbd,ld->bd", states, weights)


def forward(config, params, tasks, images, weights=None, seen=None):
  """Logits of the original head and of every task.

  Args:
    config: shapes.
    params: {"backbone": ..., "tasks": {name: ...}}.
    tasks: (name, names that it reads, memory_norm) of every task.
    images: (b, side, side, 3).
    weights: a list; those of the attention of every block are appended.
    seen: which memory is seen in each layer, (l, sum of cells); all by default.
  """
  p = params["backbone"]
  own = [params["tasks"][name] for name, _, _ in tasks]
  x, position = first_tokens(p, images, config)
  b, tokens, d = x.shape
  classes = [t["cls"][None, None] + position for t in own]
  z = jnp.concatenate(
    [x, *(jnp.broadcast_to(c, (b, 1, d)) for c in classes)], 1
  )
  if config.pre_norm:
    z = layer_norm(p["Transformer"]["pre_norm"], z, config)

  cells = [t["memory"].shape[1] for t in own]
  mask = may_attend(
    [(n, m, reads) for (n, reads, _), m in zip(tasks, cells, strict=True)],
    tokens,
  )
  norm = np.repeat([norm for _, _, norm in tasks], cells).astype(bool)
  norms = norms_of(own, tokens, config.depth, d)
  after, side = [], Sides(own, tokens, config)
  for i in range(config.depth):
    memory = [jnp.zeros((0, d)), *(t["memory"][i] for t in own)]
    z = block(
      p["Transformer"][f"encoderblock_{i}"],
      z,
      jnp.concatenate(memory),
      mask
      if seen is None
      else mask
      & jnp.concatenate([jnp.ones(mask.shape[1] - sum(cells), bool), seen[i]])[
        None
      ],
      memory_norm=norm,
      config=config,
      own={k: a[2 * i : 2 * i + 2] for k, a in norms.items()},
      seen=weights,
      side=side,
    )
    after.append(z)
  original = pooled(p, z[:, :tokens], config)
  last = {k: a[-1] for k, a in norms.items()}
  z = layer_norm(p["Transformer"]["encoder_norm"], z, config, **last)
  if "pre_logits" in p:
    original = jnp.tanh(dense(p["pre_logits"], original))
  out = {"backbone": dense(p["head"], original) if "head" in p else original}
  for i, (name, _, _) in enumerate(tasks):
    seen = [x[:, tokens + i] for x in after]
    features = z[:, tokens + i] + of_layers(own[i].get("layers"), seen, config)
    out[name] = dense(own[i]["head"], features)
  return out
