"""Push tasks to the hub, load them from it, and list them: on a stand-in."""

import json
import logging
import re
import sys

import jax
import numpy as np
import published_models
import pytest
import safetensors.numpy
from conftest import random_task, tiny_backbone
from hub_server import READ_TOKEN, TOKEN, Hub
from PIL import Image

import memory_vit as mv
from memory_vit.__main__ import main
from memory_vit.backbones import hub_models
from memory_vit.config import Config
from memory_vit.errors import (
  BackboneError,
  ExportError,
  MemoryVitError,
  TaskError,
)
from memory_vit.runtime import hub as addresses
from memory_vit.tasks import find, hub_tasks
from memory_vit.train import settle

pytest.importorskip("huggingface_hub", reason="huggingface_hub is missing")
constants = pytest.importorskip("huggingface_hub.constants")
# huggingface_hub itself uploads in this way.
pytestmark = pytest.mark.filterwarnings(
  "ignore:Use 'content=<:DeprecationWarning"
)


@pytest.fixture
def hub(tmp_path, monkeypatch):
  monkeypatch.setenv("HF_TOKEN", TOKEN)
  with Hub() as served:
    template = "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
      "ENDPOINT": served.address, "HF_HUB_OFFLINE": False,
      "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": True,
      "HUGGINGFACE_CO_URL_TEMPLATE": served.address + template,
      "HF_TOKEN_PATH": str(tmp_path / "token"),
    }.items():  # fmt: skip
      monkeypatch.setattr(constants, name, value, raising=False)
    yield served


@pytest.fixture
def pets(backbone):
  return random_task(backbone, "pets", class_names=("cat", "dog", "hen"))


def content(task, tmp_path):
  """The bytes of its file."""
  file = tmp_path / f"{task.name}.safetensors"
  mv.save_task(task, file)
  return file.read_bytes()


def same(one, other):
  equal = jax.tree.map(np.array_equal, one.params, other.params)
  return one.spec == other.spec and all(jax.tree.leaves(equal))


def test_pushed_task_is_loaded_bitwise(hub, backbone, pets):
  commit = mv.push_task(pets, "me/tasks", message="First")
  repository = hub.repositories["me/tasks"]
  assert repository.private
  assert repository.messages == ["First"]
  assert repository.commits[-1].keys() == {"pets.safetensors", "README.md"}
  assert commit == f"{hub.address}/me/tasks/commit/{2:040x}"
  assert same(mv.load_task("hf://me/tasks", backbone), pets)
  # The cache consists of links, which lie nowhere else.
  [path] = find.task_paths("hf://me/tasks/pets")
  assert path.is_symlink()
  card = repository.commits[-1]["README.md"].decode()
  assert 'mv.load_tasks("hf://me/tasks", backbone)' in card
  assert "--task=hf://me/tasks IMAGE" in card
  assert TOKEN not in card


def test_one_of_several_tasks_is_loaded_by_its_name(hub, backbone, pets):
  birds = random_task(backbone, "birds")
  mv.push_task([pets, birds], "me/tasks", public=True)
  assert not hub.repositories["me/tasks"].private
  with pytest.raises(
    TaskError, match="has 2 tasks: birds, pets. Give the path of one"
  ):
    mv.load_task("hf://me/tasks", backbone)
  assert same(mv.load_task("hf://me/tasks/birds", backbone), birds)
  loaded = mv.load_tasks("hf://me/tasks", backbone)
  assert [task.name for task in loaded] == ["birds", "pets"]


def test_predictor_adds_a_task_of_the_hub(hub, backbone, pets, tmp_path):
  mv.push_task([pets, random_task(backbone, "birds")], "me/tasks")
  source = tmp_path / "tiny.npz"
  mv.save_backbone(backbone, source)
  predictor = mv.Predictor(
    mv.PredictorConfig(backbone=str(source), tasks=("hf://me/tasks/pets",)),
    warm_up=False,
  )
  assert predictor.add("hf://me/tasks/birds").names == ("pets", "birds")


