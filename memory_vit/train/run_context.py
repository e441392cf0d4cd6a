"""What a run is given beside its configuration."""

import dataclasses
from collections.abc import Callable, Mapping

from jax.sharding import Mesh

from memory_vit.data.reader import Reader
from memory_vit.model.backbone import Backbone
from memory_vit.runtime.preemption import StopSignal


@dataclasses.dataclass(frozen=True)
class RunContext:
  """Devices, and how a run is told to stop, to go on changed, or to give way.

  Attributes:
    mesh: over which batches are split.
    stop: is asked after every step, and in every batch of an evaluation.
    may_change: options of the configuration that may not be those with which
      a run began, from `config_changes.allowed`.
    require_alone: raises where another run may be using the directory; is
      called before a state is saved. All processes call it.
    splits: {"train": reader, ...}, where they are given and not opened.
    backbone: the one that is given and not opened; None opens one.
  """

  mesh: Mesh
  stop: StopSignal = dataclasses.field(default_factory=StopSignal)
  may_change: tuple[str, ...] = ()
  require_alone: Callable[[], None] = lambda: None
  splits: Mapping[str, Reader] = dataclasses.field(default_factory=dict)
  backbone: Backbone | None = None
