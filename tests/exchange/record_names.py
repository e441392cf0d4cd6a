"""Record the names that transformers and timm give to arrays of small models.

`.venv-exchange/bin/python tests/exchange/record_names.py` writes the file; the
tests without torch read it, and `test_names.py` compares the two.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from library_models import MODELS, save
from safetensors import safe_open

FILE = Path(__file__).parent.parent / "backbones" / "published_names.json"
# What differs between versions and machines, and says nothing of the model.
_LEFT_OUT = {"transformers_version", "dtype", "id2label", "label2id"}


def published_names(name: str) -> dict[str, Any]:
  """Of a model: {"config": its config.json, "arrays": {name: shape}}."""
  with tempfile.TemporaryDirectory() as folder:
    save(MODELS[name], MODELS[name].make(), Path(folder))
    config = json.loads((Path(folder) / "config.json").read_text())
    with safe_open(Path(folder) / "model.safetensors", "np") as arrays:
      shapes = {
        key: list(arrays.get_slice(key).get_shape())
        for key in sorted(arrays.keys())
      }
  return {"config": _pruned(config), "arrays": shapes}


def _pruned(config: Any) -> Any:
  """Without the unused configuration of the text tower."""
  if not isinstance(config, dict):
    return config
  left_out = _LEFT_OUT | {"text_config"}
  return {k: _pruned(v) for k, v in config.items() if k not in left_out}


def main() -> None:
  """Write the file, a line for each model."""
  lines = [
    f"{json.dumps(name)}: {json.dumps(published_names(name))}"
    for name in MODELS
  ]
  FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
  main()
