"""Published results on VTAB-1k, with sources and notes on their protocols.

All are of a ViT-B/16 pretrained on ImageNet-21k unless noted. "The mean" is
that of all 19 tasks in some papers and that of the three groups in others,
which differ by several points. Each number stands in the column of its kind and
is never converted. None was measured by us.
"""

import dataclasses

# Sources.
_VPETL = "V-PETL Bench, README of 2024-08-19"
_COMBO = "ComBo (2025), its table"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRow:
  """Accuracies of a method, in per cent."""

  method: str
  of_groups: float | None = None  # mean of the three group means
  of_tasks: float | None = None  # mean of the 19 tasks
  groups: tuple[float, float, float] | None = None  # as `GROUPS`
  # No gradient passes the backbone, so many tasks could share its pass.
  frozen: bool = False
  source: str
  note: str = ""


def _vpetl(method: str, mean: float, *, frozen: bool = False) -> PublishedRow:
  return PublishedRow(
    method=method, of_tasks=mean, frozen=frozen, source=_VPETL
  )


ROWS = (
  _vpetl("linear head", 52.94, frozen=True),
  _vpetl("full fine-tuning", 65.57),
  _vpetl("BitFit", 62.05),
  _vpetl("VPT-deep", 69.43),
  _vpetl("LST", 71.70, frozen=True),
  _vpetl("LoRA", 72.25),
  _vpetl("AdaptFormer", 72.32),
  _vpetl("SSF", 73.10),
  _vpetl("FacT", 73.23),
  _vpetl("NOAH", 73.25),
  _vpetl("RepAdapter", 73.84),
  _vpetl("DTL", 74.58),
  _vpetl("GPS", 75.18),
  _vpetl("HST", 75.99),
  PublishedRow(
    method="linear head",
    of_groups=61.0,
    groups=(73.9, 79.5, 29.6),
    frozen=True,
    source=_COMBO,
  ),
  PublishedRow(method="full fine-tuning", of_groups=74.2, source=_COMBO),
  PublishedRow(
    method="Head2Toe",
    of_groups=70.9,
    groups=(80.2, 84.7, 47.7),
    frozen=True,
    source=_COMBO,
    note="pooled features of all layers",
  ),
  PublishedRow(
    method="ComBo",
    of_groups=74.6,
    groups=(79.7, 84.5, 59.5),
    frozen=True,
    source=_COMBO,
    note="no augmentation, one learning rate for all tasks",
  ),
  PublishedRow(
    method="Adapter+",
    of_groups=77.6,
    source="Adapter+ (CVPR 2024)",
    note="tuned; shows that others normalize images wrongly for these weights",
  ),
)

NOTES = (
  "Numbers of V-PETL Bench are from its README; those of ComBo's table and of "
  "Adapter+ are second-hand, not from the papers themselves.",
  "The code of FacT and of SynQT, and code built on them, reports the best "
  "epoch on the test split. FacT's code normalizes by the mean and standard "
  "deviation of ImageNet, with which these weights were not trained.",
  "With equal tuning, parameter-efficient methods are alike on VTAB-1k (a "
  "study of Ohio State University, CVPR 2025): a difference of less than about "
  "a point between two papers is not meaningful.",
)
