"""A small pretrained ViT, and data of a task for it, shipped with the package.

`README.md`, beside this file, describes both.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent
# Weights of the backbone, in the layout of vit_jax.
BACKBONE = _FOLDER / "backbone.npz"
# Data of the task: {train, test}_images, uint8 (n, 24, 24, 3);
# {train, test}_labels, uint8 (n,); and class_names, (120,).
INVERTED = _FOLDER / "inverted.npz"
