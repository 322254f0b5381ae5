"""What the compiler is told for a kind of device, and where."""

import jax
import pytest

import toy_models
from small_vocabulary import VOCAB_SIZE
from specdec_jax.engine.engine import Engine
from specdec_jax.models import backend
from specdec_jax.models.model import Model


def test_options_belong_to_a_gpu_and_are_known_to_xla():
  with backend.compiled_for('cpu'):
    assert backend.compiler_options() == {}
  with backend.compiled_for('tpu'):
    assert backend.compiler_options() == {}
  with backend.compiled_for('gpu'):
    options = backend.compiler_options()
  assert options == {'xla_gpu_experimental_force_split_k': '1'}
  # Control: XLA reads what it is told.
  wrong = ('xla_gpu_experimental_force_split_k', 'one')
  assert not backend._are_known(wrong)


def test_an_xla_that_does_not_know_an_option_is_not_told(monkeypatch):
  unknown = ('xla_gpu_no_such_option', '1')
  assert not backend._are_known(unknown)
  monkeypatch.setattr(backend, '_are_known', lambda *options: False)
  with backend.compiled_for('gpu'):
    assert backend.compiler_options() == {}


def test_a_loop_is_compiled_with_them(monkeypatch, tokenizer):
  """An option that no compiler has is refused, so it has been passed on."""
  told = {'xla_gpu_no_such_option': '1'}
  monkeypatch.setattr(backend, 'compiler_options', lambda: told)
  chain = toy_models.random_markov(0, VOCAB_SIZE)
  model = Model(chain, chain.params)
  engine = Engine(model, tokenizer=tokenizer, max_decode_len=4)
  with pytest.raises(jax.errors.JaxRuntimeError, match='no_such_option'):
    engine.generate(['a'])
  monkeypatch.setattr(backend, 'compiler_options', dict)
  assert engine.generate(['a'])[0].tokens
