"""Programs as libtpu compiles them for TPUs that are not there.

Two or three blocks of a B/32 in bfloat16: `make nightly` compiles all twelve.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import memory_vit as mv
from benchmarks import compiled, compiled_programs, scale
from memory_vit.commands import train
from memory_vit.model import trees
from memory_vit.runtime import absent_devices, sharding

COSTS = Path(__file__).parents[2] / "docs" / "results" / "compiled"
RECORDED = {2: COSTS / "v5e-b32-2-layers.json", 12: COSTS / "v5e-b32.json"}
COMPARED = ("plain", "read 1", "read 1, side stream", "gradient 1")
# In an environment for TPUs, too, `make test` leaves them out.
pytestmark = pytest.mark.slow
FULL = pytest.param(12, marks=pytest.mark.nightly)
IMAGES = 128  # on a chip


@pytest.fixture(autouse=True)
def compiled_as_by_users(monkeypatch):
  """Without the flags of other tests, which libtpu reads when it is loaded."""
  monkeypatch.delenv("XLA_FLAGS", raising=False)


def target(topology, depth, fsdp=1):
  devices = absent_devices.devices(topology)
  config = dataclasses.replace(
    mv.vit_config(
      "B/32", num_classes=1000, dtype="bfloat16", platform="tpu"
    ),
    depth=depth,
  )  # fmt: skip
  mesh = sharding.make_mesh(devices, fsdp=fsdp)
  return compiled_programs.Target(config, IMAGES * len(devices), mesh)


def report_on(made, *names):
  """{program: what the compiler says of it}."""
  known = compiled_programs.programs(made)
  return {name: compiled.compile_program(known[name], {}) for name in names}


def trained_bytes(made):
  (task,) = compiled_programs.tasks(made.config, 1, "memory_masked")
  return 4 * trees.count(task.params)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:16x16"])
@pytest.mark.parametrize("depth", [2, FULL])
def test_only_the_gradient_of_the_task_is_exchanged(topology, depth):
  """Neither weights nor contexts move, on 4 chips and on 256."""
  made = target(topology, depth)
  found = report_on(made, "encode", "read 1", "gradient 1", "update 1")
  assert found["gradient 1"]["exchanged"] == {
    "all-reduce": trained_bytes(made) + 2 * 4  # and loss and accuracy
  }
  assert not any(
    row["exchanged"] for name, row in found.items() if name != "gradient 1"
  )


@pytest.mark.parametrize("depth", [2, 3, FULL])
def test_sharded_weights_are_gathered_as_the_page_says(depth):
  """docs/dev/memory.md, for 8 of 256 chips that hold a backbone together."""
  made = target("v5e:16x16", depth, fsdp=8)
  found = report_on(made, "encode", "read 1", "gradient 1")
  for name, gathered in scale.gathered_on_tpus(made.config).items():
    exchanged = dict(found[name]["exchanged"])
    assert exchanged.pop("all-gather") == pytest.approx(gathered, rel=0.002)
    reduced = trained_bytes(made) if name == "gradient 1" else 0
    # Of the rest, cells are largest: 8 m d bytes a layer.
    assert 0 <= sum(exchanged.values()) - reduced < 2**16 * depth, name


def test_memory_of_a_layer_is_that_of_the_page():
  """Of weights and of the context; those in between do not grow."""
  two, three = (
    report_on(target("v5e:1", depth), "encode")["encode"] for depth in (2, 3)
  )
  config = target("v5e:1", 2).config
  d, m, s = config.width, config.mlp_dim, config.num_patches + 1
  weights = 2 * (4 * d * d + 2 * d * m) + 4 * (9 * d + m)
  assert three["arguments"] - two["arguments"] == pytest.approx(
    weights, rel=0.01
  )
  assert three["results"] - two["results"] == 2 * 2 * IMAGES * s * d
  assert three["temporaries"] < 1.1 * two["temporaries"]


@pytest.mark.parametrize("depth", [2, FULL])
def test_programs_take_no_more_cycles_than_recorded(depth):
  """At most 5 % more, as libtpu estimates them.

  Record fewer, or those of another release, anew: delete the file, and call
  `python -m benchmarks.compiled --layers=2 --out=FILE`.
  """
  recorded = json.loads(RECORDED[depth].read_text())
  assert recorded["compiler"] == absent_devices.compiler("v5e")
  expected = {n: row["cycles"] for n, row in recorded["rows"].items()}
  names = expected if depth > 2 else COMPARED
  found = report_on(target("v5e:1", depth), *names)
  grown = {name: row["cycles"] / expected[name] for name, row in found.items()}
  assert max(grown.values()) <= 1.05, grown


def test_run_is_planned_without_data_weights_or_a_chip(capsys):
  """As a first command on a laptop; a small backbone compiles faster."""
  with pytest.raises(SystemExit) as left:
    train.main([
      "--config=sun397", "--dry_run", "--topology=v5e:4x4",
      "--config.backbone=random:Micro/32", "--config.dtype=auto",
      "--config.learning_rate=0.1",
    ])  # fmt: skip
  assert not left.value.code
  out = capsys.readouterr().out
  assert re.search(r"devices +16 x v5e, 15.75 GiB each", out)
  assert re.search(r"backbone +Micro/32 at 224 px, bfloat16", out)
  assert "for 1 trial in 1 pass" in out
  assert re.search(r"memory +0\.\d+ GiB a chip: 0\.\d+ ", out)
  assert re.search(r"largest batch +\d[\d,]+ images, which take 1\d", out)
  assert re.search(r"training +about \d+:\d\d, [\d.]+ ms a step", out)


def test_a_program_is_compiled_again():
  """JAX's cache, which is on in tests, could not read it."""
  made = target("v5e:1", 2)
  first, again = (report_on(made, "update 1")["update 1"] for _ in range(2))
  assert first["cycles"] == again["cycles"] > 0
