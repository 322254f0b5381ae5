"""The training loop, with its learning rate, evaluations and saved states."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax.checks.fields import Checked
from specdec_jax.models.base import Params
from specdec_jax.training.data import Batch, PackedBatches
from specdec_jax.training.losses import Objective, Sums
from specdec_jax.types import Above0, Amount, Count, Positive

_STATES = 2  # the number of saved states, the newest ones, that stay on disk
# AdamW updates parameters with these names, because Muon's update is for
# matrices that map activations to activations.
_NOT_MUON = 'token_embedder position_embedder logits_dense relpos_bias'.split()


@dataclasses.dataclass(frozen=True)
class TrainConfig(Checked):
  """The settings of a run of the training loop.

  Attributes:
    steps: number of steps of the run, in which the learning rate falls to zero.
    max_minutes: if > 0, the run also ends after this training time, summed over
      all resumes. The learning rate then follows the steps or the time,
      whichever is further on, so that it ends at zero on a machine of any
      speed.
    eval_every, log_every: steps between evaluations, and between log lines.
    checkpoint_minutes: time between saved states; 0 saves every step. The last
      state is always saved.
    seed: seed of initialisation and dropout.
    learning_rate: the largest learning rate, reached after `warmup_steps`; a
      cosine goes from there to zero over the run.
    warmup_steps: steps in which the learning rate rises.
    weight_decay: weight of the parameters' decay, which is decoupled from the
      gradient, as in AdamW.
  """

  steps: Positive = 10_000
  max_minutes: Amount = 0.0
  eval_every: Positive = 500
  log_every: Positive = 50
  checkpoint_minutes: Amount = 10.0
  seed: int = 0
  learning_rate: Above0 = 2e-3
  warmup_steps: Count = 200
  weight_decay: float = 0.01


def learning_rate(config: TrainConfig, step: int, progress: float) -> float:
  """Returns the learning rate of a step.

  Args:
    config: the settings.
    step: index of the step, from 0.
    progress: the share of the run that is over, from 0 to 1.
  """
  warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
  curve = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
  return config.learning_rate * warm * curve


def make_optimizer(weight_decay: float) -> optax.GradientTransformation:
  """Returns the optimiser, with learning rate 1.

  Kernels get Muon's update (orthogonalised momentum, Jordan et al. 2024);
  embeddings, logits and norms get AdamW's. Each step multiplies its update by
  `learning_rate`, so that the rate can depend on the time without recompiling.
  """

  def dimensions(path, leaf):
    is_adams = jnp.ndim(leaf) != 2 or {key.key for key in path} & {*_NOT_MUON}
    return None if is_adams else optax.contrib.MuonDimensionNumbers()

  muon = optax.contrib.muon(
    1.0,
    weight_decay=weight_decay,
    adam_b1=0.9,
    adam_b2=0.98,
    muon_weight_dimension_numbers=functools.partial(
      jax.tree.map_with_path, dimensions
    ),
    # The root mean square of updates is then 0.2, as with AdamW, so that one
    # learning rate suits both kinds of parameters.
    consistent_rms=0.2,
  )
  return optax.chain(optax.clip_by_global_norm(1.0), muon)


@flax.struct.dataclass
class TrainState:
  """The state that a run is resumed from.

  Attributes:
    step: int32[], number of updates so far, and of batches used so far.
    params: float32 parameters.
    opt_state: state of the optimiser.
    elapsed_s: float32[], the training time before the state was saved.
  """

  step: jax.Array
  params: Params
  opt_state: Any
  elapsed_s: jax.Array


class Trainer:
  """Trains parameters for an objective.

  The gradient is one program for each batch shape; the update, which may take
  longer to compile, is one program for all shapes.
  """

  def __init__(
    self,
    objective: Objective,
    config: TrainConfig,
    train_data: PackedBatches,
    valid_data: PackedBatches | None = None,
    log: Callable[[str], None] = print,
    stores_features: bool = False,
  ):
    """Makes the programs; nothing is compiled yet.

    Args:
      objective: computes the loss, which training minimises.
      config: the settings of the loop.
      train_data: batches to learn from.
      valid_data: held-out batches to evaluate; None: nothing is evaluated.
      log: function that gets each line of progress.
      stores_features: whether the target's features of each batch, those of
        `losses.Distillation.features`, are computed once and stored on the
        host.
    """
    self.config, self._objective, self._log = config, objective, log
    self._train_data, self._valid_data = train_data, valid_data
    self._optimizer = make_optimizer(config.weight_decay)
    self._gradient = jax.jit(_gradient)
    self._evaluate = jax.jit(_evaluate)
    self._features = jax.jit(_features) if stores_features else None
    self._stored: dict[Any, Any] = {}  # the ids of a batch -> its features
    update = functools.partial(_update, self._optimizer)
    self._update = jax.jit(update, donate_argnums=0)

  def init(self, params: Params) -> TrainState:
    """Returns the state before the first step, with copies of `params`."""
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    opt_state = self._optimizer.init(params)
    return TrainState(jnp.int32(0), params, opt_state, jnp.float32(0))

  def compile(self, state: TrainState) -> None:
    """Compiles the run's programs, before its training time is counted."""
    args, key = (self._objective, state.params), jax.random.key(0)
    for batch in map(self._with_features, self._train_data.empty_batches()):
      self._gradient.lower(*args, batch, key).compile()
    # The parameters stand in for the gradients, which have the same shapes.
    self._update.lower(state, state.params, np.float32(0)).compile()
    held_out = self._valid_data.empty_batches() if self._valid_data else ()
    for batch in map(self._with_features, held_out):
      self._evaluate.lower(*args, batch).compile()

  def evaluate(self, params: Params) -> dict[str, float]:
    """Returns the mean loss and measures of the held-out tokens.

    Without held-out data the result is {}.
    """
    if self._valid_data is None:
      return {}
    batches = map(self._with_features, self._valid_data.epoch(0))
    evaluate = functools.partial(self._evaluate, self._objective, params)
    return _means([_host(evaluate(batch)) for batch in batches])[0]

  def train(
    self,
    params: Params,
    folder: str | os.PathLike[str],
    until: float = math.inf,
  ) -> TrainState:
    """Trains to the end, from the last saved state in `folder` if it has one.

    Args:
      params: the parameters that a new run starts with.
      folder: folder of saved states.
      until: the run also ends at this time (`time.monotonic()`), at which the
        learning rate reaches zero.

    Returns:
      The final state.

    Raises:
      ValueError: `folder` holds a state of another model or optimiser.
      FloatingPointError: the loss is no longer finite.
    """
    config = self.config
    with _states(folder) as store:
      state = _restored(store, self.init(params))
      step, elapsed = int(state.step), float(state.elapsed_s)
      if step:
        self._log(f'resumed at step {step}, {elapsed / 60:.1f} min')
      if time.monotonic() < until:
        self.compile(state)
      # An uninterrupted run would have started at this time.
      start = time.monotonic() - elapsed
      most_s = min(until - start, 60 * config.max_minutes or math.inf)
      saved_s = logged_s = elapsed
      # The sums of each step since the last line of progress.
      recent: list[dict[str, float]] = []
      data = self._train_data.stream(step)
      while (progress := self._progress(step, start, most_s)) < 1.0:
        rate = learning_rate(config, step, progress)
        epoch, batch = next(data)
        state, norm, sums = self._one_step(state, step, batch, rate)
        recent.append(sums)
        step += 1
        now = time.monotonic() - start
        if step % config.log_every == 0:
          means, tokens = _means(recent)
          speed = tokens / max(now - logged_s, 1e-9)
          self._log(
            f'step {step}/{config.steps} {_text(means)} lr {rate:.2e}'
            f' grad_norm {float(norm):.2f} tokens/s {speed:.0f}'
            f' epoch {epoch:.2f} min {now / 60:.1f}'
          )
          recent, logged_s = [], now
        if step % config.eval_every == 0:
          self._report_eval(state, step)
        if now - saved_s >= 60 * config.checkpoint_minutes:
          saved_s = now
          _save(store, state, now)
      if step % config.eval_every:
        self._report_eval(state, step)
      if store.latest_step() != step:
        _save(store, state, time.monotonic() - start)
    return state

  def _progress(self, step: int, start: float, most_s: float) -> float:
    """Returns the share of the run that is over, from 0 to 1.

    It is that of the steps or of the time, whichever is larger.
    """
    elapsed_s = time.monotonic() - start
    by_time = elapsed_s / most_s if elapsed_s < most_s else 1.0
    return max(step / self.config.steps, by_time)

  def _with_features(self, batch: Batch) -> Batch:
    if self._features is None:
      return batch
    sides = batch.inputs, batch.targets
    key = sides[0].shape, *(side.tobytes() for side in sides)
    if key not in self._stored:
      self._stored[key] = jax.device_get(self._features(self._objective, batch))
    return batch._replace(features=self._stored[key])

  def _one_step(self, state: TrainState, step: int, batch: Batch, rate: float):
    """Returns the next state, the gradient's norm, and the step's sums."""
    batch = self._with_features(batch)
    key = jax.random.fold_in(jax.random.key(self.config.seed), step)
    gradients, sums = self._gradient(self._objective, state.params, batch, key)
    state, norm = self._update(state, gradients, np.float32(rate))
    sums = _host(sums)
    if not math.isfinite(loss := sums['loss']):
      advice = 'Lower the learning rate, or lengthen the warm-up.'
      raise FloatingPointError(f'The loss at step {step} is {loss}. {advice}')
    return state, norm, sums

  def _report_eval(self, state: TrainState, step: int) -> None:
    if means := self.evaluate(state.params):
      self._log(f'eval step {step} {_text(means)}')


