"""Settings of the server: limits, timeouts, and where its files lie.

Each number stands here once, with its rule and its help: the command line is
made of these fields.
"""

import dataclasses
import functools

from memory_vit.errors import ConfigError
from memory_vit.runtime import options
from memory_vit.runtime.options import Number, Text, option

MIB = 2**20
MOST_IMAGES = 4096
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
    ConfigError: for a value that its rule refuses, and for limits that do not
      go together.
  """

  token_file: str | None = _path(
    "a file with the token for adding and removing tasks, at least 16 "
    "characters, not readable by others; without it nobody may"
  )
  task_root: str | None = _path(
    "tasks of this machine may be added by their path, but only below this "
    "directory"
  )
  state_dir: str | None = _path(
    "a directory that holds the tasks, for the next start and for all servers "
    "that are given it; without it changes of tasks end with the server"
  )
  allowed_hosts: str | None = option(
    None,
    _HOSTS,
    "names by which a proxy or other machines ask for this server, separated "
    "by commas; beside them only localhost, 127.0.0.1 and [::1] are answered. "
    "'*' is any name, and the default where other machines are let in",
    metavar="NAME,NAME",
  )
  wait_ms: float = option(
    5.0,
    Number(0, 10_000, "milliseconds"),
    "milliseconds that images which are ready wait for those of other requests "
    "that are being decoded, to share a batch",
  )
  max_queue: int = option(
    256,
    Number(1, 2**20, "images"),
    "images that were taken and are not yet answered; of more, requests get "
    "status 503, and when to come again",
  )
  max_images: int = option(
    32, Number(1, MOST_IMAGES, "images"), "images of one request"
  )
  max_megapixels: int = option(
    256,
    Number(1, 2**20, "megapixels"),
    "megapixels of all images of one request, by their headers",
  )
  max_body_mib: int = option(
    64, Number(1, 4096, "MiB"), "MiB of one request's body"
  )
  max_task_mib: int = option(
    64, Number(1, 16_384, "MiB"), "MiB of a task that is uploaded"
  )
  max_held_mib: int = option(
    512,
    Number(1, 2**20, "MiB"),
    "MiB of the bodies of all requests together, as they were sent and until "
    "their answers are; of more, status 503. JSON takes about 4 times as much",
  )
  timeout: float = option(
    30.0,
    Number(0, _DAY, "seconds", positive=True),
    "seconds until images are answered once they have arrived; then status 504",
  )
  receive_timeout: float = option(
    20.0,
    Number(0, _DAY, "seconds", positive=True),
    "seconds until the headers of a request have arrived, and again its body",
  )
  timeout_keep_alive: int = option(
    5,
    Number(1, _DAY, "seconds"),
    "seconds that a connection without a request is kept",
  )
  max_connections: int = option(
    512,
    Number(1, 65_536, "connections"),
    "connections at the same time, or requests at work; of as many, each "
    "request gets status 503 as plain text, /healthz and /metrics too",
  )
  grace: int = option(
    30,
    Number(0, _DAY, "seconds"),
    "seconds to finish what was taken, after SIGTERM",
  )
  top: int = option(
    5, Number(1, 2**20, "classes"), "classes of a task where none are asked for"
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
          f"{name} is {value}, expected at most {most}, {limit}: such a "
          "request could never be taken."
        )
