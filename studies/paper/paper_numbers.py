"""The paper's own top-1 accuracies, beside which a study is reported."""

from collections.abc import Mapping

from studies.paper.study import Study, slug

# Table 2, ViT-B/32; numbers are cells of the regime `memory`.
_TABLE2: Mapping[str, Mapping[str | int, float]] = {
  "sun397": {
    "full": 0.769, "head": 0.759, "head_cls": 0.764,
    1: 0.770, 5: 0.768, 10: 0.769, 20: 0.769,
  },
  "inaturalist2017": {
    "full": 0.540, "head": 0.463, "head_cls": 0.487,
    1: 0.494, 5: 0.501, 10: 0.500, 20: 0.500,
  },
  "cifar100": {
    "full": 0.918, "head": 0.858, "head_cls": 0.886,
    1: 0.909, 5: 0.910, 10: 0.911, 20: 0.909,
  },
  "places365": {
    "full": 0.559, "head": 0.509, "head_cls": 0.524,
    1: 0.533, 5: 0.538, 10: 0.539, 20: 0.541,
  },
}  # fmt: skip
# Names of these data sets in TFDS, and in our configurations.
_NAMES = {
  "sun397": "sun397", "sun397-tfds": "sun397", "cifar100": "cifar100",
  "inaturalist2017": "inaturalist2017", "i_naturalist2017": "inaturalist2017",
  "places365": "places365", "places365_small": "places365",
}  # fmt: skip
# Section 4.4: i-Naturalist alone, then + Places, + CIFAR, + SUN.
INTERFERENCE = (0.500, 0.281, 0.278, 0.173)
# Table 4, i-Naturalist: accuracy and number of parameters.
ADAPTERS = {
  "memory": (0.501, "46 K"),
  "adapter": (0.499, "737 K"),
  "adapter_memory": (0.503, "783 K"),
}


def table2(study: Study) -> Mapping[str | int, float]:
  """Row of the paper's Table 2; keys are regimes, or cells of `memory`."""
  for name in (study.task.name, study.data.name):
    found = _NAMES.get(slug(name.split(":")[0]))
    if found:
      return _TABLE2[found]
  return {}
