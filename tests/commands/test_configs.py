"""Every configuration runs two steps, offline, on pictures made here.

The fake data sets have the features and the classes of the real ones, since
they are written with the specification of the TFDS builder itself.
"""

import dataclasses
import importlib
import json
import sys
import types

import fake_data
import pytest
from conftest import ROOT, tiny_backbone

import memory_vit as mv
from memory_vit import config as config_lib
from memory_vit.commands import command_line, config_file
from memory_vit.data import batching, datasets, split_parts
from memory_vit.errors import ConfigError, MemoryVitError
from memory_vit.train import run, settle, sweep
from memory_vit.train.optim import warmup_steps
from studies.paper import paper_numbers
from studies.paper.study import Study

# Configuration -> TFDS name, classes, and labels of the splits as published.
PUBLISHED = {
  "sun397": (
    "sun397/tfds",
    397,
    {"train": range(16), "validation": [396, 3], "test": [5, 6, 7]},
  ),
  "inaturalist2017": (
    "i_naturalist2017",
    5089,
    {"train": range(100), "validation": [5088, 3, 4], "test": [-1, -1]},
  ),
  "cifar100": ("cifar100", 100, {"train": range(100), "test": [99, 6, 7]}),
  "places365": (
    "places365_small",
    365,
    {"train": range(100), "validation": [364, 3, 4], "test": [-1, -1]},
  ),
}


@pytest.fixture(scope="module")
def backbone_file(tmp_path_factory):
  """Patches and pictures of B/32, and hardly anything else of it."""
  path = tmp_path_factory.mktemp("backbone") / "b32.npz"
  backbone = tiny_backbone(patch_size=32, image_size=224, depth=1)
  mv.save_backbone(backbone, path)
  return path


def load(name, argument=None):
  get_config = importlib.import_module(f"configs.{name}").get_config
  values = get_config() if argument is None else get_config(argument)
  return config_lib.from_dict(values.to_dict())


def two_steps(config, backbone_file, workdir, **data):
  config = dataclasses.replace(
    config,
    optim=dataclasses.replace(
      config.optim, warmup_steps=min(2, config.optim.warmup_steps)
    ),
    backbone=str(backbone_file),
    batch_size=8,
    batch_size_eval=8,
    total_steps=2,
    epochs=0.0,
    data=dataclasses.replace(config.data, **data),
  )
  result = run.train_and_evaluate(config, workdir)
  assert result.tasks[0].steps == 2
  return result.tasks[0], config


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_have_the_set_up_of_the_paper(name):
  config = load(name)
  assert config.backbone == "i21k-B/32"
  assert config.image_size == 224
  assert (config.batch_size, config.total_steps) == (512, 20_000)
  assert config.task.cells == 5
  optim = config.optim
  assert (optim.name, optim.momentum, optim.grad_clip) == ("sgd", 0.9, 1.0)
  assert optim.schedule == "cosine"
  # As its public reproduction reports; others take vit_jax's 500 of 20,000.
  assert warmup_steps(optim, config.total_steps) == 5
  others = config_lib.OptimConfig()
  assert warmup_steps(others, config.total_steps) == 500
  crop = "small" if name == "cifar100" else "inception"
  assert config.data.train_crop == crop
  # It reports the best learning rate and names none.
  assert config.sweep == config_lib.SweepConfig(
    learning_rate=config_lib.LEARNING_RATES
  )
  # With what the result is compared stands where one reads first.
  paper = paper_numbers.table2(Study(config=config))
  numbers = [paper[key] for key in (5, "head", "full")]
  about = importlib.import_module(f"configs.{name}").__doc__
  for number in numbers:
    assert f"{100 * number:.1f} %" in about
  # And the study, which has rates of its own, is still possible.
  assert "table2" in Study(config=config).parts()


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_data_of_a_configuration_are_found(name, tmp_path):
  tfds_name, classes, labels = PUBLISHED[name]
  fake_data.write_tfds(tmp_path, tfds_name, labels)
  config = load(name)
  where = config.data
  assert where.name == tfds_name
  train, validation, test = (
    datasets.open_split(tfds_name, split, str(tmp_path))
    for split in (where.train, where.validation, where.test)
  )
  for source in (train, validation, test):
    assert source.num_classes == len(set(source.class_names)) == classes
  assert test.size == len(labels[where.test])
  # None is in both.
  assert validation.size > 0
  published = len(labels["train"]) + len(labels.get("validation", ()))
  assert train.size + validation.size <= published
  batches = batching.train_batches(
    train, where, image_size=config.image_size, batch_size=2, seed=0
  )
  assert next(batches)["image"].shape == (2, 224, 224, 3)


