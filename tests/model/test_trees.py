import numpy as np

from memory_vit.model import trees

TREE = {"a": {"b": np.arange(6.0, dtype=np.float32).reshape(2, 3)},
        "c": np.int32(4)}  # fmt: skip


def test_unflatten_restores_flattened_trees():
  flat = trees.flatten(TREE)
  assert list(flat) == ["a/b", "c"]
  assert trees.unflatten(flat) == TREE
  assert trees.count(TREE) == 7


def test_differences_names_everything():
  found = {"a/b": np.zeros((3, 2)), "d": np.zeros(1)}
  lines = trees.differences(trees.flatten(TREE), found)
  assert lines == [
    "missing: c ()",
    "extra: d (1,)",
    "shape of a/b: (3, 2), expected (2, 3)",
  ]
  assert trees.differences(found, found) == []


def test_fingerprint_sees_values_shapes_types_and_names_only():
  base = trees.fingerprint(TREE)
  assert base == trees.fingerprint(dict(reversed(TREE.items())))
  swapped = {**TREE, "a": {"b": TREE["a"]["b"].astype(">f4")}}
  assert base == trees.fingerprint(swapped)
  columns = {**TREE, "a": {"b": np.asfortranarray(TREE["a"]["b"])}}
  assert base == trees.fingerprint(columns)

  others = [
    {**TREE, "a": {"b": TREE["a"]["b"].reshape(3, 2)}},
    {**TREE, "a": {"b": TREE["a"]["b"].view(np.int32)}},
    {**TREE, "a": {"b": np.nextafter(TREE["a"]["b"], np.float32(9))}},
    {**TREE, "a": {"x": TREE["a"]["b"]}},
    {"a": TREE["a"]},
  ]
  assert len({base, *map(trees.fingerprint, others)}) == 6
