"""The results of a run: records, a summary, and the printed report.

`infer.decode` writes the summary as summary.json, and the tables in README and
docs are made from it, so that every number has one source.
"""

import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from specdec_jax import files
from specdec_jax.engine.completion import Completion, CompletionStats, total
from specdec_jax.infer import data as data_lib
from specdec_jax.infer.data import PLAIN, SCORING, SPECULATIVE, DecodeConfig
from specdec_jax.report import Table, say
from specdec_jax.report.record import new as new_record

_MOST_LINES = 10  # the most differences, and the most errors, in the report
_NUM_EXAMPLES = 5  # the report shows the outputs of so many lines


@dataclasses.dataclass
class Batch:
  """The outputs of a batch of items, decoded in one mode.

  Attributes:
    completions: number of the item -> completion.
    seconds: wall time, tokenisation included.
    compile_seconds: time of compiling the batch's programs, which is not part
      of `seconds`.
    first_output_seconds: time from the start of the process to this batch;
      None if it is unknown.
  """

  completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
  seconds: float = 0.0
  compile_seconds: float = 0.0
  first_output_seconds: float | None = None

  @property
  def ms_per_token(self) -> float | None:
    """Milliseconds per token; None where there is no token."""
    count = sum(x.stats.num_tokens for x in self.completions.values())
    return 1e3 * self.seconds / count if count else None

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> 'Batch':
    """Makes a batch from the JSON of its `dataclasses.asdict`."""
    completions = {
      int(number): Completion(
        **fields | {'stats': CompletionStats(**fields['stats'])}
      )
      for number, fields in value['completions'].items()
    }
    return cls(**{**value, 'completions': completions})


# Mode ('plain', 'speculative' or 'scoring') -> its batches, in order.
Results = Mapping[str, list[Batch]]
# Mode -> the completions of an example, one for each sample or beam.
Outputs = Mapping[str, Sequence[Completion]]


def completions_of(batches: Sequence[Batch]) -> dict[int, Completion]:
  """Returns item number -> completion, in the order of the input."""
  merged = {n: x for batch in batches for n, x in batch.completions.items()}
  return dict(sorted(merged.items()))


def outputs_of(
  data: data_lib.DataSet, results: Results, num_samples: int
) -> list[Outputs]:
  """Returns the outputs of each example, in the order of the data."""
  completions = {mode: completions_of(x) for mode, x in results.items()}
  outputs, begin = list[Outputs](), 0
  for example in data.examples:
    numbers = range(begin, begin + len(example.parts) * num_samples)
    begin = numbers.stop
    samples = [numbers[sample::num_samples] for sample in range(num_samples)]
    decoded = {
      mode: [example.output([*map(done.get, parts)]) for parts in samples]
      for mode, done in completions.items()
    }
    outputs.append(decoded)
  return outputs


def record(
  example: data_lib.Example, outputs: Outputs, config: DecodeConfig
) -> dict[str, Any]:
  """Returns the JSON object of an example, with T5X's fields in T5X's order.

  The object has the outputs of the last mode. All modes draw from the same
  distribution, unless lenience makes the last mode lossy; then 'lossless' is
  false. The object does not depend on time, or on how often the run was
  restarted.
  """
  last = list(outputs.values())[-1]
  scores = one_or_all([_score(output) for output in last])
  features = example.features
  if not isinstance(features, str) and not config.include_all_inputs:
    shown = [name for name in features if name.endswith('_pretokenized')]
    features = {name: features[name] for name in shown}
  values: dict[str, Any] = {'inputs': features}
  if config.task_mode == 'score':
    values['score'] = scores
  else:
    texts = [None if output.error else output.text for output in last]
    tokens = [list(output.tokens) for output in last]
    values['prediction'] = one_or_all(texts)
    values['prediction_tokens'] = one_or_all(tokens)
    if not all(output.lossless for output in last):
      values['lossless'] = False
  if config.task_mode == 'predict_with_aux':
    values['score'] = scores
    values['aux'] = {
      'scores': scores,
      'finish_reason': one_or_all([output.finish_reason for output in last]),
    }
    for mode, decoded in outputs.items():
      values['aux'][mode] = one_or_all([counts(output) for output in decoded])
  if config.options.split:
    # A translation memory reads these pairs, see `tasks.read_pairs`.
    pairs = [*zip(example.sources, last[-1].parts, strict=True)]
    values |= {'sentences': len(pairs), 'cut': last[0].num_cut, 'parts': pairs}
  if error := error_of(outputs):
    values['error'] = error
  return values


def error_of(outputs: Outputs) -> str | None:
  """Returns the first error of an example, or None."""
  errors = (output.error for mode in outputs.values() for output in mode)
  return next(filter(None, errors), None)


