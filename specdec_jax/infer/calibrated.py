"""The gammas of a run, by a calibration."""

import dataclasses
from collections.abc import Mapping

import rich.console

from specdec_jax.engine import calibration
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import Drafting
from specdec_jax.infer.data import SPECULATIVE, DecodeConfig
from specdec_jax.measure import calibrate, progress
from specdec_jax.measure.table import say


def of_this_host(
  config: DecodeConfig,
  engine: Engine,
  console: rich.console.Console,
) -> calibration.Calibration | None:
  """The calibration of a run that leaves gamma open; prints what it rests on.

  None where gamma was given, or where the pair's acceptance is not known.
  """
  acceptance = config.acceptance
  if not engine.chooses_gamma or acceptance is None or config.searches:
    return None
  with progress.status(console, 'Timing calls on this host'):
    temperature = config.options.sampling.temperature
    assert isinstance(temperature, float | int)  # a run has one
    measured = calibrate.for_host(engine, acceptance, config.rows, temperature)
  if measured is not None:
    say(console, calibrate.host_verdict(measured))
  return measured


def choose_gammas(
  measured: calibration.Calibration | None,
  config: DecodeConfig,
  engine: Engine,
  console: rich.console.Console,
) -> Mapping[int, Drafting] | None:
  """Sets the engine's gamma to the best one of a calibration, if there is one.

  Of an engine whose gamma is 'adaptive', to the rule of the calibration.

  Args:
    measured: the run's calibration, or None.
    config: configuration of the run.
    engine: the engine; its `gamma` is set if speculation pays.
    console: gets lines about the choice.

  Returns:
    Rows -> how they are drafted for: the rows that are decoded together, and
    with continuous batching also fewer rows, which are left at its end. None
    without a calibration.

  Raises:
    calibration.CalibrationError: it is of other models or of another device.
  """
  if measured is None:
    return None
  sampling, rows = config.options.sampling, config.rows
  if config.searches:
    measured.check(engine.fingerprints)
    best = measured.beams_of(config.options.num_beams)
    if best.gamma:
      engine.gamma = best.gamma
    console.print(
      f'gamma = {best.gamma} with {best.draft_beams} beams of the drafter by'
      f' the calibration, speed-up {best.speed_up:.2f}'
      if best.gamma
      else f'Speculation does not pay for {best.num_beams} beams, by the'
      ' calibration: searching plainly.'
    )
    return {rows: engine.drafting_of(best.gamma, None)}
  tree = engine.drafter.tree if engine.has_drafter else None
  if tree is not None:
    # A tree is of the same model; its fingerprint ends with its name.
    measured.check({k: v.split()[0] for k, v in engine.fingerprints.items()})
    engine.gamma = tree.depth
    console.print(f'A tree of {tree.num_nodes} nodes on {tree.depth} levels.')
    return {rows: engine.drafting_of(tree.depth, None)}
  measured.check(engine.fingerprints)
  same_temperature = measured.temperature == sampling.temperature
  most = measured.choices[-1].rows
  for differs, made, now in (
    (
      not same_temperature,
      f'at temperature {measured.temperature:g}',
      f'{sampling.temperature:g}',
    ),
    (rows > most, f'for up to {most} rows at once', str(rows)),
  ):
    if differs:
      console.print(
        f'The calibration was made {made}, not {now}: its gamma may not be the'
        ' best here.'
      )
  plan = measured.plan(rows, engine)
  if config.slots is None or not sampling.greedy:
    plan = {rows: plan[rows]}
  adapts = engine.rule is not None and pays(plan)
  if pays(plan):
    if not adapts:
      engine.gamma = max(drafting.gamma for drafting in plan.values())
    measured.direct(engine, rows)
  if same_temperature and config.options.lenience == 1:
    engine.usual = measured.usual(rows, adapts)
  for size in sorted(plan, reverse=True):
    gamma = plan[size].gamma
    where = f' for {size} rows' if len(plan) > 1 else ''
    choice, how = measured.at(size), f'{where} by the calibration'
    speed_up = choice.expected_speed_up
    if adapts:
      how = f' at most{where}, adaptive by the calibration'
      speed_up = choice.prices.expected_speed_up if choice.prices else 1.0
    console.print(
      f'gamma = {gamma}{how}, expected speed-up {speed_up:.2f}'
      if gamma
      else f'Speculation does not pay here{where}, by the calibration: decoding'
      ' plainly.'
    )
  return plan


def with_draft_beams(
  measured: calibration.Calibration, config: DecodeConfig
) -> DecodeConfig:
  """A run whose drafter has as many beams as a calibration found best.

  Raises:
    calibration.CalibrationError: it has not measured such a beam search.
  """
  if not config.searches or SPECULATIVE not in config.ways:
    return config
  options = config.options
  best = measured.beams_of(options.num_beams).draft_beams or None
  if options.draft_beams is not None:
    return config
  options = dataclasses.replace(options, draft_beams=best)
  return dataclasses.replace(config, options=options)


def pays(plan: Mapping[int, Drafting] | None) -> bool:
  """Whether any number of rows is to be decoded with the drafter's help."""
  return plan is None or any(plan.values())
