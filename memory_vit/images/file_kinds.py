"""Explain in one sentence why a file cannot be decoded.

Decoders name C functions in their errors; users need to know what the file is.
"""

import re

from memory_vit.images.exif import PNG

_READ = {
  b"\xff\xd8": "JPEG", PNG[:4]: "PNG", b"RIFF": "WebP", b"BM": "BMP",
  b"GIF8": "GIF",
}  # fmt: skip
_CONVERT = "convert it to JPEG or PNG"
# {regular expression of the first bytes of a file: text that says what the file
# is, and what the user can do}
_OTHERS = {
  rb"\Z": "empty",
  rb"\0+\Z": "only zero bytes: copy or download it again",
  rb"version https://git-lfs": (
    "a pointer of Git LFS in place of the image: run `git lfs pull`"
  ),
  rb"[\s\xef\xbb\xbf]*<(svg|(\?xml|!--|!doctype svg).*<svg)": (
    f"SVG: {_CONVERT}"
  ),
  rb"[\s\xef\xbb\xbf]*<(!doctype html|html|head|body)": (
    "a web page: the download did not return the image"
  ),
  rb".{4}ftyp.{0,32}avi[fs]": f"AVIF: {_CONVERT}",
  rb".{4}ftyp(he[iv][cmsx]|mif1|msf1)": f"HEIC: {_CONVERT}",
  rb".{4}ftypcrx|II\*\0.{4}CR|FUJIFILMCCD-RAW|IIRO|IIU\0": (
    f"a raw file of a camera: {_CONVERT}"
  ),
  rb".{4}ftyp": "a video, expected single images",
  rb"II\*\0|MM\0\*|II\+\0|MM\0\+": f"TIFF: {_CONVERT}",
  rb"\0\0\0\x0cJXL |\xff\x0a": f"JPEG XL: {_CONVERT}",
  rb"%PDF": f"PDF: {_CONVERT}",
  rb"PK\x03\x04": "a ZIP archive: unpack it",
}
# The expressions are matched against at most the first `_HEAD` bytes of a file.
_HEAD = 1024


def why_unreadable(encoded: bytes, damage: str) -> str:
  """Describe a file that cannot be decoded, recognized by its beginning.

  Args:
    encoded: the bytes of the file, or of its beginning.
    damage: what is wrong with the file, used if it has a supported format.
  """
  kind = next((_READ[m] for m in _READ if encoded.startswith(m)), "")
  if kind and (kind != "WebP" or b"WEBP".startswith(encoded[8:12])):
    return f"not a whole {kind} file: {damage}"
  for beginning, description in _OTHERS.items():
    if re.match(beginning, encoded[:_HEAD], re.DOTALL | re.IGNORECASE):
      return f"not a JPEG, PNG, WebP, BMP or GIF file, but {description}"
  return "not a JPEG, PNG, WebP, BMP or GIF file"
