"""Speculative decoding of T5-family models in JAX.

A drafter proposes a `Draft`: tokens and their probabilities. The target
computes its own probabilities of all these tokens in one call. `verify` returns
a `Verdict`: how many tokens are accepted, and the next token. Both KV caches
then rewind to the accepted tokens.

  target = specdec_jax.load('google/flan-t5-xl', dtype='bfloat16')
  draft = specdec_jax.load('google/flan-t5-small', dtype='bfloat16')
  engine = specdec_jax.Engine(target, draft)
  for done in engine.generate(['Translate to German: Good morning!']):
    print(done.text, done.stats.acceptance_rate)
"""

import ast
import importlib
import pathlib
from typing import Any

# The stub beside this file tells which module has each public name. A name is
# imported when it is first used, so that `import specdec_jax` itself is quick.
_STUB = ast.parse(pathlib.Path(__file__).with_suffix('.pyi').read_text('utf-8'))
_MODULES = {
  alias.asname: (node.module, alias.name)
  for node in _STUB.body
  if isinstance(node, ast.ImportFrom)
  for alias in node.names
}
__all__ = sorted(map(str, _MODULES))


def __getattr__(name: str) -> Any:
  if name == '__version__':
    from importlib import metadata

    return metadata.version(__name__)
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module, attribute = _MODULES[name]
  value = getattr(importlib.import_module(str(module)), attribute)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return [*__all__, *(name for name in globals() if name.startswith('__'))]
