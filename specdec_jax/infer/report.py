"""What a run leaves: results, records, a summary, and the report of it.

The summary is what `infer.decode` writes as summary.json and what README's
result block is generated from, so every number has one source.
"""

import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console

from specdec_jax import files
from specdec_jax.engine.completion import (
  Completion,
  CompletionStats,
  UsualAcceptance,
  passed_over,
  total,
)
from specdec_jax.infer.data import (
  PLAIN,
  SCORING,
  SPECULATIVE,
  DataSet,
  DecodeConfig,
  Example,
)
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import PALETTE, Column, Table, save_plot, say
from specdec_jax.models.integers import is_integers

_MOST_SHOWN = 10  # lines of a kind in the report
_MANY_IDS = 100_000  # of an output layer: more than T5's, as mT5 and Gemma have


@dataclasses.dataclass
class Results:
  """The results of one way: plain or speculative decoding, or scoring.

  Attributes:
    compile_seconds: of all programs that were needed, not part of `seconds`.
    first_output_seconds: from the start of the process to the first output;
      where both ways run, plain decoding comes first. None where it is unknown.
    completions: number of the item -> completion.
    batches: the numbers of each batch, in the order of decoding.
    seconds: wall time of each batch, tokenisation included.
    live_rounds: of continuous batching: sum over rounds of the running rows.
    slot_rounds: of continuous batching: sum over rounds of all rows.
  """

  compile_seconds: float = 0.0
  first_output_seconds: float | None = None
  completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
  batches: list[list[int]] = dataclasses.field(default_factory=list)
  seconds: list[float] = dataclasses.field(default_factory=list)
  live_rounds: int = 0
  slot_rounds: int = 0

  def ms_per_token(self) -> list[float | None]:
    """Milliseconds per token, for each batch; None where it made no token."""
    counts = [
      sum(self.completions[number].stats.num_tokens for number in batch)
      for batch in self.batches
    ]
    return [
      1e3 * seconds / count if count else None
      for seconds, count in zip(self.seconds, counts, strict=True)
    ]

  def add(self, later: 'Results') -> None:
    """Adds the results of batches that came after these."""
    self.compile_seconds += later.compile_seconds
    if self.first_output_seconds is None:
      self.first_output_seconds = later.first_output_seconds
    self.completions |= later.completions
    self.batches += later.batches
    self.seconds += later.seconds
    self.live_rounds += later.live_rounds
    self.slot_rounds += later.slot_rounds

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> 'Results':
    """The inverse of `dataclasses.asdict`, after a round trip through JSON."""

    def completion(fields: Mapping[str, Any]) -> Completion:
      stats = fields['stats']
      stats = CompletionStats(
        **{**stats, 'histogram': tuple(stats['histogram'])}
      )
      return Completion(**{**fields, 'stats': stats})

    completions = {
      int(number): completion(fields)
      for number, fields in value['completions'].items()
    }
    return cls(**{**value, 'completions': completions})


Ways = Mapping[str, Results]


def records(data: DataSet, ways: Ways, config: DecodeConfig) -> list[dict]:
  """One JSON object for each example, in the order of the data set.

  Those of a task have the fields that T5X writes, and depend neither on time
  nor on how often the run was started.

  Args:
    data: the examples, prepared.
    ways: the results; the items of an example lie together.
    config: the run.
  """
  samples = config.options.num_samples
  times = {
    name: {
      number: ms
      for batch, ms in zip(way.batches, way.ms_per_token(), strict=True)
      for number in batch
    }
    for name, way in ways.items()
  }
  made = []
  for index, example in enumerate(data.examples):
    numbers = range(index * samples, (index + 1) * samples)
    if config.is_task:
      made.append(_task_record(example, numbers, ways, config))
    else:
      made.append(_line_record(example, numbers, ways, times, data.limit))
      if error := made[-1]['error']:
        prefix = '' if example.error else f'line {index + 1}: '
        made[-1]['error'] = prefix + error
  return made


