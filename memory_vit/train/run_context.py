"""Context of a run: devices, signals, allowed changes."""

import dataclasses
from collections.abc import Callable

from jax.sharding import Mesh

from memory_vit.runtime.preemption import StopSignal


@dataclasses.dataclass(frozen=True)
class RunContext:
  """Devices, stop signal and allowed changes of a run.

  Attributes:
    mesh: over which batches are split.
    stop: is asked after every step, and in every batch of an evaluation.
    may_change: options of the configuration that may not be those with which
      a run began, from `config_changes.allowed`.
    require_alone: raises where another run may be using the directory; is
      called before a state is saved. All processes call it.
  """

  mesh: Mesh
  stop: StopSignal = dataclasses.field(default_factory=StopSignal)
  may_change: tuple[str, ...] = ()
  require_alone: Callable[[], None] = lambda: None
