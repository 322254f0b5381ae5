"""Log-probabilities that a model gives to known outputs, and to labels.

The model reads the outputs instead of choosing them (teacher forcing), through
the same `prefill` and `extend` as the decoding loops, so that a score is the
log-probability that decoding reports for the same tokens.

A classification gives the probability of each label, normalised over the
labels. Labels that begin with the same tokens share their computation: the
target reads all labels as one tree after an input, in one call. Before the
normalisation a label has the log-probability that `score` gives it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax import partitioning, probs
from specdec_jax.checks import fields
from specdec_jax.checks.fields import unexpected
from specdec_jax.engine.compilation_cache import few_programs
from specdec_jax.engine.padding import (
  SMALLEST_PROMPT,
  Ids,
  next_power_of_two,
  padded,
  padded_rows,
)
from specdec_jax.models.base import LanguageModel, Params, read_prompt
from specdec_jax.rules.options import NO_RULES, RowRules, ruling_of
from specdec_jax.rules.tokens import Prefix, Ruling
from specdec_jax.tree_shape import ROOT, Tree, static_tree

Rows = Sequence[Ids]  # the ids of several texts
# The likeliest ids and their log-probabilities, for each token of an output.
Top = Sequence[Sequence[tuple[int, float]]]
_SMALLEST = 16  # shorter texts are padded to this number of tokens
# The number of positions that one call reads. A single call over all positions
# would need gigabytes for the logits of a batch of long outputs.
_BLOCK = 64
MOST_NODES = 1024  # the most nodes of the tree of labels
# At most so many nodes, over all rows, have their logits in memory at once.
_NODES_AT_ONCE = 256


class Ruled(NamedTuple):
  """Rules by which an output was decoded.

  Attributes:
    rules: the rules on the output's tokens.
    before: the number of scored tokens before the output, such as a prompt's.
    max_length: the most tokens that the output could have.
    is_beam: whether a beam search found the output; then the rules adjust
      log-probabilities in place of logits.
  """

  rules: RowRules
  before: int
  max_length: int
  is_beam: bool = False


@dataclasses.dataclass(frozen=True)
class Score:
  """The log-probabilities that a model gives to one output.

  Attributes:
    log_probs: log-probability of each token, natural logarithm, temperature 1,
      nothing filtered.
    top: for each token the likeliest tokens at its position and their
      log-probabilities, the likeliest first; () if not asked for.
  """

  log_probs: tuple[float, ...]
  top: Top = ()

  @property
  def total(self) -> float:
    """Log-probability of the whole output given its input, in nats."""
    return float(sum(self.log_probs))


def score(
  network: LanguageModel,
  params: Params,
  inputs: Rows,
  targets: Rows,
  prompt: Ids = (),
  *,
  num_top: int = 0,
  ruled: Sequence[Ruled] = (),
) -> list[Score]:
  """Scores each output given its input: log prob(targets | inputs).

  Lengths are rounded up to a power of two, and the number of rows to one of a
  few sizes, so that few programs are compiled.

  Args:
    network: the network, such as `T5(config)`.
    params: the network's parameters, on the host or placed on devices.
    inputs: the ids of each input. For a model with an encoder they include the
      end of sequence; for a decoder-only model they must not be empty.
    targets: the ids of each output; an end of sequence among them is scored
      too.
    prompt: the ids that the decoder of an encoder-decoder begins with, which
      are not scored, such as the token of a language; (): the start token. A
      decoder-only model does not use it.
    num_top: how many of the likeliest tokens are returned for each position.
    ruled: the rules by which each output was decoded; () if there were none.

  Returns:
    A `Score` for each output. A log-probability is NaN where the logits are not
    a distribution.

  Raises:
    ValueError: the numbers of inputs and outputs differ, an id is outside the
      vocabulary, or a decoder-only model's input is empty.
  """
  if len(inputs) != len(targets):
    raise unexpected('targets', f'{len(inputs)}, as inputs', len(targets))
  check_ids(network, inputs=inputs, targets=targets)
  if not inputs:
    return []
  encoded, begins, rows = _rows(network, inputs, targets, prompt)
  texts, tokens = _padded(encoded, pad=network.pad_id), _padded(rows, 1)
  # `num_top` is rounded up, so that few programs are compiled.
  number = min(next_power_of_two(num_top), network.vocab_size) if num_top else 0
  is_beam, ruling = False, None
  if ruled:
    batch = len(tokens)
    each = [x.rules for x in ruled] + [NO_RULES] * (batch - len(ruled))
    firsts, most = np.ones((2, batch), np.int32)
    for row, one in enumerate(ruled):
      firsts[row] = begins[row] + 1 + one.before
      most[row] = one.max_length
    read = inputs
    if not network.has_encoder:  # its rows begin with the input
      sizes = firsts.tolist()
      read = [ids[:size] for ids, size in zip(rows, sizes, strict=False)]
    prompts = _padded(read, pad=-1)
    rules, automata = ruling_of(each, firsts, firsts + most, prompts)
    if rules is not None:
      is_beam, ruling = ruled[0].is_beam, Ruling(rules, automata)
  with few_programs(_measured):
    scores = _measured(network, number, is_beam, params, texts, tokens, ruling)
  log_probs, *top = map(partitioning.on_host, scores)
  scores = []
  for row, (begin, target) in enumerate(zip(begins, targets, strict=True)):
    places = row, slice(begin, begin + len(target))
    pairs = zip(*(x[places][:, :num_top].tolist() for x in top), strict=True)
    likeliest = [list(zip(*pair, strict=True)) for pair in pairs]
    scores.append(Score(tuple(log_probs[places].tolist()), likeliest or ()))
  return scores


def shapes(
  network: LanguageModel, inputs: Rows, targets: Rows, prompt: Ids = ()
) -> tuple[int, ...]:
  """Returns the sizes by which `score` chooses a program for these examples."""
  encoded, _, rows = _rows(network, inputs, targets, prompt)
  return padded_rows(len(inputs)), _width(encoded), _width(rows, 1)


def _rows(
  network: LanguageModel, inputs: Rows, targets: Rows, prompt: Ids
) -> tuple[Rows, list[int], list[list[int]]]:
  """Returns the encoder's ids, where scoring begins, and the decoder's ids.

  The decoder of an encoder-decoder begins with the prompt, a decoder-only model
  with the input; the targets follow. Scoring begins at the last id before the
  targets, whose logits predict the first target token.
  """
  begin = [*prompt] or [network.start_id]
  firsts = [begin if network.has_encoder else [*ids] for ids in inputs]
  rows = [[*first, *ids] for first, ids in zip(firsts, targets, strict=True)]
  encoded = inputs if network.has_encoder else [()] * len(inputs)
  return encoded, [len(first) - 1 for first in firsts], rows


def _prefixes(ruling: Ruling, rows: jax.Array) -> Prefix:
  """Returns the prefix that ends at each position of rows, int32[B, W].

  The arrays of the result have the leading dimensions [B, W].
  """
  batch, width = rows.shape
  states = None
  if ruling.rules.automaton is not None:
    first = jnp.asarray(ruling.rules.automaton)

    def step(state, at):
      place, token = at
      after = ruling.next_state(state, token)
      after = jnp.where(place >= ruling.rules.begin, after, first)
      return after, after

    _, states = lax.scan(step, first, (jnp.arange(width), rows.T))
    states = states.T
  length = jnp.broadcast_to(jnp.arange(width) + 1, (batch, width))
  repeated = jnp.broadcast_to(rows[:, None], (batch, width, width))
  return Prefix(repeated, length, states)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _measured(
  network: LanguageModel,
  num_top: int,
  is_beam: bool,
  params: Params,
  inputs: jax.Array,
  rows: jax.Array,
  ruling: Ruling | None = None,
) -> tuple[jax.Array, ...]:
  """Returns the log-probability of each id of `rows`, except the first ids.

  `rows` is int32[B, S + 1]. S is a power of two, at least `_SMALLEST`, so that
  it can be divided into blocks.

  Returns:
    float32[B, S]; with `num_top` also the likeliest ids, int32[B, S, num_top],
    and the log-probabilities of these.
  """
  batch, width = rows.shape[0], rows.shape[1] - 1
  block = min(width, _BLOCK)

  def read(cache, part):
    tokens, following, prefix = part
    features, cache = network.extend(params, cache, tokens)
    logits = network.head(params, features)
    if is_beam:
      logits = jax.nn.log_softmax(logits)
    if ruling is not None:
      logits = ruling.adjust(prefix, logits)

    def log_prob(ids):
      """Returns the log-probability of each id; NaN for invalid logits."""
      if is_beam:
        return jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
      log_probs = probs.log_prob_of(logits, ids)
      return jnp.where(probs.valid_logits(logits), log_probs, jnp.nan)

    if not num_top:
      return cache, (log_prob(following),)
    _, ids = lax.top_k(logits, num_top)
    return cache, (log_prob(following), ids, jax.vmap(log_prob, -1, -1)(ids))

  def in_blocks(leaf):
    shape = batch, width // block, block, *leaf.shape[2:]
    return jnp.moveaxis(leaf.reshape(shape), 1, 0)

  slots = -(-width // _BLOCK) * _BLOCK
  prefixes = None if ruling is None else _prefixes(ruling, rows[:, :-1])
  pairs = in_blocks(rows[:, :-1]), in_blocks(rows[:, 1:])
  parts = *pairs, jax.tree.map(in_blocks, prefixes)
  _, scores = lax.scan(read, network.prefill(params, inputs, slots), parts)
  return tuple(
    jnp.moveaxis(x, 0, 1).reshape(batch, width, *x.shape[3:]) for x in scores
  )


def _padded(rows: Rows, begin: int = 0, pad: int = 0) -> Any:
  """Pads rows of ids to an array, int32[B, begin + S]."""
  width = begin + _width(rows, begin)
  return padded(rows, padded_rows(len(rows)), width, pad)[0]


def _width(rows: Rows, begin: int = 0) -> int:
  return max(_SMALLEST, next_power_of_two(max(map(len, rows)) - begin))


def check_ids(network: LanguageModel, **named: Rows) -> None:
  """Raises ValueError for input or output ids that a network cannot read."""
  for name, rows in named.items():
    for index, ids in enumerate(rows):
      reads = name == 'inputs' and network.has_encoder
      size = network.input_vocab_size if reads else network.vocab_size
      fields.check_ids(f'{name}[{index}]', ids, size)
      if name == 'inputs' and not network.has_encoder and not len(ids):
        expected = 'a token that a model without an encoder begins with'
        raise unexpected(f'inputs[{index}]', expected, ids)


def classify(
  network: LanguageModel,
  params: Params,
  inputs: Rows,
  labels: Rows,
  prompt: Ids = (),
) -> np.ndarray:
  """Returns the probabilities of labels, float64[B, L]; each row sums to 1.

  Args:
    network: the network, such as `T5(config)`.
    params: the network's parameters, on the host or placed on devices.
    inputs: the ids of each input. For a model with an encoder they include the
      end of sequence; for a decoder-only model they must not be empty.
    labels: the ids of each label, its end of sequence included.
    prompt: the ids that the decoder of an encoder-decoder begins with; (): the
      start token.

  Raises:
    ValueError: an id is outside the vocabulary, a decoder-only model's input is
      empty, there are no labels, one occurs twice, or there are too many.
  """
  check_ids(network, inputs=inputs)
  encoded, _, prompts = _rows(network, inputs, [()] * len(inputs), prompt)
  if not labels or len({tuple(ids) for ids in labels}) < len(labels):
    raise unexpected('labels', 'one or more, each once', labels)
  trie = _trie(labels)
  number = len(trie.parents)
  step = max(1, _NODES_AT_ONCE // number)
  totals = list[np.ndarray]()
  for at in range(0, len(prompts), step):
    some = slice(at, at + step)
    texts, _ = _as_prompts(encoded[some], network.pad_id)
    read, length = _as_prompts(prompts[some])
    slots = read.shape[1] + number
    tree = static_tree(trie.parents, jnp.asarray(length - 1), slots)
    with few_programs(_log_probs):
      log_probs = _log_probs(
        network, params, texts, read, length, tree, trie.tokens, trie.edges
      )
    edges = partitioning.on_host(log_probs)[: len(prompts[some])]
    edge, label = trie.taken
    totals += [np.bincount(label, row[edge], len(labels)) for row in edges]
  logits = np.reshape(totals, (len(prompts), len(labels)))
  weights = np.exp(logits - logits.max(axis=1, keepdims=True))
  return weights / weights.sum(axis=1, keepdims=True)


class _Trie(NamedTuple):
  """A trie of labels.

  Its N nodes are the proper prefixes of the labels. Its E edges are the tokens
  that follow a node in a label.

  Attributes:
    parents: the parent of each node; node 0 is the root.
    tokens: int32[N], the last token of each node.
    edges: int32[2, E], the node that each edge begins at, and its token.
    taken: int[2, T], pairs of an edge and a label whose path has that edge.
  """

  parents: list[int]
  tokens: np.ndarray
  edges: np.ndarray
  taken: np.ndarray


def _trie(labels: Rows) -> _Trie:
  nodes, edges = {(ROOT, 0): 0}, dict[tuple[int, int], int]()
  taken: list[tuple[int, int]] = []
  for label, ids in enumerate(labels):
    node = 0
    for place, token in enumerate(ids):
      step = node, int(token)
      taken.append((edges.setdefault(step, len(edges)), label))
      if place + 1 < len(ids):
        node = nodes.setdefault(step, len(nodes))
    # A large tree is refused before arrays are made.
    if len(nodes) > MOST_NODES:
      advice = 'Give them as choices of generate.'
      expected = f'labels with at most {MOST_NODES} different beginnings'
      raise unexpected('labels', expected, f'{len(labels)} labels', advice)
  # Sizes are rounded up, so that most sets of labels share a program.
  size, steps = map(next_power_of_two, (len(nodes), len(edges)))
  parents = [*nodes, *[(0, 0)] * (size - len(nodes))]
  pairs = [*edges, *[(0, 0)] * (steps - len(edges))]
  nodes_of, tokens = zip(*parents, strict=True)
  arrays = np.array(tokens, np.int32), np.array(pairs, np.int32).T
  return _Trie([*nodes_of], *arrays, np.transpose(taken))


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(
  network: LanguageModel,
  params: Params,
  inputs: jax.Array,
  prompt: jax.Array,
  length: jax.Array,
  tree: Tree,
  tokens: jax.Array,
  edges: jax.Array,
) -> jax.Array:
  """Returns each edge's log-probability after each input, float32[B, E].

  It is NaN where the logits are not a distribution.
  """
  slots = tree.slot_positions.shape[1]
  _, cache = read_prompt(network, params, inputs, slots, prompt, slots)
  cache = network.rewind(cache, length - 1)
  last = jnp.take_along_axis(prompt, length[:, None] - 1, axis=1)
  below = jnp.broadcast_to(tokens[1:], (len(prompt), len(tokens) - 1))
  fed = jnp.append(last, below, axis=1)
  features, _ = network.extend(params, cache, fed, tree)
  size = min(features.shape[1], _NODES_AT_ONCE)

  def add_block(log_probs, block):
    """Sets the log-probabilities of the edges that begin in a block of nodes.

    A block has the features of `size` nodes, float[B, size, M].
    """
    number, features = block
    logits = network.head(params, features).astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    total = jnp.where(probs.valid_logits(logits), total, jnp.nan)
    is_here, node = edges[0] // size == number, edges[0] % size
    log_prob = logits[:, node, edges[1]] - total[:, node]
    return jnp.where(is_here, log_prob, log_probs), None

  blocks = features.reshape(len(prompt), -1, size, features.shape[-1])
  blocks = jnp.moveaxis(blocks, 1, 0)
  nothing = jnp.zeros((len(prompt), edges.shape[1]), jnp.float32)
  numbers = jnp.arange(len(blocks))
  return lax.scan(add_block, nothing, (numbers, blocks))[0]


def _as_prompts(ids: Rows, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """Returns rows of ids, padded to a prompt's width, and their lengths."""
  width = next_power_of_two(max(SMALLEST_PROMPT, *map(len, ids)))
  return padded(ids, padded_rows(len(ids)), width, pad)
