"""VTAB-1k: 19 tasks of 1,000 images, all by `python -m studies.vtab`.

  memory-vit train --config=vtab:cifar --workdir=DIR \\
    --config.data.dir=DATA/cifar

trains one task on its 1,000 images, in the prepared folder of the benchmark;
its folders are the tasks: cifar, caltech101, dtd, ... (docs/dev/studies.md).
`python -m studies.vtab` of the repository first chooses the learning rate, then
trains all tasks.
Accuracy and time: not measured by us.
"""

import ml_collections

from memory_vit.configs import base


def get_config(name: str = "") -> ml_collections.ConfigDict:
  """The protocol of the benchmark, of one task or of all."""
  config = base.get_config()
  config.backbone = "i21k-B/16"
  # Resized to a square without crop or flip, as the benchmark's authors do.
  config.data.train_crop = "resize"
  config.data.eval_crop = "resize"
  config.data.flip = False
  # As the benchmark is tuned for frozen backbones: AdamW, 100 epochs of batches
  # of 64, 10 of them to warm up, then a cosine.
  config.optim.name = "adamw"
  config.optim.weight_decay = 1e-4
  config.optim.warmup = 0.1
  config.learning_rate = 1e-3
  config.batch_size = 64
  config.batch_size_eval = 256
  config.epochs = 100.0
  # All tasks share compiled programs. Sun397 has 397 classes: one more output
  # pads its head, too, which would otherwise compile its own programs.
  config.task.padded_classes = 398
  config.checkpoint_every = 500
  # Without crop and flip images never change: the backbone runs once for each.
  # 1,000 contexts of a B/16 take 7.3 GB, and twice as much in float32; "device"
  # is faster if they fit.
  config.cache.what = "contexts"
  config.cache.dtype = "bfloat16"
  if not name:
    # For the search of studies.vtab; its --regimes and --seeds set the rest.
    config.sweep.learning_rate = (3e-4, 1e-3, 3e-3, 1e-2)
    return config
  config.task.name = name
  config.data.name = "list"
  config.data.train = "train800val200"
  config.data.validation = ""
  config.data.test = "test"
  return config
