"""Bad values of every option and flag: one line, status 2, nothing begun."""

import contextlib
import importlib
import json
import os
import random
import re
import subprocess
import sys

import pytest
import quick
from conftest import ROOT, random_task, tiny_backbone
from faults import MAIN, Process, Run
from marks import NIGHTLY
from PIL import Image

import memory_vit as mv
from memory_vit.__main__ import COMMANDS
from memory_vit.backbones.download import local_file
from memory_vit.commands import (
  check_data,
  console,
  evaluate,
  inspect,
  option_help,
  predict,
  train,
)
from memory_vit.config import (
  CLOSED_FORMS,
  OPTIONS,
  Config,
  from_dict,
  to_dict,
)
from memory_vit.errors import BackboneError, ConfigError, TrainingError
from memory_vit.run_result import read_result
from memory_vit.runtime import files, paths
from memory_vit.runtime.lock import only_run
from memory_vit.runtime.options import (
  Changes,
  Choice,
  Items,
  Number,
  Switch,
  Text,
)
from memory_vit.train import run as training_run
from memory_vit.train.checkpoints import Checkpoints

CONFIG = f"--config={ROOT / 'configs' / 'digits.py'}"

HUGE = 10**30
# Text that a terminal obeys, or shows elsewhere than it stands.
ODD = ("a\x07b", "a\nerror: b", "a\x1b[2Jb", "a\u2028b", "\u202eb", "\udcff")


@pytest.fixture
def begun(monkeypatch):
  """The runs that were begun: their configurations."""
  found = []

  def begin(config, *args, **options):
    """Up to where a run would read or write anything beside its lock."""
    with monkeypatch.context() as patched:
      patched.setattr(training_run.results, "tidy", _end)
      with contextlib.suppress(BegunError):
        real(config, *args, **options)
      found.append(config)

  real = training_run.train_and_evaluate
  monkeypatch.setattr(training_run, "train_and_evaluate", begin)
  monkeypatch.chdir(ROOT)
  return found


class BegunError(Exception):
  """Nothing is wrong with a command."""


def _end(workdir):
  raise BegunError


def start_training(argv):
  """The command that trains, see `begun`."""
  arguments = train.parse(["main", *argv])
  training_run.train_and_evaluate(
    arguments.config,
    arguments.workdir,
    None,
    allow_changed_data=arguments.allow_changed_data,
  )
  return 0


def refusal(capsys, command, argv):
  """Return the fault of a refusal; "" if the command refuses in one line."""
  status = console.run_command(lambda: command(argv))
  out, err = capsys.readouterr()
  if status != 2:
    return f"status {status}"
  if out or len(err.splitlines()) != 1 or not err.startswith("error: "):
    return f"{out!r} {err[:300]!r}"
  fits = len(err) <= 2_000 and err[:-1].isprintable()
  return "" if fits else f"{err[:300]!r}"


def bad_values(key):
  """Values that an option cannot have, as they are typed."""
  rule, kind = OPTIONS[key].rule, OPTIONS[key].kind
  if isinstance(rule, Switch):
    return ["maybe", "", "2", "nan", "None", str(HUGE), *ODD]
  if isinstance(rule, Choice):
    name = next(filter(None, rule.names))
    empty = [] if "" in rule.names else [""]
    spelled = [name.upper() + "X", f"{name} ", name * 9_999]
    return [*empty, "nope", *spelled, "é", *ODD]
  if isinstance(rule, Text):
    longer = "a" * (rule.most + 1)
    empty = [] if rule.accepts("") else [""]
    named = [] if rule.accepts("a b") else ["a b", "é é", "../../x y", "a;b"]
    return [longer, "\x00", *empty, *named, *ODD]
  if isinstance(rule, Number):
    if kind == "int":
      below, above = int(rule.least) - 1, int(rule.most) + 1
      some = [below, above, 2**63, HUGE, -HUGE, "1.5", "1e3"]
    else:
      below = rule.least if rule.positive else rule.least - 1e-3
      above = rule.most if rule.below else rule.most * 1.001
      some = [below, above, 2.0**63, HUGE, "inf", "-inf", "1e400", "1,5"]
    return [*map(str, some), "nan", "", "abc", "None", "9" * 5_000, *ODD]
  assert isinstance(rule, Items)
  some = ["", "(", "(None,)", "((),)", "[[[[", "(" * 500]
  if isinstance(rule.rule, Number):
    low, high = rule.rule.least - 1, rule.rule.most + 1
    some += [f"({v},)" for v in (low, high, HUGE, "'a'", "1e400", "1, 'b'")]
    some += ["({},)"]
  elif isinstance(rule.rule, Changes):
    some += ["(3,)", "('',)", "({3: 4},)", "('a b',)", "({'name': 3},)",
             "({'seed': -1},)", "({'nope': 1},)"]  # fmt: skip
  else:
    some += ["('',)", "(3,)", repr(("a" * 4_001,)), repr(("a\nb",))]
  return [*some, repr((0.5,) * (rule.most + 1)), *ODD[2:]]


