"""The quality of a pair: BLEU of its translations, and its acceptance rates.

`EvaluateConfig` describes a run of scripts/evaluate.py, `evaluate` runs it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax import files
from specdec_jax.checks.arguments import check_at_least
from specdec_jax.checks.fields import check_types
from specdec_jax.engine.completion import Completion, total
from specdec_jax.engine.engine import Engine
from specdec_jax.infer import compared, failures, results, resume
from specdec_jax.infer.settings import Beams
from specdec_jax.measure.progress import bar
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Column, Table
from specdec_jax.text import metrics
from specdec_jax.text.local_tasks import kind_of, parse


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
  """One evaluation of a pair on a file of sources with references.

  Attributes:
    engine: makes the engine, with a drafter; called after all cheap checks.
    eval_file: UTF-8, `.tsv` or `.jsonl`, plain or `.gz`. The targets of all
      lines with the same source are its references; the single-reference score
      uses only the first.
    output_dir: folder of translations and numbers; None writes nothing.
    overwrite: whether finished results in `output_dir` may be replaced.
    batch_size: sources decoded together.
    temperatures: temperatures at which acceptance is counted. The first must be
      0; its outputs are scored.
    max_sources: uses only the first so many distinct sources; None is all.
    seed: all random numbers derive from this and the source's number.
    beams: a beam search is scored too, the best beam of each source, plain and
      speculative.
    compared: makes an engine whose target is compared, see `compared.compare`;
      None compares nothing.

  Raises:
    ValueError: a value is outside its range.
  """

  engine: Callable[[], Engine]
  eval_file: str
  output_dir: str | None = None
  overwrite: bool = False
  batch_size: int = 32
  temperatures: tuple[float, ...] = (0.0, 1.0)
  max_sources: int | None = None
  seed: int = 0
  beams: Beams = Beams()
  compared: Callable[[], Engine] | None = None

  def __post_init__(self):
    check_types(self)
    object.__setattr__(self, 'temperatures', tuple(self.temperatures))
    check_at_least(self, batch_size=1)
    if self.max_sources is not None:
      check_at_least(self, max_sources=1)
    if self.temperatures[:1] != (0.0,):
      raise ValueError(
        'EvaluateConfig.temperatures must begin with 0.0, at which BLEU is'
        f' measured, got {self.temperatures}.'
      )


def group_references(
  pairs: Iterable[tuple[str, str]],
) -> dict[str, list[str]]:
  """Maps each distinct source to its references, in the order of the file."""
  found: dict[str, list[str]] = {}
  for source, reference in pairs:
    references = found.setdefault(source, [])
    if reference not in references:
      references.append(reference)
  return found


def _pairs(path: str) -> Iterator[tuple[str, str]]:
  """The source and each reference of each line of a file.

  Raises:
    ValueError: the file cannot be read, or a line has no reference.
  """
  kind = kind_of(path)
  for number, line in enumerate(files.lines(path), 1):
    place = f'{path!r} line {number}'
    example = parse(line, kind, place)
    if not example['targets']:
      raise ValueError(
        f'{place} has no reference; expected source<TAB>reference in a .tsv'
        " file, or 'inputs' and 'targets' in a .jsonl file."
      )
    for reference in example.get('references', [example['targets']]):
      yield example['inputs'], reference


def evaluate(
  config: EvaluateConfig,
  beside: Mapping[str, Callable[[], str]] | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Translates a test set, scores it, counts accepted drafts, writes results.

  All decoding is speculative; greedy outputs are those of the plain loop. A
  beam search is made plainly, too, and its beams are compared.

  Args:
    config: the evaluation.
    beside: more files for the output folder: name -> function that returns its
      text.
    console: where the report goes; None is stdout.

  Returns:
    The summary, of kind 'quality': 'bleu' (all references), 'bleu_single' (the
    first of each source) and, for each temperature, the counts of drafting; and
    'compared', if another target is.

  Raises:
    ValueError: sacrebleu is missing, or the file or output folder is bad. If no
      source could be decoded, it is a failures.AllFailedError; the records are
      written without the marker.
    OSError: the results could not be written.
  """
  console = console or rich.console.Console()
  if missing := metrics.lack(metrics.bleu):
    raise ValueError(missing)
  grouped = group_references(_pairs(config.eval_file))
  grouped = dict(list(grouped.items())[: config.max_sources])
  if not grouped:
    raise ValueError(f'{config.eval_file!r} has no line to evaluate.')
  if config.output_dir is None:
    return _evaluate(config, grouped, None, beside or {}, console)
  folder = resume.Folder(config.output_dir, results.PREDICTIONS)
  with folder.claimed(config.overwrite):
    return _evaluate(config, grouped, folder, beside or {}, console)


