import copy
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from published_models import write_model

import memory_vit as mv
from memory_vit.backbones import layouts, position_resizing
from memory_vit.backbones.families import detect
from memory_vit.errors import BackboneError

# What transformers and timm write of small models; `tests/exchange` keeps it.
RECORDED = json.loads(
  (Path(__file__).parent / "published_names.json").read_text()
)
# One of each way to name or to order the arrays.
DISTINCT = [
  "dinov2 swiglu",
  "dinov2 registers",
  "dinov3 gated",
  "ijepa classifier",
  "siglip",
  "siglip classifier",
  "clip projection",
  "timm registers, norm after",
  "timm siglip",
  "timm dinov3",
]
UNREAD = ("mask_token", "text_", "logit_")
BLOCK = "Transformer/encoderblock_1"
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_0"


def source_of(name, **changes):
  """The configuration and random arrays of a recorded model."""
  recorded = RECORDED[name]
  rng = np.random.default_rng(len(name))
  arrays = {
    key: rng.normal(size=shape).astype(np.float32)
    for key, shape in recorded["arrays"].items()
  }
  return {**recorded["config"], **changes}, arrays


def convert(config, arrays):
  return detect.convert(config, arrays, "config.json")


def refusal(config, arrays):
  with pytest.raises(BackboneError) as raised:
    convert(config, arrays)
  return str(raised.value)


def is_read(config, name):
  """A classifier of SigLIP leaves out the other head."""
  head = "ForImageClassification" in str(config.get("architectures"))
  unread = (*UNREAD, "vision_model.head.") if head else UNREAD
  return not any(part in name for part in unread)


@pytest.mark.parametrize("name", DISTINCT)
def test_converted_arrays_are_exactly_those_of_the_model(name):
  converted = convert(*source_of(name))
  expected = layouts.expected_shapes(converted.config)
  assert {n: a.shape for n, a in converted.arrays.items()} == {
    n: a.shape for n, a in expected.items()
  }
  assert {a.dtype for a in converted.arrays.values()} == {np.dtype("f4")}


MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
STATED = {
  "image_mean": MEAN, "image_std": STD, "resample": 3,
  "size": {"height": 56, "width": 56}, "do_center_crop": False,
}  # fmt: skip


def files_of(name, directory, **files):
  """The files of a recorded model that states no normalization but theirs."""
  config, arrays = source_of(name)
  for field in ("mean", "std"):
    config.get("pretrained_cfg", {}).pop(field, None)
  write_model(directory, arrays, config, None)
  for file, values in files.items():
    (directory / f"{file}.json").write_text(json.dumps(values))
  return directory


@pytest.mark.parametrize("name", DISTINCT)
def test_no_mean_or_std_is_guessed(name, tmp_path):
  """Each place where they may stand is read, and gives the same backbone."""
  bare = files_of(name, tmp_path / "bare", processor_config={"processor": 1})
  with pytest.raises(BackboneError) as error:
    mv.load_backbone(bare)
  wanted = "pretrained_cfg" if "timm" in name else "processor_config.json or"
  for said in ("no mean and std", wanted, "mv.load_backbone", "convert"):
    assert said in str(error.value)
  found = [
    mv.load_backbone(bare, mean=np.float64(MEAN), std=list(STD)),
    mv.load_backbone(
      files_of(name, tmp_path / "old", preprocessor_config=STATED)
    ),
    mv.load_backbone(
      files_of(
        name, tmp_path / "new",
        processor_config={"image_processor": STATED, "video_processor": {}},
        preprocessor_config={**STATED, "image_mean": [0.1] * 3},
      )
    ),
  ]  # fmt: skip
  assert len({backbone.fingerprint for backbone in found}) == 1
  assert found[1].preprocessing == found[2].preprocessing
  assert found[1].preprocessing.interpolation == "bicubic"


@pytest.mark.fault("unequal-model")
@pytest.mark.parametrize("name", DISTINCT)
def test_each_array_that_is_missing_is_named(name):
  config, arrays = source_of(name)
  read = [key for key in arrays if is_read(config, key)]
  assert len(read) > 20
  for key in read:
    others = {k: a for k, a in arrays.items() if k != key}
    assert key in refusal(config, others)


