"""Checks the signatures of functions, for the import hook of jaxtyping."""

import re

import beartype

# What computes; in it, the functions that state shapes.
MODULES = (
  "memory_vit.evaluation",
  "memory_vit.exports",
  "memory_vit.images",
  "memory_vit.kinds",
  "memory_vit.looking",
  "memory_vit.model",
  "memory_vit.prediction",
  "memory_vit.tasks",
)
# Users may call these with anything: they, and not beartype, say what is wrong.
DOORS = {
  "memory_vit.evaluation.preprocess": ("preprocess", "_preprocessing_of"),
  "memory_vit.model.backbone": ("random_backbone",),
  "memory_vit.looking.attention_map": ("overlay", "_require_image"),
  "memory_vit.looking.attention_rollout": ("attention_rollout",),
  "memory_vit.looking.token_attention": (
    "read_attention", "token_attention",
  ),
  "memory_vit.tasks.compose": (
    "concatenate", "remove", "rename", "select", "task_tuple",
  ),
  "memory_vit.tasks.create": ("init_task", "_parents"),
  "memory_vit.tasks.program": (
    "accept_images", "encode", "forward", "in_slots", "make_program", "read",
  ),
  "memory_vit.tasks.slots": ("fill_slots",),
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
