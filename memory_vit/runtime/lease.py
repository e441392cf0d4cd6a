"""A lease: a lock for a directory of a bucket, which its owner must renew.

The lease is an object. A write states which version (generation) it replaces,
so only one of two runs gets the lease. The owner rewrites the object every half
minute. If the owner has been silent for two minutes, by the clock of the
storage, the next run takes the lease over.
"""

import contextlib
import datetime
import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from memory_vit.errors import TrainingError
from memory_vit.runtime import bucket
from memory_vit.runtime.bucket import BucketPath
from memory_vit.runtime.messages import first_line

logger = logging.getLogger(__name__)

SILENCE = datetime.timedelta(minutes=2)
RENEW_SECONDS = 30.0
# Timeouts of one request and of all its retries. Their sum is below `SILENCE`.
_REQUEST_SECONDS, _RETRY_SECONDS = 20, 60
_MOST_READ = 400
_OWNER = re.compile(r"(process [0-9]{1,20} on .{1,300}), [0-9a-f]{16}\n")


@contextlib.contextmanager
def held(
  path: BucketPath, refuse: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
  """Hold the lease at `path`; yield a function that checks and renews it.

  If the lease is not free, `refuse` is called with its owner, and must raise.
  """
  lease = _Lease(path)
  lease.take(refuse)
  ended = threading.Event()

  def renew() -> None:
    while not ended.wait(RENEW_SECONDS):
      try:
        lease.renew()
      except TrainingError as error:  # the next call of `renew` retries
        logger.warning("%s", first_line(error))

  thread = threading.Thread(target=renew, name="lease", daemon=True)
  thread.start()
  try:
    yield lease.renew
  finally:
    ended.set()
    thread.join()
    lease.free()


class _Lease:
  """This process's lease on the object `path`; `renew` is thread-safe."""

  _bucket: Any  # set by `take`

  def __init__(self, path: BucketPath) -> None:
    from google.cloud.storage.retry import DEFAULT_RETRY  # in extra "gcs"

    self._options: dict[str, Any] = {
      "timeout": _REQUEST_SECONDS,
      "retry": DEFAULT_RETRY.with_timeout(_RETRY_SECONDS),
    }
    self._path, self._lock = path, threading.Lock()
    address = str(path).removeprefix(bucket.PREFIX)
    self._bucket_name, _, self._name = address.partition("/")
    process = f"process {os.getpid()} on {socket.gethostname()}"
    # Another process may have the same id and host name, but not this token.
    self._token = secrets.token_hex(8)
    self._text = f"{process}, {self._token}\n"
    self._generation = 0  # 0: the object does not exist

  def take(self, refuse: Callable[[str], None]) -> None:
    from google.cloud import storage

    try:
      with bucket.as_os_error():
        client = storage.Client(project=None)
        self._bucket = client.bucket(self._bucket_name)
        blob, text = self._read()
        if text:
          if not (owner := _OWNER.fullmatch(text)):
            raise self._not_ours()
          silent = self._now() - blob.updated
          if silent < SILENCE:
            refuse(
              f"{owner[1]}, which renewed its lease "
              f"{silent.total_seconds():.0f} s ago (the lease ends after "
              f"{SILENCE.total_seconds():.0f} s without renewal)"
            )
          logger.warning("taking over the lease of %s, not renewed for %s",
                         owner[1], silent)  # fmt: skip
        self._generation = blob.generation if blob else 0
        if not self._write(self._text):
          refuse("it has just begun")
    except OSError as error:
      raise TrainingError(
        f"{self._path}, the lease that keeps other runs out, cannot be "
        f"taken ({error.strerror or error}). Check the permissions of the "
        "bucket, or give another --workdir."
      ) from error

  def renew(self) -> None:
    """Extend the lease by two minutes; raise `TrainingError` if it is lost."""
    try:
      with self._lock, bucket.as_os_error():
        if self._write(self._text):
          return
    except OSError as error:
      raise TrainingError(
        f"{self._path}, the lease of this run, cannot be renewed "
        f"({error.strerror or error}). This run writes nothing more. Give the "
        "same command again once the bucket can be reached."
      ) from error
    raise TrainingError(
      f"{self._path}, the lease of this run, was taken over or removed. "
      "Another run may now use the directory, so this run writes nothing more. "
      "End all runs that use the directory, and give the same command again."
    )

  def free(self) -> None:
    """Empty the object, so that the next run need not wait."""
    with contextlib.suppress(OSError), bucket.as_os_error():
      self._write("")

  def _write(self, text: str) -> bool:
    """Write `text` to the lease's object in the bucket.

    Return False if another process has changed or removed the object.
    """
    from google.api_core.exceptions import PreconditionFailed

    blob = self._bucket.blob(self._name)
    try:
      blob.upload_from_string(
        text, if_generation_match=self._generation, **self._options
      )
    except PreconditionFailed:
      # If the object holds our text, a first request wrote the text, but its
      # answer was lost. The client of the bucket then sent a second request,
      # which failed, because the first had changed the object.
      blob, stored = self._read()
      if stored != text or not text:
        return False
    self._generation = blob.generation
    return True

  def _read(self) -> tuple[Any, str]:
    """Return the object and its text, or (None, "") if there is no object."""
    blob = self._bucket.get_blob(self._name, **self._options)
    if blob is None:
      return None, ""
    if blob.size > _MOST_READ:
      raise self._not_ours()
    content = blob.download_as_bytes(**self._options)
    return blob, content.decode("utf-8", "replace")

  def _now(self) -> datetime.datetime:
    """Return the storage's time: the creation date of a temporary object."""
    probe = self._bucket.blob(f"{self._name}-{self._token}")
    probe.upload_from_string("", **self._options)
    now = probe.updated
    probe.delete(**self._options)
    return now

  def _not_ours(self) -> TrainingError:
    return TrainingError(
      f"{self._path} cannot be the lease that keeps other runs out, because it "
      "holds unknown text. It is left as it is: move it away, or give another "
      "--workdir."
    )
