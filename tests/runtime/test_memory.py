"""Memory that goes back to the system."""

import gc
import weakref

from memory_vit.runtime import memory


def test_garbage_is_collected_however_rarely_python_does_it():
  class Node:
    pass

  gc.disable()
  try:
    node = Node()
    node.itself, found = node, weakref.ref(node)
    del node
    assert found()
    memory.trim()
    assert found() is None
  finally:
    gc.enable()
