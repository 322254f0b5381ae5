"""A training run: from a file of pairs to a checkpoint."""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import files
from specdec_jax.checkpoints import load, t5x
from specdec_jax.checkpoints.fingerprint import fingerprint
from specdec_jax.checks import memory
from specdec_jax.drafters import heads
from specdec_jax.drafters.heads import Heads
from specdec_jax.engine import compilation_cache
from specdec_jax.models import sizes
from specdec_jax.models.base import LanguageModel, Params, reads_encoder
from specdec_jax.models.t5 import T5
from specdec_jax.text import metrics
from specdec_jax.training import bleu, resizing, slicing
from specdec_jax.training.config import FromTarget, TrainRun
from specdec_jax.training.data import PackedBatches
from specdec_jax.training.distill import Distillation
from specdec_jax.training.head_loss import HeadDistillation
from specdec_jax.training.outputs import digest, generate_outputs
from specdec_jax.training.pairs import TokenPairs
from specdec_jax.training.read import pairs_of, tokenizer_of
from specdec_jax.training.settings import claim
from specdec_jax.training.trainer import CrossEntropy, Trainer

MODEL_FILE = 'model.msgpack'
_STATES = 'train_states'
OUTPUTS = 'outputs'
_RANDOM = 'random'
# Held-out sources are decoded greedily, for the agreement of argmaxes, and
# sampled, for the acceptance rate at temperature 1.
_EVAL_TEMPERATURES = (0.0, 1.0)


def train(
  run: TrainRun,
  beside: Mapping[str, Callable[[], str]] | None = None,
  log: Callable[[str], None] | None = None,
) -> Params | None:
  """Trains; if an earlier run in the same folder was killed, it is resumed.

  Args:
    run: the run.
    beside: more files to write to the folder: name -> function that returns its
      text.
    log: gets lines of progress; None is standard error.

  Returns:
    The parameters, which are also in `model_dir`; None if only outputs were
    asked for.

  Raises:
    ValueError: data, checkpoint or vocabulary do not fit (raised before
      anything is compiled); or the folder holds a run with other settings.
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
      params = _sliced(learning, objective.target_params, run.model)
  else:
    described = dataclasses.asdict(learning)
    objective = CrossEntropy(run.model, **described)
  tokenizer = tokenizer_of(run)
  pairs, held_out = pairs_of(run, tokenizer)
  files.make_folder(run.model_dir)
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
      own = PackedBatches(pairs, run.packing).examples()
      made = TokenPairs.joined([made, own])
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
  step, dtype = int(state.step), jnp.dtype(run.export_dtype)
  if isinstance(run.model, Heads):
    target = fingerprint(objective.target_params)
    heads.save(path, params, target, step, dtype)
  else:
    about = None
    if reads_encoder(run.model):
      about = {'target': fingerprint(objective.target_params)}
    t5x.save_t5x(path, params, step, dtype, about)
  say(f'{path}: parameters after {int(state.step)} steps')
  return params


def _to_stderr(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def _first_params(run: TrainRun) -> tuple[Params, str]:
  """Parameters to begin with, and a text that says where they come from."""
  key = jax.random.key(run.training.seed)
  if run.init_checkpoint_path is None:
    # Room for the parameters and their gradients.
    config, what = getattr(run.model, 'config', None), 'The model to train'
    sizes.check_params(config, 2 * 4, memory.free_bytes, what)
    return run.model.init(key), _RANDOM
  if run.init_model is None:
    return _load_for(run.model, run.init_checkpoint_path)
  params, found = _load_for(run.init_model, run.init_checkpoint_path)
  before, after = _t5('init_model', run.init_model), _t5('model', run.model)
  return resizing.resized(params, before.config, after.config), found


def _load_for(model: Any, path: str) -> tuple[Params, str]:
  params = load(path, model, dtype=jnp.float32)
  return params, digest(params)


def _sliced(learning: FromTarget, target_params: Params, model: Any) -> Params:
  """The first parameters of a drafter that is a slice of its target."""
  target, draft = _t5('slice_target', learning.target), _t5('model', model)
  return slicing.sliced(
    target_params, target.config, draft.config, learning.slice_layers
  )


def _t5(option: str, network: Any) -> T5:
  if not isinstance(network, T5):
    raise ValueError(
      f'{option}: only a T5 is cut out of, or begins as, another T5; got'
      f' {type(network).__name__}. Leave slice_target False and init_model None'
      ' to begin at random, or with a checkpoint of the same sizes.'
    )
  return network


def _distillation(
  model: LanguageModel | Heads, learning: FromTarget
) -> tuple[Distillation | HeadDistillation, dict[str, Any]]:
  """The objective, and the settings that must be the same in a resumed run."""
  if (
    not isinstance(model, Heads)
    and learning.target.vocab_size != model.vocab_size
  ):
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
    'slice_layers': learning.slice_layers,
    'with_references': learning.with_references,
  }
  params = jax.tree.map(jnp.asarray, params)
  common = model, learning.target, params, learning.weights
  if isinstance(model, Heads):
    described['head_decay'] = learning.head_decay
    return HeadDistillation(*common, learning.head_decay), described
  return Distillation(*common), described


def _outputs(run, learning, target_params, pairs, held_out, say):
  """The target's outputs for the training and for the held-out sources."""
  folder = learning.outputs_folder or os.path.join(run.model_dir, OUTPUTS)
  files.make_folder(folder)
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
  if missing := metrics.lack(metrics.bleu):
    say(f'No BLEU at evaluations: {missing}')
    return None
  return bleu.Bleu(run.model, tokenizer, held_out, run.bleu_examples)
