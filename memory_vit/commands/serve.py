"""Serves tasks over HTTP, all of them in one pass of one backbone.

  memory-vit serve --backbone=SOURCE --task=DIR [--task=DIR ...]

Clients with the token of --token_file can add, replace and remove tasks. The
page at / shows the answers of all tasks to an image. SIGTERM or Ctrl-C ends the
process by that signal (exit status 143 or 130 in a shell); the exit status is 2
for bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import sys
from collections.abc import Sequence

from etils import epy

from memory_vit.commands import console
from memory_vit.commands.command_line import Parser
from memory_vit.commands.console import show
from memory_vit.errors import ConfigError
from memory_vit.prediction.config import PredictorConfig
from memory_vit.runtime.messages import brief
from memory_vit.runtime.options import Number
from memory_vit.serving import server_log
from memory_vit.serving.settings import ServerSettings

with epy.lazy_imports():  # delay slow imports until the options are checked
  from memory_vit.prediction import predictor as predictors
  from memory_vit.serving import app, http_server

# Fields of `PredictorConfig` that are flags of this command.
_SHAPES = ("image_size", "slots", "cells", "classes", "memory_mib")


def main(argv: Sequence[str]) -> int:
  return console.run_command(lambda: _serve(_parser().parse(argv)))


def _parser() -> Parser:
  parser = Parser(
    prog="memory-vit serve",
    description="Serves tasks over HTTP, all of them in one pass.",
  )
  parser.add_argument(
    "--backbone",
    required=True,
    metavar="SOURCE",
    help="an .npz file, its URL or a short name such as augreg-B/32; a model "
    "directory of transformers or timm; or hf://OWNER/NAME",
  )
  parser.strings(
    "--task",
    "DIR",
    "a task, or a directory of tasks; or hf://OWNER/NAME[/TASK]; may be "
    "repeated",
  )
  parser.add_argument(
    "--host",
    default="127.0.0.1",
    help="address to listen on; 0.0.0.0 lets in every machine that reaches "
    "this one, without encryption (default: %(default)s)",
  )
  ports = Number(0, 65_535, "0 chooses a free port")
  parser.number("--port", ports, 8000, "port to listen on")
  parser.dtype()
  parser.add_argument(
    "--batch_sizes",
    default="1,8,32",
    metavar="N,N",
    help="batch sizes, ascending; each is compiled (default: %(default)s)",
  )
  parser.options(PredictorConfig, *_SHAPES)
  parser.options(ServerSettings)
  return parser


def _serve(arguments: argparse.Namespace) -> int:
  config = PredictorConfig(
    backbone=arguments.backbone,
    tasks=tuple(arguments.task),
    dtype=console.compute_dtype(arguments.dtype),
    batch_sizes=_batch_sizes(arguments.batch_sizes),
    **{name: getattr(arguments, name) for name in _SHAPES},
  )
  settings = _settings(arguments)
  server_log.log_to_stderr()
  with http_server.bind(arguments.host, arguments.port) as bound:
    predictor = predictors.Predictor(config, warm_up=False)
    address = bound.getsockname()[0]
    settings = _trusting(settings, arguments.host, address)
    application = app.create_app(predictor, settings)
    console.recommend_dtype(arguments.dtype)
    show(f"listening on {http_server.url(bound)}")
    if not _is_loopback(address):
      show(
        "every machine that reaches this one can use the server, unencrypted",
        sys.stderr,
      )
    http_server.serve(application, settings, bound)
  return 0


def _settings(arguments: argparse.Namespace) -> ServerSettings:
  names = [field.name for field in dataclasses.fields(ServerSettings)]
  return ServerSettings(**{name: getattr(arguments, name) for name in names})


def _trusting(
  settings: ServerSettings, host: str, address: str
) -> ServerSettings:
  """Return `settings`, with the default of `allowed_hosts` filled in.

  If `address` is a loopback address, the default is `host`. Otherwise, the
  default is None: every host is allowed.
  """
  if settings.allowed_hosts is not None or not _is_loopback(address):
    return settings
  allowed = f"[{host}]" if ":" in host else host
  return dataclasses.replace(settings, allowed_hosts=allowed)


def _batch_sizes(text: str) -> tuple[int, ...]:
  try:
    return tuple(int(part) for part in text.split(","))
  except ValueError:
    raise ConfigError(
      f"--batch_sizes is {brief(text)}, expected numbers such as 1,8,32."
    ) from None


def _is_loopback(address: str) -> bool:
  return ipaddress.ip_address(address.partition("%")[0]).is_loopback
