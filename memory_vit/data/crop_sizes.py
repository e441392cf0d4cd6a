"""Sizes of images before they are cropped, from the options of a run."""

from memory_vit.errors import ConfigError
from memory_vit.model.task import EvalPreprocessing


def preprocessing_of(
  crop: str,
  resize: int,
  image_size: int,
  stated: EvalPreprocessing | None = None,
) -> EvalPreprocessing:
  """Return evaluation preprocessing: for crop "backbone", `stated` if given."""
  if crop == "backbone":
    return stated or EvalPreprocessing(image_size=image_size)
  side = shorter_side(resize, image_size) if crop != "resize" else 0
  return EvalPreprocessing(image_size=image_size, crop=crop, resize=side)


def shorter_side(side: int, image_size: int) -> int:
  """Return the shorter side before a crop: `side`, or 8/7 of the crop for 0."""
  side = side or round(image_size * 8 / 7)
  if side < image_size:
    raise ConfigError(
      f"config.data.resize is {side}, expected at least config.image_size "
      f"({image_size}), or 0, which means 8/7 of the image size."
    )
  return side