@pytest.mark.slow
# The others have the same code to go through, and other data.
@pytest.mark.parametrize(
  "name",
  [
    "sun397",
    pytest.param("inaturalist2017", marks=pytest.mark.slow),
    pytest.param("cifar100", marks=pytest.mark.slow),
    pytest.param("places365", marks=pytest.mark.slow),
  ],
)
def test_two_steps_on_fake_pictures(name, backbone_file, tmp_path):
  tfds_name, classes, labels = PUBLISHED[name]
  fake_data.write_tfds(tmp_path / "tfds", tfds_name, labels)
  config = load(name)
  task, config = two_steps(
    config, backbone_file, tmp_path / "run", dir=str(tmp_path / "tfds")
  )
  # The best of its sweep, under the name of the task.
  assert task.exported == f"tasks/{name}"
  assert task.test.examples == len(labels[config.data.test])
  manifest = json.loads(
    (tmp_path / "run" / "tasks" / name / "task.json").read_text()
  )
  assert manifest["spec"]["num_classes"] == classes
  assert len(set(manifest["spec"]["class_names"])) == classes


def test_a_folder_of_few_pictures_is_not_seen_hundreds_of_times():
  config = load("folder")
  guide = (ROOT / "docs" / "own_data.md").read_text()
  for pictures, steps in ((300, 106), (5_120, 1_800)):
    sizes = {"train": pictures}
    parts = split_parts.split_parts("folder", config.data.train, sizes)
    learned_from = split_parts.count_examples(parts, sizes)
    assert settle.with_steps(config, learned_from).total_steps == steps
    assert f"{steps:,}" in importlib.import_module("configs.folder").__doc__
    assert f"{steps:,}" in guide


@pytest.mark.slow
def test_two_steps_on_a_folder(backbone_file, tmp_path):
  files = [f"{i}.png" for i in range(8)]
  folders = {
    f"{s}/{c}": files for s in ("train", "test") for c in ("cat", "dog")
  }
  root = fake_data.write_folder(tmp_path / "my_pets", folders)
  task, _ = two_steps(
    load("folder"), backbone_file, tmp_path / "run", dir=str(root)
  )
  assert task.test.examples == 16


@pytest.mark.slow
def test_two_steps_on_any_tfds(backbone_file, tmp_path):
  labels = {"train": range(20), "test": [1, 2]}
  fake_data.write_tfds(tmp_path / "tfds", "cifar100", labels)
  config = load("tfds", "cifar100")
  task, _ = two_steps(
    config, backbone_file, tmp_path / "run", dir=str(tmp_path / "tfds")
  )
  assert task.name == "cifar100"


def test_pretraining_is_the_regime_full_from_random_weights():
  config = load("pretrain", "cifar10")
  assert (config.regime, config.backbone) == ("full", "random:Ti/16")
  assert (config.optim.name, config.optim.schedule) == ("adamw", "cosine")
  assert config.optim.warmup > 0
  assert config.optim.label_smoothing > 0


def test_image_size_is_that_of_the_backbone():
  """But for the paper's data sets, and backbones that are made first."""
  for name, argument in (
    ("folder", None), ("tfds", "x"), ("small_study", "x"), ("embeddings", None),
  ):  # fmt: skip
    assert load(name, argument).image_size == 0
  assert load("pretrain", "x").image_size == 64
  assert load("digits").image_size == 8
  assert load("quickstart").image_size == 24
  assert load("glyphs", "glyph_inverted").image_size == 24


