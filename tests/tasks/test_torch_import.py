"""Import of tasks of the public PyTorch reproduction."""

import math
import sys
import zipfile

import numpy as np
import published_models as models
import pytest

import memory_vit as mv
from memory_vit.commands import convert
from memory_vit.errors import TaskError
from memory_vit.tasks import torch_import

D, DEPTH, PATCHES = (
  models.WIDTH,
  models.DEPTH,
  (models.SIDE // models.PATCH) ** 2,
)
CELLS, CLASSES = (2, 3), (4, 5)
ATTENTION = "vit.encoder.layer.{}.attention.attention"


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
  """The ViT that tasks were trained on, with another head, and its files."""
  path = tmp_path_factory.mktemp("models") / "vit"
  arrays = models.vit_arrays(head=False, pooler=True)
  models.write_model(path, models.without_prefix(arrays))
  return path, arrays, mv.load_backbone(path)


def mask(extended: bool, heads: int) -> np.ndarray:
  """The mask that is added to the logits, entry by entry."""
  owners = [i for i in range(heads) for _ in range(CELLS[i])]
  keys = [None] * (PATCHES + 1) + [*range(heads)] + owners
  queries = [None] * (PATCHES + 1) + [*range(heads)]

  def sees(query, key):
    if key is None:  # a patch, or the original class token
      return True
    if query is None:
      return False
    return key <= query if extended else key == query

  return np.array(
    [[[0.0 if sees(q, k) else -math.inf for k in keys] for q in queries]],
    np.float32,
  )


def state(arrays, heads=2, extended=False) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(1)

  def drawn(*shape):
    return rng.standard_normal(shape).astype(np.float32)

  found = {n: a for n, a in arrays.items() if "pooler" not in n}
  tokens = "vit.embeddings.cls_tokens"
  found[f"{tokens}.0"] = found.pop("vit.embeddings.cls_token")
  found |= {"classifiers.0.weight": drawn(7, D), "classifiers.0.bias": drawn(7)}
  for layer in range(DEPTH):
    name = ATTENTION.format(layer)
    found[f"{name}.attention_mask"] = mask(extended, heads)
  for k in range(1, heads + 1):
    found[f"{tokens}.{k}"] = drawn(1, 1, D)
    found[f"classifiers.{k}.weight"] = drawn(CLASSES[k - 1], D)
    found[f"classifiers.{k}.bias"] = drawn(CLASSES[k - 1])
    for layer in range(DEPTH):
      name = f"{ATTENTION.format(layer)}.memory_tokens.{k - 1}"
      found[name] = drawn(1, CELLS[k - 1], D)
  return found


def tasks_of(vit, found) -> tuple[mv.Task, ...]:
  _, _, backbone = vit
  return torch_import.tasks_of(
    found, models.CONFIG, backbone, "task.pt", {"converted_from": "it"}
  )


# The model of the reproduction, spelled out: class tokens stand at the end, and
# memory joins keys and values behind the LayerNorm.


def linear(x, found, name):
  return x @ found[f"{name}.weight"].T + found[f"{name}.bias"]


def layer_norm(x, found, name):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)
  return x * found[f"{name}.weight"] + found[f"{name}.bias"]


def attend(x, found, layer, heads):
  name = ATTENTION.format(layer)
  memory = [found[f"{name}.memory_tokens.{i}"][0] for i in range(heads)]
  inputs = np.concatenate([x, *memory])
  h, k = models.HEADS, D // models.HEADS
  q = linear(x, found, f"{name}.query").reshape(-1, h, k)
  keys = linear(inputs, found, f"{name}.key").reshape(-1, h, k)
  values = linear(inputs, found, f"{name}.value").reshape(-1, h, k)
  logits = np.einsum("qhk,shk->hqs", q, keys) / math.sqrt(k)
  weights = np.exp(logits + found[f"{name}.attention_mask"])
  weights /= weights.sum(-1, keepdims=True)
  out = np.einsum("hqs,shk->qhk", weights, values).reshape(-1, D)
  return linear(out, found, f"vit.encoder.layer.{layer}.attention.output.dense")


