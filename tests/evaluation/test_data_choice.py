"""Which data are opened: the command line says it, and a task never does."""

import dataclasses
import os

import pytest
from conftest import random_task

from memory_vit.data.split_ref import SplitRef
from memory_vit.errors import ConfigError, TaskError
from memory_vit.evaluation import task_data
from memory_vit.evaluation.task_data import Given
from memory_vit.kinds import TaskKind
from memory_vit.tasks.manifest import Manifest


def said(backbone, task="pets", upstream=None, **options):
  """What a task says of itself, as it was read from its `task.json`."""
  config = {
    "data": {"name": "", "dir": "", "test": "test", "validation": "", **options}
  }
  if upstream:
    config["upstream"] = {"eval_crop": "resize", "resize": 0, **upstream}
  spec = random_task(backbone, task).spec
  return Manifest(spec=spec, arrays={}, provenance={"config": config})


def choose(*tasks, data=None, dirs=None, splits=None, roots=(), verify=False):
  given = Given(data or {}, dirs or {}, splits or {}, tuple(roots))
  return task_data.choose(tasks, given, upstream=verify)


def refusal(*tasks, **given):
  with pytest.raises(TaskError) as raised:
    choose(*tasks, **given)
  message = str(raised.value)
  assert "\n" not in message
  assert len(message) < 2000
  return message


@pytest.mark.fault("task-names-data")
@pytest.mark.parametrize(
  ("name", "directory", "hint"),
  [
    ("toy", "/data/x", "'toy' in '/data/x' (give --data_dir=pets=/data/x)"),
    ("toy", "gs://evil/x", "give --data_dir=pets=gs://evil/x"),
    ("toy", "~nouser/x", "give --data_dir=pets=~nouser/x"),
    ("toy", "a; rm -rf b\n\u202e", r"in 'a; rm -rf b\n\u202e' (give --data_dir"
     "=pets=DIR)"),
    ("toy", "x" * 5000, "x...' (give --data_dir=pets=DIR)"),
    ("mnist", "", "(give --data=pets=mnist, which TFDS may download, or "
     "--data_dir=pets=DIR)"),
    ("folder", "", "(give --data_dir=pets=DIR)"),
    ("list", "", "(give --data_dir=pets=DIR)"),
    ("", "", "'pets' names no data set (give --data=pets=NAME"),
    (3, None, "'pets' names no data set"),
    ("stranger:code", "", "'stranger:code' (give --data=pets=NAME"),
    ("../digits", "", "'../digits' (give --data=pets=NAME"),
    ("toy/..", "", "'toy/..' (give --data=pets=NAME"),
    ("toy/a,data_dir=/x", "", "(give --data=pets=NAME"),
    ("digits/a/download=True", "", "(give --data=pets=NAME"),
    ("glyphs:another", "", "(give --data=pets=NAME"),
  ],
)  # fmt: skip
def test_data_named_by_a_task_are_only_a_hint(
  backbone, tmp_path, name, directory, hint
):
  """What it says is a hint, whatever it is; with a root elsewhere as well."""
  task = said(backbone, name=name, dir=directory)
  assert hint in refusal(task)
  assert hint in refusal(task, roots=[str(tmp_path)])
  upstream = {"name": name, "dir": directory, "split": "test"}
  task = said(backbone, name="digits", upstream=upstream)
  if type(name) is str and name:
    assert "'backbone' names" in refusal(task, verify=True)


def test_all_that_lack_data_are_named_at_once(backbone):
  tasks = [said(backbone, n, name=f"set_{n}", dir="/d") for n in ("a", "b")]
  message = refusal(*tasks, said(backbone, "c", name="digits"))
  assert "'a' names 'set_a'" in message
  assert "'b' names 'set_b'" in message
  assert "'c'" not in message
  many = [said(backbone, f"t{i}", name="toy", dir="/d") for i in range(30)]
  assert "and 10 more" in refusal(*many)


def test_command_line_overrides_the_data_of_a_task(backbone):
  digits = said(backbone, name="digits:0-4")
  toy = said(backbone, name="toy", dir="/theirs")
  found, own = choose(digits)
  assert (found["pets"], own) == (
    SplitRef("digits:0-4", "", "test", download=False),
    None,
  )
  # The name of a task, in the directory of the user: nothing is downloaded.
  for dirs in ({"": "/mine"}, {"pets": "/mine", "": "/other"}):
    found, _ = choose(toy, dirs=dirs)
    assert found["pets"] == SplitRef("toy", "/mine", "test", download=False)
  found, _ = choose(toy, data={"pets": "mnist"}, splits={"": "train[:5]"})
  assert found["pets"] == SplitRef("mnist", "", "train[:5]", download=True)
  found, _ = choose(toy, data={"": "mnist"}, splits={"pets": "a", "": "b"})
  assert found["pets"] == SplitRef("mnist", "", "a", download=True)
  for name in ("folder", "list"):
    assert "--data_dir=pets" in refusal(digits, data={"pets": name})
  silent = dataclasses.replace(digits, provenance={})
  assert "--split=pets=SPLIT" in refusal(silent, data={"": "mnist"})
  found, _ = choose(silent, data={"": "mnist"}, splits={"": "test"})
  assert found["pets"].name == "mnist"


