"""Load backbones from the files of transformers."""

import dataclasses
import json
import logging
import re
import struct

import jax.numpy as jnp
import numpy as np
import published_models as models
import pytest
from conftest import random_task
from memory import peak_rss, start_rss

import memory_vit as mv
from memory_vit.backbones import (
  image_processor,
  json_files,
  stored_arrays,
)
from memory_vit.errors import BackboneError, ConfigError
from memory_vit.model import trees
from memory_vit.model.backbone import fingerprint_of


def assert_same(found: dict, expected: dict) -> None:
  assert found.keys() == expected.keys()
  for name in expected:
    np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def refusal(path, **options) -> str:
  with pytest.raises(BackboneError) as error:
    mv.load_backbone(path, **options)
  return str(error.value)


@pytest.mark.parametrize("parts", [
  {}, {"head": False}, {"head": False, "pooler": True},
])  # fmt: skip
@pytest.mark.parametrize("named", [dict, models.without_prefix])
def test_a_model_of_transformers_is_the_published_tree(tmp_path, parts, named):
  theirs = models.vit_arrays(**parts)
  path = models.write_model(
    tmp_path / "vit", named(theirs), preprocessor=models.PLAIN
  )
  backbone = mv.load_backbone(path)
  expected = models.as_ours(theirs)
  assert_same(trees.flatten(backbone.params), expected)
  assert backbone.config == mv.ViTConfig(
    width=8, depth=2, mlp_dim=12, num_heads=2, patch_size=4, image_size=8,
    num_classes=3 if "head" not in parts else 0,
    representation_size=8 if "pooler" in parts else 0,
    gelu="exact", layer_norm_epsilon=1e-12, position_resize="bicubic",
  )  # fmt: skip
  assert backbone.id.layer_norm_epsilon == 1e-12


def test_a_classifier_does_not_read_the_pooler(tmp_path):
  """A classifier of transformers has no pooler beside it."""
  both = models.vit_arrays(pooler=True)
  plain = {n: a for n, a in both.items() if "pooler" not in n}
  found = [
    mv.load_backbone(models.write_model(tmp_path / name, arrays))
    for name, arrays in (("both", both), ("plain", plain))
  ]
  assert found[0].config == found[1].config
  assert found[0].fingerprint == found[1].fingerprint


def test_every_way_to_name_a_model_is_the_same_backbone(tmp_path):
  one = mv.load_backbone(models.write_model(tmp_path / "one"))
  shards = mv.load_backbone(models.write_shards(tmp_path / "shards"))
  file = mv.load_backbone(tmp_path / "one" / "model.safetensors")
  assert one.fingerprint == shards.fingerprint == file.fingerprint
  assert one.config == shards.config == file.config
  assert one.preprocessing == shards.preprocessing == file.preprocessing


@pytest.mark.parametrize("stored", [np.float16, np.float64, jnp.bfloat16])
def test_other_floats_become_float32(tmp_path, stored):
  stored = {n: a.astype(stored) for n, a in models.vit_arrays().items()}
  path = models.write_model(tmp_path, stored, preprocessor=models.PLAIN)
  wide = {name: a.astype(np.float32) for name, a in stored.items()}
  found = trees.flatten(mv.load_backbone(path).params)
  assert_same(found, models.as_ours(wide))


def test_one_number_counts_for_all_channels(tmp_path):
  half = {**models.PLAIN, "image_mean": 0.5, "image_std": 0.5}
  paths = [
    models.write_model(tmp_path / str(i), preprocessor=p)
    for i, p in enumerate((half, models.PLAIN))
  ]
  one, three = map(mv.load_backbone, paths)
  assert one.fingerprint == three.fingerprint


