"""Lines of the log of a server, on stderr."""

import logging

from memory_vit.runtime.progress_bar import LogHandler


def log_to_stderr() -> None:
  """Show the lines of the server: requests, changes of tasks, and faults."""
  handler = LogHandler()
  handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
  for name, level in (
    ("memory_vit", logging.INFO), ("uvicorn", logging.WARNING),
  ):  # fmt: skip
    logger = logging.getLogger(name)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level)
