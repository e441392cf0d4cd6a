"""Data sets that name code: none of it is run, unless somebody says so."""

import dataclasses
import json
import os
import subprocess
import sys
import types

import fake_data
import pytest
import quick
import tensorflow_datasets as tfds
from conftest import ROOT, random_task, tiny_backbone
from faults import Process

import memory_vit as mv
from configs import digits
from memory_vit import config as config_lib
from memory_vit.commands import console
from memory_vit.data import audit, datasets, tfds_trust
from memory_vit.errors import DataError
from memory_vit.train import inputs, run

EVIL = "bundle.evil.Evil"
# One that TFDS imports, but that is none of its features.
OTHER = "tensorflow_datasets.testing.test_utils.DummyDataset"
FEATURES_DICT = "tensorflow_datasets.core.features.features_dict.FeaturesDict"


def write_toy(root):
  """Five digits of one grey value each, as TFDS stores them."""
  features = tfds.features.FeaturesDict({
    "image": tfds.features.Image(shape=(8, 8, 3)),
    "label": tfds.features.ClassLabel(names=list("56789")),
  })  # fmt: skip
  return fake_data.write_adhoc(root, "toy", features, {"test": range(5)})


def change(file, edit):
  values = json.loads(file.read_text())
  edit(values)
  file.write_text(json.dumps(values))


def add_feature(feature):
  return lambda values: values["featuresDict"]["features"].update(id=feature)


def in_old_style(name):
  """A feature in JSON inside of JSON, as TFDS 4.0 stored it."""
  inner = json.dumps({"x": {"type": name, "content": {}}})
  return {"pythonClassName": FEATURES_DICT, "jsonFeature": {"json": inner}}


def nested(feature, depth):
  for _ in range(depth):
    feature = {
      "pythonClassName": FEATURES_DICT,
      "featuresDict": {"features": {"x": feature}},
    }
  return feature


@pytest.mark.fault("data-set-code")
@pytest.mark.parametrize(
  ("edit", "message"),
  [
    (add_feature({"pythonClassName": EVIL}), f"names '{EVIL}'"),
    (add_feature({"python_class_name": EVIL}), f"names '{EVIL}'"),
    (add_feature({"pythonClassName": OTHER}), f"names '{OTHER}'"),
    (add_feature({"pythonClassName": "this.X"}), "names 'this.X'"),
    (add_feature(nested({"pythonClassName": EVIL}, 5)), f"names '{EVIL}'"),
    (add_feature(nested({}, 30)), "deeper than 64"),
    (add_feature(in_old_style(EVIL)), f"names '{EVIL}'"),
    (add_feature({"jsonFeature": {"json": "[" * 99_999}}), "deeper than 64"),
    (lambda v: v.update(type=EVIL, content={}), f"names '{EVIL}'"),
    (lambda v: v.update(description="x" * 2**20), "more than 1 MiB"),
  ],
)
def test_features_that_name_code_are_refused(tmp_path, edit, message):
  """For the directory of a set, and for one that holds it."""
  folder = write_toy(tmp_path)
  good = datasets.open_split("toy", "test", str(tmp_path))
  assert datasets.open_split("toy", "test", str(folder)).size == good.size == 5
  change(folder / "features.json", edit)
  for name, directory in (
    ("toy", tmp_path), ("toy:1.0.0", tmp_path), ("toy", folder),
  ):  # fmt: skip
    for download in (True, False):
      with pytest.raises(DataError, match="features.json") as raised:
        datasets.open_split(name, "test", str(directory), download=download)
      assert message in str(raised.value)
      assert "\n" not in str(raised.value)


@pytest.mark.fault("data-set-code")
def test_code_named_in_dataset_info_is_refused(tmp_path):
  """TFDS prefers what dataset_info.json says of features, where it does."""
  folder = write_toy(tmp_path)
  features = json.loads((folder / "features.json").read_text())
  add_feature({"pythonClassName": EVIL})(features)
  info = folder / "dataset_info.json"
  change(info, lambda values: values.update(features=features))
  for directory in (tmp_path, folder):
    with pytest.raises(DataError, match=rf"dataset_info.json names '{EVIL}'"):
      datasets.open_split("toy", "test", str(directory))
  # It would have been imported.
  with pytest.raises(DataError, match="No module named 'bundle'|bundle.evil"):
    datasets.open_split("toy", "test", str(folder), trust_data_code=True)


