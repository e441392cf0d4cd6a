"""Every family of backbones is exported."""

import jax
import numpy as np
import pytest
from conftest import random_task, tiny_backbone
from families import FAMILIES, QUICK
from marks import NIGHTLY

import memory_vit as mv
from memory_vit.exports import stablehlo
from memory_vit.exports.exported_model import make_model
from memory_vit.exports.image_input import ImageInput


def exported():
  """All families, those that differ most in 16 bits too; `make nightly` all."""
  for family in FAMILIES:
    for dtype in ("float32", "bfloat16"):
      few = dtype == "float32" or family in QUICK
      marks = pytest.mark.slow if few else NIGHTLY
      yield pytest.param(family, dtype, marks=marks)


@pytest.mark.parametrize(("family", "dtype"), [*exported()])
def test_stablehlo_of_every_family_computes_the_same(
  family, dtype, images, tmp_path
):
  backbone = tiny_backbone(width=16, dtype=dtype, **FAMILIES[family])
  first = random_task(backbone, "a", seed=1)
  second = random_task(
    backbone, "b", seed=2, attends_to=[first], regime="layers_masked", cells=0
  )
  tasks = [first, second]
  stablehlo.write(make_model(backbone, tasks), tmp_path, ImageInput())
  content = (tmp_path / "model.stablehlo").read_bytes()
  loaded = jax.export.deserialize(bytearray(content))
  for batch in (1, 7):
    found = loaded.call(images[:batch])
    expected = mv.forward(backbone, tasks, images[:batch])
    assert set(found) == set(expected)
    for name, values in expected.items():
      np.testing.assert_allclose(found[name], values, atol=1e-5)
