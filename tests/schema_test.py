"""JSON schemas: the official suite, walks of what people write, refusals."""

import contextlib
import decimal
import json
import pathlib
import random

import numpy as np
import pytest

from specdec_jax.rules import languages
from specdec_jax.rules.schema import language_of

HERE = pathlib.Path(__file__).parent
SCHEMAS = dict(map(json.loads, open(HERE / 'json_schemas.jsonl')))
# Its licence is beside it; made from the commit 44401e0 of the suite.
SUITE = list(map(json.loads, open(HERE / 'json_schema_suite.jsonl')))
OBJECT = {
  'type': 'object',
  'properties': {'name': {'type': 'string'}, 'age': {'type': 'integer'}},
  'required': ['name'],
  'additionalProperties': False,
}


def made(schema, blanks='one'):
  with languages.deadline(60):
    return language_of(schema, blanks)


def accepts(schema, value):
  """Whether a value is accepted, however `json.dumps` writes it."""
  texts = [json.dumps(value, ensure_ascii=flag) for flag in (True, False)]
  first, second = (made(schema).matches(text) for text in texts)
  assert first == second
  return first
