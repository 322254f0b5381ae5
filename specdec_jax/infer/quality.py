"""How good a pair is: BLEU on a test set, and how often drafts are accepted."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import rich.console

from specdec_jax import files
from specdec_jax.checks.fields import check_at_least, check_types, unexpected
from specdec_jax.engine import scoring
from specdec_jax.engine.completion import Completion, total
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.request import Options
from specdec_jax.infer import report, run
from specdec_jax.infer.data import PREDICTIONS, Item
from specdec_jax.infer.report import Results
from specdec_jax.infer.resume import Folder
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
    options: seed and, with `num_beams`, a beam search that is scored too: the
      best beam of each source, plain and speculative.
    compared: makes an engine whose target is compared: another form of the same
      model; None compares nothing.

  Raises:
    ValueError: a value is outside its range.
  """

  engine: Callable[[], Engine]
  eval_file: str
  output_dir: str | None = None
  overwrite: bool = False
  batch_size: int = 32
  temperatures: tuple[float, ...] = (0.0, 1.0)
  options: Options = Options()
  compared: Callable[[], Engine] | None = None

  def __post_init__(self):
    check_types(self)
    object.__setattr__(self, 'temperatures', tuple(self.temperatures))
    check_at_least(self, batch_size=1)
    if self.temperatures[:1] != (0.0,):
      expected = 'numbers that begin with 0.0, at which BLEU is measured'
      values = self.temperatures
      raise unexpected('EvaluateConfig.temperatures', expected, values)


def evaluate(
  config: EvaluateConfig,
  beside: Mapping[str, Callable[[], str]] | None = None,
  console: rich.console.Console | None = None,
) -> dict[str, Any]:
  """Translates a test set, scores it, counts accepted drafts, writes results.

  Args:
    config: the evaluation.
    beside: more files for the output folder: name -> function of its text.
    console: where the report goes; None is stdout.

  Returns:
    The summary, of kind 'quality': 'bleu' (all references), 'bleu_single' (the
    first of each source), and counts of drafting for each temperature; 'beams'
    and 'compared' if they are asked for.

  Raises:
    ValueError: sacrebleu is missing, or the file or output folder is bad. If no
      source could be decoded, it is an AllFailedError; the records are written
      without the marker.
    OSError: the results could not be written.
  """
  console = console or rich.console.Console()
  if missing := metrics.lack(metrics.bleu):
    raise ValueError(missing)
  grouped: dict[str, list[str]] = {}
  for source, reference in _pairs(config.eval_file):
    references = grouped.setdefault(source, [])
    if reference not in references:
      references.append(reference)
  if not grouped:
    raise ValueError(f'{config.eval_file!r} has no line to evaluate.')
  folder = config.output_dir and Folder(config.output_dir, PREDICTIONS)
  with folder.claimed() if folder else contextlib.nullcontext():
    if folder and not config.overwrite and folder.missing() == []:
      raise ValueError(
        f'{config.output_dir!r} already holds finished results; they are kept.'
        ' Give another folder, or overwrite (--overwrite) to make them again.'
      )
    summary, records, failed = _evaluate(config, grouped, console)
    if folder:
      contents = {PREDICTIONS: ''.join(map(report.json_text, records))}
      contents |= {name: text() for name, text in (beside or {}).items()}
      contents[run.SUMMARY] = report.json_text(summary, indent=2)
      folder.finish(contents, failed is not None)
  console.print(table(summary))
  if failed:
    raise failed
  return summary


def _pairs(path: str) -> Iterator[tuple[str, str]]:
  """The source and each reference of each line of a file.

  Raises:
    ValueError: the file cannot be read, or a line has no reference.
  """
  for number, line in enumerate(files.lines(path), 1):
    place = f'{path!r} line {number}'
    example = parse(line, kind_of(path), place)
    if not example['targets']:
      raise ValueError(
        f'{place} has no reference; expected source<TAB>reference in a .tsv'
        " file, or 'inputs' and 'targets' in a .jsonl file."
      )
    for reference in example.get('references', [example['targets']]):
      yield example['inputs'], reference


