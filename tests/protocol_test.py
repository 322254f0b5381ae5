"""The ids of a prompt are read as the prompt itself."""

import pytest
from families_engine_test import make_engine
from languages_test import PAIR, write_vocabulary

import toy_models
from specdec_jax.serving import protocol
from specdec_jax.text.chat import RenderedIds
from specdec_jax.text.tokenizer import Tokenizer

# Texts of the first two have an end, those of the others a beginning.
FAMILIES = ('chains', 'NLLB', 'GPT-2', 'T5Gemma')


@pytest.fixture(scope='module', params=FAMILIES)
def engine(request, tokenizer, folder):
  limits = {'max_input_len': 24, 'max_decode_len': 8}
  if request.param == 'chains':
    return toy_models.chain_engine(tokenizer, **limits)
  if request.param == 'NLLB':
    languages = Tokenizer(write_vocabulary(folder / 'nllb'))
    return toy_models.chain_engine(languages, **limits, **PAIR)
  return make_engine(request.param, tokenizer, **limits)


def read_by(engine, text):
  """What the models read of a text, and its completion if there is nothing."""
  batch = engine.text_batch([text])
  rows = [(list(x.inputs), list(x.prompt), x.widths) for x in batch.rows]
  return rows, batch.passed_over


@pytest.mark.parametrize(
  'text',
  [
    'the red dog', '', 'deu_Latn the </s> dog', 'the dog </s>', '</s>',
    [5, 6], [], [5, 6, 1], [5, 6, 2], [1], [2], [2, 5], [2, 5, 2, 1],
    RenderedIds([5, 6]), RenderedIds([2, 5, 1]),
  ],
  ids=str,
)  # fmt: skip
def test_ids_are_read_as_their_prompt(engine, text):
  ids, taken = protocol.encoded(engine, text)
  assert ids == engine.input_ids(text)
  assert read_by(engine, taken) == read_by(engine, text)
  assert isinstance(taken, list) or not text
