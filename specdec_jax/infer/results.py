"""Makes results: JSON records of lines and of a task's examples.

`resume.Folder` writes them, and the marker last, as in T5X: without the marker
`NAME.COMPLETED` there is no finished result of that name.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax import files
from specdec_jax.engine.completion import Completion, passed_over
from specdec_jax.infer import report
from specdec_jax.infer.examples import BROKEN, Example, texts
from specdec_jax.infer.settings import PREDICT_WITH_AUX, SCORE, TaskConfig
from specdec_jax.text.lines import Line

PREDICTIONS = 'predictions.jsonl'
SUMMARY = 'summary.json'


def make_records(
  lines: Sequence[Line],
  modes: Mapping[str, report.Mode],
  limit: int,
  num_samples: int = 1,
) -> list[dict[str, Any]]:
  """Returns one JSON object per line, in the order of the input.

  Args:
    lines: the lines, with their tokens counted.
    modes: results of each way, by the number of the item: the samples of a line
      lie together.
    limit: the most tokens of a line that were read, its end included.
    num_samples: samples per line; if there are several, fields are lists.
  """
  took: dict[int, dict[str, Any]] = {}
  for name, mode in modes.items():
    for batch, ms in zip(mode.batches, mode.ms_per_token(), strict=True):
      for number in batch:
        own = counts(mode.completions[number]) | {'batch_ms_per_token': ms}
        took.setdefault(number, {})[name] = own
  # The text of the last way is kept. All ways draw from the same distribution,
  # unless lenience makes the last one lossy; then the record says so.
  last = list(modes.values())[-1]
  records = []
  for i, line in enumerate(lines):
    numbers = range(i * num_samples, (i + 1) * num_samples)
    stats = {
      name: _one_or_all([took[number][name] for number in numbers])
      for name in took.get(numbers[0], {})
    }
    found = [last.completions.get(number) for number in numbers]
    kept = [completion for completion in found if completion is not None]
    records.append(_record(i, line, limit, kept, stats))
  return records


def _record(
  index: int,
  line: Line,
  limit: int,
  completions: Sequence[Completion],
  stats: dict[str, Any],
) -> dict[str, Any]:
  record: dict[str, Any] = {
    'inputs': line.text,
    'prediction': None if line.error else '',
    'prediction_tokens': [],
    'log_prob': None,
    'finish_reason': 'error' if line.error else 'empty',
    'lossless': True,
    'truncated': line.error is None and line.num_tokens > limit,
    'error': line.error,
    'stats': stats,
  }
  if completions:
    errors = [one.error for one in completions if one.error]
    record |= {
      'prediction': _one_or_all(
        [None if one.error else one.text for one in completions]
      ),
      'prediction_tokens': _one_or_all([list(c.tokens) for c in completions]),
      'log_prob': _one_or_all([total_log_prob(one) for one in completions]),
      'finish_reason': _one_or_all([one.finish_reason for one in completions]),
      'lossless': all(one.lossless for one in completions),
      'error': f'line {index + 1}: {errors[0]}' if errors else None,
    }
    if any(one.score is not None for one in completions):
      record['score'] = _one_or_all([_score(one) for one in completions])
  return record


def task_records(
  examples: Sequence[Example],
  modes: Mapping[str, report.Mode],
  config: TaskConfig,
) -> list[dict[str, Any]]:
  """Returns one JSON object per example, with the fields that T5X writes.

  The records do not depend on time or on how often the run was started.

  Args:
    examples: the run's examples.
    modes: results of each way, by the number of the item; the samples of an
      example follow one another.
    config: the run.
  """
  count = config.num_outputs
  records = []
  for number, example in enumerate(examples):
    inputs = dict(example if config.include_all_inputs else texts(example))
    inputs.pop(BROKEN, None)
    found = {
      name: [_of(example, mode, number * count + i) for i in range(count)]
      for name, mode in modes.items()
    }
    record: dict[str, Any] = {}
    record['inputs'] = inputs
    if config.mode == SCORE:
      record['score'] = total_log_prob(found[report.SCORING][0])
    else:
      record |= _prediction(found, config.mode == PREDICT_WITH_AUX)
    errors = [one.error for own in found.values() for one in own if one.error]
    records.append(record | ({'error': errors[0]} if errors else {}))
  return records


def _of(example: Example, mode: report.Mode, index: int) -> Completion:
  """The result of an example; for a broken one, its error."""
  if BROKEN in example:
    return passed_over('error', example[BROKEN])
  return mode.completions[index]


def _prediction(
  found: Mapping[str, Sequence[Completion]], with_aux: bool
) -> dict[str, Any]:
  # The text of the last way is kept. All ways draw from the same distribution,
  # unless lenience makes the last one lossy; then the record says so.
  kept = list(found.values())[-1]
  record: dict[str, Any] = {
    'prediction': _one_or_all([None if c.error else c.text for c in kept]),
    'prediction_tokens': _one_or_all([list(c.tokens) for c in kept]),
  }
  if not all(one.lossless for one in kept):
    record['lossless'] = False
  if with_aux:
    scores = _one_or_all([_score(one) for one in kept])
    record['score'] = scores
    record['aux'] = {
      'scores': scores,
      'finish_reason': _one_or_all([one.finish_reason for one in kept]),
      **{
        name: _one_or_all([counts(one) for one in own])
        for name, own in found.items()
      },
    }
  return record


def _score(completion: Completion) -> float | None:
  """What beams are sorted by; of other outputs the log-probability."""
  if completion.score is None or completion.error:
    return total_log_prob(completion)
  return completion.score


def _one_or_all(values: list[Any]) -> Any:
  """The value if there is only one, as in T5X, else the list of values."""
  return values[0] if len(values) == 1 else values


def as_list(value: Any) -> list[Any]:
  """The inverse of what a record does with one value."""
  return value if isinstance(value, list) else [value]


def print_outputs(
  records: Sequence[Mapping[str, Any]], num_samples: int = 1
) -> None:
  """Prints the outputs of records, or their scores, a line for each.

  An output that has line breaks gets spaces in their place; where none came
  the line is empty. A reader that has seen enough ends it.

  Args:
    records: one for each input, see `make_records` and `task_records`.
    num_samples: lines of each.
  """
  try:
    for record in records:
      values = as_list(record.get('prediction', record.get('score')))
      for value in values * (num_samples if len(values) == 1 else 1):
        text = '' if value is None else files.writable(str(value))
        print(' '.join(text.splitlines()))
    sys.stdout.flush()
  except BrokenPipeError:
    # What Python would flush at its end has nowhere to go.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain(value: Any) -> Any:
  """Converts any value of an example to strict JSON and UTF-8.

  Values that JSON cannot hold are replaced, so that results can always be
  written: NaN and infinity by null, bytes that are not text and lone surrogates
  by U+FFFD, other objects by their `str`.
  """
  if isinstance(value, Mapping):
    return {plain(str(key)): plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  if isinstance(value, np.ndarray | np.generic):
    return plain(value.tolist())
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else None
  if isinstance(value, bool | int | None):
    return value
  if isinstance(value, bytes):
    return value.decode('utf-8', errors='replace')
  return files.writable(str(value))


def total_log_prob(completion: Completion) -> float | None:
  """Log-probability of an output in nats; None if it is not finite."""
  total = sum(completion.log_probs)
  failed = completion.error or not math.isfinite(total)
  return None if failed else float(total)


def counts(completion: Completion) -> dict[str, Any]:
  """What producing an output took, as JSON values."""
  stats = completion.stats
  more: dict[str, Any] = {}  # where there is something to say
  if stats.fallback_rounds:
    more['fallback_rounds'] = stats.fallback_rounds
  if completion.acceptance_z is not None:
    more['acceptance_z'] = completion.acceptance_z
    more['out_of_distribution'] = completion.out_of_distribution
  return {
    'num_tokens': stats.num_tokens,
    'num_target_calls': stats.num_target_calls,
    'num_accepted': stats.num_accepted,
    'num_tested': stats.num_tested,
    'num_passed': stats.passed,
    'acceptance_rate': stats.acceptance_rate,
    'histogram': list(stats.histogram),
    **more,
  }


def contents(
  records: Sequence[Mapping[str, Any]],
  summary: Mapping[str, Any],
  beside: Mapping[str, Callable[[], str]],
  name: str = PREDICTIONS,
  prefix: str = '',
) -> dict[str, str]:
  """File name -> text, for all files of a run except the marker.

  Args:
    records: one record per example.
    summary: summary of the run.
    beside: more files: name -> function that returns its text.
    name: name of the file of records.
    prefix: prefix of the names of all other files.
  """
  return {
    name: json_lines(records),
    **{f'{prefix}{other}': text() for other, text in beside.items()},
    f'{prefix}{SUMMARY}': indented(summary),
  }


def json_lines(records: Sequence[Mapping[str, Any]]) -> str:
  """One JSON object per line; see `plain`."""
  texts = [
    json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + '\n'
    for record in records
  ]
  return ''.join(texts)


def indented(value: Any) -> str:
  """Indented JSON, for readers; see `plain`."""
  shown = plain(value)
  return json.dumps(shown, ensure_ascii=False, allow_nan=False, indent=2) + '\n'


def check_whole(broken_off: str | None, output_dir: str | None) -> None:
  """Raises ValueError, after all is written, for an input that broke off."""
  if broken_off is not None:
    where = 'decoded' if output_dir is None else f'in {output_dir!r}'
    raise ValueError(f'{broken_off} Everything before that is {where}.')