def errors_of(
  data: data_lib.DataSet, outputs: Sequence[Outputs], config: DecodeConfig
) -> list[str]:
  """Returns the error of each example that has one, with its line number."""
  unit, first = ('example', 0) if config.is_task else ('line', 1)
  pairs = zip(data.examples, map(error_of, outputs), strict=True)
  # An error in reading the file names its line already.
  return [
    error if example.skipped else f'{unit} {first + config.index(i)}: {error}'
    for i, (example, error) in enumerate(pairs)
    if error is not None
  ]


def _score(output: Completion) -> float | None:
  """Returns the score of an output of beam search.

  For a greedy output or a sample this is the log-probability, in nats.
  """
  beam = output.score
  score = float(sum(output.log_probs)) if beam is None else beam
  return None if output.error or not math.isfinite(score) else score


def one_or_all(values: list[Any]) -> Any:
  """Returns the value if there is only one, as T5X does; else the list."""
  return values[0] if len(values) == 1 else values


def counts(output: Completion) -> dict[str, Any]:
  """Returns the calls and proposals that an output took, as JSON values."""
  rate = output.stats.acceptance_rate
  return dataclasses.asdict(output.stats) | {'acceptance_rate': rate}


def plain(value: Any) -> Any:
  """Converts any value of an example to strict JSON and UTF-8.

  Results can always be written: NaN and infinity become null; bytes that are
  not text, and lone surrogates, become U+FFFD; other objects become text.
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


def json_text(value: Any, indent: int | None = None) -> str:
  """Returns strict JSON of any value, with a line feed; see `plain`."""
  value = plain(value)
  text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
  return f'{text}\n'


def print_outputs(records: Sequence[Mapping[str, Any]]) -> None:
  """Prints the outputs of records, or their scores, a line for each.

  Line breaks in an output become spaces. A reader may close the pipe early, as
  `head` does.
  """
  try:
    for record in records:
      values = record.get('prediction', record.get('score'))
      for value in values if isinstance(values, list) else [values]:
        text = '' if value is None else files.writable(str(value))
        print(' '.join(text.splitlines()))
    sys.stdout.flush()
  except BrokenPipeError:
    # Python flushes stdout as it exits, which would fail with a closed pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def summarise(
  results: Results, greedy: bool, context: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the summary of a run, as a dict of JSON values.

  Args:
    results: the batches of each mode.
    greedy: whether temperature is 0, so that both modes must agree.
    context: further entries of the summary; at least 'lenience'.
  """
  summary = dict(context)
  summary['lossless'] = SPECULATIVE not in results or summary['lenience'] == 1
  for mode, batches in results.items():
    summary[mode] = _measurements(batches)
  if len(results) == 2:
    both = results[PLAIN], results[SPECULATIVE]
    summary['speed_up_median'] = _median(_speed_ups(both))
    ms = [summary[mode]['ms_per_token'] for mode in (PLAIN, SPECULATIVE)]
    summary['speed_up'] = ms[0] / ms[1] if all(ms) else None
    if greedy:
      summary['agreement'] = _agreement(both)
  return new_record('decode', summary)


def _measurements(batches: Sequence[Batch]) -> dict[str, Any]:
  run = Batch(completions_of(batches), sum(x.seconds for x in batches))
  took = total(output.stats for output in run.completions.values())
  times = [batch.ms_per_token for batch in batches]
  starts = [batch.first_output_seconds for batch in batches]
  return {
    'tokens': took.num_tokens,
    'target_calls': took.num_target_calls,
    'tokens_per_call': took.tokens_per_call,
    'acceptance_rate': took.acceptance_rate,
    'histogram': list(took.histogram),
    'fallback_rounds': took.fallback_rounds,
    'ms_per_token': run.ms_per_token,
    'ms_per_token_median': _median([ms for ms in times if ms]),
    'seconds': run.seconds,
    'compile_seconds': sum(batch.compile_seconds for batch in batches),
    'first_output_seconds': next(filter(None, starts), None),
  }


def _median(values: Sequence[float]) -> float | None:
  return statistics.median(values) if values else None


def _speed_ups(both: Sequence[Sequence[Batch]]) -> list[float]:
  """Returns the speed-up of each batch that both modes decoded together."""
  slow, fast = (
    {frozenset(batch.completions): batch.ms_per_token for batch in batches}
    for batches in both
  )
  pairs = ((ms, fast.get(key)) for key, ms in slow.items())
  return [slow_ms / ms for slow_ms, ms in pairs if slow_ms and ms]


