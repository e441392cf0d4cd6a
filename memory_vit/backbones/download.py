"""Download backbones by short name or address, and cache them."""

import difflib
import hashlib
import logging
import os
import urllib.parse
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from etils import epy

from memory_vit import glyphs
from memory_vit.errors import BackboneError
from memory_vit.runtime import checksums, files, paths
from memory_vit.runtime.progress_bar import ProgressBar

with epy.lazy_imports():  # `stored_arrays` imports jax, which slows down --help
  from memory_vit.backbones import stored_arrays

logger = logging.getLogger(__name__)

# First bytes of every .npz file, but not of an error page in HTML.
_MAGIC = b"PK"
# Maximum number of bytes of a bad download to show in the error.
_SHOWN = 40
# Maximum number of characters of the URL in the name of a cached file.
_LONGEST_NAME = 50

_CHUNK_BYTES = 2**20

_BUCKET = "https://storage.googleapis.com/vit_models"


def _augreg(model: str, recipe: str) -> str:
  name = f"{model}-i21k-300ep-lr_0.001-{recipe}-do_0.0-sd_0.0"
  return f"{_BUCKET}/augreg/{name}.npz"


# {short name: address or local file}.
# - "i21k" models have the weights of the original paper (arXiv:2010.11929),
#   with a layer `pre_logits` and a head of 21,843 classes.
# - "augreg" models have the weights that "How to train your ViT?"
#   (arXiv:2106.10270) recommends. The paper recommends no weights for L/32.
# The publishers state no checksums to verify downloads with. Therefore the
# SHA-256 of every download is only logged.
KNOWN = {
  "glyphs": str(glyphs.BACKBONE),  # comes with the package
  "i21k-B/32": f"{_BUCKET}/imagenet21k/ViT-B_32.npz",
  "i21k-B/16": f"{_BUCKET}/imagenet21k/ViT-B_16.npz",
  "i21k-L/32": f"{_BUCKET}/imagenet21k/ViT-L_32.npz",
  "i21k-L/16": f"{_BUCKET}/imagenet21k/ViT-L_16.npz",
  "i21k-H/14": f"{_BUCKET}/imagenet21k/ViT-H_14.npz",
  "augreg-Ti/16": _augreg("Ti_16", "aug_none-wd_0.03"),
  "augreg-S/32": _augreg("S_32", "aug_none-wd_0.1"),
  "augreg-S/16": _augreg("S_16", "aug_light1-wd_0.03"),
  # For B/32, big_vision uses these weights, but timm uses aug_medium1-wd_0.03.
  "augreg-B/32": _augreg("B_32", "aug_light1-wd_0.1"),
  "augreg-B/16": _augreg("B_16", "aug_medium1-wd_0.1"),
  "augreg-B/8": _augreg("B_8", "aug_medium2-wd_0.1"),
  "augreg-L/16": _augreg("L_16", "aug_strong1-wd_0.1"),
}


def local_file(path: str) -> Path:
  """Return the .npz file of a short name, path or address; download if needed.

  Complete downloads are cached in $MEMORY_VIT_CACHE, or ~/.cache/memory_vit;
  damaged files in the cache are fetched again.
  """
  address = KNOWN.get(path, path)
  if address.startswith(("https://", "http://")):
    return _cached(address, _fetch_http)
  if address.startswith("gs://"):
    return _cached(address, _fetch_gs)
  file = paths.local(address, "the backbone", BackboneError)
  if not file.is_file():
    names = {name.lower(): name for name in KNOWN}
    near = difflib.get_close_matches(path.lower(), names, 1, 0.9)
    hint = f" Did you mean {names[near[0]]!r}?" if near else ""
    raise BackboneError(
      f"no file {path!r}: expected an .npz file; an address that starts with "
      "https:// or gs://; a model of transformers or timm (a directory, a "
      ".safetensors file, or hf://OWNER/NAME); or one of the names "
      f"{', '.join(KNOWN)}.{hint}"
    )
  return file


def _cached(url: str, fetch: "Callable[[str, _Download], None]") -> Path:
  """Call `fetch` unless `url` is cached; return the path of the cached copy."""
  file = _cached_path(url)
  try:
    if _is_cached(file):
      logger.info("%s is already at %s", url, file)
      return file
    logger.info("downloading %s", url)
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(file) as part:
      with part.open("wb") as opened:
        download = _Download(opened)
        fetch(url, download)
      _require_npz(part, download)
  # The libraries requests, TensorFlow and fsspec raise exceptions of any type.
  except Exception as error:
    is_ours = isinstance(error, BackboneError)
    reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
    raise BackboneError(
      f"cannot fetch {url}: {reason.rstrip('.')}. Nothing was cached: put the "
      f"file at {file} by hand, or give the path of a local copy."
      f"{_remedy(url)}"
    ) from error
  logger.info(
    "downloaded %s: %.1f MiB, SHA-256 %s, to %s",
    url, file.stat().st_size / 2**20, checksums.file_digest(file), file,
  )  # fmt: skip
  return file