@pytest.mark.parametrize(("mean", "std"), [
  ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), ([0.5] * 3, [0.25] * 3),
  ([0.25] * 3, [0.5] * 3),
])  # fmt: skip
def test_normalization_is_folded_into_the_patches(tmp_path, mean, std):
  theirs = models.vit_arrays()
  stated = {**models.PREPROCESSOR, "image_mean": mean, "image_std": std}
  path = models.write_model(tmp_path, preprocessor=stated)
  backbone = mv.load_backbone(path)
  ours = trees.flatten(backbone.params)
  rng = np.random.default_rng(0)
  patch = rng.uniform(0, 1, (models.PATCH, models.PATCH, 3))
  normal = (patch - mean) / std
  name = "vit.embeddings.patch_embeddings.projection"
  expected = theirs[f"{name}.bias"] + np.einsum(
    "xyc,dcxy->d", normal, theirs[f"{name}.weight"]
  )
  found = ours["embedding/bias"] + np.einsum(
    "xyc,xycd->d", 2 * patch - 1, ours["embedding/kernel"]
  )
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_switches_are_a_part_of_the_fingerprint(tmp_path):
  backbone = mv.load_backbone(models.write_model(tmp_path))
  arrays = trees.fingerprint(backbone.params)
  assert backbone.fingerprint != arrays
  config = backbone.config
  same = dataclasses.replace(
    config, position_resize="bilinear", layer_norm_epsilon=1e-6
  )
  assert fingerprint_of(same, backbone.params) == arrays
  other = dataclasses.replace(config, position_resize="bicubic_antialias")
  assert fingerprint_of(other, backbone.params) != backbone.fingerprint


def test_a_qkv_without_bias_has_zeros(tmp_path):
  arrays = {
    name: array
    for name, array in models.vit_arrays().items()
    if not re.search(r"(query|key|value)\.bias", name)
  }
  path = models.write_model(
    tmp_path, arrays, {**models.CONFIG, "qkv_bias": False}
  )
  block = mv.load_backbone(path).params["Transformer"]["encoderblock_1"]
  attention = block["MultiHeadDotProductAttention_0"]
  assert not np.any(attention["key"]["bias"])
  assert np.any(attention["out"]["bias"])


def test_pixels_that_no_patch_covers_are_left_out(tmp_path):
  """The convolution of transformers does so."""
  config = {**models.CONFIG, "image_size": 11}
  backbone = mv.load_backbone(models.write_model(tmp_path, config=config))
  assert backbone.config.image_size == 8


# How images are prepared.


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({}, (8, "resize", 0, "bicubic")),
    ({"resample": 2}, (8, "resize", 0, "bilinear_antialias")),
    ({"size": 8}, (8, "resize", 0, "bicubic")),
    (
      {
        "do_center_crop": True, "crop_size": {"height": 8, "width": 8},
        "size": {"shortest_edge": 10},
      },
      (8, "central", 10, "bicubic"),
    ),
    (
      {
        "do_center_crop": True, "crop_size": 4, "size": 5,
        "feature_extractor_type": "CLIPFeatureExtractor",
      },
      (8, "central", 10, "bicubic"),
    ),
    ({"size": [8, 8]}, (8, "resize", 0, "bicubic")),
    ({"do_center_crop": True, "crop_size": 8}, (8, "resize", 0, "bicubic")),
    ({"size": {"shortest_edge": None, "height": 8, "width": 8}},
     (8, "resize", 0, "bicubic")),
  ],
)  # fmt: skip
def test_evaluation_is_as_the_source_states(tmp_path, changes, expected):
  path = models.write_model(
    tmp_path, preprocessor={**models.PREPROCESSOR, **changes}
  )
  backbone = mv.load_backbone(path)
  found = backbone.preprocessing
  assert dataclasses.astuple(found) == expected
  assert random_task(backbone, "pets").spec.preprocessing == found
  own = mv.EvalPreprocessing(image_size=8)
  assert random_task(backbone, "a", preprocessing=own).spec.preprocessing == own


