"""`Options` of an output and `EngineConfig`, checked before anything runs.

This file also has the names that other libraries use for the options, and the
ids that an output's random numbers derive from.
"""

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from specdec_jax import partitioning
from specdec_jax.checks.fields import (
  Bound,
  check_type,
  check_types,
  nearest,
  unexpected,
)
from specdec_jax.decoding.resting import guessed
from specdec_jax.drafters.small_model import plain_rule
from specdec_jax.probs import SamplingConfig
from specdec_jax.request import BeamScoring, BeamSettings, Drafting, RestPolicy
from specdec_jax.rules.options import RuleOptions
from specdec_jax.text.tokenizer import Vocabulary
from specdec_jax.types import Count, LengthRule, Positive
from specdec_jax.verify import check_lenience

MAX_GAMMA = 256
MOST_ROWS = 1 << 16  # most rows decoded together, and most samples of a text
KEY_BITS = 32  # bits of the id that an example's random numbers derive from
# These options -> their names in other libraries.
_USUAL_NAMES = {
  'max_length': ('max_new_tokens', 'max_tokens', 'max_decode_len'),
  'min_length': ('min_new_tokens', 'min_tokens'),
  'num_samples': ('num_return_sequences', 'num_decodes', 'n'),
  'bad_words': ('bad_words_ids',),
  'stop_strings': ('stop',),
  'stop_ids': ('stop_token_ids',),
  'num_beams': ('beam_size', 'beam_width'),
  'alpha': ('brevity_penalty',),
  'source_lang': ('src_lang',),
  'target_lang': ('tgt_lang',),
}
# Names of other libraries without a counterpart -> what to do instead.
_INSTEAD = {
  'sampling': 'give temperature, top_k and top_p by themselves.',
  'do_sample': 'temperature says it; 0 is greedy, anything above samples.',
  'prefix_allowed_tokens_fn': 'choices, regex and json_schema say it.',
}
ALPHA = 0.6  # the exponent of the length penalty in T5's papers and in T5X


