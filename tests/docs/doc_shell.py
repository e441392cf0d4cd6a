"""Runs a block by bash, and answers its `memory-vit COMMAND` at once.

A process of its own would take five seconds to import what is imported here
already. So `python` of the workspace, which its `memory-vit` calls, is a small
program that asks this process:
the command is then run here, on the streams of the small one, in its directory
and its environment. What has to be a process is one: a server, which then
serves the blocks that follow, and runs of several processes.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import quick
from doc_substitutes import EXTRA_FLAGS, LEFT_OUT, LEFT_OUT_PACKAGE

from memory_vit.__main__ import COMMANDS, main
from memory_vit.commands import console

# Seconds of a block, and of a server until it answers or has ended.
_BLOCK, _SERVER = 900, 120
# The program `memory-vit`.
_MEMORY_VIT = '#!/bin/sh\nexec python -m memory_vit "$@"\n'
# `python` in the workspace: it asks, and becomes what it is told to be.
_PYTHON = """#!{python} -IS
import json, os, socket, sys
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as here:
  here.connect({address!r})
  socket.send_fds(here, [len(asked).to_bytes(8, "big")], [0, 1, 2])
  here.sendall(asked)
  answer = b""
  while part := here.recv(65536):
    answer += part
answer = json.loads(answer or b"99")
if isinstance(answer, int):
  sys.exit(answer)
