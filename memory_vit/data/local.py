"""Open image folders on this disk as data sets."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from memory_vit.data import image_paths, labels, split_parts
from memory_vit.data.split import Split
from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import BrokenDataError, DataError
from memory_vit.images import image_files
from memory_vit.kinds.written import name_of
from memory_vit.runtime.messages import escaped, name_list, utf8
from memory_vit.runtime.paths import local


def open_folder(ref: SplitRef) -> Split:
  """Open a split of an image folder, in which images are SPLIT/CLASS/IMAGE."""
  root = local(ref.dir or ".", "the image folder", DataError)
  splits = _find_splits(root, ref)
  class_names = labels.in_order(splits["train"].images)
  label_of = {class_name: i for i, class_name in enumerate(class_names)}
  sizes = {
    key: sum(map(len, split.images.values())) for key, split in splits.items()
  }
  chosen, skipped = [], {}
  irregular: dict[str, str] = {}
  faults: list[str] = []
  for key, part in split_parts.split_parts(ref.name, ref.split, sizes):
    split = splits[key]
    faults += _class_faults(root / key, split.images, class_names)
    labelled = [
      (file, label_of[name])
      for name, images in split.images.items()
      for file in images
      if name in label_of
    ]
    chosen += image_paths.shuffled(labelled)[part]
    irregular |= split.irregular
    skipped[key] = split.skipped
  opened = image_paths.split_of(
    ref, root, chosen, class_names=class_names, irregular=irregular,
    skipped=[*skipped.values()],
  )  # fmt: skip
  return dataclasses.replace(opened, faults=tuple(faults))


@dataclasses.dataclass(frozen=True)
class _Split:
  """The images of a split, as paths relative to the image folder.

  Attributes:
    images: {class: its images}.
    irregular: {image that is not a regular file: why it cannot be read}.
    skipped: a line that counts the files that are not images of a class; "" if
      there are no such files.
  """

  images: dict[str, list[str]]
  irregular: dict[str, str]
  skipped: str


def _find_splits(root: pathlib.Path, ref: SplitRef) -> dict[str, _Split]:
  """Return {split: its images} for the splits in `ref.split` and for train/.

  The folders in train/ name the classes. If a split in `ref.split` is missing,
  return all splits, so that a later error can list them.
  """
  if not ref.dir or not os.path.isdir(root):
    raise DataError(
      f"image folder {ref.dir!r} is not there: set config.data.dir to a "
      "directory that holds train/CLASS/*.jpg."
    )
  existing = {folder.name: folder for folder in _folders(root)}
  if "train" not in existing:
    raise DataError(
      f"image folder {ref.dir!r} has no train/: expected train/CLASS/*.jpg. "
      f"The image folder has {name_list([*existing]) or 'no folders'}."
    )
  wanted = {"train", *split_parts.split_names(ref.split)}
  if not wanted <= existing.keys():
    wanted = {*existing}
  return {key: _find_images(existing[key]) for key in existing if key in wanted}


def _folders(root: pathlib.Path) -> list[pathlib.Path]:
  """List the folders in `root`; raise if the name of a folder is not UTF-8."""
  try:
    with os.scandir(root) as entries:
      names = sorted(
        entry.name
        for entry in entries
        if not image_files.is_hidden(entry.name)
        and image_files.holds(entry.is_dir)
      )
  except OSError as error:
    raise _closed(str(root), error.strerror) from error
  for name in names:
    if utf8(name) != name:
      raise BrokenDataError(
        f"the name of the folder {utf8(str(root / name))} is not "
        "UTF-8, so it cannot name a class or a split: rename the folder."
      )
  return [root / name for name in names]


def _find_images(folder: pathlib.Path) -> _Split:
  """Find the images of a split, at any depth below the folders of classes."""
  images: dict[str, list[str]] = {
    name_of(path.name): [] for path in _folders(folder)
  }
  walk = image_files.walk(str(folder))
  for path, why in walk.closed.items():
    raise _closed(path, why)
  start = len(f"{folder}/")
  from_root = start - len(f"{folder.name}/")
  outside = []
  for path in walk.images:
    name, slash, _ = path[start:].partition("/")
    if slash:
      images[name_of(name)].append(path[from_root:])
    else:
      outside.append(path)
  kinds = {
    "hidden": walk.hidden,
    "with other suffixes": walk.others,
    "linked to a folder that is read elsewhere": walk.loops,
    "outside of class folders": outside,
  }
  counts = [
    f"{len(paths):,} {kind} "
    f"({name_list([escaped(path[start:]) for path in paths], 3)})"
    for kind, paths in kinds.items()
    if paths
  ]
  return _Split(
    images,
    {p[from_root:]: image_paths.why_irregular(p) for p in walk.irregular},
    f"{escaped(str(folder))}: skipped {', '.join(counts)}" if counts else "",
  )


def _closed(path: str, why: str | None) -> BrokenDataError:
  return BrokenDataError(f"the folder {escaped(path)} cannot be read ({why}).")


def _class_faults(
  folder: pathlib.Path,
  files: Mapping[str, Sequence[str]],
  classes: Sequence[str],
) -> Iterator[str]:
  """Yield error texts on classes that train/ lacks, or that have no images."""
  if unknown := sorted(set(files) - set(classes)):
    yield f"{folder} has classes that train/ does not have: {unknown}."
  if empty := sorted(name for name, images in files.items() if not images):
    suffixes = ", ".join(image_files.SUFFIXES)
    yield f"{folder} has no images ({suffixes}) of classes {empty}."