@dataclasses.dataclass(frozen=True)
class Options(RuleOptions):
  """The options of `generate` and `stream`, with those of `RuleOptions`.

  Attributes:
    temperature: 0 is greedy; above 0 outputs are sampled. The value is one
      number for all texts, or one number for each.
    top_k: samples only from the k likeliest tokens, see `SamplingConfig`; 0 is
      off.
    top_p: samples only from the likeliest tokens that together have this
      probability; 1 is off.
    min_p: samples only from tokens that have at least this fraction of the
      likeliest token's probability; 0 is off.
    max_length: the most tokens of an output; None is the engine's maximum.
    min_length: tokens that an output must have before a stop id or a stop
      string may end it.
    num_samples: outputs per text; they follow one another in the result.
    stop_strings: strings that end an output; they are not part of its text.
    stop_ids: ids that end an output; None is the engine's.
    seed: all random numbers of an example derive from this seed and the
      example's id.
    example_ids: ids of the texts; 0, 1, ... by default. A text's sample depends
      on its id, not on its position in a batch or on its neighbours.
    prompts: ids that the output of each text begins with, after the decoder's
      start token. They are read, not produced, and are not part of the result.
      None: no prompts.
    source_lang: language of the texts, such as 'eng_Latn', for a model that
      translates between many languages; None is the engine's.
    target_lang: language of the outputs, such as 'deu_Latn'.
    split: 'sentences' decodes each sentence of a text by itself, and joins the
      outputs with the line breaks of the text, see `text.sentences`. All other
      options apply to each sentence.
    split_lang: language whose rules find the sentences, such as 'de'; None is
      `source_lang`, or English.
    split_prefix: text put before each sentence, such as 'translate English to
      German: ' for a T5 or '<2de> ' for MADLAD-400.
    on_too_long: for an input that is too long, 'error' raises an error,
      'truncate' keeps its beginning, and 'report' returns a completion with an
      error (also for ids outside the vocabulary).
    log_probs: whether completions have the log-probabilities of their tokens.
    top_log_probs: how many of the likeliest tokens, with log-probabilities,
      completions have for each position of an output; the target reads the
      output once more for them.
    num_beams: the width of a beam search, see `decoding.beams`; None: no beam
      search. It returns the best `num_samples` beams, the best one last.
    alpha: the exponent of T5X's brevity penalty in a beam search, with score =
      log_prob / ((5 + tokens) / 6) ** alpha; None is 0.6 unless
      `length_penalty` is given.
    length_penalty: the exponent of transformers' length penalty in a beam
      search, with score = log_prob / tokens ** length_penalty; below 0 shorter
      outputs score better.
    early_stopping: whether a beam search with `length_penalty` ends once
      `num_beams` beams have ended, as in transformers; 'never' lets it go on
      until no live beam can beat a finished one at any length.
    draft_beams: the number of the drafter's beams; None is 2 * `num_beams`.
    lenience: below 1 more proposals are accepted, and the output is lossy. A
      token may come up to 1 / lenience times as often as it should; at
      temperature 0 a token may have only `lenience` times the probability of
      the best token. See `verify`; decoding without a drafter ignores it.
    verification: how sampled drafts are judged; 'token' judges each token by
      the paper's Algorithm 1, and 'block' judges the draft as a whole, which
      accepts more tokens. Both are lossless (see `verify_block`). None is
      'block', or 'token' where `lenience` is below 1. At temperature 0 both
      have the same output.

  Raises:
    ValueError: a value is outside its range.
  """

  temperature: float | Sequence[float] = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_length: Positive | None = None
  min_length: Count = 0
  num_samples: Annotated[int, Bound(1, MOST_ROWS)] = 1
  stop_strings: Sequence[str] = ()
  stop_ids: Sequence[int] | None = None
  seed: Annotated[int, Bound(-(1 << 63), (1 << 64) - 1)] = 0
  example_ids: Sequence[int] | None = None
  prompts: Sequence[Sequence[int]] | None = None
  on_too_long: Literal['error', 'truncate', 'report'] = 'error'
  log_probs: bool = True
  top_log_probs: Count = 0
  lenience: float = 1.0
  verification: Literal['token', 'block'] | None = None
  num_beams: Positive | None = None
  alpha: Annotated[float, Bound(0, 10)] | None = None
  length_penalty: Annotated[float, Bound(-10, 10)] | None = None
  early_stopping: bool | Literal['never'] = False
  draft_beams: Positive | None = None
  source_lang: str | None = None
  target_lang: str | None = None
  split: Literal['sentences'] | None = None
  split_lang: str | None = None
  split_prefix: str = ''

  def __post_init__(self):
    for name, value in dataclasses.asdict(self.sampling).items():
      object.__setattr__(self, name, value)
    if isinstance(self.sequence_bias, Mapping):  # transformers takes a dict
      pairs = tuple(self.sequence_bias.items())
      object.__setattr__(self, 'sequence_bias', pairs)
    if isinstance(self.stop_strings, str):
      object.__setattr__(self, 'stop_strings', (self.stop_strings,))
    check_lenience(self.lenience)
    check_types(self)
    self.check_rules()
    for name, fits, expected in self._limits():
      if not fits:
        raise unexpected(name, expected, getattr(self, name))

  @property
  def judges_blocks(self) -> bool:
    """Whether sampled drafts are judged as a whole."""
    if self.verification is None:
      return self.lenience == 1
    return self.verification == 'block'

  def _limits(self) -> Iterator[tuple[str, bool, str]]:
    """Yields (field, whether it fits the other fields, what would fit)."""
    yield 'stop_strings', '' not in self.stop_strings, 'no empty string'
    tokens = "'token' with a lenience below 1, a rule for single tokens"
    yield 'verification', not self.judges_blocks or self.lenience == 1, tokens
    yield 'prompts', not self.split or self.prompts is None, 'None with split'
    is_code = re.match(r'[A-Za-z]{2,3}([_-]|\Z)', self.split_lang or 'en')
    yield 'split_lang', bool(is_code), "a code, such as 'de' or 'deu_Latn'"
    for name in ('split_lang', 'split_prefix'):
      fits = bool(self.split) or not getattr(self, name)
      yield name, fits, 'nothing without split'
    width, penalty = self.num_beams, self.length_penalty
    if width is None:
      names = ('alpha', 'length_penalty', 'draft_beams', 'early_stopping')
      for name in names:
        fits = getattr(self, name) in (None, False)
        yield name, fits, 'None without num_beams'
      return
    stops = not self.early_stopping or penalty is not None
    drafts = self.draft_beams or width
    for name, fits, expected in (
      ('early_stopping', stops, 'False without length_penalty'),
      ('draft_beams', drafts >= width, f'at least {width}'),
      ('temperature', self.sampling.greedy, '0'),
      ('lenience', self.lenience == 1, '1'),
      ('stop_strings', not self.stop_strings, 'none, but stop_ids,'),
      ('num_samples', self.num_samples <= width, f'at most {width}'),
      ('length_penalty', None in (self.alpha, penalty), 'None beside alpha'),
    ):
      yield name, fits, f'{expected} in a beam search (num_beams = {width})'

  def beam_settings(
    self, num_ends: int, num_forced: int = 0
  ) -> BeamSettings | None:
    """Returns the settings of a beam search; None without one.

    Args:
      num_ends: the number of ids that end an output.
      num_forced: tokens at the end of a prompt that transformers forces and
        counts as output.
    """
    if self.num_beams is None:
      return None
    scoring, penalty = BeamScoring.TRANSFORMERS, self.length_penalty
    if penalty is None:
      scoring = BeamScoring.T5X
      penalty = ALPHA if self.alpha is None else self.alpha
    number: Any = np.float32(penalty)
    beams = self.num_beams, self.draft_beams or 2 * self.num_beams
    return BeamSettings(
      number, *beams, num_ends, scoring, self.early_stopping, num_forced
    )

  @functools.cached_property
  def sampling(self) -> SamplingConfig:
    """Temperature, top-k, top-p and min-p."""
    return SamplingConfig(self.temperature, self.top_k, self.top_p, self.min_p)


