"""Read the body of a prediction request: multipart, or JSON with base64."""

from __future__ import annotations

import asyncio
import base64
import binascii
import codecs
import dataclasses
import re
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from memory_vit.model.task import NAME_PATTERN
from memory_vit.runtime.messages import brief, shortened
from memory_vit.serving.request_error import RequestError
from memory_vit.serving.schemas import (
  IMAGES_SHAPE,
  MOST_TASKS,
  ImageData,
  PredictBody,
)
from memory_vit.serving.settings import MIB

_Model = TypeVar("_Model", bound=BaseModel)
# Maximum number of form fields other than images, and maximum size of a field.
_MOST_FIELDS = 32
_MOST_FIELD_BYTES = 64 * 1024
_MOST_NAME = 200  # characters of an image's name; longer names are shortened
# Maximum length of Content-Type: parsing it must not block the event loop.
_MOST_TYPE = 1_000
# Maximum numbers of commas in a JSON body: for each image that a request may
# have, and for the rest of the body. Commas bound the number of values: without
# a limit, a few MiB of JSON could become hundreds of MiB of objects.
_MOST_COMMAS_PER_IMAGE = 64
_MOST_OTHER_COMMAS = 2 * MOST_TASKS
_MULTIPART, _JSON = "multipart/form-data", "application/json"
# Thread that parses large JSON bodies one by one: parsing a body holds the GIL
# for tenths of a second, and takes several times the memory of the body.
_LARGE = ThreadPoolExecutor(1, "json")
WAIT_FOR = "x-wait-for"
_NAME_AND_DIGEST = re.compile(
  rf"({NAME_PATTERN.pattern})=([0-9a-f]{{64}}|none)"
)
_FORM_FIELDS = ("images", "tasks", "top", "original")
_DATA_URL = re.compile(r"\s*data:[^,]{,200};base64,")
_LINE_BREAKS = str.maketrans("", "", "\r\n\t ")


@dataclasses.dataclass(frozen=True, eq=False)
class UploadedImage:
  """Image file of a request; `error` is empty unless its base64 is invalid."""

  name: str
  content: bytes
  error: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class PredictRequest:
  """Checked request: at least one image; `tasks` are unique names, or None."""

  images: tuple[UploadedImage, ...]
  tasks: tuple[str, ...] | None
  top: int | None
  original: bool


async def read_predict_request(
  request: Request, max_images: int
) -> PredictRequest:
  """Read and check the multipart or JSON body of a request."""
  kind = media_type(request)
  _require_utf8(request)
  if kind == _MULTIPART:
    return await _read_form(request, max_images)
  if kind == _JSON:
    body = await request.body()
    if len(body) <= MIB:
      return _read_json(body, max_images)
    # Parse in a thread: megabytes of base64 would block the event loop.
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_LARGE, _read_json, body, max_images)
  raise RequestError(
    415,
    f"the body is {brief(kind)}, expected {_MULTIPART} with files named "
    f"'images', or {_JSON} with base64.",
  )


def awaited_task(request: Request) -> tuple[str, str] | None:
  """Return (task name, digest or "none") from the header `x-wait-for`."""
  if (text := request.headers.get(WAIT_FOR)) is None:
    return None
  match = _NAME_AND_DIGEST.fullmatch(text)
  if match is None:
    raise RequestError(
      400,
      f"{WAIT_FOR} is {brief(text)}, expected NAME=DIGEST of a task, or "
      "NAME=none for a removed task.",
    )
  return match[1], match[2]


def media_type(request: Request) -> str:
  """Return the bare media type; raise 415 if the body is compressed."""
  encoding = ", ".join(request.headers.getlist("content-encoding"))
  if encoding.strip().lower() not in ("", "identity"):
    raise RequestError(
      415,
      f"the Content-Encoding of the body is {brief(encoding)}: send the body "
      "uncompressed.",
      headers={"Accept-Encoding": "identity"},
    )
  content_type = request.headers.get("content-type", "")
  if len(content_type) > _MOST_TYPE:
    raise RequestError(
      415, f"the Content-Type has more than {_MOST_TYPE:,} bytes."
    )
  return content_type.partition(";")[0].strip().lower()


def _require_utf8(request: Request) -> None:
  """Raise 415 unless the charset is UTF-8: other charsets may decode slowly."""
  content_type = request.headers.get("content-type", "")
  charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8")
  if charset.lower() not in (b"utf-8", b"utf8"):
    shown = brief(charset.decode("latin-1"))
    raise RequestError(415, f"the charset of the body is {shown}: send utf-8.")


def parse_json(
  model: type[_Model], body: bytes, most_commas: int = _MOST_OTHER_COMMAS
) -> _Model:
  """Parse JSON; limit its values by counting commas (base64 has no comma)."""
  if body.count(b",") > most_commas:
    raise RequestError(
      413, f"the JSON has too many values: more than {most_commas} commas."
    )
  if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
    raise RequestError(422, "the body is UTF-16: expected JSON in UTF-8.")
  body = body.removeprefix(codecs.BOM_UTF8)  # PowerShell sends a BOM
  try:
    return model.model_validate_json(body, strict=True)
  except ValidationError as error:
    raise RequestError(422, _problem(error)) from error


