"""Predictions are those of `forward`, whatever way the pictures come."""

import dataclasses
import io
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import threading
import time
import zlib

import fake_data
import jax
import numpy as np
import pytest
import quick
from conftest import ROOT, random_task, run_program, tiny_backbone
from kinds_of_tasks import LABELS, VALUES, tasks_of_kinds

import memory_vit as mv
from memory_vit.commands import predict
from memory_vit.data import batching, datasets
from memory_vit.errors import ConfigError
from memory_vit.images import decoding, image_files, preparation, view
from memory_vit.images import reader as image_reader
from memory_vit.images.reader import ImageReader
from memory_vit.model.task import INTERPOLATIONS
from memory_vit.prediction import fixed_shapes
from memory_vit.tasks import inference

PETS = ("cat", "dog", "日", "a very long name")
TASKS = ("pets", "birds")


@pytest.fixture(scope="module")
def backbone():
  """One block: nothing here looks into it."""
  return tiny_backbone(depth=1)


@pytest.fixture(scope="module")
def models(backbone, tmp_path_factory):
  """Files of a backbone and of two tasks, one without class names."""
  root = tmp_path_factory.mktemp("models")
  mv.save_backbone(backbone, root / "vit.npz")
  pets = random_task(backbone, "pets", classes=4, class_names=PETS)
  birds = random_task(
    backbone, "birds", seed=1, classes=6, attends_to=("pets",)
  )
  for task in (pets, birds):
    mv.save_task(task, root / "tasks" / task.spec.name)
  return root


@pytest.fixture(scope="module")
def loaded(models, backbone):
  return [mv.load_task(models / "tasks" / n, backbone) for n in TASKS]


@pytest.fixture
def folder(tmp_path):
  """Five pictures of 8 x 8 pixels, which need no resizing, and other files."""
  root = tmp_path / "pictures"
  (root / "b").mkdir(parents=True)
  (root / ".hidden").mkdir()
  for i, name in enumerate(["c.png", "b/x.PNG", "a.png", "b/a.bmp", "z.gif"]):
    write(root / name, fake_data.noise(i, 8, 8))
  for name in ("notes.txt", "b/.dot.png", ".hidden/a.png"):
    (root / name).write_text("no picture")
  return root


# Sorted, as they must come.
NAMES = ("a.png", "b/a.bmp", "b/x.PNG", "c.png", "z.gif")


def write(path, pixels):
  kind = path.suffix[1:].upper()
  path.write_bytes(fake_data.encode(pixels, kind))
  return path


def arguments(models, *images, tasks=TASKS):
  return [
    f"--backbone={models / 'vit.npz'}",
    *(f"--task={models / 'tasks' / name}" for name in tasks),
    *map(str, images),
  ]


def run(capsys, *argv):
  """Runs the command; returns its status, stdout and stderr."""
  capsys.readouterr()
  status = predict.main([str(a) for a in argv])
  return (status, *capsys.readouterr())


def run_json(capsys, *argv):
  """The status, and the lines of --json."""
  status, out, _ = run(capsys, *argv, "--json")
  return status, [json.loads(line) for line in out.splitlines()]


def rgb(path):
  with fake_data.Image.open(path) as image:
    return image.convert("RGB")


def by_hand(backbone, tasks, pixels):
  """{name: probabilities (c,)} of one picture of the right size."""
  image = np.asarray(pixels, np.float32)[None] / 127.5 - 1
  logits = mv.forward(backbone, tasks, image)
  return {k: np.asarray(jax.nn.softmax(v[0])) for k, v in logits.items()}


def probabilities(line, name):
  """{index: probability} of one task."""
  return {g["index"]: g["probability"] for g in line["tasks"][name]}


def by_hand_of(line):
  """The probabilities of a line as arrays."""
  return {
    name: np.array([p for _, p in sorted(probabilities(line, name).items())])
    for name in line["tasks"]
  }


def same(line, expected, tolerance=1e-5):
  """Whether every class of every task has its probability, in falling order."""
  for name, guesses in line["tasks"].items():
    found = [g["probability"] for g in guesses]
    order = np.argsort(-expected[name])[: len(found)]
    assert [g["index"] for g in guesses] == list(order)
    np.testing.assert_allclose(found, expected[name][order], atol=tolerance)


