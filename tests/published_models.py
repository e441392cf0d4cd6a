"""Tiny models in the files of transformers, written without it.

The names are those of published files, and the transpositions are spelled out
here, not taken from the code under test.
"""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

SIDE, PATCH, WIDTH, HEADS, MLP, DEPTH, CLASSES = 8, 4, 8, 2, 12, 2, 3
SHARDS = ("model-00001-of-00002.safetensors",
          "model-00002-of-00002.safetensors")  # fmt: skip
INDEX = "model.safetensors.index.json"

CONFIG = {
  "architectures": ["ViTForImageClassification"],
  "model_type": "vit",
  "hidden_act": "gelu",
  "hidden_size": WIDTH,
  "image_size": SIDE,
  "intermediate_size": MLP,
  "layer_norm_eps": 1e-12,
  "num_attention_heads": HEADS,
  "num_channels": 3,
  "num_hidden_layers": DEPTH,
  "patch_size": PATCH,
  "qkv_bias": True,
  "id2label": {"0": "cat", "1": "dog", "2": "日"},
  "transformers_version": "4.57.0",
}
PREPROCESSOR = {
  "do_normalize": True,
  "do_rescale": True,
  "do_resize": True,
  "image_mean": [0.485, 0.456, 0.406],
  "image_std": [0.229, 0.224, 0.225],
  "resample": 3,
  "rescale_factor": 0.00392156862745098,
  "size": {"height": SIDE, "width": SIDE},
}
PLAIN = {**PREPROCESSOR, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def vit_shapes(pooler: bool = False, head: bool = True) -> dict[str, tuple]:
  d = WIDTH
  shapes = {
    "vit.embeddings.cls_token": (1, 1, d),
    "vit.embeddings.position_embeddings": (1, 1 + (SIDE // PATCH) ** 2, d),
    "vit.embeddings.patch_embeddings.projection.weight": (d, 3, PATCH, PATCH),
    "vit.embeddings.patch_embeddings.projection.bias": (d,),
    "vit.layernorm.weight": (d,),
    "vit.layernorm.bias": (d,),
  }
  for i in range(DEPTH):
    block = f"vit.encoder.layer.{i}"
    layers = {
      **{f"attention.attention.{n}": (d, d) for n in ("query", "key", "value")},
      "attention.output.dense": (d, d),
      "intermediate.dense": (MLP, d),
      "output.dense": (d, MLP),
      "layernorm_before": (d,),
      "layernorm_after": (d,),
    }
    for name, shape in layers.items():
      shapes[f"{block}.{name}.weight"] = shape
      shapes[f"{block}.{name}.bias"] = shape[:1]
  if pooler:
    shapes |= {"vit.pooler.dense.weight": (d, d), "vit.pooler.dense.bias": (d,)}
  if head:
    shapes |= {"classifier.weight": (CLASSES, d), "classifier.bias": (CLASSES,)}
  return shapes


def vit_arrays(seed: int = 0, **parts) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  return {
    name: rng.standard_normal(shape).astype(np.float32)
    for name, shape in vit_shapes(**parts).items()
  }


def without_prefix(arrays: dict) -> dict:
  return {name.removeprefix("vit."): array for name, array in arrays.items()}


def as_ours(theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Arrays of `vit_arrays` in our layout, for images that it normalizes."""
  d, h, k = WIDTH, HEADS, WIDTH // HEADS
  patches = "embeddings.patch_embeddings.projection"
  theirs = without_prefix(theirs)
  ours = {
    "cls": theirs["embeddings.cls_token"],
    "Transformer/posembed_input/pos_embedding": theirs[
      "embeddings.position_embeddings"
    ],
    "embedding/kernel": np.einsum("dcxy->xycd", theirs[f"{patches}.weight"]),
    "embedding/bias": theirs[f"{patches}.bias"],
    "Transformer/encoder_norm/scale": theirs["layernorm.weight"],
    "Transformer/encoder_norm/bias": theirs["layernorm.bias"],
  }
  for i in range(DEPTH):
    old, new = f"encoder.layer.{i}", f"Transformer/encoderblock_{i}"
    for part in ("query", "key", "value"):
      name = f"{old}.attention.attention.{part}"
      place = f"{new}/MultiHeadDotProductAttention_0/{part}"
      # Row j of the weight is feature j % k of head j // k.
      weight = theirs[f"{name}.weight"].reshape(h, k, d)
      ours[f"{place}/kernel"] = np.einsum("hkd->dhk", weight)
      ours[f"{place}/bias"] = theirs[f"{name}.bias"].reshape(h, k)
    place = f"{new}/MultiHeadDotProductAttention_0/out"
    weight = theirs[f"{old}.attention.output.dense.weight"].reshape(d, h, k)
    ours[f"{place}/kernel"] = np.einsum("dhk->hkd", weight)
    ours[f"{place}/bias"] = theirs[f"{old}.attention.output.dense.bias"]
    for name, place in (
      ("intermediate.dense", "MlpBlock_0/Dense_0"),
      ("output.dense", "MlpBlock_0/Dense_1"),
    ):
      ours[f"{new}/{place}/kernel"] = theirs[f"{old}.{name}.weight"].T
      ours[f"{new}/{place}/bias"] = theirs[f"{old}.{name}.bias"]
    for name, place in (
      ("layernorm_before", "LayerNorm_0"),
      ("layernorm_after", "LayerNorm_1"),
    ):
      ours[f"{new}/{place}/scale"] = theirs[f"{old}.{name}.weight"]
      ours[f"{new}/{place}/bias"] = theirs[f"{old}.{name}.bias"]
  for name, place in (("pooler.dense", "pre_logits"), ("classifier", "head")):
    if f"{name}.weight" in theirs:
      ours[f"{place}/kernel"] = theirs[f"{name}.weight"].T
      ours[f"{place}/bias"] = theirs[f"{name}.bias"]
  return ours


def write_model(
  directory: Path, arrays=None, config=CONFIG, preprocessor=PREPROCESSOR
) -> Path:
  """A directory with one file of weights; of None no file is written."""
  directory.mkdir(exist_ok=True)
  arrays = vit_arrays() if arrays is None else arrays
  write_tensors(directory / "model.safetensors", arrays)
  for name, values in (
    ("config.json", config),
    ("preprocessor_config.json", preprocessor),
  ):
    if values is not None:
      (directory / name).write_text(json.dumps(values), encoding="utf-8")
  return directory


def write_tensors(path: Path, arrays: dict) -> Path:
  path.write_bytes(safetensors.numpy.save(
    {name: np.ascontiguousarray(array) for name, array in arrays.items()}
  ))  # fmt: skip
  return path


def write_shards(directory: Path, **options) -> Path:
  """The same in two files and their index."""
  arrays = options.pop("arrays", None) or vit_arrays()
  write_model(directory, arrays, **options)
  (directory / "model.safetensors").unlink()
  places = {name: SHARDS[i % 2] for i, name in enumerate(sorted(arrays))}
  for shard in SHARDS:
    inside = {n: arrays[n] for n, place in places.items() if place == shard}
    write_tensors(directory / shard, inside)
  write_index(directory, places)
  return directory


def write_index(directory: Path, places) -> None:
  values = {"metadata": {"total_size": 1}, "weight_map": places}
  (directory / INDEX).write_text(json.dumps(values), encoding="utf-8")
