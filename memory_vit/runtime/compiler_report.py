"""Memory, traffic and exchange of a program, as its compiler states them.

Read from the text of the compiled program, whose instructions TPUs' compiler
annotates with the cycles that it expects. They are estimates, not measurements.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# An array type; one whose layout has S(1) lies beside the compute units.
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_EXCHANGE = re.compile(
  r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
  r"|ragged-all-to-all|collective-broadcast)(-start)?"
)
# They start no kernel and move nothing.
_VIEWS = frozenset(
  ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "iota",
   "after-all", "opt-barrier", "partition-id", "replica-id")
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerReport:
  """Report of a compiler on a program, for one device.

  Attributes:
    flops: floating point operations.
    cycles: the sum of estimated cycles, with bodies of loops once; 0 where the
      compiler estimates none.
    traffic: bytes that instructions read and write in device memory.
    arguments: bytes of arguments.
    results: bytes of results.
    temporaries: bytes of the greatest temporary memory.
    exchanged: {kind of collective operation: bytes of its results}.
    kernels: instructions that are started one by one.
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
    """Report on a `jax.stages.Compiled`."""
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    found = list(_entry(text))
    return cls(
      flops=(compiled.cost_analysis() or {}).get("flops", 0.0),
      cycles=sum(instruction.cycles for instruction in found),
      traffic=_traffic(found),
      arguments=memory.argument_size_in_bytes,
      results=memory.output_size_in_bytes,
      temporaries=memory.temp_size_in_bytes,
      exchanged=exchanged(text),
      kernels=sum(
        one.operation not in _VIEWS and not one.operation.endswith("-done")
        for one in found
      ),
    )


def exchanged(text: str) -> dict[str, int]:
  """{collective operation: bytes of its results} of a compiled program."""
  found: collections.Counter[str] = collections.Counter()
  channels: set[str] = set()
  for line in text.splitlines():
    instruction = _parsed(line) if _EXCHANGE.search(line) else None
    kind = instruction and _EXCHANGE.fullmatch(instruction.operation)
    if instruction and kind:
      # The compiler for TPUs writes one that runs beside products several
      # times, with the same channel.
      channel = _CHANNEL.search(line)
      if channel and channel[1] in channels:
        continue
      channels.update(channel.groups() if channel else ())
      buffers = instruction.buffers
      # Some that are started return their operands before their results.
      if kind[2] and kind[1] == "collective-permute":
        buffers = buffers[1:2]
      elif kind[2] and kind[1] == "all-gather":
        buffers = buffers[len(buffers) // 2 :]
      found[kind[1]] += sum(buffer.bytes for buffer in buffers)
  return dict(found)


class _Buffer(NamedTuple):
  bytes: int
  is_local: bool  # in the memory of the compute units


class _Instruction(NamedTuple):
  name: str
  operation: str
  buffers: list[_Buffer]  # of its result
  operands: list[str]
  cycles: int


def _entry(text: str) -> Iterator[_Instruction]:
  """The instructions of the entry computation, in order."""
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
  """The place of a character outside of brackets."""
  depth = 0
  for place, character in enumerate(text):
    if not depth and character == wanted:
      return place
    depth += (character in "({[") - (character in ")}]")
  return len(text)


def _buffer(dtype: str, axes: str, layout: str) -> _Buffer:
  bits = re.search(r"\d+", dtype)
  # A truth value takes a byte, a token nothing.
  width = math.ceil(int(bits[0]) / 8) if bits else int(dtype == "pred")
  return _Buffer(
    width * math.prod(int(axis) for axis in axes.split(",") if axis),
    "S(1)" in layout,
  )


def _traffic(instructions: list[_Instruction]) -> int:
  """Bytes of operands and results in device memory, of all instructions."""
  made = {one.name: one.buffers for one in instructions}
  total = 0
  for one in instructions:
    if one.operation in _VIEWS or one.operation.endswith("-done"):
      continue
    if one.operation == "copy-start":  # destination, source, context
      touched = one.buffers[:2]
    elif one.operation in ("slice-start", "async-start"):
      # It reads as much as it writes: a part of its operand.
      made_here = one.buffers[-2] if len(one.buffers) > 2 else one.buffers[0]
      touched = [made_here, _Buffer(made_here.bytes, False)]
    else:
      read = [b for name in one.operands for b in made.get(name, [])]
      touched = [*read, *one.buffers]
    total += sum(buffer.bytes for buffer in touched if not buffer.is_local)
  return total
