"""What the compiler is told for a kind of device, and where."""

import functools

import jax
import pytest

from specdec_jax.engine import loop_programs
from specdec_jax.models import backend


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


def test_a_loop_is_compiled_with_them(monkeypatch):
  """An option that no compiler has is refused, so it has been passed on."""
  told = {'xla_gpu_no_such_option': '1'}
  monkeypatch.setattr(backend, 'compiler_options', lambda: told)
  programs = object.__new__(loop_programs.LoopPrograms)

  class Loop:
    decode = start = run = staticmethod(lambda params, request: request)

  programs._loops = {True: (Loop, None)}
  programs._partition = None
  compile_it = functools.partial(programs._compile, 'decode', 1.0, (True,))
  with pytest.raises(jax.errors.JaxRuntimeError, match='no_such_option'):
    compile_it()
  monkeypatch.setattr(backend, 'compiler_options', dict)
  assert compile_it()(2.0) == 2.0
