"""Save and convert backbones: the command `convert`, and files for others."""

import dataclasses
import hashlib
import json
import zipfile

import numpy as np
import published_models as models
import pytest
import safetensors.numpy
from conftest import tiny_backbone

import memory_vit as mv
from memory_vit.backbones import published
from memory_vit.backbones.load import read_published
from memory_vit.commands import convert, inspect
from memory_vit.errors import BackboneError
from memory_vit.model import trees
from memory_vit.model.backbone import fingerprint_of


def same(found: mv.Backbone, expected: mv.Backbone) -> None:
  assert found.config == expected.config
  assert found.fingerprint == expected.fingerprint
  assert found.preprocessing == expected.preprocessing
  found, expected = map(trees.flatten, (found.params, expected.params))
  assert found.keys() == expected.keys()
  for name in expected:
    np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize(("card", "licence"), [
  ("---\nlicense: other\nlicense_name: dinov3-license\n---", "dinov3-license"),
  ("---\ntags: [x]\n---", "not stated in its files"),
  ("---\nlicense: \x1b[2J\n---", "not stated in its files"),
])  # fmt: skip
def test_the_licence_is_as_the_files_state_it(tmp_path, card, licence):
  path = models.write_model(tmp_path / "vit")
  (path / "README.md").write_text(card)
  convert.main([str(path), str(tmp_path / "a.npz")])
  found = read_published(str(tmp_path / "a.npz")).source
  assert found.licence.startswith(licence)


@pytest.mark.fault("lying-conversion")
@pytest.mark.parametrize("write", [models.write_model, models.write_shards])
def test_a_converted_model_is_the_same_to_the_bit(tmp_path, capsys, write):
  path, out = write(tmp_path / "vit"), tmp_path / "vit.npz"
  (path / "README.md").write_text("---\nlicense: apache-2.0\n---\nA ViT.")
  assert convert.main([str(path), str(out)]) == 0
  assert "licence: apache-2.0" in capsys.readouterr().out
  same(mv.load_backbone(out), mv.load_backbone(path))

  source = read_published(str(out)).source
  assert (source.name, source.family) == (str(path), "vit")
  assert source.files == {
    file.name: hashlib.sha256(file.read_bytes()).hexdigest()
    for file in path.iterdir()
    if file.name != "README.md"
  }
  # Once more, from the new file: what it was made of is kept.
  assert convert.main([str(out), str(tmp_path / "again.npz")]) == 0
  assert read_published(str(tmp_path / "again.npz")).source == source


def test_numpy_opens_what_was_converted(tmp_path):
  path, out = models.write_model(tmp_path / "vit"), tmp_path / "vit.npz"
  convert.main([str(path), str(out)])
  with np.load(out, allow_pickle=False) as archive:
    assert published.ENTRY in archive.files
    np.testing.assert_array_equal(
      archive["cls"], models.vit_arrays()["vit.embeddings.cls_token"]
    )