def some_of(key, most):
  """Some of them, always the same."""
  values = list(dict.fromkeys(bad_values(key)))
  return random.Random(key).sample(values, min(most, len(values)))


@pytest.mark.fault("bad-option")
def test_every_option_has_a_meaning_and_bounds():
  assert len(OPTIONS) > 60
  meanings = option_help.meanings()
  for key, option in OPTIONS.items():
    assert len(meanings[key]) > 5, f"{key} has no comment in config.py"
    rule = option.rule
    rule = rule.rule if isinstance(rule, Items) else rule
    assert rule.expected, key
    if isinstance(option.default, bool):
      assert isinstance(rule, Switch), key
    elif isinstance(option.default, int | float):
      assert isinstance(rule, Number), key
      assert -1 <= rule.least < rule.most < 2**53, key
      assert rule.why, key


# Of each option; all of them in the slow group.
SOME = 7


@pytest.mark.fault("bad-option")
@pytest.mark.parametrize("most", [SOME, pytest.param(99, marks=NIGHTLY)])
@pytest.mark.parametrize("part", ["", *option_help.sections()])
def test_bad_values_of_every_option(part, most, begun, capsys, tmp_path):
  """Refuse at least five bad values of each option."""
  wrong = {}
  keys = [key for key in OPTIONS if key.rpartition(".")[0] == part]
  for key in keys:
    for value in some_of(key, most):
      argv = [CONFIG, f"--workdir={tmp_path / 'run'}"]
      problem = refusal(
        capsys, start_training, [*argv, f"--config.{key}={value}"]
      )
      if problem:
        wrong[f"{key}={value[:40]!r}"] = problem
  assert not wrong, json.dumps(wrong, indent=1)
  assert not begun
  assert not (tmp_path / "run").exists()


def test_campaign_has_enough_bad_values():
  """Of the cases above; those of flags come on top."""
  counts = [len(some_of(key, SOME)) for key in OPTIONS]
  assert min(counts) >= 5
  assert sum(counts) >= 407


def legal_values(key):
  """Values at the edges of what an option may have."""
  rule = OPTIONS[key].rule
  items = isinstance(rule, Items)
  rule = rule.rule if items else rule
  if isinstance(rule, Switch):
    found = [True, False]
  elif isinstance(rule, Choice):
    found = list(rule.names)
  elif isinstance(rule, Number):
    kind = float if "float" in OPTIONS[key].kind else int
    edge = 1e-6 if kind is float else 1
    least = rule.least + (1e-6 if rule.positive else 0)
    most = rule.most - (edge if rule.below else 0)
    found = [kind(least), kind(most)]
  elif isinstance(rule, Text):
    found = ["a", "a" * rule.most]
  else:
    found = [{"optim.momentum": 0.5}]
  return [(value,) for value in found] + [()] if items else found


# What has to be so beside it.
BESIDE = {
  "optim.weight_decay": {"optim.name": "adamw"},
  "optim.accumulation_steps": {"batch_size": 2**20},
  "cache.dir": {"cache.where": "disk"},
  "task.units": {"task.kind": "values"},
}
# The same, for a value.
SQUEEZED = {"data.train_crop": "resize", "data.flip": False}
BESIDE_VALUE = {
  ("cache.what", "contexts"): SQUEEZED,
  ("cache.what", "features"): {**SQUEEZED, "regime": "head"},
  ("task.loss", "huber"): {"task.kind": "values"},
  **{
    ("optim.name", name): {
      **SQUEEZED,
      "regime": "head",
      "cache.what": "features",
      "total_steps": 1,
    }
    for name in CLOSED_FORMS
  },
}


def changed(values):
  tree = to_dict(Config())
  for key, value in values.items():
    *path, last = key.split(".")
    part = tree
    for name in path:
      part = part[name]
    part[last] = value
  return from_dict(tree)


