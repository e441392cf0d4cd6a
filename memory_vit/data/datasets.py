"""Open splits of data sets: folders, lists, embeddings, shipped ones, TFDS."""

from memory_vit.config import EMBEDDINGS, Config
from memory_vit.data import (
  embedded,
  file_list,
  local,
  shipped,
  sources,
  subset,
  tfds,
)
from memory_vit.data.data_files import DataFiles
from memory_vit.data.quiet_tensorflow import tf
from memory_vit.data.reader import Reader
from memory_vit.data.sources import Source
from memory_vit.data.split_ref import (
  OF_A_DIRECTORY,
  SHIPPED,
  SplitRef,
  configured_splits,
)
from memory_vit.errors import DataError
from memory_vit.runtime import messages, processes


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
) -> Reader:
  """Open one split of a data set; download it first where TFDS can.

  The arguments are the attributes of a `SplitRef`.

  Raises:
    DataError: if it cannot be had, or is empty or unlabelled.
    BrokenDataError: of these, where more than `max_bad` records cannot be read.
  """
  ref = SplitRef(
    name, directory, split, cache_gib=cache_gib, max_bad=max_bad,
    stall_timeout=stall_timeout, download=download, trust_code=trust_data_code,
  )  # fmt: skip
  return open_reader(ref)


def open_split(config: Config, role: str, *, prepared: bool = False) -> Reader:
  """Open a split as a run of a configuration does; all processes must call.

  Args:
    config: of the run.
    role: "train", "validation" or "test".
    prepared: whether a data set of TFDS has to be there: nothing is downloaded.

  Raises:
    DataError: as `open_source`; where the configuration names no such split.
  """
  ref = configured_splits(config).get(role)
  if ref is None:
    raise DataError(f"config.data.{role} is empty, expected a split.")
  if prepared:
    require_prepared(ref)
  return open_on_all_processes(ref)


def open_on_all_processes(ref: SplitRef) -> Reader:
  """Open a split on every process; all must call.

  The first is done before the others begin: it may prepare the data set in a
  directory that all share. Raises as `open_source`.
  """
  return processes.process_0_first(lambda: open_reader(ref))


def open_reader(ref: SplitRef) -> Reader:
  """Open a split on this process; raise as `open_source`."""
  if not ref.name:
    raise DataError("no data set is named: set config.data.name.")
  return read_as(ref, _open_local(ref) or tfds.open_tfds(ref))


def read_as(ref: SplitRef, source: Source) -> Reader:
  """Read a source as a split is read; raise as `open_source`."""
  reader = Reader(source, max_bad=ref.max_bad, stall_timeout=ref.stall_timeout)
  if ref.subset:
    source = subset.choose(reader, ref.subset)
    reader = Reader(
      source, max_bad=ref.max_bad, stall_timeout=ref.stall_timeout
    )
  check_first_label(reader)
  return reader


def require_prepared(ref: SplitRef) -> None:
  """Refuse a data set of TFDS that opening would download.

  Raises:
    DataError: with the size of the download, and the command that prepares it.
  """
  if not _is_local(ref):
    tfds.require_prepared(ref)


def take_inventory(ref: SplitRef) -> DataFiles:
  """List the files of a split that is there; nothing of it is read.

  Raises:
    DataError: if it is not there. It is not prepared, or downloaded.
  """
  source = _open_local(ref)
  inventory = source.inventory if source else tfds.take_inventory(ref)
  return ref.subset.noted(inventory) if ref.subset else inventory


def _open_local(ref: SplitRef) -> Source | None:
  """Open a split that is no data set of TFDS; None for one that is."""
  if _is_local(ref) and ref.label:
    raise DataError(
      f"config.data.label is {messages.brief(ref.label)}: {ref.name!r} has one "
      "label alone, expected ''."
    )
  if ref.name == "folder":
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


def check_first_label(reader: Reader) -> None:
  """Refuse an unlabelled split; other labels are checked when they are read."""
  source = reader.source
  if source.embedded:  # all its labels are classes
    return
  for index in range(source.size):
    if index in reader.unreadable:
      continue
    try:
      _, label = source.fetch(tf.constant(index, tf.int64))
    # Outside a graph a reader's own exceptions come through.
    except Exception as error:
      reader.mark_unreadable({index: sources.reason_of(error)})
    else:
      # Its only row is that example.
      source.check_labels(label.numpy()[None], [index].__getitem__)
      return
  raise reader.nothing_readable()
