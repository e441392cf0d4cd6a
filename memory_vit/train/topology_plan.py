"""Plan a run for absent TPUs or GPUs: its memory, largest batch and time.

The programs of a step are compiled from shapes alone: no images are read, and
no weights if a short name determines the shapes of the backbone. All numbers
are the compiler's estimates.
"""

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from memory_vit.config import MOST_IMAGES, Config
from memory_vit.errors import ConfigError
from memory_vit.runtime import absent_devices, live_memory, sharding
from memory_vit.runtime.absent_devices import Chip
from memory_vit.runtime.compiler_report import CompilerReport
from memory_vit.runtime.messages import counted
from memory_vit.runtime.progress_bar import duration
from memory_vit.runtime.tables import aligned
from memory_vit.train import batches, described_inputs, pack, passes, sweep
from memory_vit.train.inputs import RunInputs, of_group
from memory_vit.train.passes import PackMemory
from memory_vit.train.sweep import Trial

logger = logging.getLogger(__name__)

# Share of a chip's memory that a run may take, as in `sweep.free_bytes`.
_SHARE = 0.9
# Maximum number of larger batches to compile after a batch that fits.
_TRIES = 3
# Try a larger batch only if it has at least a tenth more images than the
# largest batch known to fit. After a batch that does not fit, multiply all
# later estimates of the largest batch by 0.9.
_WORTHWHILE, _LESS = 1.1, 0.9
# Text in the compiler's error if a program takes too much memory.
_TOO_LARGE = "RESOURCE_EXHAUSTED"
_GIB = 2**30
_FROZEN, _GRADIENT, _UPDATE = "frozen pass", "gradient", "update"


def plan(
  config: Config, topology: str, *, classes: int = 0, examples: int = 0
) -> str:
  """Describe a run on absent devices, without running anything.

  Args:
    config: configuration of the run.
    topology: see `absent_devices.devices`.
    classes: number of outputs of the task; 0 takes it from the data, or from
      the metadata of TFDS.
    examples: number of training examples; 0 takes it from the data. It is
      needed if the number of steps, or the memory of a cache, depends on it.

  Raises:
    ConfigError: for a configuration or a topology that is not possible, or if
      the compiler is not installed.
    DataError: if classes or examples are needed, but not known.
  """
  if config.optim.in_closed_form:
    raise ConfigError(
      f"config.optim.name is {config.optim.name!r}: a head in closed form is "
      "solved on the host, and there is no training step to compile for "
      f"{topology}."
    )
  chip = absent_devices.chip_of(topology)
  compiler = absent_devices.compiler(topology)
  mesh = sharding.make_mesh(
    absent_devices.devices(topology), fsdp=config.mesh.fsdp
  )
  if config.dtype == "auto":  # all known chips are faster in bfloat16
    config = dataclasses.replace(config, dtype="bfloat16")
  inputs = described_inputs.describe_inputs(
    config, mesh, chip, classes, examples
  )
  vit = inputs.backbone.config
  rows = [
    ("devices", f"{mesh.size} x {topology.partition(':')[0]}, "
     f"{chip.memory / _GIB:.4g} GiB each"),
    ("backbone", f"{vit.variant} at {vit.image_size} px, {vit.dtype}"),
  ]  # fmt: skip
  for group in sweep.by_pass_group(inputs.trials):
    without_cache = dataclasses.replace(of_group(inputs, group), cache=None)
    rows += _GroupPlan(without_cache, chip).rows()
  return (
    f"{aligned(rows)}\n\nEstimated by the compiler ({compiler}), not measured. "
    "Reading images, filling a cache, compiling and evaluation come on top."
  )


@dataclasses.dataclass(frozen=True)
class _Measured:
  """Memory of a step, and {name of a program: report of the compiler}."""

  memory: PackMemory
  reports: Mapping[str, CompilerReport]

  def seconds(self, config: Config, gigahertz: float) -> float:
    """Return the seconds of a step; accumulation repeats all but the update."""
    cycles = sum(
      report.cycles
      * (1 if name == _UPDATE else config.optim.accumulation_steps)
      for name, report in self.reports.items()
    )
    return cycles / gigahertz / 1e9


