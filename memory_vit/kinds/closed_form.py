"""Linear heads in closed form, by scikit-learn, in float64 on the host.

Each solver takes features (n, d), targets in the form that losses take, and the
number c of outputs; each class must have an image. The outputs of a `Solution`
are the decision function of scikit-learn's estimator. For two classes this
function is one number z, and the outputs are -z/2 and z/2.
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

# Penalties of ridge regression, as multiples of the mean squared singular value
# of the centered features. On our test bed, the best penalty is never near the
# smallest or the largest one.
_PENALTIES = np.logspace(-5, 3, 17)
FOLDS = 5


@dataclasses.dataclass(frozen=True, eq=False)  # == fails for arrays
class Solution:
  """A linear head.

  Attributes:
    kernel: maps features to outputs.
    bias: constants that are added to the outputs.
    strength: regularization, {"shrinkage": s} or {"penalty": a}.
  """

  kernel: Float64[np.ndarray, "d c"]
  bias: Float64[np.ndarray, " c"]
  strength: Mapping[str, float]

  def outputs(self, features: Float64[np.ndarray, "n d"]) -> np.ndarray:
    """Return the outputs for features, float64 (n, c)."""
    return features @ self.kernel + self.bias


Solver = Callable[[np.ndarray, np.ndarray, int], Solution]


def lda(
  features: Float64[np.ndarray, "n d"],
  classes: Num[np.ndarray, " n"],
  count: int,
) -> Solution:
  """Fit linear discriminant analysis with one shrunk covariance of all classes.

  The shrinkage is estimated (Ledoit and Wolf, 2004) from the deviations of all
  images from their class means, because scikit-learn's "auto" would estimate it
  for each class from few images.
  """
  if len(classes) == count:
    raise DataError(
      'each class has only one image, but "lda" measures the spread within '
      'classes: use several images of a class, or "ridge"'
    )
  sums = np.zeros((count, features.shape[1]))
  np.add.at(sums, classes, features)
  means = sums / np.bincount(classes)[:, None]
  within = features - means[classes]
  if not within.any():
    raise DataError(
      'in each class, all images have the same features, but "lda" measures '
      'the spread within classes: use images that differ, or "ridge"'
    )
  shrinkage = float(ledoit_wolf_shrinkage(within, assume_centered=True))
  del within
  model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage)
  model.fit(features, classes)
  return _of_classes(model, {"shrinkage": shrinkage})


def ridge_of_classes(
  features: Float64[np.ndarray, "n d"],
  classes: Num[np.ndarray, " n"],
  count: int,
) -> Solution:
  """Fit ridge regression; the targets are 1 for an image's class, else -1.

  The penalty minimizes the squared error of leave-one-out cross-validation.
  """
  model = RidgeClassifierCV(alphas=_penalties(features))
  model.fit(features, classes)
  return _of_classes(model, {"penalty": float(model.alpha_)})


def ridge_of_labels(
  features: Float64[np.ndarray, "n d"],
  labels: Num[np.ndarray, "n c"],
  count: int,
) -> Solution:
  """Fit `ridge`; the targets are 1 for the labels of an image, else -1."""
  return ridge(features, 2.0 * labels - 1, count)


def ridge(
  features: Float64[np.ndarray, "n d"],
  targets: Num[np.ndarray, "n c"],
  count: int,
) -> Solution:
  """Fit ridge regression with a separate penalty for each output.

  Each penalty minimizes the squared error of leave-one-out cross-validation.
  """
  if len(targets) < 2:
    raise DataError("there is only one image: expected at least two")
  model = RidgeCV(
    alphas=_penalties(features), alpha_per_target=targets.shape[1] > 1
  )
  model.fit(features, targets.astype(np.float64))
  kernel, bias = np.atleast_2d(model.coef_).T, np.ravel(model.intercept_)
  penalty = float(np.exp(np.log(model.alpha_).mean()))
  return Solution(kernel, bias, {"penalty": penalty})


def solve(
  solver: Solver, features: np.ndarray, targets: np.ndarray, count: int
) -> Solution:
  """Solve for a head in float64, from features of any floating type.

  Raises:
    DataError: if features are not finite or are all the same, or if the solver
      refuses the images.
  """
  rows = features.astype(np.float64)
  broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
  if broken.size:
    raise DataError(
      f"the features of {broken.size:,} of {len(rows):,} images are not "
      "finite: look for broken images, or set config.dtype to 'float32' if "
      "the backbone overflows"
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
  """Return each image's outputs by a head not trained on it, float64 (n, c).

  The images are split at random, by `seed`, into 5 folds, or into m folds if
  the rarest class has only m < 5 images. Return None if a class has a single
  image, or if the head of a fold cannot be solved.
  """
  images, splitter = len(targets), KFold
  if targets.ndim == 1:  # the targets are classes
    images, splitter = int(np.bincount(targets).min()), StratifiedKFold
  if min(images, FOLDS) < 2:
    return None
  folds = splitter(min(images, FOLDS), shuffle=True, random_state=seed)
  outputs = np.zeros((len(targets), count))
  for train, test in folds.split(features, targets):
    try:
      solution = solve(solver, features[train], targets[train], count)
    except DataError:  # for example, if each class has one training image
      return None
    outputs[test] = solution.outputs(features[test].astype(np.float64))
  return outputs


def _of_classes(model: Any, strength: Mapping[str, float]) -> Solution:
  kernel, bias = np.atleast_2d(model.coef_).T, np.ravel(model.intercept_)
  if len(bias) == 1:
    half = np.array([-0.5, 0.5])
    kernel, bias = kernel * half, bias * half
  return Solution(kernel, bias, strength)


def _penalties(features: np.ndarray) -> np.ndarray:
  """Return `_PENALTIES` times the mean squared singular value of features."""
  images, width = features.shape
  return _PENALTIES * features.var(axis=0).sum() * images / min(images, width)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Suppress scikit-learn's warnings: `solve` checks the features itself."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    yield
