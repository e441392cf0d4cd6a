"""Write the model card of tasks, `README.md`, for a model hub.

Names of classes and data sets are untrusted and appear only as code, so that
they cannot add markup, links or lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from memory_vit.backbones import download, hub_models
from memory_vit.kinds import KINDS
from memory_vit.kinds.classes import tells_top5
from memory_vit.model.task import Task, TaskSpec
from memory_vit.runtime.messages import escaped, shortened
from memory_vit.runtime.tables import markdown_table

FILE = "README.md"
# YAML header of a model card. It contains no text from tasks, because such text
# could end the header.
_FRONT_MATTER = """\
---
library_name: memory_vit
{pipeline}tags:
- vision-transformer
- learnable-memory
# Choose a licence: the backbone and the data have licences of their own.
# license: ...
---
"""
_MOST_CLASSES, _MOST_CHARACTERS = 200, 200
# Keys of a run's `config.data` whose values say which data the run used.
_DATA_KEYS = ("name", "train", "validation", "test")
# Metrics whose absolute value exceeds this limit are not shown: errors of
# predicted values are in the unit of the values, and can be huge.
_MOST = 1e12
# {key of a split in a run's results: name of the split in the card}.
_SPLITS = {"test": "test", "val": "validation"}
_SHARES = {
  "chance": "accuracy of guessing uniformly",
  "majority": "accuracy of always predicting the most frequent class",
}
_RESIZING = {
  "bilinear": "bilinear, without antialiasing",
  "bilinear_antialias": "bilinear with antialiasing, as in Pillow",
  "bicubic": "bicubic with antialiasing, as in Pillow",
}


def to_text(tasks: Sequence[Task], address: str = "") -> str:
  """Return the model card for a directory with `NAME.safetensors` of each task.

  `address` is the hf://OWNER/NAME of the directory, or "" if it is unknown.
  """
  title = ", ".join(task.name for task in tasks)
  # The hub has no pipeline tag for tasks that predict values.
  tags = filter(None, (task.spec.kind.kind.hub_pipeline for task in tasks))
  pipeline = "".join(f"pipeline_tag: {tag}\n" for tag in [*tags][:1])
  parts = [
    f"{_FRONT_MATTER.format(pipeline=pipeline)}\n# {title}\n",
    "New tasks for a frozen Vision Transformer, learned with memory cells "
    "(Sandler et al., CVPR 2022). The backbone is not included; its original "
    "outputs stay unchanged.\n",
    *map(_section, tasks),
    _loading(tasks, address),
    _preprocessing(tasks[0].spec),
    _backbone(tasks[0].spec),
  ]
  return "\n".join(parts)


def literal(value: Any) -> str:
  """Return untrusted text as a line of Markdown code, cut to 200 characters.

  Escaping markup is not enough: hubs turn addresses in text into links, but not
  addresses in code.
  """
  text = escaped(shortened(str(value), _MOST_CHARACTERS)).strip() or "(empty)"
  longest = max(map(len, re.findall("`*", text)))
  fence = "`" * (longest + 1)
  # A space separates backticks at the ends of `text` from the fences; Markdown
  # does not show this space.
  space = " " if longest else ""
  return f"{fence}{space}{text}{space}{fence}"


def _section(task: Task) -> str:
  spec, provenance = task.spec, task.provenance
  lines = [f"## {spec.name}", "", f"- {spec.kind.name}: {_outputs(spec)}"]
  lines.append(
    f"- outputs: `task.spec.kind.activate(outputs[{spec.name!r}])` returns "
    f"{spec.kind.kind.activated_text}"
  )
  lines += [f"- {title}: {text}" for title, text in spec.kind.rows()]
  lines.append(
    f"- trained by: {literal(spec.regime)}, {spec.cells} memory cells per layer"
  )
  if spec.attends_to:
    lines.append(f"- attends to: {', '.join(map(literal, spec.attends_to))}")
  data = _mapping(_mapping(provenance, "config"), "data")
  known = [
    f"{key} {literal(data[key])}"
    for key in _DATA_KEYS
    if isinstance(data.get(key), str) and data[key]
  ]
  lines.append(f"- data: {', '.join(known) or 'unknown'}")
  lines += _metrics(_mapping(provenance, "metrics"), spec.num_classes)
  return "\n".join(lines) + "\n"


def _outputs(spec: TaskSpec) -> str:
  """Return a text about the outputs: number, names, and thresholds or units."""
  if not spec.class_names:
    return f"{spec.num_classes}, with unknown names"
  names = [*map(literal, spec.class_names[:_MOST_CLASSES])]
  kind = spec.kind
  notes = [f" (threshold {t:.3g})" for t in kind.thresholds]
  notes = notes or [unit and f" ({literal(unit)})" for unit in kind.units]
  notes = notes or [""] * len(names)
  shown = ", ".join(map("".join, zip(names, notes, strict=False)))
  more = len(spec.class_names) - _MOST_CLASSES
  return f"{spec.num_classes}: {shown}{f', and {more} more' * (more > 0)}"


def _metrics(results: Mapping[str, Any], classes: int) -> list[str]:
  """Return the lines of a table with the metrics that a run has recorded."""
  scores = {split: _mapping(results, split) for split in _SPLITS}
  rows = [
    (f"{metric.meaning}, {title}", metric.text(values[key]))
    for split, title in _SPLITS.items()
    for values in [_mapping(scores[split], "metrics")]
    for kind in KINDS.values()
    for key, metric in kind.metrics.items()
    if _is_number(values.get(key)) and (key != "top5" or tells_top5(classes))
  ]
  rows += [
    (label, f"{100 * results[key]:.2f} %")
    for key, label in _SHARES.items()
    if _is_number(results.get(key))
  ]
  rows += [
    (label, f"{number:,}")
    for label, number in (
      ("test images", scores["test"].get("examples")),
      ("training steps", results.get("steps")),
    )
    if type(number) is int
  ]
  if not rows:
    return ["- metrics: unknown"]
  return ["", markdown_table(("measured after training", ""), rows)]


def _is_number(value: Any) -> bool:
  """Return whether a value is a finite number that is not too large to show."""
  known = type(value) in (int, float) and math.isfinite(value)
  return known and abs(value) <= _MOST


def _mapping(values: Any, key: str) -> Mapping[str, Any]:
  inner = values.get(key) if isinstance(values, Mapping) else None
  return inner if isinstance(inner, Mapping) else {}


def _loading(tasks: Sequence[Task], address: str) -> str:
  files = ", ".join(f'"{task.name}.safetensors"' for task in tasks)
  paths = f'"{address}"' if address else f"[{files}]"
  place = address or "."
  spec = tasks[0].spec
  source = _public_backbone(tasks[0]) or "BACKBONE"
  argument = source if source == "BACKBONE" else f'"{source}"'
  side = spec.backbone.image_size
  return f"""\
