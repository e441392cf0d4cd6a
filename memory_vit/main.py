"""Run the command `memory-vit train`, as a module for `python -m`."""

import sys

from memory_vit.commands import train

if __name__ == "__main__":
  sys.exit(train.main(sys.argv[1:]))
