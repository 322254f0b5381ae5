"""A training run: from a file of pairs to a checkpoint."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import compilation_cache, files
from specdec_jax.checkpoints import load
from specdec_jax.models.base import LanguageModel, Params
from specdec_jax.models.t5 import T5
from specdec_jax.tokenizer import Tokenizer, train_tokenizer
from specdec_jax.training import bleu, data, slicing, text, trainer
from specdec_jax.training.data import PackedBatches, PackingConfig, TokenPairs
from specdec_jax.training.distill import Distillation
from specdec_jax.training.losses import DistillationWeights
from specdec_jax.training.outputs import (
  OutputsConfig,
  digest,
  generate_outputs,
)
from specdec_jax.training.settings import claim
from specdec_jax.training.trainer import CrossEntropy, TrainConfig, Trainer

MODEL_FILE = 'model.msgpack'
_STATES = 'train_states'
_OUTPUTS = 'outputs'
_RANDOM = 'random'
# What is held out is decoded both ways: agreement is about the one, the
# acceptance rate at temperature 1 about the other.
_EVAL_TEMPERATURES = (0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Likelihood:
  """Learning from the data's own targets; see `losses.cross_entropy`."""

  label_smoothing: float = 0.0
  z_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class FromTarget:
  """Learning from another model: distillation.

  Attributes:
    target: the model to follow.
    checkpoint_path: its parameters, a single-file T5X checkpoint.
    weights: of the loss's terms.
    slice_target: begin with a slice of the target, where there is no
      checkpoint to begin with; see `slicing.sliced`.
    outputs: how the target's own outputs for the data's sources are made;
      None takes the data's targets as they are.
    with_references: train on the data's own targets as well as on the outputs:
      more to learn from where there is no time for many outputs.
    num_eval_outputs: how many are made of the held-out sources.
    outputs_folder: where outputs are kept, or found; None is a folder in
      `TrainRun.model_dir`.
    only_outputs: end when the outputs exist.
  """

  target: LanguageModel
  checkpoint_path: str
  weights: DistillationWeights = DistillationWeights()
  slice_target: bool = False
  outputs: OutputsConfig | None = OutputsConfig()
  with_references: bool = False
  num_eval_outputs: int = 512
  outputs_folder: str | None = None
  only_outputs: bool = False


@dataclasses.dataclass(frozen=True)
class TrainRun:
  """One run of training.

  Data is a UTF-8 file (`.gz` or not) of source<TAB>target lines, or for a
  decoder-only model of lines of text; a `.npz` file as `TokenPairs.save` writes
  it; or a seqio task.

  Attributes:
    model: what is trained, such as a T5 or a GPT.
    model_dir: gets the parameters (model.msgpack, a T5X checkpoint), the
      states that a killed run goes on from, and what else belongs to the run.
    train_file: data, unless there is a task.
    eval_file: held-out data; None goes without.
    task: name of a seqio task with the splits 'train' and 'validation'.
    task_module: module to import first, which registers the task.
    vocab_path: sentencepiece model. Where there is none yet, it is trained on
      both sides of `train_file`. Only text needs one.
    init_checkpoint_path: parameters to begin with, a single-file T5X
      checkpoint; None begins with random ones.
    packing: how pairs become batches.
    training: length, optimiser, evaluation.
    learning: from what.
    export_dtype: of the parameters in model.msgpack.
    bleu_examples: held-out sources that are decoded at each evaluation, for
      BLEU; 0 is none.

  Raises:
    ValueError: a value is outside its range.
  """

  model: LanguageModel
  model_dir: str
  train_file: str | None = None
  eval_file: str | None = None
  task: str | None = None
  task_module: str | None = None
  vocab_path: str | None = None
  init_checkpoint_path: str | None = None
  packing: PackingConfig = PackingConfig()
  training: TrainConfig = TrainConfig()
  learning: Likelihood | FromTarget = Likelihood()
  export_dtype: str = 'float32'
  bleu_examples: int = 0

  def __post_init__(self):
    if not self.model_dir or not isinstance(self.model_dir, str):
      raise ValueError(
        'TrainRun.model_dir: expected a folder to write to, got'
        f' {self.model_dir!r}.'
      )
    if (self.train_file is None) == (self.task is None):
      raise ValueError(
        'TrainRun: expected either a train_file or a seqio task, got'
        f' train_file={self.train_file!r} and task={self.task!r}.'
      )
    for name in ('train_file', 'eval_file', 'init_checkpoint_path'):
      path = getattr(self, name)
      if path is not None and not os.path.isfile(path):
        raise ValueError(f'TrainRun.{name}: there is no file {path!r}.')
    if self.export_dtype not in ('float32', 'bfloat16'):
      raise ValueError(
        "TrainRun.export_dtype: expected 'float32' or 'bfloat16', got"
        f' {self.export_dtype!r}.'
      )
    needs_vocab = any(
      path is not None and not path.endswith('.npz')
      for path in (self.train_file, self.eval_file)
    )
    if self.vocab_path is None and (needs_vocab or self.bleu_examples):
      raise ValueError(
        'TrainRun.vocab_path: text and BLEU need the path of a sentencepiece'
        ' model, which is trained there if it does not exist; only .npz files'
        ' and tasks go without.'
      )


