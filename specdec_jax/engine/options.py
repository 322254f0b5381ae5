"""What a caller may ask of an engine, checked before anything is compiled."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.checks.arguments import check_number
from specdec_jax.checks.fields import check_types, shortened
from specdec_jax.checks.names import check_choice, nearest
from specdec_jax.decoding.beams import BeamSettings, Rule
from specdec_jax.decoding.state import BLOCK, VERIFICATIONS
from specdec_jax.drafters.length import ends_nothing, plain_rule
from specdec_jax.probs import SamplingConfig
from specdec_jax.types import LengthRule
from specdec_jax.verify import check_lenience

MAX_GAMMA = 256
MOST_ROWS = 1 << 16  # that are decoded together, or samples of an example
ADAPTIVE = 'adaptive'  # a draft ends where its drafter is not sure enough
_KEY_BITS = 32  # of the number that an example's random numbers derive from
# Names of these options in other libraries.
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
  'beam_size': 'num_beams',
  'beam_width': 'num_beams',
  'brevity_penalty': 'alpha',
  'src_lang': 'source_lang',
  'tgt_lang': 'target_lang',
}
# Names that have no other here, and what to do instead.
_INSTEAD = {
  'sampling': 'give temperature, top_k and top_p by themselves.',
  'do_sample': 'temperature says it; 0 is greedy, anything above samples.',
  'early_stopping': 'a beam search ends as T5X ends it, or with length_penalty'
  ' as transformers does where early_stopping is False.',
}
ALPHA = 0.6  # of T5's papers and of T5X


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of `generate` and `stream`.

  Attributes:
    temperature: one for all texts or one for each; 0 is greedy.
    top_k: samples only from the k likeliest tokens, see `SamplingConfig`; 0 is
      off.
    top_p: samples only from the likeliest tokens that together have this
      probability; 1 is off.
    max_length: the most tokens of an output; None is the engine's maximum.
    min_length: tokens that an output must have before a stop id is allowed.
    num_samples: outputs per text; they follow one another in the result.
    stop_strings: strings that end an output; they are not part of its text.
    stop_ids: ids that end an output; None is the engine's.
    seed: all random numbers of an example derive from this seed and the
      example's id.
    example_ids: ids of the texts; 0, 1, ... by default. A text's sample depends
      on its id, not on its place in a batch or on its neighbours.
    prompts: ids that the output of each text begins with, after the decoder's
      start token. They are read, not produced, and are not part of the result.
      None is no prompts.
    source_lang: language of the texts, of a model that translates between many,
      such as 'eng_Latn'; None is the engine's.
    target_lang: that of the outputs, likewise.
    on_too_long: what happens to an input that is too long: 'error' raises,
      'truncate' keeps its beginning, 'report' gives a completion with an error
      (and does so for ids outside the vocabulary too).
    log_probs: whether log-probabilities are wanted.
    num_beams: a beam search of this width, see `decoding.beams`; None is none.
      `num_samples` outputs come of it, the best one last.
    alpha: of a beam search: T5X's exponent of its brevity penalty, score =
      log_prob / ((5 + tokens) / 6) ** alpha; None is 0.6 unless
      `length_penalty` is given.
    length_penalty: of a beam search as transformers has it: score = log_prob /
      tokens ** length_penalty.
    draft_beams: beams of the drafter; None is 2 * `num_beams`.
    lenience: in (0, 1]; less than 1 accepts more of the drafter's proposals
      and is lossy: a token may come up to 1 / lenience times as often as it
      should; at temperature 0 a token may have only `lenience` times the
      probability of the best token. See `verify`; the plain loop ignores it.
    verification: how sampled drafts are judged, losslessly either way: 'token',
      by the paper's Algorithm 1, or 'block', as a whole, which keeps more of
      them (see `verify_block`). None is 'block', and 'token' where `lenience`
      is below 1. At temperature 0 both are the same.

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
  verification: str | None = None
  num_beams: int | None = None
  alpha: float | None = None
  length_penalty: float | None = None
  draft_beams: int | None = None
  source_lang: str | None = None
  target_lang: str | None = None

  def __post_init__(self):
    for name, value in dataclasses.asdict(self.sampling).items():
      object.__setattr__(self, name, value)
    if isinstance(self.stop_strings, str):
      object.__setattr__(self, 'stop_strings', (self.stop_strings,))
    check_lenience(self.lenience)
    check_types(self)
    check_number('min_length', self.min_length, 0)
    check_number('num_samples', self.num_samples, 1)
    if self.num_samples > MOST_ROWS:
      raise ValueError(
        f'num_samples must be at most {MOST_ROWS}, got'
        f' {shortened(self.num_samples)}.'
      )
    if self.max_length is not None:
      check_number('max_length', self.max_length, 1)
    if self.on_too_long not in ('error', 'truncate', 'report'):
      raise ValueError(
        "on_too_long must be 'error', 'truncate' or 'report', got"
        f' {self.on_too_long!r}.'
      )
    if '' in self.stop_strings:
      raise ValueError(
        'stop_strings must be a sequence of strings, none of them empty, got'
        f' {self.stop_strings!r}.'
      )
    self._check_verification()
    self._check_beams()

  def _check_verification(self) -> None:
    if self.verification is None:
      return
    check_choice('verification', self.verification, VERIFICATIONS)
    if self.judges_blocks and self.lenience != 1:
      raise ValueError(
        f"verification = 'block' with lenience = {self.lenience!r}: a draft is"
        ' judged as a whole without loss only, and lenience is a rule for'
        " single tokens. Leave lenience at 1, or take verification = 'token'."
      )

  @property
  def judges_blocks(self) -> bool:
    """Whether sampled drafts are judged as a whole."""
    if self.verification is None:
      return self.lenience == 1
    return self.verification == BLOCK

  def _check_beams(self) -> None:
    if self.num_beams is None:
      for name in ('alpha', 'length_penalty', 'draft_beams'):
        if getattr(self, name) is not None:
          raise ValueError(
            f'{name} = {getattr(self, name)!r} is of a beam search: give'
            ' num_beams too.'
          )
      return
    check_number(
      'num_beams',
      self.num_beams,
      1,
      'Leave it out for greedy decoding or samples; 4 is usual for'
      ' translations.',
    )
    beams = f'a beam search (num_beams = {self.num_beams})'
    instead = 'leave num_beams out, or '
    if not self.sampling.greedy:
      raise ValueError(
        f'temperature = {self.temperature!r}: {beams} draws nothing;'
        f' {instead}set the temperature to 0.'
      )
    if self.lenience != 1:
      raise ValueError(
        f'lenience = {self.lenience!r}: {beams} is exact; {instead}set lenience'
        ' to 1.'
      )
    if self.stop_strings:
      raise ValueError(
        f'stop_strings = {self.stop_strings!r}: {beams} ends at ids;'
        f' {instead}give stop_ids.'
      )
    if self.num_samples > self.num_beams:
      raise ValueError(
        f'num_samples = {self.num_samples}: {beams} has {self.num_beams}'
        ' outputs at most; ask for fewer, or for more beams.'
      )
    if self.alpha is not None and self.length_penalty is not None:
      raise ValueError(
        f'alpha = {self.alpha!r} (T5X) and length_penalty ='
        f' {self.length_penalty!r} (transformers) are two rules; give one.'
      )
    for name in ('alpha', 'length_penalty'):
      if getattr(self, name) is not None:
        check_number(name, getattr(self, name), 0.0)
    if self.draft_beams is not None:
      check_number('draft_beams', self.draft_beams, self.num_beams)

  def beam_settings(self, num_ends: int) -> BeamSettings | None:
    """What the loops are asked for; None without a beam search.

    Args:
      num_ends: how many ids end an output.
    """
    if self.num_beams is None:
      return None
    rule, penalty = Rule.TRANSFORMERS, self.length_penalty
    if penalty is None:
      rule, penalty = Rule.T5X, ALPHA if self.alpha is None else self.alpha
    number: Any = np.float32(penalty)
    return BeamSettings(
      penalty=number,
      width=self.num_beams,
      draft_width=self.draft_beams or 2 * self.num_beams,
      num_ends=num_ends,
      rule=rule,
    )

  @functools.cached_property
  def sampling(self) -> SamplingConfig:
    """Temperature, top-k and top-p."""
    return SamplingConfig(self.temperature, self.top_k, self.top_p)

  def of_samples(self, num_texts: int) -> 'Options':
    """The options for texts that are each repeated `num_samples` times.

    Values that are given per text are repeated with them.

    Raises:
      ValueError: an index and a sample number do not fit into one example id.
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
  """Each value `times` times, before the next value: a, a, b, b, ..."""
  return [value for value in values for _ in range(times)]