def _evaluate(
  config: EvaluateConfig,
  grouped: Mapping[str, list[str]],
  console: rich.console.Console,
) -> tuple[dict[str, Any], list[dict[str, Any]], run.AllFailedError | None]:
  """The summary, a record for each source, and whether all of them failed."""
  engine = config.engine()
  other = config.compared() if config.compared else None
  if other and other.tokenizer.fingerprint != engine.tokenizer.fingerprint:
    raise ValueError(
      'EvaluateConfig.compared: expected another form of the same model, got'
      f' the vocabulary {other.tokenizer.path!r} beside'
      f' {engine.tokenizer.path!r}.'
    )
  sources, references = list(grouped), list(grouped.values())
  base = Options(seed=config.options.seed, log_probs=False)

  def decode(engine, speculative=True, **options):
    asked = dataclasses.replace(base, **options)
    return _decoded(engine, sources, asked, config, console, speculative)

  runs = {t: decode(engine, temperature=t) for t in config.temperatures}
  greedy = runs[0.0]
  outputs = [output.text for output in greedy]
  values = {
    'eval_file': config.eval_file,
    'sources': len(sources),
    'references': sum(map(len, references)),
    'sources_with_several': sum(len(texts) > 1 for texts in references),
    'errors': [output.error for output in greedy if output.error],
    **_bleus(outputs, references),
    'gamma': engine.gamma,
    'max_decode_len': engine.max_decode_len,
    'seed': base.seed,
    'drafting': [
      {'temperature': temperature, **_counts(completions)}
      for temperature, completions in runs.items()
    ],
  }
  if width := config.options.num_beams:
    names = ('num_beams', 'alpha', 'length_penalty', 'draft_beams')
    beams = {name: getattr(config.options, name) for name in names}
    plain, drafted = (
      decode(engine, speculative, num_samples=width, **beams)
      for speculative in (False, True)
    )
    best = drafted[width - 1 :: width]  # the best beam is the last
    same = [a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)]
    values['beams'] = {
      **beams,
      **_bleus([output.text for output in best], references),
      'agree': sum(
        all(same[at : at + width]) for at in range(0, len(same), width)
      ),
      **_counts(best),
    }
  if other is not None:
    plain = decode(other, speculative=False)
    values['compared'] = {
      **_compared((engine, other), grouped, (greedy, plain), config.batch_size),
      'bleu': _bleus([output.text for output in plain], references)['bleu'],
    }
  errors = [output.error for outputs in runs.values() for output in outputs]
  failed = run.all_failed(
    errors, len(sources), engine.params, config.output_dir
  )
  records = [
    {
      'inputs': source,
      'prediction': None if output.error else output.text,
      'references': texts,
      'finish_reason': output.finish_reason,
      'error': output.error,
    }
    for (source, texts), output in zip(grouped.items(), greedy, strict=True)
  ]
  return Record('quality', values).to_json(), records, failed


def _decoded(
  engine: Engine,
  sources: Sequence[str],
  options: Options,
  config: EvaluateConfig,
  console: rich.console.Console,
  speculative: bool,
) -> list[Completion]:
  """The outputs of all sources; those of similar length are read together."""
  samples = options.num_samples
  lengths = [len(engine.tokenizer.encode(source)) for source in sources]
  items = [
    Item(index * samples + sample, sources[index], index)
    for index in sorted(range(len(sources)), key=lengths.__getitem__)
    for sample in range(samples)
  ]
  results = Results()
  run.run_items(
    items,
    {'': run.Decoding(engine, speculative, options)},
    min(config.batch_size, len(sources)) * samples,
    1,
    console,
    {'': results},
  )
  return [results.completions[number] for number in range(len(items))]


def _bleus(
  outputs: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, Any]:
  """BLEU with all references of a source, and with the first one."""
  scores = {}
  for name, most in (('bleu', None), ('bleu_single', 1)):
    score = metrics.bleu([texts[:most] for texts in references], outputs)
    scores[name] = {
      'score': score['bleu'],
      'signature': score['bleu_signature'],
    }
  return scores


def _counts(outputs: Sequence[Completion]) -> dict[str, Any]:
  took = total(output.stats for output in outputs)
  return {
    'tokens': took.num_tokens,
    'target_calls': took.num_target_calls,
    'tested': took.num_tested,
    'accepted': took.num_accepted,
    'passed': took.passed,
    'acceptance_rate': took.acceptance_rate,
    'per_call': took.tokens_per_call,
  }