@pytest.mark.parametrize("name", DISTINCT)
def test_each_array_of_another_shape_is_named(name):
  config, arrays = source_of(name)
  for key, array in arrays.items():
    if is_read(config, key):
      longer = np.concatenate([array, array[..., :1]], axis=-1)
      assert key in refusal(config, {**arrays, key: longer})


@pytest.mark.parametrize("name", DISTINCT)
def test_one_error_names_all_that_is_wrong(name):
  config, arrays = source_of(name)
  norms = ("norm1", "layernorm_before")
  missing, misshapen = [
    key
    for key in arrays
    if is_read(config, key) and any(norm in key for norm in norms)
  ][:2]
  arrays = {**arrays, "surprise": np.zeros(3, np.float32)}
  del arrays[missing]
  arrays[misshapen] = np.zeros((2, 2), np.float32)
  message = refusal(config, arrays)
  assert f"missing: {missing} (24,)" in message
  assert f"shape of {misshapen}: (2, 2), expected (24,)" in message
  assert "extra: 'surprise'" in message


def linear(arrays, name, z):
  """The output of torch.nn.Linear."""
  bias = arrays.get(f"{name}.bias", 0.0)
  return arrays[f"{name}.weight"].astype(np.float64) @ z + bias


def heads(converted, part, z):
  """Our layer in front of attention, its heads one after the other."""
  kernel = converted[f"{part}/kernel"]
  return (np.einsum("d,dhk->hk", z, kernel) + converted[f"{part}/bias"]).ravel()


def dense(converted, name, z):
  return z @ converted[f"{name}/kernel"] + converted[f"{name}/bias"]


def out(converted, name, z):
  kernel = converted[f"{name}/kernel"]
  mixed = np.einsum("hk,hkd->d", z.reshape(kernel.shape[:2]), kernel)
  return mixed + converted[f"{name}/bias"]


def close(ours, theirs):
  np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


Z = np.random.default_rng(5).normal(size=24)


def test_layer_scale_and_gates_of_dinov2_are_folded():
  config, arrays = source_of("dinov2 swiglu")
  ours, theirs = convert(config, arrays).arrays, "encoder.layer.1"
  for part in ("query", "key", "value"):
    source = f"{theirs}.attention.attention.{part}"
    close(heads(ours, f"{ATTENTION}/{part}", Z), linear(arrays, source, Z))
  first, second = (arrays[f"{theirs}.layer_scale{i}.lambda1"] for i in (1, 2))
  mixed = linear(arrays, f"{theirs}.attention.output.dense", Z)
  close(out(ours, f"{ATTENTION}/out", Z), first * mixed)
  gate, up = np.split(linear(arrays, f"{theirs}.mlp.weights_in", Z), 2)
  close(dense(ours, f"{BLOCK}/MlpBlock_0/gate", Z), gate)
  close(dense(ours, f"{BLOCK}/MlpBlock_0/Dense_0", Z), up)
  hidden = np.random.default_rng(6).normal(size=len(up))
  down = linear(arrays, f"{theirs}.mlp.weights_out", hidden)
  close(dense(ours, f"{BLOCK}/MlpBlock_0/Dense_1", hidden), second * down)


def test_dinov3_has_no_table_of_positions_and_no_bias_of_keys():
  config, arrays = source_of("dinov3 gated")
  converted = convert(config, arrays)
  ours, theirs = converted.arrays, "layer.1"
  assert converted.config.positions == "rope"
  assert not any("pos_embedding" in name for name in ours)
  assert not ours[f"{ATTENTION}/key/bias"].any()
  for part, name in (("query", "q_proj"), ("key", "k_proj")):
    source = f"{theirs}.attention.{name}"
    close(heads(ours, f"{ATTENTION}/{part}", Z), linear(arrays, source, Z))
  for part, name in (("gate", "gate_proj"), ("Dense_0", "up_proj")):
    source = linear(arrays, f"{theirs}.mlp.{name}", Z)
    close(dense(ours, f"{BLOCK}/MlpBlock_0/{part}", Z), source)
  scale = arrays[f"{theirs}.layer_scale2.lambda1"]
  hidden = np.random.default_rng(6).normal(size=40)
  down = linear(arrays, f"{theirs}.mlp.down_proj", hidden)
  close(dense(ours, f"{BLOCK}/MlpBlock_0/Dense_1", hidden), scale * down)