def _states(folder: str | os.PathLike[str]) -> Any:
  """Opens Orbax's checkpoint manager, which removes half-written states."""
  import orbax.checkpoint as ocp

  options = ocp.CheckpointManagerOptions(
    max_to_keep=_STATES,
    cleanup_tmp_directories=True,
    enable_async_checkpointing=False,
  )
  return ocp.CheckpointManager(os.path.abspath(folder), options=options)


def _save(store: Any, state: TrainState, elapsed_s: float) -> None:
  import orbax.checkpoint as ocp

  state = dataclasses.replace(state, elapsed_s=jnp.float32(elapsed_s))
  store.save(int(state.step), args=ocp.args.StandardSave(state), force=True)


def _restored(store: Any, state: TrainState) -> TrainState:
  """Returns the latest saved state, or `state` if there is none."""
  import orbax.checkpoint as ocp

  if (step := store.latest_step()) is None:
    return state
  try:
    restored = store.restore(step, args=ocp.args.StandardRestore(state))
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{str(store.directory)!r}: the state of step {step} belongs to another'
      f' model or optimiser ({error}). Continue it with its own configuration.'
    ) from error
  # Orbax commits arrays to their device, for which jit would compile again.
  # Copies are not committed.
  return jax.tree.map(lambda x: jnp.array(np.asarray(x)), restored)