def theirs(image, found, heads):
  """Logits of the new heads, of an image in [-1, 1]."""
  found = {name: array.astype(np.float64) for name, array in found.items()}
  mean, std = (models.PREPROCESSOR[f"image_{n}"] for n in ("mean", "std"))
  x = ((image + 1) / 2 - mean) / std
  p, side = models.PATCH, models.SIDE // models.PATCH
  x = x.reshape(side, p, side, p, 3)
  patches = "vit.embeddings.patch_embeddings.projection"
  x = np.einsum("axbyc,dcxy->abd", x, found[f"{patches}.weight"])
  x = x.reshape(-1, D) + found[f"{patches}.bias"]
  positions = found["vit.embeddings.position_embeddings"][0]
  tokens = [found[f"vit.embeddings.cls_tokens.{k}"][0] + positions[:1]
            for k in range(heads + 1)]  # fmt: skip
  x = np.concatenate([x + positions[1:], *tokens])
  for i in range(DEPTH):
    name = f"vit.encoder.layer.{i}"
    y = layer_norm(x, found, f"{name}.layernorm_before")
    x = x + attend(y, found, i, heads)
    y = layer_norm(x, found, f"{name}.layernorm_after")
    y = linear(y, found, f"{name}.intermediate.dense")
    y = y * np.vectorize(lambda v: (1 + math.erf(v / math.sqrt(2))) / 2)(y)
    x = x + linear(y, found, f"{name}.output.dense")
  x = layer_norm(x, found, "vit.layernorm")
  return [linear(x[PATCHES + k], found, f"classifiers.{k}")
          for k in range(1, heads + 1)]  # fmt: skip


@pytest.mark.parametrize(("heads", "extended"), [(2, False), (2, True)])
def test_converted_tasks_compute_what_they_computed(vit, extended, heads):
  found = state(vit[1], heads, extended)
  tasks = tasks_of(vit, found)
  assert [t.name for t in tasks] == [f"head-{k + 1}" for k in range(heads)]
  assert not any(t.spec.memory_norm for t in tasks)
  assert [t.spec.cells for t in tasks] == list(CELLS[:heads])
  image = np.random.default_rng(2).uniform(-1, 1, (8, 8, 3))
  ours = mv.forward(vit[2], tasks, image[None].astype(np.float32))
  expected = theirs(image, found, heads)
  for task, logits in zip(tasks, expected, strict=True):
    np.testing.assert_allclose(ours[task.name][0], logits, rtol=0,
                               atol=1e-4 * np.abs(logits).max())  # fmt: skip


def test_extension_is_kept_as_the_order_of_parents(vit):
  first, second = tasks_of(vit, state(vit[1], extended=True))
  assert not first.spec.attends_to
  assert second.spec.attends_to == ("head-1",)
  assert second.spec.parent_digests == (first.digest,)


@pytest.mark.fault("torch-code")
@pytest.mark.parametrize(("change", "said"), [
  (lambda s: s.pop("classifiers.1.bias"), "missing: classifiers.1.bias"),
  (lambda s: s.pop("vit.embeddings.cls_tokens.2"), "missing: vit.embeddings"),
  (lambda s: s.pop(f"{ATTENTION.format(1)}.memory_tokens.1"), "missing: vit"),
  (lambda s: s.update({"classifiers.3.bias": np.ones(3, np.float32)}),
   "extra: 'classifiers.3.bias'"),
  (lambda s: s.update({f"{ATTENTION.format(1)}.memory_tokens.0":
                       np.ones((1, 7, D), np.float32)}), "shape of vit."),
  (lambda s: s.update({"x": np.ones(3, np.float32)}), "extra: 'x'"),
  (lambda s: s.pop("vit.layernorm.bias"), "missing: vit.layernorm.bias"),
  (lambda s: s.update({"vit.layernorm.bias": np.ones(D, np.float32)}),
   "another ViT than the given model"),
  (lambda s: s["vit.embeddings.cls_tokens.0"].fill(3), "another ViT"),
  (lambda s: s.pop(f"{ATTENTION.format(1)}.attention_mask"), "attention_mask"),
  (lambda s: s.update({f"{ATTENTION.format(1)}.attention_mask":
                       mask(True, 2)}), "attention_mask is missing, or fits"),
  (lambda s: [s.pop(f"classifiers.{k}.weight") for k in (1, 2)], "has 0 heads"),
  (lambda s: s.update({"classifiers.1.bias": np.full(4, np.nan)}),
   "not finite"),
  (lambda s: s.update({"classifiers.1.weight": np.float32(1)[...]}),
   "shape of classifiers.1.weight: (), expected (1, 8)"),
])  # fmt: skip
def test_other_states_are_refused(vit, change, said):
  found = state({n: a.copy() for n, a in vit[1].items()})
  change(found)
  with pytest.raises(TaskError) as error:
    tasks_of(vit, found)
  assert said in str(error.value)
  assert "task.pt" in str(error.value)


# The command. It needs torch, which the fast tests do not have.


class FakeTensor(np.ndarray):
  """The part of a torch tensor that the import uses."""

  def detach(self):
    return self

  def to(self, dtype):
    return self.astype(dtype)

  def numpy(self):
    return np.asarray(self)

  def numel(self):
    return self.size


