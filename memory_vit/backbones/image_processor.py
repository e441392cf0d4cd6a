"""Read image preprocessing from the files of a published model."""

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_vit.backbones.families.fields import Fields
from memory_vit.backbones.families.fold import Rgb
from memory_vit.errors import BackboneError, ConfigError
from memory_vit.model.task import EvalPreprocessing
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, MAX_RESIZE
from memory_vit.runtime.messages import refusal

logger = logging.getLogger(__name__)

# {Pillow's number of a filter: our name} for the supported filters. Pillow
# always antialiases.
_RESAMPLES = {2: "bilinear_antialias", 3: "bicubic"}
_INTERPOLATIONS = {"bilinear": "bilinear_antialias", "bicubic": "bicubic"}
_SMALLEST_STD = 1e-3
# Defaults of transformers' image processors for fields that a file lacks.
_SQUARE: Mapping[str, Any] = {
  "resample": 2, "size": {"height": 224, "width": 224},
}  # fmt: skip
_CROPPED: Mapping[str, Any] = {
  "resample": 3, "size": {"shortest_edge": 224}, "default_to_square": False,
  "do_center_crop": True, "crop_size": 224,
}  # fmt: skip
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
  "ViT": _SQUARE,
  "DINOv3ViT": _SQUARE,
  "Beit": {**_SQUARE, "resample": 3},
  "Siglip": {**_SQUARE, "resample": 3, "default_to_square": False},
  "DeiT": {**_CROPPED, "size": 256, "default_to_square": True},
  "CLIP": _CROPPED,
  "Bit": _CROPPED,
}
_SUFFIX = re.compile(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$")
# {`model_type`: class of image processor} for files that name no class. Other
# model types use "ViT".
_CLASSES = {
  **dict.fromkeys(("dinov2", "dinov2_with_registers"), "Bit"),
  **dict.fromkeys(("siglip", "siglip_vision_model"), "Siglip"),
  **dict.fromkeys(("clip", "clip_vision_model"), "CLIP"),
}
# Supported switches. do_convert_rgb and do_reduce_labels are ignored, because
# they do not change RGB photos.
_SWITCHES = {
  *("do_resize", "do_center_crop", "do_rescale", "do_normalize"),
  *("do_convert_rgb", "do_reduce_labels"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessor:
  """Normalization of images in [0, 1], and how they are resized and cropped."""

  mean: Rgb | None  # None if not stated
  std: Rgb | None
  preprocessing: EvalPreprocessing | None  # None if not stated or not supported
  origin: str  # path of the file, and name of the JSON object in this file
  # Text with a list of the absent fields, for which default values are used.
  defaults: str = ""

  def warn(self) -> None:
    """Warn if the source states no supported way to resize images."""
    if self.preprocessing is None:
      logger.warning(
        "%s: resizing or cropping is not stated, or not supported by "
        "memory_vit; tasks squeeze the whole image into a square unless "
        "configured otherwise",
        self.origin,
      )


def of_transformers(values: Any, where: str, family: str) -> ImageProcessor:
  """Read the fields of an image processor of transformers.

  If the fields name no class, `family` (the `model_type`) determines the class.
  """
  fields = Fields(values, where)
  if not fields.flag("do_rescale", True):
    raise BackboneError(
      f"{where}: do_rescale is false, expected true (images in [0, 1])."
    )
  fields.number("rescale_factor", 0.00392, 0.003922, 1 / 255)
  mean: Rgb | None = (0.0, 0.0, 0.0)
  std: Rgb | None = (1.0, 1.0, 1.0)
  if fields.flag("do_normalize", True):
    mean, std = _rgb(fields, "image_mean"), _rgb(fields, "image_std")
  older = fields.text("feature_extractor_type", "")
  name = _SUFFIX.sub("", fields.text("image_processor_type", older))
  name = name or _CLASSES.get(family, "ViT")
  stated = {k: v for k, v in values.items() if v is not None}
  complete = {**_DEFAULTS.get(name, {}), **stated}
  absent = [k for k in complete if k not in (*stated, "default_to_square")]
  defaults = (
    f"; defaults of {name}ImageProcessor: {', '.join(absent)}" if absent else ""
  )
  return ImageProcessor(
    mean=mean,
    std=std,
    preprocessing=_evaluation_of_transformers(
      Fields(complete, where), complete
    ),
    origin=where,
    defaults=defaults,
  )


def of_timm(values: Any, where: str) -> ImageProcessor:
  """Read the object `pretrained_cfg` of timm's config.json."""
  fields, preprocessing = Fields(values, where), None
  kind = _INTERPOLATIONS.get(fields.text("interpolation", "bicubic"))
  if fields.has("input_size"):
    channels, height, width = fields.numbers("input_size", 3, 1, 1e6)
    share = fields.number("crop_pct", 0.05, 1, 0.875)
    mode = fields.text("crop_mode", "center")
    if kind and channels == 3 and height == width:
      if mode == "center":
        resize = int(height / share)
        preprocessing = _preprocessing(
          int(height), resize, kind, "central_rounded"
        )
      elif mode == "squash" and share == 1:
        preprocessing = _preprocessing(int(height), 0, kind)
  return ImageProcessor(
    mean=_rgb(fields, "mean"),
    std=_rgb(fields, "std"),
    preprocessing=preprocessing,
    origin=where,
  )


def as_rgb(values: Any, name: str) -> Rgb:
  """Check a mean or std: three numbers, or one number for all channels."""
  try:
    numbers = np.broadcast_to(np.asarray(values, np.float64), 3).tolist()
    rgb = _rgb(Fields({name: numbers}, "the argument"), name)
  except (TypeError, ValueError):
    raise ConfigError(
      refusal(
        name,
        values,
        "red, green and blue for pixels in [0, 1], or one number for all three",
      )
    ) from None
  assert rgb
  return rgb


def at_size(
  preprocessing: EvalPreprocessing | None, image_size: int
) -> EvalPreprocessing | None:
  """Change the image size of preprocessing; a crop keeps its relative size."""
  if preprocessing is None or preprocessing.image_size == image_size:
    return preprocessing
  share = image_size / preprocessing.image_size
  resize = min(MAX_RESIZE, round(preprocessing.resize * share))
  return dataclasses.replace(
    preprocessing, image_size=image_size, resize=resize
  )


def _evaluation_of_transformers(
  fields: Fields, values: Mapping[str, Any]
) -> EvalPreprocessing | None:
  kind = _RESAMPLES.get(fields.whole("resample", 0, 5, 0))
  enabled = [k for k, v in values.items() if k.startswith("do_") and v]
  if not kind or not fields.flag("do_resize", True) or {*enabled} - _SWITCHES:
    return None
  size = _sides(values.get("size"), fields.flag("default_to_square", True))
  cropped = fields.flag("do_center_crop", False)
  crop = _sides(values.get("crop_size")) if cropped else size
  if crop == size:
    return _preprocessing(_square(size), 0, kind)
  if size.keys() == {"shortest_edge"} and size["shortest_edge"]:
    return _preprocessing(_square(crop), size["shortest_edge"], kind)
  return None


def _sides(size: Any, to_square: bool = True) -> Mapping[str, Any]:
  """Return `size` as a dict like {"shortest_edge": 224}; check no values."""
  if isinstance(size, Mapping):
    return {name: side for name, side in size.items() if side is not None}
  if type(size) is int and not to_square:
    return {"shortest_edge": size}
  sides = size if isinstance(size, list | tuple) else [size, size]
  return dict(zip(("height", "width"), sides, strict=False))


def _square(sides: Mapping[str, Any]) -> Any:
  """Return the side of the square if `sides` describe one, otherwise None."""
  is_square = sides == dict.fromkeys(("height", "width"), sides.get("height"))
  return sides["height"] if is_square else None


def _preprocessing(
  side: Any, resize: Any, interpolation: str, crop: str = "central"
) -> EvalPreprocessing | None:
  """Return the preprocessing; None if a size is unsupported or not an int."""
  if type(side) is not int or type(resize) is not int:
    return None
  fits = resize == 0 or side <= resize <= MAX_RESIZE
  if not fits or not 1 <= side <= MAX_IMAGE_SIZE:
    return None
  return EvalPreprocessing(
    image_size=side,
    crop=crop if resize else "resize",
    resize=resize,
    interpolation=interpolation,
  )


def _rgb(fields: Fields, name: str) -> Rgb | None:
  """Return red, green and blue of a field; None if the field is absent.

  The field has three numbers, or one number for all three channels.
  """
  if not fields.has(name):
    return None
  low = _SMALLEST_STD if name.endswith("std") else -10
  if fields.is_number(name):
    return (fields.number(name, low, 10),) * 3
  red, green, blue = fields.numbers(name, 3, low, 10)
  return red, green, blue