def test_biases_of_dinov3_stand_apart_in_timm():
  config, arrays = source_of("timm dinov3")
  ours = convert(config, arrays).arrays
  stacked = np.split(arrays["blocks.1.attn.qkv.weight"] @ Z, 3)
  for part, expected in zip(("query", "key", "value"), stacked, strict=True):
    bias = arrays.get(f"blocks.1.attn.{part[0]}_bias", 0.0)
    close(heads(ours, f"{ATTENTION}/{part}", Z), expected + bias)
  scale = arrays["blocks.1.gamma_1"]
  mixed = linear(arrays, "blocks.1.attn.proj", Z)
  close(out(ours, f"{ATTENTION}/out", Z), scale * mixed)


def test_the_probe_of_siglip_has_queries_keys_and_values_in_one_array():
  config, arrays = source_of("siglip")
  converted = convert(config, arrays)
  assert (converted.config.pooling, converted.config.class_tokens) == ("map", 0)
  ours, theirs = converted.arrays, "vision_model.head.attention"
  weight, bias = (
    arrays[f"{theirs}.in_proj_weight"],
    arrays[f"{theirs}.in_proj_bias"],
  )
  stacked = np.split(weight @ Z + bias, 3)
  for part, expected in zip(("query", "key", "value"), stacked, strict=True):
    name = f"MAPHead_0/MultiHeadDotProductAttention_0/{part}"
    close(heads(ours, name, Z), expected)


def test_patches_are_the_convolution_of_torch():
  config, arrays = source_of("clip")
  converted = convert(config, arrays).arrays
  patch = np.random.default_rng(7).normal(size=(14, 14, 3))
  kernel = arrays["vision_model.embeddings.patch_embedding.weight"]
  expected = np.einsum("dcxy,xyc->d", kernel, patch)
  ours = np.einsum("xycd,xyc->d", converted["embedding/kernel"], patch)
  close(ours + converted["embedding/bias"], expected)
  assert not converted["embedding/bias"].any()


def test_the_projection_of_clip_is_a_head_without_bias():
  config, arrays = source_of("clip")
  converted = convert(config, arrays)
  assert converted.config.num_classes == 10
  close(
    dense(converted.arrays, "head", Z), arrays["visual_projection.weight"] @ Z
  )


def test_fused_layers_of_timm_are_split():
  config, arrays = source_of("timm deit3")
  ours = convert(config, arrays).arrays
  stacked = np.split(linear(arrays, "blocks.1.attn.qkv", Z), 3)
  for part, expected in zip(("query", "key", "value"), stacked, strict=True):
    close(heads(ours, f"{ATTENTION}/{part}", Z), expected)
  first, second = (arrays[f"blocks.1.ls{i}.gamma"] for i in (1, 2))
  mixed = linear(arrays, "blocks.1.attn.proj", Z)
  close(out(ours, f"{ATTENTION}/out", Z), first * mixed)
  hidden = np.random.default_rng(6).normal(size=96)
  down = linear(arrays, "blocks.1.mlp.fc2", hidden)
  close(dense(ours, f"{BLOCK}/MlpBlock_0/Dense_1", hidden), second * down)


def test_positions_of_registers_are_added_to_them():
  config, arrays = source_of("timm registers with positions")
  ours, table = convert(config, arrays).arrays, arrays["pos_embed"]
  assert (ours["registers"] == arrays["reg_token"] + table[:, :4]).all()
  assert (ours[layouts.POSITIONS] == table[:, 4:]).all()


def test_a_class_token_without_position_gets_a_zero_one():
  config, arrays = source_of("timm dinov2")
  ours, table = convert(config, arrays).arrays, arrays["pos_embed"]
  assert not ours[layouts.POSITIONS][:, 0].any()
  assert (ours[layouts.POSITIONS][:, 1:] == table).all()
  assert (ours["registers"] == arrays["reg_token"]).all()