@pytest.mark.parametrize("part", ["", *option_help.sections()])
def test_legal_values_are_accepted(part):
  keys = [key for key in OPTIONS if key.rpartition(".")[0] == part]
  for key in keys:
    for value in legal_values(key):
      beside = {"total_steps": 2**31 - 1, **BESIDE.get(key, {})}
      beside |= BESIDE_VALUE.get((key, str(value)), {})
      made = changed({**beside, key: value})
      assert from_dict(to_dict(made)) == made


def test_usable_command_line_starts_a_run(begun, tmp_path):
  assert start_training([CONFIG, f"--workdir={tmp_path / 'a' / 'b'}"]) == 0
  argv = [CONFIG, f"--workdir={tmp_path}", "--config.task.name=x-1"]
  argv += ["--config.sweep.cells=(1, 2)", "--noconfig.task.memory_norm"]
  assert start_training(argv) == 0
  assert [made.task.name for made in begun] == ["", "x-1"]
  assert begun[1].sweep.cells == (1, 2)
  assert not begun[1].task.memory_norm


def of_files(tmp_path):
  """Files that are no configurations, and something of what is said."""
  files = {
    "empty": ("", "has no attribute 'get_config'"),
    "words": ("this is no Python", "line 1: SyntaxError"),
    "binary": ("\x00\x01", "SyntaxError"),
    "late": ("x = 1\n\nx()\n", "line 3: TypeError"),
    "inner": ("def get_config():\n  return {}['a']\n", "line 2: KeyError"),
    "odd": ("def get_config():\n  raise OSError('a\\nb\\x1b\\u2028c')\n",
            r"OSError: a b\x1b c"),
    "long": ("def get_config():\n  raise ValueError('a' * 9999)\n", "aaa..."),
    "other": ("def get_config():\n  return {'seed': 3}\n", "returned {'seed'"),
    "none": ("def get_config():\n  pass\n", "returned None, expected"),
    "more": ("from configs import base\ndef get_config():\n  c = base."
             "get_config()\n  c.unlock()\n  c.lr = 3\n  return c\n",
             "unknown keys ['lr']"),
    "big": ("from configs import base\ndef get_config():\n  c = base."
            "get_config()\n  c.learning_rate = 10**400\n  return c\n",
            "int too large to convert to float"),
  }  # fmt: skip
  for name, (text, said) in files.items():
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    yield f"--config={path}", said


@pytest.mark.fault("bad-config-file")
def test_unusable_configuration_files_are_refused(begun, capsys, tmp_path):
  cases = [
    *of_files(tmp_path),
    (f"--config={tmp_path}", "there is no such file"),
    ("--config=absent.py", "there is no such file"),
    ("--config=", "the text is empty"),
    ("--config=~nouser/x.py", "not a local path"),
    (f"--config={'a' * 300}.py", "too long"),
    ("--config=/dev/null", "there is no such file"),
    (
      f"{CONFIG}:foo",
      "digits:foo is unknown, expected digits or",
    ),
    ("--seed=3", "Unknown command line flag 'seed'"),
    ("--flagfile=/nope", "No such file"),
  ]
  for flag, said in cases:
    argv = [flag, f"--workdir={tmp_path / 'run'}"]
    assert console.run_command(lambda: start_training(argv)) == 2  # noqa: B023
    err = capsys.readouterr().err
    assert said in err, flag
    assert err.startswith("error: "), err
    assert len(err.splitlines()) == 1, err
    assert len(err) <= 2_000, err
  assert not begun


@pytest.mark.fault("bad-workdir")
def test_unusable_working_directories_are_refused(begun, capsys, tmp_path):
  (tmp_path / "file").write_text("")
  (tmp_path / "loop").symlink_to("loop")
  for workdir in (
    "", "~nouser/x", "/dev/null/x", "/proc/x", "/sys/x", "gs://x/y", "a" * 300,
    "/tmp/" + "a/" * 3_000, f"{tmp_path}/" + "a/" * 1_500,
    tmp_path / "file", tmp_path / "file" / "x",
    tmp_path / "loop", *(f"{tmp_path}/\x00{odd}" for odd in ODD),
  ):  # fmt: skip
    argv = [CONFIG, f"--workdir={workdir}"]
    assert not refusal(capsys, start_training, argv), workdir
  assert not begun


