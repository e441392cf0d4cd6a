"""What a study found about tasks in one model: interference, extension."""

from collections.abc import Sequence

from memory_vit.config import Config
from memory_vit.study import paper_numbers, runs, wording
from memory_vit.study.analysis import Finding
from memory_vit.study.selection import Point, choose, select
from memory_vit.study.wording import percent


def interference(
  config: Config,
  naive: Sequence[float],
  masked: Sequence[tuple[float, float]],
) -> Finding:
  """Accuracy of the first task as memories of others are added.

  Args:
    config: of the study.
    naive: accuracies without a mask: alone, with one other, ...
    masked: with masked tasks: accuracy and the largest difference of a logit.
      Both are empty where a task of them diverged.
  """
  rows, others = [], runs.other_names(config)
  for i, (unmasked, (kept, difference)) in enumerate(
    zip(naive, masked, strict=True)
  ):
    paper = paper_numbers.INTERFERENCE
    rows.append(
      {
        "memories": f"+ {others[i - 1]}" if i
                    else f"own ({config.data.name})",
        "no mask": unmasked,
        "masked": kept,
        "largest difference of a logit": difference,
        "paper, no mask": paper[i] if i < len(paper) else None,
      }
    )  # fmt: skip
  said = ("Not measured: a task diverged at every learning rate.",)
  if rows:
    lost = 100 * (naive[0] - naive[-1])
    count = wording.count(len(naive) - 1, "other task")
    largest = max(difference for _, difference in masked)
    logits = (
      "no logit changes at all"
      if largest == 0
      else f"logits differ by up to {largest:.1e}"
    )
    change = 100 * (masked[-1][0] - masked[0][0])
    said = (
      f"Without a mask the memories of {count} take the first task from "
      f"{percent(naive[0])} to {percent(naive[-1])}, by {lost:.1f} points.",
      f"With the mask it goes from {percent(masked[0][0])} to "
      f"{percent(masked[-1][0])}, by {abs(change):.1f} points, and {logits}.",
    )
  return Finding(
    title="Interference of memories that are put side by side",
    rows=rows,
    sentences=said,
    notes=(
      f"Tasks of {config.task.cells} cells with the first of the seeds, each "
      "at the learning rate that is best on validation; test split of "
      f"{config.data.name}. A row has the memories of those above it, too. The "
      "paper's numbers are of i-Naturalist, then + Places, + CIFAR, + SUN.",
    ),
  )


def extension(config: Config, points: Sequence[Point]) -> Finding:
  """A task alone, as in a concatenation, and one that attends to the first."""
  other, m = runs.other_names(config)[0], config.task.cells
  some = {"regime": "memory_masked", "data": other, "cells": m}
  alone = choose(select(points, **some))
  reading = choose(select(points, **some, reads=True))
  first = config.data.name
  rows = [
    {"model": "concatenation", "task": other, "attends to": None,
     **wording.columns(alone)},
    {"model": "extension", "task": other, "attends to": first,
     **wording.columns(reading)},
  ]  # fmt: skip
  return Finding(
    title=f"Extension and concatenation: {other} after {first}",
    rows=rows,
    sentences=(
      wording.difference(
        f"{other} attending to {first} (extension)",
        reading,
        f"{other} beside it (concatenation)",
        alone,
      ),
    ),
    notes=(
      wording.REPORTED,
      wording.how_chosen(config, ["memory_masked"]),
      *wording.at_an_end(config, {row["model"]: row for row in rows}),
      f"Both of {m} cells. What is attended to is the memory_masked task of "
      "the same seed that is best on validation. Beside others in a "
      "concatenation a task is what it is alone.",
    ),
  )
