"""Compares what two versions of the package compute, for restructuring it.

  PYTHONPATH=BEFORE python tests/compare_versions.py write DIR [PART ...]
  PYTHONPATH=AFTER python tests/compare_versions.py write OTHER_DIR
  python tests/compare_versions.py compare DIR OTHER_DIR

BEFORE and AFTER are checkouts, on one machine and in one environment. `write`
uses the public API and the commands alone, and tasks are read back by the
version that wrote them. It runs on one core, as the number of threads may
change how sums are rounded. `compare` names every file that differs with its
largest difference; the exit status is then 1.

Left out: times, configurations, pictures; what needs a download, torch, Ray,
W&B or several processes; exports; attention but that of the server, its
uploads, metrics and OpenAPI; the part "interference" of the study; embeddings
as a source of data; the output of `inspect`, `evaluate`, `check_data` and
`convert`.
"""

import argparse
import atexit
import base64
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import quick
from etils import epy
from families import FAMILIES, QUICK
from PIL import Image

with epy.lazy_imports():  # once the environment is set
  import jax

  import memory_vit as mv

COMPOSING = (
  "memory_masked", "cls_masked", "norms_masked", "layers_masked",
  "norms_layers_masked", "cls+memory+norms", "cls+memory+norms+layers",
  "side_masked", "cls+memory+side",
)  # fmt: skip
ALONE = (
  "full", "head", "probe", "head_cls", "memory", "memory_propagated",
  "memory_additive", "adapter", "adapter_memory",
)  # fmt: skip
# Short runs on the digits 5 to 9.
RUN = {
  "backbone": "tiny.npz", "batch_size": 16,
  "batch_size_eval": 64, "total_steps": 6, "eval_every": 3,
  "checkpoint_every": 3, "log_every": 1, "log_images": 0,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
  "alone": {"data.validation": ""},  # it is the last step that is kept
  "side": {"regime": "side_masked", "optim.mixup": 0.2},
  "extended": {
    "data.name": "digits:2-6", "task.name": "extended",
    "task.attends_to": "('runs/alone/tasks/digits-5-9',)",
  },
  "sweep": {
    "sweep.learning_rate": "(0.3,0.1)", "sweep.cells": "(1,3)",
    "sweep.export": "all",
  },
  "regimes": {
    "sweep.regime": "('memory_masked','side_masked','head','probe','full')",
  },
  "kept": {
    "cache.what": "contexts", "data.train_crop": "resize", "data.resize": 0,
    "data.eval_crop": "resize",
  },
  "kept-on-disk": {
    "cache.what": "contexts", "cache.crops": 2, "cache.where": "disk",
    "cache.dir": "kept",
  },
  "interrupted": {"optim.schedule": "constant", "total_steps": 3},
  # The same run resumes.
  "interrupted again": {"optim.schedule": "constant"},
}  # fmt: skip
# What a clock says, configurations, and commands.
NOT_COMPARED = re.compile("seconds|per_second|timing|^config$|^command$")
TOKEN = "a token of 24 characters"
FORKS = multiprocessing.get_context("forkserver")


@dataclasses.dataclass
class Place:
  """Where values are written, and the folder in which commands run."""

  out: Path
  work: Path

  @functools.cached_property
  def backbone(self) -> Any:
    return mv.load_backbone(str(self.work / "tiny.npz"))

  @functools.cached_property
  def images(self) -> list[Path]:
    return sorted((self.work / "images").glob("*/*"))

  def arrays(self, name: str, tree: Any) -> None:
    flat = {key: np.asarray(value) for key, value in leaves(tree)}
    np.savez(self._file(f"{name}.npz"), **flat)

  def text(self, name: str, text: str) -> None:
    self._file(name).write_text(text.replace(str(self.work), "WORK"))

  def json(self, name: str, values: Any) -> None:
    values = json.loads(json.dumps(values, default=plain))
    self.text(f"{name}.json", json.dumps(compared(values), indent=1))

  def command(self, name: str, *arguments: str) -> str:
    """Run a command to its end; return its output."""
    process = self.started(name, *arguments)
    process.join()
    if process.exitcode:
      error = (self.work / f"{process.name}.err").read_text()
      raise RuntimeError(f"{name} ended with {process.exitcode}:\n{error}")
    return (self.work / f"{process.name}.out").read_text()

  def started(self, name: str, *arguments: str) -> Any:
    """Start `memory-vit NAME`; "main" and studies may be modules of their own.

    It is forked from a process that has imported large libraries once.
    """
    root = Path(mv.__file__).resolve().parents[1]
    argv = ["memory_vit", name, *arguments]
    if name == "main":
      argv = ["memory_vit.main", *arguments]
    elif (root / "studies" / name).exists():
      argv = [f"studies.{name}", *arguments]
    log = f"{time.monotonic_ns()}-{name}"
    process = FORKS.Process(
      target=run_module, args=(root, self.work / log, argv), name=log
    )
    process.start()
    return process

  def _file(self, name: str) -> Path:
    file = self.out / name
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
  """Each value of nested dictionaries, lists and tuples, with its path."""
  if isinstance(tree, Mapping | list | tuple) and tree:
    pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in pairs:
      yield from leaves(value, f"{path}/{key}")
  else:
    yield path, tree


