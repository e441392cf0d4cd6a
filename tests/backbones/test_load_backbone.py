import base64
import contextlib
import dataclasses
import functools
import hashlib
import http.server
import io
import logging
import os
import pickle
import sys
import threading
import types
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from conftest import ROOT
from etils import epath

from memory_vit.backbones import download, stored_arrays
from memory_vit.backbones.load import infer_config, load_backbone
from memory_vit.backbones.save import save_backbone
from memory_vit.errors import BackboneError, ConfigError, TrainingError
from memory_vit.model import trees
from memory_vit.model.backbone import Backbone, backbone_shapes
from memory_vit.model.vit import VisionTransformer
from memory_vit.model.vit_config import ViTConfig, vit_config

POSITIONS = "Transformer/posembed_input/pos_embedding"

TINY = ViTConfig(
  width=8,
  depth=2,
  mlp_dim=12,
  num_heads=2,
  patch_size=2,
  image_size=8,
  num_classes=3,
)

DATA = Path(
  os.environ.get("MEMORY_VIT_DATA") or ROOT.parent / "shared" / "data"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  folder = tmp_path / "cache"
  monkeypatch.setenv("MEMORY_VIT_CACHE", str(folder))
  return folder


def shapes(config: ViTConfig) -> dict[str, tuple[int, ...]]:
  flat = trees.flatten(backbone_shapes(config))
  return {name: leaf.shape for name, leaf in flat.items()}


def random_weights(config: ViTConfig = TINY) -> dict[str, np.ndarray]:
  """The flat tree of a model with random values, numbered by Linen."""
  rng = np.random.default_rng(0)
  return {
    name: rng.standard_normal(shape, np.float32)
    for name, shape in shapes(config).items()
  }


def write(path: Path, arrays: dict) -> Path:
  with path.open("wb") as file:
    np.savez(file, **arrays)
  return path


def load(path: Path, arrays: dict, **options) -> Backbone:
  return load_backbone(str(write(path, arrays)), **options)


@functools.partial(jax.jit, static_argnums=0)
def encode(config: ViTConfig, params, images):
  vit = VisionTransformer(config)
  return vit.apply({"params": params}, images, method="encode")[0]


def outputs(backbone: Backbone) -> jax.Array:
  size = backbone.config.image_size
  images = np.random.default_rng(1).uniform(-1, 1, (2, size, size, 3))
  return encode(backbone.config, backbone.params, jnp.float32(images))


def assert_same(found: dict, expected: dict) -> None:
  assert found.keys() == expected.keys()
  for name in expected:
    np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


# The layouts, written out here and not taken from the code under test.


def linen(arrays):
  return arrays


def pre_linen(arrays):
  def rename(name):
    name = name.replace("/LayerNorm_1/", "/LayerNorm_2/")
    name = name.replace("Attention_0/", "Attention_1/")
    return name.replace("MlpBlock_0/", "MlpBlock_3/")

  return {rename(name): array for name, array in arrays.items()}


def optimizer_state(arrays):
  target = {f"opt/target/{name}": array for name, array in arrays.items()}
  step = {"opt/state/step": np.int64(7), "opt/state/cls/m": np.zeros(3)}
  return step | target


def under_params(arrays):
  beside = {"opt/0/count": np.int32(3), "chrono/steps": np.int64(1)}
  return beside | {f"params/{name}": array for name, array in arrays.items()}


def stacked(arrays):
  first = "Transformer/encoderblock_0/"
  rest = {n: a for n, a in arrays.items() if "encoderblock_" not in n}
  blocks = {
    n.replace("block_0", "block"): np.stack(
      [arrays[n.replace("block_0", f"block_{i}")] for i in range(TINY.depth)]
    )
    for n in arrays
    if n.startswith(first)
  }
  return rest | blocks


def big_vision(arrays):
  """The class position is added to the token and forgotten."""
  folded = dict(arrays)
  positions = folded.pop(POSITIONS)
  folded["cls"] = arrays["cls"] + positions[:, :1]
  return folded | {"pos_embedding": positions[:, 1:]}


def reverse(arrays):
  return dict(reversed(arrays.items()))


@pytest.mark.parametrize("options", [
  {},
  {"num_classes": 0},
  {"representation_size": 5},
  {"num_classes": 0, "representation_size": 5},
])  # fmt: skip
def test_every_layout_is_the_same_backbone(tmp_path, options):
  config = dataclasses.replace(TINY, **options)
  weights = random_weights(config)
  layouts = [
    linen(weights),
    pre_linen(weights),
    optimizer_state(pre_linen(weights)),
    under_params(weights),
    stacked(weights),
    under_params(stacked(weights)),
    reverse(pre_linen(weights)),
  ]
  for i, arrays in enumerate(layouts):
    backbone = load(tmp_path / f"{i}.npz", arrays)
    assert backbone.config == config
    assert_same(trees.flatten(backbone.params), weights)
    assert backbone.fingerprint == trees.fingerprint(trees.unflatten(weights))


def test_compression_does_not_change_the_fingerprint(tmp_path):
  weights = random_weights()
  np.savez_compressed(tmp_path / "small.npz", **weights)
  small = load_backbone(tmp_path / "small.npz")
  assert small.fingerprint == load(tmp_path / "a.npz", weights).fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_arrays_on_a_device(tmp_path, dtype):
  """In bfloat16 kernels are rounded, but for those of heads."""
  backbone = load(tmp_path / "a.npz", random_weights(), dtype=dtype)
  for name, array in trees.flatten(backbone.params).items():
    assert isinstance(array, jax.Array)
    rounded = name.endswith("kernel") and not name.startswith("head")
    assert array.dtype == (dtype if rounded else jnp.float32)


def test_fingerprint_changes_with_any_array(tmp_path):
  weights = random_weights(dataclasses.replace(TINY, depth=1))
  seen = {load(tmp_path / "a.npz", weights).fingerprint}
  for name in weights:
    changed = weights[name].copy()
    changed.view(np.uint8).reshape(-1)[-4] ^= 1  # the least bit of the last
    seen.add(load(tmp_path / "a.npz", weights | {name: changed}).fingerprint)
  assert len(seen) == 1 + len(weights)


@pytest.mark.parametrize("stack", [linen, stacked])
def test_big_vision_file_computes_the_same(tmp_path, stack):
  weights = random_weights()
  plain = load(tmp_path / "a.npz", weights)
  folded = load(tmp_path / "b.npz", under_params(stack(big_vision(weights))))

  assert folded.config == plain.config
  assert not np.any(folded.params["Transformer"]["posembed_input"]
                    ["pos_embedding"][:, 0])  # fmt: skip
  assert folded.fingerprint != plain.fingerprint
  np.testing.assert_allclose(outputs(folded), outputs(plain), atol=1e-6)


def test_big_vision_file_can_be_resized(tmp_path):
  weights = random_weights()
  plain = load(tmp_path / "a.npz", weights, image_size=12)
  folded = load(tmp_path / "b.npz", big_vision(weights), image_size=12)
  np.testing.assert_allclose(outputs(folded), outputs(plain), atol=1e-6)


@pytest.mark.parametrize("stored", [np.float16, np.float64, jnp.bfloat16])
def test_other_floats_become_float32(tmp_path, stored):
  weights = random_weights()
  arrays = {name: array.astype(stored) for name, array in weights.items()}
  backbone = load(tmp_path / "a.npz", arrays)
  expected = {n: a.astype(np.float32) for n, a in arrays.items()}
  assert_same(trees.flatten(backbone.params), expected)


# Published shapes.

BLOCK_NAMES = {
  f"{layer}/{leaf}"
  for layers, leaves in (
    (("LayerNorm_0", "LayerNorm_1"), ("scale", "bias")),
    (
      [
        f"MultiHeadDotProductAttention_0/{projection}"
        for projection in ("query", "key", "value", "out")
      ],
      ("kernel", "bias"),
    ),
    (("MlpBlock_0/Dense_0", "MlpBlock_0/Dense_1"), ("kernel", "bias")),
  )
  for layer in layers
  for leaf in leaves
}


def published_names(depth: int) -> set[str]:
  return {
    "cls",
    "embedding/kernel",
    "embedding/bias",
    "Transformer/posembed_input/pos_embedding",
    "Transformer/encoder_norm/scale",
    "Transformer/encoder_norm/bias",
  } | {
    f"Transformer/encoderblock_{i}/{name}"
    for i in range(depth)
    for name in BLOCK_NAMES
  }


def without_memory(config: ViTConfig) -> dict[str, np.ndarray]:
  """A flat tree of these shapes, with one value in memory."""
  return {
    name: np.broadcast_to(np.float32(0), shape)
    for name, shape in shapes(config).items()
  }


@pytest.mark.parametrize(
  ("variant", "count"),
  [
    ("Ti/16", 5_524_416),
    ("S/32", 22_493_952),
    pytest.param("S/8", 21_670_272, marks=pytest.mark.slow),
    pytest.param("S/16", 21_665_664, marks=pytest.mark.slow),
    ("B/32", 87_455_232),
    pytest.param("B/16", 85_798_656, marks=pytest.mark.slow),
    pytest.param("L/32", 305_510_400, marks=pytest.mark.slow),
    pytest.param("L/16", 303_301_632, marks=pytest.mark.slow),
    pytest.param("H/14", 630_764_800, marks=pytest.mark.slow),
  ],
)
def test_published_variants(variant, count):
  config = vit_config(variant)
  arrays = without_memory(config)
  assert trees.count(arrays) == count
  assert arrays.keys() == published_names(config.depth)

  found = infer_config(arrays, Path("any.npz"))
  assert found == config
  assert found.variant == variant


def test_original_imagenet21k_has_pre_logits_and_head():
  config = vit_config("B/32", num_classes=21_843, representation_size=768)
  arrays = without_memory(config)
  assert trees.count(arrays) == 87_455_232 + 590_592 + 16_797_267
  assert arrays.keys() - published_names(12) == {
    "pre_logits/kernel", "pre_logits/bias", "head/kernel", "head/bias",
  }  # fmt: skip
  assert infer_config(arrays, Path("any.npz")) == config


@pytest.mark.slow
def test_pretrained_tiny_imagenet_backbone():
  path = DATA / "vit_ti16_64.npz"
  if not path.exists():
    pytest.skip(f"no {path.name} in {DATA}; set MEMORY_VIT_DATA")
  backbone = load_backbone(path)
  assert backbone.config == vit_config("Ti/16", image_size=64, num_classes=140)
  assert trees.count(backbone.params) == 5_516_876
  assert backbone.params["head"]["kernel"].shape == (192, 140)


# Image size.


@pytest.mark.parametrize("size", [2, 6, 10, 24])
def test_position_embedding_is_resized_as_scipy_does(tmp_path, size, caplog):
  weights = random_weights()
  with caplog.at_level(logging.INFO, "memory_vit"):
    backbone = load(tmp_path / "a.npz", weights, image_size=size)
  side = size // 2
  grid = weights[POSITIONS][0, 1:].reshape(4, 4, 8)
  grid = scipy.ndimage.zoom(grid, (side / 4, side / 4, 1), order=1)
  expected = np.concatenate([weights[POSITIONS][0, :1], grid.reshape(-1, 8)])

  assert backbone.config == dataclasses.replace(TINY, image_size=size)
  found = trees.flatten(backbone.params)
  assert_same(found, weights | {POSITIONS: expected[None]})
  assert f"from (4,4) to ({side},{side})" in caplog.text


def test_resizing_keeps_the_corners(tmp_path):
  # Bilinear with corners on corners, whatever scipy calls it.
  weights = random_weights()
  backbone = load(tmp_path / "a.npz", weights, image_size=14)
  found = np.asarray(trees.flatten(backbone.params)[POSITIONS])
  old, new = weights[POSITIONS][0, 1:], found[0, 1:]
  np.testing.assert_allclose(
    new[[0, 6, 42, 48]], old[[0, 3, 12, 15]], rtol=1e-6
  )
  np.testing.assert_allclose(new[1], (old[0] + old[1]) / 2, rtol=1e-5)


def test_published_image_size_keeps_positions(tmp_path, caplog):
  weights = random_weights()
  with caplog.at_level(logging.INFO, "memory_vit"):
    backbone = load(tmp_path / "a.npz", weights, image_size=8)
  assert_same(trees.flatten(backbone.params), weights)
  assert "resized" not in caplog.text


def test_fingerprint_is_that_of_the_file(tmp_path):
  plain = load(tmp_path / "a.npz", random_weights())
  for options in ({"image_size": 12}, {"dtype": "bfloat16"}, {"gelu": "exact"}):
    other = load_backbone(tmp_path / "a.npz", **options)
    assert other.fingerprint == plain.fingerprint
    assert other.config == dataclasses.replace(plain.config, **options)


@pytest.mark.parametrize(
  "options", [{"image_size": 9}, {"image_size": 0}, {"dtype": "float16"},
              {"gelu": "erf"}]
)  # fmt: skip
def test_impossible_options_are_config_errors(tmp_path, options):
  with pytest.raises(ConfigError):
    load(tmp_path / "a.npz", random_weights(), **options)


# Files that are refused.


def refusal(path: Path, arrays: dict) -> str:
  with pytest.raises(BackboneError) as error:
    load(path, arrays)
  assert str(path) in str(error.value)
  return str(error.value)


def test_one_error_names_every_problem(tmp_path):
  arrays = random_weights()
  query = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query"
  norm = "Transformer/encoderblock_1/LayerNorm_1/scale"
  del arrays[f"{query}/kernel"], arrays["head/kernel"]
  arrays["head/scale"] = np.zeros(3, np.float32)
  arrays[norm] = arrays[norm][:-1]
  lines = refusal(tmp_path / "a.npz", arrays).split("\n")
  assert [line.strip() for line in lines[1:-1]] == [
    f"missing: {query}/kernel (8, 2, 4)",
    "missing: head/kernel (8, 3)",
    "extra: head/scale (3,)",
    f"shape of {norm}: (7,), expected (8,)",
  ]
  assert "vit_jax" in lines[-1]
  assert "big_vision" in lines[-1]


@pytest.mark.fault("lying-npz")
@pytest.mark.parametrize(
  "name", [name for name in sorted(shapes(TINY)) if "block_1" not in name]
)
def test_no_array_may_be_missing(tmp_path, name):
  arrays = random_weights()
  del arrays[name]
  assert f"missing: {name} " in refusal(tmp_path / "a.npz", arrays)


def without(arrays: dict, part: str) -> dict:
  return {name: array for name, array in arrays.items() if part not in name}


def oblong(arrays: dict) -> dict:
  """With positions for a grid of 3 x 4 patches."""
  return arrays | {POSITIONS: arrays[POSITIONS][:, :13]}


@pytest.mark.fault("lying-npz")
@pytest.mark.parametrize(
  ("change", "words"),
  [
    (lambda a: a | {"head/scale": np.zeros(3, np.float32)},
     "extra: head/scale (3,)"),
    (lambda a: without(a, "query"), "query/kernel (width, heads, "),
    (lambda a: without(a, "block_0"),
     "missing: Transformer/encoderblock_0/LayerNorm_0/bias"),
    (lambda a: without(big_vision(a), "cls"), "missing: cls (1, 1, 8)"),
    (lambda a: without(big_vision(a), "cls"), "'gap'"),
    (lambda a: big_vision(a) | {"MAPHead_0/probe": np.zeros((1, 1, 8), "f")},
     "extra: MAPHead_0/probe"),
    (oblong, "13 entries"),
    (lambda a: big_vision(oblong(a)), "12 entries"),
    (lambda a: a | pre_linen(a), "in two layouts"),
    (lambda a: a | {"cls": np.zeros((1, 1, 8), np.int8)},
     "'cls' cannot be read: the dtype is int8, expected a float"),
  ],
)  # fmt: skip
def test_arrays_of_another_model_are_refused(tmp_path, change, words):
  assert words in refusal(tmp_path / "a.npz", change(random_weights()))


@pytest.mark.parametrize(
  "name", ["cls", POSITIONS, "embedding/kernel", "head/kernel", "head/bias"]
)
def test_no_array_may_have_another_shape(tmp_path, name):
  arrays = random_weights()
  arrays[name] = arrays[name][..., 1:]
  assert "shape of " in refusal(tmp_path / "a.npz", arrays)


def test_the_block_that_differs_is_named(tmp_path):
  config = dataclasses.replace(TINY, depth=3)
  arrays = random_weights(config)
  query = (
    "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"
  )
  arrays[query] = arrays[query][..., 1:]
  lines = refusal(tmp_path / "a.npz", arrays).split("\n")
  assert len(lines) == 3
  assert f"shape of {query}: (8, 2, 3), expected (8, 2, 4)" in lines[1]


def test_long_lists_of_problems_are_cut(tmp_path):
  arrays = {f"conv_{i}/kernel": np.zeros((3, 3)) for i in range(100)}
  message = refusal(tmp_path / "resnet.npz", arrays)
  assert "missing: embedding/kernel (patch, patch, 3, width)" in message
  assert "found: conv_0/kernel (3, 3)" in message
  assert " more\n" in message
  assert len(message.split("\n")) < 60
  assert len(message) - len(str(tmp_path)) < 2_000


@pytest.mark.fault("lying-npz")
def test_entries_of_the_same_name_are_refused(tmp_path):
  path = write(tmp_path / "a.npz", random_weights())
  with (
    pytest.warns(UserWarning, match="Duplicate"),
    zipfile.ZipFile(path, "a") as archive,
  ):
    archive.writestr("cls.npy", archive.read("cls.npy"))
  with pytest.raises(BackboneError, match="two entries of the same name"):
    load_backbone(path)


class Trap:
  """Creates a file when it is unpickled."""

  def __init__(self, sentinel: Path):
    self.sentinel = sentinel

  def __reduce__(self):
    return Path.touch, (self.sentinel,)


@pytest.mark.fault("lying-npz")
def test_pickles_are_refused_and_not_run(tmp_path):
  sentinel = tmp_path / "sentinel"
  trap = np.array([Trap(sentinel)], dtype=object)
  inside = random_weights() | {"cls": trap}
  assert "'cls' cannot be read" in refusal(tmp_path / "inside.npz", inside)

  (tmp_path / "plain.npz").write_bytes(pickle.dumps(Trap(sentinel)))
  np.save(tmp_path / "array.npy", trap)
  for name in ("plain.npz", "array.npy"):
    with pytest.raises(BackboneError, match="is no .npz file"):
      load_backbone(tmp_path / name)

  assert not sentinel.exists()
  np.load(tmp_path / "inside.npz", allow_pickle=True)["cls"]
  assert sentinel.exists()  # The trap works.


def test_damaged_files_are_refused(tmp_path):
  whole = write(tmp_path / "a.npz", random_weights()).read_bytes()
  for length in range(0, len(whole), len(whole) // 20):
    (tmp_path / "cut.npz").write_bytes(whole[:length])
    with pytest.raises(BackboneError, match="cut.npz is no .npz file"):
      load_backbone(tmp_path / "cut.npz")

  data = whole.index(random_weights()["head/kernel"].tobytes())
  flipped = bytearray(whole)
  flipped[data] ^= 1
  (tmp_path / "flipped.npz").write_bytes(flipped)
  with pytest.raises(BackboneError, match=r"flipped.npz: entry 'head/kernel'"):
    load_backbone(tmp_path / "flipped.npz")


def test_a_zip_of_other_files_is_refused(tmp_path):
  with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
    archive.writestr("readme.txt", "hello")
  with pytest.raises(BackboneError, match="'readme.txt' is no array"):
    load_backbone(tmp_path / "a.npz")


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("i21k-B/99", "no file 'i21k-B/99'"),
    ("nowhere.npz", "no file 'nowhere.npz'"),
    (".", "'.' is a directory without model.safetensors"),
  ],
)
def test_missing_files_and_unknown_names_are_refused(name, says):
  with pytest.raises(BackboneError) as error:
    load_backbone(name)
  assert says in str(error.value)
  for known in ("i21k-B/32", "i21k-H/14", "augreg-Ti/16", "augreg-L/16"):
    assert known in str(error.value)


