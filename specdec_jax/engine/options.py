"""What a caller may ask of an engine, checked before anything is compiled."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.checks.arguments import check_number
from specdec_jax.checks.names import nearest
from specdec_jax.probs import SamplingConfig
from specdec_jax.verify import check_lenience

MAX_GAMMA = 256
_KEY_BITS = 32  # of the number that an example's random numbers derive from
# What others call them.
_USUAL_NAMES = {
  'max_new_tokens': 'max_length',
  'max_tokens': 'max_length',
  'max_decode_len': 'max_length',
  'min_new_tokens': 'min_length',
  'min_tokens': 'min_length',
  'num_return_sequences': 'num_samples',
  'num_decodes': 'num_samples',
  'n': 'num_samples',
  'stop': 'stop_strings',
  'stop_token_ids': 'stop_ids',
}
# Names that have no other here, and what to do instead.
_INSTEAD = {
  'sampling': 'give temperature, top_k and top_p by themselves.',
  'do_sample': 'temperature says it; 0 is greedy, anything above samples.',
}
_BEAM_SEARCH = ('num_beams', 'beam_size', 'beam_width')


@dataclasses.dataclass(frozen=True)
class Options:
  """What `generate` and `stream` may be asked.

  Attributes:
    temperature: one for all texts or one for each; 0 is greedy.
    top_k: only the k likeliest tokens, see `SamplingConfig`; 0 is off.
    top_p: only the likeliest tokens of this probability together; 1 is off.
    max_length: tokens of an output at most; None is the engine's maximum.
    min_length: tokens before a stop id is allowed.
    num_samples: outputs of each text, one after the other.
    stop_strings: strings that end an output; they are not part of its text.
    stop_ids: ids that end an output; None is the engine's.
    seed: with the example's id, what all its random numbers derive from.
    example_ids: of the texts, 0, 1, ... by default. A text's sample depends on
      its id, not on its place in a batch or on its neighbours.
    prompts: ids that the output of each text begins with, behind the decoder's
      start token; they are read, not produced, and no part of the result. None
      is none.
    on_too_long: what a too long input does: 'error' raises, 'truncate' keeps
      its beginning, 'report' gives a completion with an error, as it then does
      for ids outside the vocabulary.
    log_probs: whether log-probabilities are wanted.
    lenience: in (0, 1]; less than 1 accepts more of the drafter's proposals
      and is lossy: a token may come up to 1 / lenience times as often as it
      should, or at temperature 0 have `lenience` of the best one's probability.
      See `speculative`; the plain loop has no use for it.

  Raises:
    ValueError: a value is outside its range.
  """

  temperature: float | Sequence[float] = 0.0
  top_k: int = 0
  top_p: float = 1.0
  max_length: int | None = None
  min_length: int = 0
  num_samples: int = 1
  stop_strings: Sequence[str] = ()
  stop_ids: Sequence[int] | None = None
  seed: int = 0
  example_ids: Sequence[int] | None = None
  prompts: Sequence[Sequence[int]] | None = None
  on_too_long: str = 'error'
  log_probs: bool = True
  lenience: float = 1.0

  def __post_init__(self):
    _ = self.sampling
    check_number('min_length', self.min_length, 0)
    check_number('num_samples', self.num_samples, 1)
    check_lenience(self.lenience)
    if self.max_length is not None:
      check_number('max_length', self.max_length, 1)
    if self.on_too_long not in ('error', 'truncate', 'report'):
      raise ValueError(
        "on_too_long must be 'error', 'truncate' or 'report', got"
        f' {self.on_too_long!r}.'
      )
    if isinstance(self.stop_strings, str):
      object.__setattr__(self, 'stop_strings', (self.stop_strings,))
    if '' in self.stop_strings:
      raise ValueError(
        'stop_strings must be a sequence of strings, none of them empty, got'
        f' {self.stop_strings!r}.'
      )

  @property
  def sampling(self) -> SamplingConfig:
    """Temperature, top-k and top-p."""
    return SamplingConfig(self.temperature, self.top_k, self.top_p)

  def of_samples(self, num_texts: int) -> 'Options':
    """What is asked of each sample, where each text stands `num_samples` times.

    Raises:
      ValueError: what is given for each text is of another number.
    """
    if self.num_samples == 1:
      return self
    times = self.num_samples
    ids = self.example_ids
    changes: dict[str, Any] = {
      'num_samples': 1,
      'example_ids': [
        example_id(index, sample)
        for index in (range(num_texts) if ids is None else ids)
        for sample in range(times)
      ],
    }
    if self.prompts is not None:
      changes['prompts'] = repeated(self.prompts, times)
    if isinstance(self.sampling.temperature, tuple):
      changes['temperature'] = repeated(self.sampling.temperature, times)
    return dataclasses.replace(self, **changes)


def repeated(values: Sequence[Any], times: int) -> list[Any]:
  """Each of the values `times` times, one after the other."""
  return [value for value in values for _ in range(times)]


def example_id(index: int, sample: int) -> int:
  """What the random numbers of one sample of one example derive from.

  The bits of `sample` are counted from above, those of `index` from below: all
  pairs that fit differ, and the first sample is the same however many there
  are.

  Raises:
    ValueError: the two do not fit into 32 bits.
  """
  if index.bit_length() + sample.bit_length() > _KEY_BITS:
    raise ValueError(
      f'Sample {sample} of example {index}: the two numbers have more than'
      f' {_KEY_BITS} bits. Ask for fewer samples (num_samples; gin:'
      ' NUM_DECODES) or give other samples another seed.'
    )
  return index | int(f'{sample:0{_KEY_BITS}b}'[::-1], 2)


def options_of(named: Mapping[str, Any]) -> Options:
  """Makes `Options`; takes the names that others give them as well.

  Raises:
    ValueError: a name that they have not, or twice, or a value out of range.
  """
  defaults = {one.name: one.default for one in dataclasses.fields(Options)}
  found = {name: named[name] for name in defaults if name in named}
  for name in named.keys() - defaults.keys():
    if name in _BEAM_SEARCH:
      raise ValueError(
        f'{name}: there is no speculative beam search (Appendix A.4 of the'
        ' paper) here. Outputs are greedy or sampled; num_samples gives several'
        ' of a text.'
      )
    if name in _INSTEAD:
      raise ValueError(f'{name}: {_INSTEAD[name]}')
    if name not in _USUAL_NAMES:
      raise ValueError(f'There is no option {name!r}.{nearest(name, defaults)}')
    own = _USUAL_NAMES[name]
    if found.get(own, defaults[own]) != defaults[own]:
      raise ValueError(f'{name} is {own} here, which was given as well.')
    found[own] = named[name]
  return Options(**found)


def check_gamma(gamma: int) -> None:
  """Raises ValueError unless it is a number of proposals that a round may have.

  Caches and logits grow with it, and nothing is won by so many.
  """
  check_number('gamma', gamma, 0)
  if gamma > MAX_GAMMA:
    raise ValueError(
      f'gamma must be {MAX_GAMMA} at most, got {gamma}. A round costs the more'
      ' the longer its draft is; specdec calibrate measures what pays.'
    )