def _evaluate(
  config: EvaluateConfig,
  grouped: Mapping[str, list[str]],
  folder: resume.Folder | None,
  beside: Mapping[str, Callable[[], str]],
  console: rich.console.Console,
) -> dict[str, Any]:
  """`evaluate` for sources with their references."""
  engine = config.engine()
  other = config.compared() if config.compared else None
  if other is not None:
    compared.check(engine, other)
  sources, references = list(grouped), list(grouped.values())
  runs = {
    temperature: _decode(
      engine,
      sources,
      config,
      console,
      f'Temperature {temperature:g}',
      temperature=temperature,
    )
    for temperature in config.temperatures
  }
  greedy = runs[0.0]
  outputs = [completion.text for completion in greedy]
  failed = failures.all_failed(
    [done.error for own in runs.values() for done in own],
    len(sources),
    engine.params,
    config.output_dir,
  )
  values = {
    'eval_file': config.eval_file,
    'sources': len(sources),
    'references': sum(map(len, references)),
    'sources_with_several': sum(len(own) > 1 for own in references),
    'errors': [done.error for done in greedy if done.error],
    'bleu': _bleu(outputs, references),
    'bleu_single': _bleu(outputs, [own[:1] for own in references]),
    'gamma': engine.gamma,
    'max_decode_len': engine.max_decode_len,
    'seed': config.seed,
    'drafting': [
      {'temperature': temperature, **_count(completions)}
      for temperature, completions in runs.items()
    ],
  }
  if config.beams.searches:
    values['beams'] = _search(engine, sources, references, config, console)
  if other is not None:
    name = 'The other target'
    options: dict[str, Any] = dict(temperature=0.0, speculative=False)
    plain = _decode(other, sources, config, console, name, **options)
    values['compared'] = compared.compare(
      (engine, other), grouped, (greedy, plain), config.batch_size
    ) | {'bleu': _bleu([done.text for done in plain], references)}
  summary = Record('quality', values).to_json()
  if folder is not None:
    records = [
      {
        'inputs': source,
        'prediction': None if done.error else done.text,
        'references': own,
        'finish_reason': done.finish_reason,
        'error': done.error,
      }
      for source, own, done in zip(sources, references, greedy, strict=True)
    ]
    contents = results.contents(records, summary, beside)
    folder.leave(contents) if failed else folder.finish(contents)
  console.print(table(summary))
  if failed:
    raise failed
  return summary


def _search(engine, sources, references, config, console) -> dict[str, Any]:
  """BLEU and counts of the beam search, and how many searches agree."""
  width = config.beams.num_beams
  plain, drafted = (
    _decode(
      engine,
      sources,
      config,
      console,
      'Beams, speculative' if speculative else 'Beams',
      width,
      speculative=speculative,
      **config.beams.options,
    )
    for speculative in (False, True)
  )
  best = drafted[width - 1 :: width]  # the best beam is the last
  outputs = [completion.text for completion in best]
  agree = [
    all(
      plain[index].tokens == drafted[index].tokens
      for index in range(at, at + width)
    )
    for at in range(0, len(plain), width)
  ]
  return {
    **dataclasses.asdict(config.beams),
    'bleu': _bleu(outputs, references),
    'bleu_single': _bleu(outputs, [own[:1] for own in references]),
    'agree': sum(agree),
    **_count(best),
  }


def _bleu(
  outputs: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, Any]:
  found = metrics.bleu(references, outputs)
  return {'score': found['bleu'], 'signature': found['bleu_signature']}


