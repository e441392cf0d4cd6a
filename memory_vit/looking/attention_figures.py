"""Figures of attention maps, attention to memory, and memory ablations."""

# Annotations stay strings, so that `help` shows types by their short names.
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import cm, colormaps, colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from memory_vit.errors import DataError
from memory_vit.looking.attention_map import overlay, patch_map
from memory_vit.looking.attention_shares import (
  AttentionShares,
  attention_shares,
)
from memory_vit.looking.token_attention import TokenAttention
from memory_vit.plots.images import to_pixels
from memory_vit.runtime.messages import counted, escaped, shortened

if TYPE_CHECKING:
  from memory_vit.looking.attention_rollout import AttentionRollout
  from memory_vit.looking.cell_removal import CellRemoval

# Maximum number of panels in a row, and the side of a panel in inches.
_COLUMNS = 8
_PANEL = 1.35
# Height of a panel's header in inches, enough for two lines of text; maximum
# number of characters per line.
_HEADER, _HEADER_CHARACTERS = 0.3, 17
_BAR = 4.0  # maximum length of a colour bar, in inches
# Minimum side of a drawn image, in pixels: smaller images are enlarged.
_SIDE = 192
_OPACITY = 0.65
# Colour map of differences, from purple to orange, which colour-blind readers
# can tell apart. Printed in grey, both ends of the colour map are dark, so
# outlines also show the sign.
_DIVERGING = "PuOr_r"
# {label: (colour, hatch)}, in hues of Okabe and Ito's palette. Printed in grey,
# neighboring parts of a bar still differ in lightness.
_PARTS = {
  "patches": ("#bfd9ec", ""),
  "backbone's class tokens, registers": ("#0072b2", ""),
  "own class token": ("#f0e442", ""),
  "own memory": ("#d55e00", ""),
  "parents' class tokens": ("#f0e442", "////"),
  "parents' memory": ("#d55e00", "////"),
}
# Maximum number of characters in a line of a title, per inch of the figure.
_CHARACTERS = 11
# A heat map shows numbers in its fields if it has at most `_MOST_NUMBERS`
# columns. An axis has at most `_MOST_TICKS` ticks.
_MOST_NUMBERS, _MOST_TICKS = 13, 24


def attention_overlays(
  images: np.ndarray,
  attention: TokenAttention,
  rollout: AttentionRollout | None = None,
  titles: Sequence[str] = (),
) -> Figure:
  """Draw attention maps of a task over images: each layer, and the rollout.

  Each map lies over a grey copy of its image. All layers of all images share a
  colour scale, and all rollouts share another; the colour bars show both.

  Args:
    images: floats (b, side, side, 3) in [-1, 1], as the model takes them, or
      uint8 pixels; or one image (side, side, 3).
    attention: result of `token_attention` for a task on these images.
    rollout: result of `attention_rollout` for this task; None leaves it out.
    titles: a title for each image, such as the result of `answer_title`.

  Raises:
    DataError: if the shape of images is wrong, or numbers of images differ.
  """
  counts = [len(attention.image)]
  counts += [] if rollout is None else [len(rollout.image)]
  counts += [len(titles)] if titles else []
  pictures = _pictures(images, *counts)
  maps = [_layer_maps(attention)]
  maps += [] if rollout is None else [patch_map(rollout)[:, -1:]]
  labels = ("attention to a patch", "rollout")
  figure = _maps_figure(pictures, titles, maps, _show_overlay, labels)
  _title(figure, f"what {attention.task} attends to")
  return figure


def answer_title(
  guess: str, probability: float | None = None, label: str = ""
) -> str:
  """Return a title: an image's class, if known, and below it the prediction."""
  share = "" if probability is None else f" {100 * probability:.0f} %"
  room = _HEADER_CHARACTERS - len(share)
  guess = shortened(escaped(guess), room)
  lines = [shortened(escaped(label), _HEADER_CHARACTERS)] if label else []
  return "\n".join([*lines, f"\N{RIGHTWARDS ARROW} {guess}{share}"])


