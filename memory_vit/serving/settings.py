"""Settings of the server: limits, timeouts, and where its files lie.

Each number stands here once, with its rule and its help: the command line is
made of these fields.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from memory_vit.errors import ConfigError
from memory_vit.runtime.messages import brief
from memory_vit.runtime.rules import Number, Rule

MIB = 2**20
MOST_IMAGES = 4096
_DAY = 86_400
_HOST = r"([\w.-]+|\[[0-9a-fA-F:.]+\]|\*)"
_HOSTS = re.compile(f"{_HOST}(,{_HOST})*")


def _number(default: float, rule: Rule, about: str) -> Any:
  return dataclasses.field(
    default=default, metadata={"rule": rule, "about": about}
  )


def _text(about: str, metavar: str = "PATH") -> Any:
  return dataclasses.field(
    default=None, metadata={"about": about, "metavar": metavar}
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
  """Limits, timeouts and paths of a server; strings and numbers only.

  The metadata of each field is its help, and of numbers their rule.

  Raises:
    ConfigError: for a number that its rule refuses.
  """

  token_file: str | None = _text(
    "a file with the token for adding and removing tasks, at least 16 "
    "characters, not readable by others; without it nobody may"
  )
  task_root: str | None = _text(
    "tasks of this machine may be added by their path, but only below this "
    "directory"
  )
  state_dir: str | None = _text(
    "keep here the tasks that were added, and load them at the next start; "
    "without it they end with the server"
  )
  allowed_hosts: str | None = _text(
    "names by which a proxy or other machines ask for this server, separated "
    "by commas; beside them only localhost, 127.0.0.1 and [::1] are answered. "
    "'*' is any name, and the default where other machines are let in",
    "NAME,NAME",
  )
  wait_ms: float = _number(
    5.0,
    Number(0, 10_000, "milliseconds"),
    "milliseconds that images which are ready wait for those of other requests "
    "that are being decoded, to share a batch",
  )
  max_queue: int = _number(
    256,
    Number(1, 2**20, "images"),
    "images that were taken and are not yet answered; of more, requests get "
    "status 503, and when to come again",
  )
  max_images: int = _number(
    32, Number(1, MOST_IMAGES, "images"), "images of one request"
  )
  max_megapixels: int = _number(
    256,
    Number(1, 2**20, "megapixels"),
    "megapixels of all images of one request, by their headers",
  )
  max_body_mib: int = _number(
    64, Number(1, 4096, "MiB"), "MiB of one request's body"
  )
  max_task_mib: int = _number(
    64, Number(1, 16_384, "MiB"), "MiB of a task that is uploaded"
  )
  max_held_mib: int = _number(
    512,
    Number(1, 2**20, "MiB"),
    "MiB of the bodies of all requests together, as they were sent and until "
    "their answers are; of more, status 503. JSON takes about 4 times as much",
  )
  timeout: float = _number(
    30.0,
    Number(0, _DAY, "seconds", positive=True),
    "seconds until images are answered once they have arrived; then status 504",
  )
  receive_timeout: float = _number(
    20.0,
    Number(0, _DAY, "seconds", positive=True),
    "seconds until the headers of a request have arrived, and again its body",
  )
  timeout_keep_alive: int = _number(
    5,
    Number(1, _DAY, "seconds"),
    "seconds that a connection without a request is kept",
  )
  max_connections: int = _number(
    512,
    Number(1, 65_536, "connections"),
    "connections at the same time, or requests at work; of as many, each "
    "request gets status 503 as plain text, /healthz and /metrics too",
  )
  grace: int = _number(
    30,
    Number(0, _DAY, "seconds"),
    "seconds to finish what was taken, after SIGTERM",
  )
  top: int = _number(
    5, Number(1, 2**20, "classes"), "classes of a task where none are asked for"
  )

  def __post_init__(self) -> None:
    for name, rule in rules().items():
      value = getattr(self, name)
      if not isinstance(value, int | float) or not rule.accepts(value):
        raise ConfigError(
          f"{name} is {brief(value)}, expected {rule.expected}."
        )
    if self.max_images > self.max_queue:
      raise ConfigError(
        f"max_images is {self.max_images}, expected at most max_queue, "
        f"{self.max_queue}: such a request could never be taken."
      )
    hosts = self.allowed_hosts
    if hosts is not None and not _HOSTS.fullmatch(hosts):
      raise ConfigError(
        f"allowed_hosts is {brief(hosts)}, expected names such as "
        "vit.example.com, without a scheme or a port, separated by commas."
      )
    for name in ("max_body_mib", "max_task_mib"):
      if getattr(self, name) > self.max_held_mib:
        raise ConfigError(
          f"{name} is {getattr(self, name)}, expected at most max_held_mib, "
          f"{self.max_held_mib}: such a request could never be taken."
        )


def rules() -> Mapping[str, Rule]:
  """The rule of each number, by its name."""
  return {
    field.name: field.metadata["rule"]
    for field in dataclasses.fields(ServerSettings)
    if "rule" in field.metadata
  }
