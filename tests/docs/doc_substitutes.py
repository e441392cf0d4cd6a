"""The one table of what is executed otherwise than it stands in the docs.

What is large, elsewhere, or a word in capitals becomes something tiny of the
workspace (`doc_workspace`); all else is executed as it stands. Each entry is
still found somewhere: `test_blocks` fails for one that is not.
"""

import dataclasses
import re
import socket

from doc_blocks import Block

_CI = "what CI runs; it would run this test again"
_ELSEWHERE = "it needs a service or a network"
# Commands that are not run, with * for anything, and why. What of the package
# stands within them, quoted or behind others, is checked for its flags.
LEFT_OUT = {
  "docker *": "there is no Docker engine",
  "curl localhost:8501*": "TensorFlow Serving, which runs in Docker",
  "gcloud *": "there is no TPU",
  "srun *": "there is no SLURM",
  "hf *": _ELSEWHERE,
  "pip install *": _ELSEWHERE,
  "make compare": "it needs PEFT, and takes ten minutes",
  "serve run *": "tests/serving/test_ray.py does, on a cluster of Ray",
  **{
    f"make {target}": _CI
    for target in (
      "test", "newest", "lowest", "processes", "slow", "studies", "exchange",
      "compiled",
      "nightly", "mutants", "lint", "notebooks", "docs", "release",
    )
  },
}  # fmt: skip
# The same for blocks of Python: page and first line.
LEFT_OUT_PYTHON = {
  ("export.md", "import onnxruntime"): "tests/exchange/test_onnx.py does",
  ("cpu.md", "import onnxruntime"): "tests/exchange/test_cpu_page.py does",
  ("cpu.md", "import openvino"): "tests/exchange/test_cpu_page.py does",
  ("scale.md", "import apache_beam as beam"): "Beam is no dependency",
}
# And for commands of the package, by regular expressions: those that need a
# library which is in `make exchange` alone.
LEFT_OUT_PACKAGE = {
  r"memory_vit export .*--format=onnx": "tests/exchange/test_onnx.py does",
  r"-m benchmarks\.(comparison|accuracy)\b": "it needs PEFT, and takes long",
  r"memory_vit (push|list) |memory_vit .*--task=hf://": (
    "tests/tasks/test_hub_tasks.py does, on a stand-in of the hub"
  ),
  r"memory_vit convert --task=": "tests/tasks/test_torch_import.py does",
  r"memory_vit .*gs://my-bucket/": (
    "tests/train/test_bucket_runs.py does, on an emulator"
  ),
}


@dataclasses.dataclass(frozen=True)
class Substitute:
  """A regular expression for text of a block, and the text in its place.

  `\\1` is a group of it, `{port}` is one that is free, `{server}` the address
  of the server that runs, `{line}` the line of the block. An empty `page`
  stands for all of them.
  """

  pattern: str
  by: str
  page: str = ""


SUBSTITUTES = (
  # Placeholders.
  Substitute(r"--task=DIR --task=DIR\b",
             "--task=runs/mine/tasks/pets --task=runs/mine/tasks/birds"),
  Substitute(r"--task=DIR\b", "--task=runs/mine/tasks"),
  Substitute(r"--workdir=DIR\b", "--workdir=runs/line{line}"),
  Substitute(r"\bNPZ_OR_TASK\b", "runs/mine/tasks/pets"),
  Substitute(r"=(NPZ|BACKBONE)\b", "=tiny.npz"),
  Substitute(r"\bSOURCE\b", "vit-base-patch16-224"),
  Substitute(r"\bIMAGE_OR_FOLDER\b( \.\.\.)?", "a.jpg DATA/test"),
  Substitute(r"\bIMAGE$", "a.jpg"),
  Substitute(r":NAME\b", ":tiny_imagenet_a"),
  Substitute(r"=FILE\b", "=tiny.npz"),
  Substitute(r"=IMAGES\b", "=DATA/test"),
  # Options of which either may be given.
  Substitute(r"\[--logits\] \[--engine=ray --workers=8\]", "--logits"),
  # Two hosts are two processes of this one.
  Substitute(r"--config=\.\.\.", "--config=folder "
             "--config.data.dir=DATA --config.backbone=tiny.npz"),
  Substitute(r"/shared/run", "runs/shared", "scale.md"),
  Substitute(r"HOST0:1234", "127.0.0.1:{port}"),
  Substitute(r"# on HOST0$", "&"),
  Substitute(r"# on the other$", "&& wait $!"),
  # The port of the server.
  Substitute(r"127\.0\.0\.1:8000\b", "{server}"),
  # There is only this task.
  Substitute(r"tasks=birds,pets", "tasks=glyphs-inverted"),
  Substitute(
    r'"tasks": \["birds"\]', '"tasks": ["glyphs-inverted"]', "serve.md"
  ),
  # What --dry_run tells is then done.
  Substitute(r"^((?:.*\\\n)*.*) --dry_run$", r"\1 --dry_run\n\1", "studies.md"),
  # Six trials instead of twelve.
  Substitute(r'cells="\(1, 5, 10, 20\)"', 'cells="(1, 5)"'),
)  # fmt: skip


