"""Texts that are decoded sentence by sentence, with `split='sentences'`."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specdec_jax.checks.fields import is_a, unexpected
from specdec_jax.engine import request
from specdec_jax.engine.completion import Completion, joined
from specdec_jax.engine.request import Options
from specdec_jax.text.sentences import Sentences, language_of, split

# What T5 and MADLAD-400 expect before each input.
_PREFIX = re.compile(
  r'<2\w+>\s*|(translate|summarize)\b[^.:\n]*:\s*', re.IGNORECASE
)


def splitter(
  engine: Any,
  options: Options,
  as_input: Callable[[str], Any] = lambda text: text,
) -> Callable[[str], Sentences]:
  """Makes what splits a text into sentences that the engine can read.

  Args:
    engine: the engine.
    options: has the languages, and what is put before each sentence.
    as_input: makes of a sentence with its prefix what the engine reads; by
      default itself.
  """
  prefix = options.split_prefix
  source = options.source_lang or engine.source_lang
  language = language_of(options.split_lang or source)

  def count(text: str) -> int:
    return len(engine.input_ids(as_input(prefix + text), source)) - around

  around = 0
  around = count('')  # tokens before and after each sentence
  most = engine.max_input_len - around
  if most < 1:
    expected = f'more than the {around} tokens around each sentence'
    raise unexpected('max_input_len', expected, engine.max_input_len)

  def of(text: str) -> Sentences:
    request.check_unicode(text)
    whole = split(text, language, count, most)
    if len(whole.spans) > 1 and not prefix and (found := _PREFIX.match(text)):
      warnings.warn(
        f'split: only the first sentence of a text begins with {found[0]!r}.'
        ' Leave it out, and give it as split_prefix (--prefix).',
        stacklevel=2,
      )
    return whole

  return of


class LongTexts:
  """Texts as sentences, for whatever decodes many short texts.

  Attributes:
    parts: the sentences of all outputs in order, each with its prefix, those of
      each sample together.
    options: for `Engine.generate`, of these.
  """

  def __init__(
    self, engine: Any, texts: Sequence[Any], options: Mapping[str, Any]
  ):
    """Splits the texts.

    Args:
      engine: the `Engine` that decodes them.
      texts: the texts.
      options: of `Engine.generate`, with `split`.

    Raises:
      ValueError: as for `Engine.generate`, a text is not a string, or the
        package that splits is not installed.
    """
    calls = {x: options[x] for x in ('speculative', 'gamma') if x in options}
    named = {k: v for k, v in options.items() if k not in calls}
    asked = request.options_of(named, engine.models['target'].rules)
    if not is_a(texts, Sequence[str]) or isinstance(texts, str):
      raise unexpected('texts', 'a sequence of strings with split', texts)
    ids = asked.example_ids or range(len(texts))
    for name, fits, expected in (
      ('temperature', isinstance(asked.temperature, float | int), 'one number'),
      ('example_ids', len(ids) == len(texts), f'{len(texts)} numbers'),
    ):
      if not fits:
        raise unexpected(name, f'{expected} with split', getattr(asked, name))
    # One beam search gives all outputs of a sentence.
    self._each = 1 if asked.num_beams is None else asked.num_samples
    samples = range(asked.num_samples // self._each)
    whole = [*map(splitter(engine, asked), texts)]
    self._outputs = [sentences for sentences in whole for _ in samples]
    parts = [part for output in self._outputs for part in output.parts]
    self.parts = [asked.split_prefix + part for part in parts]
    values: dict[str, Any] = {
      'split': None,
      'split_lang': None,
      'split_prefix': '',
      'num_samples': self._each,
      'example_ids': [
        request.sentence_id(request.example_id(number, sample), place)
        for number, sentences in zip(ids, whole, strict=True)
        for sample in samples
        for place in range(len(sentences.spans))
      ],
    }
    named = {x.name: getattr(asked, x.name) for x in dataclasses.fields(asked)}
    self.options = named | values | calls

  def joined(self, done: Sequence[Completion]) -> Iterator[Completion]:
    """Yields the outputs of the texts, of those of `parts`."""
    begin = 0
    for sentences in self._outputs:
      end = begin + len(sentences.spans) * self._each
      for place in range(begin, begin + self._each):
        yield joined(sentences, done[place : end : self._each])
      begin = end