BILINEAR = "bilinear_antialias"
BY_CLASS = [
  ("ViTImageProcessor", {}, (8, "resize", 0, "bilinear_antialias")),
  ("SiglipImageProcessor", {}, (8, "resize", 0, "bicubic")),
  ("SiglipImageProcessorFast", {}, (8, "resize", 0, "bicubic")),
  ("CLIPImageProcessor", {"size": 224}, (224, "central", 224, "bicubic")),
  ("CLIPFeatureExtractor", {"size": None}, (224, "central", 224, "bicubic")),
  ("BitImageProcessor", {"size": 256}, (224, "central", 256, "bicubic")),
  ("BitImageProcessor", {"do_center_crop": False},
   (8, "resize", 0, "bicubic")),
  ("CLIPImageProcessor", {"do_center_crop": False, "size": 224}, None),
  ("ViTFeatureExtractor", {"size": None}, (224, "resize", 0, BILINEAR)),
  ("DINOv3ViTImageProcessorFast", {}, (8, "resize", 0, BILINEAR)),
  ("SiglipImageProcessorPil", {}, (8, "resize", 0, "bicubic")),
  ("BeitFeatureExtractor", {}, (8, "resize", 0, "bicubic")),
  ("DeiTImageProcessor", {"size": 256}, None),
  ("DeiTImageProcessor", {"size": 224}, (224, "resize", 0, "bicubic")),
  ("ConvNextImageProcessor", {}, None),
  ("", {"family": "dinov2", "size": 256}, (224, "central", 256, "bicubic")),
  ("", {"family": "clip", "size": 256}, (224, "central", 256, "bicubic")),
  ("", {"family": "siglip"}, (8, "resize", 0, "bicubic")),
  ("", {"family": "ijepa"}, (8, "resize", 0, BILINEAR)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "expected"), BY_CLASS)
def test_unstated_preprocessing_is_the_default_of_its_class(
  kind, changes, expected
):
  stated = {k: v for k, v in models.PREPROCESSOR.items() if k != "resample"}
  feature = "feature_extractor" if "Feature" in kind else "image_processor"
  values = {**stated, f"{feature}_type": kind, "family": "vit", **changes}
  found = image_processor.of_transformers(
    values, "preprocessor_config.json", values.pop("family")
  )
  preprocessing = found.preprocessing and dataclasses.astuple(
    found.preprocessing
  )
  assert preprocessing == expected
  assert not preprocessing or "ImageProcessor: resample" in found.defaults


def test_a_crop_takes_the_same_share_at_another_size(tmp_path):
  path = models.write_model(tmp_path, preprocessor={
    **models.PREPROCESSOR, "do_center_crop": True, "crop_size": 224,
    "size": {"shortest_edge": 256},
  })  # fmt: skip
  preprocessing = mv.load_backbone(path).preprocessing
  assert (preprocessing.image_size, preprocessing.resize) == (8, 9)


@pytest.mark.parametrize("changes", [
  {"resample": 1}, {"do_resize": False}, {"size": {"height": 8, "width": 9}},
  {"do_center_crop": True, "crop_size": 8, "size": {"shortest_edge": 7}},
  {"do_center_crop": True, "crop_size": 8, "size": {"shortest_edge": 0}},
  {"do_center_crop": True, "crop_size": 8, "size": 9},
  {"do_center_crop": True, "crop_size": 8,
   "size": {"shortest_edge": 9, "longest_edge": 12}},
  {"size": [8, 9]}, {"size": [8]}, {"size": "8"}, {"size": []},
  {"do_center_crop": True, "crop_size": [], "size": {"shortest_edge": 9}},
  {"do_pad": True}, {"image_processor_type": "FooProcessor", "resample": None},
])  # fmt: skip
def test_unsupported_preprocessing_is_logged_and_not_guessed(
  tmp_path, changes, caplog
):
  path = models.write_model(
    tmp_path, preprocessor={**models.PREPROCESSOR, **changes}
  )
  with caplog.at_level(logging.WARNING, "memory_vit"):
    assert mv.load_backbone(path).preprocessing is None
  assert "preprocessor_config.json: resizing or cropping" in caplog.text