def example_id(index: int, sample: int) -> int:
  """The id that the random numbers of one sample of one example derive from.

  The bits of `sample` are filled in from the highest bit down, those of `index`
  from the lowest bit up: so all pairs that fit have different ids, and the
  first sample's id does not depend on how many samples there are.

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
  """Makes `Options`; accepts the names that other libraries use as well.

  Raises:
    ValueError: a name is unknown, an option is given twice, or a value is out
      of range.
  """
  defaults = {one.name: one.default for one in dataclasses.fields(Options)}
  found = {name: named[name] for name in defaults if name in named}
  for name in named.keys() - defaults.keys():
    if name in _INSTEAD:
      raise ValueError(f'{name}: {_INSTEAD[name]}')
    if name not in _USUAL_NAMES:
      raise ValueError(f'There is no option {name!r}.{nearest(name, defaults)}')
    own = _USUAL_NAMES[name]
    if found.get(own, defaults[own]) != defaults[own]:
      raise ValueError(
        f'{name} is called {own} here, and {own} was given as well.'
      )
    found[own] = named[name]
  return Options(**found)


def as_gamma(value: int | str | LengthRule) -> tuple[int, LengthRule | None]:
  """The most proposals of a round, and the rule that may end a draft earlier.

  Args:
    value: a number of proposals; or 'adaptive', see `length.plain_rule`; or a
      rule, as `Calibration.rule` gives it.

  Raises:
    ValueError: it is none of these.
  """
  if isinstance(value, LengthRule):
    # The loop of a number has less to do.
    return value.most, None if ends_nothing(value) else value
  if not isinstance(value, str):
    check_gamma(value)
    return value, None
  if value != ADAPTIVE:
    raise ValueError(
      f'gamma must be a whole number >= 0 or {ADAPTIVE!r}, got {value!r}.'
    )
  rule = plain_rule()
  return rule.most, rule


def check_gamma(gamma: int) -> None:
  """Raises ValueError unless a round may have `gamma` proposals.

  Caches and logits grow with gamma, and more than `MAX_GAMMA` gain nothing.
  """
  check_number('gamma', gamma, 0)
  if gamma > MAX_GAMMA:
    raise ValueError(
      f'gamma must be {MAX_GAMMA} at most, got {shortened(gamma)}. The longer'
      ' its draft, the more a round costs; specdec calibrate measures which'
      ' gamma pays.'
    )
