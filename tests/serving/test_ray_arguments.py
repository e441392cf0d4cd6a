"""Arguments of the application on Ray: those of the server."""

import dataclasses
import inspect

import pytest

from memory_vit.commands import console, serve
from memory_vit.errors import ConfigError
from memory_vit.prediction.config import PredictorConfig
from memory_vit.serving import ServerSettings, ray


def what(**given):
  return ray.deployed({"backbone": "a.npz", **given})


def test_names_and_defaults_are_those_of_the_flags():
  flags = vars(serve._parser().parse_args(["--backbone=a.npz"]))
  flags["batch_sizes"] = serve._batch_sizes(flags["batch_sizes"])
  flags["task"] = tuple(flags["task"])
  flags["dtype"] = console.compute_dtype(flags["dtype"])
  apart = {"host", "port", "timeout_keep_alive"}
  scaling = {field.name for field in dataclasses.fields(ray.Scaling)}
  table = ray.arguments_table()
  assert table.keys() - scaling == flags.keys() - apart
  for name in table.keys() - scaling - {"backbone"}:
    assert table[name].default == flags[name], name
  assert what() == what(**{n: flags[n] for n in table.keys() - scaling})


def test_texts_are_numbers_and_lists():
  """`serve run` passes texts; a config file has numbers and lists."""
  texts = what(
    task="a,b", batch_sizes="1,4", slots="4", timeout="2.5", num_cpus="0.5",
    state_dir="/state",
  )  # fmt: skip
  typed = what(
    task=["a", "b"], batch_sizes=[1, 4], slots=4, timeout=2.5, num_cpus=0.5,
    state_dir="/state",
  )  # fmt: skip
  assert texts == typed
  assert texts.model == PredictorConfig(
    "a.npz", ("a", "b"), batch_sizes=(1, 4), slots=4
  )
  assert texts.server == ServerSettings(timeout=2.5, state_dir="/state")
  assert texts.scaling == ray.Scaling(num_cpus=0.5)


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"slot": "4"}, "the application has no option 'slot'; nearest: slots"),
    ({"slots": 0}, "slots is 0, expected at least 1"),
    ({"max_queue": 0}, "max_queue is 0, expected at least 1"),
    ({"timeout": "nan"}, "timeout is nan, expected a positive number"),
    ({"top": "many"}, "top is 'many', expected int: at least 1 and at most"),
    ({"backbone": None}, "backbone is None"),
    ({"dtype": "float16"}, "dtype is 'float16', expected one of ['float32'"),
    ({"dtype": "auto"}, "dtype is 'auto', expected one of ['float32'"),
    ({"batch_sizes": "8,1"}, "batch_sizes is (8, 1), expected"),
    ({"task": 3}, "task is 3, expected"),
    ({"port": 8000}, "port does not apply to replicas: see http_options"),
    ({"num_replicas": 0}, "num_replicas is 0, expected at least 1"),
    ({"num_gpus": -1}, "num_gpus is -1.0, expected at least 0"),
    (
      {"max_replicas": 2, "min_replicas": 3},
      "min_replicas is 3, expected at most 2 (max_replicas)",
    ),
    ({"max_images": 300}, "is 300, expected at most 256 (max_queue)"),
  ],
)
def test_bad_arguments_are_refused_in_one_line(given, message):
  with pytest.raises(ConfigError) as caught:
    what(**given)
  assert message in str(caught.value)
  assert "\n" not in str(caught.value)


def test_missing_backbone_is_refused():
  with pytest.raises(ConfigError, match="backbone is missing"):
    ray.deployed({})


def test_options_of_the_deployment():
  # Ray Serve takes a builder of one argument.
  assert len(inspect.signature(ray.application).parameters) == 1
  fixed = ray.deployment_options(what(num_replicas=3, num_gpus=0.5, grace=7))
  assert fixed == {
    "num_replicas": 3, "max_ongoing_requests": 512,
    "graceful_shutdown_timeout_s": 7,
    "ray_actor_options": {"num_cpus": 1, "num_gpus": 0.5},
  }  # fmt: skip
  scaled = ray.deployment_options(
    what(min_replicas=2, max_replicas=9, target_ongoing_requests=4)
  )
  assert "num_replicas" not in scaled
  assert scaled["autoscaling_config"] == {
    "min_replicas": 2, "max_replicas": 9, "target_ongoing_requests": 4,
  }  # fmt: skip


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "a.npz").touch()
  found = ray.with_whole_paths(
    what(task="t", state_dir="s", token_file="/token")
  )
  assert found.model.backbone == str(tmp_path / "a.npz")
  assert found.model.tasks == (str(tmp_path / "t"),)
  assert found.server.state_dir == str(tmp_path / "s")
  assert found.server.token_file == "/token"


@pytest.mark.parametrize("source", [
  "augreg-B/32", "hf://me/vit@v1", "gs://bucket/vit.npz", "https://me/vit.npz",
])  # fmt: skip
def test_addresses_are_not_made_absolute(source, tmp_path, monkeypatch):
  """Even if a directory has their name."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / source).mkdir(parents=True)
  if "://" not in source:
    (tmp_path / source).rmdir()
  found = ray.with_whole_paths(
    what(backbone=source, task=f"{source},t", state_dir="s")
  )
  assert found.model.backbone == source
  assert found.model.tasks[1] == str(tmp_path / "t")
  if "://" in source:
    assert found.model.tasks[0] == source