def plain(value: Any) -> Any:
  """Bytes, an array or a dataclass, as JSON can hold it."""
  if isinstance(value, bytes):
    return value.hex()
  return value.tolist() if hasattr(value, "tolist") else vars(value)


def compared(values: Any) -> Any:
  """JSON values without the keys that `NOT_COMPARED` names."""
  if isinstance(values, list):
    return [compared(value) for value in values]
  if not isinstance(values, dict):
    return values
  kept = {key for key in values if not NOT_COMPARED.search(key)}
  return {key: compared(values[key]) for key in sorted(kept)}


def run_module(root: Path, log: Path, argv: list[str]) -> None:
  """Be `python -m MODULE`, with its output in files."""
  for number, kind in ((1, "out"), (2, "err")):
    file = os.open(f"{log}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, number)
  os.chdir(log.parent)
  sys.path.insert(0, str(root))
  sys.argv = argv
  try:
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
  finally:
    atexit._run_exitfuncs()  # such a process ends without
    sys.stdout.flush()
    sys.stderr.flush()


def flags(options: Mapping[str, Any]) -> list[str]:
  return [f"--config.{key}={value}" for key, value in options.items()]


# Models and images.


def tiny(name: str = "", **overrides: Any) -> Any:
  """A backbone of two blocks with weights that make every layer matter."""
  shape = {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2}
  shape |= {"patch_size": 2, "image_size": 8, "num_classes": 5}
  config = mv.ViTConfig(**{**shape, **overrides})
  init = mv.MemoryViT(config).init
  found = jax.eval_shape(init, jax.random.key(0), pixels())
  return mv.Backbone(config, drawn(found["params"]["backbone"], 0.3), name)


def drawn(tree: Any, size: float, path: str = "") -> Any:
  """Arrays of these shapes, each drawn by its name; scales are near 1."""
  if isinstance(tree, Mapping):
    return {k: drawn(v, size, f"{path}/{k}") for k, v in tree.items()}
  rng = np.random.default_rng(zlib.crc32(path.encode()))
  values = size * rng.standard_normal(tree.shape) + path.endswith("/scale")
  return values.astype(np.float32)


def task_of(backbone: Any, regime: str, name: str = "", **options: Any) -> Any:
  """A task in which nothing is zero, as if it had been trained."""
  options |= {"cells": 2} if "memory" in regime else {}
  options |= {"bottleneck": 3} if regime[:5] in ("probe", "adapt") else {}
  options |= {"num_classes": 3, "side_width": 4, "regime": regime}
  name = name or regime.replace("+", "-")
  task = mv.init_task(jax.random.key(0), backbone, name=name, **options)
  return mv.Task(task.spec, drawn(task.params, 0.3))


def three_tasks(backbone: Any) -> list[Any]:
  """A task, one with a side stream that reads it, and one that reads both."""
  first = task_of(backbone, "memory_masked", "first")
  second = task_of(backbone, "side_masked", "second", attends_to=first)
  parents = [first, second]
  third = task_of(backbone, "cls+memory+side", "third", attends_to=parents)
  return [first, second, third]


def picture(seed: int, height: int, width: int, kind: str) -> bytes:
  """A file of a smooth image; some of PNG are grey, or have alpha."""
  rng = np.random.default_rng(seed)
  image = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8))
  mode = {1: "L", 4: "RGBA"}.get(seed, "RGB") if kind == "PNG" else "RGB"
  file = io.BytesIO()
  image.resize((width, height), Image.BICUBIC).convert(mode).save(file, kind)
  return file.getvalue()