@pytest.mark.parametrize(("changes", "said"), [
  ({"image_std": [0.2, 0, 0.2]}, "image_std is [0.2, 0, 0.2], expected"),
  ({"image_mean": [0.5] * 4}, "image_mean is [0.5, 0.5, 0.5, 0.5], expected"),
  ({"image_mean": "0.5"}, "image_mean is '0.5', expected"),
  ({"image_mean": None}, "states no mean"),
  ({"image_std": None}, "states no std"),
  ({"rescale_factor": 1}, "rescale_factor is 1, expected"),
  ({"do_rescale": False}, "do_rescale is false"),
])  # fmt: skip
def test_invalid_normalization_is_refused(tmp_path, changes, said):
  path = models.write_model(
    tmp_path, preprocessor={**models.PREPROCESSOR, **changes}
  )
  message = refusal(path)
  assert said in message
  assert "preprocessor_config.json" in message


TIMM = {
  "input_size": [3, 224, 224], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4],
  "crop_pct": 0.875, "crop_mode": "center", "interpolation": "bicubic",
}  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), [
  ({}, (224, "central_rounded", 256, "bicubic")),
  ({"crop_pct": 0.9}, (224, "central_rounded", 248, "bicubic")),
  ({"crop_pct": 1.0, "interpolation": "bilinear"},
   (224, "central_rounded", 224, "bilinear_antialias")),
  ({"crop_pct": 1.0, "crop_mode": "squash"}, (224, "resize", 0, "bicubic")),
  ({"crop_mode": "squash"}, None),
  ({"crop_mode": "border"}, None),
  ({"interpolation": "random"}, None),
  ({"input_size": [3, 224, 192]}, None),
])  # fmt: skip
def test_preprocessing_of_timm_is_read(changes, expected):
  found = image_processor.of_timm({**TIMM, **changes}, "config.json")
  assert (found.mean, found.std) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
  if expected:
    assert dataclasses.astuple(found.preprocessing) == expected
  else:
    assert found.preprocessing is None


@pytest.mark.parametrize("changes", [
  {"std": [0, 1, 1]}, {"mean": "0.5"}, {"crop_pct": 0},
  {"input_size": [3, 224]}, {"input_size": [3, "a", 4]}, {"crop_mode": 7},
])  # fmt: skip
def test_invalid_preprocessing_of_timm_is_refused(changes):
  with pytest.raises(BackboneError, match=rf"config.json: {[*changes][0]} is"):
    image_processor.of_timm({**TIMM, **changes}, "config.json")


# Options.


def test_gelu_is_what_the_source_states(tmp_path):
  path = models.write_model(tmp_path)
  exact = mv.load_backbone(path, gelu="exact")
  assert exact.config == mv.load_backbone(path).config
  with pytest.raises(ConfigError, match="'tanh', but .* states 'exact'"):
    mv.load_backbone(path, gelu="tanh")


def test_a_mean_does_not_contradict_the_source(tmp_path):
  path = models.write_model(tmp_path)
  mean, std = (models.PREPROCESSOR[f"image_{k}"] for k in ("mean", "std"))
  same = mv.load_backbone(path, mean=mean, std=std)
  assert same.fingerprint == mv.load_backbone(path).fingerprint
  with pytest.raises(ConfigError, match="std is .* states .*: leave out the"):
    mv.load_backbone(path, std=[0.5] * 3)


# Files that are refused.


def test_one_error_names_every_problem(tmp_path):
  arrays = models.vit_arrays()
  del arrays["vit.layernorm.bias"]
  arrays["vit.encoder.layer.2.output.dense.bias"] = np.zeros(8, np.float32)
  arrays["classifier.bias"] = np.zeros(4, np.float32)
  message = refusal(models.write_model(tmp_path, arrays))
  assert message.startswith(f"{tmp_path}/config.json")
  assert [line.strip() for line in message.split("\n")[1:]] == [
    "missing: vit.layernorm.bias (8,)",
    "shape of classifier.bias: (4,), expected (3,)",
    "extra: 'vit.encoder.layer.2.output.dense.bias'",
  ]