def test_a_revision_stays_what_it_was(hub, backbone, pets, tmp_path):
  mv.push_task(pets, "me/tasks")
  first = hub.repositories["me/tasks"].at("main")[1]
  other = random_task(backbone, "pets", seed=1)
  mv.push_task(other, "me/tasks")
  # A new push is seen at once, in the same process.
  assert same(mv.load_task("hf://me/tasks", backbone), other)
  assert same(mv.load_task(f"hf://me/tasks@{first}", backbone), pets)
  assert same(mv.load_task(f"hf://me/tasks/pets@{first}", backbone), pets)


def test_no_other_file_is_downloaded(hub, backbone, pets, tmp_path):
  whole = content(pets, tmp_path)
  hub.add("you/tasks", {
    "pets.safetensors": whole, "model.bin": b"pickle", "a.py": b"",
    "sub/birds.safetensors": whole,
  })  # fmt: skip
  assert same(mv.load_task("hf://you/tasks", backbone), pets)
  hub.add("you/tasks", {"birds.safetensors": whole})
  mv.load_task("hf://you/tasks/pets", backbone)
  fetched = {path for _, path in hub.asked if "/resolve/" in path}
  assert {path.partition("/resolve/")[2][41:] for path in fetched} == {
    "pets.safetensors"
  }


def test_a_strangers_file_is_checked_as_any(hub, backbone, pets, tmp_path):
  whole = bytearray(content(pets, tmp_path))
  whole[-1] ^= 1
  for name, found in {"a": whole, "b": whole[:99], "c": b"\xff" * 99}.items():
    hub.add(f"you/{name}", {"pets.safetensors": bytes(found)})
    with pytest.raises(TaskError, match="damaged|is not a task"):
      mv.load_task(f"hf://you/{name}", backbone)
  hub.add("you/other", {"pets.safetensors": content(pets, tmp_path)})
  other = tiny_backbone(seed=7)
  with pytest.raises(TaskError, match="belongs to another backbone"):
    mv.load_task("hf://you/other", other)


def test_a_card_that_was_edited_stays(hub, pets):
  mv.push_task(pets, "me/tasks")
  hub.add("me/tasks", {"README.md": b"mine"})
  mv.push_task(pets, "me/tasks")
  repository = hub.repositories["me/tasks"]
  assert repository.commits[-1]["README.md"] == b"mine"
  mv.push_task(pets, "me/tasks", card=True)
  assert b"learnable-memory" in repository.commits[-1]["README.md"]


@pytest.mark.parametrize("repository", ["me", "a/b/c", "a/b@c", "", "a b/c"])
def test_invalid_repositories_are_refused(hub, pets, repository):
  with pytest.raises(
    ExportError, match="not a repository: expected OWNER/NAME"
  ):
    mv.push_task(pets, repository)
  assert not hub.asked


def test_tasks_that_do_not_fit_together_are_not_pushed(hub, backbone, pets):
  for tasks, said in (([pets, pets], "pets"), ([], "no task to push")):
    with pytest.raises(TaskError, match=said):
      mv.push_task(tasks, "me/tasks")
  assert not hub.asked


LOAD, PUSH = "load", "push"


@pytest.mark.fault("hub-refusal")
@pytest.mark.parametrize(
  ("doing", "where", "token", "said"),
  [
    (LOAD, "hf://me/missing", TOKEN, "revision or file does not exist"),
    (LOAD, "hf://me/private", None, "hf auth login"),
    (LOAD, "hf://me/private@v9", TOKEN, "repository, revision or file"),
    (LOAD, "hf://me/private/birds", TOKEN, "no birds.safetensors in it"),
    (LOAD, "hf://me", TOKEN, "hf://OWNER/NAME/TASK, with"),
    (LOAD, "hf://me/a/b/c", TOKEN, "not the address of"),
    (LOAD, "hf://me/private@../../x", TOKEN, "not the address of"),
    (LOAD, "hf://me/private/pets@a/../b", TOKEN, "not the address of"),
    (LOAD, "hf://me/private@/x", TOKEN, "not the address of"),
    (PUSH, "me/new", None, "HF_TOKEN"),
    (PUSH, "me/new", READ_TOKEN, "lacks this permission"),
    (PUSH, "you/new", TOKEN, "lacks this permission"),
  ],
)
def test_a_refusal_is_one_line_with_a_way_out(
  hub, backbone, pets, tmp_path, monkeypatch, doing, where, token, said
):
  hub.add("me/private", {"pets.safetensors": content(pets, tmp_path)}, True)
  monkeypatch.delenv("HF_TOKEN")
  if token:
    monkeypatch.setenv("HF_TOKEN", token)
  ask = {
    LOAD: lambda: mv.load_task(where, backbone),
    PUSH: lambda: mv.push_task(pets, where),
  }[doing]
  with pytest.raises(MemoryVitError) as error:
    ask()
  message = str(error.value)
  assert said in message
  assert where.partition("@")[0] in message
  assert "\n" not in message
  assert TOKEN not in message


