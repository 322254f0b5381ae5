"""Decoded lines out: JSON records, written whole or not at all.

`predictions.jsonl` comes first and the marker `predictions.jsonl.COMPLETED`
last, as T5X leaves it; a folder without the marker holds no finished result.
"""

import json
import math
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.completion import Completion
from specdec_jax.infer import report
from specdec_jax.infer.lines import Line

PREDICTIONS = 'predictions.jsonl'
SUMMARY = 'summary.json'
COMPLETED = f'{PREDICTIONS}.COMPLETED'


def make_records(
  lines: Sequence[Line], modes: Mapping[str, report.Mode], limit: int
) -> list[dict[str, Any]]:
  """Returns one JSON object a line, in the order of the input.

  Args:
    lines: with their tokens counted.
    modes: what was decoded, by line index.
    limit: tokens of a line that were decoded at most, its end included.
  """
  stats: list[dict[str, Any]] = [{} for _ in lines]
  for name, mode in modes.items():
    for batch, ms in zip(mode.batches, mode.ms_per_token(), strict=True):
      for index in batch:
        stats[index][name] = _stats(mode.completions[index], ms)
  # Both ways draw from the same distribution; the last one's text is kept.
  last = list(modes.values())[-1]
  return [
    _record(i, line, limit, last.completions.get(i), stats[i])
    for i, line in enumerate(lines)
  ]


def _record(
  index: int,
  line: Line,
  limit: int,
  completion: Completion | None,
  stats: dict[str, Any],
) -> dict[str, Any]:
  record: dict[str, Any] = {
    'inputs': line.text,
    'prediction': None if line.error else '',
    'prediction_tokens': [],
    'log_prob': None,
    'finish_reason': 'error' if line.error else 'empty',
    'truncated': line.error is None and line.num_tokens > limit,
    'error': line.error,
    'stats': stats,
  }
  if completion is not None:
    log_prob = sum(completion.log_probs)
    error = completion.error
    record |= {
      'prediction': None if error else completion.text,
      'prediction_tokens': list(completion.tokens),
      'log_prob': log_prob if math.isfinite(log_prob) else None,
      'finish_reason': completion.finish_reason,
      'error': f'line {index + 1}: {error}' if error else None,
    }
  return record


def _stats(completion: Completion, ms: float | None) -> dict[str, Any]:
  stats = completion.stats
  return {
    'num_tokens': stats.num_tokens,
    'num_target_calls': stats.num_target_calls,
    'num_accepted': stats.num_accepted,
    'num_tested': stats.num_tested,
    'acceptance_rate': stats.acceptance_rate,
    'histogram': list(stats.histogram),
    'batch_ms_per_token': ms,
  }


def claim_output_dir(output_dir: str, overwrite: bool) -> None:
  """Makes the folder and sees that results may and can be written to it.

  Raises:
    ValueError: it cannot be made or written, or it holds finished results and
      `overwrite` is not set.
  """
  folder = pathlib.Path(output_dir)
  if (folder / COMPLETED).exists() and not overwrite:
    raise ValueError(
      f'{output_dir!r} already holds finished results ({PREDICTIONS}); they'
      ' are kept. Give another folder, or set overwrite to True'
    )
  try:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:
    raise ValueError(
      f'The output folder {output_dir!r} cannot be written:'
      f' {error.strerror or error}'
    ) from error


def write_results(
  output_dir: str,
  records: Sequence[Mapping[str, Any]],
  summary: Mapping[str, Any],
  extra: Mapping[str, str],
) -> None:
  """Writes all files of a run, each one whole or not at all, the marker last.

  Raises:
    OSError: a file could not be written; the marker is not there then.
  """
  folder = pathlib.Path(output_dir)
  json_lines = [
    json.dumps(record, ensure_ascii=False, allow_nan=False) + '\n'
    for record in records
  ]
  contents = {
    PREDICTIONS: ''.join(json_lines),
    **extra,
    SUMMARY: json.dumps(summary, ensure_ascii=False, indent=2) + '\n',
    COMPLETED: '',
  }
  # While old files turn into new ones, the folder is not a finished result.
  (folder / COMPLETED).unlink(missing_ok=True)
  for name, text in contents.items():
    try:
      files.write_atomically(folder / name, text.encode('utf-8'))
    except OSError as error:
      raise OSError(
        error.errno,
        f'{folder / name} could not be written ({error.strerror}); no partial'
        ' file was left. Free space or give another output folder, and run'
        ' again',
      ) from error