def substituted(block: Block, server: str = "127.0.0.1:8000") -> str:
  """The text of a block to execute, while a server has this address."""
  text = block.text
  for entry in SUBSTITUTES:
    if entry.page in ("", block.page.name):
      by = entry.by.replace("{line}", str(block.line))
      by = by.replace("{server}", server)
      if "{port}" in by:
        by = by.replace("{port}", str(_free_port()))
      text = re.sub(entry.pattern, by, text, flags=re.M)
  return text


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


# What makes a run short; the tests have 8 devices.
SMALL_RUN = (
  "--config.image_size=8", "--config.total_steps=2", "--config.epochs=0",
  "--config.batch_size=8", "--config.batch_size_eval=64",
  "--config.eval_every=2", "--config.checkpoint_every=2",
  "--config.optim.warmup_steps=1",
)  # fmt: skip
# Fewer glyphs as well: most of the time of a run is their evaluation.
QUICKSTART = (
  "--config.image_size=24", "--config.batch_size_eval=360",
  "--config.data.train=train[:5%]", "--config.data.validation=train[95%:]",
  "--config.data.test=test[:10%]", "--config.upstream.split=test[:10%]",
  "--config.sweep.regime=('cls_masked','side_masked')",
  "--config.learning_rate=0.3",
)  # fmt: skip
# Flags that make a command small, for what matches it: each takes the place of
# the one of its name.
EXTRA_FLAGS = {
  r"(memory_vit train|studies\.\w+) (?!.*--report_only)": SMALL_RUN,
  # One rate and seed, and without a choice of their own two regimes.
  r"studies\.paper (?!.*--report_only)": (
    "--learning_rates=0.1", "--seeds=0", "--cells=5",
  ),
  r"studies\.paper (?!.*(--report_only|--regimes|--only=placement))": (
    "--regimes=cls_masked,memory_masked",
  ),
  r"studies\.vtab": ("--regimes=head,cls_masked",),
  # A part has an image for each device.
  r"accumulation_steps=8": (
    "--config.optim.accumulation_steps=2", "--config.batch_size=16",
  ),
  r"--config=pretrain": ("--config.backbone=random:Micro/2",),
  r"--config=digits\b(?!:backbone)": ("--config.backbone=tiny.npz",),
  # Its one step has no rate.
  r"--config=closed\b": (
    "--config.total_steps=1", "--config.optim.warmup_steps=0",
  ),
  r"--config=closed\b(.|\n)*backbone=glyphs": ("--config.image_size=24",),
  # One of the eight trials, and of the size that the glyphs are made for.
  r"--config=quickstart\b": QUICKSTART,
  r"--config=((tfds|pretrain):\w+|cifar100)\b(?!.*\.data\.dir=)": (
    "--config.data.dir=tensorflow_datasets",
  ),
  # Started, and nothing more: it takes a minute.
  r"^-m pytest": ("--collect-only", "-q", "-p", "no:cacheprovider"),
}  # fmt: skip

# Configurations whose commands are parsed, and not executed once more.
PARSED_ONLY = {
  "sun397.py": "tests/commands/test_configs.py does, on images made for it",
  "inaturalist2017.py": "the same",
  "places365.py": "the same",
  "glyphs.py": "docs/reference/results.md does",
  "small_study.py": "docs/reference/results.md does",
}

# What a page goes on with: the Python of another one.
CONTINUES = {"many_tasks.md": "README.md"}
# Names that a page leaves to its reader.
GIVEN = {
  "export.md": """
from pathlib import Path

import numpy as np

images = np.zeros((2, 8, 8, 3), np.float32)
files = [Path("a.jpg").read_bytes()]
""",
  "scale.md": """
import numpy as np

import memory_vit as mv

backbone = mv.load_backbone("tiny.npz")
birds = mv.load_task("runs/mine/tasks/birds", backbone)
images = np.zeros((8, 8, 8, 3), np.float32)
""",
}
# What Python must have made of it in the end, in the names of a page.
RESULTS = {
  "export.md": (
    "params.keys() == {'backbone', 'tasks'}",
    "all('head' in task for task in params['tasks'].values())",
  ),
  "data.md": (
    "result.tasks[0].test.examples == 297",
    "Path('runs/python/tasks/digits/task.json').is_file()",
  ),
  "scale.md": ("logits['birds'].sharding.spec[0] == 'data'",),
  "README.md": (
    "out['letters'].shape == (1, 26)",
    "out['glyphs-inverted'].shape == (1, 120)",
    "metrics['light'].examples == 200",
    "0 < result.accuracy <= 1",
  ),
  "kinds.md": (
    "halves.score > 0.5 and len(halves.task.spec.kind.thresholds) == 2",
    "predictions.values('light').shape == (2, 1)",
  ),
  "python.md": ("float(value) < 0.69", "len(result.trials) == 2"),
}
