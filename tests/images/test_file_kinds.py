"""Files that cannot be decoded are named by what they are, in one sentence."""

import pytest
import tensorflow as tf
from fake_data import encode, noise

import memory_vit as mv
from memory_vit.data import image_ops
from memory_vit.errors import DataError
from memory_vit.model.task import EvalPreprocessing


def ftyp(brand, compatible=b""):
  return b"\0\0\0\x20ftyp" + brand + bytes(4) + compatible + bytes(40)


NONE = "not a JPEG, PNG, WebP, BMP or GIF file"
JPEG, PNG, WEBP = (encode(noise(1), kind) for kind in ("JPEG", "PNG", "WEBP"))
FILES = {
  "empty": (b"", f"{NONE}, but empty"),
  "zeros": (bytes(3000), f"{NONE}, but only zero bytes: copy or download it"),
  "text": (b"no picture", NONE),
  "lfs": (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    f"{NONE}, but a pointer of Git LFS .*: run `git lfs pull`",
  ),
  "html": (b"\n<!DOCTYPE html>\n<html>", f"{NONE}, but a web page"),
  "html with a mark": (b"\xef\xbb\xbf<html>", f"{NONE}, but a web page"),
  "heic": (ftyp(b"heic", b"mif1heic"), f"{NONE}, but HEIC: convert it to JPEG"),
  "mif1": (ftyp(b"mif1", b"heic"), f"{NONE}, but HEIC"),
  "avif": (ftyp(b"avif", b"mif1"), f"{NONE}, but AVIF"),
  "avif of mif1": (ftyp(b"mif1", b"avifmiaf"), f"{NONE}, but AVIF"),
  "video": (ftyp(b"isom"), f"{NONE}, but a video, expected single images"),
  "tiff": (b"II*\0\x08\0\0\0", f"{NONE}, but TIFF: convert"),
  "tiff of a Mac": (b"MM\0*\0\0\0\x08", f"{NONE}, but TIFF"),
  "cr2": (b"II*\0\x10\0\0\0CR\2\0", f"{NONE}, but a raw file of a camera"),
  "svg": (
    b'<?xml version="1.0"?>\n<!-- a\nb -->\n<svg width="1">',
    f"{NONE}, but SVG: convert",
  ),
  "svg of a drawing program": (
    b"<?xml version='1.0'?><!--" + b"-" * 900 + b"--><svg>", f"{NONE}, but SVG",
  ),
  "pdf": (b"%PDF-1.7", f"{NONE}, but PDF"),
  "jxl": (b"\xff\x0a123", f"{NONE}, but JPEG XL"),
  "zip": (b"PK\3\4", f"{NONE}, but a ZIP archive"),
  "wav": (b"RIFF\4\0\0\0WAVE", NONE),
  "jpeg header": (JPEG[:40], "not a whole JPEG file: "),
  "jpeg end": (JPEG[:-2], "not a whole JPEG file: its end is missing"),
  "jpeg table": (
    JPEG.replace(b"\xff\xc4", b"\xff\xc5"), "not a whole JPEG file: ",
  ),
  "two bytes": (JPEG[:2], "not a whole JPEG file"),
  "png header": (PNG[:20], "not a whole PNG file: its header is broken"),
  "png": (PNG[:300], "not a whole PNG file: it is cut or damaged"),
  "webp": (WEBP[:40], "not a whole WebP file: its header is broken"),
}  # fmt: skip


@pytest.mark.fault("broken-image")
@pytest.mark.parametrize("name", FILES)
def test_error_names_the_kind_of_file_not_the_decoder(name):
  encoded, said = FILES[name]
  with pytest.raises(DataError, match=f"of {len(encoded)} bytes: {said}") as e:
    mv.preprocess(encoded, EvalPreprocessing(image_size=8))
  for word in ("0x", "tj", "()", "Error", "object", "_"):
    assert word not in str(e.value).replace(f"of {len(encoded)}", "")
  if not encoded.startswith((b"\xff\xd8\xff", b"\x89PNG")):
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
      image_ops.decode(tf.constant(encoded))