def pixels() -> np.ndarray:
  """Prepared images."""
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (3, 8, 8, 3)).astype(np.float32)


def prepare(place: Place) -> None:
  """Write what commands read: a backbone, tasks, images."""
  mv.save_backbone(tiny(), place.work / "tiny.npz")
  mv.save_tasks(three_tasks(place.backbone), place.work / "three")
  for i, kind in enumerate(["JPEG", "PNG", "WEBP"] * 3):
    file = place.work / "images" / "ab"[i % 2] / f"{i}.{kind.lower()}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(picture(i, 12 + i, 30 - i, kind))


# What is written.


def usage(place: Place) -> None:
  """The help of all commands."""
  text = place.command("--help")
  place.text("usage/memory-vit.txt", text)
  for name in ["main", *re.findall(r"^  (\w+) ", text, re.MULTILINE)]:
    place.text(f"usage/{name}.txt", place.command(name, "--help"))


def preprocessing(place: Place) -> None:
  """Images of several kinds and sizes, as models see them."""
  sizes = ((20, 30), (8, 8), (333, 250), (64, 500), (5, 7), (375, 500))
  images = {
    f"{kind}-{height}x{width}": picture(i, height, width, kind)
    for kind in ("JPEG", "PNG", "WEBP")
    for i, (height, width) in enumerate(sizes)
  }
  crops = {"resize": 0, "central": 37, "central_rounded": 39}
  ways = ("bilinear", "bilinear_antialias", "bicubic")
  for (crop, resize), way in itertools.product(crops.items(), ways):
    how = mv.EvalPreprocessing(
      image_size=32, crop=crop, resize=resize, interpolation=way
    )
    found = {name: mv.preprocess(file, how) for name, file in images.items()}
    place.arrays(f"preprocessing/{way}-{crop}", found)


def logits(place: Place) -> None:
  """Logits of all regimes, in all families of backbones, and in bfloat16."""
  for family, fields in {**FAMILIES, "bfloat16": {"dtype": "bfloat16"}}.items():
    backbone, images = tiny(family, **fields), pixels()
    tasks, found = three_tasks(backbone), {}
    for n in (0, 1, 3):
      found[f"{n} tasks"] = mv.forward(backbone, tasks[:n], images)
    every = [task_of(backbone, regime) for regime in COMPOSING]
    found["all that compose"] = mv.forward(backbone, every, images)
    for regime in ALONE:
      predictor = mv.Predictor.from_model(
        backbone, task_of(backbone, regime), batch_sizes=(3,), warm_up=False
      )
      found[regime] = predictor.predict_pixels(images).logits
    found["encode"], context = mv.encode(backbone, images)
    found["read"] = mv.read(backbone, mv.fill_slots(backbone, tasks), context)
    if family in QUICK:
      learned = {task.name: task.params for task in tasks}
      params = {"backbone": backbone.params, "tasks": learned}
      module = jax.jit(mv.MemoryViT(backbone.config, tasks).apply)
      found["module"] = module({"params": params}, images)
    place.arrays(f"logits/{family}", found)


def training(place: Place) -> None:
  """Values and results of short runs of the command."""
  for name, options in RUNS.items():
    folder = f"runs/{name.partition(' ')[0]}"
    place.command(
      "main" if name == "alone" else "train", "--config=digits",
      f"--workdir={folder}", *flags({**RUN, **options}),
    )  # fmt: skip
    result = (place.work / folder / "result.json").read_text()
    place.json(f"training/{name}/result", json.loads(result))
    for path in (place.work / folder / "tasks").glob("[a-z]*"):
      task = mv.load_task(path, place.backbone)
      write_task(place, f"training/{name}/{path.name}", task)


def write_task(place: Place, name: str, task: Any) -> None:
  place.arrays(name, task.params)
  made = task.provenance["metrics"]
  place.json(name, {"spec": task.spec, "metrics": made})