def example_id(index: int, sample: int) -> int:
  """Returns the id from which the random numbers of a sample derive.

  The bits of `sample` are filled in from the highest bit down, those of `index`
  from the lowest bit up: so all pairs that fit have different ids, and the
  first sample's id does not depend on how many samples there are.

  Raises:
    ValueError: the two do not fit into 32 bits.
  """
  if index.bit_length() + sample.bit_length() > KEY_BITS:
    expected = f'less than {KEY_BITS} bits with example {index}'
    advice = 'Ask for fewer samples (gin: NUM_DECODES), or take another seed.'
    raise unexpected('num_samples', expected, sample, advice)
  return index | int(f'{sample:0{KEY_BITS}b}'[::-1], 2)


def sentence_id(example: int, sentence: int) -> int:
  """Returns the id from which the random numbers of a sentence derive.

  The first sentence has the example's id, so that a text of one sentence gives
  the same output with and without a split.
  """
  if not sentence:
    return example
  digest = hashlib.blake2b(f'{example} {sentence}'.encode(), digest_size=4)
  return int.from_bytes(digest.digest())


def options_of(
  named: Mapping[str, Any], otherwise: Mapping[str, Any] | None = None
) -> Options:
  """Makes `Options`, also from the names that other libraries use.

  Args:
    named: name -> value of the options that are given.
    otherwise: name -> value of options that `named` does not have.

  Raises:
    ValueError: a name is unknown, an option is given twice, or a value is out
      of range.
  """
  defaults = {x.name: x.default for x in dataclasses.fields(Options)}
  values = {name: named[name] for name in defaults if name in named}
  for name in named.keys() - defaults.keys():
    if name in _INSTEAD:
      raise ValueError(f'{name}: {_INSTEAD[name]}')
    field = next((x for x, usual in _USUAL_NAMES.items() if name in usual), '')
    if not field:
      raise ValueError(f'There is no option {name!r}.{nearest(name, defaults)}')
    if values.get(field, defaults[field]) != defaults[field]:
      raise unexpected(name, f'none beside {field}, its name here', named[name])
    values[field] = named[name]
  return Options(**{**(otherwise or {}), **values})


