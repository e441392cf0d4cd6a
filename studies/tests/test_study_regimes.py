"""The table of all regimes: differences and their errors."""

import dataclasses
import json
import math

import numpy as np
import pytest
from fake_studies import follow, small_study

from memory_vit.errors import MemoryVitError
from memory_vit.evaluation import PairedDifference, paired_difference
from memory_vit.evaluation.hits import Hits, write_hits
from memory_vit.model.vit_config import vit_config
from studies.paper import regime_table, report
from studies.record import directory_of, markdown_table


def hits_of(right, counted=None):
  right = np.asarray(right, bool)
  counted = np.ones_like(right) if counted is None else np.asarray(counted)
  return Hits(right, counted)


def test_paired_difference_equals_that_of_the_accuracies():
  rng = np.random.default_rng(0)
  first, second = rng.random((2, 3, 40)) < 0.6
  found = paired_difference([*map(hits_of, first)], [*map(hits_of, second)])
  each = first.astype(float) - second
  assert found.difference == pytest.approx(first.mean() - second.mean())
  assert found.over_images == pytest.approx(
    each.mean(0).std(ddof=1) / math.sqrt(40)
  )
  assert found.over_seeds == pytest.approx(
    each.mean(1).std(ddof=1) / math.sqrt(3)
  )
  assert found.seeds == 3


def test_images_on_which_both_agree_add_no_error():
  """Two that agree on all images but one: the error comes from that one."""
  right = np.arange(100) % 2 == 0
  better = right.copy()
  better[1] = True
  found = paired_difference([hits_of(better)] * 2, [hits_of(right)] * 2)
  assert found.difference == pytest.approx(0.01)
  assert found.over_images == pytest.approx(0.01)
  assert found.over_seeds == 0
  alone = math.sqrt(right.mean() * (1 - right.mean()) / 100)
  assert found.over_images < alone / 4


def test_errors_agree_with_the_spread_of_repeated_studies():
  """With images of their own, and with seeds of their own."""
  rng = np.random.default_rng(1)

  def study(gain, images, seeds):
    """An ability for each image, a shift for each seed."""
    shifts = 0.03 * rng.standard_normal((2, seeds, 1))
    ability = rng.random(images)
    draws = ability + 0.1 * rng.standard_normal((2, seeds, images)) + shifts
    first, second = draws[0] + gain > 0.5, draws[1] > 0.5
    return paired_difference([*map(hits_of, first)], [*map(hits_of, second)])

  found = [study(0.0, 400, 4) for _ in range(300)]
  spread = np.std([one.difference for one in found])
  errors = [math.hypot(one.over_images, one.over_seeds) for one in found]
  assert 0.8 * spread < np.median(errors) < 1.6 * spread
  # Few are clear by chance, and real differences are found.
  assert np.mean([one.is_clear for one in found]) < 0.15
  found = [study(0.15, 400, 4) for _ in range(50)]
  assert np.mean([one.is_clear for one in found]) > 0.9


def test_uncounted_examples_are_left_out():
  first = [hits_of([1, 1, 0, 0], [True, True, True, False])]
  second = [hits_of([0, 1, 0, 0], [True, True, False, True])]
  found = paired_difference(first, second)
  assert found.difference == pytest.approx(0.5)
  # One seed does not tell the variation between seeds.
  assert (found.over_seeds, found.is_clear, found.seeds) == (None, None, 1)
  assert paired_difference([], []) is None
  none = hits_of([0, 0], [False, False])
  assert paired_difference([none], [none]) is None
  with pytest.raises(ValueError, match=r"splits of \[2, 4\] examples"):
    paired_difference(first, [none])


def test_difference_is_clear_beyond_two_combined_errors():
  clear = PairedDifference(0.05, 0.015, 0.02, 3)
  assert math.hypot(0.015, 0.02) == pytest.approx(0.025)
  for difference, expected in ((0.051, True), (0.049, False), (-0.051, True)):
    one = dataclasses.replace(clear, difference=difference)
    assert one.is_clear is expected


SIZE = 1_000


@pytest.fixture
def study(backbone_file):
  study = small_study(backbone_file)
  return dataclasses.replace(
    study,
    regimes=("head", "cls_masked", "memory_masked", "norms_masked", "memory"),
    seeds=(0, 4, 5),
  )


def finished(study, workdir, gains):
  """Trials and hits of a study; the higher rate is the better one."""

  _, found = follow(study, ["regimes"], lambda run, rate: rate)
  for name, trials in found.items():
    hits = {}
    for i, trial in enumerate(trials):
      kind = (trial.regime, trial.cells)
      gain = gains.get(kind, 0.0)
      share = 0.2 + trial.learning_rate + gain + 0.001 * trial.seed
      right = np.arange(SIZE) < round(share * SIZE)
      trials[i] = dataclasses.replace(
        trial, name=f"t-{i:02}", test=float(right.mean())
      )
      hits[f"t-{i:02}"] = hits_of(right)
    directory = directory_of(workdir, name)
    directory.mkdir(parents=True)
    write_hits(directory, hits)
  return [trial for trials in found.values() for trial in trials]


