"""Fewer passes of the compiler change only the time."""

import jax
import numpy as np
import pytest

import memory_vit as mv
from memory_vit.runtime import compilation


@pytest.fixture(autouse=True)
def devices():
  """Made with the flags of all tests, before a test changes the flags."""
  return jax.devices()


@pytest.fixture
def no_flags(monkeypatch):
  monkeypatch.delenv("XLA_FLAGS", raising=False)


def draws(key):
  """Random numbers, as a backbone is initialized."""
  keys = jax.random.split(key, 3)
  init = jax.nn.initializers.lecun_normal()
  return [init(k, (16, 24)) for k in keys]


def test_compile_options_respect_xla_flags(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "")
  assert compilation.options() is None


@pytest.mark.usefixtures("no_flags")
def test_compile_options_are_unset_on_accelerators(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert compilation.options() is None


@pytest.mark.slow  # compiles a model twice, once with all passes
@pytest.mark.usefixtures("no_flags")
def test_a_backbone_that_is_drawn_has_the_same_bits(monkeypatch):
  """Otherwise tasks would not know its fingerprint."""
  ours, key = compilation.options(), jax.random.key(7)

  def drawn(options):
    monkeypatch.setattr(compilation, "options", lambda: options)
    return mv.random_backbone("Micro/2", image_size=8, num_classes=5, key=key)

  quick, usual = drawn(ours), drawn(dict.fromkeys(ours, 3))
  for one, other in zip(
    jax.tree.leaves(quick.params), jax.tree.leaves(usual.params), strict=True
  ):
    assert one.dtype == other.dtype
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
  assert quick.fingerprint == usual.fingerprint


@pytest.mark.usefixtures("no_flags")
def test_jax_accepts_the_compile_options():
  """With the same random numbers."""
  key = jax.random.key(0)
  quick = jax.jit(draws, compiler_options=compilation.options())(key)
  for one, other in zip(quick, jax.jit(draws)(key), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5)
