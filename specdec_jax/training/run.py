"""Trains a model from data to a checkpoint, by the settings of a run."""

import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from specdec_jax import files
from specdec_jax.checkpoints import load, t5x
from specdec_jax.checkpoints.disk_arrays import fingerprint
from specdec_jax.checks import memory
from specdec_jax.checks.fields import Bound, Checked, check_types, unexpected
from specdec_jax.drafters import heads
from specdec_jax.drafters.heads import Heads
from specdec_jax.engine import compilation_cache
from specdec_jax.engine.pair import first_id
from specdec_jax.files import same_run, shipped
from specdec_jax.models import sizes
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.models.families import config_of
from specdec_jax.text import tasks
from specdec_jax.text.tasks import FEATURES, TRAIN_SPLIT, LocalTask
from specdec_jax.text.tokenizer import PAD_ID, Tokenizer, train_tokenizer
from specdec_jax.training import data as data_lib
from specdec_jax.training import losses
from specdec_jax.training.data import PackedBatches, PackingConfig, Pairs
from specdec_jax.training.outputs import OutputsConfig, generate_outputs
from specdec_jax.training.trainer import TrainConfig, Trainer

Dtype = Literal['float32', 'bfloat16']
MODEL_FILE = 'model.msgpack'
STATES = 'train_states'  # the folder of Orbax's training states
# Fields of `TrainConfig` that must not change when a run is resumed.
_DECIDES_LEARNING = ('seed', 'learning_rate', 'warmup_steps', 'weight_decay')
# Held-out sources are decoded greedily, for the agreement of argmaxes, and
# sampled, for the acceptance rate at temperature 1.
_EVAL_TEMPERATURES = (0.0, 1.0)
_NUM_EVAL_OUTPUTS = 512
# Held-out sources are decoded in addition, for at most this share of
# `OutputsConfig.max_minutes`.
_EVAL_PART = 0.2
# The part of the host's memory that the target's features may take. It is a
# part of all memory, not of free memory, because the order of batches depends
# on whether the features fit, and a resumed run must have the same order.
_FEATURES_PART = 0.25