def train(
  run: TrainRun,
  beside: Mapping[str, Callable[[], str]] | None = None,
  log: Callable[[str], None] | None = None,
) -> Params | None:
  """Trains, from where an earlier try in the same folder was killed.

  Args:
    run: what.
    beside: more files for the folder: name -> function of its text.
    log: gets lines of progress; by default standard error.

  Returns:
    The parameters, which are also in `model_dir`; None where only outputs were
    asked for.

  Raises:
    ValueError: data, checkpoint or vocabulary do not fit, before anything is
      compiled; or the folder holds a run of other settings.
    FloatingPointError: the loss is no longer finite.
  """
  say = log or _to_stderr
  compilation_cache.enable()
  learning = run.learning
  params, start = _first_params(run)
  objective: Any  # an Objective
  if isinstance(learning, FromTarget):
    objective, described = _distillation(run.model, learning)
    if start == _RANDOM and learning.slice_target:
      params = _sliced(learning.target, objective.target_params, run.model)
  else:
    described = dataclasses.asdict(learning)
    objective = CrossEntropy(run.model, **described)
  tokenizer = _tokenizer(run)
  pairs, held_out = _pairs(run, tokenizer)
  os.makedirs(run.model_dir, exist_ok=True)
  for name, content in (beside or {}).items():
    path = os.path.join(run.model_dir, name)
    files.write_atomically(path, content().encode())
  measure = _measure(run, tokenizer, held_out, say)
  packing = run.packing
  if isinstance(learning, FromTarget) and learning.outputs is not None:
    made, held_out = _outputs(
      run, learning, objective.target_params, pairs, held_out, say
    )
    if learning.with_references:
      made = made.joined(PackedBatches(pairs, run.packing).examples())
    pairs = made
    # An output is one example: its source was joined before it was decoded.
    packing = dataclasses.replace(packing, weights=(1.0,))
    if learning.only_outputs:
      return None
  claim(
    os.path.join(run.model_dir, 'settings.json'),
    {
      'model': repr(run.model),
      'init': start,
      'learning': described,
      'optimizer': dataclasses.asdict(run.training.optimizer),
      'ema_decay': run.training.ema_decay,
      'seed': run.training.seed,
      'packing': dataclasses.asdict(packing),
      'train_data': digest(dataclasses.astuple(pairs)),
    },
  )
  batches = PackedBatches(pairs, packing)
  valid = None
  if held_out is not None:
    valid = PackedBatches(held_out, packing, keep_all=True)
  say(
    f'{len(pairs)} pairs, {batches.num_dropped} of them too long or empty;'
    f' {sum(x.size for x in jax.tree.leaves(params))} parameters; compiling'
  )
  loop = Trainer(objective, run.training, batches, valid, log, measure)
  state = loop.train(params, os.path.join(run.model_dir, _STATES))
  params = loop.export_params(state)
  path = os.path.join(run.model_dir, MODEL_FILE)
  trainer.export(path, params, int(state.step), jnp.dtype(run.export_dtype))
  say(f'{path}: parameters after {int(state.step)} steps')
  return params


