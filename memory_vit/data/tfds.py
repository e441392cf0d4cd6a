"""Splits of TFDS data sets, with random access."""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from tensorflow_datasets.core import read_only_builder

from memory_vit.data import (
  graph_source,
  parallel,
  python_op,
  split_parts,
  tfds_labels,
  tfds_trust,
  tfrecord,
)
from memory_vit.data.data_files import DataFiles
from memory_vit.data.graph_source import GraphSource
from memory_vit.data.quiet_tensorflow import tf, tfds
from memory_vit.data.source import ExampleError
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef
from memory_vit.data.tfds_labels import Target
from memory_vit.data.tfrecord import Shard
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.runtime.messages import named

# An example takes at least 32 bytes, so files of N bytes hold at most N / 32
# examples. Refuse the files if dataset_info.json states more than
# N / 32 + 100,000 examples.
_LEAST_BYTES, _LOST_AT_MOST = 32, 100_000

# Advice on TFDS builders that are known to fail, or that need a user's files.
# {dir} is config.data.dir or TFDS's default. configs/*.py repeat the advice.
ADVICE = {
  "sun397": (
    "The host of SUN397 is gone: put SUN397.tar.gz and Partitions.zip into "
    "{dir}/downloads/manual and `pip install opencv-python-headless`, or use "
    "an image folder with --config=folder."
  ),
  "places365_small": (
    "With a copy at hand, put "
    "train_256_places365standard.tar, val_256.tar, test_256.tar and "
    "filelist_places365-standard.tar into {dir}/downloads/manual."
  ),
  "i_naturalist2017": (
    "Once prepared, it takes as much space again. TFDS does not read this data "
    "set from a manual directory: with the images at hand, use an image folder "
    "with --config=folder."
  ),
  "i_naturalist2021": (
    "TFDS cannot prepare it, because the TFDS package lacks a file of labels. "
    "To read a copy that was prepared elsewhere, add its version to the name: "
    "'i_naturalist2021:2.0.1'."
  ),
}

_NOT_DOWNLOADED = (
  "It is not prepared there, and is only downloaded if its name is given on "
  "the command line (--data=NAME)."
)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.WARNING)
  try:
    yield
  finally:
    logging.set_verbosity(verbosity)


@_quiet()
def open_tfds(ref: SplitRef) -> Split:
  """Open a split of a TFDS data set; prepare the data set if necessary."""
  builder = _prepared_builder(ref)
  info, sizes = builder.info, _sizes(builder)
  parts = split_parts.split_parts(ref.name, ref.split, sizes)
  target = tfds_labels.find_target(
    info.name, info.features, info.supervised_keys, ref.label, ref.kind
  )
  shards = _shards(builder, ref.split)
  _require_room(ref, shards)
  labels = None  # labels of files with random access are read later
  if tfds.core.FileFormat.ARRAY_RECORD in info.available_file_formats():
    bad = _bad_array_records(shards)
    source = _array_record_source(builder, ref.split, target, bad)
  else:
    _check_cache(ref, parts, builder)
    images, numbers, bad = _read_all(ref, builder, target, shards)
    source = graph_source.from_tensors(images, numbers)
    labels = numbers.numpy()
  split = Split(
    name=ref.name,
    split=ref.split,
    size=split_parts.count_examples(parts, sizes),
    class_names=target.class_names,
    kind=ref.kind,
    source=source,
    file_name=lambda index: tfrecord.place(shards, index),
    broken=bad,
    data_files=_data_files(ref, builder, parts, shards),
    labels=labels,
  )
  if labels is not None:
    split.check_labels(labels)
  return split


@_quiet()
def find_data_files(ref: SplitRef) -> DataFiles:
  """List the files of a prepared data set; no file is read."""
  builder = _found_builder(dataclasses.replace(ref, download=False))
  if not builder.is_prepared():
    raise DataError(f"data set {ref.name!r} is not in {builder.data_dir}.")
  parts = split_parts.split_parts(ref.name, ref.split, _sizes(builder))
  return _data_files(ref, builder, parts, _shards(builder, ref.split))


