"""Linear heads in closed form, by scikit-learn, in float64 on the host.

Each solver takes features (n, d), the targets of its kind as losses take them,
and the number c of outputs; each class has an image. Its `Solution` has the
estimator's decision function as outputs; of two classes, of which it has one
number z, -z/2 and z/2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64, Num
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import RidgeClassifierCV, RidgeCV
from sklearn.model_selection import KFold, StratifiedKFold

from memory_vit.errors import DataError

# Penalties of ridge regression, in mean squared singular values of the centered
# features: the best ones of our test bed lie well inside.
_PENALTIES = np.logspace(-5, 3, 17)
# Folds of `cross_validated`.
FOLDS = 5


@dataclasses.dataclass(frozen=True, eq=False)  # it holds arrays
class Solution:
  """A linear head.

  Attributes:
    kernel: maps features to outputs.
    bias: of the outputs.
    strength: how much it is regularized, {"shrinkage": s} or {"penalty": a}.
  """

  kernel: Float64[np.ndarray, "d c"]
  bias: Float64[np.ndarray, " c"]
  strength: Mapping[str, float]

  def outputs(self, features: Float64[np.ndarray, "n d"]) -> np.ndarray:
    """The outputs for features, float64 (n, c)."""
    return features @ self.kernel + self.bias


Solver = Callable[[np.ndarray, np.ndarray, int], Solution]


def lda(
  features: Float64[np.ndarray, "n d"],
  classes: Num[np.ndarray, " n"],
  count: int,
) -> Solution:
  """Linear discriminant analysis with one shrunk covariance of all classes.

  The shrinkage is that of Ledoit and Wolf (2004) for the differences of all
  images from the means of their classes: scikit-learn's "auto" estimates one
  for each class, of few images each.
  """
  if len(classes) == count:
    raise DataError(
      'there is one image of each class, of which "lda" can tell no spread: '
      'expected more, or "ridge"'
    )
  sums = np.zeros((count, features.shape[1]))
  np.add.at(sums, classes, features)
  means = sums / np.bincount(classes)[:, None]
  within = features - means[classes]
  if not within.any():
    raise DataError(
      "the images of each class have all the same features: expected images "
      'that differ, or "ridge"'
    )
  shrinkage = float(ledoit_wolf_shrinkage(within, assume_centered=True))
  del within
  found = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage)
  found.fit(features, classes)
  return _of_classes(found, {"shrinkage": shrinkage})


def ridge_of_classes(
  features: Float64[np.ndarray, "n d"],
  classes: Num[np.ndarray, " n"],
  count: int,
) -> Solution:
  """Ridge regression to 1 for the class and -1 for all others.

  The penalty has the least squared error when each image is left out once.
  """
  found = RidgeClassifierCV(alphas=_penalties(features))
  found.fit(features, classes)
  return _of_classes(found, {"penalty": float(found.alpha_)})


def ridge_of_labels(
  features: Float64[np.ndarray, "n d"],
  labels: Num[np.ndarray, "n c"],
  count: int,
) -> Solution:
  """Ridge regression to 1 for labels and -1 for others; see `ridge`."""
  return ridge(features, 2.0 * labels - 1, count)


def ridge(
  features: Float64[np.ndarray, "n d"],
  targets: Num[np.ndarray, "n c"],
  count: int,
) -> Solution:
  """Ridge regression, each output with a penalty of its own.

  The penalty has the least squared error when each image is left out once.
  """
  if len(targets) < 2:
    raise DataError("there is one image: expected at least two")
  found = RidgeCV(
    alphas=_penalties(features), alpha_per_target=targets.shape[1] > 1
  )
  found.fit(features, targets.astype(np.float64))
  kernel, bias = np.atleast_2d(found.coef_).T, np.ravel(found.intercept_)
  penalty = float(np.exp(np.log(found.alpha_).mean()))
  return Solution(kernel, bias, {"penalty": penalty})


def solve(
  solver: Solver, features: np.ndarray, targets: np.ndarray, count: int
) -> Solution:
  """Solve with features of any floating type, float64 inside.

  Raises:
    DataError: for features that are not finite or all the same, and what a
      solver refuses.
  """
  rows = features.astype(np.float64)
  broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
  if broken.size:
    raise DataError(
      f"the features of {broken.size:,} of {len(rows):,} images are not "
      "finite: look for broken images, or a backbone that overflows "
      "(config.dtype)"
    )
  if (rows == rows[0]).all():
    raise DataError("the features of all images are the same")
  with _quiet():
    return solver(rows, targets, count)


def cross_validated(
  solver: Solver,
  features: np.ndarray,
  targets: np.ndarray,
  count: int,
  seed: int,
) -> np.ndarray | None:
  """Outputs for each image of a head that has not seen it, float64 (n, c).

  The images are divided into 5 folds at random by `seed`, or into as many as
  the rarest class has images. None if a class has a single image, or if a fold
  cannot be solved.
  """
  images, splitter = len(targets), KFold
  if targets.ndim == 1:  # of classes
    images, splitter = int(np.bincount(targets).min()), StratifiedKFold
  if min(images, FOLDS) < 2:
    return None
  folds = splitter(min(images, FOLDS), shuffle=True, random_state=seed)
  outputs = np.zeros((len(targets), count))
  for kept, held in folds.split(features, targets):
    try:
      found = solve(solver, features[kept], targets[kept], count)
    except DataError:  # such as one image of each class
      return None
    outputs[held] = found.outputs(features[held].astype(np.float64))
  return outputs


def _of_classes(found: Any, strength: Mapping[str, float]) -> Solution:
  kernel, bias = np.atleast_2d(found.coef_).T, np.ravel(found.intercept_)
  if len(bias) == 1:
    half = np.array([-0.5, 0.5])
    kernel, bias = kernel * half, bias * half
  return Solution(kernel, bias, strength)


def _penalties(features: np.ndarray) -> np.ndarray:
  """Penalties for features of any scale."""
  images, width = features.shape
  return _PENALTIES * features.var(axis=0).sum() * images / min(images, width)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Without warnings: what they are about was checked, or is estimated."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    yield
