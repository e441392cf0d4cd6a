"""What is read from the text of a compiled program."""

import jax
import jax.numpy as jnp
import pytest

from memory_vit.errors import ConfigError
from memory_vit.runtime import absent_devices
from memory_vit.runtime.compiler_report import CompilerReport, exchanged

TEXT = """HloModule jit_f, is_scheduled=true

%fused (param_0: f32[8,128]) -> bf16[8,128] {
  %param_0 = f32[8,128]{1,0} parameter(0)
  ROOT %convert.9 = bf16[8,128]{1,0} convert(%param_0)
}

ENTRY %main (a: f32[8,128], b: bf16[128,4]) -> f32[8,4] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0), sharding={replicated}
  %b = bf16[128,4]{1,0:T(8,128)(2,1)} parameter(1)
  %copy-start = (bf16[128,4]{1,0:T(8,128)(2,1)S(1)}, bf16[128,4]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b), backend_config={"estimated_cycles":"100"}
  %copy-done = bf16[128,4]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fusion.1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/add(x)"}, backend_config={"window":{},"estimated_cycles":"20"}
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(%fusion.1), channel_id=3, replica_groups={{0,1}}, to_apply=%add
  %all-reduce.2 = f32[8,4]{1,0} all-reduce(%fusion.1), channel_id=3, replica_groups={{0,1}}, to_apply=%add
  %all-gather-start = (bf16[4,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%b), channel_id=4
  %all-gather-done = bf16[8,4]{1,0} all-gather-done(%all-gather-start)
  %permute-start = (s8[16]{0}, s8[16]{0}, u32[], u32[]) collective-permute-start(%b), channel_id=5
  ROOT %dot = f32[8,4]{1,0:T(8,128)} custom-call(%fusion.1, %copy-done), custom_call_target="dot", backend_config={"estimated_cycles":"3"}
}
"""  # noqa: E501


class Compiled:
  """A compiled program with the text above."""

  argument_size_in_bytes, output_size_in_bytes, temp_size_in_bytes = 1, 2, 3

  def as_text(self):
    return TEXT

  def memory_analysis(self):
    return self

  def cost_analysis(self):
    return {"flops": 5.0}


def test_cycles_traffic_and_exchange_are_read():
  """Buffers in local memory, S(1), cause no traffic."""
  found = CompilerReport.of(Compiled())
  assert (found.flops, found.cycles) == (5.0, 123)
  assert (found.arguments, found.results, found.temporaries) == (1, 2, 3)
  # The same all-reduce twice; results alone of what is started.
  assert found.exchanged == {
    "all-reduce": 4 * 8 * 4, "all-gather": 2 * 8 * 4, "collective-permute": 16,
  }  # fmt: skip
  a, b, result = 4 * 8 * 128, 2 * 128 * 4, 4 * 8 * 4
  gathered = b + 2 * (4 * 4 + 8 * 4)
  permuted = b + 2 * 16 + 2 * 4
  assert found.traffic == b + a + 2 * result + gathered + permuted + result
  assert found.kernels == 7


def test_a_program_for_this_cpu_is_read():
  lowered = jax.jit(lambda a: jnp.sin(a) @ a).lower(jnp.ones((16, 16)))
  found = CompilerReport.of(lowered.compile())
  assert found.cycles == 0
  assert not found.exchanged
  assert found.arguments == found.results == 4 * 16 * 16
  assert found.traffic >= 2 * 4 * 16 * 16
  assert exchanged("") == {}


@pytest.mark.parametrize(
  ("topology", "message"),
  [
    ("v9:2x2", r"topology is 'v9:2x2', expected one of v5e, v6e, h100"),
    ("", "topology is '', expected one of"),
    ("v5e:4", r"expected a TPU and its shape, such as v5e:4x4"),
    ("v5e", r"expected a TPU and its shape"),
    ("v5e:4x4x4x4", r"expected a TPU and its shape"),
  ],
)
def test_an_unknown_topology_is_refused(monkeypatch, topology, message):
  monkeypatch.setattr(absent_devices, "compiler", lambda topology: "libtpu")
  with pytest.raises(ConfigError, match=message):
    absent_devices.devices(topology)


@pytest.mark.parametrize(
  ("topology", "package", "extra"),
  [("v5e:4x4", "libtpu", "tpu"), ("h100", "jax-cuda12-plugin", "cuda12")],
)
def test_a_missing_compiler_is_named(topology, package, extra):
  """With the command that installs the release that fits jax."""
  with pytest.raises(ConfigError) as caught:
    absent_devices.devices(topology)
  wanted = f"pip install 'jax[{extra}]=={jax.__version__}'"
  assert str(caught.value).startswith(f"{package}, ")
  assert wanted in str(caught.value)
