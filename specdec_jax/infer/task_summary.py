"""Metrics and summary of a run over a task."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.checks.names import nearest
from specdec_jax.infer import examples, report
from specdec_jax.infer.settings import SCORE, TASKS_OWN, TaskConfig
from specdec_jax.text import metrics, tasks


def measures(
  config: TaskConfig, found: Sequence[examples.Example]
) -> tuple[list[metrics.Metric], str | None]:
  """The metric functions, and why the usual metric is missing, or None.

  Metrics that a user named are tried, so that a missing package shows early.

  Raises:
    ValueError: a metric that was named is unknown, or its package is missing.
  """
  task = config.mixture_or_task_name
  if config.mode == SCORE or config.metrics is None:
    return [], None
  if config.metrics != TASKS_OWN:
    return [_named(name) for name in config.metrics], None
  local = tasks.find_local(task)
  if local is None:
    return tasks.metrics(task), None
  if local.metrics:
    return [_named(name) for name in local.metrics], None
  if not _with_targets(found):
    return [], None
  missing = metrics.lack(metrics.bleu)
  return ([], missing) if missing else ([metrics.bleu], None)


def _named(name: str) -> metrics.Metric:
  if name not in metrics.METRICS:
    raise ValueError(
      f'TaskConfig.metrics: there is no metric'
      f' {name!r}.{nearest(name, metrics.METRICS)}'
    )
  if missing := metrics.lack(metrics.METRICS[name]):
    raise ValueError(missing)
  return metrics.METRICS[name]


def _with_targets(found: Sequence[examples.Example]) -> dict[int, Any]:
  """The number of each example that has a target -> the target."""
  targets = {
    number: examples.reference(one)
    for number, one in enumerate(found)
    if examples.BROKEN not in one
  }
  return {number: one for number, one in targets.items() if one is not None}


def measured(
  functions: Sequence[metrics.Metric],
  found: Sequence[examples.Example],
  modes: Mapping[str, report.Mode],
  config: TaskConfig,
) -> tuple[dict[str, dict[str, Any]], str | None]:
  """Metrics of each way, on the first sample of each example with a target.

  Also returns why one of the task's own functions failed, or None. It does not
  raise, because the decoded results must be written in any case.
  """
  targets = _with_targets(found)
  failed = None
  if not targets:
    return {}, None
  by_way: dict[str, dict[str, Any]] = {}
  count = config.num_outputs
  best = count - 1 if config.beams.searches else 0  # beams: the last one
  for name, mode in modes.items():
    predictions = [
      mode.completions[number * count + best].text for number in targets
    ]
    by_way[name] = {}
    for function in functions:
      try:
        by_way[name] |= function(list(targets.values()), predictions)
      except Exception as error:  # a task's own code may raise anything
        failed = f'A metric of the task failed: {type(error).__name__}: {error}'
  return by_way, failed


def context(
  config: TaskConfig,
  records: Sequence[Mapping[str, Any]],
  found_metrics: Mapping[str, Any],
) -> dict[str, Any]:
  """The entries of a run's summary besides its measurements."""
  errors = [
    f'example {config.index(number)}: {record["error"]}'
    for number, record in enumerate(records)
    if 'error' in record
  ]
  local = tasks.find_local(config.mixture_or_task_name)
  scores = []
  if config.mode == SCORE:
    scores = [r['score'] for r in records if r['score'] is not None]
  return {
    'kind': 'task',
    'task': examples.name_of(config.mixture_or_task_name),
    'reading': None if local is None else local.reading(config.split),
    'split': config.split,
    'mode': config.mode,
    'examples': len(records),
    'shard': [config.shard_id, config.num_shards],
    'errors': errors,
    'metrics': found_metrics,
    'mean_score': float(np.mean(scores)) if scores else None,
    'num_decodes': config.num_decodes,
  }