def _cached_path(url: str) -> Path:
  """Return the path at which a download from `url` is cached."""
  folder = os.environ.get("MEMORY_VIT_CACHE") or "~/.cache/memory_vit"
  try:
    # Hash the address: different addresses may end in the same file name.
    address = hashlib.sha256(url.encode()).hexdigest()[:12]
    name = PurePosixPath(urllib.parse.urlsplit(url).path).name
    # Append the end of the file name, so that people recognize the copy.
    return Path(folder).expanduser() / f"{address}-{name[-_LONGEST_NAME:]}"
  except (RuntimeError, ValueError) as error:
    raise BackboneError(
      f"cannot fetch {url!r} ({error}). Either the address is wrong: expected "
      "the address of an .npz file. Or the directory for downloads cannot be "
      "found: set the variable MEMORY_VIT_CACHE to the path of a directory."
    ) from error


def _is_cached(file: Path) -> bool:
  """Return whether `file` is a complete .npz file; delete it if it is not."""
  if not os.path.lexists(file):
    return False
  try:
    if file.is_file():
      stored_arrays.require_whole(file)
      return True
    problem = "it is not a regular file"
  except BackboneError as error:
    problem = str(error)
  logger.warning("the cached file is removed, and fetched again: %s", problem)
  file.unlink()
  return False


class _Download:
  """A writable file that checks the bytes of an .npz file as they arrive."""

  def __init__(self, file: BinaryIO) -> None:
    self._file = file
    self.size, self.begins = 0, b""

  def write(self, data: bytes) -> int:
    """Write data; raise if the file is too large or cannot be an .npz file."""
    self.size += len(data)
    if len(self.begins) < _SHOWN:
      self.begins += data[: _SHOWN - len(self.begins)]
    if not self.begins.startswith(_MAGIC[: len(self.begins)]):
      raise _bad_download(self, " is no .npz file")
    if self.size > stored_arrays.MAX_BYTES:
      raise _bad_download(
        self, f" is more than {stored_arrays.MAX_BYTES:,} bytes"
      )
    return self._file.write(data)

  def flush(self) -> None:
    self._file.flush()


def _require_npz(part: Path, download: _Download) -> None:
  try:
    stored_arrays.require_whole(part)
  except BackboneError as error:
    problem = str(error).removeprefix(str(part))
    raise _bad_download(download, problem) from error


def _bad_download(download: _Download, problem: str) -> BackboneError:
  return BackboneError(
    f"the download ({download.size:,} bytes, beginning with "
    f"{download.begins!r}){problem}"
  )


def _fetch_http(url: str, target: _Download) -> None:
  import pooch  # imported here, because only downloads need pooch

  options: dict[str, Any] = {"hooks": {"response": _check_redirect}}
  if url.startswith("http://"):
    options["auth"] = _own_password
  with _bar_of(url) as bar:
    download = pooch.HTTPDownloader(
      progressbar=bar, chunk_size=_CHUNK_BYTES, **options
    )
    download(url, target, pooch=None)


def _own_password(request: Any) -> Any:
  """Return `request`; authenticate it if its URL has a user name or password.

  This function is the `auth` of the library requests. Without an `auth`, the
  library would send a password of ~/.netrc unencrypted over http://.
  """
  import requests

  user, password = requests.utils.get_auth_from_url(request.url)
  if user or password:
    return requests.auth.HTTPBasicAuth(user, password)(request)
  return request


def _check_redirect(response: Any, **options: Any) -> None:
  """Raise if a redirect would send a password from ~/.netrc unencrypted."""
  import requests

  del options
  if not response.is_redirect:
    return
  target = urllib.parse.urljoin(response.url, response.headers["location"])
  is_open = not target.lower().startswith("https://")
  if is_open and requests.utils.get_netrc_auth(target):
    raise BackboneError(
      f"the address redirects to {target}, where a password of ~/.netrc would "
      "be sent without encryption"
    )


def _fetch_gs(url: str, target: _Download) -> None:
  from etils import epath  # imports TensorFlow or gcsfs to open gs://

  # The bar has no total, because a request for the file's size may fail.
  with epath.Path(url).open("rb") as source, _bar_of(url) as bar:
    while chunk := source.read(_CHUNK_BYTES):
      target.write(chunk)
      bar.update(len(chunk))


def _bar_of(url: str) -> ProgressBar:
  """Return a progress bar without a total; for HTTP, pooch adds the total."""
  name = PurePosixPath(urllib.parse.urlsplit(url).path).name
  return ProgressBar(f"downloading {name[-_LONGEST_NAME:]}", unit="B")


def _remedy(url: str) -> str:
  if not url.startswith("gs://"):
    return ""
  https = url.replace("gs://", "https://storage.googleapis.com/", 1)
  return (
    " gs:// needs TensorFlow or gcsfs, and credentials; for a public bucket "
    f"use {https}"
  )
