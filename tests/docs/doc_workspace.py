"""A folder in which the commands of the docs find what they name.

It looks like a checkout in which `make quickstart` was run, with a folder of
images, prepared data sets and published checkpoints; all of it tiny.
"""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import fake_data
import numpy as np
import published_models
import tensorflow_datasets as tfds
import vtab_miniature
from conftest import ROOT, random_task, tiny_backbone
from doc_substitutes import QUICKSTART, SMALL_RUN

import memory_vit as mv
from memory_vit.backbones import download
from memory_vit.commands import console, train
from memory_vit.data import datasets
from memory_vit.train import run_pictures

CLASSES = ("cat", "dog", "owl")
# Of a checkout: read, never written.
_LINKED = ("Makefile", "benchmarks", "configs", "docs", "pyproject.toml",
           "requirements.txt", "tests")  # fmt: skip
# TFDS data sets that were prepared in a folder, of images of 8 x 10 pixels in
# five classes, as many as the backbone's head has.
_PREPARED = {
  "DATA": ("cifar10_small", "glyph_new100", "tiny_imagenet_a"),
  "DATA/tfds": ("tiny_imagenet_a", "tiny_imagenet_upstream"),
}
_BACKBONE = "tiny.npz"


def make(root: Path) -> Path:
  """Make the folder; it must not move, as links to it are followed."""
  root.mkdir()
  for name in _LINKED:
    (root / name).symlink_to(ROOT / name)
  backbone = tiny_backbone(seed=22, depth=1, num_classes=5)
  mv.save_backbone(backbone, root / _BACKBONE)
  _write_data(root)
  _write_published(root)
  _train(root)
  return root


def _write_data(root: Path) -> None:
  """Images in folders, the same in lists, and prepared data sets."""
  data = root / "DATA"
  lists: dict[str, list[str]] = {"train800": [], "val200": [], "test": []}
  for split, count in (("train", 8), ("test", 3)):
    for label, name in enumerate(CLASSES):
      (data / split / name).mkdir(parents=True)
      for i in range(count):
        file = f"{split}/{name}/{i}.png"
        seed = 100 * label + i + (50 if split == "test" else 0)
        image = fake_data.noise(seed, 10, 12)
        (data / file).write_bytes(fake_data.encode(image, "PNG"))
        place = "val200" if file.endswith("0.png") else "train800"
        lists["test" if split == "test" else place].append(f"{file} {label}\n")
  for split, lines in lists.items():
    (data / f"{split}.txt").write_text("".join(lines))
  for name in ("a.jpg", "b.png", "b.jpg", "image.jpg"):
    kind = "PNG" if name.endswith("png") else "JPEG"
    image = fake_data.noise(len(name), 20, 30)
    (root / name).write_bytes(fake_data.encode(image, kind))
  vtab_miniature.write_folder(data, ["cifar"], train=16, held_out=8, test=8)
  features = tfds.features.FeaturesDict({
    "image": tfds.features.Image(shape=(8, 10, 3)),
    "label": tfds.features.ClassLabel(num_classes=5),
  })  # fmt: skip
  labels = {"train": [0, 1, 2, 3, 4] * 6, "test": [0, 1, 2, 3, 4] * 2}
  for folder, names in _PREPARED.items():
    for name in names:
      fake_data.write_adhoc(root / folder, name, features, labels)
  own = root / "tensorflow_datasets"
  for name, classes in (("cifar10", 10), ("cifar100", 100)):
    examples = {"train": [*range(classes)] * 3, "test": range(9)}
    fake_data.write_tfds(own, name, examples)


def _write_published(root: Path) -> None:
  """Checkpoints and models, where their downloads would lie, or by hand."""
  content = (root / _BACKBONE).read_bytes()
  (root / "DATA/vit_ti16_64.npz").write_bytes(content)
  cache = root / "cache"
  for address in download.KNOWN.values():
    if "://" not in address:  # it comes with the package
      continue
    place = cache / download._cached_path(address).name
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(content)
  published_models.write_model(root / "vit-base-patch16-224")
  published_models.write_model(root / "checkpoint-500", preprocessor=None)
  recorded = json.loads(
    (ROOT / "tests/backbones/published_names.json").read_text()
  )["dinov2 swiglu"]
  rng = np.random.default_rng(0)
  arrays = {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in recorded["arrays"].items()
  }
  published_models.write_model(root / "dinov2-base", arrays, recorded["config"])


def _train(root: Path) -> None:
  """Three tasks, under the names and at the places that pages use."""
  data = f"--config.data.dir={root / 'DATA'}"
  _run(root, "quickstart", "runs/quickstart", *QUICKSTART,
       "--config.backbone=glyphs")  # fmt: skip
  picture = fake_data.encode(fake_data.noise(7, 20, 30), "PNG")
  (root / "runs/quickstart/sweep.png").write_bytes(picture)
  # Of all regimes, the best has the name of the task. This one says, as those
  # that were trained, which data it was evaluated on.
  tasks = root / "runs/quickstart/tasks"
  glyphs = mv.load_backbone("glyphs")
  memory = dataclasses.replace(
    random_task(
      glyphs, "glyphs-inverted-memory_masked", classes=120,
      class_names=datasets.open_split("glyphs:inverted", "test").class_names,
    ),
    provenance=mv.load_task(tasks / "glyphs-inverted", glyphs).provenance,
  )  # fmt: skip
  mv.save_task(memory, tasks / memory.name)
  backbone = mv.load_backbone(root / _BACKBONE)
  for name in ("pets", "birds"):
    _run(
      root, "folder", f"runs/made/{name}", f"--config.task.name={name}", data
    )
    task = mv.load_task(root / "runs/made" / name / "tasks" / name, backbone)
    for place in ("runs/a/tasks", "runs/mine/tasks"):
      mv.save_task(task, root / place / name)
    mv.save_task(task, root / f"{name}.safetensors", format="safetensors")


def _run(root: Path, config: str, workdir: str, *flags: str) -> None:
  """Learn a task in two steps."""
  found = train.parse([
    "main", f"--config={ROOT / 'configs' / config}.py",
    f"--workdir={root / workdir}", f"--config.backbone={root / _BACKBONE}",
    *SMALL_RUN, *flags,
  ])  # fmt: skip
  # No page reads the pictures that a run draws at its end.
  with mock.patch.object(run_pictures, "pictures_of", return_value={}):
    assert console.run_command(lambda: train.execute(found)) == 0