def test_unreadable_features_json_is_refused(tmp_path):
  folder = write_toy(tmp_path)
  for content in (b"", b"{", b"\xff", b"[" * 99_999, b"1" * 9_999):
    (folder / "features.json").write_bytes(content)
    with pytest.raises(DataError, match="features.json cannot be read"):
      datasets.open_split("toy", "test", str(tmp_path))


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("huggingface:x", "has a namespace"),
    ("stranger:toy", "has a namespace"),
    ("toy/..", "expected NAME"),
    ("toy/data_dir=x", "expected NAME"),
    ("a b", "expected NAME"),
  ],
)
def test_names_of_code_or_directories_are_refused(tmp_path, name, message):
  with pytest.raises(DataError, match=message):
    datasets.open_split(name, "test", str(tmp_path))
  assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("task-names-data")
def test_nothing_is_downloaded_unless_allowed(tmp_path, monkeypatch):
  """Not even looked for: TFDS would ask its bucket about a known name."""

  def asked(*args, **kwargs):
    raise AssertionError("the net was asked")

  monkeypatch.setattr("socket.socket.connect", asked)
  for name in ("mnist", "cifar100:3.0.2", "no_such_set"):
    with pytest.raises(DataError, match="only downloaded if"):
      datasets.open_split(name, "test", str(tmp_path), download=False)
  assert list(tmp_path.iterdir()) == []


def test_features_of_tfds_are_its_own():
  own = tfds_trust.own_classes()
  assert FEATURES_DICT in own
  assert "tensorflow_datasets.core.features.feature.Tensor" in own  # of old
  assert all(name.startswith("tensorflow_datasets.core.") for name in own)


@pytest.mark.slow
@pytest.mark.parametrize("trusted", [True, False])
def test_trust_reaches_every_reader(
  tmp_path, monkeypatch, backbone_file, trusted
):
  values = digits.get_config()
  values.trust_data_code = trusted
  config = config_lib.from_dict(values.to_dict())
  asked = []

  def open_whole(ref):
    asked.append(ref.trust_code)
    raise DataError("seen")

  monkeypatch.setattr(datasets, "open_whole", open_whole)
  config = dataclasses.replace(config, backbone=str(backbone_file))
  readers = (
    lambda: run.train_and_evaluate(config, tmp_path / "run"),
    lambda: inputs.open_upstream(config, None),
    lambda: datasets.open_run_split(config, "train"),
    lambda: audit.audit_data(config),
  )
  for reader in readers:
    with pytest.raises(DataError, match="seen"):
      reader()
  assert asked == [trusted] * len(readers)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
  """What somebody unpacked: a signed task, "its" data, and a module."""
  root = tmp_path_factory.mktemp("unpacked")
  backbone = tiny_backbone(num_classes=5, depth=1)
  mv.save_backbone(backbone, root / "tiny.npz")
  folder = write_toy(root / "bundle" / "d")
  add = add_feature({"pythonClassName": EVIL})
  change(folder / "features.json", add)
  (root / "bundle" / "evil.py").write_text(
    f"open({str(root / 'PWNED')!r}, 'w').close()\n"
  )
  made = config_lib.to_dict(config_lib.from_dict(digits.get_config().to_dict()))
  made["data"] |= {"name": "toy", "dir": "bundle/d", "test": "test"}
  made["upstream"] |= {"name": "toy", "dir": "bundle/d", "split": "test"}
  task = random_task(backbone, "pets", classes=5, class_names=tuple("56789"))
  mv.save_task(
    dataclasses.replace(task, provenance={"config": made}),
    root / "bundle" / "pets",
  )
  return root


def evaluate(root, *flags, path=()):
  """The command as a process of its own, in the directory of the bundle."""
  code = (
    "import os, runpy, sys\n"
    f"os.chdir({str(root)!r})\n"
    # As `python -m` does, and PYTHONPATH.
    f"sys.path[:0] = [os.getcwd(), *{[str(p) for p in path]!r}]\n"
    "sys.argv.insert(1, 'evaluate')\n"
    "runpy.run_module('memory_vit', run_name='__main__',"
    " alter_sys=True)\n"
  )
  flags = ["--backbone=tiny.npz", "--task=bundle/pets", *flags]
  number = len(list(root.glob("*.log")))
  process = Process(code, flags, root / f"{number}.log")
  status = process.wait()
  ran = (root / "PWNED").exists()
  (root / "PWNED").unlink(missing_ok=True)
  return status, process.text.strip().splitlines()[-1], ran


