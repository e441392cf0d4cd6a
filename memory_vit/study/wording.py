"""What the numbers of a study say, in words and in columns of a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from memory_vit.config import Config
from memory_vit.study import runs
from memory_vit.study.selection import Choice, Point, choose, select

# What a table has chosen is said below it.
REPORTED = (
  "`test` is the mean over seeds on the test split, at the learning rate that "
  "is best on the validation split; `validation` is what it was chosen by; "
  "`spread` is the greatest less the least of the seeds (none for one), in "
  "points; a difference counts as more than the spread where it exceeds both "
  "spreads."
)


def how_chosen(config: Config, regimes: Sequence[str]) -> str:
  """How the learning rates of some regimes were chosen."""
  searched = [r for r in regimes if runs.search_seed(config, r) is not None]
  others = [r for r in regimes if r not in searched]
  lines = []
  if searched:
    lines.append(
      f"The learning rates of {listed(searched)} were chosen by the first seed "
      f"({config.study.seeds[0]}) alone, and further seeds run at the chosen "
      "one."
    )
  if others:
    lines.append(
      f"Those of {listed(others)} were chosen by the mean over seeds, none of "
      "which may diverge."
      if searched
      else "Learning rates were chosen by the mean over seeds, none of which "
      "may diverge."
    )
  return " ".join(lines)


def of_regime(
  config: Config, points: Sequence[Point], regime: str, cells: int
) -> list[Point]:
  """Points of a regime on the first data set."""
  return select(points, regime=regime, data=config.data.name, cells=cells)


def choice_of(
  config: Config, points: Sequence[Point], regime: str, cells: int
) -> Choice | None:
  """The learning rate of a regime on the first data set."""
  seed = runs.search_seed(config, regime)
  return choose(of_regime(config, points, regime, cells), seed)


def columns(choice: Choice | None) -> dict[str, Any]:
  """Columns of a table; without accuracies where nothing could be chosen."""
  if choice is None:
    return {
      "learning rate": None, "validation": None, "test": None, "spread": None,
      "seeds": 0, "diverged": "at every rate",
    }  # fmt: skip
  return {
    "learning rate": choice.learning_rate,
    "validation": choice.validation,
    "test": choice.test,
    "spread": choice.spread,
    "seeds": len(choice.tests),
    "diverged": _diverged(choice),
  }


def compared(
  config: Config,
  points: Sequence[Point],
  pairs: Sequence[tuple[tuple[str, int], tuple[str, int]]],
) -> tuple[str, ...]:
  """How regimes, each with its cells, stand to each other on the test split.

  Returns:
    A sentence for every pair whose regimes are both to be run.
  """
  wanted = config.study.regimes
  found = [
    difference(
      label(*one),
      choice_of(config, points, *one),
      label(*other),
      choice_of(config, points, *other),
    )
    for one, other in pairs
    if not wanted or {one[0], other[0]} <= {*wanted}
  ]
  # Of a regime that diverged every pair says the same.
  return tuple(dict.fromkeys(found))


def difference(
  one: str, first: Choice | None, other: str, second: Choice | None
) -> str:
  """How the test accuracies of two choices stand to each other."""
  for name, choice in ((one, first), (other, second)):
    if choice is None:
      return f"{name} diverged at every learning rate (with a seed at least)."
  points = 100 * (first.test - second.test)
  # As it is shown: what is 0.0 to one decimal lies on no side.
  if abs(points) < 0.05:
    stands = f"{one} equals {other} to 0.1 points"
  else:
    side = "above" if points > 0 else "below"
    stands = f"{one} is {abs(points):.1f} points {side} {other}"
  remarks = "".join(
    f"; of {name} diverged {_diverged(choice)} seeds"
    for name, choice in ((one, first), (other, second))
    if choice.diverged
  )
  return f"{stands}, {_against_spread(points, first, second)}{remarks}."


def label(regime: str, cells: int) -> str:
  """A regime, with its cells where it has some."""
  return f"{regime} ({count(cells, 'cell')})" if cells else regime


def labelled(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """Rows of a table of regimes, by their labels."""
  return {label(row["regime"], row["cells"] or 0): row for row in rows}


def at_an_end(config: Config, rows: Mapping[str, Any]) -> tuple[str, ...]:
  """Where a better learning rate may lie outside of those that were tried.

  Args:
    config: of the study.
    rows: {what was learned: its row of a table}.

  Returns:
    One sentence, or none.
  """
  ends = (min(config.study.learning_rates), max(config.study.learning_rates))
  found = [
    f"{name} ({row['learning rate']})"
    for name, row in rows.items()
    if row["learning rate"] in ends
  ]
  if not found:
    return ()
  return (
    f"The best learning rate is the lowest or the highest that was tried of "
    f"{listed(found)}: a better one may lie beyond.",
  )


def percent(share: float) -> str:
  """0.123 -> "12.3 %"."""
  return f"{100 * share:.1f} %"


def listed(names: Sequence[str]) -> str:
  """["a", "b", "c"] -> "a, b and c"."""
  *first, last = names
  return f"{', '.join(first)} and {last}" if first else last


def count(number: int, what: str) -> str:
  """2, "seed" -> "2 seeds"."""
  return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _diverged(choice: Choice) -> str | None:
  """ "1 of 3"; None where no seed did."""
  if not choice.diverged:
    return None
  return f"{choice.diverged} of {len(choice.tests) + choice.diverged}"


def _against_spread(points: float, first: Choice, second: Choice) -> str:
  """Whether a difference (in points) is more than what seeds make."""
  spreads = (first.spread, second.spread)
  if None in spreads:
    return "with one seed, thus no spread, on at least one side"
  shown = " and ".join(f"{100 * spread:.1f}" for spread in spreads)
  if abs(points) > 100 * max(spreads):
    return f"more than the spread over seeds ({shown})"
  return f"within the spread over seeds ({shown})"
