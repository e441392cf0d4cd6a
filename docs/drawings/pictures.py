"""All drawings by the names of their files."""

from docs.drawings import contexts, layers, masks, streams, task_sets, training

PICTURES = {
  "cached_contexts": contexts.draw,
  "layers": layers.draw,
  "task_sets": task_sets.draw,
  "training_step": training.draw,
  "two_streams": streams.draw,
  "who_sees_whom": masks.draw,
}