def _gradient(objective, params, batch, key):
  """Returns the gradient of the mean loss over all N parts, and the sums.

  The sums are those of `Objective.sums`, added up over the parts.
  """

  def loss(params, part, key):
    sums = objective.sums(params, part, key)
    return sums['loss'], sums

  gradient = jax.grad(loss, has_aux=True)

  def one_part(carry, part):
    return jax.tree.map(jnp.add, carry, gradient(params, *part)), None

  parts = batch, jax.random.split(key, batch.targets.shape[0])
  first = jax.tree.map(lambda x: x[0], parts)
  zeros = optax.tree.zeros_like(jax.eval_shape(gradient, params, *first))
  (gradients, sums), _ = jax.lax.scan(one_part, zeros, parts)
  scale = 1.0 / jnp.maximum(sums['tokens'], 1.0)
  return optax.tree.scale(scale, gradients), sums


def _features(objective, batch):
  return jax.lax.map(objective.features, batch)


def _evaluate(objective, params, batch):
  sums = jax.lax.map(lambda part: objective.sums(params, part), batch)
  return jax.tree.map(lambda x: x.sum(0), sums)


def _update(optimizer, state, gradients, rate):
  norm, params = optax.tree.norm(gradients), state.params
  updates, opt_state = optimizer.update(gradients, state.opt_state, params)
  params = optax.apply_updates(params, optax.tree.scale(rate, updates))
  state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
  return state, norm


def _host(sums: Sums) -> dict[str, float]:
  return {name: float(value) for name, value in sums.items()}


def _means(parts: list[dict[str, float]]) -> tuple[dict[str, float], float]:
  """Adds up the sums of several batches.

  Returns:
    Each sum divided by the number of tokens; and that number.
  """
  total = {name: sum(part[name] for part in parts) for name in parts[0]}
  tokens = total.pop('tokens')
  return {name: x / max(tokens, 1.0) for name, x in total.items()}, tokens


def _text(means: Mapping[str, float]) -> str:
  return ' '.join(f'{name} {value:.4f}' for name, value in means.items())
