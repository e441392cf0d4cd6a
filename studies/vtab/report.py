"""Make the report of a benchmark from its directory alone, without jax.

A mean is printed only if all of its tasks were measured, on the test images of
the benchmark: a mean of 18 tasks is no number of VTAB-1k.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory_vit.config import to_dict
from studies import record as files
from studies.record import Record, read_json, read_record
from studies.vtab.published import NOTES, ROWS
from studies.vtab.scores import Score
from studies.vtab.tasks import GROUPS, TASKS, VtabTask

Scores = Mapping[tuple[str, str], Score]
# Measurements of all tasks in one model.
TOGETHER = "together.json"
_PROTOCOL = (
  "The protocol: every image is resized to the square of the backbone, without "
  "crop or flip; every setting is trained on 800 images with the first seed, "
  "and the one that is best on 200 others is trained on all 1,000, in a run "
  "for each seed; the last step is tested, once, on the original test split. "
  "Accuracies are means over seeds, in per cent."
)
_OF_SEEDS = (
  "The highest accuracy minus the lowest. A seed determines the order of "
  "images and the random initialization, if a regime has one. All seeds use "
  "the settings of one search, whose randomness is not included.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Means:
  """Means of a regime; None if a task is missing or has other images."""

  groups: Mapping[str, float | None]
  of_groups: float | None
  of_tasks: float | None
  spread: float | None  # highest minus lowest `of_tasks`, over seeds


def write_report(workdir: Path) -> None:
  """Write report.md and report.json."""
  record = read_record(workdir)
  scores = scores_of(record)
  file = workdir / TOGETHER
  together = read_json(file)["found"] if file.exists() else None
  if together and not _is_of(together, scores):
    together = None  # of earlier tasks
  options, backbone = record.options, record.backbone
  numbers = {
    "command": record.command,
    "hardware": record.hardware,
    "config": to_dict(record.config),
    "backbone": {
      "fingerprint": record.fingerprint,
      "variant": backbone.variant,
      "image_size": backbone.image_size,
    },
    **options,
    "means": {
      r: dataclasses.asdict(means(r, scores)) for r in options["regimes"]
    },
    "together": together,
    "published": [dataclasses.asdict(row) for row in ROWS],
  }
  files.write_report(workdir, numbers, markdown(record, scores, together))


def scores_of(record: Record) -> dict[tuple[str, str], Score]:
  """{(task, regime): score} of the finished ones."""
  found = {}
  for values in record.options["scores"]:
    tuples = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    score = Score(**{**values, **tuples})
    found[score.task, score.regime] = score
  return found


def means(regime: str, scores: Scores) -> Means:
  """The means of a regime, of finished tasks."""
  mine = {
    task.name: score
    for task in TASKS
    if (score := scores.get((task.name, regime)))
    and not _is_other_size(task, score)
  }
  tests = {
    task.name: mine[task.name].test if task.name in mine else None
    for task in TASKS
  }
  groups = {
    group: _mean([tests[task.name] for task in TASKS if task.group == group])
    for group in GROUPS
  }
  every = _mean(list(tests.values()))
  spread = None
  if every is not None:
    each = zip(*(score.tests for score in mine.values()), strict=True)
    by_seed = [sum(values) / len(TASKS) for values in each]
    spread = max(by_seed) - min(by_seed) if len(by_seed) > 1 else None
  if every is None:  # no group mean either: tasks may have been selected
    groups = dict.fromkeys(GROUPS)
  return Means(
    groups=groups,
    of_groups=_mean(list(groups.values())),
    of_tasks=every,
    spread=spread,
  )


def _mean(values: Sequence[float | None]) -> float | None:
  """Mean; None if a value is missing."""
  known = [value for value in values if value is not None]
  return sum(known) / len(known) if len(known) == len(values) else None


def _is_of(together: Mapping[str, Any], scores: Scores) -> bool:
  """Whether all tasks in one model are those of the table."""
  return {*together["tasks"]} == {task for task, _ in scores}


def markdown(
  record: Record, scores: Scores, together: Mapping[str, Any] | None
) -> list[str]:
  """The lines of report.md."""
  return [
    *files.title_of(record, "VTAB-1k"),
    f"Backbone: {record.backbone.variant}, {record.backbone.image_size} px, "
    f"`{record.config.backbone}`, fingerprint `{record.fingerprint[:16]}`.",
    "",
    _PROTOCOL,
    *_absent(record, scores),
    *other_sizes(scores, together),
    *_section("Accuracy", _accuracies(record, scores, together)),
    *_section(
      "Spread over seeds, in points", _spreads(record, scores), _OF_SEEDS
    ),
    *_together(together),
    *_section("What was chosen, and on what", _choices(record, scores)),
    *_section("What it took", _costs(record, scores)),
    *_section("Published, for comparison", _published(), NOTES),
  ]


def _absent(record: Record, scores: Scores) -> list[str]:
  """Name the tasks that the tables lack, and the reasons."""
  lines = [f"- {n}: {why}" for n, why in record.options["missing"].items()]
  lines += [
    f"- {name}: left out by --only" for name in record.options["left_out"]
  ]
  there = {task for task, _ in scores}
  lines += [
    f"- {task.name}: not finished"
    for task in TASKS
    if task.name
    not in {*there, *record.options["missing"], *record.options["left_out"]}
  ]
  if not lines:
    return []
  return ["", "**No means are given**, as tasks are missing:", "", *lines]


def _is_other_size(task: VtabTask, score: Score) -> bool:
  """Whether a task was tested on another number of images."""
  return bool(score.tests) and score.test_examples != task.test_examples


def other_sizes(
  scores: Scores, together: Mapping[str, Any] | None
) -> list[str]:
  """Name the test splits that are not those of the benchmark."""
  every = {**scores, **(_scores_together(together) if together else {})}
  lines = [
    f"- {task.name}, {regime}: {score.test_examples:,} test images, the "
    f"benchmark has {task.test_examples:,}"
    for task in TASKS
    for (name, regime), score in every.items()
    if name == task.name and _is_other_size(task, score)
  ]
  if not lines:
    return []
  return [
    "",
    "**No means are given** of these, as their test splits have other sizes "
    "than those of VTAB-1k:",
    "",
    *lines,
  ]


def _section(
  title: str, rows: Sequence[Mapping[str, str]], notes: Sequence[str] = ()
) -> list[str]:
  """A section with a table; no section without rows."""
  return files.section_of(title, [rows], notes) if rows else []


def _accuracies(
  record: Record, scores: Scores, together: Mapping[str, Any] | None
) -> list[dict[str, str]]:
  """A row for every regime, and one for all tasks in one model."""
  rows = []
  for regime in record.options["regimes"]:
    rows.append({"regime": regime, **_columns_of(regime, scores)})
  if together:
    row = _label_together(together)
    rows.append({"regime": row, **_columns_of(row, _scores_together(together))})
  return rows


def _columns_of(regime: str, scores: Scores) -> dict[str, str]:
  """The accuracies of a regime, and their means."""
  found, row = means(regime, scores), {}
  for task in TASKS:
    score = scores.get((task.name, regime))
    row[task.name] = _percent(score.test if score else None)
  row |= {group: _percent(found.groups[group]) for group in GROUPS}
  row["mean of groups"] = _percent(found.of_groups)
  row["mean of 19"] = _percent(found.of_tasks)
  return row


def _label_together(together: Mapping[str, Any]) -> str:
  return f"{together['regime']}, seed 0, all in one model"


def _scores_together(together: Mapping[str, Any]) -> Scores:
  """Scores of all tasks in one model, by the label of their row."""
  label = _label_together(together)
  return {
    (name, label): Score(
      task=name,
      regime=label,
      tests=(one["score"],),
      seeds=1,
      test_examples=one["examples"],
    )
    for name, one in together["tasks"].items()
  }


def _spreads(record: Record, scores: Scores) -> list[dict[str, str]]:
  """Highest minus lowest accuracy; no rows for one seed."""
  rows = []
  for regime in record.options["regimes"]:
    row = {"regime": regime}
    for task in TASKS:
      score = scores.get((task.name, regime))
      tests = score.tests if score else ()
      spread = max(tests) - min(tests) if len(tests) > 1 else None
      row[task.name] = _percent(spread)
    row["mean of 19"] = _percent(means(regime, scores).spread)
    rows.append(row)
  return rows if any(len(score.tests) > 1 for score in scores.values()) else []


def _together(together: Mapping[str, Any] | None) -> list[str]:
  """Describe the measurement of all tasks in one model."""
  if not together:
    return []
  found, timing = together["tasks"].values(), together["timing"]
  equal = all(task["alone"]["outputs_bit_equal"] for task in found)
  differences = [task["alone"]["max_difference"] for task in found]
  known = [d for d in differences if d is not None]
  largest = f"{max(known):.1e}" if len(known) == len(differences) else "NaN"
  images = sum(task["examples"] for task in found)
  plain = timing["plain"]
  return [
    "",
    "## All tasks in one model",
    "",
    f"The {len(found)} tasks of `{together['regime']}`, the masked "
    "regime that is best on validation, in one model: on all "
    f"{images:,} test images the original outputs are equal to the bit to "
    f"those of the plain ViT: {'yes' if equal else 'NO'}. The largest "
    f"difference of a task's logits from those of the task alone, as a share "
    f"of the largest logit: {largest}. One pass computes all: it takes "
    f"{timing['together'] / plain:.2f} times a pass of the plain ViT (batches "
    f"of {timing['batch_size']}), one task after the other "
    f"{timing['one_by_one'] / plain:.2f} times. "
    f"Verified: {'yes' if together['verified'] else 'NO'}.",
  ]


def _choices(record: Record, scores: Scores) -> list[dict[str, str]]:
  """What the search chose, by task and regime."""
  rows = []
  for task in TASKS:
    for regime in record.options["regimes"]:
      score = scores.get((task.name, regime))
      if score is None:
        continue
      rows.append(
        {
          "task": task.name,
          "regime": regime,
          "chosen": _settings(score),
          "end of range": ", ".join(score.at_edge),
          "validation": _percent(score.validation),
          "test": _percent(score.test),
          "test images": f"{score.test_examples:,}",
          "not readable": str(score.skipped or ""),
          "settings tried": str(score.tried),
          "of these diverged": str(score.diverged or ""),
          "seeds": f"{len(score.tests)} of {score.seeds}",
        }
      )
  return rows


def _settings(score: Score) -> str:
  """Settings as they are given on a command line."""
  if score.validation is None:
    return "none: all diverged"
  values = ", ".join(f"{k}={v}" for k, v in score.settings.items())
  return values.replace("|", "\\|") or "as configured"


def _costs(record: Record, scores: Scores) -> list[dict[str, str]]:
  """The cost of every regime, over all tasks."""
  rows = []
  for regime in record.options["regimes"]:
    mine = [score for score in scores.values() if score.regime == regime]
    if not mine:
      continue
    sizes = [score.parameters for score in mine if score.parameters]
    rows.append(
      {
        "regime": regime,
        "tasks": str(len(mine)),
        "trained parameters": _range(sizes),
        "trials": str(sum(s.trials for s in mine)),
        "packs of trials": str(sum(sum(s.passes) for s in mine)),
        "seconds of training": f"{sum(s.training_seconds for s in mine):,.0f}",
        "seconds in all": f"{sum(s.wall_seconds for s in mine):,.0f}",
      }
    )
  return rows


def _range(values: Sequence[int]) -> str:
  if not values:
    return ""
  least, most = f"{min(values):,}", f"{max(values):,}"
  return least if least == most else f"{least} to {most}"


def _published() -> list[dict[str, str]]:
  rows = []
  for row in ROWS:
    groups = row.groups or (None, None, None)
    shown = dict(zip(GROUPS, groups, strict=True))
    rows.append(
      {
        "method": row.method,
        **{group: _number(value) for group, value in shown.items()},
        "mean of groups": _number(row.of_groups),
        "mean of 19": _number(row.of_tasks),
        "backbone's outputs unchanged": "yes" if row.frozen else "",
        "source": row.source,
        "note": row.note,
      }
    )
  return rows


def _percent(value: float | None) -> str:
  return "" if value is None else f"{100 * value:.1f}"


def _number(value: float | None) -> str:
  return "" if value is None else f"{value:g}"
