"""Export models for servers and other programs, and tasks for a model hub."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from memory_vit.exports.export import export_model
  from memory_vit.exports.export_manifest import ExportReport
  from memory_vit.exports.image_input import ImageInput
  from memory_vit.exports.push import push_task

__all__ = ["ExportReport", "ImageInput", "export_model", "push_task"]