@pytest.mark.parametrize("name", ["glyph_new100", "glyph_rotation"])
def test_the_test_bed_can_run_its_table(name):
  """All parts that it is for, on images that keep what they show."""
  config = load("glyphs", name)
  assert config.data.name == name
  assert not config.data.flip
  study = Study(config=config, cells=(5, 20))
  assert study.parts(["regimes"]) == ["regimes"]


def test_the_quickstart_compares_four_regimes():
  config = load("quickstart")
  regimes = [trial.config.regime for trial in sweep.trials_of(config, "glyphs")]
  assert regimes == [
    each
    for each in ("head", "cls_masked", "memory_masked", "side_masked")
    for _ in range(2)
  ]
  backbone = mv.load_backbone(config.backbone)
  assert backbone.config.image_size == config.image_size == 24


def test_digits_are_one_task_or_a_sweep_of_six():
  one, many = load("digits"), load("digits", "sweep")
  assert not one.sweep.is_on
  assert len(sweep.trials_of(many, "digits")) == 6
  # What the trials share is computed once, for every crop that there is.
  places = many.data.resize - many.image_size + 1
  assert (many.cache.what, many.cache.crops) == ("contexts", places**2)
  assert many.backbone == one.backbone
  made = load("digits", "backbone")
  assert (made.regime, made.task.name) == ("full", "low")
  assert one.backbone.endswith(f"/{made.task.name}.npz")
  assert many.data == one.data
  with pytest.raises(ConfigError, match="expected digits or .*digits:sweep"):
    load("digits", "swep")


@pytest.mark.parametrize(
  ("name", "argument", "kind", "names"),
  [
    ("digits", "labels", "labels", ("even", "above 4", "prime")),
    ("quickstart", "angle", "values", ("angle",)),
  ],
)
def test_tasks_of_labels_and_values(name, argument, kind, names):
  config = load(name, argument)
  assert config.task.kind == kind
  assert len(config.task.units) in (0, len(names))
  for role in ("train", "validation", "test"):
    split = datasets.open_run_split(config, role)
    assert (split.kind, split.class_names) == (kind, names)
  with pytest.raises(ConfigError, match=f"expected {name}"):
    load(name, "angel")


def test_tfds_without_a_name_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="config.data.name is empty"):
    run.train_and_evaluate(load("tfds"), tmp_path)


@pytest.mark.parametrize("name", ["", "mine"])
def test_folder_without_a_directory_is_refused(name, tmp_path):
  """Nothing would be read there, and a task would have its name from it."""
  config = load("folder")
  config = dataclasses.replace(
    config, task=dataclasses.replace(config.task, name=name)
  )
  with pytest.raises(ConfigError, match=r"config\.data\.dir is empty.*=DATA"):
    run.train_and_evaluate(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def parsed(*argv):
  """The configuration of a command line."""
  return command_line.CommandLine("", ["main", *argv]).parse()


def test_configuration_is_found_by_its_name(tmp_path, monkeypatch):
  """Outside of a checkout too, with an argument, and changed."""
  monkeypatch.chdir(ROOT)
  files = [
    f"--config={name}"
    for name in ("configs/sun397.py", "configs/tfds.py:cifar10")
  ]
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(ROOT)])
  names = ("--config=sun397", "--config=tfds:cifar10")
  found = [parsed(name, "--config.seed=3") for name in names]
  monkeypatch.chdir(ROOT)
  assert found == [parsed(file, "--config.seed=3") for file in files]


