"""A small pretrained ViT and a task for it, which come with the package.

`README.md`, beside this file, describes them.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent
# The backbone, in the layout of vit_jax.
BACKBONE = _FOLDER / "backbone.npz"
# The task: {train, test}_images, uint8 (n, 24, 24, 3), {train, test}_labels,
# uint8 (n,), and class_names, (120,).
INVERTED = _FOLDER / "inverted.npz"