def attention_difference(
  images: np.ndarray,
  first: TokenAttention,
  second: TokenAttention,
  rollouts: tuple[AttentionRollout, AttentionRollout] | None = None,
) -> Figure:
  """Draw how attention maps of two tasks differ: each layer, and the rollout.

  Orange with a solid outline marks where the first task attends more, purple
  with a dashed outline where the second does. Each map is first scaled to a sum
  of 1: attention to memory does not count (see `memory_shares_figure`). The
  outlines are at half of the scale, which is symmetric and equal in all layers.

  Args:
    images: as for `attention_overlays`.
    first: result of `token_attention` for the first task on these images.
    second: the same for the second task.
    rollouts: results of `attention_rollout` for the first and the second task;
      None leaves them out.

  Raises:
    DataError: as for `attention_overlays`.
  """
  parts = (first, second, *(rollouts or ()))
  pictures = _pictures(images, *(len(part.image) for part in parts))
  maps = [_relative(_layer_maps(first)) - _relative(_layer_maps(second))]
  if rollouts is not None:
    a, b = (_relative(patch_map(rollout)[:, -1:]) for rollout in rollouts)
    maps.append(a - b)
  labels = ("attention", "rollout")
  figure = _maps_figure(pictures, (), maps, _show_difference, labels)
  _title(
    figure,
    f"orange, solid: {first.task} attends more",
    f"purple, dashed: {second.task} attends more",
  )
  return figure


def memory_shares_figure(shares: AttentionShares | TokenAttention) -> Figure:
  """Draw how a task distributes its attention in each layer.

  On the left is a bar for each layer, whose parts add up to 1; on the right, if
  the task has memory, the share of each of its cells.

  Args:
    shares: result of `attention_shares`; or of `token_attention`, which is then
      averaged.
  """
  if isinstance(shares, TokenAttention):
    shares = attention_shares(shares)
  depth, cells = shares.memory.shape
  wide = min(max(2.6, 0.5 * cells + 1.2), 8.0) if cells else 0.0
  bars = min(max(3.0, 0.45 * depth + 1.0), 8.0)
  figure = Figure(
    figsize=(bars + wide, 4.6 if depth > 6 else 3.8), layout="constrained"
  )
  grid = figure.add_gridspec(1, 2 if cells else 1, width_ratios=(
    (bars, wide) if cells else (1,)
  ))  # fmt: skip
  axes = figure.add_subplot(grid[0])
  _bars(axes, shares)
  figure.legend(
    *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2,
    fontsize=8, frameon=False,
  )  # fmt: skip
  if cells:
    axes = figure.add_subplot(grid[1])
    values = 100 * shares.memory
    mappable = _heat(axes, values, "cividis", (0.0, float(values.max())))
    _numbers(axes, [[f"{v:.1f}" for v in row] for row in values], mappable)
    axes.set_title("own memory, each cell", fontsize=10)
    figure.colorbar(mappable, ax=axes, label="% of attention", shrink=0.8)
  images = counted(shares.images, "image")
  _title(figure, f"attention of {shares.task}", f"mean of {images}")
  return figure


