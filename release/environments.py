"""Clean environments of each Python that is found, with a wheel in them."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from release.errors import ReleaseError

VERSIONS = ("3.11", "3.12", "3.13")
_IS_USABLE = "import ensurepip, ssl, sys; print('%d.%d' % sys.version_info[:2])"


def pythons() -> dict[str, Path]:
  """{"3.11": its interpreter, ...} of `VERSIONS`, those that are found here."""
  found = {}
  for version in VERSIONS:
    for python in _candidates(version):
      done = subprocess.run(
        [python, "-c", _IS_USABLE], capture_output=True, text=True
      )
      if done.stdout.strip() == version:
        found[version] = python
        break
  return found


def _candidates(version: str) -> list[Path]:
  """Return paths at which an interpreter may be: on the PATH, or of pyenv."""
  names = [shutil.which(f"python{version}")]
  pyenv = shutil.which("pyenv")
  if pyenv:
    root = subprocess.run([pyenv, "root"], capture_output=True, text=True)
    folder = Path(root.stdout.strip()) / "versions"
    names += [str(p) for p in sorted(folder.glob(f"{version}.*/bin/python"))]
  return [Path(name) for name in names if name]


class Environment:
  """A clean environment, and a folder away from the checkout to work in."""

  def __init__(self, python: Path, folder: Path) -> None:
    """Make it, with nothing installed.

    Args:
      python: the interpreter.
      folder: is made.
    """
    self.work = folder / "work"
    self.work.mkdir(parents=True)
    self._python = folder / "venv" / "bin" / "python"
    self._cache = folder / "cache"
    self._log = folder / "log.txt"
    venv = str(folder / "venv")
    self._uv = shutil.which("uv")
    if self._uv:
      self.check([self._uv, "venv", "--quiet", "--python", str(python), venv])
    else:
      self.check([str(python), "-m", "venv", venv])

  @property
  def variables(self) -> dict[str, str]:
    """The variables of its processes: no other packages, a cache of its own."""
    known = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return {**known, "MEMORY_VIT_CACHE": str(self._cache)}

  def command(self, *arguments: str) -> list[str]:
    """Its Python with arguments."""
    return [str(self._python), *arguments]

  def install(self, *requirements: str) -> float:
    """Install what pip would take; return the seconds."""
    if self._uv:
      into = ["--quiet", "--python", str(self._python)]
      return self.check([self._uv, "pip", "install", *into, *requirements])
    return self.check(
      self.command("-m", "pip", "install", "--quiet", *requirements)
    )

  def run(self, *arguments: str) -> float:
    """Run its Python to the end; return the seconds.

    Raises:
      ReleaseError: where the exit status is not 0.
    """
    return self.check(self.command(*arguments))

  def output(self, *arguments: str) -> str:
    """Run its Python; return what it says."""
    return self._said(self.command(*arguments))

  def printed_by(self, program: str, *arguments: str) -> str:
    """Run a program that a package brought; return what it says.

    Raises:
      ReleaseError: where there is none of this name, or it fails.
    """
    path = self._python.parent / program
    if not path.is_file():
      raise ReleaseError(f"the wheel has not brought the program {program}.")
    return self._said([str(path), *arguments])

  def _said(self, command: Sequence[str]) -> str:
    start = self._log.stat().st_size if self._log.exists() else 0
    self.check(command)
    return self._log.read_text(encoding="utf-8")[start:]

  def check(self, command: Sequence[str]) -> float:
    """Run a command in the folder of this environment."""
    began = time.perf_counter()
    with self._log.open("ab") as log:
      done = subprocess.run(
        command, cwd=self.work, env=self.variables, stdout=log, stderr=log
      )
    if done.returncode:
      said = self._log.read_text(encoding="utf-8", errors="replace")
      raise ReleaseError(
        f"status {done.returncode} of {' '.join(command)}:\n{said[-3000:]}"
      )
    return time.perf_counter() - began