def test_probabilities_are_those_of_forward(
  models, backbone, loaded, tmp_path, capsys
):
  pixels = fake_data.noise(3, 8, 8)
  file = write(tmp_path / "a.png", pixels)
  status, [line] = run_json(capsys, *arguments(models, file), "--top=9")
  assert status == 0
  assert line["image"] == str(file)
  assert list(line["tasks"]) == ["pets", "birds"]
  assert [len(guesses) for guesses in line["tasks"].values()] == [4, 6]
  same(line, by_hand(backbone, loaded, pixels))
  for guess in line["tasks"]["pets"]:
    assert guess["class"] == PETS[guess["index"]]
  for guess in line["tasks"]["birds"]:  # of which no names are known
    assert guess["class"] == str(guess["index"])
  for name in line["tasks"]:
    assert sum(probabilities(line, name).values()) == pytest.approx(1)


def test_text_output_shows_the_top_classes(
  models, backbone, loaded, tmp_path, capsys
):
  pixels = fake_data.noise(3, 8, 8)
  file = write(tmp_path / "a.png", pixels)
  status, out, err = run(capsys, *arguments(models, file), "--top=2")
  assert (status, err) == (0, "")
  expected = by_hand(backbone, loaded, pixels)
  first, *lines = out.splitlines()
  assert first == str(file)
  found = [re.fullmatch(r"  (\w*) +(.+?) +(\d+\.\d) %", x) for x in lines]
  assert [m[1] for m in found] == ["pets", "", "birds", ""]
  for name, names, shown in [
    ("pets", PETS, found[:2]),
    ("birds", tuple(map(str, range(6))), found[2:]),
  ]:
    best = np.argsort(-expected[name])[:2]
    assert [m[2] for m in shown] == [names[i] for i in best]
    assert [float(m[3]) for m in shown] == pytest.approx(
      100 * expected[name][best], abs=0.06
    )
  assert len({len(line) for line in lines}) == 1  # aligned


def test_the_original_head_beside_the_tasks(models, backbone, tmp_path, capsys):
  pixels = fake_data.noise(4, 8, 8)
  file = write(tmp_path / "a.png", pixels)
  argv = arguments(models, file, tasks=["pets"])
  _, [line] = run_json(capsys, *argv, "--original", "--top=7")
  expected = by_hand(backbone, [], pixels)["backbone"]
  assert list(line["tasks"]) == ["pets"]
  assert [g["class"] for g in line["backbone"]] == [
    str(i) for i in np.argsort(-expected)
  ]
  found = [g["probability"] for g in line["backbone"]]
  np.testing.assert_allclose(found, np.sort(expected)[::-1], atol=1e-5)
  assert "\n  backbone  " in run(capsys, *argv, "--original")[1]
  assert "backbone" not in run_json(capsys, *argv)[1][0]


def test_bfloat16_is_close_to_float32(
  models, backbone, loaded, tmp_path, capsys
):
  pixels = fake_data.noise(3, 8, 8)
  file = write(tmp_path / "a.png", pixels)
  argv = [*arguments(models, file), "--top=9"]
  _, [line] = run_json(capsys, *argv, "--dtype=bfloat16")
  expected = by_hand(backbone, loaded, pixels)["pets"]
  found = probabilities(line, "pets")
  for i, probability in found.items():
    assert probability == pytest.approx(expected[i], abs=0.1)
  assert found != probabilities(run_json(capsys, *argv)[1][0], "pets")


@pytest.mark.fault("batch-size")
def test_a_folder_in_one_pass_per_batch(
  models, backbone, loaded, folder, capsys, monkeypatch
):
  passes = []

  def counted(self, batch, program, *wanted):
    cls = program.slots.arrays.parts["cls"]
    passes.append((len(cls), batch.shape, *wanted))
    return run(self, batch, program, *wanted)

  run = fixed_shapes.FixedShapes._run_batch
  monkeypatch.setattr(fixed_shapes.FixedShapes, "_run_batch", counted)
  before = inference.encode_program.compiled._cache_size()
  argv = arguments(models, folder)
  status, lines = run_json(capsys, *argv, "--batch_size=3", "--top=9")
  assert status == 0
  assert [line["image"] for line in lines] == [str(folder / n) for n in NAMES]
  # The second batch is filled up: nothing is compiled again.
  assert passes == [(2, (3, 8, 8, 3), True, False, False)] * 2
  assert inference.encode_program.compiled._cache_size() - before <= 1
  for line in lines:
    same(line, by_hand(backbone, loaded, rgb(line["image"])))
  _, alone = run_json(capsys, *argv, "--batch_size=1", "--top=9")
  for line, other in zip(lines, alone, strict=True):
    assert line["image"] == other["image"]
    same(other, by_hand_of(line), 1e-6)


