"""The paper's study on small images, with a small backbone, on CPU cores.

  python -m studies.paper --config=small_study:NAME \\
    --workdir=DIR --config.data.dir=DATA --config.backbone=FILE \\
    --learning_rates=0.03,0.1,0.3 --seeds=0,1 --cells=5,20

NAME is a TFDS data set that was prepared in DATA; FILE is a backbone for 64 px.
Hardware, time and accuracy: docs/reference/results.md.
"""

import ml_collections

from memory_vit.configs import tfds


def get_config(name: str = "") -> ml_collections.ConfigDict:
  """About two epochs of 9,000 images: all regimes take hours, not days."""
  config = tfds.get_config(name)
  config.batch_size = 64
  config.batch_size_eval = 250
  config.total_steps = 300
  config.eval_every = 100
  config.checkpoint_every = 300
  return config
