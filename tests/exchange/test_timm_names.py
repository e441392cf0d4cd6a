"""A name of timm implies here the architecture that timm builds."""

import inspect

import library_models  # noqa: F401  timm comes after it
import pytest
import timm
from timm.models import vision_transformer

from memory_vit.backbones.families.timm_architectures import architecture
from memory_vit.errors import BackboneError

NAMES = timm.list_models(["vit_*", "deit_*", "deit3_*"])
# Plain ViTs all the same: RADIO's have a token for each teacher, the others
# two maps of attention or a width that no size names.
LEFT_OUT = {
  *(name for name in NAMES if "_radio_" in name),
  "vit_dlittle_patch16_reg1_gap_256",
  "vit_dwee_patch16_reg1_gap_256",
  "vit_intern300m_patch14_448",
}
DEFAULTS = {
  name: parameter.default
  for name, parameter in inspect.signature(
    vision_transformer.VisionTransformer
  ).parameters.items()
}


# Where the names of plain ViTs stand.
MODULES = (vision_transformer.__name__, timm.models.deit.__name__)


class _BuiltError(Exception):
  pass


@pytest.fixture
def arguments(monkeypatch):
  """The arguments by which timm builds a plain ViT; None for another model."""

  def init(self, **given):
    is_plain = type(self) is vision_transformer.VisionTransformer
    raise _BuiltError({**DEFAULTS, **given} if is_plain else None)

  monkeypatch.setattr(vision_transformer.VisionTransformer, "__init__", init)

  def get(name):
    entrypoint = timm.model_entrypoint(name)
    if entrypoint.__module__ not in MODULES:
      return None  # it would really be built
    try:
      entrypoint()
    except _BuiltError as built:
      (found,) = built.args
    else:
      return None
    parts = ("embed_layer", "block_fn", "attn_layer")
    plain = found and all(found[part] is DEFAULTS[part] for part in parts)
    return found if plain else None

  return get


def test_every_plain_vit_of_timm_is_understood_or_named_here(arguments):
  understood = set()
  for name in NAMES:
    try:
      architecture(name, "here")
      understood.add(name)
    except BackboneError:
      pass
  plain = {name for name in NAMES if arguments(name)}
  assert understood == plain - LEFT_OUT
  assert len(understood) > 100


@pytest.mark.fault("unequal-model")
def test_a_name_implies_what_timm_builds(arguments):
  for name in NAMES:
    built = arguments(name)
    if not built or name in LEFT_OUT:
      continue
    ours = architecture(name, "here")
    activation = built["act_layer"] or "gelu"
    if not isinstance(activation, str):
      names = {"QuickGELU": "quick_gelu", "SiLU": "silu"}
      activation = names[activation.__name__]
    norm = (built["norm_layer"] or vision_transformer.LayerNorm)(4)
    theirs = {
      "act_layer": "gelu" if activation == "silu" else activation,
      "norm_epsilon": norm.eps,
      "layer_scale": built["init_values"] is not None,
      "swiglu": activation == "silu",
      **{
        key: built[key]
        for key in (
          *("embed_dim", "depth", "num_heads", "patch_size", "class_token"),
          *("reg_tokens", "global_pool", "pre_norm", "qkv_bias"),
        )
      },
    }
    assert {key: getattr(ours, key) for key in theirs} == theirs, name