@_quiet()
def describe(ref: SplitRef) -> tuple[tuple[str, ...], int | None]:
  """Return (class names, number of examples, or None if not prepared)."""
  builder = _found_builder(ref)
  info, sizes = builder.info, _sizes(builder)
  target = tfds_labels.find_target(
    info.name, info.features, info.supervised_keys, ref.label, ref.kind
  )
  if not sizes:
    return target.class_names, None
  parts = split_parts.split_parts(ref.name, ref.split, sizes)
  return target.class_names, split_parts.count_examples(parts, sizes)


def _data_files(
  ref: SplitRef,
  builder: tfds.core.DatasetBuilder,
  parts: Sequence[tuple[str, slice]],
  shards: Sequence[Shard],
) -> DataFiles:
  """Return the local files of a split, and facts about its data set."""
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
  if ref.label:
    facts["label"] = ref.label
  # Leave out the kind "classes": then the facts equal those of older versions,
  # which recorded no kind.
  if ref.kind != SplitRef.kind:
    facts["kind"] = ref.kind
  files = {
    os.path.basename(shard.path): shard.path
    for shard in shards
    if "://" not in shard.path
  }
  return DataFiles(facts=facts, files=files)


def _sizes(builder: tfds.core.DatasetBuilder) -> dict[str, int]:
  return {key: s.num_examples for key, s in builder.info.splits.items()}


def _require_room(ref: SplitRef, shards: Sequence[Shard]) -> None:
  """Raise if shards are irregular files, or too small for their examples."""
  local = [pathlib.Path(s.path) for s in shards if "://" not in s.path]
  for path in local:
    if path.exists() and not path.is_file():
      raise BrokenDataError(f"{ref}: {path} is not a regular file.")
  total = sum(path.stat().st_size for path in local if path.exists())
  most = total // _LEAST_BYTES + _LOST_AT_MOST
  size = sum(shard.take for shard in shards)
  if len(local) == len(shards) and size > most:
    raise BrokenDataError(
      f"{ref}: dataset_info.json states {size:,} examples, but the files "
      f"have only {total:,} bytes in all. Put back the files that "
      "belong to the data set, or prepare the data set again."
    )


def _shards(builder: tfds.core.DatasetBuilder, split: str) -> list[Shard]:
  """Return the files of a split, in the order in which they are read."""
  return [
    Shard(str(file.filename), file.skip, file.take, file.examples_in_shard)
    for file in builder.info.splits[split].file_instructions
  ]


@_quiet()
def require_prepared(ref: SplitRef) -> None:
  """Raise if a data set is not prepared; a dry run must not download it."""
  _require_prepared(ref, _found_builder(ref), "a dry run")


def _prepared_builder(ref: SplitRef) -> tfds.core.DatasetBuilder:
  builder = _found_builder(ref)
  if not ref.download:
    return builder
  if jax.distributed.is_initialized():
    _require_prepared(ref, builder, "a distributed run")
  try:
    if not builder.is_prepared():
      # Log the advice first, because TFDS may try for minutes to reach a host.
      logging.warning(
        "Preparing data set %s in %s%s. %s", ref.name, builder.data_dir,
        _download_size(builder), _advice(ref),
      )  # fmt: skip
      builder.download_and_prepare(file_format=_file_format())
  # A builder downloads, unpacks and parses, so it may raise exceptions of any
  # type. Each exception means that the data set is not available.
  except Exception as error:
    raise _not_provided(ref, error) from error
  return builder


def _require_prepared(
  ref: SplitRef, builder: tfds.core.DatasetBuilder, how: str
) -> None:
  if builder.is_prepared():
    return
  where = f", data_dir={ref.dir!r}" if ref.dir else ""
  raise DataError(
    f"data set {ref.name!r} is not prepared in {builder.data_dir}"
    f"{_download_size(builder)}, and {how} downloads nothing. Prepare it once: "
    '`python -c "import tensorflow_datasets as tfds; '
    f"tfds.builder({ref.name!r}{where}).download_and_prepare("
    f'file_format={_file_format()!r})"`. {_advice(ref)}'.rstrip()
  )