def _line_record(
  example: Example,
  numbers: Sequence[int],
  ways: Ways,
  times: Mapping[str, Mapping[int, float | None]],
  limit: int | None,
) -> dict[str, Any]:
  # The text of the last way is kept. All ways draw from the same distribution,
  # unless lenience makes the last one lossy; then the record says so.
  last = list(ways.values())[-1]
  found = [last.completions[n] for n in numbers if n in last.completions]
  record: dict[str, Any] = {
    'inputs': example.features,
    'prediction': None if example.error else '',
    'prediction_tokens': [],
    'log_prob': None,
    'finish_reason': 'error' if example.error else 'empty',
    'lossless': True,
    'truncated': example.error is None and example.num_tokens > (limit or 0),
    'error': example.error,
    'stats': {},
  }
  if not found:
    return record
  record |= {
    **_prediction(found),
    'log_prob': one_or_all([total_log_prob(one) for one in found]),
    'finish_reason': one_or_all([one.finish_reason for one in found]),
    'lossless': all(one.lossless for one in found),
    'error': next((one.error for one in found if one.error), None),
    'stats': {
      name: one_or_all(
        [
          counts(way.completions[number])
          | {'batch_ms_per_token': times[name].get(number)}
          for number in numbers
        ]
      )
      for name, way in ways.items()
    },
  }
  if any(one.score is not None for one in found):
    record['score'] = one_or_all([_score(one) for one in found])
  return record


def _task_record(
  example: Example, numbers: Sequence[int], ways: Ways, config: DecodeConfig
) -> dict[str, Any]:
  shown = example.features
  if not config.include_all_inputs:
    shown = {k: v for k, v in shown.items() if k.endswith('_pretokenized')}
  outputs = {
    name: [
      passed_over('error', example.error)
      if example.error
      else way.completions[number]
      for number in numbers
    ]
    for name, way in ways.items()
  }
  last = list(outputs.values())[-1]
  record: dict[str, Any] = {'inputs': shown}
  if config.mode == 'score':
    record['score'] = total_log_prob(last[0])
  else:
    record |= _prediction(last)
    if not all(one.lossless for one in last):
      record['lossless'] = False
  if config.mode == 'predict_with_aux':
    record['score'] = one_or_all([_score(one) for one in last])
    record['aux'] = {
      'scores': record['score'],
      'finish_reason': one_or_all([one.finish_reason for one in last]),
    }
    for name, made in outputs.items():
      record['aux'][name] = one_or_all([counts(one) for one in made])
  errors = [one.error for made in outputs.values() for one in made if one.error]
  return record | ({'error': errors[0]} if errors else {})


def _prediction(outputs: Sequence[Completion]) -> dict[str, Any]:
  texts = [None if one.error else one.text for one in outputs]
  return {
    'prediction': one_or_all(texts),
    'prediction_tokens': one_or_all([list(one.tokens) for one in outputs]),
  }


def _score(output: Completion) -> float | None:
  """What beams are sorted by; of other outputs the log-probability."""
  if output.score is None or output.error:
    return total_log_prob(output)
  return output.score


def one_or_all(values: list[Any]) -> Any:
  """The value if there is only one, as in T5X, else the list of values."""
  return values[0] if len(values) == 1 else values


def as_list(value: Any) -> list[Any]:
  """The inverse of `one_or_all`."""
  return value if isinstance(value, list) else [value]


def total_log_prob(output: Completion) -> float | None:
  """Log-probability of an output in nats; None if it is not finite."""
  log_prob = sum(output.log_probs)
  failed = output.error or not math.isfinite(log_prob)
  return None if failed else float(log_prob)


def counts(output: Completion) -> dict[str, Any]:
  """What producing an output took, as JSON values."""
  stats = output.stats
  values: dict[str, Any] = {
    'num_tokens': stats.num_tokens,
    'num_target_calls': stats.num_target_calls,
    'num_accepted': stats.num_accepted,
    'num_tested': stats.num_tested,
    'num_passed': stats.passed,
    'acceptance_rate': stats.acceptance_rate,
    'histogram': list(stats.histogram),
  }
  if stats.fallback_rounds:
    values['fallback_rounds'] = stats.fallback_rounds
  if output.acceptance_z is not None:
    values['acceptance_z'] = output.acceptance_z
    values['out_of_distribution'] = output.out_of_distribution
  return values