@dataclasses.dataclass(frozen=True)
class _GroupPlan:
  """Plan of the trials of one group, see `sweep.by_pass_group`."""

  inputs: RunInputs
  chip: Chip

  def rows(self) -> list[tuple[str, str]]:
    config, trials = self.inputs.config, self.inputs.trials
    if self._free <= 0:
      raise ConfigError(
        f"the backbone alone takes {_gib(self._backbone_bytes)} GiB of each "
        f"chip's {_gib(self.chip.memory)} GiB: distribute the backbone over "
        "more chips by a larger config.mesh.fsdp."
      )
    packs = self._packs()
    largest = max(packs, key=lambda p: (max(map(sweep.size, p)), len(p)))
    regimes = dict.fromkeys(trial.config.regime for trial in trials)
    measured = self._measure(largest, config.batch_size)
    rows = [
      ("regime", ", ".join(regimes)),
      (
        "steps",
        f"{config.total_steps:,} of {config.batch_size:,} images, for "
        f"{counted(len(trials), 'trial')} in {counted(len(packs), 'pass')}",
      ),
      ("memory", self._memory(measured)),
      ("largest batch", self._largest_batch(largest, measured)),
    ]
    if config.cache.has_rows:
      rows.append(("cache", self._cache()))
    if measured and self.chip.gigahertz:
      seconds = measured.seconds(config, self.chip.gigahertz)
      total = duration(config.total_steps * len(packs) * seconds)
      step = f"{1e3 * seconds:.3g} ms a step"
      rows.append(("training", f"about {total}, {step}"))
    return rows

  def _packs(self) -> list[list[Trial]]:
    """Return packs of all trials; each pack fits into the memory of a chip."""
    inputs = self.inputs
    if not inputs.config.sweep.memory_gib:
      free = max(1, self._free - self._cached_bytes) / _GIB
      config = inputs.config.replaced({"sweep.memory_gib": free})
      inputs = dataclasses.replace(inputs, config=config)

    def taken(program: Any, bytes_of: Any) -> int:
      report = self._compile(program)
      if report:
        return report.temporaries
      return live_memory.temporary_bytes(program, bytes_of)

    by_name = {trial.name: trial for trial in inputs.trials}
    try:
      plan = passes.plan_group(inputs, taken)
    except ConfigError:  # no trial fits; `_memory` reports this
      return [[trial] for trial in inputs.trials]
    return [[by_name[name] for name in names] for names in plan.passes]

  def _measure(
    self,
    trials: list[Trial],
    images: int,
    names: Collection[str] = (_FROZEN, _GRADIENT, _UPDATE),
  ) -> _Measured | None:
    """Measure a step of `images` images by compiling the programs in `names`.

    Return None if a program takes too much memory.
    """
    logger.info("compiling a step of %d images", images)
    config = dataclasses.replace(self.inputs.config, batch_size=images)
    inputs = dataclasses.replace(self.inputs, config=config)
    programs: list[Any] = []

    def note(program: Any, _: Any) -> int:
      programs.append(program)
      return 0

    memory = passes.pack_memory(inputs, trials, note)
    step, state = pack.shapes(inputs, trials)
    grads, metrics = (part.tree for part in programs[-1].out_info)
    update = step.update_program.trace(state, grads, metrics, 1.0)
    # If the frozen pass is cached, `programs` has only the gradient.
    by_name = dict(
      zip((_FROZEN, _GRADIENT)[-len(programs) :], programs, strict=True)
    )
    reports = {}
    for name, program in {**by_name, _UPDATE: update}.items():
      if name in names:
        report = self._compile(program)
        if report is None:
          return None
        reports[name] = report
    memory = dataclasses.replace(
      memory,
      temporary=max(report.temporaries for report in reports.values()),
      cached=self._cached_bytes,
    )
    return _Measured(memory, reports)

  def _compile(self, program: Any) -> CompilerReport | None:
    """Compile a program; return None if it takes too much memory."""
    try:
      compiled = program.lower().compile(compiler_options=self.chip.options)
    except jax.errors.JaxRuntimeError as error:
      if _TOO_LARGE not in str(error):
        raise
      return None
    return CompilerReport.of(compiled)

  @property
  def _backbone_bytes(self) -> int:
    """Bytes per chip of the backbone and of its copies in the compute dtype."""
    params = {"backbone": self.inputs.backbone.params}
    passed = jax.tree.leaves(self.inputs.frozen["backbone"])
    return sharding.bytes_on_a_device(
      [
        sharding.shapes(params, self.inputs.mesh),
        *(a for a in passed if a.dtype != jnp.float32),
      ]
    )

  @property
  def _free(self) -> int:
    """Bytes that a pack may take on a chip, besides the backbone."""
    return int(_SHARE * self.chip.memory) - self._backbone_bytes

  def _memory(self, measured: _Measured | None) -> str:
    if measured is None:
      return "more than a chip has: the compiler refuses a step"
    memory, reports = measured.memory, measured.reports
    largest = max(reports, key=lambda name: reports[name].temporaries)
    parts = {
      "backbone": self._backbone_bytes,
      "parameters, optimizer state and gradient": memory.state,
      "batches of images": memory.batches,
      "outputs of the backbone": memory.contexts,
      "cached rows of training": memory.cached,
      f"temporary arrays of the {largest}": memory.temporary,
    }
    parts = dict(sorted(parts.items(), key=lambda part: -part[1]))
    total = sum(parts.values())
    shown = ", ".join(
      f"{_gib(size)} {name}"
      for name, size in parts.items()
      if size > 0.01 * total
    )
    fits = "" if self._fits(measured) else ", too much"
    return f"{_gib(total)} GiB a chip{fits}: {shown}"

  def _largest_batch(
    self, trials: list[Trial], measured: _Measured | None
  ) -> str:
    """Find the largest batch that fits, by a few tries, and describe it."""
    config = self.inputs.config
    unit = self.inputs.mesh.size * config.optim.accumulation_steps
    images, most = config.batch_size, MOST_IMAGES + unit
    # Halve the batch and measure again. Extrapolation would be wrong: close to
    # the memory limit, the compiler recomputes values to save memory.
    while measured is None or not self._fits(measured):
      if images == unit or self._cached_bytes > self._free:
        return f"none: {counted(unit, 'image')} do not fit"
      most, images = images, max(unit, images // 2 // unit * unit)
      measured = self._measure(trials, images)
    largest = _largest_programs(measured.reports)
    share = 1.0
    for _ in range(_TRIES):
      reach = share * self._reach(images, measured.memory)
      wanted = int(min(reach, most - unit)) // unit * unit
      if wanted < _WORTHWHILE * images:
        break
      larger = self._measure(trials, wanted, largest)
      if larger and self._fits(larger):
        images, measured = wanted, larger
      else:
        most, share = wanted, _LESS * share
    total = _gib(self._backbone_bytes + measured.memory.total)
    return f"{images:,} images, which take {total} GiB a chip"

  def _fits(self, measured: _Measured) -> bool:
    return measured.memory.total <= self._free

  def _reach(self, images: int, memory: PackMemory) -> float:
    """Estimate the largest batch that fits.

    `memory` is the memory for training with batches of `images` images.
    """
    config = self.inputs.config
    evaluated, parts = config.batch_size_eval, config.optim.accumulation_steps
    left = self._free - memory.state - memory.cached
    of_one = (memory.batches + memory.temporary) / images
    # `memory.contexts` is the size in bytes of the contexts of an accumulation
    # step or of an evaluation batch, whichever has more images. `context` is
    # the size for one image.
    context = memory.contexts / max(images / parts, evaluated)
    return min(
      left / (of_one + context / parts), (left - context * evaluated) / of_one
    )

  def _cache(self) -> str:
    part, rows = self.inputs.config.cache.what, self._cached_rows
    row = f"{part} of {self._row_bytes:,} bytes an image"
    if not rows:
      return row
    return f"{row}: {_gib(self._row_bytes * rows)} GiB, {rows:,} training rows"

  @property
  def _row_bytes(self) -> int:
    config = self.inputs.config
    if not config.cache.has_rows:
      return 0
    width = jnp.dtype(config.cache.dtype).itemsize
    inputs = jax.tree.leaves(batches.batch_shapes(self.inputs)["inputs"])
    return sum(
      math.prod(a.shape[1:]) * min(width, a.dtype.itemsize) for a in inputs
    )

  @property
  def _cached_rows(self) -> int:
    """Number of cached training rows; 0 if the data set's size is unknown."""
    size = self.inputs.splits["train"].size
    return size * self.inputs.config.cache.crops

  @property
  def _cached_bytes(self) -> int:
    """Bytes of the cached training rows on each chip."""
    if self.inputs.config.cache.where != "device":
      return 0
    return self._row_bytes * self._cached_rows // self.inputs.mesh.size


def _largest_programs(reports: Mapping[str, CompilerReport]) -> list[str]:
  """Return names of programs with large temporary buffers.

  A program is listed if its buffers take at least half as many bytes as the
  largest buffers of all programs. When the batch grows, the buffers of any
  listed program may become the largest.
  """
  most = max(report.temporaries for report in reports.values())
  return [n for n, r in reports.items() if 2 * r.temporaries >= most]


def _gib(size: int) -> str:
  return f"{size / _GIB:.3g}"