def table(summary: Mapping[str, Any]) -> Table:
  """A table of the numbers in a summary of kind 'quality'."""
  rows: list[list[str | None]] = [
    ['distinct sources', f'{summary["sources"]:,}'],
    ['references', f'{summary["references"]:,}'],
    ['BLEU, all references of a source', f'{summary["bleu"]["score"]:.1f}'],
    [
      'BLEU, the first reference only',
      f'{summary["bleu_single"]["score"]:.1f}',
    ],
  ]
  for part in summary['drafting']:
    at = f'temperature {part["temperature"]:g}'
    rate, per_call = part['acceptance_rate'], part['per_call']
    rows += [
      [f'acceptance rate, {at}', None if rate is None else f'{rate:.3f}'],
      [
        f'tokens per call of the target, {at}',
        None if per_call is None else f'{per_call:.2f}',
      ],
      [f'tokens, {at}', f'{part["tokens"]:,}'],
    ]
  if search := summary.get('beams'):
    name = f'{search["num_beams"]} beams'
    rows += [
      [f'BLEU, {name}, all references', f'{search["bleu"]["score"]:.1f}'],
      [f'BLEU, {name}, first only', f'{search["bleu_single"]["score"]:.1f}'],
      [f'levels per call of the target, {name}', f'{search["per_call"]:.2f}'],
      [
        f'searches with the same {name}, plain and speculative',
        f'{search["agree"]:,} of {summary["sources"]:,}',
      ],
    ]
  if other := summary.get('compared'):
    rows += compared.rows(other)
  return Table('', ['', Column('measured', align='right')], rows)


def side_by_side(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
  """A table of several summaries of one test set, by their names.

  Raises:
    ValueError: they are of different sources, lengths of drafts or
      temperatures.
  """
  same = {
    (one['eval_file'], one['sources'], one['gamma'], *_temperatures(one))
    for one in summaries.values()
  }
  if len(same) > 1:
    raise ValueError(
      'Expected evaluations of the same sources, gamma and temperatures beside'
      f' each other, got {sorted(same, key=str)}.'
    )
  columns: list[str | Column] = ['']
  for at in _temperatures(next(iter(summaries.values()))):
    columns += [
      Column(f'{name}, T = {at:g}', align='right')
      for name in ('acceptance', 'tokens per call')
    ]
  rows: list[list[str | None]] = []
  for name, one in summaries.items():
    rows.append([name])
    for part in one['drafting']:
      rate, per_call = part['acceptance_rate'], part['per_call']
      rows[-1] += [
        None if rate is None else f'{rate:.3f}',
        None if per_call is None else f'{per_call:.2f}',
      ]
    rows[-1].append(f'{one["bleu"]["score"]:.1f}')
  columns.append(Column('BLEU', align='right'))
  others = [one.get('compared') for one in summaries.values()]
  if any(others):
    columns += [
      Column(name, align='right')
      for name in ('equal outputs', 'perplexity (other)', 'error of logits')
    ]
    for row, other in zip(rows, others, strict=True):
      row += compared.cells(other) if other else [None] * 3
  return Table('', columns, rows)


def _temperatures(summary: Mapping[str, Any]) -> list[float]:
  return [part['temperature'] for part in summary['drafting']]


def _count(completions: Sequence[Completion]) -> dict[str, Any]:
  took = total(completion.stats for completion in completions)
  return {
    'tokens': took.num_tokens,
    'target_calls': took.num_target_calls,
    'tested': took.num_tested,
    'accepted': took.num_accepted,
    'passed': took.passed,
    'acceptance_rate': took.acceptance_rate,
    'per_call': took.tokens_per_call,
  }


def _decode(
  engine: Engine,
  sources: Sequence[str],
  config: EvaluateConfig,
  console: rich.console.Console,
  name: str,
  outputs: int = 1,
  **options,
) -> list[Completion]:
  """Decodes all sources, those of similar length together.

  Args:
    engine: decodes speculatively, unless `options` say otherwise.
    sources: the texts.
    config: the evaluation.
    console: shows the progress.
    name: of the run, to be shown.
    outputs: completions of each source, which follow one another.
    **options: of `Engine.generate`.
  """
  lengths = [len(engine.tokenizer.encode(source)) for source in sources]
  order = sorted(range(len(sources)), key=lambda index: lengths[index])
  found: dict[int, list[Completion]] = {}
  size = min(config.batch_size, len(sources))
  batches = [order[at : at + size] for at in range(0, len(order), size)]
  with bar(console, name, len(batches)) as advance:
    for batch in batches:
      # Filled up with its last source: a shorter last batch would need another
      # program.
      padded = [*batch, *[batch[-1]] * (size - len(batch))]
      completions = engine.generate(
        [sources[index] for index in padded],
        seed=config.seed,
        example_ids=padded,
        on_too_long='report',
        log_probs=False,
        batch_size=size,
        num_samples=outputs,
        **options,
      )
      for at, index in enumerate(batch):
        found[index] = completions[at * outputs : (at + 1) * outputs]
      advance()
  return [one for index in range(len(sources)) for one in found[index]]
