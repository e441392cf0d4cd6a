"""The runs of a study, each named by what it is; parts share runs."""

import dataclasses
import itertools
from collections.abc import Sequence

import memory_vit as mv
from memory_vit.config import SweepConfig, UpstreamConfig, cacheable_part
from memory_vit.model import get_regime
from studies.paper.study import Study, slug


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperRun:
  """A run of a study, in a directory of its own.

  A regime whose trials share a pass learns all its rates and cells in one
  sweep; a run of the others is one trial.
  """

  regime: str
  data: str  # a name in `Study.data_sets`
  seed: int  # of initial values and batches
  learning_rates: tuple[float, ...]  # empty until the best one is known
  cells: tuple[int, ...] = ()  # empty in a regime without memory
  tested: bool = True  # whether it is evaluated on the test split
  reads: "PaperRun | None" = None  # whose best task it attends to (extension)

  @property
  def name(self) -> str:
    """Regime, data, seed and what else varies; good as a directory."""
    parts = [self.regime, slug(self.data)]
    if self.reads:
      parts.append(f"reading-{slug(self.reads.data)}")
    if not get_regime(self.regime).shares_pass:
      parts += [f"cells{self.cells[0]}"] if self.cells else []
      rates = self.learning_rates or ("-of-the-best",)
      parts.append(f"rate{rates[0]}")
    return "-".join([*parts, f"seed{self.seed}"])

  @property
  def trials(self) -> list[tuple[float, int]]:
    """(learning rate, cells) of each task that it learns."""
    return list(itertools.product(self.learning_rates, self.cells or (0,)))


def config_of(
  study: Study, run: PaperRun, attends_to: Sequence[str] = ()
) -> mv.Config:
  """Configure a run whose learning rate is known.

  `attends_to` is the directory of the task that it reads.
  """
  config = study.config
  first = run.data == study.data.name
  data = study.data_sets[run.data]
  if not run.tested:
    data = dataclasses.replace(data, test="")
  task = dataclasses.replace(
    config.task,
    name=config.task.name if first else "",
    cells=run.cells[0] if run.cells else config.task.cells,
    attends_to=tuple(attends_to),
  )
  keep = config.keep
  if keep.what in ("contexts", "features"):
    keep = dataclasses.replace(keep, what=cacheable_part(run.regime))
  sweep = SweepConfig()
  if get_regime(run.regime).shares_pass:
    sweep = SweepConfig(
      learning_rate=run.learning_rates,
      cells=run.cells,
      # All of them: which one another part needs is known afterwards.
      export="all" if is_read(run) else "best",
      memory_gib=config.sweep.memory_gib,
    )
  return dataclasses.replace(
    config,
    regime=run.regime,
    seed=run.seed,
    learning_rate=run.learning_rates[0],
    data=data,
    task=task,
    sweep=sweep,
    keep=keep,
    # The backbone's own task is not what is studied.
    upstream=UpstreamConfig(),
    wandb=config.wandb.of_many(),
    log_images=0,
    export_orbax=False,
  )


def is_read(run: PaperRun) -> bool:
  """Whether the parts on interference and extension read tasks of a run."""
  return run.regime == "memory_masked"
