"""What a caller may ask of an engine, checked before anything is compiled."""

import dataclasses
from collections.abc import Sequence

from specdec_jax.checks.arguments import check_number
from specdec_jax.checks.names import nearest
from specdec_jax.probs import SamplingConfig
from specdec_jax.verify import check_lenience

MAX_GAMMA = 256


@dataclasses.dataclass(frozen=True)
class Options:
  """What `generate` and `stream` may be asked.

  Attributes:
    sampling: temperature, top-k, top-p. Temperature may be one for each text.
    seed: with the example's id, what all its random numbers derive from.
    example_ids: of the texts, 0, 1, ... by default. A text's sample depends on
      its id, not on its place in a batch or on its neighbours.
    stop_ids: ids that end an output; None is the tokenizer's end of sequence.
    stop_strings: strings that end an output; they are not part of its text.
    min_length: tokens before a stop id is allowed.
    max_length: tokens of an output at most; None is the engine's maximum.
    on_too_long: what a too long input does: 'error' raises, 'truncate' keeps
      its beginning, 'report' gives a completion with an error, as it then does
      for ids outside the vocabulary.
    log_probs: whether log-probabilities are wanted.
    prompts: ids that the output of each text begins with, behind the decoder's
      start token; they are read, not produced, and no part of the result. None
      is none.
    lenience: in (0, 1]; less than 1 accepts more of the drafter's proposals
      and is lossy: a token may come up to 1 / lenience times as often as it
      should, or at temperature 0 have `lenience` of the best one's probability.
      See `speculative`; the plain loop has no use for it.
  """

  sampling: SamplingConfig = SamplingConfig(temperature=0.0)
  seed: int = 0
  example_ids: Sequence[int] | None = None
  stop_ids: Sequence[int] | None = None
  stop_strings: Sequence[str] = ()
  min_length: int = 0
  max_length: int | None = None
  on_too_long: str = 'error'
  log_probs: bool = True
  prompts: Sequence[Sequence[int]] | None = None
  lenience: float = 1.0

  def __post_init__(self):
    check_number('min_length', self.min_length, 0)
    check_lenience(self.lenience)
    if self.on_too_long not in ('error', 'truncate', 'report'):
      raise ValueError(
        "on_too_long must be 'error', 'truncate' or 'report', got"
        f' {self.on_too_long!r}.'
      )
    if isinstance(self.stop_strings, str) or '' in self.stop_strings:
      raise ValueError(
        'stop_strings must be a sequence of strings, none of them empty, got'
        f' {self.stop_strings!r}.'
      )


_BEAM_SEARCH = ('num_beams', 'beam_size', 'beam_width')


def options_of(**named) -> Options:
  """Makes `Options`.

  Raises:
    ValueError: a name that they have not, or a value out of range.
  """
  known = [field.name for field in dataclasses.fields(Options)]
  for name in named:
    if name in _BEAM_SEARCH:
      raise ValueError(
        f'{name}: there is no speculative beam search (Appendix A.4 of the'
        ' paper) here. Outputs are greedy or sampled; for several of a text'
        ' give it several times, with other example_ids.'
      )
    if name not in known:
      raise ValueError(f'There is no option {name!r}.{nearest(name, known)}')
  return Options(**named)


def check_gamma(gamma: int) -> None:
  """Raises ValueError unless it is a number of proposals that a round may have.

  Caches and logits grow with it, and nothing is won by so many.
  """
  check_number('gamma', gamma, 0)
  if gamma > MAX_GAMMA:
    raise ValueError(
      f'gamma must be {MAX_GAMMA} at most, got {gamma}. A round costs the more'
      ' the longer its draft is; scripts/calibrate.py measures what pays.'
    )