@dataclasses.dataclass(frozen=True)
class FromTarget(Checked):
  """The settings of distillation: learning from another model.

  Attributes:
    target: the network of the model to learn from.
    checkpoint_path: the target's parameters, a single-file T5X checkpoint.
    outputs: the settings with which the target decodes the data's sources, to
      train on these outputs; None: training uses the data's targets instead.
    with_references: whether to train on the data's targets as well as on the
      outputs, which helps if there is no time for many outputs.
    outputs_folder: folder of the outputs; None: the folder `outputs` in
      `TrainRun.model_dir`.
    begin: ids that the target's decoder reads first; without ids, the target's
      start id.
  """

  target: LanguageModel
  checkpoint_path: str
  outputs: OutputsConfig | None = OutputsConfig()
  with_references: bool = False
  outputs_folder: str | None = None
  begin: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class TrainRun:
  """The settings of one run of training.

  The data come from a UTF-8 file (`.gz` or not) of source<TAB>target lines, or
  of lines of text for a decoder-only model; from JSONL with 'inputs' and
  'targets' (`.jsonl`); or from a task.

  Attributes:
    model: the network to train, such as a T5 or a GPT. A T5 without encoder
      layers learns from a target, whose encoder it reads; `Heads` learn from a
      target, whose features they read.
    model_dir: folder that gets the parameters (model.msgpack, a T5X
      checkpoint), the states from which a killed run is resumed, and the other
      files of the run.
    train_file: training data, unless there is a task.
    eval_file: held-out data; None: nothing is evaluated.
    task: name of a seqio task with the splits 'train' and 'validation', or a
      `LocalTask` with these splits.
    task_feature_lengths: 'inputs', 'targets' -> length that a task's examples
      are cut to, their ends included; None: no limit.
    vocab_path: sentencepiece model. If it does not exist yet, it is trained on
      both sides of `train_file`. Files need a vocabulary.
    init_checkpoint_path: parameters to begin with, a single-file T5X
      checkpoint; None: random parameters.
    packing: the settings that decide how pairs are packed into batches.
    training: the settings of the training loop, such as its length and its
      learning rate.
    learning: the settings of learning from another model; None: the model
      learns from the data's targets.
    z_loss: weight of the squared log normaliser, for a model that learns from
      the data's targets; as for `losses.CrossEntropy`.
    export_dtype: dtype of the parameters in model.msgpack.

  Raises:
    ValueError: a value is outside its range.
  """

  model: LanguageModel | Heads
  model_dir: Annotated[str, Bound(1)]
  train_file: str | None = None
  eval_file: str | None = None
  task: str | LocalTask | None = None
  task_feature_lengths: Mapping[str, int] | None = None
  vocab_path: str | None = None
  init_checkpoint_path: str | None = None
  packing: PackingConfig = PackingConfig()
  training: TrainConfig = TrainConfig()
  learning: FromTarget | None = None
  z_loss: float = 0.0
  export_dtype: Dtype = 'float32'

  def __post_init__(self):
    check_types(self)
    model: Any = self.model
    target = self.target
    if isinstance(model, Heads):
      if target is None:
        expected = 'FromTarget with a T5 or GPT, whose features heads read'
        raise unexpected('learning', expected, self.learning)
      config = config_of(target)
      if config and config.shape.tokens.emb_dim != model.emb_dim:
        expected = f"the target's, {config.shape.tokens.emb_dim}"
        raise unexpected('Heads.emb_dim', expected, model.emb_dim)
    elif target is not None and target.vocab_size != model.vocab_size:
      expected = f'a vocabulary of {model.vocab_size}, as the model has'
      raise unexpected('FromTarget.target', expected, target.vocab_size)
    has_encoder = target and target.has_encoder and not target.reads_encoder
    width = target.encoded_dim if has_encoder else None
    if model.reads_encoder and width != model.encoded_dim:
      expected = f'FromTarget, an encoder of width {model.encoded_dim}'
      got = f'{type(target).__name__} of width {width}'
      raise unexpected('learning', expected, got)
    for name in ('train_file', 'eval_file', 'init_checkpoint_path'):
      path = getattr(self, name)
      if path is not None and not os.path.isfile(shipped.find(path)):
        raise ValueError(f'{name}: there is no file {path!r}.')
    has_text = self.train_file is not None or self.eval_file is not None
    if self.vocab_path is None and has_text:
      expected = 'a sentencepiece model, or a path where one is trained'
      raise unexpected('vocab_path', expected, None)

  @property
  def target(self) -> Any:
    """The network that the model learns from; None: it learns from the data."""
    return self.learning and self.learning.target

  @property
  def network(self) -> Any:
    """The network that reads the data: `model`, or for heads their target."""
    return self.target if isinstance(self.model, Heads) else self.model


def train(
  run: TrainRun,
  data: tuple[Pairs, Pairs | None] | None = None,
  begin: Callable[[Params], Params] | None = None,
  beside: Mapping[str, Callable[[], str]] | None = None,
  log: Callable[[str], None] | None = None,
  until: Callable[[Params], float] | None = None,
) -> Params:
  """Trains a model; a run that was killed is resumed from its folder.

  Args:
    run: the settings of the run.
    data: pairs to learn from and held-out pairs, instead of those that `run`
      names.
    begin: function that makes the initial parameters from the target's; None:
      they are those that `run` names, or random.
    beside: name -> function that returns a text; each text is written to a file
      of that name in the folder.
    log: function that gets lines of progress; None prints them to standard
      error.
    until: function that is called with the initial parameters when the data are
      ready, and returns the latest time at which learning ends
      (`time.monotonic()`); None: no such limit.

  Returns:
    The parameters, which are also in `model_dir`.

  Raises:
    ValueError: data, checkpoint or vocabulary do not fit (raised before
      anything is compiled); or the folder holds a run with other settings.
    FloatingPointError: the loss is no longer finite.
  """
  log = log or functools.partial(print, file=sys.stderr, flush=True)
  compilation_cache.enable()
  tokenizer = tokenizer_of(run)
  packing = run.packing
  if tokenizer is not None:
    packing = dataclasses.replace(packing, eos_id=tokenizer.eos_id)
  start_id = first_token(run.network, tokenizer)
  objective = _objective(run, start_id)
  if begin is None:
    params, init = _first_params(run)
  else:
    params, init = begin(objective.target_params), ''
  pairs, held_out = data or pairs_of(run)
  files.make_folder(run.model_dir)
  for name, content in (beside or {}).items():
    files.write_atomically(f'{run.model_dir}/{name}', content().encode())
  target, learning = '', dict[str, Any](z_loss=run.z_loss)
  if run.learning is not None:
    target = fingerprint(objective.target_params)
    # These settings are not compared, because the outputs themselves are: they
    # are part of the data.
    learning = vars(run.learning) | dict.fromkeys(('outputs', 'outputs_folder'))
    learning['checkpoint_path'] = target
    if run.learning.outputs is not None:
      given = packing, pairs, held_out
      pairs, held_out = _target_outputs(run, objective, *given, log)
      # Each output is an example of its own, because sources were concatenated
      # before they were decoded.
      packing = dataclasses.replace(packing, weights=(1.0,))
  settings: dict[str, Any] = {'init': init, 'start_id': start_id}
  settings |= {'learning': learning, 'packing': dataclasses.asdict(packing)}
  settings['train_data'] = data_lib.digest(pairs)
  _check_settings(run, settings)
  pad_id = run.network.pad_id
  batches = PackedBatches(pairs, packing, pad_id)
  stores = _stores_features(objective, batches)
  batches.regroups = not stores
  valid = None if held_out is None else PackedBatches(held_out, packing, pad_id)
  log(
    f'{len(pairs)} pairs, {batches.num_dropped} of them too long or empty;'
    f' {sum(x.size for x in jax.tree.leaves(params))} parameters; compiling'
  )
  loop = Trainer(objective, run.training, batches, valid, log, stores)
  end = math.inf if until is None else until(params)
  state = loop.train(params, os.path.join(run.model_dir, STATES), end)
  about = {'kind': heads.KIND} if isinstance(run.model, Heads) else {}
  if about or run.model.reads_encoder:
    about['target'] = target
  path, step = os.path.join(run.model_dir, MODEL_FILE), int(state.step)
  dtype = jnp.dtype(run.export_dtype)
  t5x.save_t5x(path, state.params, step, dtype, about or None)
  log(f'{path}: parameters after {step} steps')
  return state.params


