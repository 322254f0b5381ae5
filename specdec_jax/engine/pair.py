"""Checks that a target and its drafter fit each other and into memory.

It also checks that their vocabularies fit the tokenizer, and places their
parameters on the devices.
"""

import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import partitioning
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.checks import memory
from specdec_jax.checks.fields import unexpected
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.drafters.base import Drafter
from specdec_jax.drafters.ngram_table import NGramTable, check_vocabulary
from specdec_jax.drafters.small_model import alone, small_model
from specdec_jax.drafters.translation_memory import Memory
from specdec_jax.models import causal_lm, families, sizes
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.models.integers import in_floats, is_integers
from specdec_jax.models.model import Model
from specdec_jax.models.other_ids import unfitted
from specdec_jax.models.t5gemma import T5Gemma
from specdec_jax.partitioning import Placement
from specdec_jax.text.tokenizer import Vocabulary, contradiction
from specdec_jax.text.vocabulary import SENTENCEPIECE, TOKENIZER

# The ids that a network may have beyond its tokenizer's: 100 sentinels, and
# padding to a multiple of 1,024.
_MOST_MORE_IDS = 100 + 1023
_EXAMPLES = 3
_PLAINLY = 'decode plainly (speculative=False; --mode plain)'


class PlacedPair(NamedTuple):
  """A target and its drafter on their devices, as the loops take them.

  Attributes:
    target: the target's network; on several devices, its caches are split like
      its parameters.
    drafter: the drafter, or None.
    params: the placed parameters of both; None for a missing drafter.
    fingerprints: 'target' and 'draft' -> `disk_arrays.fingerprint` of the
      parameters; that of a drafter that is not a small model is followed by
      the drafter's name.
  """

  target: LanguageModel
  drafter: Drafter | None
  params: PairParams
  fingerprints: dict[str, str]


def placed_pair(
  target: Model, drafter: Drafter | None, placement: Placement
) -> PlacedPair:
  """Reads parameters that are still on disk, and places all on the devices.

  The drafter is read first, because it is smaller, so that errors show early.

  Raises:
    ValueError: a checkpoint is broken, or cannot be split as the placement
      says; or the drafter was made for another target.
  """
  prints, of_draft = {}, placement.replicated()
  placed, draft_params = None, None
  if drafter is not None:
    read = partitioning.read_parts(drafter.params, of_draft)
    prints['draft'] = fingerprint(read)
    placed, small = drafter, alone(drafter)
    if small is None:
      # Drafters without parameters differ only in their names.
      prints['draft'] += f' {drafter.name or drafter.propose.__qualname__}'
    else:
      follows = partitioning.follow(small.network, of_draft.partition())
      placed = small_model(follows)
    draft_params = partitioning.place_parts(read, of_draft, drafter.params)
    placed = placed._replace(params=draft_params)
  read = partitioning.read_parts(target, placement)
  prints = {'target': fingerprint(read)} | prints
  if drafter is not None:
    dtype = placement.param_dtype
    _check_made_for(drafter, target, read, prints['target'], dtype)
  params = partitioning.place(read, placement, empties=target.given is None)
  memory.give_back()
  network = partitioning.follow(target.network, placement.partition())
  return PlacedPair(network, placed, PairParams(params, draft_params), prints)


def _check_made_for(
  drafter: Drafter, target: Model, read: Params, print_of: str, dtype: str
) -> None:
  """Raises ValueError if a drafter was made for another target.

  A target whose kernels are rounded to integers, at loading or on disk, also
  passes if the drafter was made for the kernels before rounding, or for the
  integers times their scales. Features and outputs are nearly the same.
  """
  models = (model.made_for for model in drafter.models if model.made_for)
  wanted = {*drafter.made_for, *models} - {print_of}
  if wanted and is_integers(dtype):
    wanted.discard(fingerprint(in_floats(read)))
  if wanted:
    if target.made_of is not None:
      made_of = target.made_of()
    else:
      floats = target.read()
      dtypes = {leaf.dtype for leaf in jax.tree.leaves(floats)}
      made_of = () if any(map(is_integers, dtypes)) else (fingerprint(floats),)
    if not made_of:
      expected = f'one with a checkpoint of floats, loaded with dtype={dtype!r}'
      raise unexpected('target', expected, f'{target.name} of {dtype}')
    wanted.difference_update(made_of)
    print_of = made_of[0]
  if wanted:
    expected = f'one that {drafter.name!r} was made for ({min(wanted)})'
    advice = 'Or train a drafter for this one (specdec distil).'
    raise unexpected('target', expected, f'{target.name} ({print_of})', advice)


