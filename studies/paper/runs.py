"""The runs of a study, each with a name that describes it; parts share runs."""

import dataclasses
import itertools
from collections.abc import Sequence

import memory_vit as mv
from memory_vit.config import SweepConfig, UpstreamConfig, cacheable_part
from memory_vit.model import get_regime
from studies.paper.study import Study, slug


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperRun:
  """A run: a sweep if the trials of its regime share a pass, else a trial."""

  regime: str
  data: str  # a name in `Study.data_sets`
  seed: int  # of initialization and order of images
  learning_rates: tuple[float, ...]  # empty until the best one is known
  cells: tuple[int, ...] = ()  # empty in a regime without memory
  tested: bool = True  # on the test split
  reads: "PaperRun | None" = None  # the run whose best task it attends to

  @property
  def name(self) -> str:
    """Regime, data, seed and what else varies; used as a directory."""
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
  """Configure a run whose learning rate is known."""
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
  cache = config.cache
  if cache.what in ("contexts", "features"):
    cache = dataclasses.replace(cache, what=cacheable_part(run.regime))
  sweep = SweepConfig()
  if get_regime(run.regime).shares_pass:
    sweep = SweepConfig(
      learning_rate=run.learning_rates,
      cells=run.cells,
      # Which task another part needs is known only afterwards.
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
    cache=cache,
    # The backbone's own task is not studied.
    upstream=UpstreamConfig(),
    wandb=config.wandb.of_many(),
    log_images=0,
    export_orbax=False,
  )


def is_read(run: PaperRun) -> bool:
  """Whether interference and extension need tasks of this run."""
  return run.regime == "memory_masked"
