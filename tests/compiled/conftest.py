"""Programs are compiled as users compile them, and not quickly."""

import os

# The flags of other tests are read by libtpu, too.
del os.environ["XLA_FLAGS"]