def _to_stderr(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def _first_params(run: TrainRun) -> tuple[Params, str]:
  """Parameters to begin with, and where they are from."""
  key = jax.random.key(run.training.seed)
  if run.init_checkpoint_path is None:
    return run.model.init(key), _RANDOM
  return _load_for(run.model, run.init_checkpoint_path)


def _load_for(model: Any, path: str) -> tuple[Params, str]:
  params = load(path, model, dtype=jnp.float32)
  return params, digest(params)


def _sliced(target: Any, target_params: Params, model: Any) -> Params:
  """The first parameters of a drafter that is a slice of its target."""
  for network in (target, model):
    if not isinstance(network, T5):
      raise ValueError(
        'slice_target cuts a T5 out of a T5, got'
        f' {type(network).__name__}; set it to False to begin at random.'
      )
  return slicing.sliced(target_params, target.config, model.config)


def _distillation(
  model: LanguageModel, learning: FromTarget
) -> tuple[Distillation, dict[str, Any]]:
  """What is minimised, and what is to be the same when a run goes on."""
  if learning.target.vocab_size != model.vocab_size:
    raise ValueError(
      f'The target has a vocabulary of {learning.target.vocab_size}, the model'
      f' to train one of {model.vocab_size}; both must share one.'
    )
  params, found = _load_for(learning.target, learning.checkpoint_path)
  described = {
    'target': repr(learning.target),
    'target_params': found,
    'weights': dataclasses.asdict(learning.weights),
    'slice_target': learning.slice_target,
    'with_references': learning.with_references,
  }
  params = jax.tree.map(jnp.asarray, params)
  return Distillation(
    model, learning.target, params, learning.weights
  ), described


def _tokenizer(run: TrainRun) -> Tokenizer | None:
  if run.vocab_path is None:
    return None
  if os.path.exists(run.vocab_path):
    return Tokenizer(run.vocab_path)
  if run.train_file is None or run.train_file.endswith('.npz'):
    raise ValueError(
      f'There is no vocabulary at {run.vocab_path!r}, and none can be trained:'
      ' that takes a train_file of text.'
    )
  os.makedirs(os.path.dirname(run.vocab_path) or '.', exist_ok=True)
  if run.model.has_encoder:
    pairs = data.read_tsv(run.train_file)
    sentences = [side for pair in pairs for side in pair]
  else:
    sentences = text.read_lines(run.train_file)
  return train_tokenizer(sentences, run.vocab_path, run.model.vocab_size)


def _pairs(
  run: TrainRun, tokenizer: Tokenizer | None
) -> tuple[TokenPairs, TokenPairs | None]:
  """Training and held-out pairs."""
  if run.task is not None:
    # seqio brings TensorFlow; nothing else here needs it.
    from specdec_jax import tasks

    if run.task_module is not None:
      importlib.import_module(run.task_module)
    found = [
      TokenPairs.from_lists(*tasks.token_lists(run.task, split))
      for split in tasks.splits(run.task)
    ]
  else:
    paths = (run.train_file, run.eval_file)
    found = [_read(run, path, tokenizer) for path in paths if path is not None]
  for pairs in found:
    _check_ids(pairs, run.model.vocab_size)
  return found[0], found[1] if len(found) > 1 else None


def _read(run: TrainRun, path: str, tokenizer: Tokenizer | None) -> TokenPairs:
  if path.endswith('.npz') or tokenizer is None:
    return TokenPairs.load(path)
  if not run.model.has_encoder:
    return text.tokenise_lines(text.read_lines(path), tokenizer)
  return data.tokenise(data.read_tsv(path), tokenizer)


def _check_ids(pairs: TokenPairs, vocab_size: int) -> None:
  for side in (pairs.inputs, pairs.targets):
    if len(side) and not 0 <= side.min() <= side.max() < vocab_size:
      raise ValueError(
        f'The data has token ids from {side.min()} to {side.max()}; the model'
        f' has a vocabulary of {vocab_size}. Do they belong together?'
      )


def _outputs(run, learning, target_params, pairs, held_out, say):
  """The target's own outputs for the sources of both."""
  folder = learning.outputs_folder or os.path.join(run.model_dir, _OUTPUTS)
  os.makedirs(folder, exist_ok=True)
  for_eval = dataclasses.replace(
    learning.outputs,
    num_examples=learning.num_eval_outputs,
    max_minutes=0.0,
    temperatures=_EVAL_TEMPERATURES,
  )
  made: list[TokenPairs | None] = []
  for name, some, config in (
    ('eval', held_out, for_eval),
    ('train', pairs, learning.outputs),
  ):
    if some is None:
      made.append(None)
      continue
    sources = PackedBatches(some, run.packing).examples()
    path = os.path.join(folder, f'{name}.npz')
    made.append(
      generate_outputs(
        learning.target, target_params, sources, path, config, say
      )
    )
  return made[1], made[0]


def _measure(run, tokenizer, held_out, say):
  """A function that gives BLEU, or None."""
  if not run.bleu_examples or held_out is None:
    return None
  if not bleu.available():
    say('sacrebleu is not installed: no BLEU at evaluations')
    return None
  return bleu.Bleu(run.model, tokenizer, held_out, run.bleu_examples)