class MemoryCheck:
  """Checks whether the arrays of a run fit into the free memory.

  It counts the least memory of a run. A run that is refused could not have
  worked, but a run that passes may still be too large for the device.
  """

  def __init__(
    self, target: Model, drafter: Drafter | None, placement: Placement
  ):
    """Sums up the memory of the models.

    Args:
      target: the target.
      drafter: the drafter, or None.
      placement: devices and dtype of the parameters; models of the drafter
        that were loaded with a dtype keep it.
    """
    dtype = placement.param_dtype
    drafts = drafter.models if drafter else ()
    networks = [(target.network, dtype)]
    networks += [(draft.network, draft.dtype or dtype) for draft in drafts]
    configs = [families.config_of(network) for network, _ in networks]
    self._configs = [config for config in configs if config is not None]
    self._widened = sum(sizes.widened_bytes(*network) for network in networks)
    parts = target, *jax.tree.leaves(drafter.params if drafter else ())
    self._unread = sum(_unread_bytes(part, dtype) for part in parts)
    on_one = placement.on_one_device
    self._free = memory.device_bytes if on_one else memory.all_bytes

  def mark_params_loaded(self) -> None:
    """Leaves the parameters, now on the devices, out of the checks to come."""
    self._unread = 0

  def check(
    self, batch: int, input_len: int, num_slots: int, num_tokens: int
  ) -> None:
    """Checks a run before any of its arrays is made.

    Args:
      batch: B, the number of rows.
      input_len: E, tokens of the padded input.
      num_slots: T, slots of the caches.
      num_tokens: S, tokens per row in a call with a whole draft or all beams.

    Raises:
      memory.DoesNotFitError: the run does not fit; the message has its sizes.
    """
    needed = sum(
      sizes.run_bytes(config, batch, input_len, num_slots, num_tokens)
      for config in self._configs
    )
    more = ''
    if self._unread:
      more = f', beside {memory.gib(self._unread)} of parameters'
    if self._widened:
      size = memory.gib(self._widened)
      more += f', and {size} of float32 that a CPU makes of bfloat16'
      more += " (dtype='float32' takes less)"
    memory.check_room(
      f'{batch} rows of {num_slots} slots (prompt, output and draft) and inputs'
      f' of {input_len} tokens{more}',
      needed + self._unread + self._widened,
      self._free,
      'Take a smaller batch, shorter inputs or outputs (max_decode_len; gin:'
      ' TASK_FEATURE_LENGTHS), a smaller gamma, or fewer beams.',
    )


def _unread_bytes(part: Any, dtype: str) -> int:
  """Returns the bytes that a model or array still needs on the devices."""
  if isinstance(part, jax.Array):
    return 0
  if not isinstance(part, Model):
    return np.asarray(part).nbytes
  dtype = part.dtype or dtype
  if part.given is None:
    return sizes.held_bytes(part.num_params, dtype)
  leaves = jax.tree.leaves(part.params)
  count = sum(np.size(x) for x in leaves if not isinstance(x, jax.Array))
  return sizes.held_bytes(count, dtype)


def own_vocabulary(model: Model) -> Vocabulary:
  """Returns a model's tokenizer.

  Raises:
    ValueError: the model was loaded without a tokenizer.
  """
  if model.tokenizer is None:
    expected = f'{TOKENIZER} or {SENTENCEPIECE} beside {model.name!r}'
    advice = 'Give the path of a vocabulary (tokenizer=; gin: VOCAB_PATH).'
    raise unexpected('tokenizer', expected, None, advice)
  return model.tokenizer


def fitted(target: Model, drafter: Drafter) -> Drafter:
  """Gives the output layer of a drafter as many ids as its target has.

  Two models with the same tokenizer may have output layers with different
  padding. Drafters that are not a small model are returned as they are, and so
  are those with a larger difference, which `check_pair` refuses.
  """
  small, size = alone(drafter), target.network.vocab_size
  if small is None or abs(small.network.vocab_size - size) > _MOST_MORE_IDS:
    return drafter
  return small_model(small.with_vocabulary(size))