def test_older_files_name_a_buffer_and_the_tower():
  """Version 4 of transformers wrote both for a tower alone."""
  config, arrays = source_of("clip vision")
  older = {f"vision_model.{key}": array for key, array in arrays.items()}
  older["vision_model.embeddings.position_ids"] = np.zeros((1, 17), np.float32)
  ours, theirs = convert(config, arrays).arrays, convert(config, older).arrays
  assert ours.keys() == theirs.keys()
  assert all((ours[key] == theirs[key]).all() for key in ours)


PATCHES = "embeddings.patch_embeddings.projection.weight"
REGISTERS = "embeddings.register_tokens"


@pytest.mark.parametrize(("name", "config", "expected"), [
  # The published SigLIP B/16 states no field of its vision tower.
  ("siglip", {"vision_config": {}},
   {"vision_model.embeddings.position_embedding.weight": (196, 768)}),
  ("dinov2", {}, {PATCHES: (768, 3, 14, 14)}),
  ("dinov2 registers", {"model_type": "dinov2_with_registers"},
   {PATCHES: (768, 3, 16, 16), REGISTERS: (1, 4, 768)}),
])  # fmt: skip
def test_absent_fields_mean_what_transformers_means(name, config, expected):
  message = refusal({"model_type": name, **config}, source_of(name)[1])
  for array, shape in expected.items():
    assert re.search(rf"{array}: .*, expected {re.escape(str(shape))}", message)


@pytest.mark.parametrize(("outer", "inner", "pooling"), [
  ("token", None, "tok"), ("avg", None, "gap"), (None, None, "gap"),
  ("avg", "token", "tok"), ("token", "avg", "gap"),
])  # fmt: skip
def test_dinov3_of_timm_pools_as_it_states(outer, inner, pooling):
  """The arguments of the model come before the field beside them."""
  config, arrays = source_of("timm dinov3 gated", global_pool=outer)
  config["model_args"] = {**config["model_args"], "global_pool": inner}
  assert convert(config, arrays).config.pooling == pooling


@pytest.mark.parametrize("prefix", ["", "timm_model."])
@pytest.mark.parametrize("name", ["timm deit", "timm dinov3 gated"])
def test_a_model_of_timm_is_the_same_if_transformers_saved_it(name, prefix):
  config, arrays = source_of(name)
  named = {f"{prefix}{key}": array for key, array in arrays.items()}
  plain = convert(config, arrays)
  kind = {"model_type": "timm_wrapper"}
  head = {"architectures": ["TimmWrapperForImageClassification"]}
  wrapped = convert({**config, **kind, **head}, named)
  assert wrapped.config == plain.config
  for key, array in plain.arrays.items():
    assert (wrapped.arrays[key] == array).all()
  bare = {key: array for key, array in named.items() if "head" not in key}
  base = {"architectures": ["TimmWrapperModel"]}
  features = convert({**config, **kind, **base}, bare)
  assert (features.config.num_classes, plain.config.num_classes) == (0, 5)
  assert "missing: head.weight" in refusal({**config, **kind, **head}, bare)
  message = refusal({**kind, "architecture": "resnet50"}, named)
  assert "architecture 'resnet50': expected" in message


def test_early_files_of_timm_state_the_mean_beside_the_architecture(tmp_path):
  config, arrays = source_of("timm deit")
  write_model(tmp_path / "new", arrays, config, None)
  stated = config.pop("pretrained_cfg")
  write_model(tmp_path / "old", arrays, {**stated, **config}, None)
  new, old = (mv.load_backbone(tmp_path / name) for name in ("new", "old"))
  assert new.fingerprint == old.fingerprint
  assert new.preprocessing == old.preprocessing