@pytest.mark.fault("bad-workdir")
@pytest.mark.parametrize(
  ("where", "split"),
  [
    ("train", "train"), ("train/cat", "train"), ("test/x/y", "train"),
    ("train/cat", "test"),  # the classes are those of train nevertheless
  ],
)  # fmt: skip
def test_a_working_directory_among_the_images_is_refused(
  begun, capsys, tmp_path, where, split
):
  """Its pictures would be images of a class, its folders classes."""
  for folder in ("train/cat", "test/cat"):
    (tmp_path / folder).mkdir(parents=True)
  argv = [
    "--config=folder", f"--config.data.dir={tmp_path}",
    f"--config.data.train={split}[:90%]",
    f"--config.data.validation={split}[90%:]",
  ]  # fmt: skip
  workdir = f"--workdir={tmp_path / where}"
  assert not refusal(capsys, start_training, [*argv, workdir])
  assert not [*tmp_path.rglob(".lock")]
  assert not begun
  assert start_training([*argv, f"--workdir={tmp_path / 'run'}"]) == 0


BAD_FLAGS = (
  "--allow_changed_data=seed", "--allow_changed_data=\u202e",
  "--allow_changed_data=" + "a" * 9_999, "positional", "--nope", "--nope=1",
  "--num_processes=0", f"--num_processes={HUGE}", "--num_processes=x",
  "--process_id=-1", f"--process_id={HUGE}", "--initialization_timeout=0",
  f"--initialization_timeout={HUGE}", "--heartbeat_timeout=nan",
  f"--heartbeat_timeout={HUGE}", "--distributed=maybe", "--config.",
  "--config.=1", "--config.data.=1", "--config.epoch5=5", "--config.data=3",
  "--config.sweep.overrides[3]=4", "--config.task.cells.x=3", "--noconfig.seed",
)  # fmt: skip


@pytest.mark.fault("bad-option")
def test_bad_flags_are_refused(begun, capsys, tmp_path):
  for flag in BAD_FLAGS:
    argv = [CONFIG, f"--workdir={tmp_path / 'run'}", flag]
    assert not refusal(capsys, start_training, argv), flag
  for argv in ([], [CONFIG], [f"--workdir={tmp_path}"], ["--config"]):
    assert not refusal(capsys, start_training, argv), argv
  assert not begun