def check_pair(
  target: Model, drafter: Drafter | None, tokenizer: Vocabulary
) -> None:
  """Raises ValueError unless target and drafter use the tokenizer's ids.

  Warns if the drafter does not see the input that the target reads, and if the
  target's folder has settings for `generate` that are not followed.
  """
  if target.unfollowed:
    warnings.warn(target.unfollowed, stacklevel=3)
  if target.network.reads_encoder:
    expected = 'a model with an encoder of its own, which only a draft may lack'
    raise unexpected('target', expected, target.name)
  _check_side('target', target, tokenizer)
  if target.network.has_encoder:
    _check_encoded(target, tokenizer)
  if drafter is None:
    return
  has_width = target.network.has_encoder and target.network.encoded_dim
  if drafter.reads_encoder and not has_width:
    expected = 'one with an encoder, which the draft reads'
    raise unexpected('target', expected, type(target.network).__name__)
  for model in drafter.models:
    _check_draft(target, model)
    _check_side('draft', model, tokenizer)
  check_tables(target, drafter, tokenizer)


def check_tables(
  target: Model, drafter: Drafter, tokenizer: Vocabulary
) -> None:
  """Raises ValueError if a drafter's table has ids that the target lacks.

  Tables are n-gram tables, which must be made for the tokenizer, and
  translation memories.
  """
  size = target.network.vocab_size
  for table in jax.tree.leaves(
    drafter.params, is_leaf=lambda x: isinstance(x, NGramTable | Memory)
  ):
    if isinstance(table, NGramTable):
      check_vocabulary('of the draft', table, tokenizer)
    elif isinstance(table, Memory):
      if (most := int(table.tokens.max())) >= size:
        raise unexpected('translation memory', f'ids below {size}', most)


def _check_side(name: str, model: Model, tokenizer: Vocabulary) -> None:
  if model.tokenizer is not None:
    if differs := contradiction(model.tokenizer, tokenizer):
      expected = f'that of {tokenizer.path!r}, which both share ({differs})'
      raise unexpected(f"{name}'s tokenizer", expected, model.tokenizer.path)
  check_vocabulary_size(name, unfitted(model.network).vocab_size, tokenizer)


def _check_draft(target: Model, draft: Model) -> None:
  made, wanted = draft.network, target.network
  size, width = wanted.vocab_size, wanted.encoded_dim
  if made.reads_encoder and made.encoded_dim != width:
    expected = f'one that reads an encoder of width {width}'
    advice = 'Distil a drafter for this target (specdec distil).'
    raise unexpected('draft', expected, made.encoded_dim, advice)
  if made.vocab_size != size:
    expected = f"the target's {size} ids"
    advice = f'If it differs in padding alone: model.with_vocabulary({size}).'
    name = f"draft's vocabulary ({draft.name or 'a model'})"
    raise unexpected(name, expected, made.vocab_size, advice)
  if made.has_encoder and not wanted.has_encoder:
    expected = 'a decoder-only model, for the target has no encoder'
    raise unexpected('draft', expected, draft.name)
  if made.has_encoder and made.pad_id != wanted.pad_id:
    expected = f"padding with id {wanted.pad_id}, as in the target's family"
    raise unexpected('draft', expected, f'id {made.pad_id}')
  if wanted.has_encoder and not made.has_encoder:
    sees = 'the drafter sees the output so far and nothing of the input'
    told = f'The draft is decoder-only and the target has an encoder: {sees}.'
    warnings.warn(f'{told} Outputs are right all the same.', stacklevel=4)


def _check_encoded(target: Model, tokenizer: Vocabulary) -> None:
  """Raises ValueError if the tokenizer seems to be another model's.

  Its end of sequence must be one of the target's stop ids, and the target's
  padding id must not be text. Only for targets with an encoder: a decoder-only
  model may have learned to end with any id.
  """
  if target.stop_ids and tokenizer.eos_id not in target.stop_ids:
    ends = ' or '.join(map(str, target.stop_ids))
    expected = f"id {ends}, the eos_token_id in the target's folder"
    raise unexpected(f'end in {tokenizer.path}', expected, tokenizer.eos_id)
  padding = target.network.pad_id
  if tokenizer.is_text(padding):
    expected = 'what the target reads as padding, no text'
    name = f'id {padding} in {tokenizer.path}'
    raise unexpected(name, expected, tokenizer.pieces[padding])


def check_vocabulary_size(name: str, size: int, tokenizer: Vocabulary) -> None:
  """Raises ValueError unless a network's vocabulary size fits a tokenizer's.

  A network may have some ids more: T5 has 128 more (100 sentinels, and
  padding), mT5 112, MADLAD-400 512; other networks are padded to a multiple of
  up to 1,024.

  Args:
    name: name of the network, for the message.
    size: the network's number of ids.
    tokenizer: its tokenizer, or that of another model.
  """
  least, most = tokenizer.least_size, tokenizer.vocab_size + _MOST_MORE_IDS
  if least <= size <= most:
    return
  pieces = tokenizer.pieces
  past = {pieces[i]: i for i in sorted(pieces) if i >= size}
  last = ''
  if 0 < len(past) < _MOST_MORE_IDS:
    last = f' (its last ones are {dict(list(past.items())[-_EXAMPLES:])})'
  size_of = f"the tokenizer's {tokenizer.vocab_size} ids{last}"
  expected = f'{size_of}, or up to {_MOST_MORE_IDS} more'
  advice = "Take the vocabulary it was trained with, or the checkpoint's sizes."
  raise unexpected(f"{name}'s vocabulary", expected, size, advice)