def drafting_of(
  gamma: int | str | LengthRule | Drafting, rests: bool | RestPolicy = False
) -> Drafting:
  """Makes the `Drafting` that a caller asks for.

  Args:
    gamma: a number of proposals; 'adaptive', which uses the rule of
      `plain_rule`; a rule from `Calibration.rule`; or a `Drafting`, whose
      `rests` are ignored.
    rests: whether the drafter rests where it makes decoding slower. True uses
      guessed costs. A `RestPolicy` has measured costs, which are used only if
      they were measured at the same gamma.

  Raises:
    ValueError: gamma is none of these, or too large.
  """
  if not isinstance(gamma, Drafting | LengthRule):
    # Caches and logits grow with gamma; larger values gain nothing.
    number = Annotated[int, Bound(0, MAX_GAMMA)]
    check_type('gamma', gamma, number | Literal['adaptive'])
    gamma = plain_rule() if isinstance(gamma, str) else Drafting(gamma)
  if isinstance(gamma, LengthRule):
    # A rule that never stops compiles to the simpler loop of a fixed gamma.
    ends_some = np.any(gamma.worth) or np.any(gamma.worth_asking)
    gamma = Drafting(gamma.most, gamma if ends_some else None)
  if not rests or not gamma.gamma:
    return gamma.replace(rests=None)
  if rests is True or len(rests.costs) != gamma.gamma + 1:
    rests = guessed(gamma.gamma, gamma.adapts)
  return gamma.replace(rests=rests)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """The settings of an engine.

  Attributes:
    tokenizer: the tokenizer of both models, or its path, see `Tokenizer`; None
      is the target's own.
    gamma: tokens that the drafter proposes per round; 'adaptive' ends a draft
      where the drafter is not sure enough. The rule of a calibration does this
      too, see `drafters.small_model`. None is 4, or the gamma that a run
      chooses.
    max_input_len: most tokens of an input, its end of sequence included.
    max_decode_len: most tokens of an output, its end of sequence included.
    batch_size: the most texts that are decoded together. If there are more,
      each finished text makes room for the next.
    bos_id: id put in front of each text, for all targets but T5; a target with
      this id can also decode an empty text. None takes the target's own, which
      is the bos_token_id of its folder, or for Llama, Qwen, Gemma and T5Gemma
      the one of the vocabulary (Qwen has none). Without either, it is the end
      of sequence of a BPE vocabulary, as in GPT-2, or id 0, as in models
      trained here and in T5X.
    placement: dtype and layout of the target's parameters, and the devices that
      they and the rows of a batch are split over. If the target was loaded with
      a dtype, another dtype is refused. Each device holds the whole drafter, in
      the dtype that the drafter was loaded with, or else in the target's.
    cache_folder: folder of compiled programs; None is the user's cache folder.
    fallback: whether the drafter rests where a text's acceptance makes it
      slower than plain decoding, see `decoding.resting`. True uses guessed
      costs, a `RestPolicy` (from `Choice.rests`) measured ones.
    source_lang: language of the texts, such as 'eng_Latn', for a model that
      translates between many languages, unless a call gives another.
    target_lang: language of the outputs, such as 'deu_Latn', for such a model,
      unless a call gives another.
    split_special_tokens: whether names of special tokens in a text are read as
      ordinary text; None is the setting of the `Tokenizer`.
    skip_special_tokens: whether special tokens are left out of the text of an
      output; None is the setting of the `Tokenizer`.
    memory: file of earlier translations, whose tokens are proposed before those
      of the drafter, see `translation_memory`. The file has pairs (.tsv),
      records of `specdec decode` (predictions.jsonl) or of a task (.jsonl), or
      lines of outputs.

  Examples:
    >>> config = sd.EngineConfig(gamma=5, max_input_len=64)
    >>> config.max_input_len, config.max_decode_len
    (64, 120)

  Raises:
    ValueError: a value is of another type, too small, or too large for any
      memory.
  """

  tokenizer: Vocabulary | str | os.PathLike[str] | None = None
  gamma: int | str | LengthRule | None = None
  max_input_len: Annotated[int, Bound(2)] = 128
  # An output and the draft of a round then fit into 128 slots of a cache.
  max_decode_len: Positive = 120
  batch_size: Positive = 32
  bos_id: int | None = None
  placement: partitioning.Placement | None = None
  cache_folder: str | os.PathLike[str] | None = None
  fallback: bool | RestPolicy = False
  source_lang: str | None = None
  target_lang: str | None = None
  split_special_tokens: bool | None = None
  skip_special_tokens: bool | None = None
  memory: str | os.PathLike[str] | None = None

  def __post_init__(self):
    check_types(self)
    if self.gamma is not None:
      drafting_of(self.gamma)