def _agreement(both: Sequence[Sequence[Batch]]) -> dict[str, Any]:
  """Compares the tokens of plain and speculative decoding, output by output."""
  slow, fast = map(completions_of, both)
  differences = [
    {
      'line': number + 1,
      'position': len(os.path.commonprefix([a.tokens, fast[number].tokens])),
      PLAIN: a.text,
      SPECULATIVE: fast[number].text,
    }
    for number, a in slow.items()
    if a.tokens != fast[number].tokens
  ]
  return {'compared': len(slow), 'disagreements': differences}


# Rows of the table: title, key in a mode's part of the summary, and format. The
# metrics are between _FIRST and _LAST.
_FIRST = (
  ('tokens', 'tokens', ','),
  ('calls of the target', 'target_calls', ','),
  ('tokens per call', 'tokens_per_call', '.2f'),
  ('acceptance rate', 'acceptance_rate', '.3f'),
  ('ms/token, median', 'ms_per_token_median', '.2f'),
  ('ms/token, total', 'ms_per_token', '.2f'),
)
_LAST = (
  ('speed-up, median', 'speed_up_median', '.2f'),
  ('speed-up, total', 'speed_up', '.2f'),
  ('compile, s (apart)', 'compile_seconds', '.1f'),
  ('start to first output, s', 'first_output_seconds', '.1f'),
)


def table(summary: Mapping[str, Any]) -> Table:
  """Returns a table with a row for each number and a column for each mode."""
  modes = [mode for mode in (PLAIN, SPECULATIVE, SCORING) if mode in summary]
  titles = list(modes)
  if not summary.get('lossless', True):
    titles[-1] += ', lossy'
  measured = summary.get('metrics') or {}
  columns = []
  for mode in modes:
    scores = {f'metrics.{x}': y for x, y in measured.get(mode, {}).items()}
    columns.append(summary[mode] | scores)
  for key in ('speed_up_median', 'speed_up'):
    if summary.get(key):
      columns[0][key], columns[-1][key] = 1.0, summary[key]
  # Metrics that are not numbers, such as a signature, are only in the summary.
  first = measured.get(modes[0], {})
  names = [name for name in first if isinstance(first[name], float | int)]
  metrics = [(name, f'metrics.{name}', '.2f') for name in names]
  rows = []
  for title, key, form in (*_FIRST, *metrics, *_LAST):
    values = [column.get(key) for column in columns]
    if summary.get('num_beams'):  # a level of a search is a token of each beam
      title = title.replace('token', 'level')
    cells = [None if v is None else format(v, form) for v in values]
    if any(cells):
      rows.append([title, *cells])
  kind = 'Scoring' if SCORING in modes else f'Decoding, {" and ".join(titles)}'
  return Table(kind, ['', *titles], rows)


def show_examples(
  console: Console, data: data_lib.DataSet, outputs: Sequence[Outputs]
) -> None:
  """Prints the first decoded lines, with a column for each mode."""
  rows = [
    [example.features, *(decoded[0].text for decoded in modes.values())]
    for example, modes in zip(data.examples, outputs, strict=True)
    if example.skipped is None
  ][:_NUM_EXAMPLES]
  if rows:
    console.print(Table('Examples', ['input', *outputs[0]], rows))


def show(
  console: Console, summary: Mapping[str, Any], folder: str | None
) -> None:
  """Prints the table of a summary, and errors, warnings and notes below it."""
  console.print(table(summary))
  notes = [summary['reading']] if summary.get('reading') else []
  if not summary.get('lossless', True):
    why = f'Lossy: with lenience {summary["lenience"]:g}'
    notes.append(f'{why} outputs are not those of the target alone.')
  if layout := summary.get('kernel_layout'):
    notes.append(f'Kernels are stored as {layout}.')
  if agreement := summary.get('agreement'):
    differing, compared = agreement['disagreements'], agreement['compared']
    subject = 'Beams' if summary.get('num_beams') else 'Greedy outputs'
    same = f'{compared - len(differing)} of {compared}'
    notes.append(f'{subject} that agree token for token: {same}.')
    for item in differing[:_MOST_LINES]:
      place = f'line {item["line"]} differs from token {item["position"]} on'
      notes.append(f'  {place}: {item[PLAIN]!r} / {item[SPECULATIVE]!r}')
  if summary.get('mean_score') is not None:
    notes.append(f'Mean log-probability: {summary["mean_score"]:.4f} nats.')
  if errors := summary.get('errors'):
    notes.append(f'Inputs that could not be decoded: {len(errors)}.')
    notes += [f'  {error}' for error in errors[:_MOST_LINES]]
  if summary.get('unmeasured'):
    notes.append(summary['unmeasured'])
  if (summary.get('speed_up') or 1) < 1:
    advice = '`specdec calibrate` says whether another gamma does.'
    notes.append(f'Speculation does not pay here as it is: {advice}')
  if folder:
    notes.append(f'Results are in {folder}.')
  for note in notes:
    say(console, note)
