"""Runs the paper's study on the data set of a configuration.

  python -m memory_vit.paper --config=configs/cifar100.py --workdir=DIR \\
    [--only=PART ...] [--dry_run] [--config.KEY=VALUE ...]

DIR then holds report.md, report.json, plots, and in runs/NAME every run as
`memory_vit.main` would leave it, without its saved states. A study that was
interrupted goes on when the same command is given again; a run is never
repeated. Parts: see `study.PARTS`, options: `config.StudyConfig`. The report
holds the parts that were asked for, now or before. --dry_run shows the runs and
about how long they will take, and trains nothing.
"""

import functools
import sys
from pathlib import Path

import jax
from absl import app, flags
from ml_collections import config_flags

from memory_vit import commands, conduct, forecast, launch, progress, study
from memory_vit import config as config_lib
from memory_vit.interrupt import Stop

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results are written.")
_ONLY = flags.DEFINE_multi_string(
  "only", [], f"A part; may be given several times: {', '.join(study.PARTS)}."
)
_PROCESSES = launch.define_flags()
_TRUSTING = commands.define_trust_flag()
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Show the runs, train nothing.")


def main(argv: list[str]) -> None:
  """Runs the study, or shows its plan."""
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments {argv[1:]}; options start with --")
  progress.log_to_stderr()
  launch.start(_PROCESSES())
  workdir = Path(_WORKDIR.value)
  config = _TRUSTING(config_lib.from_dict(_CONFIG.value.to_dict()))
  parts = study.possible_parts(config, _ONLY.value)
  if _DRY_RUN.value:
    text = forecast.forecast(config, workdir, parts)
    if jax.process_index() == 0:
      print(text)
    return
  stop = Stop()
  with stop.listening():
    conduct.run_study(config, workdir, parts, stop)
  if jax.process_index() == 0:
    print((workdir / "report.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  # Around all, since a configuration file runs while flags are parsed.
  with launch.leaving():
    start = functools.partial(app.run, main, flags_parser=commands.parse_flags)
    sys.exit(commands.run_command(start))