def _download_size(builder: tfds.core.DatasetBuilder) -> str:
  """Describe the size of the download; "" if TFDS does not state it."""
  files = (builder.url_infos or {}).values()
  size = tfds.core.units.Size(sum(file.size for file in files))
  return f" (a download of {size})" if size else ""


def _file_format() -> str | None:
  """Return "array_record" if it is installed; None means TFDS's default."""
  return "array_record" if importlib.util.find_spec("array_record") else None


def _found_builder(ref: SplitRef) -> tfds.core.DatasetBuilder:
  """Return the TFDS builder of a data set, whether it is prepared or not."""
  try:
    folder = pathlib.Path(ref.dir).expanduser()
    if ref.dir and (folder / "dataset_info.json").is_file():
      if not ref.trust_code:
        tfds_trust.require_own_features(folder)
      return tfds.builder_from_directory(folder)
    if not ref.trust_code:
      tfds_trust.require_no_code(ref.name, ref.dir)
    if not ref.download:
      # Read only local files; `tfds.builder` would search the network.
      return read_only_builder.builder_from_files(
        ref.name, data_dir=ref.dir or None
      )
    return tfds.builder(ref.name, data_dir=ref.dir or None)
  except DataError:
    raise
  except Exception as error:  # a builder may raise any error
    raise _not_provided(ref, error) from error


def _not_provided(ref: SplitRef, error: Exception) -> DataError:
  problem = f"TFDS cannot provide data set {ref.name!r} in {_place(ref)}"
  advice = _advice(ref) if ref.download else _NOT_DOWNLOADED
  return DataError(f"{problem} ({named(error)}). {advice}".rstrip())


def _place(ref: SplitRef) -> str:
  return ref.dir or "~/tensorflow_datasets"


def _advice(ref: SplitRef) -> str:
  advice = ADVICE.get(re.split(r"[/:]", ref.name)[0], "")
  return advice.format(dir=_place(ref))


def _array_record_source(
  builder: tfds.core.DatasetBuilder,
  split: str,
  target: Target,
  bad: Mapping[int, str],
) -> GraphSource:
  """Return a source that reads ArrayRecord files by index.

  Python reads the bytes of a record, and TensorFlow parses the record. The
  source refuses the examples in `bad`, {index: reason}. The file of such an
  example is broken or has a wrong number of records, so reading the example by
  its index could return another example.
  """
  records = builder.as_data_source(
    split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
  )

  def read(index: int) -> bytes:
    if int(index) in bad:
      raise ValueError(bad[int(index)])
    return records[index]

  def fetch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    (record,) = python_op.call(read, [index], [tf.string])
    return _parsed(tf.ensure_shape(record, ()), builder.info.features, target)

  return GraphSource(fetch)


def _parsed(
  record: tf.Tensor, features: tfds.features.FeaturesDict, target: Target
) -> tuple[tf.Tensor, tf.Tensor]:
  """Parse a record; return (encoded image, label)."""
  example = features.deserialize_example(record, decoders=_encoded(features))
  return target.take(example)


def _encoded(features: tfds.features.FeaturesDict) -> dict[str, Any]:
  """Return decoders that leave all images encoded."""
  return {
    key: tfds.decode.SkipDecoding()
    for key, feature in features.items()
    if isinstance(feature, tfds.features.Image)
  }