@pytest.mark.fault("bad-option", "bad-workdir")
def test_bad_flags_of_the_other_commands_are_refused(
  capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(ROOT)
  numbers = ("0", "-1", "nan", "inf", str(HUGE), "x", "", "1.5", "\u2028")
  both = ["--backbone=absent.npz", f"--task={tmp_path}"]
  cases = [(evaluate, [*both, f"--{name}={v}"]) for v in numbers
           for name in ("batch_size", "fsdp")]  # fmt: skip
  cases += [(evaluate, [*both, f"--max_bad={v}"]) for v in numbers[1:]]
  cases += [(evaluate, [*both, f"--stall_timeout={v}"])
            for v in ("nan", "inf", "-1", "1e10", "x", "")]  # fmt: skip
  cases += [(predict, [*both, "x.png", f"--{name}={v}"]) for v in numbers
            for name in ("batch_size", "top")]  # fmt: skip
  cases += [(evaluate, [*both, f"--json={v}"]) for v in (
    tmp_path, "/dev/full", "/dev/null", "/proc/x", "/nope/x", "", "~nouser/x",
    "a" * 300, "a\x00b",
  )]  # fmt: skip
  strange = ([], ["--nope"], ["--dtype=x"], ["a", "--x\u202e"])
  cases += [(command, argv) for command in (evaluate, predict, inspect)
            for argv in strange]  # fmt: skip
  cases += [(inspect, [v]) for v in (
    "~nouser/x", "a" * 300, "", "\x00", "http://[::1", "absent", "/dev/null",
    "a\nb",
  )]  # fmt: skip
  cases += [(evaluate, ["--backbone=x", f"--task={v}"])
            for v in ("~nouser/x", "a" * 300, "", "\x00", "a\nb")]  # fmt: skip
  for command, argv in cases:
    assert not refusal(capsys, command.main, argv), (command.__name__, argv)
  for flag in ("--split=", "--split=\u202e", "--json=/dev/full", "x", "--nope"):
    parse = lambda argv: check_data.parse(["check_data", CONFIG, *argv])  # noqa: E731
    assert not refusal(capsys, parse, [flag]), flag


@pytest.mark.fault("bad-option")
@pytest.mark.parametrize("name", COMMANDS[2:])
def test_two_dashes_are_refused_as_a_value(name, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  command = importlib.import_module(f"memory_vit.commands.{name}")
  actions = command._parser()._actions
  options = [
    a.option_strings[-1] for a in actions if a.option_strings and a.nargs != 0
  ]
  words = {"convert": ["x", "y.npz"], "inspect": ["x"], "list": ["--all"],
           "push": ["x", "o/n"]}.get(name, [])  # fmt: skip
  needed = ["--backbone=x", "--task=x", "--format=onnx", "--out=x",
            "--input=x", "--output=x"]  # fmt: skip
  for option in options:
    others = [n for n in needed if n.partition("=")[0] in options]
    others = [n for n in others if not n.startswith(option)]
    assert not refusal(
      capsys, command.main, [*words, *others, f"{option}=--"]
    ), option
    assert not refusal(capsys, command.main, [*words, *others, option, "--"]), (
      option
    )
  assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
  ("name", "argv", "said"),
  [
    ("inspect", ["--", "-x.npz"], "-x.npz is not there"),
    ("list", ["--", "-owner/-x"], "'-owner/-x'"),
    ("push", ["--message=m", "--", "-x", "owner/name"], "-x"),
    ("convert", ["--format=npz", "--", "-x", "-y.npz"], "no file '-x'"),
    ("convert", ["-x", "--", "-y.npz"], "unrecognized arguments: -x"),
  ],
)
def test_after_two_dashes_nothing_is_an_option(name, argv, said, capsys):
  command = importlib.import_module(f"memory_vit.commands.{name}")
  assert command.main(argv) == 2
  assert said in capsys.readouterr().err


def test_an_unknown_option_names_the_nearest(capsys, tmp_path):
  for given, nearest in {
    "data.trian": "data.train", "optim.momentun": "optim.momentum",
    "batchsize": "batch_size", "cells": "task.cells", "memory_std":
    "task.memory_std", "total_step": "total_steps",
  }.items():  # fmt: skip
    argv = [CONFIG, f"--workdir={tmp_path}", f"--config.{given}=5"]
    console.run_command(lambda: start_training(argv))  # noqa: B023
    err = capsys.readouterr().err
    assert err.startswith(f"error: config has no option {given!r}; nearest: ")
    assert f" config.{nearest}" in err
    assert err.endswith("; --help lists all options.\n")


def test_a_wrong_type_names_the_right_one(capsys, tmp_path):
  for flag, said in {
    "batch_size=abc": "expected int: at least 1 and at most 1,048,576",
    "learning_rate=x": "expected float: a positive number up to 1,000,000",
    "data.flip=maybe": "expected bool: true or false",
    "sweep.cells=(1.5,)": "expected a value of type int",
    "task.attends_to=(3,)": "expected a value of type str",
  }.items():
    argv = [CONFIG, f"--workdir={tmp_path}", f"--config.{flag}"]
    console.run_command(lambda: start_training(argv))  # noqa: B023
    assert said in capsys.readouterr().err, flag


@pytest.mark.parametrize("command", [train, check_data])
def test_help_says_all_of_every_option(command, capsys):
  with pytest.raises(SystemExit) as end:
    command.parse(["x", "--help"])
  assert end.value.code == 0
  text = capsys.readouterr().out
  joined = " ".join(text.split())
  for key, option in OPTIONS.items():
    assert f"--config.{key}={option.default!r}" in text
    assert option_help.meanings()[key] in joined
    expected = " ".join(option.rule.expected.split())
    assert f"{option.kind}: {expected}." in joined
  for name in re.findall(r"^  --(\w+)", text, re.M):
    assert re.search(rf"^  --{name}.*\n      \S", text, re.M), name


def test_a_batch_that_no_host_can_hold_is_refused(begun, capsys, tmp_path):
  for key in ("batch_size", "batch_size_eval"):
    argv = [CONFIG, f"--workdir={tmp_path / 'run'}", f"--config.{key}={2**20}"]
    argv += ["--config.image_size=2048"]
    assert not refusal(capsys, start_training, argv), key
  assert not begun


def test_unusable_parent_is_refused_before_the_backbone_is_loaded(
  begun, capsys, tmp_path
):
  for key in ("attends_to", "indirect"):
    for path in (tmp_path, "absent", "~nouser/x", "a" * 300):
      argv = [CONFIG, f"--workdir={tmp_path / 'run'}"]
      argv += [f"--config.task.{key}={(str(path),)!r}"]
      assert not refusal(capsys, start_training, argv), (key, path)
  assert not begun


def test_unusable_cache_directory_is_refused(monkeypatch):
  for cache in ("~nouser/x", "a" * 300, "/dev/null/x"):
    monkeypatch.setenv("MEMORY_VIT_CACHE", cache)
    with pytest.raises(BackboneError, match=r"^[^\n]{20,2000}$"):
      local_file("https://127.0.0.1:9/x.npz")
  for backbone in (
    "http://[::1", "~nouser/x", "a" * 300, "", "https:///", "https://h/\udcff",
  ):  # fmt: skip
    with pytest.raises(BackboneError, match=r"^[^\n]{20,2000}$"):
      local_file(backbone)


@pytest.mark.parametrize(
  "text",
  [
    "[]", "{}", "3", "{", '{"a": 1}', "\x00",
    '{"wall_seconds": 1}', '{"format": 1, "wall_seconds": 1}',
    '{"format": 2, "wall_seconds": 1, "tasks": 3}',
    '{"format": 2, "wall_seconds": 1, "tasks": [{}]}',
    '{"format": 2, "wall_seconds": 1, "tasks": [{"val": 3}]}',
    '{"format": 2, "wall_seconds": 1, "backbone": "b"}',
  ],
)  # fmt: skip
def test_damaged_result_file_is_refused(text, tmp_path):
  file = tmp_path / "result.json"
  assert read_result(tmp_path) is None
  file.write_text('{"format": 2, "wall_seconds": 3.5}')  # no other is needed
  assert read_result(tmp_path).wall_seconds == 3.5
  file.write_text(text)
  with pytest.raises(ConfigError, match="result.json .*another --workdir"):
    read_result(tmp_path)


def test_foreign_entries_are_no_saved_states(tmp_path):
  kept = tmp_path / "kept"
  kept.mkdir()
  (kept / "mine").write_text("mine")
  directory = tmp_path / "checkpoints"
  directory.mkdir()
  (directory / "scratch-1").symlink_to(kept)
  (directory / "scratch-2").write_text("")
  with Checkpoints(directory) as checkpoints:
    assert checkpoints.latest() is None
  assert not list(directory.iterdir())
  assert (kept / "mine").read_text() == "mine"
  directory.rmdir()
  directory.write_text("")
  with pytest.raises(TrainingError, match="checkpoints cannot "):
    Checkpoints(directory)


def test_lock_that_is_a_directory_is_refused(tmp_path):
  (tmp_path / ".lock").mkdir()
  with pytest.raises(TrainingError, match="another --workdir"):  # noqa: SIM117
    with only_run(tmp_path):
      pass


def test_file_is_replaced_only_when_complete(tmp_path):
  file = tmp_path / "found.json"
  link = tmp_path / "link.json"
  link.symlink_to(file)
  for path in (file, link):
    paths.require_writable(path, "--json")
    assert not file.exists() or path is link
    files.write_json(path, {"a": 1})
    assert json.loads(file.read_text()) == {"a": 1}
  assert link.is_symlink()
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "found.json", "link.json",
  ]  # fmt: skip