def test_a_directory_of_tasks(models, folder, capsys):
  file = folder / "a.png"
  argv = [f"--backbone={models / 'vit.npz'}", f"--task={models / 'tasks'}"]
  status, [line] = run_json(capsys, *argv, file)
  _, [other] = run_json(capsys, *arguments(models, file))
  assert status == 0
  assert line["tasks"].keys() == {"pets", "birds"}
  same(line, by_hand_of(run_json(capsys, *argv, file, "--top=9")[1][0]))
  assert [g["class"] for g in line["tasks"]["pets"]] == [
    g["class"] for g in other["tasks"]["pets"]
  ]


def test_paths_on_standard_input(models, folder, capsys, monkeypatch):
  lines = f"{folder / 'c.png'}\n\n{folder / 'a.png'}\r\n{folder / 'b'}\n"
  stdin = io.TextIOWrapper(io.BytesIO(lines.encode()))
  monkeypatch.setattr(sys, "stdin", stdin)
  argv = arguments(models, folder / "z.gif", "-", tasks=["pets"])
  status, found = run_json(capsys, *argv)
  assert status == 0
  assert [os.path.relpath(line["image"], folder) for line in found] == [
    "z.gif", "c.png", "a.png", "b/a.bmp", "b/x.PNG"
  ]  # fmt: skip