def python(place: Place) -> None:
  """A task that is trained and evaluated by calls."""
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (60, 11, 9, 3), np.uint8)
  images[::2, :5] //= 4
  data = images, ["dark", "bright"] * 30
  result = mv.train_task(
    place.backbone, data, name="light", epochs=2, batch_size=16, test=data,
    regime="side_masked", learning_rate=(0.1, 0.3), progress=False,
  )  # fmt: skip
  write_task(place, "python/train_task", result.task)
  place.arrays("python/history", compared(dict(result.history)))
  found = mv.evaluate_tasks(place.backbone, result.task, data, progress=False)
  values = {"accuracy": result.accuracy, "trials": result.trials, **found}
  place.json("python/metrics", values)


def predictor(place: Place) -> None:
  """Answers of a predictor, before and after its tasks changed."""
  tiny, three = str(place.work / "tiny.npz"), str(place.work / "three")
  config = mv.PredictorConfig(tiny, (three,), batch_sizes=(1, 4))
  model = mv.Predictor(config)
  for name in ("before", "after"):
    answer = model.predict(place.images, original=True, features=True)
    arrays = answer.logits, answer.original, answer.features
    place.arrays(f"predictor/{name}", arrays)
    top = {task: answer.top(task, 2) for task in answer.logits}
    values = {"top": top, "digest": answer.task_set.digest}
    place.json(f"predictor/{name}", values)
    model.add(task_of(place.backbone, "cls_masked", f"added-{name}"))
    model.remove("third" if name == "before" else "added-before")
  columns = model({"image": [file.read_bytes() for file in place.images]})
  place.json("predictor/columns", columns)


def bulk(place: Place) -> None:
  """Rows of predictions and embeddings, read from Parquet."""
  import pyarrow.parquet as pq

  given = ["--backbone=tiny.npz", "--input=images", "--shard_images=5"]
  wanted = ["--task=three", "--logits", "--original"]
  place.command("predict", *given, *wanted, "--output=predicted")
  place.command("embed", *given, "--stored=float32", "--output=embedded")
  for name in ("predicted", "embedded"):
    files = sorted((place.work / name).glob("*.parquet"))
    rows = pq.ParquetDataset(files).read().to_pydict()
    for key in rows.keys() & {"pooled", "layers"}:
      rows[key] = [np.frombuffer(row, np.float32).tolist() for row in rows[key]]
    place.json(f"bulk/{name}", rows)
  text = place.command(
    "predict", *given[:1], "--task=three", "images", "--json"
  )
  place.text("bulk/predict.txt", text)


def server(place: Place) -> None:
  """Answers of a server, before and after a task was added."""
  (place.work / "token").write_text(TOKEN)
  (place.work / "token").chmod(0o600)
  process = place.started(
    "serve", "--backbone=tiny.npz", "--task=three", "--port=0",
    "--batch_sizes=1,4", "--token_file=token", "--task_root=.",
  )  # fmt: skip
  try:
    url = ready_url(place.work / f"{process.name}.out", process)
    for i, (method, path, body) in enumerate(requests(place)):
      name = f"server/{i:02}-{method}{path.replace('/', '-')}"
      place.json(name, ask(url + path, method, body))
  finally:
    process.terminate()
    process.join()
  place.json("server/end", {"status": process.exitcode})


def requests(place: Place) -> list[tuple[str, str, Any]]:
  """Method, path and body of what a server is asked, in order."""
  images = [
    {"name": file.name, "data": base64.b64encode(file.read_bytes()).decode()}
    for file in place.images
  ]
  broken = {"name": "broken", "data": "QUJD"}
  some = {"images": [images[0], broken], "tasks": ["third"], "top": 1}
  return [
    ("GET", "/v1/tasks", None),
    ("GET", "/v1/tasks/second", None),
    ("GET", "/v1/tasks/nobody", None),
    ("POST", "/v1/predict", {"images": images[:3], "original": True}),
    ("POST", "/v1/predict", some),
    ("POST", "/v1/predict", {**some, "tasks": ["nobody"]}),
    ("POST", "/v1/predict", {"image": []}),
    ("POST", "/v1/attention", {"images": images[:1]}),
    ("PUT", "/v1/tasks/added", {"path": str(place.work / "three" / "first")}),
    ("DELETE", "/v1/tasks/third", None),
    ("POST", "/v1/predict", {"images": images}),
    ("GET", "/readyz", None),
  ]