def test_ctrl_c_before_anything_is_begun(capsys):
  def wait():
    raise KeyboardInterrupt

  assert console.run_command(wait) == 130
  assert capsys.readouterr().err == "stopped by Ctrl-C.\n"


# Whole processes.


@pytest.fixture
def small(tmp_path):
  """A run of few steps."""
  backbone = tmp_path / "tiny.npz"
  mv.save_backbone(tiny_backbone(num_classes=5), backbone)
  return Run(backbone, tmp_path / "run", total_steps=20)


CLOSED = """
import os, sys
for number in (0, 1, 2):
  os.close(number)
sys.stdin = sys.stdout = sys.stderr = None
"""


@pytest.mark.fault("closed-streams")
@pytest.mark.processes
def test_closed_output_streams_do_not_stop_a_run(small):
  with small.start(CLOSED) as process:
    assert process.wait() == 0
  assert (small.workdir / "result.json").is_file()
  # Nothing that was meant for stderr landed in another file.
  assert small.steps() == [10, 20]
  assert small.state()


MOVED = """
import os, pathlib, sys
from memory_vit.train.checkpoints import Checkpoints
save = Checkpoints.save
def moved(self, step, *args):
  if step == 20:
    run = self.directory.parent
    run.rename(run.with_name("moved"))
    {then}
  save(self, step, *args)
Checkpoints.save = moved
"""


