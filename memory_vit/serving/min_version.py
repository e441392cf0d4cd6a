"""`x-min-version`: a request that waits for its set of tasks."""

from starlette.requests import Request

from memory_vit.runtime.messages import brief
from memory_vit.serving.request_error import RequestError
from memory_vit.serving.task_follower import TaskFollower

HEADER = "x-min-version"
_MOST_DIGITS = 15


async def wait_for_min_version(
  request: Request, follower: TaskFollower, seconds: float
) -> None:
  """Wait until the tasks have the version that a request wants, or a later one.

  Raises:
    RequestError: 400 for what is no version, 503 where it takes too long.
  """
  text = request.headers.get(HEADER, "0")
  if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
    raise RequestError(
      400, f"{HEADER} is {brief(text)}, expected the version of a set of tasks."
    )
  if int(text) > follower.version:
    await follower.at_least(int(text), seconds)
