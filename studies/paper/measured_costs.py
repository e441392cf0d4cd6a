"""Count parameters of the regimes in arrays, and FLOPs in compiled programs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import memory_vit as mv
from memory_vit.model import NO_SIDE, SideKind, get_regime, probe_features
from studies.paper.costs import Cost, flops, parameters
from studies.paper.study import Study


def measure(study: Study, vit: mv.ViTConfig) -> list[dict[str, Any]]:
  """Costs of all regimes of a study, for `costs.json`."""
  task = study.task
  side = SideKind(task.side_width, task.side_mixing)
  return [
    dataclasses.asdict(cost_of(vit, name, task.cells, task.bottleneck, side))
    for name in study.regimes_of("costs")
  ]


def cost_of(
  vit: mv.ViTConfig,
  regime: str,
  cells: int,
  bottleneck: int,
  side: SideKind = NO_SIDE,
) -> Cost:
  """Compute the cost of a regime; options that it lacks are ignored."""
  vit = dataclasses.replace(vit, num_classes=0)
  kind = get_regime(regime)
  cells = cells if kind.has("memory") else 0
  bottleneck = bottleneck if "bottleneck" in kind.fields else 0
  spec = mv.TaskSpec(
    name="task",
    num_classes=1,
    cells=cells,
    regime=regime,
    bottleneck=bottleneck,
    side_width=side.width if kind.has("side") else 0,
    side_mixing=side.mixing if kind.has("side") else "",
    backbone=mv.Backbone(vit, {}, "").id,
    preprocessing=mv.EvalPreprocessing(image_size=vit.image_size),
  )
  shapes = spec.expected_shapes(vit.width, vit.depth, vit.summary_tokens)
  shapes.pop("head")
  counted = _count(shapes)
  if kind.holds_backbone:
    counted += _count(_backbone_shapes(vit))
  each, once = flops(vit, regime, cells, bottleneck, side)
  return Cost(
    regime=regime,
    parameters=parameters(vit, regime, cells, bottleneck, side),
    parameters_counted=counted,
    flops=each + once,
    flops_once=once,
    flops_xla=_compiled_flops(vit, spec, shapes),
  )


def _count(tree: Any) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _backbone_shapes(vit: mv.ViTConfig) -> Any:
  image = jax.ShapeDtypeStruct(
    (1, vit.image_size, vit.image_size, 3), jnp.float32
  )
  made = jax.eval_shape(mv.MemoryViT(vit).init, jax.random.key(0), image)
  return made["params"]["backbone"]


def _compiled_flops(
  vit: mv.ViTConfig, spec: mv.TaskSpec, params: dict[str, Any]
) -> float | None:
  """FLOPs of the compiled forward pass of one image, without a head."""
  image = jax.ShapeDtypeStruct(
    (1, vit.image_size, vit.image_size, 3), jnp.float32
  )

  def forward(
    module: mv.MemoryViT, image: jax.Array, params: dict[str, Any]
  ) -> Any:
    kind = spec.learned
    if kind.has("probe"):
      summary = module.backbone.summarize(image)
      return probe_features(params["probe"], summary)
    if kind.on_features:
      return module.encode(image)[0]
    if not kind.composes:
      return module.backbone.fine_tuned(image, params, spec)
    outputs, context = module.encode(image)
    return outputs, module.task_features([params], (spec,), context)

  program = functools.partial(mv.MemoryViT(vit).apply, method=forward)
  variables = {"params": {"backbone": _backbone_shapes(vit)}}
  lowered = jax.jit(program).lower(variables, image, params)
  analysis = lowered.compile().cost_analysis() or {}
  return analysis.get("flops")