@pytest.mark.parametrize("name", ["augreg-b/32", "AugReg-B32", "augreg-B-32"])
def test_misspelt_short_name_suggests_the_right_one(name):
  with pytest.raises(BackboneError, match="mean 'augreg-B/32'") as error:
    load_backbone(name)
  for other in ("a directory", "hf://OWNER/NAME"):
    assert other in str(error.value)


# Addresses.


@contextlib.contextmanager
def serving(
  *bodies: bytes,
  promised: int = 0,
  status: int = 200,
  sized: bool = True,
  passwords: list | None = None,
  leads_to: str = "",
):
  """Serves every path of the yielded address; lists requests.

  Args:
    *bodies: what is served, one after the other; the last one ever after.
    promised: as the length of the body, where that is a lie.
    status: of the answers.
    sized: whether the length is said.
    passwords: gets those that were sent.
    leads_to: path to which all others are redirected.
  """
  requests = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
      body = bodies[min(len(requests), len(bodies) - 1)]
      requests.append(self.path)
      if passwords is not None:
        passwords.append(self.headers.get("Authorization"))
      if leads_to and self.path != leads_to:
        self.send_response(302)
        self.send_header("Location", leads_to)
        self.end_headers()
        return
      self.send_response(status)
      if sized:
        self.send_header("Content-Length", str(promised or len(body)))
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, *args):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  thread.start()
  try:
    yield f"http://127.0.0.1:{server.server_port}", requests
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def test_downloads_are_cached_and_logged(tmp_path, cache, caplog, capfd):
  file = write(tmp_path / "a.npz", random_weights())
  with serving(file.read_bytes()) as (address, requests):
    with caplog.at_level(logging.INFO, "memory_vit"):
      first = load_backbone(f"{address}/vit.npz")
    second = load_backbone(f"{address}/vit.npz")
    assert requests == ["/vit.npz"]
    load_backbone(f"{address}/other/vit.npz")
    assert requests == ["/vit.npz", "/other/vit.npz"]

  assert first.fingerprint == load_backbone(file).fingerprint
  assert second.fingerprint == first.fingerprint
  digest = hashlib.sha256(file.read_bytes()).hexdigest()
  assert f"SHA-256 {digest}" in caplog.text
  assert f"{file.stat().st_size / 2**20:.1f} MiB" in caplog.text
  assert len(list(cache.iterdir())) == 2
  assert "%|" not in capfd.readouterr().err  # No bar: not a terminal.


