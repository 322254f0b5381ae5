"""What a decode run reports: its numbers as a dict, and the tables of them.

The dict is what `infer.decode` writes as summary.json and what README's result
block is generated from, so every number has one source.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax.engine.completion import Completion, CompletionStats, total
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table, say
from specdec_jax.models.integers import is_integers

PLAIN, SPECULATIVE = 'plain', 'speculative'
SCORING = 'scoring'


@dataclasses.dataclass
class Mode:
  """All results of one way: plain or speculative decoding, or scoring.

  Attributes:
    compile_seconds: of all programs that were needed, not part of `seconds`.
    first_output_seconds: from the start of the process to the first output;
      where both modes run, plain decoding comes first. None where it is not
      known.
    completions: line index -> completion.
    batches: the line indices of each batch, in the order of decoding.
    seconds: wall time of each batch, tokenisation included.
    live_rounds: of continuous batching: sum over rounds of the running rows.
    slot_rounds: likewise, of all rows.
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
      sum(self.completions[index].stats.num_tokens for index in batch)
      for batch in self.batches
    ]
    return [
      1e3 * seconds / count if count else None
      for seconds, count in zip(self.seconds, counts, strict=True)
    ]

  def add(self, later: 'Mode') -> None:
    """Takes in the results of batches that came after these."""
    self.compile_seconds += later.compile_seconds
    if self.first_output_seconds is None:
      self.first_output_seconds = later.first_output_seconds
    self.completions |= later.completions
    self.batches += later.batches
    self.seconds += later.seconds
    self.live_rounds += later.live_rounds
    self.slot_rounds += later.slot_rounds

  def to_json(self) -> dict[str, Any]:
    """Everything, as JSON can hold it; floats come back as they were."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> 'Mode':
    """The inverse of `to_json`."""
    completions = {
      int(index): Completion(**one | {'stats': _stats_from_json(one['stats'])})
      for index, one in value['completions'].items()
    }
    return cls(**{**value, 'completions': completions})


def _stats_from_json(value: Mapping[str, Any]) -> CompletionStats:
  histogram = tuple(value['histogram'])
  return CompletionStats(**{**value, 'histogram': histogram})


def summarise(
  modes: Mapping[str, Mode], greedy: bool, context: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns every number of a run as a dict that JSON can hold.

  Args:
    modes: 'plain', 'speculative' or both.
    greedy: whether temperature is 0, so that both must agree.
    context: what else belongs to the record, such as counts of lines;
      'lenience' at least.
  """
  summary = dict(context)
  summary['lossless'] = SPECULATIVE not in modes or summary['lenience'] == 1
  for name, mode in modes.items():
    summary[name] = _summarise_mode(mode)
  if len(modes) == 2:
    plain, speculative = modes[PLAIN], modes[SPECULATIVE]
    ratios = _ratios(plain, speculative)
    total = [summary[name]['ms_per_token'] for name in (PLAIN, SPECULATIVE)]
    summary['speed_up_median'] = _median(ratios)
    summary['speed_up'] = total[0] / total[1] if all(total) else None
    if greedy:
      summary['agreement'] = _agreement(plain, speculative)
  return Record('decode', summary).to_json()


def _summarise_mode(mode: Mode) -> dict[str, Any]:
  took = total(completion.stats for completion in mode.completions.values())
  tokens = took.num_tokens
  seconds = sum(mode.seconds)
  return {
    'tokens': tokens,
    'target_calls': took.num_target_calls,
    'tokens_per_call': took.tokens_per_call,
    'acceptance_rate': took.acceptance_rate,
    'histogram': list(took.histogram),
    'fallback_rounds': took.fallback_rounds,
    'out_of_distribution': _num_marked(mode),
    'acceptance_over_run': acceptance_over_run(mode),
    'ms_per_token': 1e3 * seconds / tokens if tokens else None,
    'ms_per_token_median': _median([ms for ms in mode.ms_per_token() if ms]),
    'seconds': seconds,
    'compile_seconds': mode.compile_seconds,
    'first_output_seconds': mode.first_output_seconds,
    'occupancy': (
      mode.live_rounds / mode.slot_rounds if mode.slot_rounds else None
    ),
  }


