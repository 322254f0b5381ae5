"""What the loops decode: B rows with their limits, sampling, drafting, rules.

It lies below models and drafters, which read what they need from it.
"""

import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct

from specdec_jax.checks.fields import unexpected
from specdec_jax.probs import SamplingConfig, SamplingParams
from specdec_jax.rules.automata import Automata
from specdec_jax.rules.tokens import Rules, Ruling
from specdec_jax.tree_shape import TreeShape
from specdec_jax.types import Array, LengthRule

# How a draft is judged: token by token, or as a whole.
TOKEN, BLOCK = 'token', 'block'


class BeamScoring(enum.Enum):
  """Which library's beam search it is: how beams are scored and end.

  With T5X's, a finished beam of n tokens, its prompt and its end counted, has
  the score log_prob / ((5 + n) / 6) ** penalty. Any of the 2 K best
  continuations may end a beam, a beam that is cut off has not finished, and the
  search goes on until no live beam could still beat a finished one, however
  long it became.

  With that of Hugging Face's transformers (`early_stopping=False`), the score
  is log_prob / n ** penalty, n without the prompt. Only the K best
  continuations may end a beam, a beam that is cut off counts as finished, and
  the search goes on until no live beam, as long as it is now, beats a finished
  one.
  """

  T5X = 't5x'
  TRANSFORMERS = 'transformers'


@struct.dataclass
class BeamSettings:
  """The settings of a beam search.

  Attributes:
    penalty: float32[], the exponent of the length penalty; >= 0 where the
      scoring is T5X's.
    width: static, K, live beams.
    draft_width: static, U, beams of the drafter.
    num_ends: static, how many ids end a beam.
    scoring: static, whose beam search it is.
  """

  penalty: jax.Array
  width: int = struct.field(pytree_node=False)
  draft_width: int = struct.field(pytree_node=False)
  num_ends: int = struct.field(pytree_node=False, default=1)
  scoring: BeamScoring = struct.field(
    pytree_node=False, default=BeamScoring.T5X
  )

  @property
  def num_candidates(self) -> int:
    """C, continuations that are looked at: K of them do not end a beam."""
    return max(2, 1 + self.num_ends) * self.width


@struct.dataclass
class RestPolicy:
  """Costs of speculation, and the loss at which a row's drafter rests.

  `decoding.resting` keeps the accounts. Changing values does not recompile.

  Attributes:
    costs: float32[G + 1], time of a round with 0..G proposals, in calls of the
      target over one token.
    patience: float32[], the loss of a row after which its drafter rests.
    first_rest: int32[], rounds of a row's first rest.
  """

  costs: Array
  patience: Array
  first_rest: Array


@struct.dataclass
class Drafting:
  """How many tokens the drafter proposes; by default it proposes none.

  Attributes:
    gamma: static, the most proposals of a round; of a tree, its levels. 0
      decodes plainly.
    draft_rule: ends drafts early, made for `gamma` or more; None: each draft
      has gamma proposals.
    rests: when the drafter rests, made for `gamma` or more; None: never.
  """

  gamma: int = struct.field(pytree_node=False, default=0)
  draft_rule: LengthRule | None = None
  rests: RestPolicy | None = None

  @property
  def adapts(self) -> bool:
    """Whether drafts may end before gamma."""
    return self.draft_rule is not None

  def check(self) -> None:
    """Raises ValueError if a rule would be read past its end."""
    most = self.gamma
    if self.draft_rule is not None:
      most = min(most, self.draft_rule.most)
    if self.rests is not None:
      most = min(most, len(self.rests.costs) - 1)
    if self.gamma > most:
      expected = f'at most {most}, as its draft_rule and rests were made for'
      raise unexpected('gamma', expected, self.gamma)