# GELU, LayerNorm epsilon, and how positions are resized, where config.json says
# nothing: as the classes of the libraries do.
DEFAULTS = {
  "siglip vision": ("tanh", 1e-6, "bicubic"),
  "clip vision": ("quick", 1e-5, "bicubic"),
  "dinov2": ("exact", 1e-6, "bicubic"),
  "dinov2 registers": ("exact", 1e-6, "bicubic_antialias"),
  "dinov3": ("exact", 1e-5, None),
  "ijepa": ("exact", 1e-12, "bicubic"),
  "timm vit": ("exact", 1e-6, "bicubic_antialias"),
  "timm clip": ("quick", 1e-5, "bicubic_antialias"),
  "timm dinov3": ("exact", 1e-5, None),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_unstated_settings_are_those_of_the_library(name):
  config, arrays = source_of(name)
  for field in ("hidden_act", "layer_norm_eps"):
    config.pop(field, None)
  vit = convert(config, arrays).config
  gelu, epsilon, resize = DEFAULTS[name]
  assert (vit.gelu, vit.layer_norm_epsilon) == (gelu, epsilon)
  assert resize in (None, vit.position_resize)


def test_of_two_configurations_of_a_tower_the_older_is_read():
  """Old files of CLIP have both; transformers takes the older name."""
  config, arrays = source_of("clip")
  both = {
    **config, "vision_config": {}, "vision_config_dict": config["vision_config"]
  }  # fmt: skip
  assert convert(both, arrays).config == convert(config, arrays).config


def test_null_is_no_layer_scale_in_timm():
  config, arrays = source_of("timm deit3")
  config["model_args"] = {**config["model_args"], "init_values": None}
  assert "extra: 'blocks.0.ls1.gamma'" in refusal(config, arrays)
  without = {k: a for k, a in arrays.items() if ".ls" not in k}
  ours = convert(config, without).arrays
  mixed = linear(arrays, "blocks.1.attn.proj", Z)
  close(out(ours, f"{ATTENTION}/out", Z), mixed)


def test_the_gate_of_timm_comes_first():
  config, arrays = source_of("timm swiglu")
  ours = convert(config, arrays).arrays
  gate, up = np.split(linear(arrays, "blocks.1.mlp.fc1", Z), 2)
  close(dense(ours, f"{BLOCK}/MlpBlock_0/gate", Z), gate)
  close(dense(ours, f"{BLOCK}/MlpBlock_0/Dense_0", Z), up)


def test_empty_register_array_means_no_registers(tmp_path):
  """Written so by transformers; other empty arrays are refused."""
  config, arrays = source_of("dinov3", num_register_tokens=0)
  name = "embeddings.register_tokens"
  for count in (0, 1):
    arrays[name] = np.zeros((1, count, 24), np.float32)
    write_model(tmp_path / str(count), arrays, config)
  assert mv.load_backbone(tmp_path / "0").config.registers == 0
  with pytest.raises(BackboneError, match=f"extra: '{name}'"):
    mv.load_backbone(tmp_path / "1")


def test_dinov2_reads_no_activation_beside_a_gate():
  config, arrays = source_of("dinov2 swiglu", hidden_act="silu")
  assert convert(config, arrays).config.mlp == "swiglu"


REFUSED = {
  "a classifier of DINOv2": (
    "dinov2", {}, {"classifier.weight": (5, 48)},
    "the class token, concatenated with the mean patch token",
  ),
  "a classifier of CLIP": (
    "clip", {}, {"classifier.weight": (5, 24)},
    "the mean of the patches before the last LayerNorm",
  ),
  "a SigLIP without pooling": (
    "siglip vision", {"vision_use_head": False}, {}, "no pooled output",
  ),
  "a SigLIP for any shape": (
    "siglip vision", {"model_type": "siglip2_vision_model"}, {}, "NaFlex",
  ),
  "a distilled DeiT": (
    "timm deit", {}, {"head_dist.weight": (5, 24)}, "distilled DeiT",
  ),
  "a distilled DeiT of transformers": (
    "dinov2", {"model_type": "deit"}, {}, "a token for distillation",
  ),
  "another GELU": (
    "dinov2", {"hidden_act": "relu"}, {}, "hidden_act is 'relu'",
  ),
  "a gate without SiLU": (
    "dinov3 gated", {"hidden_act": "gelu"}, {}, "'silu': SwiGLU",
  ),
  "other channels": ("dinov3", {"num_channels": 4}, {}, "num_channels is 4"),
  "no heads that fit": (
    "dinov3", {"num_attention_heads": 5}, {}, "not a multiple of num_heads 5",
  ),
  "a rotation that does not fit": (
    "dinov3", {"num_attention_heads": 4}, {}, "a multiple of 4",
  ),
  "an image without a patch": (
    "siglip vision", {"image_size": 10}, {}, "is less than patch_size 14",
  ),
  "a hybrid": (
    "timm vit", {"architecture": "vit_base_r50_s16_224"}, {},
    "expected a plain ViT of timm",
  ),
  "an argument that is not known": (
    "timm vit", {"model_args": {"embed_norm_layer": "x"}}, {},
    "model_args has 'embed_norm_layer'",
  ),
  "an argument with another value": (
    "timm vit", {"model_args": {"qk_norm": True}}, {}, "qk_norm is True",
  ),
  "an argument of DINOv3": (
    "timm dinov3", {"model_args": {"rope_temperature": 50}}, {},
    "model_args has 'rope_temperature'",
  ),
  "another pooling": (
    "timm vit", {"model_args": {"global_pool": "avgmax"}}, {},
    "global_pool is 'avgmax'",
  ),
  "a probe that passes over registers": (
    "timm registers with positions",
    {"architecture": "vit_so150m_patch16_reg4_map_256", "global_pool": "map",
     "model_args": {"patch_size": 14}},
    {}, "attention pooling covers only the patches",
  ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_are_not_computed_are_refused_with_the_reason(what):
  name, changes, more, reason = REFUSED[what]
  config, arrays = source_of(name, **changes)
  more = {key: np.zeros(shape, np.float32) for key, shape in more.items()}
  message = refusal(config, {**arrays, **more})
  assert reason in message
  assert message.startswith("config.json")


def test_positions_that_fit_no_square_are_refused():
  config, arrays = source_of("timm dinov2")
  for rows in (2, 13, 19):
    table = np.zeros((1, rows, 24), np.float32)
    assert f"pos_embed has {rows} positions" in refusal(
      config, {**arrays, "pos_embed": table}
    )


def timm_source(name, rows, *, args=(), **pretrained):
  """A model of timm with `rows` positions; `None` leaves a field out."""
  config, arrays = source_of(name)
  for key, changes in (("model_args", args), ("pretrained_cfg", pretrained)):
    fields = {**config[key], **dict(changes)}
    config[key] = {k: v for k, v in fields.items() if v is not None}
  table = np.random.default_rng(rows).normal(size=(1, rows, 24))
  return config, {**arrays, "pos_embed": table.astype(np.float32)}


# Images of grids that are no square; the rows are those of one, with the class
# token or without.
NOT_SQUARE = {(56, 84): 25, (84, 56): 25, (28, 112): 17, (14, 42): 4}


@pytest.mark.parametrize("size", NOT_SQUARE, ids=str)
def test_a_vit_of_images_that_are_no_square_is_refused(size):
  rows = NOT_SQUARE[size]
  config, arrays = timm_source("timm vit", rows, args={"img_size": [*size]})
  assert f"img_size is {[*size]}, expected the side of" in refusal(
    config, arrays
  )
  for fixed in (True, None):
    config, arrays = timm_source(
      "timm vit", rows, args={"img_size": None}, input_size=[3, *size],
      fixed_input_size=fixed,
    )  # fmt: skip
    expected = f"input_size is {size[0]} x {size[1]}, expected a square"
    assert expected in refusal(config, arrays)


def test_positions_that_are_not_those_of_the_image_are_refused():
  """A square of an unstated size belongs to another model."""
  for changes in ({"args": {"img_size": 56}}, {"args": {"img_size": None}}):
    config, arrays = timm_source("timm vit", 25, **changes)
    message = refusal(config, arrays)
    assert "pos_embed has 25 positions, expected" in message
    assert "56 pixels" in message
  config, arrays = timm_source(
    "timm vit", 17, args={"no_embed_class": True, "img_size": None}
  )
  assert "pos_embed has 17 positions" in refusal(config, arrays)


def test_a_square_of_patches_is_also_one_with_the_tokens_before_them():
  """9 is 3 x 3, and 2 x 2 behind five tokens: the stated size decides."""
  for stated, side in (
    ({"img_size": 42}, 3), ({"img_size": 28}, 2),
    ({"img_size": None, "no_embed_class": True}, 3),
    ({"img_size": None, "no_embed_class": False}, 2),
  ):  # fmt: skip
    config, arrays = timm_source(
      "timm dinov2", 9, args=stated, fixed_input_size=None
    )
    assert convert(config, arrays).config.image_size == 14 * side
  config, arrays = timm_source(
    "timm dinov2", 9, args={"img_size": None}, fixed_input_size=None
  )
  assert "state this size in model_args.img_size" in refusal(config, arrays)


def test_the_last_norm_of_one_token_has_either_name():
  config, arrays = source_of("timm vit")
  plain = convert(config, arrays)
  renamed = {
    f"fc_{key}" if key.startswith("norm.") else key: array
    for key, array in arrays.items()
  }
  config["model_args"] = {**config["model_args"], "fc_norm": True}
  found = convert(config, renamed)
  assert found.config == plain.config
  for name, array in plain.arrays.items():
    assert (found.arrays[name] == array).all()


# Of torch 2.13: interpolate(line, mode="bicubic", antialias=...).
LINE = np.array([1.0, -2.0, 4.0, 3.0])
BY_TORCH = {
  ("bicubic", 3): [0.465278, 0.8125, 3.247684],
  ("bicubic", 6): [1.260417, -1.0625, -1.381944, 3.173611, 4.0625, 2.913195],
  ("bicubic_antialias", 3): [-0.084668, 0.929598, 3.590389],
  ("bicubic_antialias", 6): [
    1.197368,
    -0.764706,
    -1.439815,
    3.300926,
    3.82353,
    2.934211,
  ],
}


@pytest.mark.parametrize("kind", ["bicubic", "bicubic_antialias"])
@pytest.mark.parametrize("new", [3, 6])
def test_one_axis_of_positions_is_resized_as_by_torch(kind, new):
  ours = position_resizing.cubic_weights(4, new, kind) @ LINE
  np.testing.assert_allclose(ours, BY_TORCH[kind, new], atol=1e-6)


@pytest.mark.parametrize("kind", ["bicubic", "bicubic_antialias"])
def test_resized_positions_keep_class_tokens_and_turn_with_the_grid(kind):
  rng = np.random.default_rng(0)
  table = rng.normal(size=(1, 2 + 25, 3)).astype(np.float32)
  for side in (3, 5, 8):
    resized = layouts.resize_positions(table, side, kind, class_tokens=2)
    assert resized.shape == (1, 2 + side**2, 3)
    assert (resized[:, :2] == table[:, :2]).all()
    grid = table[:, 2:].reshape(5, 5, 3)
    turned = position_resizing.resized(np.rot90(grid), side, kind)
    expected = np.rot90(resized[0, 2:].reshape(side, side, 3))
    np.testing.assert_allclose(turned, expected, atol=1e-6)


STRANGE = [
  None, True, False, -1, 0, 1, 3, 7, 10**30, 1e300, -0.5, float("nan"), "",
  "x", "gelu", "\n", [], [14], [14, 14], [14, 15], {}, {"a": 1}, [None, {}],
]  # fmt: skip
# A campaign has more, as that of tests/tasks/test_fuzz.py.
SEEDS = int(os.environ.get("MEMORY_VIT_FUZZ_MODELS", "25"))


def damaged(rng, config, arrays):
  """Break one or two fields, and sometimes an array."""
  config, arrays = copy.deepcopy(config), dict(arrays)
  for _ in range(rng.integers(1, 3)):
    inside = [config, *(v for v in config.values() if isinstance(v, dict))]
    part = inside[rng.integers(len(inside))]
    if part:
      key = sorted(part)[rng.integers(len(part))]
      part[key] = copy.deepcopy(STRANGE[rng.integers(len(STRANGE))])
  if rng.random() < 0.3:
    name = sorted(arrays)[rng.integers(len(arrays))]
    shape = tuple(rng.integers(1, 4, size=rng.integers(0, 5)))
    arrays[name] = np.zeros(shape, np.float32)
  return config, arrays


@pytest.mark.fault("unequal-model")
@pytest.mark.parametrize("name", DISTINCT)
def test_damaged_models_are_converted_or_refused(name):
  """Only `BackboneError` is raised, and memory stays small."""
  source = source_of(name)
  refusals = []
  for seed in range(SEEDS):
    config, arrays = damaged(np.random.default_rng(seed), *source)
    try:
      convert(config, arrays)
    except BackboneError as error:
      refusals.append(str(error))
  assert len(refusals) > SEEDS / 4
  assert max(map(len, refusals)) < 4_000
