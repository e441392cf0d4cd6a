"""Cached inputs train and evaluate as inputs computed in every step."""

import dataclasses
import functools
import itertools
import types

import fake_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_device, random_task, tiny_backbone
from run_inputs import run_inputs

from memory_vit import config as config_lib
from memory_vit.cache import plan
from memory_vit.cache.row_file import FileRows
from memory_vit.cache.rows import DeviceRows, HostRows, RowLayout
from memory_vit.cache.run_cache import RunCache
from memory_vit.data import (
  batching,
  crop_sizes,
  datasets,
  fixed_crops,
  image_ops,
  random_decisions,
)
from memory_vit.errors import BrokenDataError, ConfigError
from memory_vit.model import trees
from memory_vit.model.task import EvalPreprocessing
from memory_vit.runtime import sharding
from memory_vit.tasks import split_forward
from memory_vit.train import batches
from memory_vit.train.fit import fit_pack

SIZE, BATCH = 44, 16
SQUEEZED = {"train_crop": "resize"}
RANDOM = {"train_crop": "small", "resize": 10}
CONTEXTS = {"what": "contexts"}


def config_of(regime="cls_masked", *, data=(), cache=(), optim=(), **values):
  return config_lib.Config(
    image_size=8,
    batch_size=BATCH,
    batch_size_eval=32,
    eval_every=4,
    regime=regime,
    data=config_lib.DataConfig(
      name="digits:5-9",
      train=f"train[:{SIZE}]",
      validation="test[:39]",
      **{"flip": False, **dict(data)},
    ),
    cache=config_lib.CacheConfig(**dict(cache)),
    optim=config_lib.OptimConfig(**dict(optim)),
    # More than two epochs, and none ends with a batch.
    **{"total_steps": 7, **values},
  )


@pytest.fixture(scope="module")
def backbone():
  return tiny_backbone(depth=1)


def trained(made, directory):
  """{array of the best task: its value}, and what validation said of it."""
  pack = fit_pack(made, made.trials, directory)
  arrays = {
    f"{name}/{key}": np.asarray(value)
    for name, task in pack.tasks.items()
    for key, value in trees.flatten(task.params).items()
  }
  return arrays, {k: (b.step, b.scores.score) for k, b in pack.best.items()}


def assert_same_bits(found, expected):
  arrays, best = found
  assert best == expected[1]
  assert arrays.keys() == expected[0].keys()
  for name, value in expected[0].items():
    assert arrays[name].tobytes() == value.tobytes(), name


@pytest.fixture(scope="module")
def without(backbone, tmp_path_factory):
  """Regime -> the task that a run without a cache trains."""

  @functools.cache
  def train(regime):
    made = run_inputs(config_of(regime, data=SQUEEZED), backbone)
    return trained(made, tmp_path_factory.mktemp(regime))

  return train


@pytest.mark.parametrize(
  ("regime", "what", "where"),
  [
    ("cls_masked", "contexts", "host"),
    pytest.param("cls_masked", "contexts", "device", marks=pytest.mark.slow),
    pytest.param("cls_masked", "contexts", "disk", marks=pytest.mark.slow),
    pytest.param("head", "features", "host", marks=pytest.mark.slow),
    pytest.param("memory_masked", "contexts", "disk", marks=pytest.mark.slow),
  ],
)
def test_run_with_a_cache_equals_run_without(
  regime, what, where, backbone, without, tmp_path
):
  cache = {"what": what, "where": where}
  if where == "disk":
    cache["dir"] = str(tmp_path / "cache")
  config = config_of(regime, data=SQUEEZED, cache=cache)
  found = trained(run_inputs(config, backbone), tmp_path)
  assert_same_bits(found, without(regime))


@pytest.mark.slow
def test_cached_sweep_with_a_parent_on_8_devices_equals_uncached(
  backbone, tmp_path
):
  """Parts, devices and parents at once: any could reorder rows."""
  options = {
    "optim": {"accumulation_steps": 2},
    "sweep": config_lib.SweepConfig(learning_rate=(0.1, 0.3)),
  }
  mesh = sharding.make_mesh(fsdp=2)
  parents = [random_task(backbone, "parent")]
  results = []
  for cache in ({}, CONTEXTS, {**CONTEXTS, "where": "device"}):
    config = config_of(data=SQUEEZED, cache=cache, **options)
    made = run_inputs(config, backbone, mesh=mesh, parents=parents)
    results.append(trained(made, tmp_path / str(len(results))))
  assert_same_bits(results[1], results[0])
  assert_same_bits(results[2], results[0])