@struct.dataclass
class Request:
  """A batch to decode. Changing the values of its arrays does not recompile.

  Attributes:
    inputs: int32[B, E], `pad_id` past each row's end.
    keys: PRNG keys [B], made from (seed, example); each round's are derived
      from them.
    sampling: temperature, top-k, top-p.
    stop_ids: int32[K], ids that end a row, or int32[B, K]; padded with -1.
    min_length: int32[B], tokens before a stop id is allowed.
    max_length: int32[B], tokens after which a row stops; 0 for a row that
      only fills up the batch. At most `slots`.
    prompt: int32[B, P], the tokens that the decoder begins with, the start
      token first.
    prompt_length: int32[B], 1..P, the start token counted.
    slots: static, the tokens that the state has room for.
    drafting: gamma, and when drafts end earlier or the drafter rests.
    greedy: static, every temperature is 0: no softmax, no noise.
    forbids_stops: static, whether `min_length` is in use.
    with_log_probs: static, whether log-probabilities are wanted.
    log_probs_as_drawn: static, whether they are those of the distribution that
      tokens are drawn from, after temperature, top-k and top-p (0.0 where it is
      one-hot); otherwise those of the model itself.
    lenience: float32[] in (0, 1], see `verify`; None is 1, lossless.
    verification: static, 'token' (Algorithm 1) or 'block' (`verify_block`, for
      drafts that are sampled and lossless).
    beams: settings of a beam search, which ignores keys and sampling; None
      decodes rows of their own.
    tree: static, the tree that the drafter proposes (`Drafter.tree`), of which
      a draft is the first `gamma` levels; None: drafts are chains.
    skips_rounds: static, whether rounds may pass without the drafter for
      another reason than that it rests; see `catches_up`.
    pad_id: static, what inputs are padded with: `models.base.pad_id` of the
      target.
    token_rules: rules on the tokens of each row; None leaves them out of the
      program.
    automata: the tables of all constraints; None without any.
  """

  inputs: jax.Array
  keys: jax.Array
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
  verification: str = struct.field(pytree_node=False, default=TOKEN)
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
    """The rules on tokens of all rows, with their automata; None without."""
    if self.token_rules is None:
      return None
    return Ruling(self.token_rules, self.automata)

  @property
  def rows(self) -> dict[str, Any]:
    """The fields that have an entry for each row; the others belong to all."""
    names = ['inputs', 'keys', 'sampling', 'min_length', 'max_length']
    names += ['prompt', 'prompt_length', 'token_rules']
    names += ['stop_ids'] * (self.stop_ids.ndim > 1)
    return {name: getattr(self, name) for name in names}

  @property
  def draft_slots(self) -> int:
    """Slots that a whole draft takes."""
    if self.tree is None or not self.gamma:
      return self.gamma
    return self.tree.cut(self.gamma).num_nodes

  @property
  def call_tokens(self) -> int:
    """Tokens of a row that a call of the target reads, with a whole draft."""
    if self.beams is not None:
      return self.beams.width + self.beams.draft_width * self.gamma
    return 1 + self.draft_slots

  @property
  def prompt_width(self) -> int:
    """P, slots of the longest prompt, the start token counted."""
    return self.prompt.shape[1]

  @property
  def search(self) -> BeamSettings:
    """`beams` of a request for a beam search."""
    assert self.beams is not None
    return self.beams

  @property
  def judges_blocks(self) -> bool:
    """Whether drafts are judged as a whole."""
    return self.gamma > 0 and self.verification == BLOCK and not self.greedy

  @property
  def longest(self) -> int:
    """Tokens of the longest sequence: prompt, output and a whole draft."""
    return self.prompt_width + self.slots + self.gamma

  @property
  def cache_slots(self) -> int:
    """T: slots for prompt, output, and a whole draft past the last token.

    In a beam search each position has a slot for every beam, and so has the
    last of the prompt's. Rounded up to a multiple of 64, see `whole_buckets`.
    """
    needed = self.longest - self.gamma + self.draft_slots
    if self.beams is not None:
      levels = self.beams.width * (self.slots + 1)
      needed = self.prompt_width + levels + self.beams.draft_width * self.gamma
    return whole_buckets(needed)


def whole_buckets(tokens: int) -> int:
  """The least multiple of 64 that is not below `tokens`."""
  return tokens + -tokens % 64


def new_request(
  inputs: Any,
  keys: jax.Array,
  sampling: SamplingConfig,
  *,
  slots: int,
  gamma: int = 0,
  stop_ids: Sequence[int] = (),
  min_length: Any = 0,
  max_length: Any = None,
  prompt: Any = None,
  prompt_length: Any = 1,
  **others: Any,
) -> Request:
  """A `Request`, with NumPy arrays; values that all rows share are given once.

  Args:
    inputs: int32[B, E], `pad_id` past each row's end.
    keys: PRNG keys [B], see `example_keys`.
    sampling: sampling of all rows; its temperature may be one for each row.
    slots: the tokens that the state has room for.
    gamma: the most proposals per round; 0 for the plain loop. Or give
      `drafting`.
    stop_ids: ids that end a row.
    min_length: as in `Request`: one number for all rows, or int[B].
    max_length: as in `Request`: one number for all rows, or int[B]; None is
      `slots`.
    prompt: as in `Request`; None is the start token 0.
    prompt_length: as in `Request`: one number for all rows, or int[B].
    **others: further fields of `Request`; also `drafting`, `greedy` and
      `forbids_stops`, which otherwise follow from the arguments above.
  """
  batch = inputs.shape[0]
  # Few widths, so that few programs are compiled.
  width = max(4, 1 << max(len(stop_ids) - 1, 0).bit_length())
  stops: Any = np.full((width,), -1, np.int32)
  stops[: len(stop_ids)] = stop_ids

  def of_rows(value: Any) -> Any:
    return np.broadcast_to(np.asarray(value, np.int32), (batch,))

  follows: dict[str, Any] = {
    'drafting': Drafting(gamma),
    'greedy': sampling.greedy,
    'forbids_stops': bool(np.any(np.asarray(min_length) > 0)),
  }
  if prompt is None:
    prompt = np.zeros((batch, 1), np.int32)
  return Request(
    inputs=inputs,
    keys=keys,
    sampling=sampling.params(batch),
    stop_ids=stops,
    min_length=of_rows(min_length),
    max_length=of_rows(slots if max_length is None else max_length),
    prompt=prompt,
    prompt_length=of_rows(prompt_length),
    slots=slots,
    **(follows | others),
  )


def example_keys(seed: int, ids: Any) -> jax.Array:
  """PRNG keys [B] from the seed and the examples' numbers, uint32[B]."""
  return keys_of_rows(np.full(np.shape(ids), seed & 0xFFFFFFFF, np.uint32), ids)


@jax.jit
def keys_of_rows(seeds: Any, ids: Any) -> jax.Array:
  """`example_keys` of rows with a seed each: both are uint32[B]."""
  return jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(seeds), ids)
