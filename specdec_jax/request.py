"""The input of the decoding loops: B rows with limits, sampling and rules.

Models and drafters import this module, and read the fields that they need.
"""

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from specdec_jax.checks.fields import unexpected
from specdec_jax.probs import SamplingConfig, SamplingParams
from specdec_jax.rules.automata import Automata
from specdec_jax.rules.tokens import Rules, Ruling
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import Array, LengthRule


class BeamScoring(enum.Enum):
  """The library whose scores and whose stopping rule a beam search uses.

  T5X: a finished beam of n tokens, its prompt and its end counted, has the
  score log_prob / ((5 + n) / 6) ** penalty. Any of the 2 K best continuations
  may end a beam, a beam that is cut off has not finished, and the search goes
  on until no live beam can beat a finished one at any length.

  TRANSFORMERS (Hugging Face's): the score is
  log_prob / n ** penalty, n without the prompt. Only the K best continuations
  may end a beam, a beam that is cut off counts as finished, and the search goes
  on until no live beam beats a finished one at its present length, unless
  `early_stopping` says otherwise.
  """

  T5X = 't5x'
  TRANSFORMERS = 'transformers'


@struct.dataclass
class BeamSettings:
  """The settings of a beam search.

  Attributes:
    penalty: float32[], the exponent of the length penalty; >= 0 with T5X's
      scoring.
    width: static, K, the number of live beams.
    draft_width: static, U, the number of the drafter's beams.
    num_ends: static, the number of ids that end a beam.
    scoring: static, the library whose scores are used.
    early_stopping: static, when a search with transformers' scoring ends, see
      `Options`.
    num_forced: static, number of tokens at the end of a prompt that
      transformers forces and counts as output, such as the token of a language.
  """

  penalty: jax.Array
  width: int = struct.field(pytree_node=False)
  draft_width: int = struct.field(pytree_node=False)
  num_ends: int = struct.field(pytree_node=False, default=1)
  scoring: BeamScoring = struct.field(
    pytree_node=False, default=BeamScoring.T5X
  )
  early_stopping: bool | str = struct.field(pytree_node=False, default=False)
  num_forced: int = struct.field(pytree_node=False, default=0)

  @property
  def num_candidates(self) -> int:
    """C, so many continuations that at least K of them do not end a beam."""
    return max(2, 1 + self.num_ends) * self.width


@struct.dataclass
class RestPolicy:
  """The costs of speculation, and the loss at which a row's drafter rests.

  `decoding.resting` counts the losses. Changing values does not recompile.

  Attributes:
    costs: float32[G + 1], the time of a round with 0..G proposals. The unit is
      the time of a call of the target over one token.
    patience: float32[], the loss at which a row's drafter rests, in this unit.
    first_rest: int32[], the number of rounds of a row's first rest.
  """

  costs: Array
  patience: Array
  first_rest: Array


@struct.dataclass
class Drafting:
  """The settings of drafting; by default nothing is proposed.

  Attributes:
    gamma: static, the most proposals of a round; of a tree, the most levels. 0
      decodes plainly.
    draft_rule: thresholds that end drafts early, made for at least `gamma`
      proposals; None: each draft has gamma proposals.
    rests: costs by which a drafter that loses time rests, made for at least
      `gamma` proposals; None: the drafter never rests.
  """

  gamma: int = struct.field(pytree_node=False, default=0)
  draft_rule: LengthRule | None = None
  rests: RestPolicy | None = None

  @property
  def adapts(self) -> bool:
    """Whether drafts may end before gamma."""
    return self.draft_rule is not None

  def check(self) -> None:
    """Raises ValueError if `draft_rule` or `rests` have too few entries."""
    limit = self.gamma
    if self.draft_rule is not None:
      limit = min(limit, self.draft_rule.most)
    if self.rests is not None:
      limit = min(limit, len(self.rests.costs) - 1)
    if self.gamma > limit:
      expected = f'at most {limit}, as its draft_rule and rests were made for'
      raise unexpected('gamma', expected, self.gamma)