def test_short_names_are_addresses(tmp_path, monkeypatch):
  file = write(tmp_path / "a.npz", random_weights())
  with serving(file.read_bytes()) as (address, requests):
    monkeypatch.setitem(download.KNOWN, "tiny", f"{address}/tiny.npz")
    assert load_backbone("tiny").config == TINY
    assert requests == ["/tiny.npz"]


def test_known_addresses():
  folder = "https://storage.googleapis.com/vit_models"
  assert download.KNOWN["i21k-B/32"] == f"{folder}/imagenet21k/ViT-B_32.npz"
  assert download.KNOWN["augreg-B/32"] == (
    f"{folder}/augreg/"
    "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0.npz"
  )
  assert len(set(download.KNOWN.values())) == len(download.KNOWN)


@pytest.mark.parametrize("fault", [{"status": 404}, {"promised": 10**6}])
def test_failed_downloads_leave_nothing(tmp_path, cache, fault):
  file = write(tmp_path / "a.npz", random_weights())
  with (
    serving(file.read_bytes(), **fault) as (address, _),
    pytest.raises(BackboneError) as error,
  ):
    load_backbone(f"{address}/vit.npz")
  assert f"{address}/vit.npz" in str(error.value)
  assert str(cache) in str(error.value)
  assert not list(cache.iterdir())


