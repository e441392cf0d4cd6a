"""VTAB-1k: one of 19 tasks; `python -m studies.vtab` trains all of them.

  memory-vit train --config=vtab:cifar --workdir=DIR \\
    --config.data.dir=DATA/cifar

The command trains one task on its 1,000 images. DATA is the prepared folder of
the benchmark, and its subfolders are the tasks: cifar, caltech101, dtd, ...
(docs/dev/studies.md). `python -m studies.vtab` of the repository first chooses
the learning rate, then trains all tasks. Accuracy and time were not measured.
"""

import ml_collections

from memory_vit.configs import base


def get_config(name: str = "") -> ml_collections.ConfigDict:
  """The protocol of the benchmark, for one task or for all tasks."""
  config = base.get_config()
  config.backbone = "i21k-B/16"
  # Like the benchmark's authors, resize to a square, without crop or flip.
  config.data.train_crop = "resize"
  config.data.eval_crop = "resize"
  config.data.flip = False
  # Usual settings for frozen backbones on this benchmark: AdamW, 100 epochs,
  # batches of 64, warm-up for 10 epochs, then a cosine schedule.
  config.optim.name = "adamw"
  config.optim.weight_decay = 1e-4
  config.optim.warmup = 0.1
  config.learning_rate = 1e-3
  config.batch_size = 64
  config.batch_size_eval = 256
  config.epochs = 100.0
  # All tasks share compiled programs. With 398 outputs, even the head of sun397
  # (397 classes) has padding; a head without padding would need other programs.
  config.task.padded_classes = 398
  config.checkpoint_every = 500
  # Without crop and flip images never change: the backbone runs once for each
  # image. Keys and values of 1,000 images take 7.3 GB for a B/16, and twice as
  # much in float32. cache.where "device" is faster if the device has room.
  config.cache.what = "contexts"
  config.cache.dtype = "bfloat16"
  if not name:
    # studies.vtab searches these learning rates, and sets the options of data.
    config.sweep.learning_rate = (3e-4, 1e-3, 3e-3, 1e-2)
    return config
  config.task.name = name
  config.data.name = "list"
  config.data.train = "train800val200"
  config.data.validation = ""
  config.data.test = "test"
  return config
