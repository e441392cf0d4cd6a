"""Read image preprocessing from the files of a published model."""

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any

from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.fold import Rgb
from memory_vit.errors import BackboneError
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, MAX_RESIZE

logger = logging.getLogger(__name__)

# Numbers of Pillow, with antialiasing; the others are not supported.
_RESAMPLES = {2: "bilinear_antialias", 3: "bicubic"}
_INTERPOLATIONS = {"bilinear": "bilinear_antialias", "bicubic": "bicubic"}
_SMALLEST_STD = 1e-3
# The defaults of classes of transformers for fields that a file lacks.
_CROPPED: Mapping[str, Any] = {
  "resample": 3,
  "do_center_crop": True,
  "crop_size": 224,
  "size": {"shortest_edge": 224},
}
_SIGLIP: Mapping[str, Any] = {"resample": 3}
_DEFAULTS = {"CLIP": _CROPPED, "Bit": _CROPPED, "Siglip": _SIGLIP}
_CLASS = re.compile(rf"({'|'.join(_DEFAULTS)})(ImageProcessor|FeatureExtract)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessor:
  """Normalization of images in [0, 1], and how they are resized and cropped."""

  mean: Rgb
  std: Rgb
  evaluation: EvalPreprocessing | None  # None if it cannot be expressed


def of_transformers(values: Any, where: str) -> ImageProcessor:
  """Read the object of a preprocessor_config.json."""
  fields = Fields(values, where)
  if not fields.flag("do_rescale", True):
    raise BackboneError(
      f"{where}: do_rescale is false, expected images in [0, 1]."
    )
  fields.number("rescale_factor", 0.00392, 0.003922, 1 / 255)
  mean: Rgb = (0.0, 0.0, 0.0)
  std: Rgb = (1.0, 1.0, 1.0)
  if fields.flag("do_normalize", True):
    mean = _rgb(fields, "image_mean", low=-10)
    std = _rgb(fields, "image_std", low=_SMALLEST_STD)
  evaluation = _evaluation_of_transformers(fields, values)
  _warn_unless(evaluation, where)
  return ImageProcessor(mean=mean, std=std, evaluation=evaluation)


def of_timm(values: Any, where: str) -> ImageProcessor:
  """Read the object `pretrained_cfg` of timm's config.json."""
  fields = Fields(values, where)
  mean = _rgb(fields, "mean", low=-10)
  std = _rgb(fields, "std", low=_SMALLEST_STD)
  channels, side, other = fields.numbers("input_size", 3, 1, 1e6)
  evaluation = None
  kind = _INTERPOLATIONS.get(fields.text("interpolation", "bicubic"))
  if channels == 3 and side == other and kind:
    share = fields.number("crop_pct", 0.05, 1, 0.875)
    mode = fields.text("crop_mode", "center")
    if mode == "center":
      resize = int(side / share)
      evaluation = _evaluation(int(side), resize, kind, "central_rounded")
    elif mode == "squash" and share == 1:
      evaluation = _evaluation(int(side), 0, kind)
  _warn_unless(evaluation, where)
  return ImageProcessor(mean=mean, std=std, evaluation=evaluation)


def at_size(
  evaluation: EvalPreprocessing | None, image_size: int
) -> EvalPreprocessing | None:
  """Change the image size of an evaluation; a crop takes the same share."""
  if evaluation is None or evaluation.image_size == image_size:
    return evaluation
  share = image_size / evaluation.image_size
  resize = min(MAX_RESIZE, round(evaluation.resize * share))
  return dataclasses.replace(evaluation, image_size=image_size, resize=resize)


def _evaluation_of_transformers(
  fields: Fields, values: Mapping[str, Any]
) -> EvalPreprocessing | None:
  older = fields.text("feature_extractor_type", "")
  named = _CLASS.match(fields.text("image_processor_type", older))
  if named:
    stated = {k: v for k, v in values.items() if v is not None}
    values = {**_DEFAULTS[named[1]], **stated}
    fields = Fields(values, fields.where)
  kind = _RESAMPLES.get(fields.whole("resample", 0, 5, 2))
  if not kind or not fields.flag("do_resize", True):
    return None
  if not fields.flag("do_center_crop", False):
    side = _side(values.get("size"))
    return _evaluation(side, 0, kind) if side else None
  side, size = _side(values.get("crop_size")), values.get("size")
  # A plain number beside a crop is the shorter side, as CLIP once wrote it.
  shorter = size.get("shortest_edge") if isinstance(size, Mapping) else size
  if type(shorter) is not int or shorter < side:
    return None
  return _evaluation(side, shorter, kind) if side else None


def _side(size: Any) -> int:
  """The side of a square: a number or an object of two; 0 for anything else."""
  if isinstance(size, Mapping):
    sides = [size.get("height"), size.get("width")]
    size = sides[0] if sides[0] == sides[1] else None
  return size if type(size) is int else 0


def _evaluation(
  side: int, resize: int, interpolation: str, crop: str = "central"
) -> EvalPreprocessing | None:
  """None for sizes that are not supported."""
  fits = 1 <= side <= MAX_IMAGE_SIZE and (
    resize == 0 or side <= resize <= MAX_RESIZE
  )
  if not fits:
    return None
  return EvalPreprocessing(
    image_size=side,
    crop=crop if resize else "resize",
    resize=resize,
    interpolation=interpolation,
  )


def _rgb(fields: Fields, name: str, low: float) -> Rgb:
  red, green, blue = fields.numbers(name, 3, low=low, high=10)
  return red, green, blue


def _warn_unless(evaluation: EvalPreprocessing | None, where: str) -> None:
  if evaluation is None:
    logger.warning(
      "%s: resizing or cropping that memory_vit does not support; tasks get "
      "the whole image squeezed into the square, unless configured otherwise",
      where,
    )