def other_crc(data: bytes) -> bytes:
  """A flipped bit in the middle of an array."""
  middle = len(data) // 2
  return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.fault("bad-download")
@pytest.mark.parametrize(
  ("change", "says"),
  [
    (lambda data: data[: len(data) // 2], "is no .npz file, or its end"),
    (lambda data: b"<html>No such file</html>", "b'<html>No such file</html>'"),
    (lambda data: b"", "0 bytes"),
    (other_crc, "entry .* is damaged"),
  ],
  ids=["half of it", "a page", "nothing", "a flipped bit"],
)
def test_download_is_checked_before_it_is_cached(tmp_path, cache, change, says):
  """The server states no length; the next call fetches the file again."""
  good = write(tmp_path / "a.npz", random_weights()).read_bytes()
  with serving(change(good), good, sized=False) as (address, requests):
    with pytest.raises(BackboneError, match=says) as error:
      load_backbone(f"{address}/vit.npz")
    assert f"cannot fetch {address}/vit.npz: the download" in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(cache.iterdir())
    assert load_backbone(f"{address}/vit.npz").config == TINY
    assert len(requests) == 2


class Endless(io.RawIOBase):
  """A file that repeats the same bytes without end."""

  def __init__(self, part):
    self.part, self.reads = part, 0

  def read(self, size=-1):
    self.reads += 1
    return self.part


@pytest.fixture
def endless(monkeypatch):
  """Serves an endless content at gs://nowhere/vit.npz."""

  def serve(part):
    file = Endless(part)
    place = types.SimpleNamespace(open=lambda mode: file)
    monkeypatch.setattr(epath, "Path", lambda address: place)
    return file

  return serve


@pytest.mark.fault("bad-download")
def test_endless_web_page_is_dropped_at_once(cache, endless):
  """Its first bytes are not those of an .npz file."""
  page = endless(b"<html>" + b"x" * 2**20)
  with pytest.raises(BackboneError, match="is no .npz file"):
    load_backbone("gs://nowhere/vit.npz")
  assert page.reads == 1
  assert not list(cache.iterdir())


def test_endless_download_stops_at_the_size_limit(cache, endless, monkeypatch):
  monkeypatch.setattr(stored_arrays, "MAX_BYTES", 2**20)
  endless(b"PK" * 9999)
  with pytest.raises(BackboneError, match="is more than 1,048,576 bytes"):
    load_backbone("gs://nowhere/vit.npz")
  assert not list(cache.iterdir())


@pytest.mark.fault("bad-download")
@pytest.mark.parametrize("damage", ["half", "link", "pipe"])
def test_damaged_cached_file_is_fetched_again(tmp_path, cache, caplog, damage):
  good = write(tmp_path / "a.npz", random_weights()).read_bytes()
  with serving(good) as (address, requests):
    load_backbone(f"{address}/vit.npz")
    (kept,) = cache.iterdir()
    kept.unlink()
    {
      "half": lambda: kept.write_bytes(good[: len(good) // 2]),
      "link": lambda: kept.symlink_to(tmp_path / "nothing"),
      "pipe": lambda: os.mkfifo(kept),
    }[damage]()
    assert load_backbone(f"{address}/vit.npz").config == TINY
    assert len(requests) == 2
  assert "is removed, and fetched again" in caplog.text
  assert kept.read_bytes() == good
  assert list(cache.iterdir()) == [kept]
  assert not (tmp_path / "nothing").exists()


@pytest.fixture
def netrc(tmp_path, monkeypatch):
  """A user with a password for this machine."""
  file = tmp_path / "netrc"
  file.write_text("machine 127.0.0.1 login me password secret\n")
  monkeypatch.setenv("NETRC", str(file))
  for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
    monkeypatch.delenv(name, raising=False)


@pytest.mark.fault("bad-download")
def test_passwords_are_not_sent_without_encryption(tmp_path, cache, netrc):
  file, passwords = write(tmp_path / "a.npz", random_weights()), []
  with serving(file.read_bytes(), passwords=passwords) as (address, _):
    load_backbone(f"{address}/vit.npz")
    assert passwords == [None]
    # What the user himself writes into an address is meant for it.
    own = address.replace("127", "you:there@127")
    load_backbone(f"{own}/vit.npz")
    assert base64.b64decode(passwords[1].split()[1]) == b"you:there"


@pytest.mark.fault("bad-download")
def test_passwords_do_not_follow_redirects(tmp_path, cache, netrc, monkeypatch):
  file, passwords = write(tmp_path / "a.npz", random_weights()), []
  with serving(file.read_bytes(), passwords=passwords, leads_to="/b.npz") as (
    address,
    requests,
  ):
    with pytest.raises(BackboneError, match="a password of ~/.netrc would"):
      load_backbone(f"{address}/vit.npz")
    assert requests == ["/vit.npz"]
    monkeypatch.setenv("NETRC", os.devnull)
    assert load_backbone(f"{address}/vit.npz").config == TINY
    assert requests[1:] == ["/vit.npz", "/b.npz"]
  assert passwords == [None] * 3


def test_passwords_are_sent_with_encryption(netrc, monkeypatch):
  """`requests` reads ~/.netrc by default."""
  given = []

  class Downloader:
    def __init__(self, **options):
      given.append(options)

    def __call__(self, url, file, pooch):
      file.write(b"nothing")

  monkeypatch.setattr("pooch.HTTPDownloader", Downloader)
  for scheme in ("https", "http"):
    with pytest.raises(BackboneError):
      load_backbone(f"{scheme}://127.0.0.1/vit.npz")
  assert ["auth" in options for options in given] == [False, True]


@pytest.mark.parametrize(
  ("path", "says"),
  [
    ("x" * 5000, "not a local path"),
    ("~nobody-of-that-name/x.npz", "not a local path"),
    ("a\0b", "not a local path"),
    ("http://[::1", "cannot fetch"),
  ],
)
def test_invalid_paths_are_refused(cache, path, says):
  with pytest.raises(BackboneError, match=says):
    load_backbone(path)


def test_long_address_is_cached(tmp_path, cache, monkeypatch):
  file = write(tmp_path / "a.npz", random_weights())
  with serving(file.read_bytes()) as (address, requests):
    for _ in range(2):
      load_backbone(f"{address}/{'x' * 300}.npz")
    assert len(requests) == 1
    monkeypatch.setenv("MEMORY_VIT_CACHE", "~nobody-of-that-name")
    with pytest.raises(BackboneError, match="MEMORY_VIT_CACHE"):
      load_backbone(f"{address}/vit.npz")


def test_the_error_says_where_to_put_the_file(tmp_path):
  address = "http://127.0.0.1:9/vit.npz"
  with pytest.raises(BackboneError) as error:
    load_backbone(address)
  place = str(error.value).split("put the file at ")[1].split(" by hand")[0]
  write(Path(place), random_weights())
  assert load_backbone(address).config == TINY


def test_only_downloads_need_pooch(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "pooch", None)
  assert load(tmp_path / "a.npz", random_weights()).config == TINY
  with pytest.raises(BackboneError, match="pooch"):
    load_backbone("i21k-B/32")


def test_gs_addresses_are_cached(tmp_path, cache, monkeypatch):
  write(tmp_path / "a.npz", random_weights())
  opened = []

  def path(address):
    opened.append(address)
    return tmp_path / address.removeprefix("gs://bucket/")

  monkeypatch.setattr(epath, "Path", path)
  first = load_backbone("gs://bucket/a.npz")
  assert load_backbone("gs://bucket/a.npz").fingerprint == first.fingerprint
  assert opened == ["gs://bucket/a.npz"]
  assert len(list(cache.iterdir())) == 1


def test_gs_without_a_backend_names_the_https_form(cache, monkeypatch):
  def path(address):
    raise ImportError("no gcsfs")

  monkeypatch.setattr(epath, "Path", path)
  with pytest.raises(BackboneError) as error:
    load_backbone("gs://bucket/folder/a.npz")
  assert "no gcsfs" in str(error.value)
  assert "https://storage.googleapis.com/bucket/folder/a.npz" in str(
    error.value
  )
  assert str(cache) in str(error.value)


# Saving.


@pytest.mark.parametrize("layout", [pre_linen, stacked, big_vision])
def test_saved_backbone_is_the_same(tmp_path, layout):
  backbone = load(tmp_path / "a.npz", layout(random_weights()))
  save_backbone(backbone, tmp_path / "new" / "b.npz")
  again = load_backbone(tmp_path / "new" / "b.npz")
  assert again.fingerprint == backbone.fingerprint
  assert again.config == backbone.config


def test_saved_file_has_the_published_names(tmp_path):
  weights = random_weights()
  save_backbone(load(tmp_path / "a.npz", weights), tmp_path / "b.npz")
  with np.load(tmp_path / "b.npz") as saved:
    assert_same(dict(saved), pre_linen(weights))


def test_resized_backbone_is_saved_as_it_is(tmp_path):
  backbone = load(tmp_path / "a.npz", random_weights(), image_size=12)
  save_backbone(backbone, tmp_path / "b.npz")
  again = load_backbone(tmp_path / "b.npz")
  assert again.config == backbone.config
  assert_same(trees.flatten(again.params), trees.flatten(backbone.params))
  assert again.fingerprint != backbone.fingerprint


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
  backbone = load(tmp_path / "a.npz", random_weights())
  before = (tmp_path / "a.npz").read_bytes()

  def savez(file, **arrays):
    file.write(b"half")
    raise OSError("disk full")

  monkeypatch.setattr(np, "savez", savez)
  with pytest.raises(TrainingError, match="cannot be written: disk full"):
    save_backbone(backbone, tmp_path / "a.npz")
  assert (tmp_path / "a.npz").read_bytes() == before
  assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