@pytest.mark.fault("lost-workdir")
@pytest.mark.processes
@pytest.mark.parametrize("then", ["pass", "run.mkdir()", "run.write_text('')"])
def test_lost_working_directory_ends_the_run(small, then):
  with small.start(MOVED.format(then=then)) as process:
    assert process.wait() == 2, process.text
    last = process.text[process.text.index("error: ") :]
    assert "step 20 cannot be written" in last
    assert "The directory no longer exists" in last
  assert [p.name for p in (small.workdir.with_name("moved") / "checkpoints")
          .iterdir()] == ["00000010"]  # fmt: skip


@pytest.mark.processes
def test_bad_values_end_a_whole_process(tmp_path):
  """A sample of the campaign, in the commands as they are started."""
  for flags in (
    ["--config.batch_size=" + str(HUGE)], ["--config.epoch5=5"], ["x"],
    ["--config.data.train="], [f"--workdir={tmp_path}/a/\x00b"],
    ["--config.data.dir=\u202e"], ["--config=absent.py"],
  ):  # fmt: skip
    argv = [CONFIG, f"--workdir={tmp_path / 'run'}", *flags]
    with Process(MAIN, argv, tmp_path / "log") as process:
      assert process.wait() == 2, process.text
      assert re.fullmatch(r"error: .{10,1990}\n", process.text), process.text
    assert not (tmp_path / "run").exists()
    (tmp_path / "log").unlink()


# Without what the tests themselves set.
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}


def fresh(*argv, **environment):
  """A command as a shell starts it."""
  return subprocess.run(
    [sys.executable, *map(str, argv)], cwd=ROOT, capture_output=True, text=True,
    env={**ENVIRONMENT, "XLA_FLAGS": quick.XLA_FLAGS, **environment},
  )  # fmt: skip


HEAVY = """
import runpy, sys
sys.argv = ["memory-vit", {name!r}, "--help"]
try:
  runpy.run_module("memory_vit", run_name="__main__", alter_sys=True)
except SystemExit as end:
  assert not end.code, end.code
heavy = [
  m for m in ("jax", "flax", "numpy", "tensorflow", "scipy", "pandas", "PIL",
              "pyarrow", "matplotlib", "sklearn", "orbax", "clu", "optax",
              "fastapi", "ray", "pooch", "safetensors") if m in sys.modules
]
print(heavy, file=sys.stderr)
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_heavy(name):
  done = fresh("-c", HEAVY.format(name=name))
  assert (done.returncode, done.stderr) == (0, "[]\n")
  assert "--help" in done.stdout or "--config.seed=0\n" in done.stdout


CHECKS = """
import sys
from memory_vit.commands import console, train
arguments = train.parse(["memory-vit train", *sys.argv[1:]])
status = console.run_command(lambda: train.execute(arguments))
heavy = ("tensorflow", "tensorflow_datasets", "clu", "keras")
print(status, [m for m in heavy if m in sys.modules])
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", ["folder", "list"])
def test_missing_data_are_noticed_without_tensorflow(name, tmp_path):
  mv.save_backbone(tiny_backbone(), tmp_path / "tiny.npz")
  done = fresh(
    "-c", CHECKS, "--config=folder", f"--config.data.name={name}",
    f"--config.data.dir={tmp_path / 'none'}",
    f"--config.backbone={tmp_path / 'tiny.npz'}", "--config.image_size=8",
    f"--workdir={tmp_path / 'run'}",
  )  # fmt: skip
  assert re.search(r"error: .*/none' is not there", done.stderr)
  assert done.stdout == "2 []\n"


HELP = """
from memory_vit.__main__ import COMMANDS, main
for argv in [[], *([name] for name in COMMANDS)]:
  try:
    main([*argv, "--help"])
  except SystemExit as end:
    if end.code:
      raise
"""


@pytest.mark.processes
def test_help_is_the_same_without_docstrings():
  """As under PYTHONOPTIMIZE=2, which services set."""
  plain, optimized = fresh("-c", HELP), fresh("-OO", "-c", HELP)
  assert (optimized.returncode, optimized.stderr) == (0, "")
  assert optimized.stdout == plain.stdout


