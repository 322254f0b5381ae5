"""The ids of a prompt are read as the prompt itself."""

import types

import pytest

from specdec_jax.engine.codec import Codec
from specdec_jax.engine.options import EngineConfig, Options
from specdec_jax.engine.request import TextRequest
from specdec_jax.request import Drafting
from specdec_jax.rules.options import NO_RULES
from specdec_jax.serving import protocol
from specdec_jax.text.chat import RenderedIds
from specdec_jax.text.tokenizer import Vocabulary

START, END, LANGUAGE = 2, 1, 8


class Letters(Vocabulary):
  """Each letter is a token from 10 on; '$' and '^' are an end and a start."""

  vocab_size, eos_id = 40, END
  languages = {}

  def encode(self, text):
    return [{'$': END, '^': START}.get(x, 10 + ord(x) % 26) for x in text]


class Around(Letters):
  """Has a token in front of each text."""

  before = (START,)


class Languages(Letters):
  """Has languages."""

  languages = {'eng': LANGUAGE, 'deu': LANGUAGE + 1}


ENCODER = {'has_encoder': True, 'ends_inputs': True}
CODECS = {
  'T5': (Letters(), ENCODER, None),
  'CodeT5': (Around(), ENCODER, None),
  'NLLB': (Languages(), ENCODER, None),
  'T5Gemma': (Letters(), ENCODER | {'ends_inputs': False}, START),
  'Llama': (Letters(), {'has_encoder': False, 'ends_inputs': False}, START),
  'Qwen': (Letters(), {'has_encoder': False, 'ends_inputs': False}, None),
}


def read_by(codec, text):
  """What the models read of a text, and its completion if there is nothing."""
  options = Options(stop_ids=(END,))
  config = EngineConfig(max_input_len=24, max_decode_len=8)
  request = TextRequest(codec, config, [text], options, NO_RULES, Drafting())
  rows = [(list(x.inputs), list(x.prompt), x.widths) for x in request.rows]
  return rows, request.passed_over


@pytest.mark.parametrize('name', CODECS)
@pytest.mark.parametrize(
  'text',
  [
    'abc', '', 'abc$', '$', '^', '^abc', 'ab$^',
    [15, 16], [], [15, 16, END], [END], [START], [START, 15], [LANGUAGE],
    [START, 15, START, END], [LANGUAGE, 15], [LANGUAGE, 15, END],
    RenderedIds([15, 16]), RenderedIds([START, 15, END]),
  ],
  ids=str,
)  # fmt: skip
def test_ids_are_read_as_their_prompt(name, text):
  vocabulary, network, bos_id = CODECS[name]
  network = types.SimpleNamespace(
    **network, vocab_size=40, input_vocab_size=40, start_id=0, pad_id=0
  )
  languages = ['eng', 'deu'] if vocabulary.languages else []
  codec = Codec(vocabulary, network, bos_id, (END,), *languages)
  ids, taken = protocol.encoded(types.SimpleNamespace(codec=codec), text)
  assert ids == codec.input_ids(text)
  assert read_by(codec, taken) == read_by(codec, text)
  assert isinstance(taken, list) or not text
