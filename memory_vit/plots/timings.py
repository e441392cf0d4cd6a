"""Bar charts of times."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from memory_vit.errors import DataError
from memory_vit.runtime.messages import escaped

_COLOUR = "#4c78a8"


def timing_bars(seconds: Mapping[str, float], *, title: str) -> Figure:
  """Draw times as bars, each with its seconds and its multiple of the first.

  Args:
    seconds: {name: seconds}, from top to bottom, for example the result of
      `evaluation.median_seconds`.
    title: title of the figure.

  Raises:
    DataError: if there are no times, or if a time is not finite and above 0.
  """
  values = np.array(list(seconds.values()), np.float64)
  if not len(values) or not (np.isfinite(values) & (values > 0)).all():
    raise DataError(
      f"the times are {list(values)}, expected one or more finite numbers "
      "above 0."
    )
  figure = Figure(figsize=(8, 0.9 + 0.4 * len(values)), layout="constrained")
  axes = figure.subplots()
  # Place bars at integers: matplotlib would merge bars with equal names.
  places = range(len(values))
  bars = axes.barh(places, values, color=_COLOUR)
  axes.set_yticks(places, [escaped(name) for name in seconds], parse_math=False)
  axes.bar_label(
    bars,
    [f"{value:.3g} s ({value / values[0]:.3g} x)" for value in values],
    padding=4,
  )
  axes.invert_yaxis()  # the first bar is at the top
  axes.set_title(escaped(title), parse_math=False)
  axes.set(xlabel="seconds", xlim=(0, 1.3 * values.max()))
  axes.grid(axis="x", alpha=0.3)
  axes.set_axisbelow(True)
  return figure
