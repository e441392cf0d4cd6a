"""Time of a forward pass of the plain ViT, beside PyTorch and ONNX runtimes.

  python -m benchmarks.forward [--variant B/32 ...] [--batch 1 16 64]
    [--rows memory_vit torch ...] [--rounds=9] [--seconds=600] [--json=FILE]
    [--exported FILE ...]

Runs on CPUs, in the environment of `make exchange` with openvino beside it, on
the cores that the process may use (`taskset -c 0` for one). Each row is the same
layers with random weights: ours, timm's as it is and by `torch.compile`, and our
ONNX file in ONNX Runtime and OpenVINO, which multiplies bfloat16 where it can.
Rows of one model and batch take turns in one process; printed are medians and
quartiles. A library that is missing is named, and its rows are left out.

--exported adds programs of another version of ours, written by `jax.export`
from a function of parameters and images of this variant and batch.
"""

import argparse
import functools
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


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
  """Time every row of every model and batch, and print them.

  Args:
    argv: of the command; by default those of this process.

  Returns:
    What is written to --json: a dictionary for each model and batch.
  """
  arguments = _arguments(argv)
  cores = len(os.sched_getaffinity(0))
  print(f"{_processor()}, {cores} cores, jax {jax.__version__}")
  found = []
  for variant in arguments.variant:
    for batch in arguments.batch:
      found.append(_measure(variant, batch, cores, arguments))
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


def _measure(
  variant: str, batch: int, cores: int, arguments: argparse.Namespace
) -> dict[str, Any]:
  """Milliseconds of all rows of one model and batch."""
  makers: dict[str, Callable[[], Run]] = {
    name: functools.partial(make, variant, batch)
    for row in arguments.rows
    for name, make in _ROWS[row].items()
  }
  for file in arguments.exported:
    makers[file.name] = functools.partial(_exported, file)
  runs, missing = {}, {}
  for name, make in makers.items():
    try:
      runs[name] = make()
    except ModuleNotFoundError as error:
      missing[name] = f"{error.name} is not installed"
    else:
      runs[name]()
      runs[name]()
  times: dict[str, list[float]] = {name: [] for name in runs}
  began = time.perf_counter()
  for _ in range(arguments.rounds):
    if time.perf_counter() - began > arguments.seconds:
      break
    for name, run in runs.items():
      # Threads of the row before stop spinning.
      time.sleep(0.05)
      start = time.perf_counter()
      run()
      times[name].append(1000 * (time.perf_counter() - start))
  print(f"\nViT-{variant}, {batch} images, ms: median (quartiles)")
  for name, why in missing.items():
    print(f"{name:28} {why}")
  result: dict[str, Any] = {
    "variant": variant, "batch": batch, "cores": cores,
    "processor": _processor(), "jax": jax.__version__, "missing": missing,
    "rows": {},
  }  # fmt: skip
  for name, values in times.items():
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    result["rows"][name] = {
      "ms": middle, "quartiles": [low, high], "rounds": len(values)
    }  # fmt: skip
    print(f"{name:28} {middle:8.1f}  ({low:.1f} to {high:.1f})", flush=True)
  return result


def _processor() -> str:
  """Name of the processor, and its flags for bfloat16."""
  lines = Path("/proc/cpuinfo").read_text().splitlines()
  facts = dict(
    map(str.strip, line.split(":", 1)) for line in lines if ":" in line
  )
  flags = {"amx_bf16", "avx512_bf16"} & {*facts.get("flags", "").split()}
  name = facts.get("model name", platform.machine())
  return f"{name} ({', '.join(sorted(flags)) or 'without bfloat16'})"


def _setting(variant: str, batch: int, dtype: str) -> workloads.Setting:
  return workloads.make_setting(variant, _SIZE, dtype, batch, 1, 2)


def _ours(dtype: str, variant: str, batch: int) -> Run:
  setting = _setting(variant, batch, dtype)
  return lambda: jax.block_until_ready(workloads.plain(setting))


def _exported(file: Path) -> Run:
  """A program that another version has written."""
  exported = jax.export.deserialize(bytearray(file.read_bytes()))
  rng = np.random.default_rng(0)
  values = [
    jax.device_put((0.02 * rng.standard_normal(a.shape)).astype(a.dtype))
    for a in exported.in_avals
  ]
  arguments, _ = jax.tree.unflatten(exported.in_tree, values)
  program = jax.jit(exported.call)
  return lambda: jax.block_until_ready(program(*arguments))


def _torch(dtype: str, compiled: bool, variant: str, batch: int) -> Run:
  import torch

  from benchmarks.compared.torchvision_operators import import_torchvision

  import_torchvision()
  import timm

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  config = _setting(variant, 1, "float32").backbone.config
  model: Any = timm.models.VisionTransformer(
    img_size=_SIZE, patch_size=config.patch_size, embed_dim=config.width,
    depth=config.depth, num_heads=config.num_heads, num_classes=_CLASSES,
  )  # fmt: skip
  kind = getattr(torch, dtype)
  model = model.eval().to(kind)
  if compiled:
    model = torch.compile(model)
  images = torch.randn(batch, 3, _SIZE, _SIZE).to(kind)

  def run() -> None:
    with torch.inference_mode():
      model(images)

  return run


@functools.lru_cache(1)
def _onnx(variant: str, batch: int) -> tuple[Path, np.ndarray]:
  """Our file of the plain ViT, and images for it; the last one is kept."""
  import jax2onnx

  setting = _setting(variant, batch, "float32")
  backbone = setting.backbone
  folder = tempfile.TemporaryDirectory()
  file = Path(folder.name) / "model.onnx"
  _FOLDERS[:] = [folder]
  jax2onnx.to_onnx(
    lambda x: plain_program(backbone.params, x, config=backbone.config),
    [jax.ShapeDtypeStruct(setting.images.shape, np.float32)],
    return_mode="file",
    output_path=file,
    input_names=["images"],
  )
  return file, np.asarray(setting.images)


# So that the files of the last model outlive the function that wrote them.
_FOLDERS: list[Any] = []


def _onnxruntime(variant: str, batch: int) -> Run:
  import onnxruntime

  file, images = _onnx(variant, batch)
  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = len(os.sched_getaffinity(0))
  session = onnxruntime.InferenceSession(file, options)
  return lambda: session.run(None, {"images": images})


def _openvino(dtype: str, variant: str, batch: int) -> Run:
  import openvino

  file, images = _onnx(variant, batch)
  model = openvino.compile_model(
    file,
    "CPU",
    {
      "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[dtype],
      "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
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