def _num_marked(mode: Mode) -> int | None:
  """Outputs whose acceptance is not usual; None if that is not known."""
  done = mode.completions.values()
  if all(one.acceptance_z is None for one in done):
    return None
  return sum(one.out_of_distribution for one in done)


def acceptance_over_run(mode: Mode, parts: int = 40) -> list[float | None]:
  """Acceptance rates of up to so many parts of a run, in the input's order."""
  done = [mode.completions[index].stats for index in sorted(mode.completions)]
  parts = min(parts, len(done))
  ends = [len(done) * i // parts for i in range(parts + 1)] if parts else []
  return [
    total(done[begin:end]).acceptance_rate
    for begin, end in itertools.pairwise(ends)
  ]


def _bars(rates: Sequence[float | None]) -> str:
  """A character for each rate, the higher the fuller."""
  heights = '▁▂▃▄▅▆▇█'
  return ''.join(
    ' ' if rate is None else heights[min(7, int(8 * rate))] for rate in rates
  )


def _monitored(found: Mapping[str, Any]) -> list[str]:
  """What the acceptance over a speculative run says."""
  notes = []
  rates = found.get('acceptance_over_run') or []
  known = [rate for rate in rates if rate is not None]
  if len(known) > 1:
    notes.append(
      f'Acceptance over the run: {_bars(rates)} ({min(known):.2f} to'
      f' {max(known):.2f}).'
    )
  if marked := found.get('out_of_distribution'):
    notes.append(
      f'Outputs whose acceptance is far from that of the calibration: {marked}.'
      ' Their texts are of another kind: calibrate with such texts, or train'
      ' the drafter on them.'
    )
  if rested := found.get('fallback_rounds'):
    notes.append(
      f'The drafter rested in {rested} of {found["target_calls"]} rounds, where'
      ' its proposals were not worth their time.'
    )
  return notes


def _median(values: Sequence[float]) -> float | None:
  return statistics.median(values) if values else None


def _ratios(plain: Mode, speculative: Mode) -> list[float]:
  """The speed-up of each batch that both ways have decoded as a whole."""
  plain_ms, speculative_ms = (
    dict(zip(map(frozenset, mode.batches), mode.ms_per_token(), strict=True))
    for mode in (plain, speculative)
  )
  pairs = ((slow, speculative_ms.get(key)) for key, slow in plain_ms.items())
  return [slow / fast for slow, fast in pairs if slow and fast]


def _agreement(plain: Mode, speculative: Mode) -> dict[str, Any]:
  """Compares the tokens of both ways, line by line."""
  differences = []
  for index, one in sorted(plain.completions.items()):
    other = speculative.completions[index]
    ours, theirs = list(one.tokens), list(other.tokens)
    if ours != theirs:
      same = [a == b for a, b in zip(ours, theirs, strict=False)]
      first = same.index(False) if False in same else len(same)
      differences.append(
        {
          'line': index + 1,
          'position': first,
          PLAIN: one.text,
          SPECULATIVE: other.text,
        }
      )
  return {'compared': len(plain.completions), 'disagreements': differences}


# The rows of the table: title, key in the summary of a mode, format.
METRICS = (
  ('tokens', 'tokens', ','),
  ('calls of the target', 'target_calls', ','),
  ('tokens per call', 'tokens_per_call', '.2f'),
  ('acceptance rate', 'acceptance_rate', '.3f'),
  ('ms/token, median', 'ms_per_token_median', '.2f'),
  ('ms/token, total', 'ms_per_token', '.2f'),
)
# Below the ratios; left out where they are not known.
LAST_METRICS = (
  ('running rows / slots', 'occupancy', '.3f'),
  ('compile, s (apart)', 'compile_seconds', '.1f'),
  ('start to first output, s', 'first_output_seconds', '.1f'),
)


def table(summary: Mapping[str, Any]) -> Table:
  """A row a metric, a column a way; what they agree in is not in it."""
  names = [n for n in (PLAIN, SPECULATIVE, SCORING) if n in summary]
  lossy = not summary.get('lossless', True)
  titles = [
    f'{name}, lossy' if lossy and name == SPECULATIVE else name
    for name in names
  ]
  rows: list[list[str | None]] = []

  def add(title: str, form: str, values: Sequence[float | None]) -> None:
    shown = (None if v is None else format(v, form) for v in values)
    rows.append([title, *shown])

  for title, key, form in METRICS:
    if summary.get('beams'):  # a level of a search is a token of each beam
      title = title.replace('token', 'level')
    add(title, form, [summary[name][key] for name in names])
  measured = summary.get('metrics') or {}
  for metric in {key: None for own in measured.values() for key in own}:
    values = [measured[name].get(metric) for name in names]
    # What is no number, such as a signature, is in the summary only.
    if all(isinstance(value, float | int) for value in values):
      add(metric, '.2f', values)
  for title, key in (
    ('speed-up, median', 'speed_up_median'),
    ('speed-up, total', 'speed_up'),
  ):
    if summary.get(key):
      add(title, '.2f', [1.0, summary[key]])
  for title, key, form in LAST_METRICS:
    values = [summary[name].get(key) for name in names]
    if any(value is not None for value in values):
      add(title, form, values)
  ways = ' and '.join(titles)
  return Table(
    'Scoring' if ways == SCORING else f'Decoding, {ways}',
    ['', *(Column(title, align='right') for title in titles)],
    rows,
  )


def print_results(
  console: rich.console.Console,
  summary: Mapping[str, Any],
  output_dir: str | None,
  printed: bool = False,
) -> None:
  """Prints the table of `summary`; agreement and failed lines below it.

  Args:
    console: where it goes.
    summary: see `summarise`.
    output_dir: where the results are; None is nowhere.
    printed: whether the outputs were.
  """
  console.print(table(summary))
  for message in _notes(summary):
    say(console, message)
  if output_dir:
    say(console, f'Results are in {output_dir}.')
  elif not printed and summary['kind'] != 'task':
    say(console, 'No output folder was given, so no results were kept.')


def _notes(summary: Mapping[str, Any], most: int = 10) -> list[str]:
  """Returns what the table does not say, at most `most` items of a kind."""
  notes = []
  if summary.get('reading'):
    notes.append(summary['reading'])
  if not summary.get('lossless', True):
    lenience = summary['lenience']
    what = f'may come up to {1 / lenience:.3g} times as often as it should'
    if summary['sampling']['temperature'] == 0:
      what = f"may have {lenience:g} of the best one's probability"
    notes.append(f'Lossy: with lenience {lenience:g} a token {what}.')
  notes += _rounded(summary.get('dtypes', {}))
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
      for item in differing[:most]
    ]
  if summary.get('mean_score') is not None:
    notes.append(f'Mean log-probability: {summary["mean_score"]:.4f} nats.')
  notes += _monitored(summary.get(SPECULATIVE, {}))
  if errors := summary.get('errors'):
    what = 'Examples' if summary['kind'] == 'task' else 'Lines'
    notes.append(f'{what} that could not be decoded: {len(errors)}.')
    notes += [f'  {error}' for error in errors[:most]]
  return notes


def _rounded(dtypes: Mapping[str, str | None]) -> list[str]:
  """What kernels of integers change, of a target or of a drafter alone."""
  target, draft = dtypes.get('target'), dtypes.get('draft')
  if is_integers(target):
    return [
      f"The target's kernels are {target}: it is another model than the one of"
      ' floats, and these are exactly its outputs.'
    ]
  if is_integers(draft):
    return [f"The drafter's kernels are {draft}, which changes no output."]
  return []


def print_examples(
  console: rich.console.Console,
  texts: Sequence[str],
  modes: Mapping[str, Mode],
  count: int,
) -> None:
  """Prints the first `count` decoded lines, each way in a column of its own."""
  indices = sorted(next(iter(modes.values())).completions)[:count]
  if not indices:
    return
  rows = [
    [texts[index], *(m.completions[index].text for m in modes.values())]
    for index in indices
  ]
  console.print(Table('Examples', ['input', *modes], rows))
