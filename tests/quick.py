"""How XLA compiles in tests, where compiling takes more time than all else."""

# With the older emitters of fusions and in one part less than half of it.
XLA_FLAGS = " ".join(
  [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
  ]
)
