"""Loads a model from a path, or by its id on the Hugging Face hub."""

import dataclasses
import os
import pathlib
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.checkpoints.config_json import FolderFacts
from specdec_jax.checkpoints.load import (
  TARGET,
  check_network,
  is_huggingface,
  locate,
  open_checkpoint,
)
from specdec_jax.checkpoints.t5x import infer_config
from specdec_jax.checks.fields import check_choice, check_type, unexpected
from specdec_jax.drafters import ngram_table
from specdec_jax.engine.pair import check_ends, check_vocabulary_size, first_id
from specdec_jax.files import shipped
from specdec_jax.files.locations import Location
from specdec_jax.models import integers
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.families import Network, network_of
from specdec_jax.models.integers import INT8, is_integers
from specdec_jax.models.layers import PARAM_DTYPES
from specdec_jax.models.model import Model
from specdec_jax.text.tokenizer import Tokenizer, Vocabulary
from specdec_jax.text.vocabulary import is_vocabulary

Path = str | os.PathLike[str]
# A drafter's folder has its shortlist in this file; the shortlist of a file
# draft.msgpack is draft.shortlist.npz.
SHORTLIST = 'shortlist.npz'


def load(
  path: Path | None,
  network: LanguageModel | None = None,
  *,
  tokenizer: Vocabulary | Path | None = None,
  dtype: str | None = None,
  adapter: Path | None = None,
  shortlist: Path | Sequence[int] | None = None,
  revision: str | None = None,
) -> Model:
  """Loads a model: a network, its parameters, and its vocabulary.

  A Hugging Face folder, or an id on the hub, describes the network and has the
  vocabulary. For other checkpoints, pass the network here, and the tokenizer
  here or to the engine:

      load('google/flan-t5-xl', dtype='bfloat16')
      load('t5x/checkpoint_1000000', T5(T5Config(...)), tokenizer='vocab.model')

  The demo pair, English to German, is shipped: 'demo' and 'demo-draft'.

  Here only the names and shapes of the arrays are read and checked. An engine
  reads the values later, directly onto its devices.

  Args:
    path: path of a checkpoint, of any kind that `checkpoints.load` supports.
      None raises an error that asks for the drafter's path, because only that
      path may be missing in a run file.
    network: the network, such as `T5(config)`, which must fit the checkpoint;
      required unless the checkpoint is a Hugging Face folder.
    tokenizer: the tokenizer, or the path of a vocabulary; None: the vocabulary
      in the folder, if there is one.
    dtype: dtype of parameters and computation, 'float32' or 'bfloat16'. None:
      the computation has the dtype of `network` (float32 without it), and the
      parameters that of the engine's placement. 'int8' and 'int4' quantise the
      kernels while they are read, see `models.integers`; the computation is
      then in bfloat16, on a CPU in float32.
    adapter: folder of a LoRA adapter in PEFT's format, for a Hugging Face
      model; the adapter is merged into the parameters while they are read.
    shortlist: the only tokens that a drafter may propose, given as ids, as the
      path of a file of texts like the outputs, one per line, or as the path of
      a table that `specdec train` fitted to such texts
      (gin/runs/fit_ngram.gin). Ids that end an output are added. None: the file
      shortlist.npz in a Hugging Face folder, which `specdec distil` writes, or
      NAME.shortlist.npz beside NAME.msgpack, if there is one.
    revision: branch, tag or commit on the Hugging Face hub, as an alternative
      to a path ID@REVISION.

  Raises:
    ValueError: the checkpoint is missing, of an unknown kind, or does not fit
      `network`; it does not describe its network and none was given; its
      vocabulary cannot be read; or the shortlist cannot be used.

  Examples:
    >>> sd.load('demo')
    Model(T5, 'demo/target.msgpack')
  """
  if dtype is not None:
    check_choice('dtype', dtype, PARAM_DTYPES)
  check_type('adapter', adapter, str | os.PathLike | None)
  if path is None:
    expected = 'its path (--draft, in gin DRAFT_CHECKPOINT_PATH)'
    advice = 'Or decode without a drafter: --mode plain.'
    raise unexpected('checkpoint of the drafter', expected, None, advice)
  name, path = os.fspath(path), shipped.model(path)
  if path != name:
    network = network or _demo_network(path)
    tokenizer = tokenizer or 'demo/vocab.model'
    # The target's kernels have eight bits in the file, but not in memory.
    dtype = dtype or ('float32' if name == 'demo' else None)
  check_network(network, dtype)
  location = locate(path, revision)
  if network is None and not is_huggingface(location):
    expected = 'network=T5(T5Config(...)), or another, as it says no sizes'
    advice = 'In gin: TARGET or DRAFT; gin/models has the published sizes.'
    raise unexpected(path, expected, None, advice)
  opened = open_checkpoint(location, network, adapter=adapter)
  facts = opened.facts
  named = facts and facts.described.get('bos_token_id')
  if network is None or (dtype is not None and isinstance(network, Network)):
    sized: Any = facts if network is None else network
    computes_in = integers.computes_in() if is_integers(dtype) else dtype
    computes_in = computes_in or 'float32'
    network = network_of(dataclasses.replace(sized.config, dtype=computes_in))
  tokenizer = _vocabulary(tokenizer, facts, location, network)
  model = Model(
    network,
    None,
    tokenizer,
    name=path + (f'@{revision}' if revision else ''),
    dtype=INT8 if opened.is_rounded and dtype is None else dtype,
    bos_id=first_id(network, tokenizer, named),
    stop_ids=facts.ids.eos if facts else (),
    made_for=opened.about.get(TARGET, ''),
    made_of=opened.made_of,
    rules=facts.rules if facts else {},
    unfollowed=facts.unfollowed if facts else '',
    reader=opened.read,
  )
  check_ends(model)
  if shortlist is None:
    beside = f'{os.path.splitext(location.path)[0]}.{SHORTLIST}'
    shortlist = location.child(SHORTLIST).path if facts else beside
    if not os.path.lexists(shortlist):
      return model
  return model.with_shortlist(_ids(shortlist, tokenizer, model.stop_ids))


