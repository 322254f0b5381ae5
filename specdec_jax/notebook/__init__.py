"""A target and its drafter in a notebook, like T5X's InteractiveModel.

  model = notebook.load('google/flan-t5-xl', 'google/flan-t5-small')
  model.generate(['Translate to German: Good morning!'])

A model that is the last value of a cell shows its parts and its last trace. A
trace shows its rounds. Both are HTML in a notebook and text on a terminal.
"""

import html
from collections.abc import Sequence
from typing import Any

import jax
import rich.console

from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import Path
from specdec_jax.engine.loading import load as load_model
from specdec_jax.engine.trace import Trace
from specdec_jax.models.base import LanguageModel
from specdec_jax.report import Table, record
from specdec_jax.text.tokenizer import Vocabulary

__all__ = ['Interactive', 'load']


class Interactive(Engine):
  """An engine that a notebook shows as a table; `load` makes one.

  Attributes:
    last_trace: the result of the last call of `trace`; None before the first.
  """

  last_trace: Trace | None = None

  def trace(self, text: str | Sequence[int], **options) -> Trace:
    """Calls `Engine.trace`; keeps the result as `last_trace`."""
    self.last_trace = super().trace(text, **options)
    return self.last_trace

  @property
  def facts(self) -> list[list[str]]:
    """Pairs of a name and a text, on models, device, tokenizer and limits."""
    params = self.params._asdict()
    rows = []
    for name, model in self.models.items():
      leaves = jax.tree.leaves(params[name])
      count = sum(leaf.size for leaf in leaves)
      dtypes = ', '.join(sorted({str(leaf.dtype) for leaf in leaves}))
      kind = type(model.network).__name__
      rows.append([name, f'{model.name}: {kind}, {count:,} of {dtypes}'])
    device, adapts = record.describe()['device'], self.drafting.adapts
    return rows + [
      ['device', f'{jax.default_backend()}, {device}'],
      ['tokenizer', f'{self.tokenizer.path}, {self.tokenizer.vocab_size}'],
      ['gamma', f'{self.gamma} at most' if adapts else str(self.gamma)],
      ['longest input', f'{self.config.max_input_len} tokens'],
      ['longest output', f'{self.config.max_decode_len} tokens'],
    ]

  def __rich__(self) -> rich.console.Group:
    last = [] if self.last_trace is None else [self.last_trace]
    return rich.console.Group(Table('', ['', 'what'], self.facts), *last)

  def _repr_html_(self) -> str:
    rows = (
      f'<tr><th scope="row">{name}</th><td>{html.escape(text)}</td></tr>'
      for name, text in self.facts
    )
    last = '' if self.last_trace is None else self.last_trace._repr_html_()
    return f'<table><tbody>{"".join(rows)}</tbody></table>{last}'


def load(
  target: Path,
  draft: Path | None = None,
  *,
  network: LanguageModel | None = None,
  draft_network: LanguageModel | None = None,
  tokenizer: Vocabulary | Path | None = None,
  dtype: str | None = None,
  **options: Any,
) -> Interactive:
  """Loads a target, and a drafter for it, into an engine for a notebook.

  Args:
    target: a path or an id, as for `specdec_jax.load`.
    draft: a path or an id of the drafter, a small model; None: the target
      decodes plainly.
    network: the target's network; needed unless the target's folder describes
      one.
    draft_network: the drafter's network; needed unless the drafter's folder
      describes one.
    tokenizer: the tokenizer of both; None: that of the target's folder.
    dtype: the dtype of both models, as for `specdec_jax.load`; None: that of a
      placement in `options`, if there is one.
    **options: options of `Engine`, such as gamma and max_decode_len.

  Raises:
    ValueError: a model cannot be loaded, the two do not go together, or an
      option is wrong. The error comes before arrays are read.
  """
  if draft is None and draft_network is not None:
    raise ValueError('draft_network: expected None without a draft.')
  if dtype is None and options.get('placement') is not None:
    dtype = options['placement'].dtype
  small = None
  # The drafter is loaded first, since it is small and so its errors come early.
  if draft is not None:
    small = load_model(draft, draft_network, dtype=dtype)
  large = load_model(target, network, tokenizer=tokenizer, dtype=dtype)
  return Interactive(large, small, **options)
