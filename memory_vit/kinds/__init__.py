"""Kinds of tasks, and the scores of a task on a split."""
