"""Export a backbone and its tasks to the format that a server reads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from memory_vit.errors import ExportError, TaskError
from memory_vit.exports import (
  check,
  export_manifest,
  model_card,
  onnx_file,
  saved_model,
  stablehlo,
)
from memory_vit.exports.export_manifest import ExportReport, Signature, Tensor
from memory_vit.exports.exported_model import ExportedModel, make_model
from memory_vit.exports.image_input import ImageInput
from memory_vit.model.backbone import Backbone
from memory_vit.model.task import require_backbone
from memory_vit.runtime import files, paths
from memory_vit.runtime.messages import brief
from memory_vit.runtime.progress_bar import ProgressBar
from memory_vit.tasks import compose, store

# Where a function is written, and by what.
_WRITERS: dict[
  str, tuple[str, Callable[[ExportedModel, Path, ImageInput], None]]
] = {
  "stablehlo": (stablehlo.FILE, stablehlo.write),
  "saved_model": (saved_model.DIRECTORY, saved_model.write),
  "onnx": (onnx_file.FILE, onnx_file.write),
}
FORMATS = (*_WRITERS, "safetensors")
MAX_EXAMPLES = 4096


def export_model(
  backbone: Backbone,
  tasks: compose.TasksLike,
  path: str | os.PathLike[str],
  *,
  format: str,
  images: ImageInput | None = None,
  examples: int = 8,
) -> ExportReport:
  """Write a backbone and tasks as one function, which others can call.

  It takes images, and returns the same dictionary as `forward`: "backbone" and
  the name of each task. A task that shares no pass, as its regime is not a
  masked one, is exported alone, and has its own output only. What was written
  is run in another process and compared with `forward`, or with what tests such
  a task at the end of its run, on random images.

  Args:
    backbone: the frozen ViT; its `config.dtype` is that of the computation.
    tasks: a task, a sequence or generator of tasks, or {name: task}.
    path: of the directory. One that an export wrote is replaced as a whole, any
      other one with something in it is left as it is.
    format: "stablehlo", "saved_model", "onnx", or "safetensors" (the tasks
      alone, as files for a model hub, with a README).
    images: what the function takes; by default floats in [-1, 1].
    examples: how many random images are compared.

  Returns:
    What `manifest.json` in the directory says.

  Raises:
    ExportError: where it cannot be written, or computes something else.
    TaskError: for tasks of another backbone, or that do not fit together.
  """
  place = paths.local(path, "--out", ExportError).absolute()
  images = images or ImageInput()
  require_options(format, images, examples)
  export_manifest.require_place(place)
  if format == "safetensors":
    return _export_tasks(backbone, tasks, place)
  exported = make_model(backbone, tasks)
  if format == "onnx":
    onnx_file.require_possible(exported, images)
  name, write = _WRITERS[format]
  place.parent.mkdir(parents=True, exist_ok=True)
  replacing = files.replacing_directory(place, export_manifest.strange)
  with files.writing(place), replacing as new:
    new.mkdir()
    with ProgressBar("exporting", 2, "steps", delay=0) as bar:
      bar.note(f"writing {format}")
      write(exported, new, images)
      bar.update()
      bar.note("comparing it, in another process")
      compared = check.compare(exported, format, new / name, images, examples)
      bar.update()
    report = _describe(exported, format, images)
    comparison = dataclasses.asdict(compared)
    report = dataclasses.replace(report, comparison=comparison)
    return export_manifest.write(new, report)


def require_options(format: str, images: ImageInput, examples: int) -> None:
  """Refuse what no export can use, before anything is computed."""
  if format not in FORMATS:
    raise ExportError(
      f"format is {brief(format)}, expected one of {', '.join(FORMATS)}."
    )
  if format == "safetensors" and images.kind != "float32":
    raise ExportError(
      "--format=safetensors with --input=uint8: the file of a task is no "
      "function that takes images. Leave --input out."
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
  """Report what is known of a function."""
  outputs = {
    name: Tensor(shape=("b", width), dtype="float32", meaning="logits")
    for name, width in exported.outputs().items()
  }
  taken = {"images": _image_tensor(exported, images)}
  signatures = {"serving_default": Signature(inputs=taken, outputs=outputs)}
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
    signatures=signatures,
    platforms=() if format == "onnx" else stablehlo.PLATFORMS,
    batch_buckets=(
      saved_model.batch_buckets() if format == "saved_model" else ()
    ),
  )


def _image_tensor(exported: ExportedModel, images: ImageInput) -> Tensor:
  if images.kind == "uint8":
    height, width = images.size or ("h", "w")
    shape: tuple[int | str, ...] = ("b", height, width, 3)
    return Tensor(shape=shape, dtype="uint8", meaning="RGB of 0 to 255")
  side = exported.evaluation.image_size
  meaning = "RGB in [-1, 1], prepared as `preprocessing` says"
  return Tensor(shape=("b", side, side, 3), dtype="float32", meaning=meaning)


def _export_tasks(
  backbone: Backbone, tasks: compose.TasksLike, place: Path
) -> ExportReport:
  """Write each task to NAME.safetensors, with a card for all."""
  chosen = compose.task_tuple(tasks)
  if not chosen:
    raise TaskError("there is no task to export.")
  if len(chosen) > 1:
    compose.require_fit(chosen)
  for task in chosen:
    require_backbone(task.spec, backbone.id)
  place.parent.mkdir(parents=True, exist_ok=True)
  replacing = files.replacing_directory(place, export_manifest.strange)
  with files.writing(place), replacing as new:
    new.mkdir()
    for task in chosen:
      file = new / f"{task.name}.safetensors"
      store.save_task(task, file, format="safetensors")
      if store.load_task(file, backbone).digest != task.digest:
        raise ExportError(
          f"task {task.name!r} was not read back as it was written."
        )
    card = new / model_card.FILE
    card.write_text(model_card.to_text(chosen), encoding="utf-8")
    report = export_manifest.describe("safetensors", backbone, chosen)
    return export_manifest.write(new, report)