@pytest.mark.processes
def test_importing_the_package_does_not_import_jax():
  """What it exports comes once it is asked for."""
  code = "import sys, memory_vit; print(len(sys.modules), 'jax' in sys.modules)"
  done = fresh("-c", code)
  modules, jax_too = done.stdout.split()
  assert (int(modules) < 200, jax_too) == (True, "False")


KERAS = """
import sys
from memory_vit.commands import check_data
status = check_data.main(["--config=folder", "--config.data.dir=nowhere"])
print(status, "tensorflow" in sys.modules, "keras" in sys.modules)
"""


@pytest.mark.processes
def test_commands_import_tensorflow_without_keras():
  done = fresh("-c", KERAS)
  assert done.stdout == "2 True False\n", done.stderr
  first, *_, last = done.stderr.splitlines()
  assert first.endswith("importing TensorFlow, which takes some seconds")
  assert "nowhere" in last


@pytest.mark.slow
def test_nothing_of_tensorflow_is_on_stderr(tmp_path):
  """What each command says there, to the line."""
  backbone = tiny_backbone(num_classes=5)
  file = tmp_path / "tiny.npz"
  mv.save_backbone(backbone, file)
  task = random_task(backbone, "pets")
  mv.save_tasks([task], tmp_path / "tasks")
  Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
  run = tmp_path / "run"
  options = ["--config=configs/digits.py"] + [
    f"--config.{key}={value}" for key, value in {
      "upstream.name": "", "backbone": file,
      "total_steps": 2, "batch_size": 8, "batch_size_eval": 64,
    }.items()
  ]  # fmt: skip
  clock = r"\d\d:\d\d:\d\d "

  def said(name, *argv, status=0):
    done = fresh("-m", "memory_vit", name, *argv)
    assert done.returncode == status, done.stderr
    return done.stderr

  lines = said("train", *options, f"--workdir={run}").splitlines()
  own = rf"{clock}.*"
  assert [line for line in lines if not re.fullmatch(own, line)] == []
  assert any("devices: " in line for line in lines)
  # A line for each split, and its bar.
  own = rf"({clock})?(train|validation|test|importing TensorFlow).*|"
  lines = said("check_data", *options).splitlines()
  assert [line for line in lines if not re.fullmatch(own, line)] == []
  models = [f"--backbone={file}", f"--task={run / 'tasks'}"]
  # Lines of what takes over two seconds.
  own = rf"({clock}(importing TensorFlow.*|(evaluating|predicting).*)\n)*"
  assert re.fullmatch(own, said("evaluate", *models))
  image = tmp_path / "a.png"
  assert re.fullmatch(own, said("predict", *models, image, "--batch_size=1"))
  assert said("inspect", run / "tasks") == ""


PICTURES = """
import hashlib, io, sys
import numpy as np
import tensorflow as tf
from PIL import Image
from memory_vit.config import DataConfig
from memory_vit.data import image_ops, random_decisions
from memory_vit.model.task import EvalPreprocessing
digest, rng = hashlib.sha256(), np.random.default_rng(0)
for kind in ("JPEG", "PNG", "WEBP"):
  for height, width in ((97, 131), (400, 300)):
    file = io.BytesIO()
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind)
    encoded = tf.constant(file.getvalue())
    for spec in (EvalPreprocessing(image_size=64),
                 EvalPreprocessing(image_size=64, crop="central", resize=73)):
      digest.update(image_ops.eval_image(encoded, spec).numpy().tobytes())
    for crop in ("inception", "small"):
      view = DataConfig(train_crop=crop)
      [uniforms] = random_decisions.uniforms(1, [2])
      digest.update(image_ops.train_image(
        encoded, uniforms, data=view, image_size=64).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_pictures_are_the_same_with_and_without_onednn():
  """`console` turns it off, so that TensorFlow does not speak of it."""
  assert console._QUIET["TF_ENABLE_ONEDNN_OPTS"] == "0"
  found = [fresh("-c", PICTURES, TF_ENABLE_ONEDNN_OPTS=on) for on in "01"]
  assert len(found[0].stdout) == 65, found[0].stderr
  assert found[0].stdout == found[1].stdout
  # It is on where it is asked for: there is something to compare.
  assert "oneDNN custom operations are on" in found[1].stderr
  assert "oneDNN" not in found[0].stderr
