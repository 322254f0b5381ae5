"""What a run over a task says of its results: metrics, and its summary."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax import metrics, tasks
from specdec_jax.engine import Engine
from specdec_jax.infer import examples, report
from specdec_jax.infer.settings import SCORE, TaskConfig, settings_of
from specdec_jax.nearest import nearest


def measures(config: TaskConfig) -> list[metrics.Metric]:
  """The metric functions; those named are tried, so that a lack shows early."""
  if config.mode == SCORE:
    return []
  if config.metrics is None:
    return list(tasks.metrics(config.mixture_or_task_name))
  chosen = []
  for name in config.metrics:
    if name not in metrics.METRICS:
      raise ValueError(
        f'TaskConfig.metrics: there is no metric'
        f' {name!r}.{nearest(name, metrics.METRICS)}'
      )
    metrics.METRICS[name](['a'], ['a'])
    chosen.append(metrics.METRICS[name])
  return chosen


def measured(
  functions: Sequence[metrics.Metric],
  found: Sequence[examples.Example],
  modes: Mapping[str, report.Mode],
  config: TaskConfig,
) -> dict[str, dict[str, Any]]:
  """Metrics of each way, on the first sample of each example."""
  right = [i for i, one in enumerate(found) if examples.BROKEN not in one]
  targets = [examples.reference(found[number]) for number in right]
  if not targets or any(target is None for target in targets):
    return {}
  by_way: dict[str, dict[str, Any]] = {}
  for name, mode in modes.items():
    predictions = [
      mode.completions[number * config.num_decodes].text for number in right
    ]
    by_way[name] = {}
    for function in functions:
      by_way[name] |= function(targets, predictions)
  return by_way


def context(
  config: TaskConfig,
  engine: Engine,
  records: Sequence[Mapping[str, Any]],
  found_metrics: Mapping[str, Any],
  gammas: Mapping[int, int] | None,
) -> dict[str, Any]:
  """What belongs to the summary of a run besides its measurements."""
  errors = [
    f'example {config.index(number)}: {record["error"]}'
    for number, record in enumerate(records)
    if 'error' in record
  ]
  scores = []
  if config.mode == SCORE:
    scores = [r['score'] for r in records if r['score'] is not None]
  return {
    'kind': 'task',
    'task': examples.name_of(config.mixture_or_task_name),
    'split': config.split,
    'mode': config.mode,
    'examples': len(records),
    'shard': [config.shard_id, config.num_shards],
    'errors': errors,
    'metrics': found_metrics,
    'mean_score': float(np.mean(scores)) if scores else None,
    'num_decodes': config.num_decodes,
    **settings_of(config, engine, gammas),
  }
