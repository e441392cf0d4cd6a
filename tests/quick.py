"""How XLA compiles in tests, where compiling takes more time than all else."""

import importlib.metadata

_FLAGS = [
  "--xla_backend_optimization_level=0",
  "--xla_cpu_parallel_codegen_split_count=1",
  "--xla_llvm_disable_expensive_passes=true",
]
# Since 0.11 jaxlib has no other emitters of fusions, and ends the process
# where it is given a flag that it does not know.
_JAXLIB = importlib.metadata.version("jaxlib")
if tuple(int(part) for part in _JAXLIB.split(".")[:2]) < (0, 11):
  _FLAGS.append("--xla_cpu_use_fusion_emitters=false")

# With these less than half of the time.
XLA_FLAGS = " ".join(_FLAGS)
