"""Parameters and operations: by formula, by XLA, in the paper."""

import pytest
from fake_studies import small_study

import memory_vit as mv
from memory_vit.model import REGIMES, SideKind
from studies.paper import analysis, costs, measured_costs


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_costs_by_formula_agree_with_xla(backbone, regime):
  side = SideKind(3, "conv")
  cost = measured_costs.cost_of(
    backbone.config, regime, cells=3, bottleneck=2, side=side
  )
  assert cost.parameters == cost.parameters_counted
  # XLA also counts LayerNorm, softmax and biases.
  assert 1.0 < cost.flops_xla / cost.flops < 1.2
  if regime == "memory":
    # Each further cell: 2 layers; a key, a value; 17 queries attend to it.
    more = measured_costs.cost_of(
      backbone.config, regime, cells=7, bottleneck=2
    )
    expected = 4 * 2 * (2 * 2 * 32 * 32 + 2 * 2 * 17 * 32)
    assert more.flops - cost.flops == expected
    assert more.flops_xla - cost.flops_xla == pytest.approx(expected, rel=0.1)


def test_costs_agree_with_the_paper(backbone_file):
  config = mv.vit_config("B/32")
  assert costs.parameters(config, "full", 5, 5) == 87_455_232
  assert costs.parameters(config, "head", 5, 5) == 0
  assert costs.parameters(config, "head_cls", 5, 5) == 768
  assert costs.parameters(config, "memory", 5, 5) == 768 + 768 * 12 * 5
  assert costs.parameters(config, "adapter", 5, 5) == 768 + 184_320 + 18_552
  plain, once = costs.flops(config, "head", 0, 0)
  assert once == 0
  assert plain == pytest.approx(8.8e9, rel=0.01)
  masked, _ = costs.flops(config, "cls_masked", 0, 0)
  assert (masked - plain) / plain == pytest.approx(0.02, abs=0.003)
  stream, _ = costs.flops(config, "side_masked", 0, 0, SideKind(16, "conv"))
  assert (stream - masked) / plain == pytest.approx(0.0036, abs=1e-4)
  section = analysis.adapters(small_study(backbone_file), [], config)
  assert "184,320, and 18,552 biases" in " ".join(section.notes)


def test_table_5_shows_costs_computed_by_hand():
  """By hand: matrix products; a multiplication and an addition are 2."""
  d, depth, cells, tokens = 768, 12, 5, 7 * 7 + 1
  keys = depth * 2 * 2 * tokens * cells * d  # scores, and weighted values
  memory = depth * 2 * 2 * cells * d * d  # keys, and values
  token = depth * (
    4 * 2 * d * d + 2 * 2 * 4 * d * d + 2 * 2 * (tokens + 1 + cells) * d
  )
  block = 4 * (d * d + d) + 2 * 4 * d * d + 4 * d + d + 2 * 2 * d
  full = depth * block + (32 * 32 * 3 * d + d) + d + tokens * d + 2 * d
  found = [
    (row["by formula"], row["paper, Table 5"])
    for row in costs.section(mv.vit_config("Ti/16"), []).comparisons
  ]
  assert found == [
    (f"{full / 1e6:.1f} M", "80 M"),
    (f"{depth * block / 1e6:.1f} M", None),
    (f"{keys / 1e6:.1f} MFLOP", "about 25 MFLOP"),
    (f"{24 * 4 * 50 * 5 * 1024 / 1e6:.1f} MFLOP", None),
    (f"{12 * 4 * 145 * 5 * 768 / 1e6:.1f} MFLOP", None),
    (f"{memory / 1e6:.1f} MFLOP", None),
    (f"{token / 1e6:.1f} MFLOP", None),
  ]
  # Neither matches the paper's number, in either way of counting.
  for number in (keys, memory, keys + memory, token, token + memory):
    for operations in (number, number / 2):
      assert not 20e6 < operations < 30e6
