"""The ways of a run, and its gammas by a calibration."""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import rich.console

from specdec_jax.engine.engine import Engine
from specdec_jax.infer import report
from specdec_jax.infer.batches import Decoding, Scoring, Way
from specdec_jax.infer.settings import DecodeConfig, TaskConfig
from specdec_jax.measure import calibration, host_gamma, progress
from specdec_jax.measure.table import say

_Run = TypeVar('_Run', bound=DecodeConfig | TaskConfig)


def of_this_host(
  config: DecodeConfig | TaskConfig,
  engine: Engine,
  console: rich.console.Console,
) -> calibration.Calibration | None:
  """The calibration of a run that leaves gamma open; prints what it rests on.

  None where gamma was given, or where the pair's acceptance is not known.
  """
  acceptance = getattr(config, 'acceptance', None)
  if not engine.chooses_gamma or acceptance is None or config.beams.searches:
    return None
  with progress.status(console, 'Timing calls on this host'):
    temperature = config.sampling.temperature
    assert isinstance(temperature, float | int)  # a run has one
    measured = host_gamma.for_host(engine, acceptance, config.rows, temperature)
  if measured is not None:
    say(console, host_gamma.said(measured))
  return measured


def choose_gammas(
  measured: calibration.Calibration | None,
  config: DecodeConfig | TaskConfig,
  engine: Engine,
  console: rich.console.Console,
) -> Mapping[int, int] | None:
  """Sets the engine's gamma to the best one of a calibration, if there is one.

  Of an engine whose gamma is 'adaptive', to the rule of the calibration.

  Args:
    measured: the run's calibration, or None.
    config: configuration of the run.
    engine: the engine; its `gamma` is set if speculation pays.
    console: gets lines about the choice.

  Returns:
    Rows -> gamma: for the rows that are decoded together, and with continuous
    batching also for fewer rows, which are left at its end; 0 decodes plainly.
    None without a calibration.

  Raises:
    calibration.CalibrationError: it is of other models or of another device.
  """
  if measured is None:
    return None
  if config.beams.searches:
    return {config.rows: _gamma_of_beams(measured, config, engine, console)}
  sampling, rows = config.sampling, config.rows
  tree = engine.drafter.tree if engine.has_drafter else None
  if tree is not None:
    # A tree is of the same model; its fingerprint ends with its name.
    measured.check({k: v.split()[0] for k, v in engine.fingerprints.items()})
    engine.gamma = tree.depth
    console.print(f'A tree of {tree.num_nodes} nodes on {tree.depth} levels.')
    return {rows: tree.depth}
  measured.check(engine.fingerprints)
  if measured.temperature != sampling.temperature:
    console.print(
      f'The calibration was made at temperature {measured.temperature:g}, not'
      f' {sampling.temperature:g}: its gamma may not be the best here.'
    )
  most = measured.choices[-1].rows
  if rows > most:
    console.print(
      f'The calibration was made for up to {most} rows at once, not {rows}:'
      ' its gamma may not be the best here.'
    )
  gammas = {rows: measured.at(rows).gamma}
  if config.slots is not None and (sampling.greedy or not config.deterministic):
    gammas = measured.gammas(rows)
  rule = None
  if pays(gammas) and engine.rule is not None:
    rule = measured.rule(rows)
    gammas = {
      size: measured.rule(size).most if gamma else 0
      for size, gamma in gammas.items()
    }
    engine.gamma = rule
  elif pays(gammas):
    engine.gamma = max(gammas.values())
  if measured.temperature == sampling.temperature and config.lenience == 1:
    engine.usual = measured.usual(rows, rule is not None)
  if engine.fallback and pays(gammas):
    choice = measured.at(rows)
    costs = choice.fallback(engine.gamma, engine.rule is not None)
    engine.fallback = costs or True
  for size, gamma in sorted(gammas.items(), reverse=True):
    where = f' for {size} rows' if len(gammas) > 1 else ''
    if gamma and rule is not None:
      ends = 'at most' if engine.rule is not None else 'always'
      console.print(
        f'gamma = {gamma} {ends}{where}, adaptive by the calibration, expected'
        f' speed-up {_adaptive_speed_up(measured, size):.2f}'
      )
    elif gamma:
      console.print(
        f'gamma = {gamma}{where} by the calibration, expected speed-up'
        f' {measured.at(size).expected_speed_up:.2f}'
      )
    else:
      console.print(
        f'Speculation does not pay here{where}, by the calibration: decoding'
        ' plainly.'
      )
  return gammas


def _gamma_of_beams(
  measured: calibration.Calibration,
  config: DecodeConfig | TaskConfig,
  engine: Engine,
  console: rich.console.Console,
) -> int:
  """Sets the engine's gamma to that of the quickest beam search; returns it."""
  measured.check(engine.fingerprints)
  best = measured.beams_of(config.beams.num_beams)
  if not best.gamma:
    console.print(
      f'Speculation does not pay for {best.num_beams} beams, by the'
      ' calibration: searching plainly.'
    )
    return 0
  engine.gamma = best.gamma
  console.print(
    f'gamma = {best.gamma} with {best.draft_beams} beams of the drafter by the'
    f' calibration, speed-up {best.speed_up:.2f}'
  )
  return best.gamma


def with_draft_beams(measured: calibration.Calibration, config: _Run) -> _Run:
  """A run whose drafter has as many beams as a calibration found best.

  Raises:
    calibration.CalibrationError: it has not measured such a beam search.
  """
  beams = config.beams
  if not beams.searches or report.SPECULATIVE not in config.ways:
    return config
  best = measured.beams_of(beams.num_beams).draft_beams or None
  if beams.draft_beams is not None:
    return config
  return dataclasses.replace(
    config, beams=dataclasses.replace(beams, draft_beams=best)
  )


def _adaptive_speed_up(measured: calibration.Calibration, rows: int) -> float:
  prices = measured.at(rows).prices
  return 1.0 if prices is None else prices.expected_speed_up


def pays(gammas: Mapping[int, int] | None) -> bool:
  """Whether any number of rows is to be decoded with the drafter's help."""
  return gammas is None or any(gammas.values())


def ways(
  config: DecodeConfig | TaskConfig,
  engine: Engine,
  gammas: Mapping[int, int] | None,
  measured: calibration.Calibration | None,
) -> dict[str, Way]:
  """The ways of a run by their names, with the chosen gammas.

  Args:
    config: configuration of the run.
    engine: the engine that decodes or scores.
    gammas: result of `choose_gammas`.
    measured: the calibration that it was called with.
  """
  slots = config.slots
  if slots is not None and gammas is not None and measured is not None:
    ends = {size: measured.ends(size, engine) for size in gammas}
    slots = dataclasses.replace(slots, gammas=gammas, ends=ends)

  def way(name: str) -> Way:
    if name == report.SCORING:
      return Scoring(engine)
    return Decoding(
      engine,
      name == report.SPECULATIVE,
      config.sampling,
      config.seed,
      log_probs=config.log_probs,
      lenience=config.lenience,
      verification=config.verification,
      slots=slots,
      stop_strings=getattr(config, 'stop_strings', ()),
      beams=config.beams.options,
      num_outputs=config.num_outputs,
    )

  return {name: way(name) for name in config.ways}
