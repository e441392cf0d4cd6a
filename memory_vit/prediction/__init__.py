"""Answer images by a changing set of tasks, in fixed shapes."""
