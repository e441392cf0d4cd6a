"""The test bed of docs/reference/results.md: drawn characters for a small ViT.

  python -m studies.paper --config=glyphs:NAME --workdir=DIR \\
    --config.data.dir=DATA --config.backbone=FILE --only=regimes \\
    --learning_rates=0.03,0.1,0.3,1,3 --seeds=0,1,2,3,4 --cells=5,20

NAME is `glyph_new100` (near: characters that the backbone has not seen),
`glyph_inverted` (far: light on dark, with noise) or `glyph_rotation` (far: by
how much a character is turned, which the backbone was trained to ignore), as
prepared in DATA; FILE a backbone for 24 px. docs/reference/results.md has what
was measured.
"""

import ml_collections

from memory_vit.configs import tfds


def get_config(name: str = "glyph_inverted") -> ml_collections.ConfigDict:
  """Ten epochs or so of some thousands of small images."""
  config = tfds.get_config(name)
  config.image_size = 24
  config.batch_size = 64
  config.batch_size_eval = 400
  # A mirrored or cropped character may be another one. As images never change,
  # their keys and values are cached on disk for all runs of a study.
  config.data.flip = False
  config.data.train_crop = "resize"
  config.cache.what = "contexts"
  config.cache.where = "disk"
  config.total_steps = 500
  # Evaluated at the last step alone: all compared runs have the same length.
  config.eval_every = 500
  config.checkpoint_every = 500
  config.log_every = 250
  return config
