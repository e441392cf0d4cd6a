"""Splits of TFDS data sets, with random access."""

import contextlib
import importlib.util
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.core import read_only_builder

from memory_vit.data import tfds_trust, tfrecord
from memory_vit.data.inventory import Inventory
from memory_vit.data.sources import (
  Fetch,
  Source,
  attempts,
  brief,
  count,
  fetch_from_memory,
  reason_of,
  slices,
  without_autotuning,
)
from memory_vit.data.tfds_trust import Access
from memory_vit.data.tfrecord import Shard
from memory_vit.errors import BrokenDataError, DataError

# An example in a file takes more than this, with the frame around it; of so
# many a file may have lost all.
_LEAST_BYTES, _LOST_AT_MOST = 32, 100_000

# TFDS builders that are known to fail, or to ask for more than one expects.
# {dir} is config.data.dir or TFDS's own default. configs/*.py repeats these.
ADVICE = {
  "sun397": (
    "The host of SUN397 is gone: put SUN397.tar.gz and Partitions.zip into "
    "{dir}/downloads/manual and `pip install opencv-python-headless`, or use "
    "an image folder with configs/folder.py."
  ),
  "places365_small": (
    "It is a download of 29 GiB: with a copy at hand, put "
    "train_256_places365standard.tar, val_256.tar, test_256.tar and "
    "filelist_places365-standard.tar into {dir}/downloads/manual."
  ),
  "i_naturalist2017": (
    "It is a download of 237 GiB, and as much again once prepared; TFDS does "
    "not take files from a manual directory here. With the pictures at hand, "
    "use an image folder with configs/folder.py."
  ),
  "i_naturalist2021": (
    "The TFDS package lacks a file of labels that it needs to prepare it. A "
    "copy that was prepared elsewhere is read with its version in the name, "
    "'i_naturalist2021:2.0.1'."
  ),
}


def open_tfds(
  name: str,
  split: str,
  directory: str,
  cache_gib: float,
  access: Access,
  **options: Any,
) -> Source:
  """A data set of TFDS, by its name: see `datasets.open_source`.

  Further options are those of `Source`.
  """
  with _quiet():
    builder = _prepared_builder(name, directory, access)
    return _open(builder, name, split, cache_gib, options)


def _open(
  builder: tfds.core.DatasetBuilder,
  name: str,
  split: str,
  cache_gib: float,
  options: Mapping[str, Any],
) -> Source:
  """Opens a split of a data set whose files are there."""
  info = builder.info
  parts = slices(name, split, _sizes(builder))
  size = count(parts, _sizes(builder))
  keys = find_keys(name, info.features, info.supervised_keys)
  shards = _shards(builder, split)
  _require_room(name, split, shards)
  if tfds.core.FileFormat.ARRAY_RECORD in info.available_file_formats():
    labels = tf.zeros((0,), tf.int32)  # They are seen when they are read.
    bad = _bad_array_records(shards)
    fetch = _fetch_from_array_record(builder, split, keys, bad)
  else:
    _check_cache(name, split, builder, cache_gib)
    pictures, labels, bad = _read_all(name, split, builder, keys, shards)
    fetch = fetch_from_memory(pictures, labels)
  source = Source(
    name=name,
    split=split,
    size=size,
    class_names=tuple(info.features[keys[1]].names),
    fetch=fetch,
    file_name=lambda index: tfrecord.place(shards, index),
    inventory=_inventory(builder, parts, shards),
    **options,
  )
  source.leave_out(bad)
  source.check_labels(labels.numpy())
  return source


def take_inventory(
  name: str, split: str, directory: str, access: Access
) -> Inventory:
  """`Source.inventory` of a data set that is prepared; nothing is read.

  Raises:
    DataError: where it is not prepared, or has no such split.
  """
  with _quiet():
    builder = _found_builder(name, directory, access)
    if not builder.is_prepared():
      raise DataError(f"data set {name!r} is not in {builder.data_dir}.")
    parts = slices(name, split, _sizes(builder))
    return _inventory(builder, parts, _shards(builder, split))