## How to load

```python
import memory_vit as mv

backbone = mv.load_backbone(
  {argument}, image_size={side}, gelu={_gelu(spec)}
)
tasks = mv.load_tasks({paths}, backbone)
outputs = mv.forward(backbone, tasks, mv.preprocess(FILES, tasks))
```

or `memory-vit predict --backbone={source} --task={place} IMAGE`. A task runs
only on its own backbone.
"""


def _public_backbone(task: Task) -> str:
  """Return the public name of the backbone; "" if none is known."""
  source = _mapping(task.provenance, "config").get("backbone")
  named = isinstance(source, str) and (
    source in download.KNOWN or hub_models.is_model(source)
  )
  return str(source) if named else ""


def _gelu(spec: TaskSpec) -> str:
  """Return the backbone's kind of GELU as a quoted Python string.

  If the kind is unknown, return "tanh": the task cannot be loaded anyway.
  """
  known = spec.backbone.gelu in ("tanh", "exact", "quick")
  return f'"{spec.backbone.gelu}"' if known else '"tanh"'


def _preprocessing(spec: TaskSpec) -> str:
  preprocessing = spec.preprocessing
  side = preprocessing.image_size
  how = f"resized to {side} x {side} pixels, whatever their shape"
  if preprocessing.resize:
    how = (
      f"resized to {preprocessing.resize} pixels on the shorter side and "
      f"cropped to the central {side} x {side}"
    )
  resizing = _RESIZING[preprocessing.interpolation]
  return f"""\
## Preprocessing

RGB images are {how} ({resizing}), then scaled from
0..255 to [-1, 1] by (x - 127.5) / 127.5.
"""


def _backbone(spec: TaskSpec) -> str:
  backbone = spec.backbone
  return f"""\
## Backbone

A ViT {literal(backbone.variant)} at {backbone.image_size} pixels, with the GELU
{literal(backbone.gelu)}. Its weights have the fingerprint (SHA-256)
`{backbone.fingerprint}`.
"""
