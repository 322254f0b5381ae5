"""Applies rules to the logits of a token, given the tokens before it.

A rule is a function of a prefix and of the logits after it. In a call of the
target the logits at each position are adjusted by the position's **own**
prefix, the committed tokens and the draft before it. So drafts are verified
against the adjusted target, and the output has the adjusted distribution. A
drafter that follows the rules keeps its acceptance rate; the output is also
exact with one that does not follow them.

Rules are applied in the order of transformers: biases of tokens and sequences;
penalties of repetition, presence and frequency; bans; a forced first and last
token; and at last the automaton.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from specdec_jax.rules.automata import Automata
from specdec_jax.types import Array, Draft


@struct.dataclass
class Rules:
  """The rules of B rows; a rule that is None is not part of the program.

  Attributes:
    begin: int32[B], tokens before the output, the start token counted.
    end: int32[B], the most tokens, those before the output counted.
    inputs: int32[B, E], what the encoder reads; -1 past its end.
    bias: float32[B, V], added to the logits.
    sequences: int32[B, K, L], sequences whose last token is biased where the
      prefix ends with their other tokens; padded in front by -1.
    sequence_bias: float32[B, K], the bias of each sequence; -inf forbids it.
    repetition_penalty: float32[B], divides the positive and multiplies the
      negative logits of tokens that occur in the prompt or the output.
    presence_penalty: float32[B], is subtracted once from the logits of tokens
      that occur in the output.
    frequency_penalty: float32[B], is subtracted once for each time that the
      token occurs in the output.
    no_repeat_ngram_size: int32[B], no sequence of so many tokens occurs twice;
      0 is off.
    encoder_no_repeat_ngram_size: int32[B], no sequence of so many tokens of
      `inputs` occurs in the output; 0 is off.
    begin_suppress: int32[B, K], ids that no output begins with; padded with -1.
    forced_begin: int32[B], the first token of an output without a prompt; -1
      allows any token.
    forced_end: int32[B], the last token of an output of full length; -1 allows
      any token.
    automaton: int32[B], the state of the `Automata` in which each row begins.
  """

  begin: Array
  end: Array
  inputs: Any = None
  bias: Array | None = None
  sequences: Any = None
  sequence_bias: Array | None = None
  repetition_penalty: Array | None = None
  presence_penalty: Array | None = None
  frequency_penalty: Array | None = None
  no_repeat_ngram_size: Array | None = None
  encoder_no_repeat_ngram_size: Array | None = None
  begin_suppress: Array | None = None
  forced_begin: Array | None = None
  forced_end: Array | None = None
  automaton: Array | None = None


@struct.dataclass
class Prefix:
  """The tokens before a position.

  Attributes:
    tokens: int32[..., W], of which the first `length` belong to the prefix.
    length: int32[...], number of tokens.
    state: int32[...], the automaton's state after the prefix; None if no row
      has an automaton.
  """

  tokens: jax.Array
  length: jax.Array
  state: jax.Array | None = None


@struct.dataclass
class Ruling:
  """The rules of a batch, and the automata that its rows share.

  Attributes:
    rules: the rules of each row.
    automata: the tables of all constraints; None if no row has a constraint.
  """

  rules: Rules
  automata: Automata | None = None

  def adjust(self, prefix: Prefix, logits: jax.Array) -> jax.Array:
    """Applies the rules to the logits float[B, N, V] after [B, N] prefixes."""
    of_places = jax.vmap(adjust, in_axes=(None, None, 0, 0))
    of_rows = jax.vmap(of_places, in_axes=(0, None, 0, 0))
    return of_rows(self.rules, self.automata, prefix, logits)

  def longer(self, prefix: Prefix, token: jax.Array) -> Prefix:
    """Appends a token, int32[...], to each of the prefixes."""
    is_place = jnp.arange(prefix.tokens.shape[-1]) == prefix.length[..., None]
    tokens = jnp.where(is_place, token[..., None], prefix.tokens)
    state = self.next_state(prefix.state, token)
    return Prefix(tokens, prefix.length + 1, state)

  def next_state(self, state: Any, token: jax.Array) -> Any:
    """Returns the states that tokens int32[...] lead to, or None."""
    if self.automata is None:
      return None
    step = jnp.vectorize(self.automata.next_state)
    return step(state, token)

  def along(self, prefix: Prefix, draft: Draft) -> Prefix:
    """Returns the prefixes of all positions of a target call, [B, G + 1].

    Args:
      prefix: [B], the committed tokens.
      draft: a chain of G proposals, or a tree of G nodes.
    """

    def one(prefix, token):
      return (longer := self.longer(prefix, token)), longer

    if draft.tree is None:
      _, more = lax.scan(one, prefix, draft.tokens.T)
      places = jax.tree.map(
        lambda first, others: jnp.append(first[None], others, axis=0),
        prefix,
        more,
      )
    else:
      nodes = [prefix]
      for node, parent in enumerate(draft.tree.parents):
        nodes.append(self.longer(nodes[parent + 1], draft.tokens[:, node]))
      places = jax.tree.map(lambda *each: jnp.stack(each), *nodes)
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), places)


def adjust(
  rules: Rules, automata: Automata | None, prefix: Prefix, logits: jax.Array
) -> jax.Array:
  """Applies a row's rules to the logits float[V] that follow one prefix."""
  size, length = logits.shape[-1], prefix.length
  logits = logits.astype(jnp.float32)
  place = jnp.arange(prefix.tokens.shape[0])
  # Past the prefix the id is V, which is out of range, so scatters drop it.
  ids = jnp.where(place < length, prefix.tokens, size)
  if rules.bias is not None:
    logits += rules.bias
  if rules.sequences is not None:
    is_here = jax.vmap(_ends_with, (None, 0))(prefix, rules.sequences[:, :-1])
    last = jnp.where(is_here, rules.sequences[:, -1], size)
    logits = logits.at[last].add(rules.sequence_bias, mode='drop')
  if rules.repetition_penalty is not None:
    penalty = rules.repetition_penalty
    scores = logits.at[ids].get(mode='fill', fill_value=0.0)
    scores = jnp.where(scores < 0, scores * penalty, scores / penalty)
    logits = logits.at[ids].set(scores, mode='drop')
  presence, frequency = rules.presence_penalty, rules.frequency_penalty
  if presence is not None or frequency is not None:
    produced = jnp.where(place >= rules.begin, ids, size)
    counts = jnp.zeros_like(logits).at[produced].add(1.0, mode='drop')
    if presence is not None:
      logits -= presence * (counts > 0)
    if frequency is not None:
      logits -= frequency * counts
  for forbidden in _forbidden(rules, prefix):
    nothing = jnp.where(forbidden < 0, size, forbidden)
    logits = logits.at[nothing].set(-jnp.inf, mode='drop')
  end = rules.forced_end, rules.end - 1
  for forced, only_at in ((rules.forced_begin, 1), end):
    if forced is not None:
      is_here = (length == only_at) & (forced >= 0)
      alone = jnp.where(jnp.arange(size) == forced, 0.0, -jnp.inf)
      logits = jnp.where(is_here, alone, logits)
  if automata is not None and prefix.state is not None:
    allowed = automata.allowed(prefix.state, size)
    logits = jnp.where(allowed, logits, -jnp.inf)
  return logits


