"""State which splits of data sets a run opens, and how to read them."""

import dataclasses
import functools

from memory_vit.config import (
  EMBEDDINGS,
  Config,
  DataConfig,
  data_seed,
)
from memory_vit.data.data_files import DataFiles
from memory_vit.errors import DataError
from memory_vit.runtime import messages

# Data sets that need no download, because installed packages contain them. A
# colon and a range or variant may follow the name, as in "digits:0-4".
SHIPPED = ("digits", "glyphs")
# Names that do not identify a data set, so messages also name its directory.
OF_A_DIRECTORY = ("folder", "list", EMBEDDINGS)


@dataclasses.dataclass(frozen=True)
class Subset:
  """Part of a split that is chosen by a seed; see `subset.choose`.

  Attributes:
    per_class: number of examples of each class; 0 if `first` is used.
    first: number of examples of any class; 0 if `per_class` is used.
    seed: random seed of the choice.
  """

  per_class: int = 0
  first: int = 0
  seed: int = 0

  def __str__(self) -> str:
    if self.per_class:
      return f"{self.per_class:,} of each class (seed {self.seed})"
    return f"{self.first:,} examples (seed {self.seed})"

  def noted(self, files: DataFiles) -> DataFiles:
    """Return the files of the whole split, with this subset in the facts."""
    facts = {**files.facts, "chosen": dataclasses.asdict(self)}
    return dataclasses.replace(files, facts=facts)


@dataclasses.dataclass(frozen=True)
class SplitRef:
  """Reference to a split of a data set, with options for reading it.

  Attributes:
    name: "folder": all images below `dir`/SPLIT/CLASS/ (`image_files.walk`);
      the folders in train/ are the classes. "list": the images in the lines
      PATH LABEL of `dir`/SPLIT.txt, or in a table such as SPLIT.csv.
      "embeddings": the rows that `embed` wrote to `dir`/SPLIT. "digits": the
      digits that come with scikit-learn; "digits:0-4": only the digits 0 to 4.
      "glyphs:inverted": characters that come with this package;
      "glyphs:angle": rotated characters, whose angles are the labels. All other
      names are TFDS names, such as "cifar100" or "sun397/tfds".
    dir: directory of "folder", "list" or "embeddings"; or the TFDS data
      directory, or the directory of one prepared data set (with a
      dataset_info.json); "" is TFDS's default.
    split: split in the notation of TFDS, as "train[:98%]" or "train+test".
    cache_gib: maximum size of a TFDS split without random access, which is
      read into memory (and takes twice as much while it is read).
    max_bad: maximum number of unreadable examples to skip.
    stall_timeout: seconds without a batch after which the process is ended, see
      `watchdog`; 0 sets no limit.
    download: whether TFDS may download and prepare a missing data set.
    trust_code: whether to run code that TFDS data sets name, see `tfds_trust`.
    label: the label of a TFDS data set that has several, see `tfds_labels`, or
      columns of a table; several names are separated by commas.
    path: the column of paths of a table.
    kind: kind of the labels, see `TaskKind`: "classes", "labels" or "values".
    class_names: classes in the order of a task; () keeps the data set's order.
    subset: the chosen part; None takes all.
  """

  name: str
  dir: str
  split: str
  cache_gib: float = 16.0
  max_bad: int = 0
  stall_timeout: float = 0.0
  download: bool = True
  trust_code: bool = False
  label: str = ""
  path: str = ""
  kind: str = "classes"
  class_names: tuple[str, ...] = ()
  subset: Subset | None = None

  @classmethod
  def of(
    cls,
    data: DataConfig,
    split: str,
    *,
    stall_timeout: float = 0.0,
    trust_code: bool = False,
    kind: str = "classes",
  ) -> "SplitRef":
    """Return the reference to a split of the configured data set."""
    return cls(
      data.name, data.dir, split,
      cache_gib=data.cache_gib, max_bad=data.max_bad,
      stall_timeout=stall_timeout, trust_code=trust_code,
      label=data.label if isinstance(data, DataConfig) else "",
      path=data.path if isinstance(data, DataConfig) else "",
      kind=kind,
    )  # fmt: skip

  def __str__(self) -> str:
    return f"data set {self.name!r}, split {self.split!r}"

  def require_kind(self, *kinds: str) -> None:
    """Raise `DataError` unless `kind` is one of the `kinds` of the data set."""
    if self.kind not in kinds:
      raise DataError(
        f"config.task.kind is {self.kind!r}, but data set "
        f"{messages.brief(self.name)} has {' or '.join(kinds)}: expected "
        f"{' or '.join(map(repr, kinds))}."
      )


def training_split(ref: SplitRef, config: Config) -> SplitRef:
  """Reduce the training split to the configured subset, if there is one."""
  data = config.data
  if not data.per_class and not data.first:
    return ref
  subset = Subset(data.per_class, data.first, data_seed(config))
  return dataclasses.replace(ref, subset=subset)


def configured_splits(config: Config) -> dict[str, SplitRef]:
  """Return {role, such as "train": configured split}, training split first."""
  upstream = config.upstream
  ref = functools.partial(
    SplitRef.of,
    stall_timeout=config.stall_timeout,
    trust_code=config.trust_data_code,
  )
  refs = {
    role: ref(config.data, split, kind=config.task.kind)
    for role in ("train", "validation", "test")
    if (split := getattr(config.data, role))
  }
  if "train" in refs:
    refs["train"] = training_split(refs["train"], config)
  if upstream.name:
    refs["upstream"] = dataclasses.replace(
      ref(config.data, upstream.split),
      name=upstream.name,
      dir=upstream.dir,
      label="",
      path="",
    )
  return refs
