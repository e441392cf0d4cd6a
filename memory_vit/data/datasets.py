"""Batches of pictures, for training and for evaluation.

Training sees the examples number 0, 1, 2, ... without end. Everything about
number g follows from g and the seed: its epoch, which record of the source it
is, and how it is cropped. So the position in training is one number: nothing of
the input has to be saved in a checkpoint, resuming replays nothing, and the
examples of a step do not depend on how many processes share them.

That holds for unreadable examples too, where some are allowed: in training the
next readable record takes the place of one, whatever happened before; in
evaluation they do not count, and the result says how many they were.
"""

import sys

import tensorflow as tf

from memory_vit.config import TrainDataConfig
from memory_vit.data import local, pipeline, sources, tfds
from memory_vit.data.inventory import Inventory
from memory_vit.data.sources import Source
from memory_vit.data.tfds_trust import Access
from memory_vit.errors import DataError
from memory_vit.runtime import processes


def open_source(
  name: str,
  split: str,
  directory: str = "",
  cache_gib: float = 16.0,
  *,
  max_bad: int = 0,
  stall_timeout: float = 0.0,
  download: bool = True,
  trust_data_code: bool = False,
) -> Source:
  """Opens one split of a data set; downloads it first where TFDS can.

  Args:
    name: "folder": `directory`/SPLIT/CLASS/*.jpg (or png, webp, bmp), where the
      folders in train/ are the classes. "digits": the digits that come with
      scikit-learn, "digits:0-4" a range of them. Anything else is a TFDS name,
      such as "cifar100" or "sun397/tfds".
    split: in the notation of TFDS, such as "train[:98%]" or "train+test".
    directory: the image folder; or the TFDS data directory, or the directory of
      one prepared data set (with a dataset_info.json); "" is TFDS's default.
    cache_gib: greatest size of a TFDS split without random access, which is
      read into memory (and takes twice as much while it is read).
    max_bad: how many examples may be left out as they cannot be read.
    stall_timeout: seconds without a batch after which the process is ended, see
      `stall`; 0 is never.
    download: whether TFDS may fetch and prepare what is not there.
    trust_data_code: whether a TFDS set may name code, which is then run; see
      `tfds_trust`.

  Raises:
    DataError: if it cannot be had, or is empty or unlabelled.
    BrokenDataError: of these, where more than `max_bad` records cannot be read.
  """
  if not name:
    raise DataError("no data set is named: set config.data.name.")
  options = {"max_bad": max_bad, "stall_timeout": stall_timeout}
  if name == "folder":
    source = local.open_folder(split, directory, **options)
  elif name.partition(":")[0] == "digits":
    source = local.open_digits(name, split, **options)
  else:
    access = Access(download=download, trust_code=trust_data_code)
    source = tfds.open_tfds(
      name, split, directory, cache_gib, access, **options
    )
  _check_first_label(source)
  return source


def take_inventory(
  name: str, split: str, directory: str = "", *, trust_data_code: bool = False
) -> Inventory:
  """The inventory of a split that is there; nothing of it is read.

  Args:
    name: as in `open_source`; so are split and directory.
    split: see there.
    directory: see there.
    trust_data_code: likewise.

  Raises:
    DataError: if it is not there. It is not prepared, or downloaded.
  """
  if name == "folder":
    options = {"max_bad": sys.maxsize}
    return local.open_folder(split, directory, **options).inventory
  if name.partition(":")[0] == "digits":
    return local.open_digits(name, split).inventory
  access = Access(download=False, trust_code=trust_data_code)
  return tfds.take_inventory(name, split, directory, access)


def open_split(
  where: TrainDataConfig,
  split: str,
  stall_timeout: float,
  trust_data_code: bool = False,
) -> Source:
  """`open_source`, of a data set of a configuration; all processes must call.

  One is done before the others begin: it may be prepared on the way, in a
  directory that all share.

  Args:
    where: the data set.
    split: of it.
    stall_timeout: see `open_source`.
    trust_data_code: likewise.
  """
  return processes.process_0_first(
    lambda: open_source(
      where.name,
      split,
      where.dir,
      where.cache_gib,
      max_bad=where.max_bad,
      stall_timeout=stall_timeout,
      trust_data_code=trust_data_code,
    )
  )


def left_out(source: Source) -> list[int]:
  """Examples that could not be read so far; all processes must call.

  Each process meets those of its own share; from here on all know all.

  Raises:
    BrokenDataError: where they are more than may be left out.
  """
  if not source.max_bad:
    return []
  numbers = processes.union_over_processes(source.left_out)
  source.leave_out(dict.fromkeys(numbers, "another process could not read it"))
  return numbers


def _check_first_label(source: Source) -> None:
  """Refuses a split without labels, which has none from the beginning on.

  Other labels are checked as they come.
  """
  for index in range(source.size):
    if index in source.left_out:
      continue
    try:
      _, label = source.fetch(tf.constant(index, tf.int64))
    # Outside a graph a reader's own exceptions come through.
    except Exception as error:
      source.leave_out({index: sources.reason_of(error)})
    else:
      source.check_labels(label.numpy()[None], lambda _, index=index: index)
      return
  raise pipeline.nothing_readable(source)