def test_label_of_the_task_is_used_on_its_own_data(backbone):
  task = said(backbone, name="clevr", label="clevr_count", test="test")
  found, _ = choose(task, dirs={"": "/d"})
  assert found["pets"] == SplitRef(
    "clevr", "/d", "test", download=False, label="clevr_count"
  )
  found, _ = choose(task, data={"": "clevr"})
  assert found["pets"].label == "clevr_count"
  found, _ = choose(task, data={"": "mnist"})
  assert found["pets"].label == ""
  nonsense = said(backbone, name="clevr", label=["x"], test="test")
  assert choose(nonsense, dirs={"": "/d"})[0]["pets"].label == ""


def test_kind_of_the_task_is_used(backbone):
  """Whatever data are named; the original outputs are of classes."""
  task = said(backbone, name="digits", upstream={"name": "toy", "dir": "/d"})
  spec = dataclasses.replace(task.spec, kind=TaskKind(name="labels"))
  task = dataclasses.replace(task, spec=spec)
  assert choose(task)[0]["pets"].kind == "labels"
  assert choose(task, data={"": "mnist"})[0]["pets"].kind == "labels"
  _, own = choose(task, dirs={"backbone": "/d"}, verify=True)
  assert own.ref.kind == "classes"


def test_data_of_the_backbone_are_chosen(backbone):
  theirs = {"name": "toy", "dir": "/d", "split": "s", "resize": 9}
  task = said(backbone, name="digits", upstream=theirs)
  assert "--data=backbone= leaves it out" in refusal(task, verify=True)
  assert choose(task)[1] is None  # not asked for
  assert choose(task, data={"backbone": ""}, verify=True)[1] is None
  own = choose(task, dirs={"backbone": "/mine"}, verify=True)[1]
  assert own.ref == SplitRef("toy", "/mine", "s", download=False)
  assert (own.eval_crop, own.resize) == ("resize", 9)
  own = choose(
    task, data={"backbone": "mnist"}, splits={"backbone": "t", "": "x"},
    verify=True,
  )[1]  # fmt: skip
  assert own.ref == SplitRef("mnist", "", "t", download=True)
  plain = said(backbone, name="digits")
  assert choose(plain, verify=True)[1] is None
  own = choose(plain, data={"backbone": "mnist"}, verify=True)[1]
  assert own.ref == SplitRef("mnist", "", "test", download=True)


@pytest.mark.fault("task-names-data")
def test_links_do_not_lead_out_of_data_roots(backbone, tmp_path):
  root, outside = tmp_path / "root", tmp_path / "root-and-more"
  for path in (root / "in", outside):
    path.mkdir(parents=True)
  (root / "out").symlink_to(outside)
  (tmp_path / "to-in").symlink_to(root / "in")
  good = [root, root / "in", root / "in/../in", tmp_path / "to-in"]
  for directory in good:
    task = said(backbone, name="toy", dir=str(directory))
    found, _ = choose(task, roots=[str(tmp_path / "root-and-more"), str(root)])
    resolved = os.path.realpath(directory)
    assert found["pets"] == SplitRef("toy", resolved, "test", download=False)
  bad = [outside, root / "out", root / "..", root / "in/../..", "in", "a\0b"]
  for directory in bad:
    refusal(said(backbone, name="toy", dir=str(directory)), roots=[str(root)])
  with pytest.raises(ConfigError, match="no such directory"):
    choose(said(backbone, name="digits"), roots=[str(tmp_path / "none")])


def test_option_is_given_for_all_tasks_or_for_one():
  def parse(*texts, owners=("low", "high"), original="--verify"):
    return task_data.parse("--data_dir", texts, owners, original)

  assert parse("/a", "low=/b=c", "high=") == {
    "": "/a",
    "low": "/b=c",
    "high": "",
  }
  assert parse("/x/a=b") == {"": "/x/a=b"}
  for texts, message in (
    (["lwo=/a"], r"no task 'lwo'; expected one of \['high', 'low'\]"),
    (["/a", "/b"], "given twice: '/a', '/b'"),
    (["backbone=/a"], "has an effect only with --verify"),
  ):
    with pytest.raises(ConfigError, match=message):
      parse(*texts)
  # A command without that option gives no advice of it.
  with pytest.raises(ConfigError, match="no task 'backbone'; expected one of"):
    parse("backbone=/a", original="")
  owners = ("low", "backbone")
  assert parse("backbone=/a", owners=owners) == {"backbone": "/a"}
