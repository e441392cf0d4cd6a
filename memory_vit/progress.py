"""What a person sees while a run goes on."""

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tqdm
from absl import logging as absl_logging
from clu import parameter_overview as clu_overview

from memory_vit import trees
from memory_vit.escaping import escaped
from memory_vit.tables import table

logger = logging.getLogger("memory_vit")

# A log in which nothing has been said for so long looks like one of a run that
# hangs.
_SILENCE_SECONDS = 30.0


class Progress:
  """A line (in a log) or a bar (on a terminal) with speed and time to go.

  Speed counts training alone: `pause` and `resume` leave out evaluation, and
  the first step, which compiles, is not counted.
  """

  def __init__(
    self,
    name: str,
    start: int,
    total: int,
    batch_size: int,
    timed_steps: int = 0,
    timed_seconds: float = 0.0,
  ) -> None:
    self._name, self._total, self._batch_size = name, total, batch_size
    self._step, self._steps, self._seconds = start, timed_steps, timed_seconds
    self._since: float | None = None
    self._reported = time.perf_counter()
    self._bar = tqdm.tqdm(
      total=total,
      initial=start,
      desc=name,
      unit="step",
      disable=not sys.stderr.isatty(),
    )

  def advance(self) -> None:
    """Counts a step that was started."""
    self._step += 1
    self._bar.update()
    if self._since is None:
      self.resume()
    else:
      self._steps += 1

  def pause(self) -> None:
    """Stops the clock; everything that was started must have ended."""
    if self._since is not None:
      self._seconds += time.perf_counter() - self._since
      self._since = None

  def resume(self) -> None:
    """Starts the clock again."""
    self._since = time.perf_counter()

  @property
  def timed(self) -> tuple[int, float]:
    """Steps that were timed, those of earlier processes too, and seconds."""
    seconds = self._seconds
    if self._since is not None:
      seconds += time.perf_counter() - self._since
    return self._steps, seconds

  @property
  def images_per_second(self) -> float:
    """Training pictures a second, over all processes; 0.0 before two steps."""
    steps, seconds = self.timed
    return steps * self._batch_size / seconds if steps else 0.0

  def is_overdue(self) -> bool:
    """Whether nothing was shown for half a minute, by this process's clock."""
    return time.perf_counter() - self._reported >= _SILENCE_SECONDS

  def report(self, values: Mapping[str, list[float]]) -> None:
    """Shows numbers of the last step; of several, the least and greatest."""
    self._reported = time.perf_counter()
    shown = "  ".join(f"{key} {_span(v)}" for key, v in values.items())
    if not self._bar.disable:
      self._bar.set_postfix_str(shown)
      return
    if speed := self.images_per_second:  # after one step nobody knows
      left = (self._total - self._step) * self._batch_size
      rounded = f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"
      shown += f"  {rounded} images/s  ETA {duration(left / speed)}"
    logger.info("%s step %d/%d  %s", self._name, self._step, self._total, shown)

  def close(self) -> None:
    """Ends the bar."""
    self._bar.close()


def _span(values: list[float]) -> str:
  """[0.5] -> "0.5", [0.1, 0.3, 0.2] -> "0.1..0.3"."""
  least, greatest = f"{min(values):.4g}", f"{max(values):.4g}"
  return least if len(values) == 1 else f"{least}..{greatest}"


def duration(seconds: float) -> str:
  """75 -> "1:15", 3700 -> "1:01:40"."""
  minutes, second = divmod(round(seconds), 60)
  hours, minute = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minute:02}:{second:02}"
  return f"{minute}:{second:02}"


def parameter_overview(trained: trees.Tree, frozen: trees.Tree) -> str:
  """Every trained array, and the counts of trained and frozen values."""
  t, f = trees.count(trained), trees.count(frozen)
  share = 100 * t / (t + f)
  return (
    clu_overview.get_parameter_overview(trained, include_stats=False)
    + f"\ntrained: {t:,} ({share:.2f} %), frozen: {f:,}"
  )


def summary(result: Mapping[str, Any], workdir: Path) -> str:
  """What `result.json` holds, as a table, and where everything lies."""

  def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"

  varied = sorted({key for task in result["tasks"] for key in task["varied"]})
  tasks = [
    (
      task["name"],
      *(str(task["varied"].get(key, "")) for key in varied),
      *(() if "task.cells" in varied else (str(task["cells"]),)),
      f"{task['trainable_params']:,}",
      percent(task["val_accuracy"]),
      percent(task["test_accuracy"]),
      percent(task["chance"]),
      percent(task["test_majority"]),
      f"{task['test_examples']:,}",
    )
    for task in result["tasks"]
  ]
  header = ("task", *(key.removeprefix("task.") for key in varied),
            *(() if "task.cells" in varied else ("cells",)),
            "trained", "validation", "test", "chance", "majority",
            "test examples")  # fmt: skip
  lines = ["", table(header, tasks)]
  if "sweep" in result:
    lines += ["", _of_sweep(result)]
  backbone = result["backbone"]
  if backbone["outputs_bit_equal"] is not None:
    equal = "yes" if backbone["outputs_bit_equal"] else "NO"
    lines += [
      "",
      f"original task: {percent(backbone['accuracy_before'])} before, "
      f"{percent(backbone['accuracy_after'])} after; all outputs equal to the "
      f"bit: {equal}",
    ]
  if result["left_out"]:
    lines += ["", "left out, as they could not be read:"]
    lines += [f"  {escaped(example)}" for example in result["left_out"]]
  lines += [
    f"{result['wall_seconds']:.0f} s in all, {result['images_per_second']:.0f} "
    "training images/s",
    "",
    f"tasks         {workdir / 'tasks'}",
    f"results       {workdir / 'result.json'}",
    f"TensorBoard   tensorboard --logdir {workdir}",
  ]
  return "\n".join(lines)


def _of_sweep(result: Mapping[str, Any]) -> str:
  """What a sweep took, and what came of it."""
  sweep, best = result["sweep"], result["tasks"][0]
  memory = sweep["bytes_per_variant"]
  taken = "" if memory is None else f" and {memory / 2**20:.0f} MiB"
  lost = "".join(
    f"\n{name} was lost: not finite at step {step}"
    for name, step in sweep["lost"].items()
  )
  return (
    f"{sweep['variants']} variants in {sweep['passes']} pass(es), "
    f"{sweep['training_seconds_per_variant']:.1f} s of training{taken} each; "
    f"{best['name']} is best on validation, and exported as {sweep['task']}"
    + lost
  )


def log_to_stderr() -> None:
  """Shows this package's log lines, and of the libraries only warnings."""
  absl_logging.set_verbosity(absl_logging.WARNING)
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
  logger.handlers, logger.propagate = [handler], False
  logger.setLevel(logging.INFO)
