"""Exchange models with transformers, and read files of `torch.save`."""

import dataclasses

import library_models  # makes torchvision importable
import numpy as np
import published_models as models
import pytest
import torch
import transformers
from conftest import tiny_backbone

import memory_vit as mv
from memory_vit.commands import convert
from memory_vit.errors import TaskError
from memory_vit.model.backbone import fingerprint_of
from memory_vit.tasks import torch_import


@pytest.mark.parametrize("options", [
  {}, {"gelu": "exact", "layer_norm_epsilon": 1e-12}, {"gelu": "quick"},
  {"num_classes": 0, "representation_size": 32},
  {"num_classes": 0},
])  # fmt: skip
def test_transformers_computes_what_it_is_handed(tmp_path, options, images):
  backbone = tiny_backbone(**options)
  mv.save_backbone(backbone, tmp_path / "vit", format="hf")
  if backbone.config.num_classes:
    cls = transformers.ViTForImageClassification
  else:
    cls = transformers.ViTModel
  pooler = {} if "num_classes" not in options else {
    "add_pooling_layer": backbone.config.representation_size > 0
  }  # fmt: skip
  model, loaded = cls.from_pretrained(
    tmp_path / "vit", output_loading_info=True, **pooler
  )
  assert not any(loaded.values()), loaded
  with torch.no_grad():
    out = model(torch.tensor(np.moveaxis(np.asarray(images), 3, 1)))
  if backbone.config.num_classes:
    theirs = out.logits
  elif backbone.config.representation_size:
    theirs = out.pooler_output
  else:
    theirs = out.last_hidden_state[:, 0]
  ours = np.asarray(mv.forward(backbone, [], images)["backbone"])
  theirs = theirs.numpy()
  assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_pixels_that_no_patch_covers_are_left_out(tmp_path):
  config = transformers.ViTConfig(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=12, image_size=44, patch_size=8,
  )  # fmt: skip
  model = library_models.perturbed(transformers.ViTModel(config))
  model.save_pretrained(tmp_path)
  images = np.random.default_rng(0).uniform(-1, 1, (2, 44, 44, 3))
  with torch.no_grad():
    tensor = torch.tensor(np.moveaxis(images, 3, 1), dtype=torch.float32)
    theirs = model(tensor).pooler_output.numpy()
  backbone = mv.load_backbone(tmp_path, mean=[0.5] * 3, std=[0.5] * 3)
  ours = mv.forward(backbone, [], images[:, :40, :40])["backbone"]
  np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_fine_tuned_model_goes_out_and_comes_back(tmp_path):
  backbone = tiny_backbone(position_resize="bicubic", gelu="exact")
  backbone = dataclasses.replace(
    backbone, fingerprint=fingerprint_of(backbone.config, backbone.params)
  )
  mv.save_backbone(backbone, tmp_path / "vit", format="hf")
  model = transformers.ViTForImageClassification.from_pretrained(
    tmp_path / "vit"
  )
  model.save_pretrained(tmp_path / "again")
  # Its images are prepared as those of the first, whose file is not copied.
  again = mv.load_backbone(tmp_path / "again", mean=[0.5] * 3, std=[0.5] * 3)
  assert again.fingerprint == backbone.fingerprint
  assert again.config == backbone.config


class Boom:
  """The code that a pickle would run."""

  def __reduce__(self):
    return (print, ("ran",))


def test_tasks_of_torch(tmp_path, capsys):
  from tasks import test_torch_import as fast

  path = tmp_path / "vit"
  arrays = models.vit_arrays(head=False, pooler=True)
  models.write_model(path, models.without_prefix(arrays))
  state = fast.state(arrays, extended=True)
  tensors = {name: torch.tensor(array) for name, array in state.items()}
  file = tmp_path / "task.pt"
  torch.save(tensors, file)
  out = tmp_path / "tasks"
  arguments = [f"--task={file}", f"--backbone={path}", str(out)]
  assert convert.main(arguments) == 0
  backbone = mv.load_backbone(path)
  expected = torch_import.tasks_of(state, models.CONFIG, backbone, "it", {})
  found = mv.load_tasks([out], backbone)
  assert [t.digest for t in found] == [t.digest for t in expected]

  capsys.readouterr()
  torch.save({"a": Boom()}, file)
  with pytest.raises(TaskError, match="is not a state dict of arrays"):
    torch_import.read_tasks(file, str(path))
  torch.save([1, 2], file)
  with pytest.raises(TaskError, match="is not a state dict of arrays"):
    torch_import.read_tasks(file, str(path))
  assert capsys.readouterr().out == ""