def check_positions(target: Model, max_input_len: int) -> None:
  """Raises ValueError if inputs may exceed an encoder's learned positions."""
  limit = target.network.most_positions
  if target.network.has_encoder and 0 < limit < max_input_len:
    expected = f'at most {limit}, the learned positions of {target.name!r}'
    advice = "Longer texts: on_too_long='truncate', or split='sentences'."
    raise unexpected('max_input_len', expected, max_input_len, advice)


def check_ends(model: Model) -> None:
  """Raises ValueError if a model's vocabulary lacks one of its stop ids."""
  if model.tokenizer is None:
    return
  size = model.tokenizer.vocab_size
  if missing := [i for i in model.stop_ids if i >= size]:
    expected = f'an id of {model.tokenizer.path!r}, which has {size}'
    advice = 'Added tokens (tokenizer_config.json, added_tokens.json) may miss.'
    field = f'eos_token_id of {model.name}'
    raise unexpected(field, expected, missing[0], advice)


def check_drafts(drafter: Drafter, adapts: bool, num_beams: int | None) -> None:
  """Raises ValueError unless a drafter supports what a call asks for.

  One step of a beam search is accepted if all beams of that step were proposed.
  A drafter that proposes one chain, or a tree for one output, proposes too few.

  Args:
    drafter: the drafter.
    adapts: whether a draft ends when the drafter is not sure enough.
    num_beams: width of a beam search, or None.
  """
  searches = num_beams is not None
  if searches and (drafter.network is None or drafter.tree is not None):
    name = drafter.name or drafter.propose.__qualname__
    expected = f'a small model for a beam search; else {_PLAINLY}'
    raise unexpected('drafter', expected, name)
  if adapts and (searches or not drafter.adapts):
    reason = f'{drafter.name!r} does not say how sure it is'
    if searches:
      reason = f'this is a beam search (num_beams = {num_beams})'
    raise unexpected('gamma', f'a number: {reason}', 'adaptive')


def first_id(
  network: LanguageModel, tokenizer: Vocabulary | None, named: Any = None
) -> int | None:
  """Returns the id that a target's texts begin with, or None.

  Args:
    network: the target's network.
    tokenizer: the vocabulary of the target; None if it is not known yet. The
      engine, which knows it, calls this function again.
    named: the `bos_token_id` in config.json of the target's folder.
  """
  if network.has_encoder and network.ends_inputs:
    return None
  by_vocabulary = isinstance(network, causal_lm.CausalLM | T5Gemma)
  if by_vocabulary and tokenizer is not None and tokenizer.says_ends:
    # Qwen's config.json names a first id that the model never reads.
    return tokenizer.bos_id
  if network.has_encoder:
    return network.start_id
  is_id = type(named) is int and 0 <= named < network.vocab_size
  if is_id and (tokenizer is not None or not by_vocabulary):
    return named
  return None if tokenizer is None else tokenizer.start_id


def check_bos(bos_id: int | None, network: LanguageModel) -> None:
  """Raises ValueError if the target's texts cannot begin with `bos_id`."""
  expected = f'None or an id below {network.vocab_size}'
  fits = type(bos_id) is int and 0 <= bos_id < network.vocab_size
  if network.has_encoder and network.ends_inputs:
    expected = f'None: the target begins with id {network.start_id} by itself'
    fits = False
  if bos_id is not None and not fits:
    raise unexpected('bos_id', expected, bos_id)


def relative_size(params: PairParams) -> float:
  """Returns the number of the drafter's weights over that of the target's.

  Only kernels count that each output token is multiplied by, so encoders do not
  count. The ratio is an estimate of c, the cost ratio.
  """

  def size(tree: Any) -> int:
    leaves = jax.tree.leaves_with_path(tree)
    named = [(jax.tree_util.keystr(path), leaf.size) for path, leaf in leaves]
    read = [(name, count) for name, count in named if "'encoder'" not in name]
    return sum(count for name, count in read if 'kernel' in name)

  return size(params.draft) / max(1, size(params.target))
