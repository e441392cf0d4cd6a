"""Tasks: spec, parameters and provenance."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import jax

from memory_vit.errors import TaskError
from memory_vit.kinds import CLASSES, TaskKind
from memory_vit.model import trees
from memory_vit.model.parts import PARTS, Axes
from memory_vit.model.parts.side import SideKind
from memory_vit.model.regimes import Regime, get_regime
from memory_vit.model.vit_config import MAX_IMAGE_SIZE, MAX_RESIZE
from memory_vit.runtime import messages
from memory_vit.runtime.messages import name_list

# Values of `EvalPreprocessing.interpolation`.
INTERPOLATIONS = ("bilinear", "bilinear_antialias", "bicubic")
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
# Key of the backbone's own outputs in the result of a forward pass.
BACKBONE = "backbone"
NAME_RULE = (
  "1 to 64 characters of a-z, 0-9, '_' and '-', starting with a letter or "
  f"digit, and not {BACKBONE!r}"
)


def is_name(name: Any) -> bool:
  """Return whether a task may have this name."""
  is_text = isinstance(name, str) and name != BACKBONE
  return is_text and bool(NAME_PATTERN.fullmatch(name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalPreprocessing:
  """Preprocessing of images for evaluation.

  Attributes:
    image_size: side of the model's square input image, in pixels.
    crop: "resize" squeezes the whole image into the square; "central" scales
      its shorter side to `resize` pixels and crops the center, as transformers
      does; "central_rounded" rounds the crop's offset to the nearest integer
      (half to even) instead of down, as torchvision and timm do.
    resize: shorter side before the crop, in pixels; 0 if `crop` is "resize".
    interpolation: "bilinear" without antialiasing, in float32, as vit_jax
      trains; "bilinear_antialias" and "bicubic" resize uint8 images in Pillow,
      with antialiasing, as timm and transformers do.
  """

  image_size: int
  crop: str = "resize"
  resize: int = 0
  interpolation: str = "bilinear"

  def __post_init__(self) -> None:
    if self.interpolation not in INTERPOLATIONS:
      raise TaskError(
        "evaluation preprocessing: interpolation is "
        f"{messages.brief(self.interpolation)}, expected one of "
        f"{', '.join(INTERPOLATIONS)}."
      )
    if not 1 <= self.image_size <= MAX_IMAGE_SIZE:
      raise TaskError(
        f"evaluation preprocessing: image_size is "
        f"{messages.brief(self.image_size)}, expected 1 to {MAX_IMAGE_SIZE} "
        "pixels."
      )
    if self.crop == "resize" and self.resize == 0:
      return
    known = self.crop in ("central", "central_rounded")
    if known and self.image_size <= self.resize <= MAX_RESIZE:
      return
    raise TaskError(
      f"evaluation preprocessing: crop {messages.brief(self.crop)} with resize "
      f"{messages.brief(self.resize)} is not possible. Set resize to 0 for the "
      "crop 'resize', and to a number of pixels from the image size, "
      f"{self.image_size}, to {MAX_RESIZE} for 'central' or 'central_rounded'."
    )

  def begin(self, lengths: Any) -> Any:
    """Return the offset of the central crop along a side, in pixels.

    Args:
      lengths: sides after resizing; a number, array or tensor of any library.
    """
    rest = lengths - self.image_size
    if self.crop == "central_rounded":
      return rest // 2 + rest % 4 // 3  # rest / 2, rounded half to even
    return rest // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneId:
  """Identity of a backbone; a task requires the backbone it was trained on."""

  fingerprint: str
  variant: str
  image_size: int
  gelu: str
  layer_norm_epsilon: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
  """All of a task except its parameters and its provenance.

  Attributes:
    name: at most 64 lower-case letters, digits, "-" and "_".
    num_classes: c, the number of outputs: classes, labels or values.
    kind: what the outputs mean, see `TaskKind`.
    regime: what is trained and how attention runs, see `get_regime`.
    cells: m, the number of memory cells per layer; 0 without memory.
    bottleneck: hidden width of the adapters, or of the probe's bottlenecks; 0
      if the regime has neither.
    side_width: r, the width of the side stream; 0 if the regime has none.
    side_mixing: how the side stream mixes patches, "conv" or "none"; "" if the
      regime has no side stream.
    attends_to: names of earlier tasks that this task attends to (model
      extension); empty if it ignores all other tasks (concatenation).
    parent_digests: the `Task.digest` that each task in `attends_to` had when
      this task was trained, "" if unknown; empty if all are unknown.
    memory_norm: whether memory passes through the block's first LayerNorm, as
      in Figure 2 of the paper. In public re-implementations, it does not.
    class_names: c names of classes, labels or values; empty if unknown.
    backbone: identity of the backbone that the task was trained on.
    preprocessing: how images are prepared for evaluation.
  """

  name: str
  num_classes: int
  kind: TaskKind = CLASSES
  cells: int
  regime: str = "memory_masked"
  bottleneck: int = 0
  side_width: int = 0
  side_mixing: str = ""
  attends_to: tuple[str, ...] = ()
  parent_digests: tuple[str, ...] = ()
  memory_norm: bool = True
  # Hidden from `repr`, because there can be thousands of names.
  class_names: tuple[str, ...] = dataclasses.field(default=(), repr=False)
  backbone: BackboneId
  preprocessing: EvalPreprocessing

  def __post_init__(self) -> None:
    if not is_name(self.name):
      raise TaskError(
        f"task name {self.name!r} is not valid: expected {NAME_RULE}."
      )
    for parent in self.attends_to:
      if not NAME_PATTERN.fullmatch(parent):
        raise TaskError(
          f"task {self.name!r} attends to {parent!r}, which is not a valid "
          "task name."
        )
    self._require_fields_of_parts()
    if self.num_classes < 1:
      raise TaskError(
        f"task {self.name!r}: num_classes is {self.num_classes}, expected at "
        "least 1."
      )
    if self.class_names and len(self.class_names) != self.num_classes:
      raise TaskError(
        f"task {self.name!r} has {len(self.class_names)} class names for "
        f"{self.num_classes} {self.kind.name}."
      )
    try:
      self.kind.require_outputs(self.num_classes)
    except TaskError as error:
      raise TaskError(f"task {self.name!r}: {error}") from None
    if self.parent_digests and len(self.parent_digests) != len(self.attends_to):
      raise TaskError(
        f"task {self.name!r}: parent_digests has {len(self.parent_digests)} "
        f"entries, expected none or {len(self.attends_to)}, one per parent."
      )
    if self.preprocessing.image_size != self.backbone.image_size:
      raise TaskError(
        f"task {self.name!r}: images are prepared at "
        f"{self.preprocessing.image_size} px, but the backbone takes "
        f"{self.backbone.image_size} px."
      )

  def _require_fields_of_parts(self) -> None:
    this = f"task {self.name!r} of regime {self.regime!r}"
    for part in self.learned.parts:
      if problem := part.problem(self):
        raise TaskError(f"{this}: {problem}.")
    unused = {field for part in PARTS.values() for field in part.fields}
    for name in sorted(unused.difference(self.learned.fields)):
      # The field `cells` has no default; it is 0 in tasks without memory.
      value, default = getattr(self, name), getattr(TaskSpec, name, 0)
      if value != default:
        raise TaskError(
          f"{this}: {name} is {value!r}, which this regime does not use: "
          f"expected {default!r}."
        )

  @property
  def for_programs(self) -> "TaskSpec":
    """The spec, with defaults in fields that do not affect programs."""
    return dataclasses.replace(self, class_names=(), kind=CLASSES)

  def expected_shapes(self, width: int, depth: int, summary: int) -> trees.Tree:
    """Return the task's parameters as float32 `jax.ShapeDtypeStruct`.

    Args:
      width: d, the width of the backbone.
      depth: l, the number of layers of the backbone.
      summary: n, `ViTConfig.summary_tokens` of the backbone.
    """
    memory = self.learned.memory_layers(depth)
    axes = Axes(width, depth, memory, summary)
    shapes = {
      part.name: part.shapes(part.size(self), axes)
      for part in self.learned.parts
    }
    return trees.unflatten(
      {
        name: jax.ShapeDtypeStruct(shape, "float32")
        for name, shape in trees.flatten(shapes).items()
      }
    )

  @property
  def learned(self) -> Regime:
    """The regime: which parts are trained, and how attention runs."""
    return get_regime(self.regime)

  @property
  def side(self) -> SideKind:
    """Width and mixing of the side stream; 0 and "" without a stream."""
    return SideKind(self.side_width, self.side_mixing)

  @property
  def summary(self) -> str:
    """A short description for users: name, outputs, cells and regime."""
    outputs = f"{self.num_classes} {self.kind.name}"
    return f"{self.name!r}, {outputs}, {self.cells} cells, {self.regime}"


# The pytree leaves out the field `provenance`. The metrics in `provenance` do
# not hold for changed parameters. Also, tasks with a static `provenance` could
# not share compiled programs. `register_dataclass` refuses a dataclass that has
# a field outside the pytree. So `register_dataclass` is the inner decorator: it
# runs while `Task` is not yet a dataclass.
@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared by ==
@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["spec"]
)
class Task:
  """A task: its spec, and its trained parameters.

  For JAX (`jax.jit`, `jax.tree.map`, `jax.device_put`), a task is a pytree: its
  leaves are those of `params`, and `spec` is static. JAX drops `provenance`:
  its functions return tasks without it.

  Attributes:
    spec: see `TaskSpec`.
    params: trained parameters, float32; for `memory_masked` {"cls": (d,),
      "memory": (l, m, d), "head": {"kernel": (d, c), "bias": (c,)}}.
    provenance: configuration and metrics of the training run; empty for a task
      that was not trained.
  """

  spec: TaskSpec
  params: dict[str, Any]
  provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    """Short for `spec.name`."""
    return self.spec.name

  def __repr__(self) -> str:
    spec = self.spec
    parts = [spec.summary]
    if spec.attends_to:
      parts.append(f"attends to {name_list(spec.attends_to)}")
    parts.append(f"{trees.count(self.params):,} parameters")
    parts.append(
      f"on {spec.backbone.variant} at {spec.backbone.image_size} px, "
      f"fingerprint {spec.backbone.fingerprint[:12]}"
    )
    return f"Task({', '.join(parts)})"

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 over regime, `memory_norm`, parameters and digests of parents.

    The names of the task and of its parents do not change it.
    """
    spec = self.spec
    parts = (
      spec.regime,
      spec.memory_norm,
      len(spec.attends_to),
      spec.parent_digests,
      trees.fingerprint(self.params),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def require_backbone(
  spec: TaskSpec, found: BackboneId, owner: str = ""
) -> None:
  """Raise `TaskError` unless a task was trained on the backbone `found`."""
  if spec.backbone == found:
    return
  differences = [
    f"{field} {getattr(found, field)!r}, but the task needs "
    f"{getattr(spec.backbone, field)!r}"
    for field in (f.name for f in dataclasses.fields(BackboneId))
    if getattr(found, field) != getattr(spec.backbone, field)
  ]
  this = f"The backbone of {owner!r}" if owner else "The given backbone"
  raise TaskError(
    f"task {spec.name!r} belongs to another backbone. {this} has "
    f"{'; '.join(differences)}. Load the backbone that the task was trained on."
  )