def _demo_network(path: str) -> LanguageModel:
  """Returns the network of a demo checkpoint, inferred from its arrays."""
  arrays = open_checkpoint(path).arrays
  shapes = {name: array.shape for name, array in arrays.items()}
  return network_of(infer_config(shapes, path))


def _ids(
  shortlist: Path | Sequence[int],
  tokenizer: Vocabulary | None,
  ends: Sequence[int],
) -> list[int]:
  """Returns the sorted ids of a shortlist and of ends of outputs."""
  check_type('shortlist', shortlist, str | os.PathLike | Sequence[int])
  listed: Iterable[int]
  if not isinstance(shortlist, str | os.PathLike):
    listed = shortlist
  else:
    path = shipped.find(shortlist)
    files.check_regular(path)
    if path.endswith('.npz') or zipfile.is_zipfile(path):
      table = ngram_table.load(path, tokenizer)
      listed = table.ids[: table.starts[1]].tolist()
    elif tokenizer is None:
      expected = 'a table or ids, for the drafter has no vocabulary beside it'
      raise unexpected('shortlist', expected, path, 'Or give tokenizer=.')
    else:
      rows = tokenizer.encode_batch([*files.text_lines(path)])
      listed = {token for ids in rows for token in ids}
  if tokenizer is not None:
    ends = [*ends, tokenizer.eos_id]
  if not {*listed} - {*ends}:
    expected = 'ids, or texts with tokens that a drafter could propose'
    raise unexpected('shortlist', expected, shortlist)
  return sorted({*listed, *ends})


def _vocabulary(
  tokenizer: Vocabulary | Path | None,
  facts: FolderFacts | None,
  location: Location,
  network: LanguageModel,
) -> Vocabulary | None:
  """Returns the given vocabulary, or that in the model's folder, if any.

  Raises:
    ValueError: the vocabulary cannot be read, or its size does not fit the
      network.
  """
  if tokenizer is None:
    if not facts or not is_vocabulary(pathlib.Path(location.path)):
      return None
    tokenizer = location.path
  if not isinstance(tokenizer, Vocabulary):
    tokenizer = Tokenizer(tokenizer)
  try:
    check_vocabulary_size('model', network.vocab_size, tokenizer)
  except ValueError as error:
    raise ValueError(f'{tokenizer.path!r}: {error}') from error
  return tokenizer.for_network(network.vocab_size)
