"""Describes what a file or directory holds: a backbone, a task, several tasks.

  memory-vit inspect BACKBONE_OR_TASK [--labels] [--json]

A task is described without loading its backbone. Its arrays are compared with
the SHA-256 in its `task.json`; the exit status is 2 if anything is damaged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epy

from memory_vit.commands.command_line import Parser
from memory_vit.commands.console import run_command, show
from memory_vit.errors import TaskError
from memory_vit.kinds import find_metric
from memory_vit.kinds.classes import tells_top5
from memory_vit.runtime import bucket, hub
from memory_vit.runtime.messages import brief, escaped
from memory_vit.runtime.paths import as_path, place
from memory_vit.runtime.tables import aligned, table

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit.backbones import describe as backbone_files
  from memory_vit.backbones import hub_models, model_files
  from memory_vit.model import backbone as backbones
  from memory_vit.tasks import array_files, find, store

if TYPE_CHECKING:
  from memory_vit.backbones.describe import BackboneReport
  from memory_vit.model.task import EvalPreprocessing, TaskSpec
  from memory_vit.tasks.store import TaskReport

_FIRST_LABELS = 10  # number of class names to show without --labels
_DATA_KEYS = ("name", "dir", "train", "validation", "test")
_SHARES = ("chance", "majority")
# Metrics of a training run that get no row here, because other rows show them.
_SHOWN_ELSEWHERE = ("name", "kind", "regime", "cells", "trainable_params")


def main(argv: Sequence[str]) -> int:
  """Run the command; return its exit status."""
  return run_command(lambda: _inspect(_parser().parse(argv)))


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit inspect",
    description="Describes a backbone file or a task directory.",
  )
  parser.add_argument(
    "path",
    help="a backbone (.npz file, its URL, short name or model directory); a "
    "task directory or file; a directory of tasks, such as WORKDIR/tasks; or "
    "hf://OWNER/NAME of a backbone or of tasks",
  )
  parser.switch("--labels", "show all class names")
  parser.switch("--json", "print everything as one JSON object")
  return parser


def _inspect(arguments: argparse.Namespace) -> int:
  if _is_backbone(arguments.path):
    report = backbone_files.inspect_backbone(arguments.path)
    values = _backbone_json(report)
    show(_to_json(values) if arguments.json else _backbone_text(report))
    return 0
  reports, errors = _try_tasks(find.task_paths(arguments.path))
  if arguments.json:
    show(_to_json(_tasks_json(arguments.path, reports, errors)))
  elif reports:
    show("\n\n\n".join(_task_text(r, arguments.labels) for r in reports))
  for error in errors.values():
    show(f"error: {error}", sys.stderr)
  damaged = any(report.damage for report in reports)
  return 2 if errors or damaged else 0


def _is_backbone(source: str) -> bool:
  """Return whether `source` is a backbone, and not a task.

  A safetensors file is a task, unless config.json is in the same directory.
  """
  if hub.is_address(source):
    return hub_models.is_model(source) and hub_models.has_config(source)
  path = place(source, "the path", TaskError)
  if path.is_dir():
    return model_files.holds_model(path)
  if bucket.is_in(path) and not path.exists():
    raise TaskError(f"{escaped(source)}: there is nothing at this address.")
  is_task = array_files.is_single_file(path) and path.is_file()
  return not is_task or path.with_name(model_files.CONFIG).is_file()


def _to_json(values: Mapping[str, Any]) -> str:
  """Return standard JSON: numbers that are not finite become null."""
  return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _finite(inner) for key, inner in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(inner) for inner in value]
  not_finite = isinstance(value, float) and not math.isfinite(value)
  return None if not_finite else value


def _try_tasks(
  paths: Sequence[Path],
) -> tuple[list[TaskReport], dict[str, str]]:
  """Inspect tasks; return (reports, {path of an unreadable task: error})."""
  reports, errors = [], {}
  for path in paths:
    try:
      reports.append(store.inspect_task(path))
    except TaskError as error:
      errors[str(path)] = str(error)
  return reports, errors


def _tasks_json(
  source: str, reports: Sequence[TaskReport], errors: Mapping[str, str]
) -> dict[str, Any]:
  """Return the JSON object of a task, or of a directory of tasks."""
  tasks: list[dict[str, Any]] = [
    {"kind": "task", **dataclasses.asdict(r), "verified": not r.damage}
    for r in reports
  ]
  tasks += [
    {"kind": "task", "path": path, "error": error}
    for path, error in errors.items()
  ]
  root = as_path(source).expanduser()
  if root.is_file() or (root / "task.json").is_file():
    return tasks[0]
  place = source if hub.is_address(source) else str(root)
  return {"kind": "tasks", "path": place, "tasks": tasks}


def _task_text(report: TaskReport, labels: bool) -> str:
  spec, backbone = report.spec, report.spec.backbone
  lines = aligned(
    [
      ("task", spec.name),
      ("path", escaped(report.path)),
      (spec.kind.name, _labels(spec)),
      *spec.kind.rows(),
      ("regime", spec.regime),
      *(row for part in spec.learned.parts for row in part.rows(spec)),
      ("attends to", ", ".join(spec.attends_to) or "no other task"),
      ("preprocessing", _preprocessing(spec.preprocessing)),
      ("backbone", f"{escaped(backbone.variant)}, {backbone.image_size} px, "
                   f"gelu {escaped(backbone.gelu)}"),
      ("", backbone.fingerprint),
      *_provenance(report.provenance, spec),
      ("parameters", f"{report.parameters:,}"),
      ("arrays", f"DAMAGED: {report.damage}" if report.damage else "verified"),
    ]
  )  # fmt: skip
  rows = [
    (name, _dimensions(array.shape), array.dtype, array.sha256[:16])
    for name, array in report.arrays.items()
  ]
  header = ("array", "shape", "dtype", "SHA-256 begins")
  text = f"{lines}\n\n{table(header, rows)}"
  if labels and spec.class_names:
    text += f"\n\n{_all_labels(spec)}"
  return text


def _all_labels(spec: TaskSpec) -> str:
  """Return a table with a row for each class, label or value of a task."""
  header, rows = spec.kind.kind.outputs_table(spec.kind, spec.class_names)
  return table(tuple(header), [tuple(map(escaped, row)) for row in rows])


def _preprocessing(preprocessing: EvalPreprocessing) -> str:
  text = f"{preprocessing.image_size} px, {preprocessing.crop}"
  if preprocessing.resize:
    text += f", shorter side to {preprocessing.resize} px"
  if preprocessing.interpolation != "bilinear":
    text += f", {preprocessing.interpolation}"
  return text


def _labels(spec: TaskSpec) -> str:
  """Return a text: number of outputs, and names of the first outputs."""
  if not spec.class_names:
    return f"{spec.num_classes}, names unknown"
  first = ", ".join(map(escaped, spec.class_names[:_FIRST_LABELS]))
  hidden = spec.num_classes - _FIRST_LABELS
  more = f", and {hidden} more (--labels)" if hidden > 0 else ""
  return f"{spec.num_classes}: {first}{more}"


def _provenance(provenance: Any, spec: TaskSpec) -> list[tuple[str, str]]:
  """Return (name, text) rows about the training run and its data."""
  if not provenance:
    return [("provenance", "unknown: not from a training run")]
  metrics = _mapping(provenance, "metrics")
  data = _mapping(_mapping(provenance, "config"), "data")
  rows = [
    (escaped(key), _number(value, is_share=key in _SHARES))
    for key, value in metrics.items()
    if key not in _SHOWN_ELSEWHERE
    and value is not None
    and not isinstance(value, Mapping | list)
  ]
  for split in ("val", "test"):
    rows += _scores(split, _mapping(metrics, split), spec)
  known = [f"{k} {brief(data[k])}" for k in _DATA_KEYS if data.get(k)]
  return rows + ([("data", ", ".join(known))] if known else [])


def _mapping(values: Any, key: str) -> Mapping[str, Any]:
  inner = values.get(key) if isinstance(values, Mapping) else None
  return inner if isinstance(inner, Mapping) else {}


def _scores(
  split: str, scores: Mapping[str, Any], spec: TaskSpec
) -> list[tuple[str, str]]:
  """Return (name, text) rows about a split: metrics, loss, image counts."""
  hidden = ("score",) if tells_top5(spec.num_classes) else ("score", "top5")
  values = {**_mapping(scores, "metrics"), **scores}
  return [
    (
      f"{split}_{escaped(key)}",
      _number(value, is_share=bool(metric and metric.is_share)),
    )
    for key, value in values.items()
    for metric in [find_metric(key)]
    if key not in hidden
    and value is not None
    and not isinstance(value, Mapping | list)
    and scores.get("examples") != 0  # a missing split has 0 examples
  ]


def _number(value: Any, *, is_share: bool) -> str:
  if isinstance(value, float) and is_share:
    return f"{100 * value:.2f} %"
  return f"{value:,}" if type(value) is int else escaped(str(value))


def _backbone_json(report: BackboneReport) -> dict[str, Any]:
  config = dataclasses.asdict(report.config)
  del config["dtype"], config["platform"]  # chosen at loading, not stored
  if not report.states_config:
    del config["gelu"]  # the file does not state the GELU variant
  preprocessing, source = report.preprocessing, report.source
  return {
    "kind": "backbone",
    "path": report.path,
    "layout": report.layout,
    "variant": report.config.variant,
    **config,
    "num_patches": report.config.num_patches,
    "parameters": report.parameters,
    "fingerprint": report.fingerprint,
    "normalization": {
      name: {"value": value, "from": origin}
      for name, (value, origin) in report.normalization.items()
    },
    "preprocessing": preprocessing and dataclasses.asdict(preprocessing),
    "preprocessing_from": report.preprocessing_from,
    "source": source and dataclasses.asdict(source),
    "arrays": {
      name: {"shape": list(array.shape), "dtype": array.dtype.name}
      for name, array in report.arrays.items()
    },
  }


def _backbone_text(report: BackboneReport) -> str:
  config = report.config
  lines = aligned(
    [
      ("backbone", escaped(report.path)),
      ("layout", report.layout),
      ("variant", config.variant),
      ("shape", f"{config.depth} blocks of width {config.width}, "
                f"{config.num_heads} heads, MLP {config.mlp_dim}"),
      ("image size", f"{config.image_size} px: {config.num_patches} patches of "
                     f"{config.patch_size} px"),
      ("num_classes", f"{config.num_classes}" if config.num_classes
                      else "0: no head, outputs its features"),
      ("representation_size", str(config.representation_size)),
      *_computation(report),
      *_preparation(report),
      ("parameters", f"{report.parameters:,}"),
      ("fingerprint", report.fingerprint),
      *_source(report),
    ]
  )  # fmt: skip
  rows = [
    (name, _dimensions(array.shape), array.dtype.name)
    for name, array in report.arrays.items()
  ]
  return f"{lines}\n\n{table(('array', 'shape', 'dtype'), rows)}"


def _computation(report: BackboneReport) -> list[tuple[str, str]]:
  """Return (name, text) rows: GELU, LayerNorm and differences from vit_jax.

  Return [] if the files of the backbone do not state its configuration.
  """
  if not report.states_config:
    return []
  config = report.config
  switches = [f"{k} {v}" for k, v in backbones.switches_of(config).items()]
  return [
    ("gelu", config.gelu),
    ("LayerNorm", f"epsilon {config.layer_norm_epsilon:g}"),
    ("switches", ", ".join(switches) or "none: as vit_jax"),
  ]


def _preparation(report: BackboneReport) -> list[tuple[str, str]]:
  """Return rows about image preprocessing, with the origin of each value."""
  rows = {
    name: f"{', '.join(f'{x:g}' for x in value)} ({origin})"
    for name, (value, origin) in report.normalization.items()
  }
  rows["preprocessing"] = (
    f"{_preprocessing(report.preprocessing)} ({report.preprocessing_from})"
    if report.preprocessing
    else f"whole image squeezed to {report.config.image_size} px (not stated, "
    "or not supported)"
  )
  return [(name, escaped(text)) for name, text in rows.items()]


def _source(report: BackboneReport) -> list[tuple[str, str]]:
  """Return rows about the origin of a backbone; [] if it is unknown."""
  source = report.source
  if not source:
    return []
  return [
    ("source", escaped(source.name)),
    ("family", escaped(source.family)),
    ("licence", escaped(source.licence)),
    *(("file", f"{escaped(n)}, SHA-256 {escaped(digest)}")
      for n, digest in source.files.items()),
  ]  # fmt: skip


def _dimensions(shape: Sequence[int]) -> str:
  return " x ".join(map(str, shape))