def test_given_learning_rate_replaces_the_sweep():
  """What the command line says wins over what a configuration sweeps."""
  one = parsed("--config=sun397", "--config.learning_rate=0.1")
  assert (one.learning_rate, one.sweep.is_on) == (0.1, False)
  sweep = parsed("--config=digits:sweep", "--config.task.cells=5")
  assert (sweep.sweep.cells, sweep.sweep.combinations) == ((), 3)
  message = "config.learning_rate.*config.sweep.learning_rate.*one of them"
  with pytest.raises(ConfigError, match=message):
    parsed("--config=sun397", "--config.learning_rate=0.1",
           "--config.sweep.learning_rate=(0.1, 0.3)")  # fmt: skip
  with pytest.raises(MemoryVitError, match=r"config\.sweep is for one run"):
    Study(
      config=parsed("--config=sun397", "--config.sweep.learning_rate=(0.1,0.2)")
    )


def test_file_wins_over_a_configuration_of_its_name(tmp_path, monkeypatch):
  """As before there were names."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "sun397").write_text(
    "from memory_vit.configs import base\n"
    "def get_config():\n  c = base.get_config()\n  c.seed = 9\n  return c\n"
  )
  assert parsed("--config=sun397").seed == 9


def test_unknown_configuration_name_is_refused():
  message = (
    "'sun398'.* FILE.py.*: cifar100, closed, .*quickstart.* sun397, tfds"
  )
  with pytest.raises(ConfigError, match=message) as error:
    parsed("--config=sun398")
  assert "base" not in str(error.value)
  assert "\n" not in str(error.value)


def test_configuration_for_a_checkout_gets_advice(tmp_path, monkeypatch):
  """It is told how to find ours from anywhere."""
  path = tmp_path / "mine.py"
  path.write_text("from configs import base\nget_config = base.get_config\n")
  for name in [n for n in sys.modules if n.partition(".")[0] == "configs"]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(
    sys, "path", [p for p in sys.path if p not in ("", str(ROOT))]
  )
  with pytest.raises(ConfigError, match="from memory_vit.configs import base"):
    parsed(f"--config={path}")
  path.write_text(
    "from memory_vit.configs import base\nget_config = base.get_config\n"
  )
  assert parsed(f"--config={path}") == config_lib.Config()


@pytest.fixture
def beside(tmp_path, monkeypatch):
  """A configuration that imports a file beside it, and one more at the end."""
  for name, rate in (("beside_a", 0.25), ("beside_b", 4)):
    (tmp_path / f"{name}.py").write_text(f"VALUE = {rate}\n")
    monkeypatch.delitem(sys.modules, name, raising=False)
  (tmp_path / "mine.py").write_text(
    "import beside_a\n"
    "from memory_vit.configs import base\n"
    "def get_config():\n"
    "  import beside_b\n"
    "  config = base.get_config()\n"
    "  config.learning_rate = beside_a.VALUE * beside_b.VALUE * 3\n"
    "  return config\n"
  )
  yield tmp_path / "mine.py"
  for name in ("beside_a", "beside_b"):
    sys.modules.pop(name, None)


def test_configuration_imports_modules_beside_it(beside, monkeypatch):
  """From elsewhere, and started by whatever: here by pytest."""
  before = [*sys.path]
  assert parsed(f"--config={beside}").learning_rate == 3.0
  assert sys.path == before
  monkeypatch.chdir(beside.parent)
  for name in ("beside_a", "beside_b"):
    del sys.modules[name]
  assert parsed("--config=mine.py").learning_rate == 3.0


def test_failing_configuration_leaves_sys_path_unchanged(tmp_path):
  (tmp_path / "mine.py").write_text("import sys\nsys.path.pop(0)\n1 / 0\n")
  before = [*sys.path]
  with pytest.raises(ConfigError, match="ZeroDivisionError"):
    parsed(f"--config={tmp_path / 'mine.py'}")
  assert sys.path == before


def test_safe_path_imports_nothing_beside_a_configuration(beside, monkeypatch):
  flags = types.SimpleNamespace(safe_path=True)
  safe = types.SimpleNamespace(flags=flags, path=sys.path)
  monkeypatch.setattr(config_file, "sys", safe)
  with pytest.raises(ConfigError, match="No module named 'beside_a'"):
    parsed(f"--config={beside}")
