"""Texts that are decoded sentence by sentence, with `split='sentences'`."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specdec_jax.checks.fields import is_a, unexpected
from specdec_jax.engine.codec import Codec, check_unicode
from specdec_jax.engine.completion import Completion, joined
from specdec_jax.engine.options import (
  EngineConfig,
  Options,
  example_id,
  sentence_id,
)
from specdec_jax.text.sentences import Sentences, language_of, split

# The prefixes that T5 and MADLAD-400 expect before each input.
_PREFIX = re.compile(r'<2\w+>\s*|(translate|summarize)\b[^.:\n]*:\s*', re.I)


def splitter(
  codec: Codec,
  config: EngineConfig,
  options: Options,
  as_input: Callable[[str], Any] = lambda text: text,
) -> Callable[[str], Sentences]:
  """Makes a function that splits a text into sentences that a target can read.

  Args:
    codec: the codec of the target.
    config: the engine's configuration, whose `max_input_len` bounds a sentence.
    options: the request's options, with languages and the prefix of each
      sentence.
    as_input: converts a sentence with its prefix into the target's input, such
      as a chat; by default the sentence itself is the input.
  """
  prefix = options.split_prefix
  source = options.source_lang or codec.source_lang
  language = language_of(options.split_lang or source)

  def count(text: str) -> int:
    return len(codec.input_ids(as_input(prefix + text), source)) - around

  around = 0
  around = count('')  # the number of special tokens around each sentence
  longest = config.max_input_len - around
  if longest < 1:
    expected = f'more than the {around} tokens around each sentence'
    raise unexpected('max_input_len', expected, config.max_input_len)

  def of(text: str) -> Sentences:
    check_unicode(text)
    whole = split(text, language, count, longest)
    if len(whole.spans) > 1 and not prefix and (found := _PREFIX.match(text)):
      # Python keeps each warning's text, so a client's words must not be in it.
      opening = f'{found[1]} ...:' if found[1] else '<2...>'
      problem = f'only the first sentence of a text begins with {opening!r}'
      advice = 'Leave it out, and give it as split_prefix (--prefix).'
      warnings.warn(f'split: {problem}. {advice}', stacklevel=2)
    return whole

  return of


class LongTexts:
  """Splits texts into sentences, and joins the outputs of the sentences.

  Attributes:
    parts: the sentences to decode, each with its prefix, in the order of the
      outputs; the sentences of a text occur once per sample.
    options: the options with which the parts are decoded.
  """

  def __init__(
    self, codec: Codec, config: EngineConfig, texts: Any, options: Options
  ):
    """Splits the texts.

    Args:
      codec: the codec of the target.
      config: the engine's configuration, whose `max_input_len` bounds a
        sentence.
      texts: the texts to split.
      options: the options of the request, with `split` set.

    Raises:
      ValueError: an option is invalid, as for `Engine.generate`; a text is not
        a string; or the package that splits texts is not installed.
    """
    if not is_a(texts, Sequence[str]) or isinstance(texts, str):
      raise unexpected('texts', 'a sequence of strings with split', texts)
    ids = options.example_ids or range(len(texts))
    if not isinstance(options.temperature, float | int):
      expected = 'one number with split'
      raise unexpected('temperature', expected, options.temperature)
    if len(ids) != len(texts):
      raise unexpected('example_ids', f'{len(texts)} numbers with split', ids)
    # One beam search gives all outputs of a sentence.
    self._each = 1 if options.num_beams is None else options.num_samples
    samples = range(options.num_samples // self._each)
    whole = [*map(splitter(codec, config, options), texts)]
    self._outputs = [sentences for sentences in whole for _ in samples]
    self.parts = [
      options.split_prefix + part for x in self._outputs for part in x.parts
    ]
    example_ids = [
      sentence_id(example_id(number, sample), place)
      for number, sentences in zip(ids, whole, strict=True)
      for sample in samples
      for place in range(len(sentences.spans))
    ]
    changes: dict[str, Any] = {'split': None, 'split_lang': None}
    changes |= {'split_prefix': '', 'num_samples': self._each}
    self.options = dataclasses.replace(
      options, **changes, example_ids=example_ids
    )

  def joined(self, done: Sequence[Completion]) -> Iterator[Completion]:
    """Yields the outputs of the texts, joined from the outputs of `parts`."""
    begin = 0
    for sentences in self._outputs:
      end = begin + len(sentences.spans) * self._each
      for place in range(begin, begin + self._each):
        yield joined(sentences, done[place : end : self._each])
      begin = end