def test_names_that_begin_with_a_dash(models, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  names = ["-x.png", "--top=3", "a.png"]
  for name in names:
    (tmp_path / name).write_bytes(fake_data.encode(fake_data.picture(1), "PNG"))
  argv = arguments(models, tasks=["pets"])
  status, out, _ = run(capsys, "--json", *argv, "--", names[0])
  assert (status, json.loads(out)["image"]) == (0, names[0])
  argv += ["a.png", "--top=1", "--json", "a.png", "--", *names, "--", "-"]
  lines = io.TextIOWrapper(io.BytesIO(b"--top=3\n"))
  monkeypatch.setattr(sys, "stdin", lines)
  status, out, _ = run(capsys, *argv)
  found = [json.loads(line) for line in out.splitlines()]
  assert [line["image"] for line in found] == [
    "a.png", "a.png", *names, "--", "--top=3"
  ]  # fmt: skip
  assert status == 1  # there is no file "--"


@pytest.mark.parametrize("code", ["utf-8-sig", "utf-16-le", "utf-16-be"])
def test_a_byte_order_mark_is_no_part_of_a_path(code, tmp_path, monkeypatch):
  """As PowerShell writes files and pipes."""
  names = [" a.jpg", "é\u20ac.png ", "\u0d0a.png"]  # with 0x0A in UTF-16
  text = "\r\n".join([*names, "", ""])
  mark = "" if code == "utf-8-sig" else "\ufeff"
  stdin = io.TextIOWrapper(io.BytesIO((mark + text).encode(code)))
  monkeypatch.setattr(sys, "stdin", stdin)
  assert [e.path for e in image_files.find_images(["-"])] == names


def test_spaces_are_parts_of_a_path(monkeypatch):
  lines = b" a.jpg\nb .png \r\n\n"
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
  found = [entry.path for entry in image_files.find_images(["-"])]
  assert found == [" a.jpg", "b .png "]


def read_files(entries, preprocessing, size, memory=2048, *, ahead=0):
  reader = ImageReader(
    memory, size, preprocessing.image_size, ahead=ahead, option="--memory_mib"
  )
  return reader.read_files(entries, preprocessing)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_of_many_images_a_faster_dtype_is_recommended_once(
  models, folder, monkeypatch, size, capsys
):
  """Also if a batch begins just behind the last of few."""
  said = []
  monkeypatch.setattr(predict, "_MANY", 2)
  monkeypatch.setattr(predict.console, "recommend_dtype", said.append)
  argv = arguments(models, folder, folder, tasks=["pets"])
  assert run(capsys, *argv, f"--batch_size={size}")[0] == 0
  assert len(said) == 1


@pytest.mark.fault("full-queue")
def test_standard_input_is_read_as_it_is_needed(folder, monkeypatch, loaded):
  asked = []

  def lines():
    for i in range(30):
      asked.append(i)
      yield os.fsencode(folder / NAMES[i % 5]) + b"\n"

  stdin = type("Stdin", (), {"buffer": lines()})
  monkeypatch.setattr(sys, "stdin", stdin)
  entries = image_files.find_images(["-"])
  batches = read_files(entries, loaded[0].spec.preprocessing, 3)
  first, second = next(batches), next(batches)
  assert [p.entry.path for p in first + second] == [
    str(folder / NAMES[i % 5]) for i in range(6)
  ]
  assert len(asked) == 6
  batches.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_batch_is_read_while_one_is_used(
  folder, monkeypatch, loaded, ahead
):
  decoded, second = [], threading.Event()
  decode = decoding.decode

  def watched(*given):
    decoded.append(1)
    if len(decoded) == 4:
      second.set()
    return decode(*given)

  monkeypatch.setattr(decoding, "decode", watched)
  entries = image_files.find_images([str(folder)])
  batches = read_files(entries, loaded[0].spec.preprocessing, 2, ahead=ahead)
  found = [next(batches)]
  assert second.wait(10 if ahead else 0.2) == ahead  # two, and two
  assert len(decoded) == (4 if ahead else 2)
  found += batches
  assert [[image.entry.path for image in batch] for batch in found] == [
    [str(folder / name) for name in names]
    for names in (NAMES[:2], NAMES[2:4], NAMES[4:])
  ]


def test_memory_counts_the_batch_that_is_read_ahead(
  folder, loaded, monkeypatch
):
  monkeypatch.setattr(image_reader, "_MIB", 1)  # count in bytes
  images = 5 * 8 * 8 * 3 * 4

  def read(memory, ahead):
    entries = image_files.find_images([str(folder)])
    preprocessing = loaded[0].spec.preprocessing
    return list(read_files(entries, preprocessing, 5, memory, ahead=ahead))

  assert len(read(4 * images + 1, ahead=False)) == 1
  assert len(read(5 * images + 1, ahead=True)) == 1
  with pytest.raises(ConfigError, match="do not fit into"):
    read(5 * images, ahead=True)


def test_files_are_read_ahead_and_standard_input_is_not(
  models, folder, capsys, monkeypatch
):
  asked = []

  def noted(*given, ahead, **options):
    asked.append(ahead)
    return ImageReader(*given, ahead=ahead, **options)

  monkeypatch.setattr(image_reader, "ImageReader", noted)
  stdin = io.TextIOWrapper(io.BytesIO(f"{folder / 'a.png'}\n".encode()))
  monkeypatch.setattr(sys, "stdin", stdin)
  for images in ([folder], [folder, "-"]):
    assert run_json(capsys, *arguments(models, *images))[0] == 0
  assert asked == [True, False]


def test_folders_are_listed_as_they_are_needed_but_for_a_bar(
  models, folder, capsys, monkeypatch
):
  """Millions of names would be held for nothing but the length of the bar."""
  find, read, asked = image_files.find_images, ImageReader.read_files, []

  def found(paths):
    for entry in find(paths):
      asked.append(entry)
      yield entry

  def noted(*given):
    asked.append("reading")
    return read(*given)

  monkeypatch.setattr(image_files, "find_images", found)
  monkeypatch.setattr(ImageReader, "read_files", noted)
  for terminal, place in ((False, 0), (True, 5)):
    asked.clear()
    monkeypatch.setattr(
      predict.progress_bar, "on_terminal", lambda shown=terminal: shown
    )
    assert run_json(capsys, *arguments(models, folder))[0] == 0
    assert asked.index("reading") == place
    assert len(asked) == 5 + 1


def png(width, height):
  """A small file that claims to be a picture of any size."""

  def chunk(kind, content):
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check

  header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  content = zlib.compress(bytes(1000))
  chunks = [(b"IHDR", header), (b"IDAT", content), (b"IEND", b"")]
  return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in chunks)


