"""HTTP server that answers images; tasks can change while it runs."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.serving.app import create_app
  from memory_vit.serving.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