@pytest.mark.fault("hub-refusal")
def test_without_a_network_the_cache_is_read(hub, backbone, pets, monkeypatch):
  mv.push_task(pets, "me/tasks")
  mv.load_task("hf://me/tasks", backbone)
  hub.asked.clear()
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  assert same(mv.load_task("hf://me/tasks", backbone), pets)
  for ask in (
    lambda: mv.load_task("hf://me/others", backbone),
    lambda: mv.push_task(pets, "me/tasks"),
    lambda: hub_tasks.listed("me"),
  ):
    with pytest.raises(MemoryVitError, match="HF_HUB_OFFLINE is set"):
      ask()
  assert not hub.asked


def test_missing_hub_library_is_named(hub, backbone, pets, monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  for ask in (
    lambda: mv.load_task("hf://me/tasks", backbone),
    lambda: mv.push_task(pets, "me/tasks"),
    lambda: hub_tasks.listed("me"),
  ):
    with pytest.raises(MemoryVitError, match=r"pip install '\.\[hf\]'"):
      ask()


@pytest.mark.fault("hub-refusal")
def test_a_link_out_of_the_cache_is_refused(hub, backbone, pets, tmp_path):
  """An endpoint can lay a file there: the client makes its path of the ETag."""
  hub.add("you/tasks", {"pets.safetensors": content(pets, tmp_path)})
  hub.etags["pets.safetensors"] = "../../../outside"
  with pytest.raises(TaskError, match="is a link that leads out of"):
    mv.load_task("hf://you/tasks", backbone)
  assert (tmp_path / "outside").is_file()


def test_a_backbone_is_fetched_with_all_that_states_its_images(
  hub, tmp_path, monkeypatch
):
  """A cache without the file about images is refused."""
  monkeypatch.setattr(hub_models, "fetch", hub_models.fetch.__wrapped__)
  path = published_models.write_model(tmp_path / "vit")
  stated = (path / "preprocessor_config.json").read_bytes()
  expected = mv.load_backbone(path).fingerprint
  weights = {
    name: (path / name).read_bytes()
    for name in ("config.json", "model.safetensors")
  }
  nested = b'{"image_processor": %s}' % stated
  hub.add("me/four", {**weights, "preprocessor_config.json": stated})
  hub.add("me/five", {**weights, "processor_config.json": nested})
  hub.add("me/none", weights)
  for name in ("four", "five"):
    assert mv.load_backbone(f"hf://me/{name}").fingerprint == expected
  for offline in (False, True):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(BackboneError, match="processor_config.json.*me/none"):
      mv.load_backbone("hf://me/none")


@pytest.mark.parametrize("secret", [
  "401 for hf_averysecrettoken", "Illegal header value b'Bearer averysecret'",
  "cannot reach https://me:averysecret@hub.example/api",
  f"{'x' * 180} hf_averysecrettokenthatisshortenedinitsmiddle",
  f"for api_org_{'averysecret' * 3}",
])  # fmt: skip
def test_errors_of_libraries_lose_their_secrets(secret):
  with (
    pytest.raises(TaskError, match=r"\*\*\*") as error,
    addresses.asking("read", TaskError),
  ):
    raise OSError(secret)
  assert "averysecret" not in str(error.value)
  # A traceback would show it.
  assert error.value.__suppress_context__
  assert error.value.__cause__ is None


def test_names_like_those_of_tokens_are_shown():
  text = "hf_hub_download needs hf_xet: pip install hf_xet (api_version 2)"
  with (
    pytest.raises(TaskError, match=re.escape(text)),
    addresses.asking("read", TaskError),
  ):
    raise ImportError(text)


def test_commands_use_the_hub_and_never_print_the_token(
  hub, backbone, pets, tmp_path, capsys, caplog
):
  """Push, list, inspect and predict, with all that is logged."""
  caplog.set_level(logging.DEBUG)
  source = tmp_path / "tiny.npz"
  mv.save_backbone(backbone, source)
  other = random_task(tiny_backbone(seed=7), "birds")
  mv.save_tasks([pets], tmp_path / "tasks")
  mv.push_task(other, "me/other")
  # The file states no GELU, so it fits tasks of any.
  exact = mv.load_backbone(source, gelu="exact")
  mv.push_task(random_task(exact, "hens"), "me/exact")
  model = safetensors.numpy.save({"a": np.zeros(1, np.float32)})
  hub.add("me/other", {"model.safetensors": model})
  hub.add("me/broken", {
    "a.safetensors": b"no", "README.md": b"---\ntags: [learnable-memory]\n---\n"
  })  # fmt: skip
  image = tmp_path / "a.png"
  Image.new("RGB", (9, 9)).save(image)
  said = []

  def run(*argv):
    assert main([str(argument) for argument in argv]) == 0
    found = capsys.readouterr()
    said.extend(found)
    return found

  pushed = run("push", tmp_path / "tasks", "me/tasks", "--message=Mine")
  assert pushed.out.startswith(f"{hub.address}/me/tasks/commit/")
  listed = run("list", "me", f"--backbone={source}")
  header, _, *rows = listed.out.splitlines()
  assert header.split()[-1] == "fits"
  fits = {row.split()[0]: row.split()[-1] for row in rows}
  assert fits == {
    "hf://me/exact/hens": "yes", "hf://me/other/birds": "no",
    "hf://me/tasks/pets": "yes",
  }  # fmt: skip
  assert pets.spec.backbone.fingerprint[:12] in listed.out
  assert "left out: cannot read hf://me/broken/a: " in listed.err
  assert listed.err.count("\n") == 1
  found = json.loads(run("list", "me", f"--backbone={source}", "--json").out)
  entries = {one["address"]: one for one in found["tasks"]}
  assert entries["hf://me/tasks/pets"]["fits"]
  assert entries["hf://me/tasks/pets"]["spec"]["class_names"][0] == "cat"
  assert entries["hf://me/broken/a"]["error"]
  assert "fits" not in run("list", "me").out
  assert "me has no tasks" not in listed.out
  assert "you has no tasks" in run("list", "you").out
  assert "3: cat, dog, hen" in run("inspect", "hf://me/tasks").out
  described = run("inspect", "hf://me/tasks/pets", "--json").out
  assert json.loads(described)["tasks"][0]["verified"]
  run(
    "predict", f"--backbone={source}", "--task=hf://me/tasks", image, "--json"
  )
  assert '"pets"' in said[-2]
  said.append(caplog.text)
  assert not [text for text in said if TOKEN in text]


def test_private_tasks_are_listed_only_for_their_owner(hub, pets, monkeypatch):
  mv.push_task(pets, "me/tasks")
  # Of a task in a folder there is no address.
  whole = hub.repositories["me/tasks"].commits[-1]["pets.safetensors"]
  hub.add("me/tasks", {"old/birds.safetensors": whole})
  assert [task.spec for task in hub_tasks.listed("me")] == [pets.spec]
  monkeypatch.delenv("HF_TOKEN")
  assert hub_tasks.listed("me") == []
  for owner in ("", "a/b", "../a", "hf://me"):
    with pytest.raises(TaskError, match="is not a valid owner"):
      hub_tasks.listed(owner)


def test_a_new_task_attends_to_one_of_the_hub(hub, pets):
  mv.push_task(pets, "me/tasks")
  config = Config().replaced({"task.attends_to": ("hf://me/tasks",)})
  [path], ancestors = settle.parent_directories(config)
  assert path.name == "pets.safetensors"
  assert ancestors == []