@pytest.mark.fault("lying-model")
@pytest.mark.parametrize("name", sorted(models.vit_shapes()))
def test_no_array_may_be_missing(tmp_path, name):
  arrays = models.vit_arrays()
  del arrays[name]
  message = refusal(models.write_model(tmp_path, arrays))
  assert name in message


@pytest.mark.parametrize(("changes", "said"), [
  ({"model_type": "bert"}, "model_type 'bert', architecture None: expected"),
  ({"model_type": None}, "model_type None"),
  ({"model_type": ["vit"]}, "model_type ['vit']"),
  ({"hidden_size": "8"}, "hidden_size is '8', expected a whole number"),
  ({"hidden_size": True}, "hidden_size is True, expected"),
  ({"hidden_size": 10**30}, "hidden_size is 1000"),
  ({"num_attention_heads": 3}, "width 8 is not a multiple of num_heads 3"),
  ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, expected"),
  ({"patch_size": [4, 2]}, "patch_size is [4, 2], expected the side"),
  ({"patch_size": 9}, "image_size 8 is less than patch_size 9"),
  ({"num_channels": 1}, "num_channels is 1, expected 3"),
  ({"hidden_act": "relu"}, "hidden_act is 'relu', expected one of 'gelu'"),
  ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan, expected"),
  ({"hidden_act": None}, "hidden_act is missing"),
])  # fmt: skip
def test_invalid_configurations_are_refused(tmp_path, changes, said):
  message = refusal(models.write_model(
    tmp_path, config={**models.CONFIG, **changes}
  ))  # fmt: skip
  assert said in message
  assert "config.json" in message
  assert "\n" not in message


@pytest.mark.fault("lying-model")
def test_a_huge_model_of_few_bytes_takes_no_memory(tmp_path):
  config = {**models.CONFIG, "hidden_size": 16_384, "num_hidden_layers": 64,
            "intermediate_size": 65_536}  # fmt: skip
  path = models.write_model(tmp_path, config=config)
  before = start_rss()
  assert re.search(r"and [0-9]+ more$", refusal(path))
  assert peak_rss() - before < 200 * 2**20


@pytest.mark.fault("lying-model")
def test_pickles_are_refused_with_a_way_to_convert(tmp_path):
  for name in ("pytorch_model.bin", "vit.pt", "vit.pth"):
    directory = tmp_path / name[:-3]
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / name).write_bytes(b"\x80\x04.")
    for path in (directory, directory / name):
      message = refusal(path)
      assert f"{name} is a pickle" in message
      assert "save_pretrained" in message


def test_missing_parts_are_named(tmp_path):
  path = models.write_model(tmp_path / "a")
  (path / "config.json").unlink()
  assert "has no config.json beside it" in refusal(path)
  assert "config.json beside it" in refusal(path / "model.safetensors")
  (path / "model.safetensors").unlink()
  assert "a directory without model.safetensors" in refusal(path)
  assert "no file" in refusal(path / "model.safetensors")
  both = models.write_shards(tmp_path / "b")
  models.write_tensors(both / "model.safetensors", models.vit_arrays())
  assert "has both" in refusal(both)


def test_invalid_arrays_are_refused(tmp_path):
  for bad, said in (
    (np.arange(3), "the dtype is 'I64', expected a float"),
    (np.float32([1, np.nan, 1]), "not finite"),
    (np.float64([1, 1e300, 1]), "not finite as float32"),
    (np.zeros((0, 3), np.float32), "missing: classifier.bias (3,)"),
  ):
    arrays = models.vit_arrays() | {"classifier.bias": bad}
    message = refusal(models.write_model(tmp_path, arrays))
    assert f"classifier.bias {said}" in message or said in message