def ready_url(log: Path, process: Any) -> str:
  """The address of a server, once it is ready."""
  while process.is_alive():
    time.sleep(0.1)
    found = re.search(r"http://\S+", log.read_text() if log.exists() else "")
    with contextlib.suppress(OSError):
      # While batch sizes are compiled, smaller ones answer: other bits. Older
      # versions do not have "compiling".
      if (
        found
        and (state := ask(f"{found[0]}/readyz"))["status"] == 200
        and not state["body"].get("compiling")
      ):
        return found[0]
  raise RuntimeError(f"the server ended with {process.exitcode}")


def ask(url: str, method: str = "GET", body: Any = None) -> dict[str, Any]:
  head = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {TOKEN}",
  }
  data = None if body is None else json.dumps(body).encode()
  request = urllib.request.Request(url, data, head, method=method)
  try:
    with urllib.request.urlopen(request, timeout=60) as answer:
      return {"status": answer.status, "body": json.load(answer)}
  except urllib.error.HTTPError as error:
    return {"status": error.code, "body": json.load(error)}


def paper(place: Place) -> None:
  """The report of the paper's study, of most of its parts."""
  options = {**RUN, "upstream.name": "", "total_steps": 3}
  study = (
    "--learning_rates=0.3,0.1", "--seeds=0,1", "--cells=1,5",
    "--others=digits:0-4", "--regimes=memory_masked,cls_masked,head",
  )  # fmt: skip
  if not (Path(mv.__file__).resolve().parents[1] / "studies").exists():
    study = tuple(map(option_of_study, study))
  parts = ("table2", "cells", "costs", "extension", "regimes")
  place.command(
    "paper", "--config=digits", "--workdir=paper", *flags(options), *study,
    *(f"--only={part}" for part in parts),
  )  # fmt: skip
  write_report(place, "paper")


def option_of_study(flag: str) -> str:
  """A flag of the study as an option of the configuration, which it was."""
  name, _, values = flag.removeprefix("--").partition("=")
  if name not in ("others", "regimes"):
    return f"--config.study.{name}=({values},)"
  quoted = ",".join(map(repr, values.split(",")))
  return f"--config.study.{name}=({quoted},)"


def vtab(place: Place) -> None:
  """The report of VTAB-1k, of two tasks with a few images."""
  for task, classes in (("kitti", 4), ("dtd", 47)):
    write_vtab_task(place.work / "data" / task, classes)
  small = {"epochs": 1, "batch_size": 8, "batch_size_eval": 8}
  place.command(
    "vtab", "--dir=data", "--backbone=tiny.npz", "--workdir=vtab", "--seeds=2",
    "--only=kitti,dtd,cifar", "--regimes=head,side_masked",
    *flags({**small, "sweep.learning_rate": "(0.003,0.1)"}),
  )  # fmt: skip
  write_report(place, "vtab")


def write_vtab_task(folder: Path, classes: int) -> None:
  """Write images and lists of a task, as the prepared folder has them."""
  (folder / "images").mkdir(parents=True)
  lists: dict[str, str] = {"train800": "", "val200": "", "test": ""}
  for i in range(24):
    file = f"images/{i}.jpg"
    (folder / file).write_bytes(picture(i, 20, 30, "JPEG"))
    lists[[*lists][i % 3]] += f"{file} {(classes - 1 - i // 3) % classes}\n"
  lists["train800val200"] = lists["train800"] + lists["val200"]
  for split, lines in lists.items():
    (folder / f"{split}.txt").write_text(lines)


def write_report(place: Place, name: str) -> None:
  """Write both forms of a report without its times, which VTAB's alone has."""
  numbers = (place.work / name / "report.json").read_text()
  place.json(f"{name}/report", json.loads(numbers))
  text = (place.work / name / "report.md").read_text()
  # The command and its options have other names in other versions.
  text = re.sub(r"(?m)^(python -m|memory-vit) .*$", "COMMAND", text)
  text = text.replace("config.study.", "study.")
  if name == "vtab":
    text = re.sub(r"[\d.]+ times", "N times", text)
  before, title, costs = text.partition("## What it took")
  costs = re.sub(r"\| [\d,]+ \| [\d,]+ \|\n", "| N | N |\n", costs)
  place.text(f"{name}/report.md", before + title + costs)