def _compared(
  engines: tuple[Engine, Engine],
  grouped: Mapping[str, Sequence[str]],
  greedy: tuple[Sequence[Completion], Sequence[Completion]],
  batch_size: int,
) -> dict[str, Any]:
  """Compares greedy outputs, and the predictions of the references.

  Returns:
    'sources' that both decoded and how many outputs are 'equal', token for
    token. Over the 'tokens' of their references, ends included: 'perplexity' of
    the first and 'other_perplexity'; the absolute difference of a token's
    log-probability in nats, 'mean_difference' and 'largest_difference'; and the
    root mean square of the logits' difference over that of the other's logits,
    'logits_error'.
  """
  ours, other = engines
  both = [
    (source, first, second)
    for source, first, second in zip(grouped, *greedy, strict=True)
    if not first.error and not second.error
  ]
  examples = sorted(  # those of similar length are read together
    (
      (ours.input_ids(source), ours.output_ids(text))
      for source, *_ in both
      for text in grouped[source]
    ),
    key=lambda pair: (len(pair[1]), len(pair[0])),
  )
  read: list[dict[str, np.ndarray]] = []
  for at in range(0, len(examples), batch_size):
    # The other one is first: errors are over its logits.
    read += scoring.compare(
      (other.target, ours.target),
      (other.params.target, ours.params.target),
      [inputs for inputs, _ in examples[at : at + batch_size]],
      [outputs for _, outputs in examples[at : at + batch_size]],
      ours.languages().before_output(()),
    )
  totals = {
    name: np.concatenate([[], *(one[name] for one in read)])
    for name in ('log_probs', 'other_log_probs', 'logits', 'errors')
  }
  scores, others = totals['other_log_probs'], totals['log_probs']
  differences = np.abs(scores - others)
  return {
    'sources': len(both),
    'equal': sum(one.tokens == two.tokens for _, one, two in both),
    'tokens': len(scores),
    'perplexity': math.exp(-scores.mean()),
    'other_perplexity': math.exp(-others.mean()),
    'mean_difference': float(differences.mean()),
    'largest_difference': float(differences.max()),
    'logits_error': math.sqrt(totals['errors'].sum() / totals['logits'].sum()),
  }


def table(summary: Mapping[str, Any]) -> Table:
  """A table of the numbers in a summary of kind 'quality'."""
  cells: list[list[str | None]] = []

  def add(title: str, value: Any, form: str) -> None:
    cells.append([title, None if value is None else format(value, form)])

  def of_all(count: int) -> str:
    return f'{count:,} of {summary["sources"]:,}'

  add('distinct sources', summary['sources'], ',')
  add('references', summary['references'], ',')
  add('BLEU, all references of a source', summary['bleu']['score'], '.1f')
  add('BLEU, the first reference only', summary['bleu_single']['score'], '.1f')
  for part in summary['drafting']:
    at = f'temperature {part["temperature"]:g}'
    add(f'acceptance rate, {at}', part['acceptance_rate'], '.3f')
    add(f'tokens per call of the target, {at}', part['per_call'], '.2f')
    add(f'tokens, {at}', part['tokens'], ',')
  if search := summary.get('beams'):
    name = f'{search["num_beams"]} beams'
    add(f'BLEU, {name}, all references', search['bleu']['score'], '.1f')
    add(f'BLEU, {name}, first only', search['bleu_single']['score'], '.1f')
    add(f'levels per call of the target, {name}', search['per_call'], '.2f')
    same = f'searches with the same {name}, plain and speculative'
    add(same, of_all(search['agree']), '')
  if other := summary.get('compared'):
    equal = f'{other["equal"]:,} of {other["sources"]:,}'
    bleu, difference = other['bleu']['score'], other['mean_difference']
    add("greedy outputs equal to the other target's", equal, '')
    add('BLEU of the other target, all references', bleu, '.1f')
    add('tokens of references', other['tokens'], ',')
    add('their perplexity', other['perplexity'], '.3f')
    title = 'their perplexity by the other target'
    add(title, other['other_perplexity'], '.3f')
    title = "difference of a token's log-probability"
    add(f'{title}, mean', difference, '.4f')
    add(f'{title}, largest', other['largest_difference'], '.2f')
    title = "error of logits over the other target's logits (root mean squares)"
    add(title, other['logits_error'], '.4f')
  return Table('', ['', Column('measured', align='right')], cells)
