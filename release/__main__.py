"""Build the wheel and the source distribution, and try them as a user would.

  make release [RELEASE="--repository=https://... --full"]

Versions have to agree and the checkout has to be clean. What was built is
installed into clean environments of each Python that is found, away from the
checkout: the core without TensorFlow, which predicts, exports and serves; and
the core with `train`, which runs the quickstart first. What passed lies in
dist/. Nothing is uploaded.
"""

import argparse
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from release import addresses, distributions, environments, trials, versions
from release.errors import ReleaseError

ROOT = Path(__file__).resolve().parent.parent
_GOLDEN = ROOT / "tests" / "golden" / "format_2"
_IMAGE = ROOT / "docs" / "sweep_tiny_imagenet_a.png"
_STEPS = (
  "install", "import", "quickstart", "evaluate", "predict", "export", "serve",
)  # fmt: skip


def main() -> int:
  """Build, check and try; return the exit status."""
  arguments = _parser().parse_args()
  try:
    version = versions.version_of(ROOT)
    if not arguments.allow_dirty:
      distributions.require_clean(ROOT)
    addresses.require_same(ROOT, version, arguments.repository)
    wanted = _found(
      arguments.python or environments.VERSIONS,
      environments.pythons(),
      allow_missing=arguments.allow_missing,
    )
    with tempfile.TemporaryDirectory(prefix="memory_vit-release-") as folder:
      scratch = Path(folder)
      built = distributions.build(ROOT, scratch, version, arguments.repository)
      archives = distributions.check(ROOT, built, version)
      _show(archives, arguments.repository)
      for each, python in wanted.items():
        _try(each, python, archives[0], scratch, full=arguments.full)
      _keep(archives)
  except ReleaseError as problem:
    print(f"error: {problem}", file=sys.stderr)
    return 1
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m release",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--repository", default="", metavar="URL", type=addresses.repository,
    help="https://github.com/OWNER/NAME, which the archives, the notebooks and "
    "CITATION.cff then name; without it a package index leads nowhere",
  )  # fmt: skip
  parser.add_argument(
    "--python", action="append", choices=environments.VERSIONS,
    help="only this one; may be given several times (default: all)",
  )  # fmt: skip
  parser.add_argument(
    "--full", action="store_true",
    help="train all steps of the quickstart, and not 20",
  )  # fmt: skip
  parser.add_argument(
    "--allow_dirty", action="store_true",
    help="go on where the checkout holds what is not committed",
  )  # fmt: skip
  parser.add_argument(
    "--allow_missing", action="store_true",
    help="go on where a version of Python is not installed",
  )  # fmt: skip
  return parser


def _found(
  wanted: Sequence[str], found: Mapping[str, Path], *, allow_missing: bool
) -> dict[str, Path]:
  """Those that are wanted of the Pythons that are found; name the others.

  Raises:
    ReleaseError: where one is missing that may not be, and where all are: a
      release that nothing has tried is none.
  """
  missing = [each for each in wanted if each not in found]
  if missing and not allow_missing:
    raise ReleaseError(
      f"Python {', '.join(missing)} is not here: install it, or give "
      "--allow_missing."
    )
  if len(missing) == len(wanted):
    raise ReleaseError(
      f"none of Python {', '.join(missing)} is here: install one, as a release "
      "has to be tried."
    )
  if missing:
    print(f"not here, and not tried: Python {', '.join(missing)}")
  return {each: found[each] for each in wanted if each in found}


def _show(archives: list[Path], repository: str) -> None:
  """Print what was built, with checksums, and the header of the table."""
  for path in archives:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    print(f"{digest}  {path.name}  {path.stat().st_size:,} bytes")
  print(f"{_leads_to(repository)}\n")
  print(_row("Python", "installed", _STEPS), flush=True)


def _leads_to(repository: str) -> str:
  """Describe the address in the archives, or what is missing without one."""
  if repository:
    return f"README, metadata and notebooks lead to {repository}"
  return (
    "no --repository was given: the archives do not say where the project, its "
    "documentation and its changelog are; of the README they have only what "
    "leads to no file; the notebooks need a checkout"
  )


def _try(
  version: str, python: Path, wheel: Path, scratch: Path, *, full: bool
) -> None:
  """Try a wheel with one Python; print seconds."""
  clean = environments.Environment(python, scratch / f"core-{version}")
  shown = trials.core(clean, wheel, _GOLDEN, _IMAGE)
  print(_seconds(version, "core, then [serve]", shown), flush=True)
  clean = environments.Environment(python, scratch / f"train-{version}")
  shown = trials.training(clean, wheel, _IMAGE, full=full)
  print(_seconds(version, "[train,serve]", shown), flush=True)


def _seconds(version: str, what: str, seconds: trials.Seconds) -> str:
  return _row(
    version,
    what,
    [f"{seconds[s]:.1f} s" if s in seconds else "" for s in _STEPS],
  )


def _row(version: str, what: str, values: list[str] | tuple[str, ...]) -> str:
  cells = "".join(f"{value:>12}" for value in values)
  return f"{version:<8}{what:<20}{cells}".rstrip()


def _keep(archives: list[Path]) -> None:
  """Move what passed to dist/, which it has for itself."""
  target = ROOT / "dist"
  shutil.rmtree(target, ignore_errors=True)
  target.mkdir()
  for path in archives:
    shutil.copyfile(path, target / path.name)
  print(f"\nthey are in {target}")


if __name__ == "__main__":
  sys.exit(main())
