"""Files from elsewhere: short names, addresses, a cache of what was fetched."""

import contextlib
import hashlib
import logging
import os
import shutil
import sys
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from memory_vit import paths
from memory_vit.errors import CheckpointError

logger = logging.getLogger("memory_vit")

_BUCKET = "https://storage.googleapis.com/vit_models"


def _augreg(model: str, recipe: str) -> str:
  name = f"{model}-i21k-300ep-lr_0.001-{recipe}-do_0.0-sd_0.0"
  return f"{_BUCKET}/augreg/{name}.npz"


# Short name -> address. "i21k" are the weights of the original paper
# (arXiv:2010.11929), with `pre_logits` and a head of 21,843 classes; "augreg"
# those that "How to train your ViT?" (arXiv:2106.10270) recommends, which has
# no L/32. We know no published checksums, so none is pinned: the SHA-256 of
# every download is logged, to be compared by hand.
KNOWN = {
  "i21k-B/32": f"{_BUCKET}/imagenet21k/ViT-B_32.npz",
  "i21k-B/16": f"{_BUCKET}/imagenet21k/ViT-B_16.npz",
  "i21k-L/32": f"{_BUCKET}/imagenet21k/ViT-L_32.npz",
  "i21k-L/16": f"{_BUCKET}/imagenet21k/ViT-L_16.npz",
  "i21k-H/14": f"{_BUCKET}/imagenet21k/ViT-H_14.npz",
  "augreg-Ti/16": _augreg("Ti_16", "aug_none-wd_0.03"),
  "augreg-S/32": _augreg("S_32", "aug_none-wd_0.1"),
  "augreg-S/16": _augreg("S_16", "aug_light1-wd_0.03"),
  # As in big_vision; timm's B/32 is another one (aug_medium1-wd_0.03).
  "augreg-B/32": _augreg("B_32", "aug_light1-wd_0.1"),
  "augreg-B/16": _augreg("B_16", "aug_medium1-wd_0.1"),
  "augreg-B/8": _augreg("B_8", "aug_medium2-wd_0.1"),
  "augreg-L/16": _augreg("L_16", "aug_strong1-wd_0.1"),
}


def local_file(path: str) -> Path:
  """Finds a file, and fetches it where it is elsewhere.

  Args:
    path: a name of `KNOWN`, a local path, or an address that starts with
      https://, http:// or gs://.

  Returns:
    The local file. What is fetched is kept in $MEMORY_VIT_CACHE, or
    ~/.cache/memory_vit.

  Raises:
    CheckpointError: where there is none, or it cannot be fetched.
  """
  address = KNOWN.get(path, path)
  if address.startswith(("https://", "http://")):
    return _cached(address, _fetch_http)
  if address.startswith("gs://"):
    return _cached(address, _fetch_gs)
  file = paths.local(address, "the backbone", CheckpointError)
  if not file.is_file():
    raise CheckpointError(
      f"no file {path!r}: expected an .npz file, an address that starts with "
      f"https:// or gs://, or one of {', '.join(KNOWN)}."
    )
  return file


def _cached(url: str, fetch: Callable[[str, Path], None]) -> Path:
  """Returns the local copy of a file, made by `fetch` the first time."""
  default = Path.home() / ".cache" / "memory_vit"
  folder = paths.local(
    os.environ.get("MEMORY_VIT_CACHE") or default,
    "$MEMORY_VIT_CACHE",
    CheckpointError,
  )
  try:
    name = PurePosixPath(urllib.parse.urlsplit(url).path).name
  except ValueError as error:
    raise CheckpointError(
      f"{url!r} is no address ({error}): expected one such as "
      "https://HOST/FILE.npz."
    ) from error
  # The same file name is published at several addresses.
  address = hashlib.sha256(url.encode()).hexdigest()[:12]
  file = paths.local(folder / f"{address}-{name}", "its copy", CheckpointError)
  if file.exists():
    logger.info("%s is already at %s", url, file)
    return file
  logger.info("downloading %s", url)
  try:
    with replacing(file) as part:
      fetch(url, part)
  except Exception as error:
    # Any: requests, TensorFlow and fsspec each have exceptions of their own.
    raise CheckpointError(
      f"cannot fetch {url} ({type(error).__name__}: {error}). Put the file at "
      f"{file} by hand, or give the path of a local copy.{_remedy(url)}"
    ) from error
  with file.open("rb") as stream:
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
  mebibytes = file.stat().st_size / 2**20
  logger.info(
    "downloaded %s: %.1f MiB, SHA-256 %s, to %s", url, mebibytes, digest, file
  )
  return file


def _fetch_http(url: str, part: Path) -> None:
  import pooch  # Only who downloads needs it.

  # A bar in a log file is thousands of lines.
  download = pooch.HTTPDownloader(
    progressbar=sys.stderr.isatty(), chunk_size=2**20
  )
  download(url, str(part), pooch=None)


def _fetch_gs(url: str, part: Path) -> None:
  # Reads gs:// through TensorFlow or gcsfs, and imports them.
  from etils import epath

  with epath.Path(url).open("rb") as source, part.open("wb") as target:
    shutil.copyfileobj(source, target)


def _remedy(url: str) -> str:
  if not url.startswith("gs://"):
    return ""
  https = url.replace("gs://", "https://storage.googleapis.com/", 1)
  return (
    " gs:// needs TensorFlow or gcsfs, and credentials; for a public bucket "
    f"use {https}"
  )


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
  """Gives a path to write to, and moves it to `file` once all went well."""
  file.parent.mkdir(parents=True, exist_ok=True)
  part = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.part")
  try:
    yield part
    part.replace(file)
  finally:
    part.unlink(missing_ok=True)
