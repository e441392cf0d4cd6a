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

# How images are resized: see `EvalPreprocessing`.
INTERPOLATIONS = ("bilinear", "bilinear_antialias", "bicubic")
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
# The key of the original outputs in the result of a forward pass.
BACKBONE = "backbone"
NAME_RULE = (
  "1 to 64 of a-z, 0-9, '_' and '-', starting with a letter or digit, and not "
  f"{BACKBONE!r}"
)


def is_name(name: Any) -> bool:
  """Whether a task may have this name."""
  is_text = isinstance(name, str) and name != BACKBONE
  return is_text and bool(NAME_PATTERN.fullmatch(name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalPreprocessing:
  """Preprocessing of images for evaluation.

  Attributes:
    image_size: side of the square that the model gets, in pixels.
    crop: "resize" squeezes the whole image into the square; "central" scales
      its shorter side to `resize` pixels and takes the middle, as transformers
      does. "central_rounded" begins where torchvision, and so timm, does: half
      a pixel is rounded to an even number, and not down.
    resize: the shorter side before a crop, in pixels; 0 for "resize".
    interpolation: "bilinear" without antialiasing, in float32, as vit_jax
      trains; "bilinear_antialias" and "bicubic", with antialiasing, are
      Pillow's on uint8, as timm and transformers prepare images.
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
      f"{messages.brief(self.resize)} is not possible: expected 'resize' (with "
      "resize 0), or 'central' or 'central_rounded' with a resize of at least "
      f"the image size, {self.image_size}, and at most {MAX_RESIZE} pixels."
    )

  def begin(self, lengths: Any) -> Any:
    """Offset of the central square in sides of these lengths, in pixels.

    Args:
      lengths: after resizing; a number, or an array or tensor of any library.
    """
    rest = lengths - self.image_size
    if self.crop == "central_rounded":
      return rest // 2 + rest % 4 // 3  # one more of 3, 7, 11, ...
    return rest // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneId:
  """Identity of a backbone; a task runs only on the one it was trained on."""

  fingerprint: str
  variant: str
  image_size: int
  gelu: str
  layer_norm_epsilon: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
  """Everything about a task except its arrays.

  Attributes:
    name: lower case letters, digits, "-" and "_"; at most 64.
    num_classes: c, outputs of its head: classes, labels or values.
    kind: what these outputs mean, see `TaskKind`.
    regime: how it was learned, see `get_regime`.
    cells: m, memory cells per layer; 0 is a task without memory.
    bottleneck: width of its adapters, or of the values of its probe; 0 if its
      regime has neither.
    side_width: r, of its side stream; 0 if its regime has none.
    side_mixing: "conv" or "none", of its side stream; "" without one.
    attends_to: names of the earlier tasks that it attends to (model extension).
      Empty: it ignores all others (concatenation).
    parent_digests: `Task.digest` of each of `attends_to`, as it was when this
      task was trained; "" if that is not known. Empty: none is known.
    memory_norm: whether memory passes the block's first LayerNorm, as in Figure
      2 of the paper. The public re-implementations insert it after.
    class_names: c names of classes, labels or values, or empty if they are not
      known.
    backbone: the backbone that it belongs to.
    preprocessing: how its images are prepared for evaluation.
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
  # Thousands of names would fill many screens.
  class_names: tuple[str, ...] = dataclasses.field(default=(), repr=False)
  backbone: BackboneId
  preprocessing: EvalPreprocessing

  def __post_init__(self) -> None:
    if not is_name(self.name):
      raise TaskError(f"task name {self.name!r}: expected {NAME_RULE}.")
    for parent in self.attends_to:
      if not NAME_PATTERN.fullmatch(parent):
        raise TaskError(
          f"task {self.name!r} attends to {parent!r}, which is no task name."
        )
    self._require_fields_of_parts()
    if self.num_classes < 1:
      raise TaskError(
        f"task {self.name!r}: num_classes is {self.num_classes}, expected at "
        "least 1."
      )
    if self.class_names and len(self.class_names) != self.num_classes:
      raise TaskError(
        f"task {self.name!r}: {len(self.class_names)} class names for "
        f"{self.num_classes} {self.kind.name}."
      )
    try:
      self.kind.require_outputs(self.num_classes)
    except TaskError as error:
      raise TaskError(f"task {self.name!r}: {error}") from None
    if self.parent_digests and len(self.parent_digests) != len(self.attends_to):
      raise TaskError(
        f"task {self.name!r}: {len(self.parent_digests)} parent_digests for "
        f"{len(self.attends_to)} tasks that it attends to."
      )
    if self.preprocessing.image_size != self.backbone.image_size:
      raise TaskError(
        f"task {self.name!r}: images are prepared at "
        f"{self.preprocessing.image_size} px, the backbone takes "
        f"{self.backbone.image_size} px."
      )

  def _require_fields_of_parts(self) -> None:
    this = f"task {self.name!r} of regime {self.regime!r}"
    for part in self.learned.parts:
      if problem := part.problem(self):
        raise TaskError(f"{this}: {problem}.")
    unused = {field for part in PARTS.values() for field in part.fields}
    for name in sorted(unused.difference(self.learned.fields)):
      # `cells` has no default: it is 0 without memory.
      value, default = getattr(self, name), getattr(TaskSpec, name, 0)
      if value != default:
        raise TaskError(
          f"{this}: {name} is {value!r}, which this regime does not use: "
          f"expected {default!r}."
        )

  @property
  def for_programs(self) -> "TaskSpec":
    """The spec without what no compiled program depends on."""
    return dataclasses.replace(self, class_names=(), kind=CLASSES)

  def expected_shapes(self, width: int, depth: int, summary: int) -> trees.Tree:
    """Return its parameters as float32 `jax.ShapeDtypeStruct`.

    Args:
      width: d, of the backbone.
      depth: l, of the backbone.
      summary: n, its `ViTConfig.summary_tokens`.
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
    """What is trained, and how attention runs."""
    return get_regime(self.regime)

  @property
  def side(self) -> SideKind:
    """Width and mixing of its side stream; 0 and "" if it has none."""
    return SideKind(self.side_width, self.side_mixing)

  @property
  def summary(self) -> str:
    """Name, outputs, cells and regime, for people."""
    outputs = f"{self.num_classes} {self.kind.name}"
    return f"{self.name!r}, {outputs}, {self.cells} cells, {self.regime}"


# Without provenance: metrics would be those of other parameters, and no two
# tasks would share a program. `drop_fields` does not work before jax 0.8, so it
# is registered before it is a dataclass.
@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["spec"]
)
class Task:
  """A task: its spec, and the parameters that it learned.

  It is a tree of arrays for JAX (`jax.jit`, `jax.tree.map`, `jax.device_put`):
  `params` are its leaves, and `spec` is static. A function of JAX returns
  another task, without provenance.

  Attributes:
    spec: see `TaskSpec`.
    params: what its regime trains, float32; in `memory_masked` {"cls": (d,),
      "memory": (l, m, d), "head": {"kernel": (d, c), "bias": (c,)}}.
    provenance: the configuration and the metrics of the run that made it; empty
      for a task that was not trained.
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
    """SHA-256 over all that its token computes with, its parents included.

    Neither its own name nor those of its parents change it.
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
    f"{field} {getattr(found, field)!r}, the task has "
    f"{getattr(spec.backbone, field)!r}"
    for field in (f.name for f in dataclasses.fields(BackboneId))
    if getattr(found, field) != getattr(spec.backbone, field)
  ]
  this = f"That of {owner!r}" if owner else "This one"
  raise TaskError(
    f"task {spec.name!r} belongs to another backbone. {this} has "
    f"{'; '.join(differences)}. Load the backbone that the task was trained on."
  )