def _check_cache(
  ref: SplitRef,
  parts: Sequence[tuple[str, slice]],
  builder: tfds.core.DatasetBuilder,
) -> None:
  """Raise if a split that is read into memory is larger than `cache_gib`."""
  splits = builder.info.splits
  sizes = _sizes(builder)
  # Estimate the bytes of a part from its number of examples, because TFDS
  # states bytes only for whole splits.
  needed = sum(
    splits[key].num_bytes * len(range(sizes[key])[part]) / sizes[key]
    for key, part in parts
  )
  if needed > ref.cache_gib * 2**30:
    raise DataError(
      f"{ref} takes {needed / 2**30:.1f} GiB, but config.data.cache_gib "
      f"(--cache_gib of `evaluate`) allows {ref.cache_gib:g} GiB. The split is "
      f"read into memory, because {builder.info.file_format.value} files have "
      "no random access. "
      "Raise the limit, or convert the files once: `tfds convert_format "
      f"--dataset_version_dir={builder.data_dir} "
      "--out_file_format=array_record` (needs `pip install apache-beam "
      "mlcroissant`)."
    )


def _bad_array_records(shards: Sequence[Shard]) -> dict[int, str]:
  """Return {index: reason} for the examples in broken or incomplete files."""
  # Import array_record here, because it is installed on Linux only.
  from array_record.python import array_record_module

  bad: dict[int, str] = {}
  first = 0
  for shard in shards:
    try:
      reader = array_record_module.ArrayRecordReader(shard.path)
      count = reader.num_records()
      reader.close()
      reason = f"the file has {count} records; there should be {shard.size}"
    # For a broken file, the reader may raise RuntimeError, ValueError, etc.
    except Exception as error:
      count, reason = (
        -1,
        f"the file cannot be read: {parallel.reason_of(error)}",
      )
    if count != shard.size:
      bad |= dict.fromkeys(range(first, first + shard.take), reason)
    first += shard.take
  return bad


def _read_all(
  ref: SplitRef,
  builder: tfds.core.DatasetBuilder,
  target: Target,
  shards: Sequence[Shard],
) -> tuple[tf.Tensor, tf.Tensor, dict[int, str]]:
  """Read a split into memory, in the order of its files.

  Return (images, labels, {index: reason} of unreadable examples). `images` is
  string (n,): each item is an encoded image, or b"" if the image is unreadable.
  `labels` is as in `Split`.
  """
  features = builder.info.features
  dataset = builder.as_dataset(
    split=ref.split,
    decoders=_encoded(features),
    # Read one file after the other, so that examples are in the order of files.
    read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
  )
  dataset = parallel.parallel_map(dataset, target.take)
  size = sum(shard.take for shard in shards)
  is_tfrecord = builder.info.file_format is tfds.core.FileFormat.TFRECORD
  try:
    if is_tfrecord:
      tfrecord.require_room(shards)
    return *dataset.batch(size).get_single_element(), {}
  except tf.errors.OpError as error:
    if not is_tfrecord:
      raise BrokenDataError(
        f"{ref}: the files in {builder.data_dir} cannot be read "
        f"({parallel.reason_of(error)})."
      ) from error
    result = _read_singly(features, target, shards)
    if not result[2]:
      # No record is broken: perhaps a file system was unavailable for a moment.
      logging.warning(
        "Data set %s, split %s was read at the second attempt; at the first: "
        "%s", ref.name, ref.split, parallel.reason_of(error),
      )  # fmt: skip
    return result


def _read_singly(
  features: tfds.features.FeaturesDict,
  target: Target,
  shards: Sequence[Shard],
) -> tuple[tf.Tensor, tf.Tensor, dict[int, str]]:
  """Return the same tuple as `_read_all`, but read records one by one."""
  items = list(itertools.chain.from_iterable(map(tfrecord.read, shards)))
  lost = {
    i: record.reason
    for i, record in enumerate(items)
    if isinstance(record, tfrecord.CorruptRecord)
  }
  indices = [i for i in range(len(items)) if i not in lost]
  records = tf.constant([items[i] for i in indices], tf.string)
  parsed = parallel.attempts(
    tf.data.Dataset.from_tensor_slices(records),
    lambda record: _parsed(record, features, target),
  )
  images, labels = [b""] * len(items), np.zeros(len(items), target.label_dtype)
  for i, example in zip(indices, parsed, strict=True):
    if isinstance(example, ExampleError):
      lost[i] = str(example)
    else:
      images[i], labels[i] = example
  return tf.constant(images), tf.constant(labels), lost
