"""Cache outputs of the frozen pass: computed once, read in every step."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.cache.run_cache import RunCache

__all__ = ["RunCache"]
