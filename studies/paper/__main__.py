"""Runs the paper's study on the data set of a configuration.

  python -m studies.paper --config=cifar100 --workdir=DIR \\
    [--only=PART ...] [--dry_run] [--config.KEY=VALUE ...]
  python -m studies.paper --workdir=DIR --report_only

DIR then holds report.md, report.json, plots, and in runs/NAME every run as
`memory-vit train` would leave it, without its saved states. A study that was
interrupted resumes when the same command is given again; a run is never
repeated. Parts: see `study.PARTS`. The report holds all parts that are
measured, now or before. --dry_run shows the runs and, once some have finished,
about how long the others will take, and trains nothing. --report_only makes the
report again of the files in DIR alone: it needs neither jax nor --config.
"""

from collections.abc import Sequence

from studies import command
from studies.paper import report
from studies.paper.study import PARTS, Study, declare


def parse(argv: Sequence[str]) -> tuple[command.StudyLine, Study | None]:
  """Read the command line; without a study if the report alone is wanted.

  Raises:
    MemoryVitError: for what cannot be used.
  """
  line = command.StudyLine(
    __doc__, argv, f"Parts, between commas: {', '.join(PARTS)}."
  )
  study_of = declare(line.line)
  line.parse()
  if line.report_only:
    return line, None
  study = study_of(line.config)
  study.parts(line.only)
  return line, study


def run(argv: Sequence[str]) -> int:
  """Run the study, or show its plan or report; return 0.

  Raises:
    MemoryVitError: as `parse` and `run_study`.
  """
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