os.execv(answer[0], answer)
"""


@dataclasses.dataclass
class Server:
  """A process that serves, until the end of a page or the next server."""

  process: subprocess.Popen[str]
  address: str

  def end(self) -> None:
    """End it as a user would; nothing may be cut off."""
    self.process.send_signal(signal.SIGTERM)
    try:
      status = self.process.wait(_SERVER)
      assert status == -signal.SIGTERM, status
    finally:
      self.process.kill()
      self.process.wait()


class Shell:
  """Runs blocks in a workspace.

  Attributes:
    ran: modules of the package, in the order in which they were run.
    server: the one that is running.
  """

  def __init__(self, workspace: Path) -> None:
    self._workspace = workspace
    self.ran: list[str] = []
    self.server: Server | None = None
    # Addresses of sockets have at most 100 characters or so.
    self._folder = contextlib.ExitStack()
    folder = self._folder.enter_context(
      tempfile.TemporaryDirectory(prefix="docs", dir="/tmp")
    )
    address = f"{folder}/python"
    self._listener = self._folder.enter_context(socket.socket(socket.AF_UNIX))
    self._listener.bind(address)
    self._listener.listen()
    self._listener.settimeout(0.02)
    code = _PYTHON.format(python=sys.executable, address=address)
    for environment in (".venv", ".venv-exchange"):
      _write_environment(workspace / environment, code)
    own = os.path.dirname(sys.executable)
    self._environment = {
      **os.environ,
      "PATH": f"{workspace}/.venv/bin:{own}:{os.environ['PATH']}",
      "XLA_FLAGS": quick.XLA_FLAGS,  # one device for each process
    }

  def close(self) -> None:
    """End the server, if there is one."""
    try:
      self._end_server()
    finally:
      self._folder.close()

  def run(self, text: str) -> str:
    """Run commands of a shell; return what they print.

    Raises:
      AssertionError: where one fails, with what was printed.
    """
    script = f"set -eu -o pipefail\n{_functions()}\n{text}"
    output = self._workspace / "output.txt"
    with (
      output.open("w+") as stream,
      subprocess.Popen(
        ["bash", "-c", script], cwd=self._workspace, env=self._environment,
        stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        start_new_session=True,
      ) as process,
    ):  # fmt: skip
      try:
        self._answer(process)
      finally:
        if process.poll() is None:
          os.killpg(process.pid, signal.SIGKILL)
    printed = output.read_text(errors="replace")
    assert process.returncode == 0, (
      f"status {process.returncode} of\n{text}\n{printed[-4000:]}"
    )
    return printed

  def _answer(self, process: subprocess.Popen[bytes]) -> None:
    """Answer the small programs, until the block has ended."""
    end = time.monotonic() + _BLOCK
    while process.poll() is None:
      assert time.monotonic() < end, f"not at its end after {_BLOCK} s"
      try:
        asking, _ = self._listener.accept()
      except TimeoutError:
        continue
      with asking:
        asking.settimeout(_BLOCK)
        question, streams = _question(asking)
        try:
          answer = self._do(*question, streams)
        finally:
          for stream in streams:
            os.close(stream)
        # It may be gone: a pipeline that needs no more of it.
        with contextlib.suppress(BrokenPipeError):
          asking.sendall(json.dumps(answer).encode())

  def _do(
    self,
    argv: Sequence[str],
    directory: str,
    environment: dict[str, str],
    streams: Sequence[int],
  ) -> int | list[str]:
    """An exit status; or a command, for what has to be a process."""
    if argv[:2] == ["-m", "memory_vit.main"]:
      argv = ["-m", "memory_vit", "train", *argv[2:]]
    if any(re.search(part, " ".join(argv)) for part in LEFT_OUT_PACKAGE):
      return 0
    argv = made_small(argv)
    name = argv[2] if argv[:2] == ["-m", "memory_vit"] else ""
    arguments = argv[3:]
    if argv[0] == "-m" and argv[1].startswith("studies."):
      name, arguments = argv[1], argv[2:]
    if name:
      self.ran.append(name)
    if not name or any(a.startswith("--coordinator") for a in argv):
      return [sys.executable, *argv]
    if name == "serve":
      return self._serve([*argv, "--port=0"], directory)
    with (
      contextlib.chdir(directory),
      mock.patch.dict(os.environ, environment, clear=True),
      _streams(streams) as printed,
    ):
      status = _status(name, arguments)
      # Each of them says what it did.
      assert status or printed.getvalue().strip(), f"{name} printed nothing"
    return status

  def _serve(self, argv: Sequence[str], directory: str) -> int:
    """Start a server, in the place of an earlier one, and wait until ready."""
    self._end_server()
    log = self._workspace / "server.log"
    with log.open("w") as stream:
      process = subprocess.Popen(
        [sys.executable, *argv], cwd=directory, env=self._environment,
        stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
        text=True,
      )  # fmt: skip
    end = time.monotonic() + _SERVER
    self.server = Server(process, "")
    while time.monotonic() < end and process.poll() is None:
      found = re.search(r"listening on http://(\S+)", log.read_text())
      if found and _is_ready(found[1]):
        self.server.address = found[1]
        return 0
      time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")

  def _end_server(self) -> None:
    if self.server:
      server, self.server = self.server, None
      server.end()


def _write_environment(folder: Path, code: str) -> None:
  """A virtual environment, as far as make and a path to `python` go."""
  (folder / "bin").mkdir(parents=True)
  for name in ("python", "python3"):
    (folder / "bin" / name).write_text(code)
  (folder / "bin" / "memory-vit").write_text(_MEMORY_VIT)
  for program in (folder / "bin").iterdir():
    program.chmod(0o755)
  for stamp in ("installed-train", "installed"):
    (folder / stamp).touch()  # newer than what make compares


def made_small(argv: Sequence[str]) -> list[str]:
  """A command with the flags that make it small."""
  command = " ".join(argv)
  added = [
    flag
    for pattern, flags in EXTRA_FLAGS.items()
    if re.search(pattern, command)
    for flag in flags
  ]
  replaced = {flag.partition("=")[0] for flag in added}
  kept = [a for a in argv if a.partition("=")[0] not in replaced]
  return [*kept, *added]


def _functions() -> str:
  """Functions of the shell, for what is not run."""
  patterns: dict[str, list[str]] = {}
  for pattern in LEFT_OUT:
    name, _, rest = pattern.partition(" ")
    patterns.setdefault(name, []).append(rest)
  # An answer of 404 is a failure.
  options = {"curl": "--fail-with-body --silent --show-error"}
  options |= {name: "" for name in patterns if name != "curl"}
  left_out = [
    f'{name}() {{ case "$*" in '
    + "".join(f"{_glob(rest)}) ;; " for rest in patterns.get(name, ()))
    + f'*) command {name} {flags} "$@" ;; esac; }}'
    for name, flags in options.items()
  ]
  return "\n".join(left_out)


def _glob(pattern: str) -> str:
  """A pattern of `case`: only * is special."""
  return "*".join(shlex.quote(part) if part else "" for part in
                  pattern.split("*"))  # fmt: skip


def _call(name: str, argv: Sequence[str]) -> int:
  """Run a command of the package, or a study, here."""
  if name.startswith("studies."):
    study = importlib.import_module(f"{name}.__main__")
    return console.run_command(lambda: study.run(argv))
  if name not in COMMANDS:
    return main([name, *argv])
  command = importlib.import_module(f"memory_vit.commands.{name}")
  if not hasattr(command, "parse"):
    return command.main(list(argv))
  return console.run_command(
    lambda: command.execute(command.parse([name, *argv]))
  )


def _status(name: str, argv: Sequence[str]) -> int:
  """The exit status; that of --help too, which raises."""
  try:
    return _call(name, argv)
  except SystemExit as end:
    return int(end.code or 0)


class _Copied(io.StringIO):
  """What is printed, which also goes on as it comes."""

  def __init__(self, stream: int) -> None:
    super().__init__()
    self._stream = stream

  def write(self, text: str) -> int:
    os.write(self._stream, text.encode())
    return super().write(text)


@contextlib.contextmanager
def _streams(streams: Sequence[int]) -> Iterator[_Copied]:
  """The standard streams are those of another process."""
  printed = _Copied(streams[1])
  with (
    os.fdopen(os.dup(streams[0])) as stdin,
    mock.patch.object(sys, "stdin", stdin),
    contextlib.redirect_stdout(printed),
    contextlib.redirect_stderr(_Copied(streams[2])),
  ):
    yield printed


def _question(asking: socket.socket) -> tuple[list, list[int]]:
  """What a small program asks, and its three streams."""
  size, streams, _, _ = socket.recv_fds(asking, 8, 3)
  content, length = b"", int.from_bytes(size, "big")
  while len(content) < length:
    content += asking.recv(length - len(content))
  return json.loads(content), streams


def _is_ready(address: str) -> bool:
  """Whether a server answers, and says that it is warm."""
  host, _, port = address.rpartition(":")
  try:
    with socket.create_connection((host, int(port)), timeout=5) as client:
      client.sendall(b"GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n")
      return b" 200 " in client.recv(100).split(b"\r\n")[0] + b" "
  except OSError:
    return False