def _inventory(
  builder: tfds.core.DatasetBuilder,
  parts: Sequence[tuple[str, slice]],
  shards: Sequence[Shard],
) -> Inventory:
  """What TFDS recorded of a split, and its files.

  Of a data set in a bucket only the first: TFDS knows the bytes of its splits.
  """
  info = builder.info
  checksums = info.as_proto.download_checksums
  facts = {
    "data set": info.full_name,
    "splits": {
      key: {
        "shard lengths": list(info.splits[key].shard_lengths),
        "bytes": info.splits[key].num_bytes,
      }
      for key, _ in parts
    },
    "downloads": {url: checksums[url].checksum for url in sorted(checksums)},
  }
  files = {
    os.path.basename(shard.path): shard.path
    for shard in shards
    if "://" not in shard.path
  }
  return Inventory(facts=facts, files=files)


def _sizes(builder: tfds.core.DatasetBuilder) -> dict[str, int]:
  """The number of examples in each split."""
  return {key: s.num_examples for key, s in builder.info.splits.items()}


def _require_room(name: str, split: str, shards: Sequence[Shard]) -> None:
  """Refuses what are no files, and numbers of examples that cannot be.

  Raises:
    BrokenDataError: before memory is taken for so many.
  """
  local = [pathlib.Path(s.path) for s in shards if "://" not in s.path]
  for path in local:
    if path.exists() and not path.is_file():
      raise BrokenDataError(
        f"data set {name!r}, split {split!r}: {path} is no regular file."
      )
  found = sum(path.stat().st_size for path in local if path.exists())
  most = found // _LEAST_BYTES + _LOST_AT_MOST
  size = sum(shard.take for shard in shards)
  if len(local) == len(shards) and size > most:
    raise BrokenDataError(
      f"data set {name!r}, split {split!r}: dataset_info.json says that it has "
      f"{size:,} examples, but its files have {found:,} bytes in all. Put back "
      "the files that belong to it, or prepare it anew."
    )


def _shards(builder: tfds.core.DatasetBuilder, split: str) -> list[Shard]:
  """The files of a split, in the order in which they are read."""
  return [
    Shard(str(file.filename), file.skip, file.take, file.examples_in_shard)
    for file in builder.info.splits[split].file_instructions
  ]


def find_keys(
  name: str,
  features: Mapping[str, tfds.features.FeatureConnector],
  supervised_keys: Sequence[str] | None,
) -> tuple[str, str]:
  """Which features of a TFDS data set are the picture and its class.

  Args:
    name: of the data set, for messages.
    features: `builder.info.features`.
    supervised_keys: `builder.info.supervised_keys`: picture and label, perhaps
      followed by more (places365_small), or None (sun397).

  Raises:
    DataError: if there is no choice, or more than one.
  """
  images = [
    key
    for key, feature in features.items()
    if type(feature) is tfds.features.Image and feature.np_dtype == np.uint8
  ]
  labels = [
    key
    for key, feature in features.items()
    if isinstance(feature, tfds.features.ClassLabel)
  ]
  image_key, label_key = (*(supervised_keys or ()), None, None)[:2]
  image_key = _choose(images, image_key)
  label_key = _choose(labels, label_key, "label")
  if image_key is None or label_key is None:
    found = {key: type(feature).__name__ for key, feature in features.items()}
    raise DataError(
      f"data set {name!r} is not one of pictures with one class each: expected "
      f"one 8-bit Image and one ClassLabel (or one named 'label') among its "
      f"features, which are {found}."
    )
  return image_key, label_key