# What the library says, or we before it, of files that are not what they claim.


def header(values) -> bytes:
  text = values if isinstance(values, bytes) else json.dumps(values).encode()
  return struct.pack("<Q", len(text)) + text


@pytest.mark.fault("lying-model")
@pytest.mark.parametrize("content", [
  b"",
  b"1234567",
  b"<html>not found</html>",
  struct.pack("<Q", 2**62),
  struct.pack("<Q", 2**32) + b"{}",
  header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
  header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**63]}}),
  header({"a\nb": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
  + bytes(4),
  header({"a" * 300: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
  + bytes(4),
  header(b"[" * 10_000),
  header(b'{"a":1}'),
], ids=range(11))  # fmt: skip
def test_forged_weights_are_refused_before_memory_is_taken(tmp_path, content):
  path = models.write_model(tmp_path)
  (path / "model.safetensors").write_bytes(content)
  before = start_rss()
  message = refusal(path)
  assert peak_rss() - before < 16 * 2**20
  assert "model.safetensors" in message
  assert "\n" not in message


def test_oversized_model_files_are_refused(tmp_path, monkeypatch):
  path = models.write_model(tmp_path)
  with monkeypatch.context() as small:
    small.setattr(stored_arrays, "MAX_HEADER_BYTES", 100)
    assert "and have at most 100 bytes." in refusal(path)
  with monkeypatch.context() as small:
    small.setattr(stored_arrays, "MAX_BYTES", 100)
    assert "expected at most 100" in refusal(path)
  with monkeypatch.context() as small:
    small.setattr(stored_arrays, "MAX_ENTRIES", 3)
    assert "entries, expected at most 3" in refusal(path)
  monkeypatch.setattr(json_files, "MAX_BYTES", 10)
  assert "config.json has" in refusal(path)


@pytest.mark.fault("lying-model")
@pytest.mark.parametrize(("change", "said"), [
  (lambda m: m.update({"classifier.bias": "../a.safetensors"}), "expected the"),
  (lambda m: m.update({"classifier.bias": "/a.safetensors"}), "expected the"),
  (lambda m: m.update({"classifier.bias": 7}), "'classifier.bias' is 7, exp"),
  (lambda m: m.update({"classifier.bias": "x.bin"}), "bias' is 'x.bin'"),
  (lambda m: m.update({"classifier.bias": "x.safetensors"}),
   "x.safetensors is not there"),
  (lambda m: m.update(more=models.SHARDS[0]), "but lies in no file"),
  (lambda m: m.pop("classifier.bias"), "listed in no file, but lies in"),
  (lambda m: m.update({"classifier.bias": models.SHARDS[1]}), "is listed in"),
  (lambda m: m.clear(), "weight_map is {}"),
])  # fmt: skip
def test_forged_indexes_are_refused(tmp_path, change, said):
  path = models.write_shards(tmp_path)
  file = path / models.INDEX
  places = json.loads(file.read_text())["weight_map"]
  change(places)
  models.write_index(path, places)
  message = refusal(path)
  assert said in message
  assert "\n" not in message


def test_array_in_two_shards_is_refused(tmp_path):
  path = models.write_shards(tmp_path)
  for shard in models.SHARDS:
    models.write_tensors(path / shard, models.vit_arrays())
  assert "is also in" in refusal(path)


@pytest.mark.parametrize("content", [
  b"\xff", b"{", b"[]", b'{"a": 1, "a": 1}', b"[" * 100_000, b"null",
  b'{"a": ' + b"9" * 5_000 + b"}",
])  # fmt: skip
def test_configurations_that_are_no_object_are_refused(tmp_path, content):
  path = models.write_model(tmp_path)
  (path / "config.json").write_bytes(content)
  assert "config.json" in refusal(path)
