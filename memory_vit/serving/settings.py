"""Settings of the server: limits, timeouts, and the paths of its files.

Each setting is declared once, with its rule and its help text; the flags of the
command line are generated from these fields.
"""

import dataclasses
import functools

from memory_vit.errors import ConfigError
from memory_vit.runtime import options
from memory_vit.runtime.options import Number, Text, option

MIB = 2**20
MOST_IMAGES = 4096
# Maximum number of classes, labels and values in one answer. While an answer of
# this size is encoded as JSON, other threads and /healthz wait: for 8 ms on a
# core of 2026, and for less than 50 ms on two busy cores that are half as fast.
MOST_OUTPUTS = 50_000
_DAY = 86_400
_HOST = r"([\w.-]+|\[[0-9a-fA-F:.]+\]|\*)"
_HOSTS = Text(
  "names such as vit.example.com, without a scheme or a port, separated by "
  "commas",
  f"{_HOST}(,{_HOST})*",
  10_000,
)
_path = functools.partial(
  option, None, Text("a path", ".*", 4_000), metavar="PATH"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
  """Limits, timeouts and paths of a server; strings and numbers only.

  Raises:
    ConfigError: for a value that breaks the rule of its field, and for limits
      that contradict each other.
  """

  token_file: str | None = _path(
    "file with the token for changing tasks, of at least 16 characters and not "
    "readable by others; without it tasks cannot be changed"
  )
  task_root: str | None = _path(
    "directory from which clients may add tasks of this machine by path"
  )
  state_dir: str | None = _path(
    "directory that stores the tasks for the next start, and shares them "
    "between servers; without it changes of tasks are lost when the server ends"
  )
  allowed_hosts: str | None = option(
    None,
    _HOSTS,
    "host names that requests may use, separated by commas; localhost, "
    "127.0.0.1 and [::1] are always allowed. '*' allows any name, and is the "
    "default if --host admits other machines",
    metavar="NAME,NAME",
  )
  wait_ms: float = option(
    5.0,
    Number(0, 10_000, "milliseconds"),
    "milliseconds that decoded images wait, so that images of other requests "
    "that are being decoded share their batch",
  )
  max_queue: int = option(
    256,
    Number(1, 2**20, "images"),
    "maximum number of images that wait for an answer; further requests get "
    "status 503 with Retry-After",
  )
  max_images: int = option(
    32, Number(1, MOST_IMAGES, "images"), "maximum number of images per request"
  )
  max_megapixels: int = option(
    256,
    Number(1, 2**20, "megapixels"),
    "maximum megapixels per request, by image headers; files that take longer "
    "to decode count more",
  )
  max_body_mib: int = option(
    64, Number(1, 4096, "MiB"), "maximum MiB of a request's body"
  )
  max_task_mib: int = option(
    64, Number(1, 16_384, "MiB"), "maximum MiB of an uploaded task"
  )
  max_held_mib: int = option(
    512,
    Number(1, 2**20, "MiB"),
    "maximum MiB of all bodies that wait for an answer; further requests get "
    "status 503. Parsing JSON takes about 4 times as much memory as its body",
  )
  timeout: float = option(
    30.0,
    Number(0, _DAY, "seconds", positive=True),
    "maximum seconds from the arrival of images to their answer; slower "
    "requests get status 504",
  )
  receive_timeout: float = option(
    20.0,
    Number(0, _DAY, "seconds", positive=True),
    "maximum seconds for the headers of a request, and again for its body",
  )
  timeout_keep_alive: int = option(
    5,
    Number(1, _DAY, "seconds"),
    "seconds until an idle connection is closed",
  )
  max_connections: int = option(
    512,
    Number(1, 65_536, "connections"),
    "number of connections, or of requests in progress, at which all further "
    "requests get status 503 as plain text, even /healthz and /metrics",
  )
  grace: int = option(
    30,
    Number(0, _DAY, "seconds"),
    "seconds to finish open requests after SIGTERM",
  )
  top: int = option(
    5,
    Number(1, MOST_OUTPUTS, "classes"),
    "number of classes per task of classes, unless a request sets top",
  )

  def __post_init__(self) -> None:
    options.require(self)
    for name, most in (
      ("max_images", "max_queue"),
      ("max_body_mib", "max_held_mib"),
      ("max_task_mib", "max_held_mib"),
    ):
      value, limit = getattr(self, name), getattr(self, most)
      if value > limit:
        raise ConfigError(
          f"{name} is {value}, expected at most {limit} ({most}): a request of "
          "this size would always be refused."
        )
