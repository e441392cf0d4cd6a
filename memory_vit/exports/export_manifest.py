"""`manifest.json`, which says what lies beside it, for programs that serve.

It names outputs and classes, how images are prepared, of which backbone and
tasks the model was made, how far it was off, and the SHA-256 of all files.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit.errors import ExportError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task
from memory_vit.runtime import checksums, output_directory, paths
from memory_vit.runtime.messages import brief, escaped
from memory_vit.version import __version__

FILE = "manifest.json"
FORMAT_VERSION = 1
# 21,843 classes with their names take 2 MB.
_MAX_BYTES = 64 * 2**20
# How `EvalPreprocessing.interpolation` resizes.
_RESIZING = {
  "bilinear": "bilinear, half-pixel centres, without antialiasing",
  "bilinear_antialias": (
    "bilinear with antialiasing, as Pillow resizes uint8: the width, then the "
    "height, each rounded to 0..255; a longer side is rounded down"
  ),
  "bicubic": (
    "bicubic (a = -0.5) with antialiasing, as Pillow resizes uint8: the width, "
    "then the height, each rounded to 0..255; a longer side is rounded down"
  ),
}
# What takes part in making one of the files, where it is installed.
_PACKAGES = (
  "jax", "jaxlib", "flax", "numpy", "safetensors", "orbax-checkpoint",
  "tensorflow-cpu", "tensorflow", "jax2onnx", "onnx", "onnxruntime",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """An input or output of an exported function.

  Attributes:
    shape: numbers, and names of axes of any length.
    dtype: as NumPy calls it, or "string".
    meaning: of its values, for people.
  """

  shape: tuple[int | str, ...]
  dtype: str
  meaning: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
  """One way to call an exported model: {name: tensor} in, {name: tensor} out.

  Attributes:
    inputs: of the function.
    outputs: in order; an ONNX model returns them so.
  """

  inputs: Mapping[str, Tensor]
  outputs: Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport:
  """Description of an export, as `manifest.json` holds it.

  Attributes:
    format: "stablehlo", "saved_model", "onnx", "safetensors" or "orbax".
    dtype: of the computation.
    backbone: `BackboneId`, as a dictionary.
    preprocessing: `EvalPreprocessing`, as a dictionary, and how it resizes.
    tasks: name, classes, regime, digest and more of each.
    signatures: {name: how to call it}; none of files that are only arrays.
    batch_buckets: sizes of batches that are compiled, where not any size is.
    platforms: on which the file runs, where it names them.
    comparison: see `check.Comparison`; empty of files that are only arrays.
    versions: of the packages that wrote it.
    files: {path: {"bytes": ..., "sha256": ...}}.
  """

  format: str
  dtype: str
  backbone: Mapping[str, Any]
  preprocessing: Mapping[str, Any]
  tasks: Sequence[Mapping[str, Any]]
  signatures: Mapping[str, Signature] = dataclasses.field(default_factory=dict)
  batch_buckets: tuple[int, ...] = ()
  platforms: tuple[str, ...] = ()
  comparison: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  files: Mapping[str, Mapping[str, Any]] = dataclasses.field(
    default_factory=dict
  )


def describe(
  format: str, backbone: Backbone, tasks: Sequence[Task]
) -> ExportReport:
  """Report what is known before anything is written."""
  evaluation = tasks[0].spec.evaluation
  return ExportReport(
    format=format,
    dtype=backbone.config.dtype,
    backbone=dataclasses.asdict(backbone.id),
    preprocessing={
      **dataclasses.asdict(evaluation),
      "resizing": _RESIZING[evaluation.interpolation],
      "scaling": "(x - 127.5) / 127.5",
    },
    tasks=[_task(task) for task in tasks],
    versions=_versions(),
  )


def _task(task: Task) -> dict[str, Any]:
  spec = task.spec
  return {
    "name": spec.name,
    "num_classes": spec.num_classes,
    "class_names": list(spec.class_names),
    "regime": spec.regime,
    "cells": spec.cells,
    "attends_to": list(spec.attends_to),
    "digest": task.digest,
  }


def _versions() -> dict[str, str]:
  found = {"memory_vit": __version__, "python": platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def write(directory: Path, report: ExportReport) -> ExportReport:
  """Write `manifest.json` beside the files that it names; return the report."""
  paths = sorted(path for path in directory.rglob("*") if path.is_file())
  files = {
    path.relative_to(directory).as_posix(): {
      "bytes": path.stat().st_size,
      "sha256": checksums.file_digest(path),
    }
    for path in paths
  }
  report = dataclasses.replace(report, files=files)
  values = {
    "kind": "memory_vit export",
    "format_version": FORMAT_VERSION,
    **dataclasses.asdict(report),
  }
  text = json.dumps(values, indent=2, allow_nan=False) + "\n"
  (directory / FILE).write_text(text, encoding="utf-8")
  return report


def require_place(path: Path) -> None:
  """Refuse a directory that holds anything but an earlier export.

  Raises:
    ExportError: also for what is no directory.
  """
  if path.is_symlink() or (path.exists() and not path.is_dir()):
    raise ExportError(
      f"--out is {brief(str(path))}, which is a link or no directory: expected "
      "a name that is free, or a directory that an export wrote."
    )
  paths.require_replaceable(path, "--out", ExportError)
  if not path.is_dir():
    return
  try:
    other = foreign_file(path)
  except OSError as error:
    raise ExportError(
      f"--out is {brief(str(path))}, which cannot be read "
      f"({error.strerror or error}). Give another directory."
    ) from error
  if other:
    raise ExportError(
      f"--out is {brief(str(path))}, which holds {escaped(other)!r}, that "
      "no export wrote: it is left as it is. Give another directory."
    )


def foreign_file(path: Path) -> str | None:
  """A file in a directory that no export wrote; None where there is none.

  Raises:
    OSError: for a folder that cannot be read: nobody knows what is in it.
  """
  ours = _exported_files(path / FILE)
  for file in sorted(_files_below(path)):
    # Whoever looks at an export leaves something, which must not lock it.
    if ours and output_directory.is_by_the_way(file.name):
      continue
    name = file.relative_to(path).as_posix()
    if name not in ours:
      return name
  return None


def _files_below(path: Path) -> Iterator[Path]:
  """All files in a directory; a link is one, whatever it points to."""
  with os.scandir(path) as entries:
    for entry in entries:
      if entry.is_dir(follow_symlinks=False):
        yield from _files_below(Path(entry))
      else:
        yield Path(entry)


def _exported_files(file: Path) -> set[str]:
  """The files that a manifest names, and itself; none where it is no such."""
  try:
    if not file.is_file() or file.stat().st_size > _MAX_BYTES:
      return set()
    values = json.loads(file.read_bytes())
    if values["kind"] != "memory_vit export":
      return set()
    return {FILE, *values["files"]}
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return set()
