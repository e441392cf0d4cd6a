"""Checks the signatures of functions, for the import hook of jaxtyping."""

import beartype

# What computes. Readers of files take bytes apart in loops: to check each call
# takes seconds, and no array has a shape there that is known before.
MODULES = (
  "memory_vit.evaluation.calibration",
  "memory_vit.evaluation.classification",
  "memory_vit.evaluation.confusion",
  "memory_vit.evaluation.cell_removal",
  "memory_vit.evaluation.evaluate",
  "memory_vit.evaluation.metrics",
  "memory_vit.evaluation.preprocess",
  "memory_vit.evaluation.split_predictions",
  "memory_vit.evaluation.verify",
  "memory_vit.exports.image_input",
  "memory_vit.exports.program",
  "memory_vit.images.view",
  "memory_vit.model",
  "memory_vit.prediction.attention_map",
  "memory_vit.prediction.attention_rollout",
  "memory_vit.prediction.attention_shares",
  "memory_vit.prediction.fixed_shapes",
  "memory_vit.prediction.image_attention",
  "memory_vit.prediction.placement",
  "memory_vit.prediction.predictions",
  "memory_vit.prediction.token_attention",
  "memory_vit.tasks.compose",
  "memory_vit.tasks.create",
  "memory_vit.tasks.image_check",
  "memory_vit.tasks.inference",
  "memory_vit.tasks.quiet_start",
  "memory_vit.tasks.slots",
  "memory_vit.tasks.split_forward",
)
# Users may call these with anything: they, and not beartype, say what is wrong.
DOORS = {
  "memory_vit.evaluation.preprocess": ("preprocess", "_evaluation_of"),
  "memory_vit.model.backbone": ("random_backbone",),
  "memory_vit.prediction.attention_map": ("overlay", "_require_image"),
  "memory_vit.prediction.attention_rollout": ("attention_rollout",),
  "memory_vit.prediction.token_attention": (
    "read_attention", "token_attention",
  ),
  "memory_vit.tasks.compose": (
    "concatenate", "remove", "rename", "select", "task_tuple",
  ),
  "memory_vit.tasks.create": ("init_task", "_parents"),
  "memory_vit.tasks.inference": (
    "accept_images", "encode", "fill_slots", "forward", "in_slots", "read",
  ),
  "memory_vit.tasks.quiet_start": ("quiet_memory",),
}  # fmt: skip


def checked(function):
  """`beartype.beartype`, but for `DOORS`."""
  if function.__qualname__ in DOORS.get(function.__module__, ()):
    return function
  return beartype.beartype(function)