@pytest.mark.fault("image-bomb")
def test_unreadable_images_are_named_and_skipped(
  models, backbone, loaded, folder, capsys
):
  jpeg = fake_data.encode(fake_data.noise(1, 40, 40), "JPEG")
  broken = {
    "cut.jpg": (
      jpeg[: len(jpeg) // 2],
      "not a whole JPEG file: its end is missing",
    ),
    "cut.png": (
      (folder / "c.png").read_bytes()[:60],
      "not a whole PNG file: it is cut or damaged",
    ),
    "cut.bmp": ((folder / "b/a.bmp").read_bytes()[:80], "not a whole BMP"),
    "empty.jpg": (b"", "BMP or GIF file, but empty"),
    "text.jpg": (b"text", "not a JPEG, PNG, WebP, BMP or GIF file"),
    "bomb.png": (png(60_000, 60_000), "more than 64 megapixels"),
    "large.png": (png(11_000, 10_000), "11000 x 10000 pixels, more than 64"),
    "long.png": (png(20_000, 10), "20000 x 10 pixels, expected at most"),
  }
  for name, (content, _) in broken.items():
    (folder / name).write_bytes(content)
  reasons = {str(folder / name): reason for name, (_, reason) in broken.items()}
  (folder / "void").mkdir()
  reasons[str(folder / "void")] = "a folder without images"
  reasons[str(folder / "missing.jpg")] = "No such file"
  argv = arguments(
    models, folder, folder / "void", folder / "missing.jpg", folder / "a.png"
  )
  status, out, err = run(capsys, *argv, "--json", "--batch_size=4", "--top=9")
  assert status == 1
  lines = [json.loads(line) for line in out.splitlines()]
  errors = {x["image"]: x["error"] for x in lines if "error" in x}
  assert errors.keys() == reasons.keys()
  *reported, summary = err.splitlines()
  assert summary == "10 of 16 images could not be read"
  for path, reason in reasons.items():
    assert reason in errors[path]
    assert f"skipped {path}: {errors[path]}" in reported
    assert "0x" not in errors[path]
    assert "{{" not in errors[path]
  # All are there, in order, and the good ones are what they are alone.
  paths = sorted(map(str, [folder / n for n in [*NAMES, *broken]]))
  paths += [str(folder / n) for n in ("void", "missing.jpg", "a.png")]
  assert [x["image"] for x in lines] == paths
  for line in lines:
    if "tasks" in line:
      same(line, by_hand(backbone, loaded, rgb(line["image"])))


def test_only_unreadable_images_end_with_an_error(models, tmp_path, capsys):
  argv = arguments(models, tmp_path / "a", tmp_path / "b", tasks=["pets"])
  assert run(capsys, *argv) == (
    1,
    "",
    f"skipped {tmp_path / 'a'}: No such file or directory\n"
    f"skipped {tmp_path / 'b'}: No such file or directory\n"
    "2 of 2 images could not be read\n",
  )


def read_one(path, preprocessing):
  [[picture]] = read_files([image_files.ImageFile(str(path))], preprocessing, 1)
  return picture


def test_errors_of_decoders_are_not_shown(folder, loaded, monkeypatch):
  def fails(*args, **options):
    raise EOFError("tjDecompressHeader3()")

  monkeypatch.setattr(decoding.Image, "open", fails)
  found = read_one(folder / "a.png", loaded[0].spec.preprocessing)
  assert found.entry.reason == "not a whole PNG file: its header is broken"


@pytest.mark.fault("image-bomb")
def test_oversized_images_are_never_decoded(
  tmp_path, folder, loaded, monkeypatch, recwarn
):
  preprocessing = loaded[0].spec.preprocessing
  bomb = tmp_path / "bomb.png"
  bomb.write_bytes(png(60_000, 60_000))
  real = decoding.decode
  decoded = []
  monkeypatch.setattr(
    decoding, "decode", lambda *a: decoded.append(1) or real(*a)
  )
  assert read_one(bomb, preprocessing).pixels is None
  good = folder / "a.png"  # 8 x 8 pixels
  monkeypatch.setattr(decoding, "MAX_PIXELS", 63)
  assert "8 x 8 pixels, more than" in read_one(good, preprocessing).entry.reason
  monkeypatch.setattr(decoding, "MAX_PIXELS", 64)
  size = good.stat().st_size
  monkeypatch.setattr(preparation, "MAX_FILE_BYTES", size - 1)
  assert "the file has more than" in read_one(good, preprocessing).entry.reason
  assert not decoded
  monkeypatch.setattr(preparation, "MAX_FILE_BYTES", size)
  assert read_one(good, preprocessing).pixels is not None
  assert decoded == [1]


@pytest.mark.fault("slow-image")
def test_a_picture_that_takes_hours_is_skipped(tmp_path, loaded, monkeypatch):
  """A progressive JPEG that paints itself anew for 119 bytes each."""
  preprocessing = loaded[0].spec.preprocessing
  image = fake_data.noise(0, 16, 16)
  encoded = fake_data.encode(image, "JPEG", progressive=True)
  last = encoded[encoded.rindex(b"\xff\xda") : -2]
  for scans, skipped in ((64, False), (65, True)):
    content = encoded[:-2] + (scans - 10) * last + b"\xff\xd9"
    (tmp_path / "bomb.jpg").write_bytes(content)
    if skipped:  # before anything is decoded
      monkeypatch.setattr(decoding.simplejpeg, "decode_jpeg", None)
    picture = read_one(tmp_path / "bomb.jpg", preprocessing)
    assert (picture.pixels is None) == skipped
  assert picture.entry.reason == "the JPEG has more than 64 scans"


@pytest.mark.fault("slow-image")
@pytest.mark.parametrize(
  "kind",
  ["jpeg", "png", "bmp", pytest.param("gif", marks=pytest.mark.slow), "webp"],
)
def test_decoding_stays_within_the_memory(tmp_path, loaded, monkeypatch, kind):
  """Together they take what was allowed; one that alone needs more nothing."""
  preprocessing = loaded[0].spec.preprocessing
  paths = [tmp_path / f"{i}.{kind}" for i in range(4)]
  for path in paths:
    write(path, fake_data.noise(0, 256, 256))
  size = paths[0].stat().st_size
  per_pixel = preparation._BYTES_PER_PIXEL[kind.upper()]
  need = 2 * size + per_pixel * 256**2
  need += view.view_bytes(256, 256, preprocessing)
  batch = 4 * 8 * 8 * 3 * 4 * image_reader.COPIES_OF_A_BATCH
  assert per_pixel >= {"webp": 22, "jpeg": 14, "png": 14}.get(kind, 11)

  inside, most = [], []
  decode = decoding.decode

  def watched(*given):
    inside.append(1)
    most.append(len(inside))
    time.sleep(0.02)
    found = decode(*given)
    inside.pop()
    return found

  monkeypatch.setattr(decoding, "decode", watched)
  monkeypatch.setattr(image_reader, "THREADS", 4)

  def read(memory):
    monkeypatch.setattr(image_reader, "_MIB", 1)  # count in bytes
    most.clear()
    entries = [image_files.ImageFile(str(path)) for path in paths]
    [found] = read_files(entries, preprocessing, 4, memory)
    return [p.entry.reason for p in found]

  assert read(batch + 2 * need) == [""] * 4
  assert max(most) <= 2
  assert read(batch + need) == [""] * 4
  assert max(most) == 1
  assert all("--memory_mib" in reason for reason in read(batch + need - 1))
  assert most == []
  with pytest.raises(ConfigError, match="do not fit into"):
    read(batch)


def test_special_files_do_not_hang_predict(tmp_path, loaded):
  preprocessing = loaded[0].spec.preprocessing
  os.mkfifo(tmp_path / "pipe.jpg")
  entry = read_one(tmp_path / "pipe.jpg", preprocessing).entry
  assert entry.reason == "not a regular file"
  assert "null" in read_one("a\0b", preprocessing).entry.reason


@pytest.mark.fault("unequal-preprocessing")
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(("crop", "resize"), [("resize", 0), ("central", 11)])
def test_images_are_prepared_as_in_evaluation(
  tmp_path, crop, resize, interpolation
):
  """To the bit, or accuracies would not be those that were measured."""
  preprocessing = mv.EvalPreprocessing(
    image_size=8, crop=crop, resize=resize, interpolation=interpolation
  )
  kinds = ("jpeg", "png", "bmp", "gif", "webp")
  root = tmp_path / "data" / "train" / "a"
  root.mkdir(parents=True)
  for i, kind in enumerate(kinds):
    write(root / f"{i}.{kind}", fake_data.noise(i, 21 + i, 33 - i))
  # GIF is not among the suffixes of image folders.
  (root / "3.gif").rename(root / "3.png")
  reader = datasets.open_split("folder", "train", str(tmp_path / "data"))
  batch = next(batching.eval_batches(reader, preprocessing, batch_size=5))[
    "image"
  ]
  files = [pathlib.Path(reader.file_name(i)) for i in range(5)]
  found = mv.preprocess(files, preprocessing)
  assert np.array_equal(found, batch)
  # What the command sees, and bytes and a single file.
  entries = [image_files.ImageFile(str(file)) for file in files]
  [read] = read_files(entries, preprocessing, 5)
  assert np.array_equal(np.stack([image.pixels for image in read]), found)
  assert np.array_equal(mv.preprocess(str(files[0]), preprocessing), found[0])
  encoded = [file.read_bytes() for file in files]
  assert np.array_equal(mv.preprocess(encoded, preprocessing), found)


def test_gelu_and_image_size_come_from_the_task(tmp_path, backbone, capsys):
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  other = mv.load_backbone(tmp_path / "vit.npz", image_size=12, gelu="exact")
  task = random_task(other, "pets")
  mv.save_task(task, tmp_path / "tasks" / "pets")
  pixels = fake_data.noise(3, 12, 12)
  file = write(tmp_path / "a.png", pixels)
  argv = arguments(tmp_path, file, tasks=["pets"])
  status, [line] = run_json(capsys, *argv)
  assert status == 0
  same(line, by_hand(other, [task], pixels))


def refused(capsys, *argv):
  """The message of a command that must fail before it prints a result."""
  status, out, err = run(capsys, *argv)
  assert (status, out) == (2, "")
  assert err.startswith("error: ")
  return err


def test_mismatched_backbones_and_tasks_are_refused(
  models, tmp_path, folder, capsys
):
  mv.save_backbone(tiny_backbone(seed=1), tmp_path / "other.npz")
  one = [f"--task={models / 'tasks' / 'pets'}", str(folder)]
  message = refused(capsys, f"--backbone={tmp_path / 'other.npz'}", *one)
  assert "'pets' belongs to another backbone" in message
  assert "no.npz" in refused(capsys, "--backbone=no.npz", *one)
  # A task without the one that it reads, or twice.
  message = refused(capsys, *arguments(models, folder, tasks=["birds"]))
  assert "'birds' attends to 'pets', which is not among" in message
  message = refused(capsys, *arguments(models, folder, tasks=["pets", "pets"]))
  assert "have the same name: ['pets']" in message
  message = refused(capsys, *arguments(models, folder, tasks=["none"]))
  assert "is neither a task nor a directory of tasks" in message


def test_a_backbone_that_states_another_gelu_is_another_one(
  models, backbone, tmp_path, folder, capsys
):
  """And not an option to be left out, which nobody has given."""
  other = dataclasses.replace(
    backbone, config=dataclasses.replace(backbone.config, gelu="exact")
  )
  mv.save_backbone(other, tmp_path / "exact.npz")
  message = refused(
    capsys, f"--backbone={tmp_path / 'exact.npz'}",
    f"--task={models / 'tasks' / 'pets'}", str(folder),
  )  # fmt: skip
  assert "'pets' belongs to another backbone" in message
  assert "gelu 'exact', but the task needs 'tanh'" in message
  assert "leave it out" not in message


def test_tasks_that_cannot_share_a_pass_are_refused(
  backbone, models, tmp_path, capsys
):
  central = mv.EvalPreprocessing(image_size=8, crop="central", resize=9)
  cars = random_task(backbone, "cars", preprocessing=central)
  mv.save_task(cars, tmp_path / "cars")
  exact = random_task(tiny_backbone(gelu="exact"), "boats")
  mv.save_task(exact, tmp_path / "boats")
  argv = arguments(models, "a.png", tasks=["pets"])
  message = refused(capsys, *argv, f"--task={tmp_path / 'cars'}")
  assert "'pets' and 'cars' need images prepared differently" in message
  assert "resize=9" in message
  # Before the backbone is loaded: which of the two would it be?
  argv[0] = "--backbone=none.npz"
  message = refused(capsys, *argv, f"--task={tmp_path / 'boats'}")
  assert (
    "'boats' belongs to another backbone. The backbone of 'pets'" in message
  )
  assert "gelu 'tanh', but the task needs 'exact'" in message


def test_lone_task_is_answered_alone_and_refused_beside_others(
  backbone, models, folder, tmp_path, capsys
):
  """Alone it is answered, in a pass of its own; beside others it is refused."""
  probe = random_task(
    backbone, "probe", regime="probe", cells=0, bottleneck=3, class_names="xyz"
  )
  mv.save_task(probe, tmp_path / "probe")
  alone = [
    f"--backbone={models / 'vit.npz'}", f"--task={tmp_path / 'probe'}"
  ]  # fmt: skip
  status, lines = run_json(capsys, *alone, folder, "--top=3")
  assert status == 0
  assert [line["image"] for line in lines] == [str(folder / n) for n in NAMES]
  for line in lines:
    image = jax.device_put(mv.preprocess([line["image"]], probe))
    logits = run_program(backbone, [probe], image)["probe"]
    shares = np.asarray(jax.nn.softmax(logits))[0]
    expected = dict(zip("xyz", shares, strict=True))
    [guesses] = line["tasks"].values()
    found = {guess["class"]: guess["probability"] for guess in guesses}
    assert found == pytest.approx(expected, abs=1e-5)
  message = refused(capsys, *alone, f"--task={models / 'tasks' / 'pets'}", "a")
  assert message.startswith(
    "error: task 'probe' has the regime 'probe', which reads all layers of the "
    "backbone, and not its pooled output: it cannot share a pass. Give it "
    "alone to mv.Predictor, predict, "
  )
  # Before a backbone is fetched: what it is called says which is not there.
  nowhere = f"--backbone={tmp_path / 'no.npz'}", *alone[1:]
  message = refused(
    capsys, *nowhere, f"--task={models / 'tasks' / 'pets'}", "a"
  )
  assert "it cannot share a pass" in message


def test_a_backbone_without_a_head_has_no_original_task(tmp_path, capsys):
  backbone = tiny_backbone(num_classes=0)
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  mv.save_task(random_task(backbone, "pets"), tmp_path / "tasks" / "pets")
  argv = arguments(tmp_path, "a.png", tasks=["pets"])
  assert "has no head" in refused(capsys, *argv, "--original")


def test_labels_and_values_are_printed_by_their_kind(
  backbone, folder, tmp_path, capsys
):
  tasks = tasks_of_kinds(backbone)
  mv.save_backbone(backbone, tmp_path / "vit.npz")
  mv.save_tasks(tasks, tmp_path / "tasks")
  names = ["pets", "tags", "size"]
  argv = arguments(tmp_path, folder / "a.png", tasks=names)
  _, [line] = run_json(capsys, *argv, "--top=1")
  expected = by_hand(backbone, tasks, rgb(folder / "a.png"))
  assert list(line["tasks"]) == names
  [pet] = line["tasks"]["pets"]
  assert pet["probability"] == pytest.approx(expected["pets"].max(), rel=1e-5)
  image = np.asarray(rgb(folder / "a.png"), np.float32)[None] / 127.5 - 1
  logits = mv.forward(backbone, tasks, image)
  chances = LABELS.activate(np.asarray(logits["tags"][0]))
  labels = line["tasks"]["tags"]["labels"]
  over = {i for i in range(3) if chances[i] >= LABELS.thresholds[i]}
  assert {one["index"] for one in labels} == over
  for one in labels:
    assert one["label"] == tasks[1].spec.class_names[one["index"]]
    assert one["probability"] == pytest.approx(chances[one["index"]], rel=1e-4)
  values = VALUES.activate(np.asarray(logits["size"][0]))
  angle, height = line["tasks"]["size"]["values"]
  assert angle == {
    "name": "angle", "unit": "degrees", "value": pytest.approx(values[0], 1e-4)
  }  # fmt: skip
  assert height["value"] == pytest.approx(values[1], 1e-4)
  _, out, _ = run(capsys, *argv, "--top=1")
  assert re.search(rf"size +angle +{values[0]:.4g} degrees$", out, re.M)
  for one in labels:
    assert re.search(rf"{one['label']} +[0-9.]+ %$", out, re.M)


def test_wrong_options_are_refused(models, capsys):
  for option in ("--top=0", "--batch_size=-1", "--dtype=int8", "--unknown"):
    assert predict.main([*arguments(models, "a.png"), option]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("error: the command line: ")
    assert found.err.count("\n") == 1


@pytest.mark.processes
def test_as_a_command_results_come_at_once_and_a_closed_pipe_is_no_error(
  models, folder
):
  argv = arguments(models, "-", tasks=["pets"])
  env = {
    **os.environ, "XLA_FLAGS": quick.XLA_FLAGS, "PYTHONIOENCODING": "ascii",
  }  # fmt: skip
  with subprocess.Popen(
    [sys.executable, "-m", "memory_vit", "predict", *argv, "--batch_size=1"],
    cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:  # fmt: skip
    process.stdin.write(os.fsencode(folder / "a.png") + b"\n")
    process.stdin.flush()  # and not closed: the result must come before that
    assert process.stdout.readline() == os.fsencode(folder / "a.png") + b"\n"
    assert process.stdout.readline().startswith(b"  pets  ")
    process.stdout.close()
    process.stdin.write(os.fsencode(folder / "c.png") + b"\n")
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