def _problem(error: ValidationError) -> str:
  """Describe the first problem of a body, without quoting the body."""
  first, *further = error.errors(include_input=False, include_url=False)
  place = shortened(".".join(map(str, first["loc"])), 100) or "the body"
  more = f" (and {len(further)} more problems)" if further else ""
  if first["loc"][:1] == ("images",):
    more += f"; expected {IMAGES_SHAPE}"
  return f"{place}: {first['msg']}{more}."


def _read_json(body: bytes, max_images: int) -> PredictRequest:
  commas = _MOST_OTHER_COMMAS + _MOST_COMMAS_PER_IMAGE * max_images
  parsed = parse_json(PredictBody, body, commas)
  _require_few(len(parsed.images), max_images)
  return PredictRequest(
    images=tuple(map(_decoded, parsed.images)),
    tasks=_each_once(parsed.tasks),
    top=parsed.top,
    original=parsed.original,
  )


def _each_once(names: list[str] | None) -> tuple[str, ...] | None:
  return None if names is None else tuple(dict.fromkeys(names))


def _decoded(image: ImageData) -> UploadedImage:
  name = shortened(image.name, _MOST_NAME)
  try:
    return UploadedImage(name, _base64(image.data))
  except (binascii.Error, ValueError):
    return UploadedImage(
      name,
      b"",
      "its data are not valid base64: expected A-Z, a-z, 0-9, '+' and '/', and "
      "'=' at the end up to a multiple of 4 characters",
    )


def _base64(text: str) -> bytes:
  """Decode base64, which may have line breaks or be a data URL.

  Decode MiB by MiB, because `b64decode` blocks all threads until it returns.
  """
  url = _DATA_URL.match(text)
  start = url.end() if url else 0
  text = "".join(
    text[i : i + MIB].translate(_LINE_BREAKS)
    for i in range(start, len(text), MIB)
  )
  if "=" in text[:-2]:
    raise ValueError("the text has '=' before its last two characters")
  return b"".join(
    base64.b64decode(text[i : i + MIB], validate=True)
    for i in range(0, len(text), MIB)
  )


class _FormParser(MultiPartParser):
  """Parser that refuses truncated forms, which Starlette's parser accepts."""

  _is_whole = False

  def on_end(self) -> None:
    self._is_whole = True

  async def parse(self) -> FormData:
    """Parse the form; raise `MultiPartException` if it is truncated."""
    self.stream = self._whole(self.stream)
    return await super().parse()

  async def _whole(
    self, stream: AsyncGenerator[bytes, None]
  ) -> AsyncGenerator[bytes, None]:
    async for part in stream:
      yield part
    if not self._is_whole:
      raise MultiPartException("the last boundary is missing (truncated?).")


async def _read_form(request: Request, max_images: int) -> PredictRequest:
  parser = _FormParser(
    request.headers,
    request.stream(),
    # Allow one file too many, so that the error comes from `_require_few`.
    max_files=max_images + 1,
    max_fields=_MOST_FIELDS,
    max_part_size=_MOST_FIELD_BYTES,
  )
  try:
    form = await parser.parse()
  except MultiPartException as error:
    is_large = error.message.startswith(("Too many", "Part exceeded"))
    raise RequestError(
      413 if is_large else 400, f"the form: {error.message}"
    ) from error
  try:
    tasks = _form_tasks(form)
    images = await _form_images(form, max_images)
  finally:
    await form.close()
  top, original = form.get("top"), form.get("original", "false")
  values = {
    "images": [{"data": ""}],  # placeholder: `PredictBody` needs an image
    "tasks": tasks,
    "top": top or None,
    "original": original or False,
  }
  try:
    parsed = PredictBody.model_validate(values)
  except ValidationError as error:
    raise RequestError(422, _problem(error)) from error
  return PredictRequest(
    images=images,
    tasks=_each_once(parsed.tasks),
    top=parsed.top,
    original=parsed.original,
  )


async def _form_images(
  form: FormData, max_images: int
) -> tuple[UploadedImage, ...]:
  for name in form:
    if name not in _FORM_FIELDS:
      raise RequestError(
        422,
        f"the form has an unknown field {brief(name)}: expected 'images' "
        "(files), 'tasks', 'top' or 'original'.",
      )
    if name in ("top", "original") and len(form.getlist(name)) > 1:
      raise RequestError(422, f"{name}: the form has this field twice.")
  files = form.getlist("images")
  _require_few(len(files), max_images)
  if not files or not all(isinstance(file, UploadFile) for file in files):
    raise RequestError(
      422,
      "images: expected at least one file; with curl, -F images=@FILE.",
    )
  return tuple(
    [
      UploadedImage(shortened(f.filename or "", _MOST_NAME), await f.read())
      for f in files
      if isinstance(f, UploadFile)
    ]
  )


def _form_tasks(form: FormData) -> list[str] | None:
  """Return the names in all "tasks" fields; None if there is no such field."""
  fields = form.getlist("tasks")
  if not fields:
    return None
  if any(isinstance(field, UploadFile) for field in fields):
    raise RequestError(
      422, "tasks: got a file, expected names separated by commas."
    )
  if sum(str(text).count(",") + 1 for text in fields) > MOST_TASKS:
    raise RequestError(413, f"tasks: expected at most {MOST_TASKS} names.")
  names = [name.strip() for text in fields for name in str(text).split(",")]
  return [name for name in names if name]


def _require_few(count: int, most: int) -> None:
  if count > most:
    raise RequestError(
      413, f"the request has more than {most} images: send several requests."
    )