def _forbidden(rules: Rules, prefix: Prefix) -> list[jax.Array]:
  """Returns arrays of ids that must not come next, padded with -1."""
  forbidden, length = [], prefix.length
  if rules.no_repeat_ngram_size is not None:
    forbidden.append(
      _continued(prefix.tokens, length, prefix, rules.no_repeat_ngram_size)
    )
  if rules.encoder_no_repeat_ngram_size is not None:
    source = rules.inputs
    size = rules.encoder_no_repeat_ngram_size
    forbidden.append(_continued(source, source.shape[0], prefix, size))
  if rules.begin_suppress is not None:
    forbidden.append(jnp.where(length == rules.begin, rules.begin_suppress, -1))
  return forbidden


def _ends_with(prefix: Prefix, ids: jax.Array) -> jax.Array:
  """Returns whether a prefix ends with ids int32[L], padded in front by -1."""
  count = ids.shape[0]
  place = prefix.length - count + jnp.arange(count)
  same = prefix.tokens[jnp.maximum(place, 0)] == ids
  return jnp.all((ids < 0) | (same & (place >= 0)))


def _continued(
  source: jax.Array, length: Any, prefix: Prefix, size: Any
) -> jax.Array:
  """Returns the ids that would complete an n-gram of `source`, int32[W].

  It has an entry for each position of `source`; -1 where there is no such id.

  Args:
    source: int32[W], the text with the n-grams.
    length: int32[], number of tokens in `source`; the rest is ignored.
    prefix: the prefix whose last tokens are the beginning of the n-gram.
    size: int32[], tokens of an n-gram; 0 is off.
  """
  place = jnp.arange(source.shape[0])

  def compare(back, same):
    before = prefix.tokens[jnp.maximum(prefix.length - back, 0)]
    return same & (jnp.roll(source, back) == before) & (place >= back)

  is_on = (size > 0) & (prefix.length + 1 >= size)
  # An n-gram longer than the text cannot repeat: no work is done for it.
  end = jnp.where(is_on, size, 0)
  same = lax.fori_loop(1, end, compare, (place < length) & is_on)
  return jnp.where(same, source, -1)