def _check_settings(run: TrainRun, settings: dict[str, Any]) -> None:
  """Writes the run's settings; if the folder has some already, compares them.

  Raises:
    ValueError: the folder holds a run with other settings.
  """
  training = {name: getattr(run.training, name) for name in _DECIDES_LEARNING}
  settings |= {'model': repr(run.model), 'training': training}
  path = os.path.join(run.model_dir, 'settings.json')
  if os.path.exists(path):
    what = f'{path!r} belongs to a run with other settings'
    same_run.check(files.read_json(path), settings, what)
  else:
    files.write_json(path, settings, indent=2, sort_keys=True, default=str)


def tokenizer_of(run: TrainRun) -> Tokenizer | None:
  """Returns the vocabulary of a run; trains it if it does not exist yet.

  The result is None if the data are a seqio task, which has its own vocabulary.

  Raises:
    ValueError: the vocabulary does not exist, and there is no text to train it
      on.
  """
  if run.vocab_path is None:
    task = run.task
    return Tokenizer(task.vocab_path) if isinstance(task, LocalTask) else None
  if os.path.exists(shipped.find(run.vocab_path)):
    return Tokenizer(run.vocab_path)
  if run.train_file is None:
    expected = 'a vocabulary, or a train_file of text to train one on'
    raise unexpected('vocab_path', expected, run.vocab_path)
  os.makedirs(os.path.dirname(run.vocab_path) or '.', exist_ok=True)
  lines = files.text_lines(run.train_file)
  sentences = [side for line in lines for side in line.split('\t')]
  return train_tokenizer(sentences, run.vocab_path, run.network.vocab_size)


def first_token(
  network: LanguageModel, tokenizer: Tokenizer | None
) -> int | None:
  """Returns the id that a decoder reads first, in training as in an engine.

  The result is None if the decoder reads no id before a text's first token.
  """
  if network.has_encoder or network.reads_encoder or tokenizer is None:
    return network.start_id
  return first_id(network, tokenizer)


def pairs_of(run: TrainRun) -> tuple[Pairs, Pairs | None]:
  """Reads the training and the held-out pairs.

  Raises:
    ValueError: data cannot be read, or has ids outside the model's vocabulary.
  """
  if (run.train_file is None) == (run.task is None):
    sources = (run.train_file, run.task)
    raise unexpected('TrainRun', 'either a train_file or a task', sources)
  if run.task is not None:
    task = tasks.find_one(run.task)
    splits = tasks.training_splits(task)
    parts = [_task_pairs(run, task, split) for split in splits]
  else:
    paths = filter(None, (run.train_file, run.eval_file))
    parts = [_file_pairs(run, path) for path in paths]
  size = run.network.vocab_size
  flat = itertools.chain.from_iterable
  for ids in flat(flat(parts)):
    if len(ids) and not 0 <= min(ids) <= max(ids) < size:
      raise unexpected('Ids of the data', f'ids below {size}', [*map(int, ids)])
  return parts[0], parts[1] if len(parts) > 1 else None