def same(images):
  """A frozen pass that returns the images themselves."""
  return images


def cached_batches(made, start=0):
  """Training batches of the cache."""
  return made.cache.train_batches(made.splits["train"], start)


def test_crops_are_taken_in_turn(backbone):
  """Record r in epoch e: crop e mod k, drawn by seed, r and its number."""
  cache, crops = {**CONTEXTS, "crops": 3}, 3
  made = run_inputs(
    config_of(data=RANDOM, cache=cache, seed=4), backbone, prepare=same
  )
  source = made.splits["train"].source
  for i, batch in enumerate(itertools.islice(cached_batches(made), 12)):
    number = i * BATCH + i  # of one row of each batch; more than 4 epochs
    [record] = random_decisions.shuffled([number], SIZE, 4).tolist()
    encoded, label = source.read(record)
    crop_number = number // SIZE % crops * SIZE + record
    [uniforms] = random_decisions.uniforms(4, [crop_number])
    crop = image_ops.train_image(
      encoded, uniforms, data=made.config.data, image_size=8
    )
    np.testing.assert_array_equal(np.asarray(batch["inputs"])[i], crop)
    assert batch["label"][i] == label


@pytest.mark.parametrize("crops", [1, 2])
@pytest.mark.parametrize("key", ["seed", "data.resize"])
def test_seed_and_size_identify_rows_only_of_random_crops(crops, key):
  """Rows are found by the facts of their plan."""
  found = []
  for value in (10, 12):
    config = config_of(cache={"crops": crops}, data=RANDOM)
    config = config.replaced({key: value})
    found.append(plan.training_facts(config, EvalPreprocessing(image_size=8)))
  assert (found[0] == found[1]) is (crops == 1)


def test_cached_images_are_resized_as_the_backbone_states(backbone):
  stated = EvalPreprocessing(image_size=12, interpolation="bicubic")
  config = config_of(data=SQUEEZED, cache=CONTEXTS)
  made = run_inputs(
    dataclasses.replace(config, image_size=12),
    dataclasses.replace(backbone, preprocessing=stated),
    prepare=same,
  )
  train = made.splits["train"]
  evaluated = batching.eval_batches(train, stated, batch_size=SIZE)
  known = {image.tobytes() for b in evaluated for image in b["image"]}
  for image in np.asarray(next(cached_batches(made))["inputs"]):
    assert image.tobytes() in known


def test_resumed_run_draws_the_following_cached_batches(backbone):
  cache = {**CONTEXTS, "crops": 2}
  made = run_inputs(config_of(data=RANDOM, cache=cache), backbone, prepare=same)
  whole = list(itertools.islice(cached_batches(made), 7))
  later = list(itertools.islice(cached_batches(made, 4 * BATCH), 3))
  for found, expected in zip(later, whole[4:], strict=True):
    np.testing.assert_array_equal(found["inputs"], expected["inputs"])
    np.testing.assert_array_equal(found["label"], expected["label"])


@pytest.mark.slow
def test_each_image_passes_the_backbone_once(backbone, tmp_path, monkeypatch):
  """However many steps, evaluations and passes of a sweep there are."""
  seen = []
  real = split_forward.encode_program

  def counted(params, images, *, config):
    if not isinstance(images, jax.core.Tracer):  # to know the shapes
      seen.append(len(images))
    return real(params, images, config=config)

  config = config_of(
    data=SQUEEZED,
    cache=CONTEXTS,
    optim={"accumulation_steps": 2},
    sweep=config_lib.SweepConfig(learning_rate=(0.1, 0.3)),
  )
  made = run_inputs(config, backbone)
  monkeypatch.setattr(split_forward, "encode_program", counted)
  for i, trial in enumerate(made.trials):
    fit_pack(made, [trial], tmp_path / str(i))
  # 44 in parts of a step, 39 in batches of an evaluation.
  assert sorted(seen) == [8] * 6 + [32] * 2


