"""The recorded names are those that transformers and timm write today."""

import json

import pytest
from record_names import FILE, MODELS, published_names


@pytest.mark.parametrize("name", MODELS)
def test_recorded_names_are_those_of_the_library(name):
  assert json.loads(FILE.read_text())[name] == published_names(name)
