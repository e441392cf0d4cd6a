"""Export a backbone and its tasks in a format that other programs read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from memory_vit.errors import ExportError, TaskError
from memory_vit.exports import (
  check,
  export_manifest,
  model_card,
  onnx_file,
  orbax_checkpoint,
  saved_model,
  stablehlo,
)
from memory_vit.exports.export_manifest import ExportReport, Signature, Tensor
from memory_vit.exports.exported_model import (
  ExportedModel,
  make_model,
  score_name,
)
from memory_vit.exports.image_input import ImageInput
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import BACKBONE, Task, require_backbone
from memory_vit.runtime import files, schema
from memory_vit.runtime.messages import brief
from memory_vit.runtime.progress_bar import ProgressBar
from memory_vit.tasks import compose, store

# Formats that store a function: {format: (file or directory name, writer)}.
_WRITERS: dict[
  str, tuple[str, Callable[[ExportedModel, Path, ImageInput], None]]
] = {
  "stablehlo": (stablehlo.FILE, stablehlo.write),
  "saved_model": (saved_model.DIRECTORY, saved_model.write),
  "onnx": (onnx_file.FILE, onnx_file.write),
}
# Formats that store only arrays, and no function that takes images.
_ARRAYS = ("safetensors", "orbax")
FORMATS = (*_WRITERS, *_ARRAYS)
MAX_EXAMPLES = 4096


def export_model(
  backbone: Backbone,
  tasks: compose.TasksLike,
  path: str | os.PathLike[str],
  *,
  format: str,
  images: ImageInput | None = None,
  examples: int = 8,
  activation: bool = False,
) -> ExportReport:
  """Write a backbone and tasks as one function that other programs can call.

  The function takes images, and returns the same dictionary as `forward`, with
  the keys "backbone" and the name of each task. A task that needs its own pass
  (`probe`, `full`, ...) is exported alone, without the output "backbone". The
  written model runs on random images in another process. The outputs must
  agree with those of this library, up to rounding.

  Args:
    backbone: the frozen ViT; the function computes in its `config.dtype`.
    tasks: a task, a sequence or generator of tasks, or {name: task}.
    path: the output directory. An earlier export is replaced as a whole; a
      directory with any other file is refused.
    format: "stablehlo", "saved_model", "onnx"; "safetensors" (the tasks alone,
      as files for a model hub, with a README); or "orbax" (all parameters, as a
      checkpoint).
    images: the input of the function; by default floats in [-1, 1].
    examples: number of random images for the comparison.
    activation: whether the function converts outputs of heads to probabilities
      (of classes or labels) or to values in their units.

  Returns:
    The content of `manifest.json` in the directory.

  Raises:
    ExportError: for invalid options, failed writes, or outputs that differ.
    TaskError: for tasks of another backbone, or that do not fit together.
  """
  images = images or ImageInput()
  examples = schema.whole_number("examples", examples, 1, ExportError)
  require_options(format, images, examples, activation)
  place = export_manifest.DIRECTORY.require_own(path)
  if format in _ARRAYS:
    return _export_arrays(backbone, tasks, place, format)
  exported = make_model(backbone, tasks, activation=activation)
  if format == "onnx":
    onnx_file.require_possible(exported, images)
  name, write = _WRITERS[format]
  with export_manifest.DIRECTORY.replacing(place) as new:
    with ProgressBar("exporting", 2, "steps", delay=0) as bar:
      bar.note(f"writing {format}")
      write(exported, new, images)
      bar.update()
      bar.note("comparing outputs, in another process")
      compared = check.compare(exported, format, new / name, images, examples)
      bar.update()
    report = _describe(exported, format, images)
    comparison = dataclasses.asdict(compared)
    report = dataclasses.replace(report, comparison=comparison)
    return export_manifest.write(new, report)


def require_options(
  format: str, images: ImageInput, examples: int, activation: bool = False
) -> None:
  """Raise for options that no export supports; call it before computing."""
  if format not in FORMATS:
    raise ExportError(
      f"format is {brief(format)}, expected one of {', '.join(FORMATS)}."
    )
  if format in _ARRAYS and images.kind != "float32":
    raise ExportError(
      f"--format={format} with --input=uint8: this format stores arrays, not a "
      "function that takes images. Leave --input out."
    )
  if format in _ARRAYS and activation:
    raise ExportError(
      f"--format={format} with --activation: this format stores arrays, not a "
      "function that returns probabilities. Leave --activation out."
    )
  if not 1 <= examples <= MAX_EXAMPLES:
    raise ExportError(
      f"examples is {brief(examples)}, expected 1 to {MAX_EXAMPLES} images."
    )
  if format == "saved_model":
    saved_model.require_installed()
  if format == "onnx":
    onnx_file.require_installed()


def _describe(
  exported: ExportedModel, format: str, images: ImageInput
) -> ExportReport:
  """Return the report of an export: signatures, batch sizes and platforms."""
  meanings = _meanings(exported)
  outputs = {
    name: Tensor(
      shape=("b", width), dtype="float32", meaning=meanings.get(name, "logits")
    )
    for name, width in exported.outputs().items()
  }
  inputs = {"images": _image_tensor(exported, images)}
  signatures = {"serving_default": Signature(inputs=inputs, outputs=outputs)}
  if format == "saved_model":
    encoded = Tensor(
      shape=("b",), dtype="string", meaning="the bytes of JPEG or PNG files"
    )
    signatures["encoded"] = Signature(
      inputs={"encoded": encoded}, outputs=outputs
    )
  report = export_manifest.describe(format, exported.backbone, exported.tasks)
  return dataclasses.replace(
    report,
    activation=exported.activation,
    signatures=signatures,
    platforms=() if format == "onnx" else stablehlo.PLATFORMS,
    batch_buckets=(
      saved_model.batch_buckets() if format == "saved_model" else ()
    ),
  )


def _meanings(exported: ExportedModel) -> dict[str, str]:
  """Return {output: its meaning} for outputs that are not logits."""
  kinds = {task.name: task.spec.kind for task in exported.tasks}
  texts = {name: kind.kind.outputs_text for name, kind in kinds.items()}
  meanings = {name: text for name, text in texts.items() if text}
  if not exported.backbone.config.num_classes:
    meanings[BACKBONE] = "features"
  for task in exported.rejecting:
    meanings[score_name(task.name)] = (
      "largest logit; the image is of none of the classes if this is below "
      f"{task.spec.kind.unknown}"
    )
  return meanings | {
    name: kind.kind.activated_text for name, kind in exported.activated.items()
  }


def _image_tensor(exported: ExportedModel, images: ImageInput) -> Tensor:
  shape = images.shape(exported.preprocessing.image_size)
  meaning = {
    "float32": "RGB in [-1, 1], prepared as `preprocessing` says",
    "uint8": "RGB of 0 to 255",
  }
  return Tensor(shape=shape, dtype=images.kind, meaning=meaning[images.kind])


def _export_arrays(
  backbone: Backbone, tasks: compose.TasksLike, place: Path, format: str
) -> ExportReport:
  """Export to `format`, which stores only arrays; return the report."""
  chosen = compose.task_tuple(tasks)
  if not chosen:
    raise TaskError("there is no task to export.")
  if len(chosen) > 1:
    compose.require_fit(chosen)
  for task in chosen:
    require_backbone(task.spec, backbone.id)
  with export_manifest.DIRECTORY.replacing(place) as new:
    if format == "orbax":
      _write_orbax(backbone, chosen, new)
    else:
      _write_tasks(backbone, chosen, new)
    report = export_manifest.describe(format, backbone, chosen)
    return export_manifest.write(new, report)


def _write_tasks(
  backbone: Backbone, tasks: Sequence[Task], directory: Path
) -> None:
  """Write each task to NAME.safetensors, and a model card for all tasks."""
  for task in tasks:
    file = directory / f"{task.name}.safetensors"
    store.save_task(task, file, format="safetensors")
    if store.load_task(file, backbone).digest != task.digest:
      raise ExportError(
        f"task {task.name!r} differs after it was written and read back."
      )
  card = directory / model_card.FILE
  card.write_text(model_card.to_text(tasks), encoding="utf-8")


def _write_orbax(
  backbone: Backbone, tasks: Sequence[Task], directory: Path
) -> None:
  """Write a checkpoint of {"backbone": ..., "tasks": {name: ...}}."""
  params = {task.name: task.params for task in tasks}
  tree = {"backbone": backbone.params, "tasks": params}
  with files.writing(directory, ValueError):  # orbax raises ValueError
    orbax_checkpoint.write(tree, directory / orbax_checkpoint.DIRECTORY)