def test_plain_backbone_is_written_without_a_note(tmp_path):
  for preprocessing in (None, mv.EvalPreprocessing(image_size=8)):
    backbone = dataclasses.replace(tiny_backbone(), preprocessing=preprocessing)
    mv.save_backbone(backbone, tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
      assert published.ENTRY not in archive.namelist()


@pytest.mark.parametrize("switches", [
  {"gelu": "exact"}, {"layer_norm_epsilon": 1e-5}, {"registers": 3},
  {"class_tokens": 0, "pooling": "gap"}, {"pooling": "map"},
  {"positions": "rope", "rope_base": 50.0}, {"mlp": "swiglu"},
  {"pre_norm": True},
  pytest.param({"class_tokens": 2}, marks=pytest.mark.slow),
  {"pooling": "gap", "norm_after_pooling": True},
  {"position_resize": "bicubic"},
])  # fmt: skip
def test_settings_beyond_shapes_are_written_as_a_note(tmp_path, switches):
  backbone = tiny_backbone(**switches)
  backbone = dataclasses.replace(
    backbone,
    fingerprint=fingerprint_of(backbone.config, backbone.params),
  )
  mv.save_backbone(backbone, tmp_path / "a.npz")
  same(mv.load_backbone(tmp_path / "a.npz"), backbone)


def test_inspect_shows_what_a_backbone_was_made_of(tmp_path, capsys):
  path, out = models.write_model(tmp_path / "vit"), tmp_path / "vit.npz"
  convert.main([str(path), str(out)])
  capsys.readouterr()
  for given in (path, out):
    assert inspect.main([str(given)]) == 0
    text = capsys.readouterr().out
    for said in ("gelu", "exact", "epsilon 1e-12", "position_resize bicubic",
                 "8 px, resize, bicubic (", "family", "licence"):  # fmt: skip
      assert said in text
    assert inspect.main([str(given), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["gelu"] == "exact"
    assert values["source"]["files"].keys() == {
      "config.json", "model.safetensors", "preprocessor_config.json",
    }  # fmt: skip
    assert values["fingerprint"] == mv.load_backbone(path).fingerprint


def test_inspect_says_where_the_preparation_is_stated(tmp_path, capsys):
  stated, nested = models.PREPROCESSOR, "processor_config.json: image_processor"
  short = {k: v for k, v in stated.items() if k != "resample"}
  path = models.write_model(tmp_path / "vit", preprocessor=None)
  (path / "processor_config.json").write_text(
    json.dumps({"image_processor": short})
  )
  assert inspect.main([str(path)]) == 0
  text = capsys.readouterr().out
  assert f"0.485, 0.456, 0.406 ({path}/{nested})" in text
  assert f"0.229, 0.224, 0.225 ({path}/{nested})" in text
  assert f"({path}/{nested}; defaults of ViTImageProcessor: resample)" in text
  assert inspect.main([str(path), "--json"]) == 0
  values = json.loads(capsys.readouterr().out)
  assert values["normalization"]["mean"]["value"] == stated["image_mean"]
  assert values["normalization"]["std"]["from"].endswith(nested)
  assert "processor_config.json" in values["source"]["files"]
  assert values["preprocessing_from"].endswith("resample")


def test_unstated_mean_and_std_are_options(tmp_path, capsys):
  """Its file then runs in all commands."""
  bare = models.write_model(tmp_path / "bare", preprocessor=None)
  stated = mv.load_backbone(models.write_model(tmp_path / "stated"))
  out = tmp_path / "a.npz"
  values = [["--mean", "image_mean"], ["--std", "image_std"]]
  both = [
    f"{option}={','.join(map(str, models.PREPROCESSOR[key]))}"
    for option, key in values
  ]
  for options, said in (
    ([], "config.json states no mean and std"),
    (both[:1], "config.json states no std"),
    (["--mean=a", both[1]], "mean is ['a'], expected red, green and blue"),
    (["--mean=0,0", both[1]], "expected red, green and blue"),
    (["--mean=123.7,116.3,103.5", both[1]], "for pixels in [0, 1]"),
    ([both[0], "--std=0,1,1"], "std is ['0', '1', '1'], expected"),
  ):
    assert convert.main([str(bare), str(out), *options]) == 2
    assert said in capsys.readouterr().err
  assert convert.main([str(bare), str(out), *both]) == 0
  assert mv.load_backbone(out).fingerprint == stated.fingerprint
  capsys.readouterr()
  assert inspect.main([str(out)]) == 0
  text = capsys.readouterr().out
  assert "0.5, 0.5, 0.5 (.npz files: images in [-1, 1])" in text
  assert "whole image squeezed to 8 px (not stated, or not" in text
  assert convert.main([str(out), str(tmp_path / "b.npz"), *both]) == 2
  assert "is an .npz file" in capsys.readouterr().err


# What an .npz file says of itself is as untrusted as its arrays.


def with_note(path, content, compress=zipfile.ZIP_STORED):
  mv.save_backbone(tiny_backbone(), path)
  with zipfile.ZipFile(path, "a", compress) as archive:
    archive.writestr(published.ENTRY, content)
  return path


def note(**changes):
  values = json.loads(
    published.to_text(published.Note(config=tiny_backbone().config))
  )
  for key, value in changes.items():
    part, _, name = key.partition("__")
    if name:
      values[part][name] = value
    else:
      values[part] = value
  return json.dumps(values)


def test_a_note_says_how_a_backbone_computes(tmp_path):
  path = with_note(tmp_path / "a.npz", note(config__gelu="exact"))
  assert mv.load_backbone(path).config.gelu == "exact"


@pytest.mark.fault("lying-conversion")
@pytest.mark.parametrize(("content", "said"), [
  ("", "not readable as JSON"),
  ("[" * 100_000, "not readable as JSON"),
  ("[]", "expected an object"),
  ("{}", "missing keys"),
  (note(more=1), "unknown keys ['more']"),
  (note(format_version=2), "format_version 2, but this version"),
  (note(config={}), "config: width is missing"),
  (note(config=7), "config is 7, expected an object"),
  (note(config__num_heads=0), "config: num_heads is 0, expected"),
  (note(config__depth=10**9), "config: depth is 1000000000, expected"),
  (note(config__width=True), "config: width is True"),
  (note(config__gelu="\x1b[2J"), "gelu is"),
  (note(config__x=1), "unknown keys ['x']"),
  (note(config__layer_norm_epsilon=1e30), "layer_norm_epsilon is 1e+30"),
  (note(config__registers=2), "missing: registers (1, 2, 32)"),
  (note(evaluation={"image_size": 8}), "evaluation: missing keys"),
  (note(source={"name": "a", "family": "b", "licence": "c",
                "files": {"a": 1}}), "a digest that is no string"),
  (" " * (2**20 + 1), "expected at most 1,048,576"),
])  # fmt: skip
def test_forged_notes_are_refused(tmp_path, content, said):
  path = with_note(tmp_path / "a.npz", content, zipfile.ZIP_DEFLATED)
  with pytest.raises(BackboneError) as error:
    mv.load_backbone(path)
  assert said in str(error.value)
  assert str(path) in str(error.value)
  assert "\x1b" not in str(error.value)


@pytest.mark.fault("lying-conversion")
def test_two_notes_are_refused(tmp_path):
  path = with_note(tmp_path / "a.npz", note())
  with (
    pytest.warns(UserWarning, match="Duplicate"),
    zipfile.ZipFile(path, "a") as archive,
  ):
    archive.writestr(published.ENTRY, note(config__gelu="exact"))
  with pytest.raises(BackboneError, match="two entries of the same name"):
    mv.load_backbone(path)


# For transformers.


@pytest.mark.parametrize("options", [
  {}, {"gelu": "exact", "layer_norm_epsilon": 1e-12}, {"num_classes": 0},
  {"num_classes": 0, "representation_size": 5},
])  # fmt: skip
def test_a_directory_for_transformers_is_the_same_weights(tmp_path, options):
  backbone = tiny_backbone(**options)
  mv.save_backbone(backbone, tmp_path / "hf", format="hf")
  found = mv.load_backbone(tmp_path / "hf")
  expected = dataclasses.replace(backbone.config, position_resize="bicubic")
  assert found.config == expected
  assert trees.fingerprint(found.params) == trees.fingerprint(backbone.params)


def test_preprocessing_is_written_for_transformers(tmp_path):
  preprocessing = mv.EvalPreprocessing(
    image_size=8, crop="central", resize=10, interpolation="bicubic"
  )
  backbone = dataclasses.replace(tiny_backbone(), preprocessing=preprocessing)
  mv.save_backbone(backbone, tmp_path / "hf", format="hf")
  assert mv.load_backbone(tmp_path / "hf").preprocessing == preprocessing


@pytest.mark.parametrize("switches", [
  {"class_tokens": 0, "pooling": "gap"}, {"registers": 1}, {"pre_norm": True},
  {"positions": "rope"}, {"mlp": "swiglu"}, {"pooling": "map"},
  {"representation_size": 5},
])  # fmt: skip
def test_model_beyond_transformers_is_refused(tmp_path, switches):
  with pytest.raises(BackboneError, match="save the backbone as an .npz file"):
    mv.save_backbone(tiny_backbone(**switches), tmp_path / "hf", format="hf")
  assert not (tmp_path / "hf").exists()


def test_save_replaces_only_its_own_models(tmp_path):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "notes.txt").write_text("mine")
  for path in (tmp_path / "mine", tmp_path / "mine" / "notes.txt"):
    with pytest.raises(BackboneError, match="is left as it is"):
      mv.save_backbone(tiny_backbone(), path, format="hf")
  assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
  for seed in (0, 1):
    mv.save_backbone(tiny_backbone(seed), tmp_path / "hf", format="hf")
  found = trees.fingerprint(mv.load_backbone(tmp_path / "hf").params)
  assert found == tiny_backbone(1).fingerprint
  # Not even what somebody has put beside a model.
  (tmp_path / "hf" / "README.md").write_text("mine")
  with pytest.raises(BackboneError, match=r"unknown files \('README.md'\)"):
    mv.save_backbone(tiny_backbone(), tmp_path / "hf", format="hf")
  assert (tmp_path / "hf" / "README.md").read_text() == "mine"


def test_save_does_not_replace_foreign_models(tmp_path):
  """Foreign files have the same names; a link to one of ours stays a link."""
  path = tmp_path / "hf"
  mv.save_backbone(tiny_backbone(), path, format="hf")
  (tmp_path / "link").symlink_to("hf")
  mv.save_backbone(tiny_backbone(1), tmp_path / "link", format="hf")
  assert (tmp_path / "link").is_symlink()
  found = trees.fingerprint(mv.load_backbone(path).params)
  assert found == tiny_backbone(1).fingerprint
  weights = path / "model.safetensors"
  arrays = safetensors.numpy.load_file(weights)
  safetensors.numpy.save_file(arrays, weights, {"format": "pt"})
  theirs = weights.read_bytes()
  for content in (theirs, b"", b"no weights"):
    weights.write_bytes(content)
    with pytest.raises(BackboneError, match="is left as it is"):
      mv.save_backbone(tiny_backbone(), path, format="hf")
    assert weights.read_bytes() == content


def test_unusable_command_lines_are_refused(tmp_path, capsys):
  path = str(models.write_model(tmp_path / "vit"))
  for arguments, said in (
    ([path, str(tmp_path / "out")], "expected a name that ends in .npz"),
    ([path, str(tmp_path / "no" / "a.npz")], "cannot be written"),
    ([path], "expected SOURCE OUT"),
    (["nowhere", str(tmp_path / "a.npz")], "no file 'nowhere'"),
    ([path, "x", "--format=onnx"], "invalid choice"),
    (
      ["--task=a.pt", f"--backbone={path}", "--format=hf", "x"],
      "--format applies only when a backbone is written",
    ),
  ):
    assert convert.main(arguments) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1
  with pytest.raises(BackboneError, match="format is 'onnx'"):
    mv.save_backbone(tiny_backbone(), tmp_path / "a", format="onnx")
