"""Time a forward pass of the plain ViT, beside PyTorch and ONNX runtimes.

  python -m benchmarks.forward [--variant B/32 ...] [--batch 1 16 64]
    [--rows memory_vit torch ...] [--rounds=9] [--seconds=600] [--json=FILE]
    [--exported FILE ...]

Runs on the CPU cores that the process may use (`taskset -c 0` for one), in the
environment of `make exchange`. All rows have the same layers with random
weights: ours, those of timm in eager mode and compiled, our ONNX file in ONNX
Runtime and OpenVINO. Rows of one model and batch take turns in one process;
medians and quartiles are printed. A missing library is named, and its rows are
left out.

--exported adds programs of another version of ours, written by `jax.export`
from a function of parameters and images of this variant and batch.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import workloads
from memory_vit.tasks.inference import plain_program

Run = Callable[[], Any]
_SIZE, _CLASSES = 224, 1000


@dataclasses.dataclass(frozen=True)
class Case:
  """The model and the batch of all rows of a table; a folder for its files."""

  variant: str
  batch: int
  folder: Path

  def setting(self, dtype: str = "float32") -> workloads.Setting:
    """Our model and images, with a task that no row computes."""
    return workloads.make_setting(
      self.variant, _SIZE, dtype, self.batch, cells=1, classes=2
    )


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
  """Time every row of every model and batch; returns --json."""
  arguments = _arguments(argv)
  print(f"{_processor()}, {_cores()} cores, jax {jax.__version__}")
  found = []
  for variant, batch in itertools.product(arguments.variant, arguments.batch):
    with tempfile.TemporaryDirectory() as folder:
      case = Case(variant, batch, Path(folder))
      found.append(_measure(case, arguments))
    if arguments.json:
      arguments.json.write_text(json.dumps(found, indent=1) + "\n")
  return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.forward", description=__doc__.split("\n")[0]
  )
  add = parser.add_argument
  add("--variant", nargs="+", default=["B/32"])
  add("--batch", type=int, nargs="+", default=[1, 16, 64])
  add("--rows", nargs="+", choices=tuple(_ROWS), default=tuple(_ROWS))
  add("--rounds", type=int, default=9)
  add("--seconds", type=float, default=600.0, help="after which no further "
      "round of a model and batch begins")  # fmt: skip
  add("--exported", nargs="+", type=Path, default=[], metavar="FILE")
  add("--json", type=Path, help="file for the numbers")
  return parser.parse_args(argv)


def _measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
  """Time all rows, and print their milliseconds."""
  print(f"\nViT-{case.variant}, {case.batch} images, ms: median (quartiles)")
  rows = {}
  times = _times(_ready(case, arguments), arguments.rounds, arguments.seconds)
  for name, values in times.items():
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    quartiles = [low, high]
    rows[name] = {"ms": middle, "quartiles": quartiles, "rounds": len(values)}
    print(f"{name:28} {middle:8.1f}  ({low:.1f} to {high:.1f})", flush=True)
  return {
    "variant": case.variant, "batch": case.batch, "cores": _cores(),
    "processor": _processor(), "jax": jax.__version__, "rows": rows,
  }  # fmt: skip


def _ready(case: Case, arguments: argparse.Namespace) -> dict[str, Run]:
  """Every row by its name, called twice: the first call may compile."""
  makers: dict[str, Callable[[], Run]] = {
    name: functools.partial(make, case)
    for row in arguments.rows
    for name, make in _ROWS[row].items()
  }
  for file in arguments.exported:
    makers[file.name] = functools.partial(_exported, file)
  runs = {}
  for name, make in makers.items():
    try:
      runs[name] = make()
    except ModuleNotFoundError as error:
      print(f"{name:28} {error.name} is not installed")
      continue
    runs[name]()
    runs[name]()
  return runs


def _times(
  runs: dict[str, Run], rounds: int, seconds: float
) -> dict[str, list[float]]:
  """Milliseconds of each row in every round that begins within `seconds`."""
  times: dict[str, list[float]] = {name: [] for name in runs}
  began = time.perf_counter()
  for _ in range(rounds):
    if time.perf_counter() - began > seconds:
      break
    for name, run in runs.items():
      time.sleep(0.05)  # until threads of the previous row stop spinning
      start = time.perf_counter()
      run()
      times[name].append(1000 * (time.perf_counter() - start))
  return times


def _cores() -> int:
  return len(os.sched_getaffinity(0))


def _processor() -> str:
  """Name of the processor, and its flags for bfloat16."""
  facts = {}
  for line in Path("/proc/cpuinfo").read_text().splitlines():
    key, _, value = line.partition(":")
    facts[key.strip()] = value.strip()
  flags = {"amx_bf16", "avx512_bf16"} & set(facts.get("flags", "").split())
  name = facts.get("model name", platform.machine())
  return f"{name} ({', '.join(sorted(flags)) or 'without bfloat16'})"


def _ours(dtype: str, case: Case) -> Run:
  setting = case.setting(dtype)
  return lambda: jax.block_until_ready(workloads.plain(setting))


def _exported(file: Path) -> Run:
  exported = jax.export.deserialize(bytearray(file.read_bytes()))
  rng = np.random.default_rng(0)
  values = [
    jax.device_put((0.02 * rng.standard_normal(a.shape)).astype(a.dtype))
    for a in exported.in_avals
  ]
  arguments, _ = jax.tree.unflatten(exported.in_tree, values)
  program = jax.jit(exported.call)
  return lambda: jax.block_until_ready(program(*arguments))


def _torch(dtype: str, compiled: bool, case: Case) -> Run:
  import torch

  from benchmarks.compared.torchvision_operators import import_torchvision

  import_torchvision()
  import timm

  torch.set_num_threads(_cores())
  config = case.setting().backbone.config
  model: Any = timm.models.VisionTransformer(
    img_size=_SIZE, patch_size=config.patch_size, embed_dim=config.width,
    depth=config.depth, num_heads=config.num_heads, num_classes=_CLASSES,
  )  # fmt: skip
  kind = getattr(torch, dtype)
  model = model.eval().to(kind)
  if compiled:
    model = torch.compile(model)
  images = torch.randn(case.batch, 3, _SIZE, _SIZE).to(kind)

  def run() -> None:
    with torch.inference_mode():
      model(images)

  return run


def _onnx(case: Case) -> tuple[Path, np.ndarray]:
  """Our file of the plain ViT, and images for it."""
  import jax2onnx

  setting, file = case.setting(), case.folder / "model.onnx"
  backbone = setting.backbone
  if not file.exists():
    jax2onnx.to_onnx(
      lambda x: plain_program(backbone.params, x, config=backbone.config),
      [jax.ShapeDtypeStruct(setting.images.shape, np.float32)],
      return_mode="file",
      output_path=file,
      input_names=["images"],
    )
  return file, np.asarray(setting.images)


def _onnxruntime(case: Case) -> Run:
  import onnxruntime

  file, images = _onnx(case)
  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = _cores()
  session = onnxruntime.InferenceSession(file, options)
  return lambda: session.run(None, {"images": images})


def _openvino(dtype: str, case: Case) -> Run:
  import openvino

  file, images = _onnx(case)
  model = openvino.compile_model(
    file,
    "CPU",
    {
      "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[dtype],
      "INFERENCE_NUM_THREADS": _cores(),
      "PERFORMANCE_HINT": "LATENCY",
    },
  )
  request = model.create_infer_request()
  return lambda: request.infer([images])


def _both(
  name: str, make: Callable[..., Run], *given: Any
) -> dict[str, Callable[..., Run]]:
  return {
    f"{name}, {dtype}": functools.partial(make, dtype, *given)
    for dtype in ("float32", "bfloat16")
  }


_ROWS: dict[str, dict[str, Callable[..., Run]]] = {
  "memory_vit": _both("memory_vit", _ours),
  "torch": _both("timm", _torch, False),
  "compile": _both("timm, torch.compile", _torch, True),
  "onnxruntime": {"ONNX Runtime, float32": _onnxruntime},
  "openvino": _both("OpenVINO", _openvino),
}


if __name__ == "__main__":
  main()