def plain(value: Any) -> Any:
  """Converts any value of an example to strict JSON and UTF-8.

  NaN and infinity become null, bytes that are not text and lone surrogates
  U+FFFD, and other objects their `str`, so that results can always be written.
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
  """Strict JSON of any value and a line feed; see `plain`."""
  shown = plain(value)
  return (
    json.dumps(shown, ensure_ascii=False, allow_nan=False, indent=indent) + '\n'
  )


def print_outputs(
  made: Sequence[Mapping[str, Any]], num_samples: int = 1
) -> None:
  """Prints the outputs of records, or their scores, a line for each.

  Line breaks in an output become spaces; an example without an output gives
  `num_samples` empty lines. Nothing is raised when a reader has seen enough.
  """
  try:
    for record in made:
      values = as_list(record.get('prediction', record.get('score')))
      for value in values * (num_samples if len(values) == 1 else 1):
        text = '' if value is None else files.writable(str(value))
        print(' '.join(text.splitlines()))
    sys.stdout.flush()
  except BrokenPipeError:
    # What Python would flush at its end has nowhere to go.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def summarise(
  ways: Ways, greedy: bool, context: Mapping[str, Any]
) -> dict[str, Any]:
  """Every number of a run as a dict that JSON can hold.

  Args:
    ways: the results of each way.
    greedy: whether temperature is 0, so that both ways must agree.
    context: what else belongs to the record; 'lenience' at least.
  """
  summary = dict(context)
  summary['lossless'] = SPECULATIVE not in ways or summary['lenience'] == 1
  for name, way in ways.items():
    summary[name] = _way_summary(way)
  if len(ways) == 2:
    plainly, speculative = ways[PLAIN], ways[SPECULATIVE]
    summary['speed_up_median'] = _median(_ratios(plainly, speculative))
    ms = [summary[name]['ms_per_token'] for name in (PLAIN, SPECULATIVE)]
    summary['speed_up'] = ms[0] / ms[1] if all(ms) else None
    if greedy:
      summary['agreement'] = _agreement(plainly, speculative)
  return Record('decode', summary).to_json()


def _way_summary(way: Results) -> dict[str, Any]:
  outputs = way.completions.values()
  took = total(one.stats for one in outputs)
  tokens, seconds = took.num_tokens, sum(way.seconds)
  marked = None
  if any(one.acceptance_z is not None for one in outputs):
    marked = sum(one.out_of_distribution for one in outputs)
  return {
    'tokens': tokens,
    'target_calls': took.num_target_calls,
    'tokens_per_call': took.tokens_per_call,
    'acceptance_rate': took.acceptance_rate,
    'histogram': list(took.histogram),
    'fallback_rounds': took.fallback_rounds,
    'out_of_distribution': marked,
    'acceptance_over_run': acceptance_over_run(way),
    'ms_per_token': 1e3 * seconds / tokens if tokens else None,
    'ms_per_token_median': _median([ms for ms in way.ms_per_token() if ms]),
    'seconds': seconds,
    'compile_seconds': way.compile_seconds,
    'first_output_seconds': way.first_output_seconds,
    'occupancy': way.live_rounds / way.slot_rounds if way.slot_rounds else None,
  }


def acceptance_over_run(way: Results, parts: int = 40) -> list[float | None]:
  """Acceptance rates of up to so many parts of a run, in the input's order."""
  stats = [way.completions[number].stats for number in sorted(way.completions)]
  parts = min(parts, len(stats))
  ends = [len(stats) * i // parts for i in range(parts + 1)] if parts else []
  return [
    total(stats[begin:end]).acceptance_rate
    for begin, end in itertools.pairwise(ends)
  ]


def _median(values: Sequence[float]) -> float | None:
  return statistics.median(values) if values else None


def _ratios(plainly: Results, speculative: Results) -> list[float]:
  """The speed-up of each batch that both ways have decoded as a whole."""
  slow_ms, fast_ms = (
    dict(zip(map(frozenset, way.batches), way.ms_per_token(), strict=True))
    for way in (plainly, speculative)
  )
  pairs = ((slow, fast_ms.get(key)) for key, slow in slow_ms.items())
  return [slow / fast for slow, fast in pairs if slow and fast]


def _agreement(plainly: Results, speculative: Results) -> dict[str, Any]:
  """Compares the tokens of both ways, output by output."""
  differences = []
  for number, one in sorted(plainly.completions.items()):
    other = speculative.completions[number]
    if list(one.tokens) == list(other.tokens):
      continue
    pairs = zip(one.tokens, other.tokens, strict=False)
    position = sum(
      1 for _ in itertools.takewhile(lambda x: x[0] == x[1], pairs)
    )
    differences.append(
      {
        'line': number + 1,
        'position': position,
        PLAIN: one.text,
        SPECULATIVE: other.text,
      }
    )
  return {'compared': len(plainly.completions), 'disagreements': differences}


# The rows of the table: title, key in the summary of a way, format, and whether
# the row is left out where no value is known.
_ROWS = (
  ('tokens', 'tokens', ',', False),
  ('calls of the target', 'target_calls', ',', False),
  ('tokens per call', 'tokens_per_call', '.2f', False),
  ('acceptance rate', 'acceptance_rate', '.3f', False),
  ('ms/token, median', 'ms_per_token_median', '.2f', False),
  ('ms/token, total', 'ms_per_token', '.2f', False),
  ('running rows / slots', 'occupancy', '.3f', True),
  ('compile, s (apart)', 'compile_seconds', '.1f', True),
  ('start to first output, s', 'first_output_seconds', '.1f', True),
)


def table(summary: Mapping[str, Any]) -> Table:
  """A row for each number, a column for each way."""
  names = [n for n in (PLAIN, SPECULATIVE, SCORING) if n in summary]
  is_lossy = not summary.get('lossless', True)
  titles = [
    f'{name}, lossy' if is_lossy and name == SPECULATIVE else name
    for name in names
  ]
  rows: list[list[str | None]] = []

  def add(title: str, form: str, values: list[Any]) -> None:
    rows.append(
      [title, *(None if v is None else format(v, form) for v in values)]
    )

  for title, key, form, optional in _ROWS:
    if key == 'occupancy':
      _add_metrics(add, summary, names)
    if summary.get('beams'):  # a level of a search is a token of each beam
      title = title.replace('token', 'level')
    values = [summary[name].get(key) for name in names]
    if not optional or any(value is not None for value in values):
      add(title, form, values)
  title = ' and '.join(titles)
  return Table(
    'Scoring' if title == SCORING else f'Decoding, {title}',
    ['', *(Column(title, align='right') for title in titles)],
    rows,
  )


def _add_metrics(
  add: Callable[[str, str, list[Any]], None],
  summary: Mapping[str, Any],
  names: Sequence[str],
) -> None:
  """Adds the rows of metrics, and of the speed-up of two ways."""
  measured = summary.get('metrics') or {}
  for metric in {key: None for values in measured.values() for key in values}:
    values = [measured[name].get(metric) for name in names]
    # Other values, such as a signature, are in the summary only.
    if all(isinstance(value, float | int) for value in values):
      add(metric, '.2f', values)
  for title, key in (('median', 'speed_up_median'), ('total', 'speed_up')):
    if summary.get(key):
      add(f'speed-up, {title}', '.2f', [1.0, summary[key]])


def show(
  console: rich.console.Console,
  summary: Mapping[str, Any],
  config: DecodeConfig,
) -> None:
  """Prints the table of a summary, and what the table does not say."""
  console.print(table(summary))
  notes = _notes(summary)
  if config.output_dir:
    notes.append(f'Results are in {config.output_dir}.')
  elif config.stdout == 'report' and not config.is_task:
    notes.append('No output folder was given, so no results were kept.')
  for note in notes:
    say(console, note)


def show_examples(
  console: rich.console.Console,
  data: DataSet,
  ways: Ways,
  config: DecodeConfig,
) -> None:
  """Prints the first decoded lines, each way in a column of its own."""
  numbers = sorted(next(iter(ways.values())).completions)[: config.num_shown]
  rows = [
    [
      data.examples[number // config.options.num_samples].features,
      *(way.completions[number].text for way in ways.values()),
    ]
    for number in numbers
  ]
  if rows:
    console.print(Table('Examples', ['input', *ways], rows))


def _notes(summary: Mapping[str, Any]) -> list[str]:
  """What the table does not say."""
  notes = [summary['reading']] if summary.get('reading') else []
  if not summary.get('lossless', True):
    lenience = summary['lenience']
    effect = f'may come up to {1 / lenience:.3g} times as often as it should'
    if summary['sampling']['temperature'] == 0:
      effect = f"may have {lenience:g} of the best one's probability"
    notes.append(f'Lossy: with lenience {lenience:g} a token {effect}.')
  dtypes = summary.get('dtypes', {})
  if is_integers(dtypes.get('target')):
    notes.append(
      f"The target's kernels are {dtypes['target']}: it is another model than"
      ' the one of floats, and these are exactly its outputs.'
    )
  elif is_integers(dtypes.get('draft')):
    notes.append(
      f"The drafter's kernels are {dtypes['draft']}, which changes no output."
    )
  if layout := summary.get('kernel_layout'):
    notes.append(f'Kernels are stored as {layout}.')
  if agreement := summary.get('agreement'):
    differing = agreement['disagreements']
    compared = agreement['compared']
    notes.append(
      f'{"Beams" if summary.get("beams") else "Greedy outputs"} that agree'
      f' token for token: {compared - len(differing)} of {compared}.'
    )
    notes += [
      f'  line {item["line"]} differs from token {item["position"]} on:'
      f' {item[PLAIN]!r} / {item[SPECULATIVE]!r}'
      for item in differing[:_MOST_SHOWN]
    ]
  if summary.get('mean_score') is not None:
    notes.append(f'Mean log-probability: {summary["mean_score"]:.4f} nats.')
  notes += _acceptance_notes(summary.get(SPECULATIVE, {}))
  if errors := summary.get('errors'):
    kind = 'Examples' if summary['kind'] == 'task' else 'Lines'
    notes.append(f'{kind} that could not be decoded: {len(errors)}.')
    notes += [f'  {error}' for error in errors[:_MOST_SHOWN]]
  if summary.get('unmeasured'):
    notes.append(summary['unmeasured'])
  return notes


def _acceptance_notes(speculative: Mapping[str, Any]) -> list[str]:
  """What the acceptance over a speculative run says."""
  notes = []
  rates = speculative.get('acceptance_over_run') or []
  known = [rate for rate in rates if rate is not None]
  if len(known) > 1:
    heights = '▁▂▃▄▅▆▇█'
    bars = ''.join(
      ' ' if rate is None else heights[min(7, int(8 * rate))] for rate in rates
    )
    notes.append(
      f'Acceptance over the run: {bars} ({min(known):.2f} to {max(known):.2f}).'
    )
  if marked := speculative.get('out_of_distribution'):
    notes.append(
      f'Outputs whose acceptance is far from that of the calibration: {marked}.'
      ' Their texts are of another kind: calibrate with such texts, or train'
      ' the drafter on them.'
    )
  if rested := speculative.get('fallback_rounds'):
    notes.append(
      f'The drafter rested in {rested} of {speculative["target_calls"]} rounds,'
      ' where its proposals were not worth their time.'
    )
  return notes


def sentences(record: Mapping[str, Any]) -> list[str]:
  """What a first look at a pair says, for people."""
  speed_up = record['speed_up']
  compared = record['agreement']['compared']
  agree = compared - len(record['agreement']['disagreements'])
  said = [
    f'{record["target"]} with {record["draft"]}, gamma {record["gamma"]}:'
    f' {speed_up:.2f} times as quick as plain decoding on this machine;'
    f' {record["speculative"]["acceptance_rate"] or 0:.0%} of the proposals'
    f' accepted; {agree} of {compared} outputs agree.'
  ]
  if speed_up < 1:
    said.append(
      'It does not pay here as it is: `specdec calibrate` says whether another'
      ' gamma does.'
    )
  if (record.get('draft_ids') or 0) >= _MANY_IDS:
    said.append(
      f'The output layer of {record["draft"]} has {record["draft_ids"]:,} ids,'
      ' most of the work of a proposal: with --draft-shortlist TEXTS it keeps'
      ' those of texts like the outputs.'
    )
  return said


def plot(
  path: str | os.PathLike[str], way: Results, usual: UsualAcceptance | None
) -> None:
  """Draws each output's acceptance, its course, and what is usual.

  Args:
    path: path of the PNG; replaced whole or not at all.
    way: the results of speculative decoding.
    usual: the acceptance of a calibration's texts, if it is known.

  Raises:
    ValueError: matplotlib is not installed.
    OSError: the file cannot be written.
  """
  points = [
    (number, one.stats.acceptance_rate, one.out_of_distribution)
    for number, one in sorted(way.completions.items())
  ]

  def draw(figure):
    axes = figure.subplots()
    if usual is not None:
      low, high = (usual.mean + sign * usual.spread for sign in (-1, 1))
      axes.axhspan(low, high, color='#dddddd', label='texts of the calibration')
    for marked, color, label in (
      (False, PALETTE[0], 'an output'),
      (True, PALETTE[1], 'out of distribution'),
    ):
      own = [(number, rate) for number, rate, mark in points if mark == marked]
      if own:
        axes.scatter(*zip(*own, strict=True), s=9, color=color, label=label)
    course = acceptance_over_run(way)
    middle = [(i + 0.5) * len(points) / len(course) for i in range(len(course))]
    axes.plot(middle, course, color='#444444', label='parts of the run')
    axes.set_xlabel('output, in the order of the input')
    axes.set_ylabel('acceptance rate')
    axes.set_ylim(-0.02, 1.02)
    axes.legend(loc='lower left')

  save_plot(path, draw)
