"""Summary table of a finished run."""

from collections.abc import Sequence
from pathlib import Path

from memory_vit.kinds import CLASSES, KINDS, Kind
from memory_vit.run_result import (
  ANSWERS,
  ATTENTION,
  RESULT,
  SWEEP,
  RunResult,
  SweepResult,
  TrialResult,
)
from memory_vit.runtime.messages import counted, escaped
from memory_vit.runtime.tables import table


def summary(result: RunResult, workdir: Path) -> str:
  """Format the result of a run as a table, with the paths of its files."""
  lines = ["", _table(result), *_certainty(result.tasks)]
  if result.sweep:
    lines += ["", _of_sweep(result.sweep, result.tasks[0])]
  backbone = result.backbone
  if backbone.outputs_bit_equal is not None:
    equal = "yes" if backbone.outputs_bit_equal else "NO"
    subject = "original outputs"
    if backbone.accuracy_before is not None:
      subject = (
        f"original task: {_percent(backbone.accuracy_before)} before, "
        f"{_percent(backbone.accuracy_after)} after; all outputs"
      )
    lines += ["", f"{subject} unchanged (bitwise): {equal}"]
  if result.left_out:
    lines += ["", "left out because they could not be read:"]
    lines += [f"  {escaped(example)}" for example in result.left_out]
  lines += [
    f"{escaped(task.name)}: outputs for "
    f"{counted(task.test.not_finite, 'test image')} are not finite: "
    f"{KINDS[task.kind].not_finite}"
    for task in result.tasks
    if task.test.not_finite
  ]
  lines += _calibration(result.tasks[0]) if result.tasks else []
  speed = result.images_per_second  # 0 for a head in closed form
  lines += [
    f"{result.wall_seconds:.0f} s in all"
    + (f", {speed:.0f} training images/s" if speed else ""),
    "",
    f"tasks         {workdir / 'tasks'}",
    f"results       {workdir / RESULT}",
    *_pictures(workdir),
    f"TensorBoard   tensorboard --logdir {workdir}",
  ]
  return "\n".join(lines)


def _pictures(workdir: Path) -> list[str]:
  paths = [workdir / name for name in (SWEEP, ATTENTION, ANSWERS)]
  return [f"picture       {path}" for path in paths if path.exists()]


def _table(result: RunResult) -> str:
  """Format a table: a row for each task, a column for each varied option."""
  kind = KINDS[result.tasks[0].kind] if result.tasks else CLASSES.kind
  more = [f"test {kind.metrics[key].title}" for key in kind.beside_score]
  if kind.one_is_right:
    more = ["chance", "majority"]
  varied = sorted({key for task in result.tasks for key in task.varied})
  cells = () if "task.cells" in varied else ("cells",)
  rows = [
    (
      task.name,
      *(str(task.varied.get(key, "")) for key in varied),
      *(str(getattr(task, key)) for key in cells),
      f"{task.trainable_params:,}",
      kind.score.text(task.val.score),
      kind.score.text(task.test.score),
      *_beside_score(kind, task),
      f"{task.test.examples:,}",
    )
    for task in _by_regime(result.tasks)
  ]
  names = (key.removeprefix("task.") for key in varied)
  header = ("task", *names, *cells, "trained", f"validation{kind.score_suffix}",
            f"test{kind.score_suffix}", *more, "test examples")  # fmt: skip
  return table(header, rows)


def _beside_score(kind: Kind, task: TrialResult) -> list[str]:
  if kind.one_is_right:
    return [*map(kind.score.text, (task.chance, task.majority))]
  return [
    kind.metrics[key].text(task.test.metrics.get(key))
    for key in kind.beside_score
  ]


def _by_regime(tasks: Sequence[TrialResult]) -> list[TrialResult]:
  """Sort trials by regime; the best regime and its best trial come first."""
  regimes = list(dict.fromkeys(task.regime for task in tasks))
  return sorted(tasks, key=lambda task: regimes.index(task.regime))


def _certainty(tasks: Sequence[TrialResult]) -> list[str]:
  """Return lines about the standard error of the best score; [] if unknown."""
  best = tasks[0] if tasks else None
  if best is None:
    return []
  error = KINDS[best.kind].score_error(best.val)
  if error is None:
    return []
  return [
    f"validation: {counted(best.val.examples, 'image')}, a standard error of "
    f"{100 * error:.1f} points"
  ]


def _calibration(best: TrialResult) -> list[str]:
  """Return lines on a task: temperature, calibration and rejected images."""
  kind, name = KINDS[best.kind], escaped(best.name)
  if not kind.fits:
    return []
  if best.temperature is None:
    return [f"{name}: no temperature, because no image is held out"]
  line = f"{name}: temperature {best.temperature:.3g}"
  if best.uncalibrated:
    key, before = "calibration_error", best.uncalibrated
    error = kind.metrics[key]
    line += (
      f"; on the test split {error.title} {error.text(before[key])} to "
      f"{error.text(best.test.metrics[key])}, log-loss "
      f"{_loss(before['loss'])} to {_loss(best.test.loss)}"
    )
  lines = [line]
  if best.rejection:
    lines.append(
      f"{name}: rejects {_percent(best.rejection['rejected'])} of the test "
      f"images as unknown; accuracy on all images {_percent(best.test.score)}, "
      f"on accepted images {_percent(best.rejection['accuracy'])}"
    )
  return lines


def _loss(value: float | None) -> str:
  return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
  return "-" if value is None else f"{100 * value:.2f} %"


def _of_sweep(sweep: SweepResult, best: TrialResult) -> str:
  memory = sweep.bytes_per_trial
  taken = "" if memory is None else f" and {memory / 2**20:.0f} MiB"
  lost = "".join(
    f"\n{name} was lost: not finite at step {step}"
    for name, step in sweep.lost.items()
  )
  return (
    f"{sweep.trials} trials in {sweep.passes} pass(es), "
    f"{sweep.training_seconds_per_trial:.1f} s of training{taken} each; "
    f"{best.name} is best on validation, and exported as {sweep.task}" + lost
  )