def _prepared_builder(
  name: str, directory: str, access: Access
) -> tfds.core.DatasetBuilder:
  """Finds the files of a TFDS data set, and makes them where they are not."""
  where = directory or "~/tensorflow_datasets"
  advice = _advice(name, where)
  builder = _found_builder(name, directory, access)
  if not access.download:
    return builder
  try:
    if not builder.is_prepared():
      # Said beforehand, as TFDS tries for minutes to reach a host.
      logging.warning("Preparing data set %s in %s. %s", name, where, advice)
      has_array_record = importlib.util.find_spec("array_record") is not None
      builder.download_and_prepare(
        file_format="array_record" if has_array_record else None
      )
  except DataError:
    raise
  # Builders download, unpack and parse: anything can be raised, and all of it
  # means that the data set cannot be had.
  except Exception as error:
    raise _not_provided(name, directory, error, access) from error
  return builder


def _found_builder(
  name: str, directory: str, access: Access
) -> tfds.core.DatasetBuilder:
  """The builder of a data set, which may not be prepared yet."""
  try:
    folder = pathlib.Path(directory).expanduser()
    if directory and (folder / "dataset_info.json").is_file():
      if not access.trust_code:
        tfds_trust.require_own_features(folder)
      return tfds.builder_from_directory(folder)
    if not access.trust_code:
      tfds_trust.require_no_code(name, directory)
    if not access.download:
      # The code of TFDS would look for it on the net.
      return read_only_builder.builder_from_files(
        name, data_dir=directory or None
      )
    return tfds.builder(name, data_dir=directory or None)
  except DataError:
    raise
  except Exception as error:  # as where it is prepared
    raise _not_provided(name, directory, error, access) from error


def _not_provided(
  name: str, directory: str, error: Exception, access: Access
) -> DataError:
  """What to raise where TFDS fails."""
  where = directory or "~/tensorflow_datasets"
  problem = f"TFDS cannot provide data set {name!r} in {where}"
  advice = _advice(name, where)
  if not access.download:
    advice = (
      "It is not prepared there, and not downloaded either unless its name is "
      "given on the command line (--data=NAME)."
    )
  return DataError(f"{problem} ({brief(error)}). {advice}".rstrip())


def _advice(name: str, where: str) -> str:
  return ADVICE.get(re.split(r"[/:]", name)[0], "").format(dir=where)


def _fetch_from_array_record(
  builder: tfds.core.DatasetBuilder,
  split: str,
  keys: tuple[str, str],
  bad: Mapping[int, str],
) -> Fetch:
  """`Source.fetch` of files with random access.

  Only the bytes pass through Python; TensorFlow takes them apart. What `bad`
  names is not read: in a file of other records it would be another example.
  """
  image_key, label_key = keys
  features = builder.info.features
  records = builder.as_data_source(
    split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
  )

  def read(index: int) -> bytes:
    if int(index) in bad:
      raise ValueError(bad[int(index)])
    return records[index]

  def fetch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    record = tf.numpy_function(read, [index], tf.string)
    example = features.deserialize_example(
      tf.ensure_shape(record, ()),
      decoders={image_key: tfds.decode.SkipDecoding()},
    )
    return example[image_key], tf.cast(example[label_key], tf.int32)

  return fetch


def _check_cache(
  name: str, split: str, builder: tfds.core.DatasetBuilder, cache_gib: float
) -> None:
  """Refuses to read a split into memory that is larger than `cache_gib`."""
  splits = builder.info.splits
  sizes = _sizes(builder)
  # TFDS knows the bytes of whole splits alone.
  needed = sum(
    splits[key].num_bytes * len(range(sizes[key])[part]) / sizes[key]
    for key, part in slices(name, split, sizes)
  )
  if needed > cache_gib * 2**30:
    raise DataError(
      f"data set {name!r}, split {split!r} takes {needed / 2**30:.1f} GiB. Its "
      f"{builder.info.file_format.value} files have no random access, so that "
      "it would be read into memory, for which config.data.cache_gib (of "
      f"`evaluate` --cache_gib) allows {cache_gib:g} GiB. "
      "Raise that, or convert the files once: `tfds convert_format "
      f"--dataset_version_dir={builder.data_dir} "
      "--out_file_format=array_record` (needs `pip install apache-beam "
      "mlcroissant`)."
    )


