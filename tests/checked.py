"""Checks the signatures of functions, for the import hook of jaxtyping."""

import re
from pathlib import Path

import beartype

# Modules that compute and state shapes, by jaxtyping's types or by an alias of
# them. In the others every call would be bound to its signature for nothing.
_PACKAGE = Path(__file__).resolve().parent.parent / "memory_vit"
_COMPUTE = (
  "evaluation", "exports", "images", "kinds", "looking", "model", "prediction",
  "tasks",
)  # fmt: skip
MODULES = tuple(
  ".".join(["memory_vit", *file.relative_to(_PACKAGE).with_suffix("").parts])
  for name in _COMPUTE
  for file in sorted((_PACKAGE / name).rglob("*.py"))
  if re.search("jaxtyping|import Rotation", file.read_text(encoding="utf-8"))
)
# Users may call these with anything: they, and not beartype, say what is wrong.
DOORS = {
  "memory_vit.evaluation.preprocess": ("preprocess", "_preprocessing_of"),
  "memory_vit.looking.attention_map": ("overlay", "_require_image"),
  "memory_vit.looking.attention_rollout": ("attention_rollout",),
  "memory_vit.looking.token_attention": (
    "read_attention", "token_attention",
  ),
  "memory_vit.tasks.program": (
    "accept_images", "encode", "forward", "in_slots", "make_program", "read",
  ),
}  # fmt: skip


def _states_shapes(function) -> bool:
  """Whether a signature names a type of jaxtyping, or an alias of one."""
  stated = " ".join(map(str, function.__annotations__.values()))
  words = [function.__globals__.get(w) for w in re.findall(r"\w+", stated)]
  return "jaxtyping" in stated or any("jaxtyping" in str(w) for w in words)


def checked(function):
  """`beartype.beartype` where shapes are stated, but for `DOORS`."""
  if function.__qualname__ in DOORS.get(function.__module__, ()):
    return function
  return beartype.beartype(function) if _states_shapes(function) else function
