"""Open splits of folders, lists, embeddings, shipped data sets and TFDS."""

import dataclasses

from etils import epy

from memory_vit.config import EMBEDDINGS, Config
from memory_vit.data import subset
from memory_vit.data.data_files import DataFiles
from memory_vit.data.source import ExampleError
from memory_vit.data.split import Split
from memory_vit.data.split_ref import (
  OF_A_DIRECTORY,
  SHIPPED,
  SplitRef,
  configured_splits,
)
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.kinds import KINDS
from memory_vit.runtime import messages, processes

with epy.lazy_imports():  # TensorFlow is not needed for data in memory
  from memory_vit.data import embedded, file_list, local, shipped, tfds


def open_split(
  name: str,
  split: str,
  directory: str = "",
  cache_gib: float = 16.0,
  *,
  max_bad: int = 0,
  stall_timeout: float = 0.0,
  download: bool = True,
  trust_data_code: bool = False,
  kind: str = "classes",
  label: str = "",
  path: str = "",
) -> Split:
  """Open one split of a data set; TFDS downloads a missing data set first.

  Args:
    name: as `config.data.name`: "folder", "list", "embeddings", "digits",
      "digits:0-4", "glyphs:inverted", "glyphs:angle", or a TFDS name such as
      "cifar100".
    split: in the notation of TFDS, such as "train[:98%]" or "train+test".
    directory: as `config.data.dir`; "" is TFDS's default.
    cache_gib: maximum size of a TFDS split without random access, which is
      read into memory.
    max_bad: maximum number of unreadable examples to skip.
    stall_timeout: seconds without a batch after which the process is ended; 0
      sets no limit.
    download: whether TFDS may download and prepare a missing data set.
    trust_data_code: whether to run code that a TFDS data set names.
    kind: as `config.task.kind`: "classes", "labels" or "values".
    label: as `config.data.label`: features of TFDS, or columns of a table.
    path: as `config.data.path`: the column of paths of a table.

  Raises:
    DataError: if the split is unavailable or empty, or has no labels of `kind`.
    BrokenDataError: a `DataError`, if over `max_bad` records are unreadable.
  """
  ref = SplitRef(
    name, directory, split, cache_gib=cache_gib, max_bad=max_bad,
    stall_timeout=stall_timeout, download=download, trust_code=trust_data_code,
    kind=kind, label=label, path=path,
  )  # fmt: skip
  return open_ref(ref)


def open_run_split(
  config: Config, role: str, *, prepared: bool = False
) -> Split:
  """Open a split as a run of a configuration does; all processes must call.

  Args:
    config: the configuration of the run.
    role: "train", "validation" or "test".
    prepared: whether to refuse a TFDS data set that is not prepared yet,
      instead of downloading it.

  Raises:
    DataError: as `open_split`, or if no split is configured for `role`.
  """
  ref = configured_splits(config).get(role)
  if ref is None:
    raise DataError(f"config.data.{role} is empty, expected a split.")
  if prepared:
    require_prepared(ref)
  return open_on_all_processes(ref)


def open_on_all_processes(ref: SplitRef) -> Split:
  """Open a split on every process; all processes must call."""
  # Process 0 opens first, since it may prepare the data set for all processes.
  return processes.process_0_first(lambda: open_ref(ref))


def open_ref(ref: SplitRef) -> Split:
  """Open a split on this process, with the errors of `open_split`."""
  if not ref.name:
    raise DataError("no data set is named: set config.data.name.")
  return read_as(ref, open_whole(ref))


def open_whole(ref: SplitRef) -> Split:
  """Open a whole split; limits, subset and faults are left to `read_as`."""
  ref.require_kind(*KINDS)
  return _open_local(ref) or tfds.open_tfds(ref)


def read_as(ref: SplitRef, split: Split) -> Split:
  """Check an opened split, and apply the limits and the subset of `ref`."""
  for fault in split.faults:
    raise BrokenDataError(fault)
  if ref.class_names not in ((), split.class_names):
    split = split.numbered_as(ref.class_names)
  # All processes must choose the same subset, so forget unreadable examples
  # that only this process has found since the split was opened.
  split = dataclasses.replace(
    split,
    max_bad=ref.max_bad,
    stall_timeout=ref.stall_timeout,
    unreadable={},
  )
  split.mark_unreadable(split.broken)
  if ref.subset:
    split = subset.choose(split, ref.subset)
  check_first_label(split)
  return split


def require_prepared(ref: SplitRef) -> None:
  """Refuse a data set of TFDS that opening would download."""
  if not _is_local(ref):
    tfds.require_prepared(ref)


def describe(ref: SplitRef) -> tuple[tuple[str, ...], int | None]:
  """Return names of classes, labels or values, and the number of examples.

  Nothing is downloaded: the number is None for a data set of TFDS that is not
  prepared.
  """
  split = _open_local(ref)
  names, size = (split.class_names, split.size) if split else tfds.describe(ref)
  if ref.subset:
    chosen = ref.subset.first or ref.subset.per_class * len(names)
    size = chosen if size is None else min(size, chosen)
  return names, size


def find_data_files(ref: SplitRef) -> DataFiles:
  """List the files of a split; nothing is read, prepared or downloaded."""
  split = _open_local(ref)
  listed = split.data_files if split else tfds.find_data_files(ref)
  return ref.subset.noted(listed) if ref.subset else listed


def _open_local(ref: SplitRef) -> Split | None:
  """Return the opened split, or None if the data set must be opened by TFDS."""
  if ref.path and ref.name != "list":
    raise DataError(
      f"config.data.path is {messages.brief(ref.path)}, a column of a table, "
      f"but data set {messages.brief(ref.name)} has no columns: "
      "leave this option empty."
    )
  if _is_local(ref) and ref.label and ref.name != "list":
    raise DataError(
      f"config.data.label is {messages.brief(ref.label)}, but data set "
      f"{ref.name!r} offers no choice of labels: expected ''."
    )
  if ref.name == "folder":
    ref.require_kind("classes")
    return local.open_folder(ref)
  if ref.name == "list":
    return file_list.open_list(ref)
  if ref.name == EMBEDDINGS:
    return embedded.open_embeddings(ref)
  if ref.name.partition(":")[0] in SHIPPED:
    return shipped.open_shipped(ref)
  return None


def _is_local(ref: SplitRef) -> bool:
  return ref.name.partition(":")[0] in (*OF_A_DIRECTORY, *SHIPPED)


def check_first_label(split: Split) -> None:
  """Check the first readable label; others are checked when they are read."""
  if split.embedded:  # labels of embeddings were checked on opening
    return
  for index in range(split.size):
    if index in split.unreadable:
      continue
    try:
      _, label = split.source.read(index)
    except ExampleError as error:
      split.mark_unreadable({index: str(error)})
    else:
      # Check a single label. If it is wrong, the error names example `index`.
      split.check_labels(label[None], [index].__getitem__)
      return
  raise split.nothing_readable()