@pytest.fixture
def torch(monkeypatch, vit):
  """What loads any file as the state of `vit`."""
  made = type(sys)("torch")
  made.float32 = np.float32
  made.asked, made.more = [], {}

  def load(file, **options):
    made.asked.append(options)
    found = {**state(vit[1]), **made.more}
    return {n: a.view(FakeTensor) for n, a in found.items()}

  made.load = load
  monkeypatch.setitem(sys.modules, "torch", made)
  return made


def pt_file(path, compress=zipfile.ZIP_STORED, content=bytes(10_000)):
  with zipfile.ZipFile(path, "w", compress) as archive:
    archive.writestr("state/data/0", content)
  return path


def run(*arguments) -> int:
  return convert.main([str(argument) for argument in arguments])


@pytest.mark.fault("torch-code")
def test_the_command_writes_tasks(vit, tmp_path, torch, capsys):
  file, out = pt_file(tmp_path / "a.pt"), tmp_path / "tasks"
  flags = [f"--task={file}", f"--backbone={vit[0]}"]
  assert run(*flags, out) == 0
  assert "head-2" in capsys.readouterr().out
  # Nothing in the file may run.
  assert torch.asked == [{"map_location": "cpu", "weights_only": True}]
  found = mv.load_tasks([out], vit[2])
  assert [t.name for t in found] == ["head-1", "head-2"]
  assert found[0].provenance["converted_from"]["file"] == "a.pt"
  assert run(*flags, out) == 2
  assert "left as it is" in capsys.readouterr().err


@pytest.mark.fault("torch-code")
def test_unsafe_files_are_refused_before_torch(vit, tmp_path, torch, capsys):
  flags, out = [f"--backbone={vit[0]}", tmp_path / "out"], []
  packed = pt_file(tmp_path / "a.pt", zipfile.ZIP_DEFLATED, bytes(10**7))
  pickle = tmp_path / "b.pt"
  pickle.write_bytes(b"\x80\x04.")
  for file in (packed, pickle, tmp_path / "nowhere.pt"):
    assert run(f"--task={file}", *flags) == 2
    out.append(capsys.readouterr().err)
  assert "unpacking would give 10,000,000 bytes" in out[0]
  assert "was not written by torch.save" in out[1]
  assert "was not written by torch.save" in out[2]
  assert not torch.asked
  assert not (tmp_path / "out").exists()


@pytest.mark.fault("torch-code")
@pytest.mark.parametrize(("name", "array", "said"), [
  # One stored value, as of torch.expand; it must not be copied.
  ("a", np.broadcast_to(np.float32(1), (10**9, 10**9)),
   "arrays: 1,000,000,000,000,"),
  (0, np.ones(2, np.float32), "0 is not the name of an array"),
])  # fmt: skip
def test_unusable_state_dicts_are_refused(
  vit, tmp_path, torch, capsys, name, array, said
):
  torch.more = {name: array}
  file = pt_file(tmp_path / "a.pt")
  assert run(f"--task={file}", f"--backbone={vit[0]}", tmp_path / "out") == 2
  message = capsys.readouterr().err
  assert said in message
  assert "a.pt is not a state dict of arrays" in message


def test_a_zip_of_a_later_version_is_refused(vit, tmp_path, torch, capsys):
  file = pt_file(tmp_path / "a.pt")
  content = bytearray(file.read_bytes())
  content[content.rfind(b"PK\x01\x02") + 6] = 99
  file.write_bytes(content)
  assert run(f"--task={file}", f"--backbone={vit[0]}", tmp_path / "out") == 2
  assert "a.pt cannot be read: zip file version 9.9" in capsys.readouterr().err
  assert not torch.asked


def test_without_torch_one_line_says_so(vit, tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "torch", None)
  file = pt_file(tmp_path / "a.pt")
  assert run(f"--task={file}", f"--backbone={vit[0]}", tmp_path / "out") == 2
  message = capsys.readouterr().err
  assert "torch is not installed: install it for this one command" in message
  assert message.count("\n") == 1


def test_unusable_command_lines_are_refused(vit, tmp_path, capsys):
  npz = tmp_path / "a.npz"
  mv.save_backbone(vit[2], npz)
  for arguments, said in (
    (["--task=a.pt", tmp_path / "out"], "expected SOURCE OUT"),
    ([f"--backbone={npz}", "a", "b"], "expected SOURCE OUT"),
    (["--task=a.pt", f"--backbone={npz}", tmp_path / "out"],
     "not a model of transformers"),
  ):  # fmt: skip
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err