def test_bfloat16_cache_rounds_its_rows(backbone):
  inputs = {}
  for dtype in ("float32", "bfloat16"):
    cache = {**CONTEXTS, "dtype": dtype}
    made = run_inputs(config_of(data=SQUEEZED, cache=cache), backbone)
    inputs[dtype] = jax.tree.leaves(next(cached_batches(made))["inputs"])
  for exact, rounded in zip(*inputs.values(), strict=True):
    assert exact.dtype == rounded.dtype == np.float32
    np.testing.assert_array_equal(
      rounded, exact.astype(jnp.bfloat16).astype(np.float32)
    )
    assert (rounded != exact).any()


@pytest.mark.slow
def test_broken_record_is_replaced_by_the_next_readable_one(
  backbone, monkeypatch
):
  """The last one's is the first; validation does not count it."""
  config = config_of(data=SQUEEZED, cache=CONTEXTS)
  splits = run_inputs(config, backbone).splits
  readers = {}
  for role in ("train", "validation"):
    reader = dataclasses.replace(splits[role], max_bad=3)
    readers[role] = [
      fake_data.damaged(reader, (7, 8, SIZE - 1)) for _ in range(2)
    ]
  expected = batching.train_batches(
    readers["train"][0],
    config.data,
    image_size=8,
    batch_size=BATCH,
    seed=0,
  )
  made = run_inputs(config, backbone, prepare=same, train=readers["train"][1])
  for batch, real in itertools.islice(
    zip(cached_batches(made), expected, strict=False), 4
  ):
    np.testing.assert_array_equal(batch["inputs"], real["image"])
    np.testing.assert_array_equal(batch["label"], real["label"])
  names = batching.train_examples(
    readers["train"][1], seed=0, batch_size=BATCH, step=2
  )
  assert batches.train_examples(made, 2) == names
  expected = batching.eval_batches(
    readers["validation"][0], made.preprocessing, batch_size=32
  )
  found = made.cache.eval_batches(readers["validation"][1])
  for batch, real in zip(found, expected, strict=True):
    counts = real["mask"] > 0
    np.testing.assert_array_equal(batch["mask"], real["mask"])
    for key, name in (("inputs", "image"), ("label", "label")):
      cached = np.asarray(batch[key])
      np.testing.assert_array_equal(cached[counts], real[name][counts])
  assert [*readers["train"][1].unreadable] == [7, 8, SIZE - 1]
  assert [*readers["validation"][1].unreadable] == [7, 8]


def test_too_many_broken_records_are_refused(backbone, tmp_path, monkeypatch):
  config = config_of(data=SQUEEZED, cache=CONTEXTS)
  made = run_inputs(config, backbone)
  bad = fake_data.damaged(made.splits["train"], [3])
  made = run_inputs(config, backbone, train=bad)
  with pytest.raises(BrokenDataError, match="example 3"):
    trained(made, tmp_path)


@pytest.mark.parametrize(
  ("regime", "cache", "data", "message"),
  [
    ("memory", CONTEXTS, {}, "expected 'none': the regime 'memory' changes"),
    ("full", {"what": "features"}, {}, "expected 'none': the regime 'full'"),
    ("head", CONTEXTS, SQUEEZED, "expected 'none' or 'features'"),
    ("cls_masked", {"what": "features"}, SQUEEZED, "'none' or 'contexts'"),
    ("cls_masked", CONTEXTS, RANDOM, "such as config.cache.crops 10"),
    ("cls_masked", CONTEXTS, {**SQUEEZED, "flip": True}, "and flip False"),
    ("cls_masked", {**CONTEXTS, "crops": 2}, SQUEEZED, "same crop each time"),
    ("cls_masked", {**CONTEXTS, "dir": "a"}, SQUEEZED, "or cache.where 'disk'"),
    ("full", {"dir": "a", "where": "device"}, {}, "'device' does not use"),
  ],
)  # fmt: skip
def test_unusable_cache_options_are_refused(regime, cache, data, message):
  with pytest.raises(ConfigError, match=message):
    config_of(regime, data=data, cache=cache)