def test_each_row_is_a_regime_at_its_best_learning_rate(study, tmp_path):
  gains = {("norms_masked", 0): 0.1, ("memory_masked", 5): -0.05}
  trials = finished(study, tmp_path, gains)
  found = regime_table.section(
    study, trials, tmp_path, vit_config("Micro/2", image_size=8)
  )
  rows = {(row["regime"], row["cells"]): row for row in found.rows}
  # Full attention only has the cells of the configuration.
  assert {*rows} == {
    ("head", None), ("cls_masked", None), ("norms_masked", None),
    ("memory_masked", 1), ("memory_masked", 5), ("memory", 5),
  }  # fmt: skip
  sizes = [row["without head"] for row in found.rows]
  assert sizes == sorted(sizes)
  assert rows["cls_masked", None]["difference"] is None
  assert rows["cls_masked", None]["paired seeds"] is None
  for setting, expected in (
    (("norms_masked", None), 0.1), (("memory_masked", 5), -0.05),
    (("memory_masked", 1), 0.0),
  ):  # fmt: skip
    row = rows[setting]
    assert (row["learning rate"], row["end of range"]) == (0.3, "highest")
    assert row["difference"] == pytest.approx(expected)
    assert row["error over seeds"] == pytest.approx(0, abs=1e-12)
    # This share of images differs, all in one direction.
    share = abs(expected)
    assert row["error over images"] == pytest.approx(
      math.sqrt(share * (1 - share) / (SIZE - 1)), rel=0.05
    )
    assert row["clear"] is (expected != 0)
    assert row["seeds"] == row["paired seeds"] == 3
  pairs = {
    (row["regime"], row["compared to"]): row for row in found.comparisons
  }
  row = pairs["norms_masked", "memory_masked (5 cells)"]
  assert row["difference"] == pytest.approx(0.15)
  text = markdown_table(report.formatted(found.rows))
  assert "| +10.0 | 0.9 | 0.0 | yes | 3 |" in text
  assert "| -5.0 | 0.7 | 0.0 | yes | 3 |" in text


def test_learning_rate_at_which_a_seed_diverged_is_not_compared(
  study, tmp_path
):
  trials = finished(study, tmp_path, {("norms_masked", 0): 0.1})
  lost = [
    dataclasses.replace(t, validation=None, test=None, name=None)
    if (t.regime, t.seed, t.learning_rate) == ("norms_masked", 4, 0.3) else t
    for t in trials
  ]  # fmt: skip
  vit = vit_config("Micro/2", image_size=8)
  before, after = (
    next(r for r in found.rows if r["regime"] == "norms_masked")
    for found in (
      regime_table.section(study, some, tmp_path, vit)
      for some in (trials, lost)
    )
  )
  assert (before["learning rate"], after["learning rate"]) == (0.3, 0.1)
  # The class token at 0.3, against 0.1 plus the gain.
  assert after["difference"] == pytest.approx(-0.1)
  # Divergence at a learning rate that was not chosen has no effect.
  unaffected = [
    dataclasses.replace(t, validation=None, test=None, name=None)
    if (t.regime, t.seed, t.learning_rate) == ("head", 4, 0.1) else t
    for t in trials
  ]  # fmt: skip
  rows = regime_table.section(study, unaffected, tmp_path, vit).rows
  (head,) = (row for row in rows if row["regime"] == "head")
  assert (head["learning rate"], head["seeds"]) == (0.3, 3)


@pytest.mark.fault("changed-run")
def test_hits_of_other_images_are_refused(study, tmp_path):
  trials = finished(study, tmp_path, {})
  vit = vit_config("Micro/2", image_size=8)
  name = next(t.run for t in trials if t.regime == "head")
  directory = directory_of(tmp_path, name)
  # A run without hits.
  (directory / "hits.json").unlink()
  found = regime_table.section(study, trials, tmp_path, vit)
  (head,) = (row for row in found.rows if row["regime"] == "head")
  assert head["difference"] == pytest.approx(0)
  assert (head["seeds"], head["paired seeds"]) == (3, 2)
  write_hits(directory, {"t-01": hits_of([1]), "t-00": hits_of([1])})
  with pytest.raises(MemoryVitError, match="were tested on other images"):
    regime_table.section(study, trials, tmp_path, vit)
  (directory / "hits.json").write_text(json.dumps({"t-00": {}}))
  with pytest.raises(MemoryVitError, match="the hits of 't-00' cannot be read"):
    regime_table.section(study, trials, tmp_path, vit)