@struct.dataclass
class Request:
  """A batch to decode. Changing the values of its arrays does not recompile.

  Attributes:
    inputs: int32[B, E], `pad_id` past each row's end.
    keys: PRNG keys [B] from (seed, example); each round's keys derive from
      them.
    sampling: temperature, top-k, top-p and min-p of each row.
    stop_ids: int32[K], ids that end any row, or int32[B, K], ids that end each
      row; padded with -1.
    min_length: int32[B], tokens before a stop id is allowed.
    max_length: int32[B], tokens after which a row stops; 0 for a row that
      only fills up the batch. At most `slots`.
    prompt: int32[B, P], the tokens that the decoder begins with, the start
      token first.
    prompt_length: int32[B], 1..P, the start token counted.
    slots: static, the most tokens of an output.
    drafting: gamma, and the policies that end drafts early or let drafters
      rest.
    greedy: static, whether every temperature is 0, so that the program needs no
      softmax and no noise.
    forbids_stops: static, whether a row may have a `min_length` above 0.
    with_log_probs: static, whether log-probabilities are wanted.
    log_probs_as_drawn: static, whether log-probabilities are those of the
      distribution after temperature, top-k and top-p (0.0 if it is one-hot);
      otherwise they are the model's own.
    lenience: float32[] in (0, 1], see `verify`; None is 1, lossless.
    verification: static, 'token' (Algorithm 1) or 'block' (`verify_block`, for
      drafts that are sampled and lossless).
    beams: settings of a beam search, which ignores keys and sampling; None
      without a beam search.
    tree: static, the tree that the drafter proposes (`Drafter.tree`), of which
      a draft is the first `gamma` levels; None: drafts are chains.
    skips_rounds: static, whether rounds may pass without the drafter even if
      it never rests; see `catches_up`.
    pad_id: static, the id that inputs are padded with, `models.base.pad_id` of
      the target.
    token_rules: rules on the tokens of each row; None compiles a program
      without rules.
    automata: the tables of the automata of all constraints; None if no row has
      a constraint.
  """

  inputs: jax.Array
  keys: Array
  sampling: SamplingParams
  stop_ids: jax.Array
  min_length: jax.Array
  max_length: jax.Array
  prompt: jax.Array
  prompt_length: jax.Array
  slots: int = struct.field(pytree_node=False)
  drafting: Drafting
  greedy: bool = struct.field(pytree_node=False)
  forbids_stops: bool = struct.field(pytree_node=False, default=False)
  with_log_probs: bool = struct.field(pytree_node=False, default=True)
  log_probs_as_drawn: bool = struct.field(pytree_node=False, default=False)
  lenience: jax.Array | None = None
  verification: str = struct.field(pytree_node=False, default='token')
  beams: BeamSettings | None = None
  skips_rounds: bool = struct.field(pytree_node=False, default=False)
  tree: TreeShape | None = struct.field(pytree_node=False, default=None)
  pad_id: int = struct.field(pytree_node=False, default=0)
  token_rules: Rules | None = None
  automata: Automata | None = None

  @property
  def gamma(self) -> int:
    """The most proposals of a round."""
    return self.drafting.gamma

  def with_drafting(self, **changes: Any) -> 'Request':
    """Returns the request with other fields of its `Drafting`."""
    return self.replace(drafting=self.drafting.replace(**changes))

  @property
  def catches_up(self) -> bool:
    """Whether rounds may pass without the drafter.

    A drafter with a cache then first reads the committed tokens that it lacks.
    """
    return self.skips_rounds or self.drafting.rests is not None

  @property
  def ruling(self) -> Ruling | None:
    """The token rules of all rows, with their automata; None without rules."""
    if self.token_rules is None:
      return None
    return Ruling(self.token_rules, self.automata)

  @property
  def rows(self) -> dict[str, Any]:
    """The fields that have an entry for each row."""
    names = ['inputs', 'keys', 'sampling', 'min_length', 'max_length']
    names += ['prompt', 'prompt_length', 'token_rules']
    names += ['stop_ids'] * (self.stop_ids.ndim > 1)
    return {name: getattr(self, name) for name in names}

  @property
  def draft_slots(self) -> int:
    """The number of cache slots that a whole draft takes."""
    if self.tree is None or not self.gamma:
      return self.gamma
    return self.tree.cut(self.gamma).num_nodes

  @property
  def call_tokens(self) -> int:
    """Tokens per row in a call of the target with a whole draft."""
    if self.beams is not None:
      return self.beams.width + self.beams.draft_width * self.gamma
    return 1 + self.draft_slots

  @property
  def prompt_width(self) -> int:
    """P, slots of the longest prompt, the start token counted."""
    return self.prompt.shape[1]

  @property
  def search(self) -> BeamSettings:
    """The settings of the beam search; the request must be for one."""
    assert self.beams is not None
    return self.beams

  @property
  def judges_blocks(self) -> bool:
    """Whether drafts are judged as a whole."""
    return self.gamma > 0 and self.verification == 'block' and not self.greedy

  @property
  def longest(self) -> int:
    """Tokens of the longest sequence: prompt, output and a whole draft."""
    return self.prompt_width + self.slots + self.gamma

  @property
  def cache_slots(self) -> int:
    """T, the slots for prompt, output, and a whole draft past the last token.

    In a beam search each output token, and the last token of the prompt, has a
    slot for every beam. T is a multiple of 64, see `whole_buckets`.
    """
    needed = self.longest - self.gamma + self.draft_slots
    if self.beams is not None:
      levels = self.beams.width * (self.slots + 1)
      needed = self.prompt_width + levels + self.beams.draft_width * self.gamma
    return whole_buckets(needed)