@pytest.fixture(params=[1, 8], ids=["1 device", "8 devices"])
def filled(request, tmp_path):
  """Rows in each place of a cache, and the arrays written to them."""
  mesh = sharding.make_mesh(jax.devices()[: request.param])
  rng = np.random.default_rng(0)
  tree = {
    "a": rng.standard_normal((24, 2, 3)).astype(np.float32),
    "b": (rng.standard_normal((24,)).astype(np.float32),),
  }
  tree["a"][5] = -0.0
  layout, places = (
    RowLayout.of(tree, "float32", np.dtype("<i4")),
    range(0, 24, 8),
  )
  stores = [
    DeviceRows(layout, 21, mesh, places),
    HostRows(layout, 21, mesh, places),
    FileRows(layout, 21, mesh, places, tmp_path / "0.rows"),
  ]
  stores[-1].open(fill=None)  # nothing is damaged
  batch = {"label": np.arange(8), "mask": np.ones(8)}
  for start in places:
    part = jax.tree.map(lambda a, s=start: a[s : s + 8], tree)
    for store in stores:
      store.put(start, sharding.shard_batch(part, mesh), batch)
  return tree, stores, mesh


@pytest.mark.parametrize("store", [DeviceRows, HostRows])
def test_rows_stored_in_bfloat16_are_read_as_float32(store):
  tree = {"a": jax.numpy.float32([[1, 2], [3, 4]])}
  layout = RowLayout.of(tree, "bfloat16", np.dtype("<i4"))
  rows = store(layout, 2, one_device(), range(0, 2, 2))
  rows.put(0, tree, {"label": np.arange(2), "mask": np.ones(2)})
  found = rows.take(np.array([1, 0]))["a"]
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, [[3, 4], [1, 2]])


def test_rows_are_read_as_they_were_written(filled):
  tree, stores, mesh = filled
  places = np.array([20, 5, 5, 0, 8, 7, 16, 15])
  for store in stores:
    batch = store.take(places)
    jax.tree.map(np.testing.assert_array_equal, batch, jax.tree.map(
      lambda a: a[places], tree
    ))  # fmt: skip
    assert all(
      a.sharding == sharding.by_rows(mesh) for a in jax.tree.leaves(batch)
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_processes_cache_every_record_once(count, monkeypatch):
  reader = datasets.open_split("digits:5-9", "train[:7]")
  data = config_lib.DataConfig(flip=False, **SQUEEZED)
  numbers, evaluated = [], []
  monkeypatch.setattr(jax, "process_count", lambda: count)
  for i in range(count):
    monkeypatch.setattr(jax, "process_index", lambda i=i: i)
    crops = fixed_crops.training_crops(
      reader, data, image_size=8, seed=0, crops=2
    )
    numbers += list(crops.numbers)
    assert {n % 7 % count for n in crops.numbers} == {i}
    crops = fixed_crops.evaluation_crops(
      reader, crop_sizes.preprocessing_of("resize", 0, 8), batch_size=6
    )
    evaluated += list(crops.numbers)
  assert sorted(numbers) == list(range(14))
  assert sorted(evaluated) == list(range(7))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_evaluate_every_example_once(count, backbone, monkeypatch):
  """Also where the share of one is empty."""
  made = run_inputs(config_of(data=SQUEEZED, cache=CONTEXTS), backbone)
  reader = datasets.open_split("digits:5-9", "train[:7]")
  monkeypatch.setattr(jax, "process_count", lambda: count)
  counted = 0.0
  for i in range(count):
    monkeypatch.setattr(jax, "process_index", lambda i=i: i)
    crops = fixed_crops.evaluation_crops(
      reader, made.preprocessing, batch_size=32
    )
    ones = np.ones(len(crops.numbers), np.float32)
    rows = types.SimpleNamespace(labels=ones, masks=ones, take=lambda at: at)
    monkeypatch.setattr(RunCache, "rows", lambda *_, rows=rows: rows)
    found = made.cache.eval_batches(reader)
    counted += sum(batch["mask"].sum() for batch in found)
  assert counted == 7


def test_each_epoch_draws_every_row_of_its_crop():
  places = fixed_crops.drawn_places(np.arange(5 * 6), 5, 3, 0).reshape(6, 5)
  for epoch, found in enumerate(places):
    crop = epoch % 3
    assert sorted(found) == list(range(5 * crop, 5 * crop + 5))
  assert len({tuple(found % 5) for found in places}) > 3
