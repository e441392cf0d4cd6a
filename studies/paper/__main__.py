"""Run the paper's study on the data set of a configuration.

  python -m studies.paper --config=cifar100 --workdir=DIR \\
    [--only=PART ...] [--dry_run] [--config.KEY=VALUE ...]
  python -m studies.paper --workdir=DIR --report_only

DIR then holds report.md, report.json, plots, and in runs/NAME every run as
`memory-vit train` would leave it, without its checkpoints. The same command
resumes an interrupted study; finished runs are not repeated. The report shows
all parts that were measured, by this command or an earlier one. --dry_run lists
the runs, estimates the remaining time if some have finished, and trains
nothing. --report_only makes the report again from the files in DIR alone,
without jax and --config.
"""

from collections.abc import Sequence

from studies import command
from studies.paper import report
from studies.paper.study import PARTS, Study, declare


def parse(argv: Sequence[str]) -> tuple[command.StudyLine, Study | None]:
  """Read the command line; no study if only the report is wanted."""
  line = command.StudyLine(
    __doc__, argv, f"Parts, separated by commas: {', '.join(PARTS)}."
  )
  study_of = declare(line.line)
  line.parse()
  if line.report_only:
    return line, None
  study = study_of(line.config)
  study.parts(line.only)
  return line, study


def run(argv: Sequence[str]) -> int:
  line, study = parse(argv)
  if study is None:
    return command.report_again(line, report.write_report)
  command.begin(line)
  from studies.paper import runner  # it needs jax

  parts = study.parts(line.only)
  for part, reason in study.missing().items():
    if reason and not line.only:
      command.logger.info("the part %r is left out: it %s", part, reason)
  typed = command.typed("python -m studies.paper", argv)
  return command.perform(
    line,
    lambda: runner.forecast(study, line.workdir, parts),
    lambda stop: runner.run_study(
      study, line.workdir, parts, command=typed, stop=stop
    ),
  )


if __name__ == "__main__":
  command.main(run)
