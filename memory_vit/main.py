"""Trains (or resumes), evaluates and exports a task.

  python -m memory_vit.main --config=configs/sun397.py --workdir=DIR \\
    [--config.KEY=VALUE ...] [--allow_config_change=KEY ...]

The same command goes on with a run that was interrupted. Exit status: 2 for
bad input, 75 after SIGTERM (preemption) and 130 after Ctrl-C, once the state is
saved. A second signal ends it at once.

For several processes, which share DIR, see docs/scale.md.
"""

import functools
import logging
import sys
from pathlib import Path

import jax
from absl import app, flags
from ml_collections import config_flags

from memory_vit import changes, commands, launch, progress, run
from memory_vit import config as config_lib
from memory_vit.interrupt import Stop

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results are written.")
_PROCESSES = launch.define_flags()
_TRUSTING = commands.define_trust_flag()

_MAY_CHANGE = flags.DEFINE_multi_string(
  "allow_config_change", [],
  "An option that may not be the one with which the run began; may be given "
  f"several times: {', '.join(changes.CAN_CHANGE)}.",
)  # fmt: skip
flags.DEFINE_alias("allow-config-change", "allow_config_change")


def main(argv: list[str]) -> None:
  """Runs the configuration."""
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments {argv[1:]}; options start with --")
  progress.log_to_stderr()
  launch.start(_PROCESSES())
  logging.getLogger("memory_vit").info("devices: %s", jax.devices())
  workdir = Path(_WORKDIR.value)
  config = _TRUSTING(config_lib.from_dict(_CONFIG.value.to_dict()))
  stop = Stop()
  with stop.listening():
    result = run.train_and_evaluate(config, workdir, stop, _MAY_CHANGE.value)
  if jax.process_index() == 0:
    print(progress.summary(result, workdir))


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  # Around all, since a configuration file runs while flags are parsed.
  with launch.leaving():
    start = functools.partial(app.run, main, flags_parser=commands.parse_flags)
    sys.exit(commands.run_command(start))
