"""The training loop: objective, step, evaluation, checkpoints, resume."""

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax.checkpoints import orbax
from specdec_jax.checks.arguments import check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.models.base import Params
from specdec_jax.text.tokenizer import PAD_ID
from specdec_jax.training import losses, reporting
from specdec_jax.training.data import Batch, PackedBatches
from specdec_jax.training.optimizer import (
  OptimizerConfig,
  learning_rate,
  make_optimizer,
)

Sums = dict[str, jax.Array]


class Objective(Protocol):
  """What is minimised, and what is measured on held-out data.

  Both methods return sums over the tokens that count. The entry 'tokens' is
  their number; every other entry is reported divided by it.
  """

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Sums]:
    """(loss summed over tokens, float32[]; sums to report)."""

  def evaluate(self, params: Params, batch: Batch) -> Sums:
    """Sums to report on held-out data."""


@flax.struct.dataclass
class CrossEntropy:
  """Maximum likelihood of the targets.

  Attributes:
    model: has `logits(params, inputs, decoder_inputs, dropout_key)`.
    label_smoothing, z_loss: see `losses.cross_entropy`; training only.
  """

  model: Any = flax.struct.field(pytree_node=False)
  label_smoothing: float = flax.struct.field(pytree_node=False, default=0.0)
  z_loss: float = flax.struct.field(pytree_node=False, default=0.0)

  def loss(self, params, batch, key):
    logits, weights = self._logits(params, batch, key)
    nats = losses.cross_entropy(
      logits, batch.targets, self.label_smoothing, self.z_loss
    )
    total = jnp.sum(nats * weights)
    return total, {'loss': total, 'tokens': weights.sum()}

  def evaluate(self, params, batch):
    logits, weights = self._logits(params, batch, None)
    nats = losses.cross_entropy(logits, batch.targets, 0.0, 0.0)
    hits = logits.argmax(axis=-1) == batch.targets
    return {
      'loss': jnp.sum(nats * weights),
      'accuracy': jnp.sum(hits * weights),
      'tokens': weights.sum(),
    }

  def _logits(self, params, batch, key):
    logits = self.model.logits(
      params,
      batch.inputs,
      losses.shift_right(batch.targets, self.model),
      dropout_key=key,
    )
    weights = (batch.targets != PAD_ID).astype(jnp.float32)
    return logits.astype(jnp.float32), weights


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The settings of a run of the training loop.

  Attributes:
    steps: length of the run and of the learning-rate curve.
    max_minutes: if > 0, the run also ends after this training time (the sum
      over all resumed runs), and the curve follows the steps or the time,
      whichever is further on, so that it ends at zero on a machine of any
      speed.
    eval_every, log_every: steps between evaluations, and between log lines.
    checkpoint_minutes: time between saved states; 0 does not save by time.
    checkpoint_steps: steps between saved states; 0 does not save by steps. The
      last state is always saved.
    ema_decay: if > 0, an exponential moving average of the parameters is kept,
      evaluated and exported. Its decay starts low: min(decay,
      (1 + step) / (10 + step)).
    seed: seed of initialisation and dropout.
    optimizer: see `OptimizerConfig`.
  """

  steps: int = 10_000
  max_minutes: float = 0.0
  eval_every: int = 500
  log_every: int = 50
  checkpoint_minutes: float = 10.0
  checkpoint_steps: int = 0
  ema_decay: float = 0.0
  seed: int = 0
  optimizer: OptimizerConfig = OptimizerConfig()

  def __post_init__(self):
    check_types(self)
    check_at_least(self, steps=1, eval_every=1, log_every=1, max_minutes=0.0)
    if not 0 <= self.ema_decay < 1:
      raise ValueError(
        f'TrainConfig.ema_decay is {self.ema_decay}; expected a share in'
        ' [0, 1).'
      )


@flax.struct.dataclass
class TrainState:
  """The state that a run is resumed from; `step` is also the place in the data.

  Attributes:
    step: int32[], updates done.
    params: float32 parameters.
    opt_state: state of the optimiser.
    ema: moving average of `params`, or None.
  """

  step: jax.Array
  params: Params
  opt_state: Any
  ema: Params | None


class Trainer:
  """Trains `params` for an objective.

  The gradient is one program for each batch shape; the update, which may take
  longer to compile, is one program for all shapes.
  """

  def __init__(
    self,
    objective: Objective,
    config: TrainConfig,
    train_data: PackedBatches,
    valid_data: PackedBatches | None = None,
    log: Callable[[str], None] | None = None,
    measure: Callable[[Params], Mapping[str, float]] | None = None,
  ):
    """
    Args:
      objective: what is minimised.
      config: the run.
      train_data: batches to learn from.
      valid_data: held-out batches.
      log: gets each line; None is standard error.
      measure: gives more numbers to report at an evaluation, from the
        parameters. Its time is not counted as training time.
    """
    self.config = config
    self._measure = measure
    self._objective = objective
    self._train_data = train_data
    self._valid_data = valid_data
    self._log = log
    self._optimizer = make_optimizer(config.optimizer)
    self._gradient = jax.jit(_gradient)
    self._evaluate = jax.jit(_evaluate)
    self._update = jax.jit(
      functools.partial(_update, self._optimizer, config.ema_decay),
      donate_argnums=0,
    )

  def init(self, params: Params) -> TrainState:
    """The state before the first step; owns copies of `params`."""
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    ema = jax.tree.map(jnp.array, params) if self.config.ema_decay else None
    return TrainState(
      jnp.zeros((), jnp.int32), params, self._optimizer.init(params), ema
    )

  def export_params(self, state: TrainState) -> Params:
    """The result of the run: the average, or without one the parameters."""
    return state.params if state.ema is None else state.ema

  def compile(self, state: TrainState) -> None:
    """Compiles the programs of the run, outside its training time."""
    key = jax.random.key(0)
    params = self.export_params(state)
    for shapes in self._train_data.shapes():
      lowered = self._gradient.lower(
        self._objective, state.params, _batch_like(shapes), key
      )
      lowered.compile()
    gradients = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info[0]
    )
    self._update.lower(state, gradients, np.float32(0)).compile()
    if self._valid_data is not None:
      for shapes in self._valid_data.shapes():
        batch = _batch_like(shapes)
        self._evaluate.lower(self._objective, params, batch).compile()

  def evaluate(self, params: Params) -> dict[str, float]:
    """Means over the held-out tokens; {} without held-out data."""
    if self._valid_data is None:
      return {}
    total: dict[str, float] = {}
    for batch in self._valid_data.epoch(0):
      sums = self._evaluate(self._objective, params, batch)
      for name, value in sums.items():
        total[name] = total.get(name, 0.0) + float(value)
    return _means(total)

  def train(
    self,
    params: Params,
    folder: str | os.PathLike[str] | None = None,
    stop_after: int | None = None,
  ) -> TrainState:
    """Runs to the end, from the last saved state in `folder` if there is one.

    Args:
      params: the parameters that a new run starts with.
      folder: folder of saved states; None saves nothing.
      stop_after: ends after this step as if the run were killed (no last save).

    Returns:
      The final state.

    Raises:
      ValueError: `folder` holds a state of another model or optimiser.
      FloatingPointError: the loss is no longer finite.
    """
    config = self.config
    state, elapsed = self.init(params), 0.0
    store = orbax.StateStore(folder) if folder is not None else None
    if store is not None and store.latest_step() is not None:
      state, extra = store.restore(state)
      # Orbax pins arrays to their device, for which jit would compile again.
      state = jax.tree.map(lambda x: jnp.array(np.asarray(x)), state)
      elapsed = float(extra['elapsed_s'])
    step = int(state.step)
    self.compile(state)
    reporter = reporting.Reporter(config.steps, self._log)
    clock = _Clock(elapsed)
    last_save = clock.elapsed_s
    with reporter:
      if step:
        reporter.say(f'resumed at step {step}, {elapsed / 60:.1f} min')
      while step < config.steps and self._progress(step, clock) < 1.0:
        state = self._one_step(state, step, clock, reporter)
        step += 1
        if step == stop_after:
          return state
        if step % config.eval_every == 0:
          self._report_eval(state, step, clock, reporter)
        minutes = (clock.elapsed_s - last_save) / 60
        if store is not None and _due(config, step, minutes):
          store.save(step, state, {'elapsed_s': clock.elapsed_s})
          last_save = clock.elapsed_s
      if step % config.eval_every:
        self._report_eval(state, step, clock, reporter)
    if store is not None:
      if store.latest_step() != step:
        store.save(step, state, {'elapsed_s': clock.elapsed_s})
      store.close()
    return state

  def _progress(self, step: int, clock: '_Clock') -> float:
    done = step / self.config.steps
    if self.config.max_minutes > 0:
      done = max(done, clock.elapsed_s / (60 * self.config.max_minutes))
    return min(done, 1.0)

  def _one_step(self, state, step, clock, reporter) -> TrainState:
    batch = self._train_data.batch(step)
    progress = self._progress(step, clock)
    rate = learning_rate(self.config.optimizer, step, progress)
    key = jax.random.fold_in(jax.random.key(self.config.seed), step)
    gradients, sums = self._gradient(
      self._objective, state.params, Batch(*batch), key
    )
    state, norm = self._update(state, gradients, np.float32(rate))
    sums = {name: float(value) for name, value in sums.items()}
    if not math.isfinite(sums['loss']):
      raise FloatingPointError(
        f'The loss at step {step} is {sums["loss"]}. Lower the learning rate,'
        ' or lengthen the warm-up.'
      )
    reporter.step(step + 1, sums, rate, float(norm), progress)
    if (step + 1) % self.config.log_every == 0:
      reporter.line(
        step + 1, clock.elapsed_s, self._train_data.epochs_done(step + 1)
      )
    return state

  def _report_eval(self, state, step, clock, reporter) -> None:
    params = self.export_params(state)
    means = self.evaluate(params)
    if self._measure is not None:
      with clock.paused():
        means |= self._measure(params)
    if means:
      reporter.evaluation(step, means)


class _Clock:
  """Training time in seconds, over all resumes."""

  def __init__(self, already_s: float):
    self._start = time.monotonic() - already_s

  @property
  def elapsed_s(self) -> float:
    return time.monotonic() - self._start

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """A context whose time does not count."""
    begin = time.monotonic()
    yield
    self._start += time.monotonic() - begin


def _batch_like(shapes: Batch) -> Batch:
  return Batch(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in shapes))


def _gradient(objective, params, batch, key):
  """The gradient of the mean loss over the tokens of all N parts; the sums."""

  def one_part(carry, part):
    batch, key = part
    gradients, sums = jax.grad(objective.loss, has_aux=True)(params, batch, key)
    return jax.tree.map(jnp.add, carry, (gradients, sums)), None

  keys = jax.random.split(key, batch.targets.shape[0])
  first = jax.tree.map(lambda x: x[0], (batch, keys))
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    jax.eval_shape(jax.grad(objective.loss, has_aux=True), params, *first),
  )
  (gradients, sums), _ = jax.lax.scan(one_part, zeros, (batch, keys))
  scale = 1.0 / jnp.maximum(sums['tokens'], 1.0)
  return jax.tree.map(lambda g: g * scale, gradients), sums


def _evaluate(objective, params, batch):
  sums = jax.lax.map(lambda part: objective.evaluate(params, part), batch)
  return jax.tree.map(lambda x: x.sum(0), sums)


def _update(optimizer, ema_decay, state, gradients, rate):
  norm = optax.tree.norm(gradients)
  updates, opt_state = optimizer.update(
    gradients, state.opt_state, state.params
  )
  params = jax.tree.map(lambda x, u: x + rate * u, state.params, updates)
  ema = state.ema
  if ema is not None:
    step = state.step.astype(jnp.float32)
    decay = jnp.minimum(ema_decay, (1.0 + step) / (10.0 + step))
    ema = jax.tree.map(lambda a, x: decay * a + (1.0 - decay) * x, ema, params)
  return TrainState(state.step + 1, params, opt_state, ema), norm


def _means(sums: Mapping[str, float]) -> dict[str, float]:
  tokens = max(sums['tokens'], 1.0)
  return {k: v / tokens for k, v in sums.items() if k != 'tokens'}


def _due(config: TrainConfig, step: int, minutes: float) -> bool:
  by_time = 0 < config.checkpoint_minutes <= minutes
  by_step = config.checkpoint_steps and step % config.checkpoint_steps == 0
  return bool(by_time or by_step)
