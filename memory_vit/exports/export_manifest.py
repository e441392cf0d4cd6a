"""Write `manifest.json`, which describes an export to programs that use it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit.errors import ExportError
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import Task
from memory_vit.runtime import checksums, files
from memory_vit.runtime.output_directory import (
  OutputDirectory,
  list_files,
  listed_in,
)
from memory_vit.version import __version__

FILE = "manifest.json"
FORMAT_VERSION = 1
_KIND = "memory_vit export"
DIRECTORY = OutputDirectory("--out", listed_in(FILE, _KIND), ExportError)
# {`EvalPreprocessing.interpolation`: its description in `manifest.json`}.
_RESIZING = {
  "bilinear": "bilinear, half-pixel centres, without antialiasing",
  "bilinear_antialias": (
    "bilinear with antialiasing, as Pillow resizes uint8: the width, then the "
    "height, pixels rounded to 0..255 after each; the length of the longer "
    "side is rounded down"
  ),
  "bicubic": (
    "bicubic (a = -0.5) with antialiasing, as Pillow resizes uint8: the width, "
    "then the height, pixels rounded to 0..255 after each; the length of the "
    "longer side is rounded down"
  ),
}
# Packages whose versions may influence the exported files.
_PACKAGES = (
  "jax", "jaxlib", "flax", "numpy", "safetensors", "orbax-checkpoint",
  "tensorflow-cpu", "tensorflow", "jax2onnx", "onnx", "onnxruntime",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """An input or output of an exported function."""

  shape: tuple[int | str, ...]  # a string stands for an axis of any length
  dtype: str  # name of a NumPy dtype, or "string"
  meaning: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
  """One way to call an exported model: {name: tensor} of inputs and outputs."""

  inputs: Mapping[str, Tensor]
  outputs: Mapping[str, Tensor]  # ordered like the outputs of an ONNX model


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport:
  """Description of an export: the content of `manifest.json`."""

  format: str
  dtype: str  # compute dtype of the model
  backbone: Mapping[str, Any]  # fields of `BackboneId`
  # Fields of `EvalPreprocessing`, and descriptions of resizing and scaling.
  preprocessing: Mapping[str, Any]
  tasks: Sequence[Mapping[str, Any]]
  activation: bool = False  # whether outputs pass through `TaskKind.activate`
  # {name: signature}; {} if the format stores only arrays, and no function.
  signatures: Mapping[str, Signature] = dataclasses.field(default_factory=dict)
  # Batch sizes that are compiled; () if a batch may have any size.
  batch_buckets: tuple[int, ...] = ()
  platforms: tuple[str, ...] = ()
  # Fields of `check.Comparison`; {} if the format stores only arrays.
  comparison: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # {path: {"bytes": ..., "sha256": ...}}
  files: Mapping[str, Mapping[str, Any]] = dataclasses.field(
    default_factory=dict
  )


def describe(
  format: str, backbone: Backbone, tasks: Sequence[Task]
) -> ExportReport:
  """Return the part of a report that does not depend on the written files."""
  preprocessing = tasks[0].spec.preprocessing
  return ExportReport(
    format=format,
    dtype=backbone.config.dtype,
    backbone=dataclasses.asdict(backbone.id),
    preprocessing={
      **dataclasses.asdict(preprocessing),
      "resizing": _RESIZING[preprocessing.interpolation],
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
    "kind": dataclasses.asdict(spec.kind),
    "class_names": list(spec.class_names),
    "regime": spec.regime,
    "cells": spec.cells,
    "attends_to": list(spec.attends_to),
    "digest": task.digest,
  }


def _versions() -> dict[str, str]:
  versions = {"memory_vit": __version__, "python": platform.python_version()}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return versions


def write(directory: Path, report: ExportReport) -> ExportReport:
  """List the files of an export in `manifest.json`; return the full report."""
  written = {
    name: {
      "bytes": (directory / name).stat().st_size,
      "sha256": checksums.file_digest(directory / name),
    }
    for name in list_files(directory)
  }
  report = dataclasses.replace(report, files=written)
  values = {
    "kind": _KIND,
    "format_version": FORMAT_VERSION,
    **dataclasses.asdict(report),
  }
  files.write_json(directory / FILE, values)
  return report