def whole_buckets(tokens: int) -> int:
  """Rounds up to a multiple of 64, so that few sizes are compiled."""
  return tokens + -tokens % 64


def new_request(
  inputs: Array,
  keys: Array,
  sampling: SamplingConfig,
  *,
  slots: int,
  gamma: int = 0,
  stop_ids: Sequence[int] = (),
  min_length: ArrayLike = 0,
  max_length: ArrayLike | None = None,
  prompt: Array | None = None,
  prompt_length: ArrayLike = 1,
  **others: Any,
) -> Request:
  """Makes a `Request` of NumPy arrays; one value may serve all rows.

  Args:
    inputs: int32[B, E], `pad_id` past each row's end.
    keys: PRNG keys [B], see `example_keys`.
    sampling: sampling of all rows, with one temperature or one for each row.
    slots: the most tokens of an output.
    gamma: the most proposals per round; 0 for the plain loop. It is ignored if
      `drafting` is given.
    stop_ids: ids that end any row.
    min_length: tokens before a stop id is allowed; one number for all rows, or
      int[B].
    max_length: tokens after which a row stops; one number for all rows, or
      int[B]; None is `slots`.
    prompt: int32[B, P], the tokens that the decoder begins with; None is the
      start token 0.
    prompt_length: tokens of the prompt, the start token counted; one number for
      all rows, or int[B].
    **others: further fields of `Request`; also `drafting`, `greedy` and
      `forbids_stops`, which otherwise follow from the arguments above.
  """
  batch = inputs.shape[0]
  # Few widths, so that few programs are compiled.
  width = max(4, 1 << max(len(stop_ids) - 1, 0).bit_length())
  stops = np.full((width,), -1, np.int32)
  stops[: len(stop_ids)] = stop_ids

  def of_rows(value: ArrayLike) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, np.int32), (batch,))

  if prompt is None:
    prompt = np.zeros((batch, 1), np.int32)
  fields: dict[str, Any] = {
    'inputs': inputs,
    'keys': keys,
    'sampling': sampling.params(batch),
    'stop_ids': stops,
    'min_length': of_rows(min_length),
    'max_length': of_rows(slots if max_length is None else max_length),
    'prompt': prompt,
    'prompt_length': of_rows(prompt_length),
    'slots': slots,
    'drafting': Drafting(gamma),
    'greedy': sampling.greedy,
    'forbids_stops': bool(np.any(np.asarray(min_length) > 0)),
  }
  return Request(**fields | others)


def example_keys(seed: int, ids: Array) -> jax.Array:
  """Derives PRNG keys [B] from a seed and the examples' ids, uint32[B]."""
  return keys_of_rows(np.full(np.shape(ids), seed & 0xFFFFFFFF, np.uint32), ids)


@jax.jit
def keys_of_rows(seeds: Array, ids: Array) -> jax.Array:
  """Derives PRNG keys [B] from a seed and an id per row, both uint32[B]."""
  return jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds), ids)
