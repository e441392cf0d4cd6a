"""The test bed of docs/reference/results.md: drawn characters for a small ViT.

  python -m studies.paper --config=glyphs:NAME --workdir=DIR \\
    --config.data.dir=DATA --config.backbone=FILE --only=regimes \\
    --learning_rates=0.03,0.1,0.3,1,3 --seeds=0,1,2,3,4 --cells=5,20

NAME is a data set in DATA, near to the backbone's training data or far from it:
`glyph_new100` (near: new characters), `glyph_inverted` (far: light on dark, in
noise) or `glyph_rotation` (far: how much a character is rotated, which the
backbone was trained to ignore). FILE is a backbone for 24 px. Measured results:
docs/reference/results.md.
"""

import ml_collections

from memory_vit.configs import tfds


def get_config(name: str = "glyph_inverted") -> ml_collections.ConfigDict:
  """About ten epochs of a few thousand small images."""
  config = tfds.get_config(name)
  config.image_size = 24
  config.batch_size = 64
  config.batch_size_eval = 400
  # A mirrored or cropped character may be another character. Images are never
  # augmented, so all runs of a study can share the keys and values on disk.
  config.data.flip = False
  config.data.train_crop = "resize"
  config.cache.what = "contexts"
  config.cache.where = "disk"
  config.total_steps = 500
  # Evaluate only at the last step, so that runs are compared at the same step.
  config.eval_every = 500
  config.checkpoint_every = 500
  config.log_every = 250
  return config