PARTS = {
  part.__name__: part
  for part in (
    usage, preprocessing, logits, training, python, predictor, bulk, server,
    paper, vtab,
  )
}  # fmt: skip


def write(out: Path, parts: Sequence[str]) -> int:
  """Write the parts; one that fails is named, and does not stop the others."""
  out.mkdir(parents=True)
  failed = []
  print(f"memory_vit of {Path(mv.__file__).resolve().parents[1]}")
  with tempfile.TemporaryDirectory() as folder:
    place = Place(out.resolve(), Path(folder).resolve())
    set_environment(place.work)
    prepare(place)
    for name in parts:
      began = time.monotonic()
      try:
        PARTS[name](place)
      except Exception:
        traceback.print_exc()
        failed.append(name)
      print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
  print("failed:" if failed else "all written", *failed)
  return 1 if failed else 0


def set_environment(work: Path) -> None:
  """Keep out what a user's environment and the number of cores could change."""
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
  os.environ |= {
    "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick.XLA_FLAGS, "COLUMNS": "80",
    "JAX_COMPILATION_CACHE_DIR": str(work / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0", "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0", "MEMORY_VIT_CACHE": str(work / "cache"),
  }  # fmt: skip
  large = ["jax", "tensorflow", "flax.linen", "orbax.checkpoint", "pyarrow"]
  FORKS.set_forkserver_preload(large)


# Comparing.


def compare(before: Path, after: Path) -> int:
  """Print which files are equal to the bit, and how the others differ."""
  sides = (before, after)
  names = [{str(p.relative_to(d)) for p in d.rglob("*.*")} for d in sides]
  differ = 0
  for name in sorted(names[0] | names[1]):
    found = [
      side for side, own in zip(sides, names, strict=True) if name in own
    ]
    what = f"only in {found[0]}"
    if len(found) == 2:
      what = difference(before / name, after / name)
    print(f"DIFFERS {name}: {what}" if what else f"equal   {name}")
    differ += bool(what)
  count = len(names[0] | names[1])
  print(f"{count - differ} of {count} files are equal to the bit")
  return 1 if differ or not count else 0


def difference(before: Path, after: Path) -> str:
  """How two files differ; "" where they hold the same."""
  if before.suffix == ".npz":
    return of_values(dict(np.load(before)), dict(np.load(after)))
  texts = before.read_text(), after.read_text()
  if before.suffix == ".json":
    return of_values(*(dict(leaves(json.loads(text))) for text in texts))
  lines = itertools.zip_longest(*(text.splitlines() for text in texts))
  other = [f"{a!r} is now {b!r}" for a, b in lines if a != b]
  if not other and texts[0] != texts[1]:
    other = ["the ends of lines"]
  return f"{len(other)} lines, first {other[0]}" if other else ""


def of_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
  """The largest difference of numbers, and the first of what is no number."""
  gaps, others = {}, []
  for key in {**before, **after}:
    if key not in before or key not in after:
      others.append(f"{key} only {'after' if key in after else 'before'}")
      continue
    a, b = np.asarray(before[key]), np.asarray(after[key])
    same = a.dtype == b.dtype and a.shape == b.shape
    if same and a.dtype.kind in "fiu":
      if a.tobytes() != b.tobytes():
        gaps[key] = np.abs(a.astype(np.float64) - b).max()
    elif not same or not np.array_equal(a, b):
      others.append(f"{key} was {before[key]!r:.60}, is {after[key]!r:.60}")
  shown = [f"{len(others)} values, first {others[0]}"] if others else []
  if gaps:
    most = max(gaps, key=lambda key: np.nan_to_num(gaps[key], nan=np.inf))
    shown.append(f"{len(gaps)} numbers, most {most} by {gaps[most]:.2g}")
  return "; ".join(shown)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  actions = parser.add_subparsers(dest="action", required=True)
  writing = actions.add_parser("write")
  writing.add_argument("folder", type=Path)
  writing.add_argument("parts", nargs="*", metavar="PART")
  comparing = actions.add_parser("compare")
  comparing.add_argument("before", type=Path)
  comparing.add_argument("after", type=Path)
  given = parser.parse_args()
  if given.action == "compare":
    return compare(given.before, given.after)
  return write(given.folder, given.parts or [*PARTS])


if __name__ == "__main__":
  sys.exit(main())