def _file_pairs(run: TrainRun, path: str) -> Pairs:
  kind = tasks.kind_of(path)
  if kind != 'jsonl':
    kind = 'tsv' if run.network.has_encoder else 'txt'
  task = LocalTask(path, {TRAIN_SPLIT: path}, str(run.vocab_path), kind)
  pairs = _task_pairs(run, task, TRAIN_SPLIT)
  for number, (source, target) in enumerate(pairs, 1):
    if run.network.has_encoder and len(source) and not len(target):
      raise unexpected(f'{path!r}, example {number}', 'a target', '')
  return pairs


def _task_pairs(run: TrainRun, task: tasks.Task, split: str) -> Pairs:
  lengths = run.task_feature_lengths or {}
  tasks.check_feature_lengths(lengths, FEATURES, task.name)
  inputs, targets = tasks.token_lists(task, split)
  # The last position is for the end-of-sequence id.
  inputs, targets = (
    [ids[: lengths.get(feature, sys.maxsize) - 1] for ids in rows]
    for feature, rows in zip(FEATURES, (inputs, targets), strict=True)
  )
  if not run.network.has_encoder and not any(map(len, targets)):
    # The data are lines of text, which become targets. Each target gets a
    # placeholder as its source, which no network reads.
    inputs, targets = [[PAD_ID]] * len(inputs), inputs
  return list(zip(inputs, targets, strict=True))


def _first_params(run: TrainRun) -> tuple[Params, str]:
  """Returns the initial parameters, and the fingerprint of their checkpoint.

  Random parameters have the fingerprint ''.
  """
  model: Any = run.model
  if run.init_checkpoint_path is not None:
    params = load(run.init_checkpoint_path, model, dtype=jnp.float32)
    return params, fingerprint(params)
  # Memory must hold the parameters and their gradients.
  config, subject = config_of(model), 'The model to train'
  sizes.check_params(config, subject, 2 * 4, memory.free_bytes)
  return model.init(jax.random.key(run.training.seed)), ''


def _objective(run: TrainRun, first: int | None) -> Any:
  learning, model = run.learning, run.model
  if learning is None:
    return losses.CrossEntropy(model, first, run.z_loss)
  target, kind = learning.target, losses.Distillation
  params = load(learning.checkpoint_path, target, dtype=jnp.float32)
  if isinstance(model, Heads):
    kind = losses.HeadDistillation
  return kind(model, target, jax.tree.map(jnp.asarray, params), first)


def _stores_features(objective: Any, batches: PackedBatches) -> bool:
  """Returns whether the target's features of all batches fit into memory.

  If so, they are stored, so that they are computed only in the first epoch.
  """
  if type(objective) is not losses.Distillation:
    return False
  config = config_of(objective.target)
  width = config.shape.tokens.emb_dim if config else math.inf
  budget = _FEATURES_PART * (memory.host_bytes() or 0)
  return batches.num_places * width * 2 <= budget


def _target_outputs(run, objective, packing, pairs, held_out, log):
  """Returns training and held-out pairs of sources and the target's outputs.

  The outputs are decoded, unless an earlier run has written them.
  """
  learning = run.learning
  folder = learning.outputs_folder or os.path.join(run.model_dir, 'outputs')
  files.make_folder(folder)

  model = objective.target, objective.target_params
  ends = learning.begin or [objective.start_id], packing.eos_id

  def decoded(name, pairs, config):
    references = PackedBatches(pairs, packing).examples()
    sources = [source for source, _ in references]
    path = os.path.join(folder, f'{name}.jsonl')
    outputs = generate_outputs(*model, sources, path, config, *ends, log)
    return outputs, references

  if held_out is not None:
    for_eval = dataclasses.replace(
      learning.outputs,
      num_examples=_NUM_EVAL_OUTPUTS,
      max_minutes=_EVAL_PART * learning.outputs.max_minutes,
      temperatures=_EVAL_TEMPERATURES,
    )
    held_out, _ = decoded('eval', held_out, for_eval)
  outputs, references = decoded('train', pairs, learning.outputs)
  return outputs + references * learning.with_references, held_out