@pytest.mark.fault("data-set-code")
@pytest.mark.processes
def test_evaluating_a_task_runs_no_code(bundle):
  """The whole chain: what is read, what is opened, what is imported."""
  flag = "--data_dir=pets=bundle/d"
  trust = "--trust_data_code"
  for flags, message in (
    ((), f"'pets' names 'toy' in 'bundle/d' (give {flag})"),
    (("--verify", flag), "give --data_dir=backbone=bundle/d"),
    ((flag,), f"names '{EVIL}'"),
    (("--data_root=.",), f"names '{EVIL}'"),
    (("--verify", "--data=digits:5-9", "--data_root=."), f"names '{EVIL}'"),
    # The current directory is not where modules come from.
    ((flag, trust), "TFDS cannot provide data set 'toy'"),
  ):
    # Where it could be imported, too, but for the last.
    path = [] if trust in flags else [bundle]
    status, said, ran = evaluate(bundle, *flags, path=path)
    assert (status, ran) == (2, False), said
    assert said.startswith("error: ")
    assert message in said
  status, said, ran = evaluate(bundle, flag, trust, path=[bundle])
  assert ran  # it would have worked


@pytest.mark.processes
def test_flag_of_trust_reaches_commands_with_a_configuration(bundle):
  """Beside it, that the configuration still finds those beside it."""
  code = (
    "import runpy, sys\n"
    "sys.argv.insert(1, 'check_data')\n"
    "runpy.run_module('memory_vit', run_name='__main__',"
    " alter_sys=True)\n"
  )
  flags = [
    "--config=configs/tfds.py:toy", f"--config.data.dir={bundle}/bundle/d",
    "--split=test",
  ]  # fmt: skip
  for more, message in (
    ([], f"names '{EVIL}'"),
    # It is looked for, and nowhere to be found.
    (["--trust_data_code"], "bundle.evil"),
  ):
    process = Process(code, [*flags, *more], bundle / f"check{len(more)}.log")
    assert process.wait() == 2, process.text
    said = process.text.strip().splitlines()[-1]
    assert said.startswith("error: ")
    assert message in said
    assert ("names" in said) != bool(more)


WATCH = """
import atexit, json, os, sys
def tell():
  module = sys.modules.get("memory_vit.images.image_files")
  found = [sys.path, getattr(module, "__file__", None)]
  open(os.environ["SEEN"], "w").write(json.dumps(found))
atexit.register(tell)
"""


@pytest.mark.fault("data-set-code")
@pytest.mark.processes
def test_a_checkout_finds_itself_without_the_current_directory(
  bundle, tmp_path
):
  """`python -m`, from a checkout: what is imported late comes from there."""
  (tmp_path / "site").mkdir()
  (tmp_path / "site" / "sitecustomize.py").write_text(WATCH)
  picture = tmp_path / "a.png"
  picture.write_bytes(fake_data.encode(fake_data.noise(0, 8, 8), "PNG"))
  task = f"--task={bundle}/bundle/pets"
  command = [
    sys.executable, "-m", "memory_vit", "predict",
    f"--backbone={bundle}/tiny.npz", task, str(picture),
  ]  # fmt: skip
  environment = {
    **os.environ, "XLA_FLAGS": quick.XLA_FLAGS, "SEEN": f"{tmp_path}/seen",
    "PYTHONPATH": str(tmp_path / "site"),
  }  # fmt: skip
  environment.pop("PYTHONSAFEPATH", None)
  done = subprocess.run(
    command, cwd=ROOT, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  found, image_files = json.loads((tmp_path / "seen").read_text())
  assert str(ROOT) not in found
  assert found[0] == str(tmp_path / "site")
  assert image_files == str(ROOT / "memory_vit/images/image_files.py")


def test_current_directory_is_removed_from_sys_path(monkeypatch):
  """One entry, and only where `python -m` of this package has put it."""
  here = os.getcwd()
  main = types.ModuleType("__main__")
  monkeypatch.setitem(sys.modules, "__main__", main)
  for name, path, left in (
    ("memory_vit.__main__", [here, "/x", here], ["/x", here]),  # PYTHONPATH
    ("memory_vit.main", ["", "/x"], ["/x"]),
    ("memory_vit.main", ["/x", here], ["/x", here]),
    ("pytest.__main__", [here, "/x"], [here, "/x"]),
    (None, [here, "/x"], [here, "/x"]),
  ):
    main.__spec__ = name and types.SimpleNamespace(name=name)
    monkeypatch.setattr(sys, "path", list(path))
    console._leave_current_directory.cache_clear()
    for _ in range(2):
      console._leave_current_directory()
    assert sys.path == left
