"""The wheel and the source distribution: built, and looked into."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from release import addresses, readme
from release.errors import ReleaseError

# What a wheel must have, below the package or its metadata.
_IN_WHEEL = (
  "memory_vit/__init__.py", "memory_vit/py.typed",
  "memory_vit/serving/page/index.html", "memory_vit/serving/page/page.js",
  "memory_vit/serving/page/page.css", "memory_vit/reports/report.css",
  "memory_vit/runtime/h100.txt",
  "memory_vit/configs/quickstart.py", "memory_vit/glyphs/README.md",
  "memory_vit/glyphs/backbone.npz", "memory_vit/glyphs/inverted.npz",
)  # fmt: skip
_IN_METADATA = ("METADATA", "licenses/LICENSE", "entry_points.txt")
_IN_SOURCE = (
  "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff",
)  # fmt: skip
# What is packed of the checkout.
_PACKED = ("memory_vit", "configs", "MANIFEST.in", *_IN_SOURCE)
# All that an archive may have: whatever else lies below the package, such as a
# setting with a password, is not for the public.
_OF_PACKAGE = re.compile(
  r"memory_vit/(py\.typed|reports/\w+\.css|serving/page/\w+\.(html|js|css)"
  r"|runtime/h100\.txt|glyphs/(README\.md|\w+\.npz)"
  r"|(\w+/)*\w+\.py)"
)
_WRITTEN = ("RECORD", "WHEEL", "top_level.txt", *_IN_METADATA)
_WRITTEN_IN_SOURCE = (
  "MANIFEST.in", "PKG-INFO", "setup.cfg",
  *(f"memory_vit.egg-info/{name}" for name in (
    "PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt",
    "requires.txt", "top_level.txt",
  )),
)  # fmt: skip
# Of code, glyphs and their backbone; beyond this it grows by accident only.
_MOST_BYTES = 12 * 10**6


def require_clean(root: Path) -> None:
  """Raise `ReleaseError` where a checkout holds what is not committed."""
  changed = _git(root, "status", "--porcelain").splitlines()
  if changed:
    raise ReleaseError(
      f"the checkout is not clean ({len(changed)} files, such as "
      f"{changed[0][3:]}): commit first, or give --allow_dirty."
    )


def build(root: Path, scratch: Path, version: str, repository: str) -> Path:
  """Build a source distribution, and a wheel from it.

  Args:
    root: of the checkout; of the files that git knows those of the package
      are taken, as they are.
    scratch: an empty directory to work in.
    version: of the release.
    repository: see `readme.for_index` and `addresses.project_urls`.

  Returns:
    The directory of both.
  """
  source, built = scratch / "source", scratch / "dist"
  for name in _git(root, "ls-files", "-z", *_PACKED).split("\0"):
    path = root / name
    if name and path.is_file():  # not the link to configs/
      copy = source / name
      copy.parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(path, copy)
  # A link in the checkout; an archive holds the files.
  shutil.move(source / "configs", source / "memory_vit" / "configs")
  for name, rewritten in (
    ("README.md", readme.for_index),
    ("pyproject.toml", addresses.project_urls),
  ):
    text = (source / name).read_text(encoding="utf-8")
    (source / name).write_text(
      rewritten(text, version, repository), encoding="utf-8"
    )
  _run(sys.executable, "-m", "build", "--outdir", str(built), str(source))
  return built


def check(root: Path, built: Path, version: str) -> list[Path]:
  """Check both archives and the citation file; return the archives.

  Raises:
    ReleaseError: for metadata that an index would refuse, a file that is
      missing, or one that does not belong there.
  """
  wheel = built / f"memory_vit-{version}-py3-none-any.whl"
  source = built / f"memory_vit-{version}.tar.gz"
  found = sorted(path.name for path in built.iterdir())
  if found != sorted([wheel.name, source.name]):
    raise ReleaseError(
      f"{found} was built, expected {wheel.name} and {source.name}."
    )
  twine = [sys.executable, "-m", "twine"]
  _run(*twine, "check", "--strict", str(wheel), str(source))
  # It is no module that runs.
  cffconvert = Path(sys.executable).parent / "cffconvert"
  _run(str(cffconvert), "--validate", "-i", str(root / "CITATION.cff"))
  metadata = f"memory_vit-{version}.dist-info/"
  with zipfile.ZipFile(wheel) as archive:
    _require(
      wheel,
      [name for name in archive.namelist() if not name.endswith("/")],
      needed=[*_IN_WHEEL, *(metadata + name for name in _IN_METADATA)],
      written=[metadata + name for name in _WRITTEN],
    )
  top = f"memory_vit-{version}/"
  with tarfile.open(source) as archive:
    _require(
      source,
      [m.name.removeprefix(top) for m in archive if not m.isdir()],
      needed=[*_IN_SOURCE, *_IN_WHEEL],
      written=[*_IN_SOURCE, *_WRITTEN_IN_SOURCE],
    )
  return [wheel, source]


def _require(
  archive: Path,
  names: Sequence[str],
  *,
  needed: Sequence[str],
  written: Sequence[str],
) -> None:
  """Refuse an archive with too little or too much in it.

  Args:
    archive: the file.
    names: of what is in it.
    needed: must be among them.
    written: may be, beside the files of the package.

  Raises:
    ReleaseError: it names what is missing, and what should not be there.
  """
  missing = [name for name in needed if name not in names]
  foreign = [
    name
    for name in names
    if name not in written and not _OF_PACKAGE.fullmatch(name)
  ]
  size = archive.stat().st_size
  if missing or foreign or size > _MOST_BYTES:
    raise ReleaseError(
      f"{archive.name}, of {size:,} bytes (at most {_MOST_BYTES:,}): missing "
      f"are {missing}, and not to be there are {foreign}."
    )


def _git(root: Path, *arguments: str) -> str:
  return subprocess.run(
    ["git", "-C", str(root), *arguments],
    check=True, capture_output=True, text=True,
  ).stdout  # fmt: skip


def _run(*command: str) -> None:
  """Run a tool of this environment; say what it said where it fails."""
  done = subprocess.run(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )
  if done.returncode:
    raise ReleaseError(
      f"{' '.join(command)} failed:\n{done.stdout.strip()[-3000:]}"
    )