def _bad_array_records(shards: Sequence[Shard]) -> dict[int, str]:
  """Examples in files of which less is there than there should be."""
  # Not everywhere that this package runs.
  from array_record.python import array_record_module

  bad, first = {}, 0
  for shard in shards:
    try:
      reader = array_record_module.ArrayRecordReader(shard.path)
      found = reader.num_records()
      reader.close()
      reason = f"the file has {found} records; there should be {shard.size}"
    # The reader's own: it raises RuntimeError, ValueError, ...
    except Exception as error:
      found, reason = -1, f"the file cannot be read: {reason_of(error)}"
    if found != shard.size:
      bad |= dict.fromkeys(range(first, first + shard.take), reason)
    first += shard.take
  return bad


def _read_all(
  name: str,
  split: str,
  builder: tfds.core.DatasetBuilder,
  keys: tuple[str, str],
  shards: Sequence[Shard],
) -> tuple[tf.Tensor, tf.Tensor, dict[int, str]]:
  """A split as it lies in the files.

  Returns:
    The encoded pictures, string (n,), the labels, int32 (n,), and which
    examples cannot be read, and why: of those the picture is empty.
  """
  image_key, label_key = keys
  dataset = builder.as_dataset(
    split=split,
    decoders={image_key: tfds.decode.SkipDecoding()},
    # One file after the other: the order of files with random access.
    read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
  )
  dataset = dataset.map(
    lambda x: (x[image_key], tf.cast(x[label_key], tf.int32)),
    num_parallel_calls=os.cpu_count(),
    deterministic=True,
  ).with_options(without_autotuning())
  size = sum(shard.take for shard in shards)
  try:
    if builder.info.file_format is tfds.core.FileFormat.TFRECORD:
      tfrecord.require_room(shards)
    return *dataset.batch(size).get_single_element(), {}
  except tf.errors.OpError as error:
    found = None
    if builder.info.file_format is tfds.core.FileFormat.TFRECORD:
      found = _read_singly(builder.info.features, keys, shards)
    if found is None:
      raise BrokenDataError(
        f"data set {name!r}, split {split!r}: the files in {builder.data_dir} "
        f"cannot be read ({reason_of(error)})."
      ) from error
    if not found[2]:
      # For example a file system that was away for a moment.
      logging.warning(
        "Data set %s, split %s was read at the second attempt; at the first: "
        "%s", name, split, reason_of(error),
      )  # fmt: skip
    return found


def _read_singly(
  features: tfds.features.FeaturesDict,
  keys: tuple[str, str],
  shards: Sequence[Shard],
) -> tuple[tf.Tensor, tf.Tensor, dict[int, str]]:
  """`_read_all` of TFRecord files, each record by itself."""
  image_key, label_key = keys

  def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    example = features.deserialize_example(
      record, decoders={image_key: tfds.decode.SkipDecoding()}
    )
    return example[image_key], tf.cast(example[label_key], tf.int32)

  found = list(itertools.chain.from_iterable(map(tfrecord.read, shards)))
  lost = {
    i: record.reason
    for i, record in enumerate(found)
    if isinstance(record, tfrecord.Lost)
  }
  there = [i for i in range(len(found)) if i not in lost]
  records = tf.constant([found[i] for i in there], tf.string)
  parsed = tf.data.Dataset.from_tensor_slices(records).map(parse)
  pictures, labels = [b""] * len(found), [0] * len(found)
  for i, example in zip(there, attempts(parsed, len(there)), strict=True):
    if isinstance(example, tf.errors.OpError):
      lost[i] = reason_of(example)
    else:
      pictures[i], labels[i] = example
  return tf.constant(pictures), tf.constant(labels, tf.int32), lost


def _choose(candidates: Sequence[str], *preferred: str | None) -> str | None:
  """The first preferred candidate, else the only one, else None."""
  for key in preferred:
    if key in candidates:
      return key
  return candidates[0] if len(candidates) == 1 else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps TFDS from logging each of its steps."""
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.WARNING)
  try:
    yield
  finally:
    logging.set_verbosity(verbosity)
