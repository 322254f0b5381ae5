"""Rows: their kinds."""

import itertools

import jax
import numpy as np

import toy_models
from specdec_jax.engine.request import joined

WORDS = [[5, 6], [9, 8, 7], [9, 8, 7, 6, 5]]
PAIRS = [[i, i] for i in range(3, 12)]
# An option -> values that it has, one after the other.
VALUES = {
  'num_beams': (2, 3),
  'logit_bias': ({7: -100},),
  'suppress_tokens': ([8, 9],),
  'bad_words': (*(WORDS[:i] for i in (1, 2, 3)), PAIRS),
  'sequence_bias': ([([5], 1.5)],),
  'no_repeat_ngram_size': (2, 3),
  'encoder_no_repeat_ngram_size': (3,),
  'repetition_penalty': (1.5,),
  'begin_suppress_tokens': ([4], [*range(4, 12)]),
  'forced_eos_token_id': (1,),
  'choices': (['red', 'the dog'], ['a', 'the dog runs']),
  'regex': ('a|the (red )?dog', '[a-c]{3,5}'),
}
ASKED = (
  *({name: value} for name, values in VALUES.items() for value in values),
  {'choices': [f'a {"red " * i}dog' for i in range(40)]},
  {'repetition_penalty': 1.5, 'presence_penalty': 1.0},
  {},
  {'max_length': 3, 'seed': 7},
  {'speculative': False},
  {'temperature': 1.0},
  {'temperature': 1.0, 'top_k': 3},
  {'temperature': 1.0, 'min_p': 0.2},
)


def test_rows_of_a_kind_have_arrays_of_the_same_shapes(tokenizer):
  """Rows of two kinds have not; no array is needed to tell."""
  engine = toy_models.chain_engine(tokenizer)
  rows = [
    engine.text_request([text], **options).rows[0]
    for text in ('a', 'the red dog runs ' * 3)
    for options in ASKED
  ]
  shapes = []
  for row in rows:
    leaves, tree = jax.tree.flatten(joined([row]))
    shapes.append((tree, [*map(np.shape, leaves)]))
  for one, other in itertools.combinations(range(len(rows)), 2):
    is_same = rows[one].kind == rows[other].kind
    assert is_same == (shapes[one] == shapes[other]), (rows[one], rows[other])
  assert len({row.kind for row in rows}) > len(ASKED)