def cell_removal_figure(removal: CellRemoval) -> Figure:
  """Draw an ablation of memory cells: how accuracy changes without each cell.

  Each field shows top-1 without a cell minus top-1 with all cells, in points,
  with its standard error; in the rightmost column, all cells of a layer are
  removed. Significant differences (p < 0.05, Bonferroni) are bold. With more
  than 12 cells there is no room for numbers, and dots mark significant ones.
  The colour scale covers at least four standard errors: noise stays pale.

  Args:
    removal: result of `remove_cells` for a task.
  """
  points = 100 * np.column_stack(
    [removal.cells.difference, removal.layers.difference]
  )
  errors = 100 * np.column_stack(
    [removal.cells.standard_error, removal.layers.standard_error]
  )
  sure = np.column_stack(
    [removal.significant(removal.cells), removal.significant(removal.layers)]
  )
  depth, columns = points.shape
  figure = Figure(
    figsize=(min(max(5.0, 0.62 * columns + 2.2), 12.0), 0.38 * depth + 2.2),
    layout="constrained",
  )
  axes = figure.subplots()
  peak = float(max(np.abs(points).max(), 4 * errors.max())) or 1.0
  mappable = _heat(axes, points, _DIVERGING, (-peak, peak))
  texts = [
    [f"{_signed(v)}\n±{e:.1f}" for v, e in zip(row, error, strict=True)]
    for row, error in zip(points, errors, strict=True)
  ]
  _numbers(axes, texts, mappable, bold=sure)
  axes.axvline(columns - 1.5, color="black", linewidth=1.5)
  # Leave out ticks whose labels would touch the label "all" of the last tick.
  apart = 0.7 * -(-columns // _MOST_TICKS)
  places = [p for p in _ticks(columns) if p < columns - 1 - apart]
  axes.set_xticks(
    [*places, columns - 1], [*(str(p + 1) for p in places), "all"], fontsize=9
  )
  mark, errors_are = (
    ("bold", "; ±: standard error") if axes.texts else ("dot", "")
  )
  axes.set_xlabel(
    "memory cell that is removed\n"
    f"{mark}: significant (p < 0.05, Bonferroni){errors_are}"
  )
  figure.colorbar(mappable, ax=axes, label="change of top-1, points")
  memory = removal.memory
  change = _signed(100 * float(memory.difference))
  _title(
    figure,
    f"{removal.task}: top-1 {100 * removal.top1:.1f} % on "
    + counted(removal.examples, "image"),
    f"{removal.data} {removal.split}",
    f"without any memory {change} ± "
    f"{100 * float(memory.standard_error):.1f} points",
  )
  return figure


def _pictures(images: np.ndarray, *counts: int) -> list[np.ndarray]:
  """Return enlarged uint8 images; raise unless each count is `len(images)`."""
  images = np.asarray(images)
  images = to_pixels(images[None] if images.ndim == 3 else images)
  for count in counts:
    if count != len(images):
      raise DataError(
        f"the number of images is {len(images)}, but attention, rollouts or "
        f"titles are for {count} images: expected equal numbers."
      )
  times = math.ceil(_SIDE / images.shape[1])
  return list(images.repeat(times, axis=1).repeat(times, axis=2))


def _grey(picture: np.ndarray) -> np.ndarray:
  return np.asarray(Image.fromarray(picture).convert("L").convert("RGB"))


def _layer_maps(attention: TokenAttention) -> np.ndarray:
  """Return attention maps (b, l, rows, columns), averaged over heads."""
  maps = patch_map(attention)
  return maps.mean(axis=tuple(range(2, maps.ndim - 2)))


def _relative(maps: np.ndarray) -> np.ndarray:
  """Scale maps (..., rows, columns) to a sum of 1; maps of zeros stay zero."""
  total = maps.sum((-2, -1), keepdims=True)
  return np.divide(maps, total, out=np.zeros_like(maps), where=total > 0)


def _maps_figure(
  pictures: Sequence[np.ndarray],
  titles: Sequence[str],
  maps: Sequence[np.ndarray],
  show: Callable[[Axes, np.ndarray, np.ndarray, float, str], None],
  labels: Sequence[str],
) -> Figure:
  """Return a figure that shows each image and, beside the image, its maps.

  `maps` has an array (b, l, rows, columns) with the maps of the layers and, if
  rollouts are shown, an array (b, 1, rows, columns) with the rollouts.
  """
  depth = maps[0].shape[1]
  headers = [f"layer {i + 1}" for i in range(depth)] + ["rollout"]
  figure, rows = _panels(len(pictures), sum(part.shape[1] for part in maps))
  peaks = [float(np.abs(part).max()) for part in maps]
  scales = [peaks[0]] * depth + peaks[1:]
  for i, (picture, (first, *panels)) in enumerate(
    zip(pictures, rows, strict=True)
  ):
    _show(first, picture, titles[i] if titles else "image")
    heats = [heat for part in maps for heat in part[i]]
    for axes, *shown in zip(panels, heats, scales, headers, strict=False):
      show(axes, picture, *shown)
  signed = show is _show_difference
  name = _DIVERGING if signed else "inferno"
  limits = [(-peak if signed else 0.0, peak) for peak in peaks]
  _colour_bars(figure, rows, name, limits, labels)
  return figure


def _panels(images: int, panels: int) -> tuple[Figure, list[list[Axes]]]:
  """Return a figure and, per image, [axes of the image, axes of each panel]."""
  lines = -(-panels // (_COLUMNS - 1))
  columns = -(-panels // lines)
  height = (_PANEL + _HEADER) * lines * images + 0.8
  figure = Figure(
    figsize=(_PANEL * (1 + columns) + 1.9, height), layout="constrained"
  )
  grid = figure.add_gridspec(lines * images, 1 + columns)
  places = [(0, 0)]
  places += [(i // columns, 1 + i % columns) for i in range(panels)]
  return figure, [
    [
      figure.add_subplot(grid[image * lines + line, column])
      for line, column in places
    ]
    for image in range(images)
  ]


def _show(axes: Axes, content: np.ndarray, title: str) -> None:
  axes.imshow(content)
  axes.set_title(title, fontsize=9, parse_math=False)
  axes.set_axis_off()


def _show_overlay(
  axes: Axes, picture: np.ndarray, heat: np.ndarray, peak: float, title: str
) -> None:
  _show(axes, overlay(_grey(picture), heat, peak=peak, opacity=_OPACITY), title)


def _show_difference(
  axes: Axes, picture: np.ndarray, heat: np.ndarray, peak: float, title: str
) -> None:
  """Draw a difference of maps over an image; zeros are transparent."""
  height, width = picture.shape[:2]
  sized = np.asarray(
    Image.fromarray(heat.astype(np.float32)).resize(
      (width, height), Image.Resampling.NEAREST
    )
  )
  share = np.clip(sized / peak, -1, 1) if peak else np.zeros_like(sized)
  colour = colormaps[_DIVERGING]((share + 1) / 2)[..., :3]
  # Lighten the image, so that dark colours stand out against it.
  ground = 0.55 + 0.45 * _grey(picture) / 255
  strength = 0.9 * np.sqrt(np.abs(share))[..., None]
  _show(axes, strength * colour + (1 - strength) * ground, title)
  for level, style in ((0.5, "solid"), (-0.5, "dashed")):
    if share.min() < level < share.max():
      axes.contour(
        share, levels=[level], colors="black", linestyles=style, linewidths=0.8
      )


def _colour_bars(
  figure: Figure,
  rows: Sequence[Sequence[Axes]],
  name: str,
  limits: Sequence[tuple[float, float]],
  labels: Sequence[str],
) -> None:
  panels = [axes for row in rows for axes in row]
  # Draw the last bar first: matplotlib puts new bars to the left of old bars.
  for i in reversed(range(len(limits))):
    scale = cm.ScalarMappable(colors.Normalize(*limits[i]), name)
    bar = figure.colorbar(
      scale, ax=panels, pad=0.015, aspect=25, anchor=(0.0, 1.0),
      shrink=min(0.9, _BAR / figure.get_figheight()),
    )  # fmt: skip
    bar.ax.tick_params(labelsize=8)
    bar.set_label(labels[i], size=9)


def _title(figure: Figure, *lines: str) -> None:
  """Set the title; shorten its lines, and escape untrusted names in them."""
  width = int(figure.get_figwidth() * _CHARACTERS)
  figure.suptitle(
    "\n".join(shortened(escaped(line), width) for line in lines),
    fontsize=11,
    parse_math=False,
  )


def _signed(value: float) -> str:
  """Format percentage points with one decimal and a sign; zero has no sign."""
  text = f"{value:+.1f}"
  return "0.0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def _bars(axes: Axes, shares: AttentionShares) -> None:
  """Draw a stacked bar for each layer: patches at the bottom, memory on top."""
  depth = len(shares.patches)
  none = np.zeros(depth)
  values = (
    shares.patches,
    shares.backbone_tokens,
    shares.token,
    shares.memory.sum(-1),
    sum(shares.parent_tokens.values(), none),
    sum((cells.sum(-1) for cells in shares.parent_memory.values()), none),
  )
  layers, bottom = np.arange(1, depth + 1), none
  for (label, (colour, hatch)), part in zip(
    _PARTS.items(), values, strict=True
  ):
    if part.any():
      axes.bar(
        layers, part, bottom=bottom, label=label, color=colour, hatch=hatch,
        edgecolor="black", linewidth=0.5,
      )  # fmt: skip
    bottom = bottom + part
  axes.set(xlabel="layer", ylabel="share of attention", ylim=(0, 1))
  axes.set_xticks([layers[place] for place in _ticks(depth)])


def _heat(
  axes: Axes, values: np.ndarray, name: str, limits: tuple[float, float]
) -> Any:
  """Draw a heat map (l, columns), first layer on top; return its AxesImage."""
  low, high = limits
  drawn = axes.imshow(
    values, name, vmin=low, vmax=high if high > low else low + 1,
    aspect="auto", interpolation="nearest",
  )  # fmt: skip
  rows, columns = values.shape
  for axis, count in ((axes.yaxis, rows), (axes.xaxis, columns)):
    places = _ticks(count)
    axis.set_ticks(places, [str(p + 1) for p in places], fontsize=9)
  axes.set(xlabel="cell", ylabel="layer")
  return drawn


def _ticks(count: int) -> list[int]:
  """Return at most `_MOST_TICKS` evenly spaced positions, starting at 0."""
  return list(range(0, count, -(-count // _MOST_TICKS)))


def _numbers(
  axes: Axes,
  texts: Sequence[Sequence[str]],
  drawn: Any,
  bold: np.ndarray | None = None,
) -> None:
  """Write a text in each field of the heat map `drawn`.

  If there are too many columns, draw dots in the `bold` fields instead.
  """
  shades = drawn.to_rgba(drawn.get_array())[..., :3] @ (0.299, 0.587, 0.114)
  colours = np.where(shades < 0.5, "white", "black")
  if len(texts[0]) > _MOST_NUMBERS:
    if bold is not None:
      rows, columns = np.nonzero(bold)
      axes.scatter(columns, rows, s=12, c=colours[rows, columns], linewidths=0)
    return
  for (row, column), colour in np.ndenumerate(colours):
    heavy = bold is not None and bold[row, column]
    axes.text(
      column, row, texts[row][column], ha="center", va="center", fontsize=7.5,
      color=str(colour), fontweight="bold" if heavy else "normal",
    )  # fmt: skip
