"""Memory, traffic and communication of a program, reported by the compiler.

Most values are read from the text of the compiled program, in which the TPU
compiler annotates instructions with expected cycles. All values are estimates.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Dtype, axes and layout of an array. S(1) in the layout means on-chip memory.
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_EXCHANGE = re.compile(
  r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
  r"|ragged-all-to-all|collective-broadcast)(-start)?"
)
# Operations that start no kernel and move no data.
_VIEWS = frozenset(
  ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "iota",
   "after-all", "opt-barrier", "partition-id", "replica-id")
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerReport:
  """A compiler's report on a program, for one device.

  Attributes:
    flops: floating point operations.
    cycles: the sum of estimated cycles, with each loop body counted once; 0 if
      the compiler estimates none.
    traffic: bytes that instructions read and write in device memory.
    arguments: bytes of arguments.
    results: bytes of results.
    temporaries: peak bytes of temporary memory.
    exchanged: {kind of collective operation: bytes of its results}.
    kernels: number of instructions that start a kernel.
  """

  flops: float
  cycles: int
  traffic: int
  arguments: int
  results: int
  temporaries: int
  exchanged: Mapping[str, int]
  kernels: int

  @classmethod
  def of(cls, compiled: Any) -> "CompilerReport":
    """Return the report on a `jax.stages.Compiled`."""
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    instructions = list(_entry(text))
    return cls(
      flops=(compiled.cost_analysis() or {}).get("flops", 0.0),
      cycles=sum(instruction.cycles for instruction in instructions),
      traffic=_traffic(instructions),
      arguments=memory.argument_size_in_bytes,
      results=memory.output_size_in_bytes,
      temporaries=memory.temp_size_in_bytes,
      exchanged=exchanged(text),
      kernels=sum(
        step.operation not in _VIEWS and not step.operation.endswith("-done")
        for step in instructions
      ),
    )


def exchanged(text: str) -> dict[str, int]:
  """Return {collective operation: bytes of its results} of a program."""
  totals: collections.Counter[str] = collections.Counter()
  channels: set[str] = set()
  for line in text.splitlines():
    instruction = _parsed(line) if _EXCHANGE.search(line) else None
    kind = instruction and _EXCHANGE.fullmatch(instruction.operation)
    if instruction and kind:
      # If an operation overlaps with matrix products, the TPU compiler lists it
      # several times with the same channel: count it only once.
      channel = _CHANNEL.search(line)
      if channel and channel[1] in channels:
        continue
      channels.update(channel.groups() if channel else ())
      buffers = instruction.buffers
      # The buffers of collective-permute-start and all-gather-start begin with
      # the operands: keep only the results.
      if kind[2] and kind[1] == "collective-permute":
        buffers = buffers[1:2]
      elif kind[2] and kind[1] == "all-gather":
        buffers = buffers[len(buffers) // 2 :]
      totals[kind[1]] += sum(buffer.bytes for buffer in buffers)
  return dict(totals)


class _Buffer(NamedTuple):
  bytes: int
  is_local: bool  # in on-chip memory


class _Instruction(NamedTuple):
  name: str
  operation: str
  buffers: list[_Buffer]  # arrays of the result
  operands: list[str]
  cycles: int


def _entry(text: str) -> Iterator[_Instruction]:
  """Yield the instructions of a program's entry computation, in order."""
  start = text.index("\nENTRY ")
  for line in text[start : text.index("\n}", start)].splitlines()[2:]:
    instruction = _parsed(line)
    if instruction:
      yield instruction


def _parsed(line: str) -> _Instruction | None:
  named = _INSTRUCTION.match(line)
  if not named:
    return None
  name, rest = named.groups()
  end = _end(rest, " ")
  called = re.match(r"([\w\-]+)\(", rest[end + 1 :])
  if not called:
    return None
  behind = rest[end + 1 + called.end() :]
  operands = behind[: _end(behind, ")")]
  cycles = _CYCLES.search(behind)
  return _Instruction(
    name,
    called[1],
    [_buffer(*array) for array in _ARRAY.findall(rest[:end])],
    re.findall(r"%([\w.\-]+)", operands),
    int(cycles[1]) if cycles else 0,
  )


def _end(text: str, wanted: str) -> int:
  """Return the first index of `wanted` outside of brackets, or `len(text)`."""
  depth = 0
  for place, character in enumerate(text):
    if not depth and character == wanted:
      return place
    depth += (character in "({[") - (character in ")}]")
  return len(text)


def _buffer(dtype: str, axes: str, layout: str) -> _Buffer:
  bits = re.search(r"\d+", dtype)
  # A bool ("pred") takes one byte; a token of XLA takes none.
  width = math.ceil(int(bits[0]) / 8) if bits else int(dtype == "pred")
  return _Buffer(
    width * math.prod(int(axis) for axis in axes.split(",") if axis),
    "S(1)" in layout,
  )


def _traffic(instructions: list[_Instruction]) -> int:
  """Return the bytes that all instructions read and write in device memory."""
  results = {step.name: step.buffers for step in instructions}
  total = 0
  for step in instructions:
    if step.operation in _VIEWS or step.operation.endswith("-done"):
      continue
    if step.operation == "copy-start":  # buffers: destination, source, context
      touched = step.buffers[:2]
    elif step.operation in ("slice-start", "async-start"):
      # A slice reads only a part of its operand: as many bytes as it writes.
      result = step.buffers[-2] if len(step.buffers) > 2 else step.buffers[0]
      touched = [result, _Buffer(result.bytes, False)]
    else:
      read = [b for name in step.operands for b in results.get(name, [])]
      touched = [*read, *step.buffers]
    total += sum(buffer.bytes for buffer in touched if not buffer.is_local)
  return total
