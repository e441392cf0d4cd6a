"""The command `memory-vit train`, as a module that is run by its name."""

import sys

from memory_vit.commands import train

if __name__ == "__main__":
  sys.exit(train.main(sys.argv[1:]))
