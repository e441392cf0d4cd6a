"""Serve the application on Ray Serve: replicas that share one set of tasks."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.ray_serve.deployment import application

__all__ = ["application"]
