"""Tiny data sets on disk, with the layout and the features of the real ones."""

import dataclasses
import io
import json
import pathlib
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from memory_vit.data import graph_source
from memory_vit.data.memory_source import MemorySource
from memory_vit.data.split import Split


def picture(value: int, height: int = 20, width: int = 30) -> np.ndarray:
  """A picture of one grey value, to know it again by; uint8 (h, w, 3)."""
  return np.full((height, width, 3), value % 256, np.uint8)


def noise(seed: int, height: int = 20, width: int = 30) -> np.ndarray:
  """A random picture, uint8 (h, w, 3)."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (height, width, 3), np.uint8)


def encode(image: Image.Image | np.ndarray, kind: str, **options) -> bytes:
  """A picture as a file of the kind "JPEG", "PNG", ..."""
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


def every_kind() -> dict[str, bytes]:
  """A file of every kind of image that is read."""
  smooth = np.repeat(np.repeat(noise(0, 5, 7), 6, axis=0), 6, axis=1)
  rgb = Image.fromarray(smooth)
  grey, palette = rgb.convert("L"), rgb.convert("P", palette=Image.ADAPTIVE)
  rgba = rgb.copy()
  rgba.putalpha(grey)
  turned = rgb.transpose(Image.FLIP_LEFT_RIGHT)
  animation = {"save_all": True, "append_images": [turned]}
  return {
    "jpeg": encode(rgb, "JPEG"),
    "jpeg-progressive": encode(rgb, "JPEG", progressive=True),
    "jpeg-grey": encode(grey, "JPEG"),
    "jpeg-cmyk": encode(rgb.convert("CMYK"), "JPEG"),
    # As cameras write it that keep a second picture in the file.
    "jpeg-of-several": encode(rgb, "MPO", **animation),
    "png": encode(rgb, "PNG"),
    "png-grey": encode(grey, "PNG"),
    "png-grey-alpha": encode(rgba.convert("LA"), "PNG"),
    "png-rgba": encode(rgba, "PNG"),
    "png-palette": encode(palette, "PNG"),
    "png-1bit": encode(rgb.convert("1"), "PNG"),
    "webp": encode(rgb, "WEBP"),
    "webp-rgba": encode(rgba, "WEBP", lossless=True),
    "webp-animation": encode(rgb, "WEBP", lossless=True, **animation),
    "bmp": encode(rgb, "BMP"),
    "bmp-grey": encode(grey, "BMP"),
    "bmp-palette": encode(palette, "BMP"),
    "bmp-1bit": encode(rgb.convert("1"), "BMP"),
    "bmp-rgba": encode(rgba, "BMP"),
    "gif": encode(palette, "GIF"),
    "gif-animation": encode(palette, "GIF", **animation),
  }


def numbered_source(size: int) -> Split:
  """Example i has label i, and a random picture of its own."""
  pictures = tf.constant([encode(noise(i), "PNG") for i in range(size)])
  return Split(
    name="numbered",
    split="train",
    size=size,
    class_names=tuple(map(str, range(size))),
    source=graph_source.from_tensors(pictures, tf.range(size)),
  )


def broken_source(size: int, broken: Sequence[int], **options) -> Split:
  """`numbered_source`, in which some pictures cannot be decoded."""
  pictures = tf.constant(
    [
      b"no picture" if i in broken else encode(noise(i), "PNG")
      for i in range(size)
    ]
  )
  return dataclasses.replace(
    numbered_source(size),
    source=graph_source.from_tensors(pictures, tf.range(size)),
    **options,
  )


def in_memory(split: Split) -> Split:
  """The same examples, in memory."""
  pairs = [split.source.read(i) for i in range(split.size)]
  images, labels = zip(*pairs, strict=True)
  source = MemorySource(images, np.array(labels))
  return dataclasses.replace(split, source=source)


def damaged(split: Split, bad: Sequence[int]) -> Split:
  """A split that is in memory, with examples that are no images."""
  images = [
    b"no image" if i in bad else image
    for i, image in enumerate(split.source.images)
  ]
  source = split.source.decoded(images, split.source.numbers)
  return dataclasses.replace(split, source=source)


def write_folder(
  root: pathlib.Path, classes: Mapping[str, Sequence[str]]
) -> pathlib.Path:
  """Writes pictures; {"train/cat": ["a.jpg"]} makes root/train/cat/a.jpg."""
  kinds = {"jpg": "JPEG", "jpeg": "JPEG"}
  for folder, files in classes.items():
    (root / folder).mkdir(parents=True)
    for i, file in enumerate(files):
      suffix = file.rpartition(".")[2].lower()
      content = encode(picture(i), kinds.get(suffix, suffix))
      (root / folder / file).write_bytes(content)
  return root


def write_tfds(
  directory: pathlib.Path,
  name: str,
  labels: Mapping[str, Sequence[int]],
  file_format: str = "tfrecord",
) -> pathlib.Path:
  """Writes a data set that TFDS takes for the real one.

  The features, and with them the number of classes, are those of the TFDS
  builder; so are name, version and place. Each picture has its label as grey.

  Args:
    directory: the TFDS data directory.
    name: such as "cifar100".
    labels: split -> labels of its examples; -1 for an unlabelled split.
    file_format: "tfrecord" or "array_record".

  Returns:
    The directory of the files.
  """
  real = tfds.builder(name, data_dir=directory)
  return write_adhoc(
    directory,
    real.name,
    real.info.features,
    labels,
    file_format,
    version=str(real.version),
    config=real.builder_config.name if real.builder_config else None,
  )


def write_adhoc(
  directory: pathlib.Path,
  name: str,
  features: tfds.features.FeaturesDict,
  labels: Mapping[str, Sequence[int]],
  file_format: str = "tfrecord",
  version: str = "1.0.0",
  config: str | None = None,
) -> pathlib.Path:
  """As `write_tfds`, for a data set that TFDS has no builder of."""
  splits = {
    split: [
      (i, {key: _value(f, i, label) for key, f in features.items()})
      for i, label in enumerate(values)
    ]
    for split, values in labels.items()
  }
  builder = tfds.dataset_builders.store_as_tfds_dataset(
    name=name,
    version=version,
    config=config,
    features=features,
    split_datasets=splits,
    data_dir=directory,
    file_format=file_format,
  )
  return pathlib.Path(builder.data_dir)


def reshard(directory: pathlib.Path, split: str, sizes: Sequence[int]) -> None:
  """Deals the records of the only TFRecord file of a split out to several."""
  [file] = directory.glob(f"*-{split}.tfrecord-00000-of-00001")
  records = list(tf.data.TFRecordDataset(str(file)).as_numpy_iterator())
  assert len(records) == sum(sizes)
  start = str(file).removesuffix("00000-of-00001")
  for i, size in enumerate(sizes):
    name = f"{start}{i:05}-of-{len(sizes):05}"
    with tf.io.TFRecordWriter(name) as writer:
      for record in records[:size]:
        writer.write(record)
    records = records[size:]
  file.unlink()
  info = directory / "dataset_info.json"
  content = json.loads(info.read_text())
  for entry in content["splits"]:
    if entry["name"] == split:
      entry["shardLengths"] = [str(size) for size in sizes]
  info.write_text(json.dumps(content))


def flip_bit(file: pathlib.Path, position: int) -> None:
  """Changes a bit of a file."""
  content = bytearray(file.read_bytes())
  content[position] ^= 1
  file.write_bytes(content)


def record_start(file: pathlib.Path, record: int) -> int:
  """Where a record of a TFRecord file begins, with its length."""
  content, position = file.read_bytes(), 0
  for _ in range(record):
    (length,) = struct.unpack_from("<Q", content, position)
    position += length + 16
  return position


def _value(
  feature: tfds.features.FeatureConnector, index: int, label: int
) -> np.ndarray | int | str:
  """Something that fits a feature."""
  if isinstance(feature, tfds.features.Image):
    height, width, _ = feature.shape
    return picture(label, height or 20, width or 30)
  if isinstance(feature, tfds.features.ClassLabel):
    return min(label, feature.num_classes - 1)
  return str(index)
