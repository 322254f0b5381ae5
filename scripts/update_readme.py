"""Fills the result blocks of README.md and of the demo's model card from
measurements; no number in them is typed.

  python scripts/update_readme.py          rewrites the blocks
  python scripts/update_readme.py --check  fails if a block is out of date

A block begins with `<!-- results: FILE | COMMAND -->`, where COMMAND is what
writes FILE, and ends with `<!-- /results -->`. FILE is JSON of one kind:

  'decode'  summary.json as scripts/decode.py writes it
  'quality' summary.json as scripts/evaluate.py writes it
  'benchmark'    as scripts/benchmark.py writes it
  'calibration'  as scripts/calibrate.py writes it
  'alpha'        as scripts/measure_alpha.py writes it
  'throughput'   as scripts/throughput.py writes it
  'serving'      as `specdec bench-serve` writes it
  'gpu_check'    as `specdec compile-check` writes it, for a GPU
  'beam_check'   likewise, of gin/runs/compile_check_beams.gin
  'try'          as `specdec try --output-file FILE` writes it
  'methods' as `specdec measure --gin_file=gin/runs/methods.gin` writes it
  'table'   {"title": text, "columns": [text], "rows": [[text]], "machine": {}},
            as scripts/reproduce.py and scripts/peers.py write it

Several FILEs of kind 'quality', with commas between them, become one table; a
row has the name of its file's folder. So do several of gin/runs/gamma_demo.gin;
a row has the machine.
"""

import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

from specdec_jax import files
from specdec_jax.infer import first_look, quality, report
from specdec_jax.measure import (
  alpha,
  beam_grid,
  gamma_curve,
  record,
  throughput,
)
from specdec_jax.measure import report as bench_report
from specdec_jax.measure.calibrate import tables as calibration_tables
from specdec_jax.measure.compiled import beams_report
from specdec_jax.measure.compiled import report as compiled_report
from specdec_jax.measure.record import Record
from specdec_jax.measure.table import Table
from specdec_jax.serving import bench_report as serving_report

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = ('README.md', 'demo/README.md', 'benchmarks/README.md')
_BLOCK = re.compile(
  r'(<!-- results: (?P<file>\S+) \| (?P<command>.+?) -->\n)'
  r'.*?(?P<end><!-- /results -->)',
  re.DOTALL,
)
_NUM_EXAMPLES = 3


def fill(document: str, root: pathlib.Path, name: str = 'README.md') -> str:
  """Returns `document` with its blocks made anew from files under `root`.

  Args:
    document: the text of a Markdown file.
    root: what the paths in blocks are relative to.
    name: of the file, for messages.

  Raises:
    ValueError: there is no block, or a file is not of a known kind.
  """
  if not _BLOCK.search(document):
    raise ValueError(f'{name} has no line <!-- results: FILE | COMMAND -->')

  def block(match: re.Match[str]) -> str:
    paths = [root / name for name in match['file'].split(',')]
    if all(path.exists() for path in paths):
      text = _render(*paths)
    else:
      text = (
        f'Nothing has been measured yet; this fills it:\n`{match["command"]}`'
      )
    return f'{match[1]}\n{text}\n\n{match["end"]}'

  return _BLOCK.sub(block, document)


def _render(path: pathlib.Path, *others: pathlib.Path) -> str:
  if others and record.load(path).kind == 'table':
    curves = [record.load(one, 'table') for one in (path, *others)]
    return gamma_curve.side_by_side(curves).markdown()
  if others:
    several = {
      one.parent.name: record.load(one, 'quality') for one in (path, *others)
    }
    return quality.side_by_side(several).markdown()
  found = record.load(path, *_RENDERERS)
  parts = [
    part.markdown() if isinstance(part, Table) else part
    for part in _RENDERERS[found.kind](found)
  ]
  if found.kind == 'decode':
    parts += _examples(path.with_name('predictions.jsonl'))
  return '\n\n'.join(parts)


def _decode(summary: Record) -> list[str | Table]:
  parts: list[str | Table] = [
    f'`{summary["input_file"]}`, {summary["lines"]} lines, batch'
    f' {summary["batch_size"]}, gamma {summary["gamma"]}, temperature'
    f' {summary["sampling"]["temperature"]:g}; {summary.where}.',
    report.table(summary),
  ]
  if agreement := summary.get('agreement'):
    equal = agreement['compared'] - len(agreement['disagreements'])
    parts.append(
      f'Outputs that agree token for token: {equal} of {agreement["compared"]}.'
    )
  return parts


def _examples(predictions: pathlib.Path) -> list[str]:
  if not predictions.exists():
    return []
  with predictions.open(encoding='utf-8') as stream:
    records = [json.loads(line) for line in stream]
  decoded = [r for r in records if r['prediction']][:_NUM_EXAMPLES]
  rows = [[r['inputs'], r['prediction']] for r in decoded]
  return [Table('', ['input', 'output'], rows).markdown()]


def _quality(summary: Record) -> list[str | Table]:
  several = summary['sources_with_several']
  parts: list[str | Table] = [
    f'`{summary["eval_file"]}`, {summary["sources"]:,} distinct sources with'
    f' {summary["references"]:,} references ({several:,} have several), gamma'
    f' {summary["gamma"]}; {summary.where}.',
    quality.table(summary),
    'BLEU is of greedy outputs unless beams are named. Signatures of'
    ' sacrebleu: with all references'
    f' `{summary["bleu"]["signature"]}`, with the first one'
    f' `{summary["bleu_single"]["signature"]}`.',
  ]
  if errors := summary['errors']:
    parts.append(f'Sources that could not be decoded: {len(errors)}.')
  return parts


def _benchmark(found: Record) -> list[str | Table]:
  parts: list[str | Table] = []
  for setting in found['settings']:
    shown = bench_report.summary(found, setting)
    parts += [f'{shown.title}; {found.where}.', shown]
  return parts


def _calibration(found: Record) -> list[str | Table]:
  measured = found['record']
  rate = measured['acceptance_rate']
  where = Record(found.kind, {}, measured['machine']).where
  return [
    f'Acceptance {rate["alpha"]:.3f} ± {rate["standard_error"]:.3f}; {where}.',
    *calibration_tables(found),
  ]


def _throughput(found: Record) -> list[str | Table]:
  parts: list[str | Table] = [
    f'{found["examples"]:,} texts, batch {found["batch_size"]}, gamma'
    f' {found["gamma"]}, temperature {found["temperature"]:g}; {found.where}.',
    *throughput.tables(found),
  ]
  if memory := found.get('memory'):
    early, late = memory['early'], memory['late']
    parts.append(
      f'Memory over {memory["examples"]:,} texts, early and late in the run:'
      f' {early["resident_bytes"] / 2**20:.0f} and'
      f' {late["resident_bytes"] / 2**20:.0f} MiB, {early["buffers"]} and'
      f' {late["buffers"]} arrays.'
    )
  return parts


def _serving(found: Record) -> list[str | Table]:
  return [
    f'{found["rows"]} rows, gamma {found["gamma"]}, temperature 0; an answer is'
    f' good if its first token comes within {found["first_limit"]:g} s and the'
    f' others {found["between_limit"]:g} s apart; {found.where}, which the'
    ' server shares with its clients. Times are medians, or medians / 95 % /'
    ' 99 %.',
    *serving_report.tables(found),
  ]


def _table(found: Record) -> list[str | Table]:
  shown = Table.from_json(found)
  return [f'{shown.title} ({found.where}):', shown, *shown.notes]


def _alpha(found: Record) -> list[str | Table]:
  return [f'{found.where}.', alpha.table(found)]


def _gpu_check(found: Record) -> list[str | Table]:
  settings = found['settings']
  lengths = ', '.join(
    f'{task} {length} input and {settings["decode_lens"][task]} output tokens'
    for task, length in settings['input_lens'].items()
  )
  waiting = ''
  if settings.get('kernels') == 'layers':
    waiting = f' {settings["wait_us"]:g} per wait within a kernel,'
  return [
    f'One {settings["compiled_for"]}, compiled for and not run; batch'
    f' {settings["batch"]}, {settings["param_dtype"]}; {lengths}; JAX'
    f' {settings["jax"]}. Times are predicted: {settings["kernel_us"]:g}'
    f' microseconds per kernel, {settings["conditional_us"]:g} per conditional,'
    f'{waiting} bytes at {settings["gb_per_s"]:,.0f} GB/s; T5X by'
    f' {settings["t5x_kernels"]} kernels per token.',
    *compiled_report.tables(found),
  ]


def _beam_check(found: Record) -> list[str | Table]:
  settings = found['settings']
  return [
    f'One {settings["compiled_for"]}, compiled for and not run; batch 1,'
    f' {settings["param_dtype"]}; {settings["input_len"]} input and'
    f' {settings["decode_len"]} output tokens; JAX {settings["jax"]}. Times are'
    f' predicted: {settings["kernel_us"]:g} microseconds per kernel,'
    f' {settings["conditional_us"]:g} per conditional, bytes at'
    f' {settings["gb_per_s"]:,.0f} GB/s. Levels a call are those of'
    f' `{settings["levels_file"]}`; the factor is over the plain beam search.',
    beams_report.table(
      found, beam_grid.levels_a_call(ROOT / settings['levels_file'])
    ),
  ]


def _try(found: Record) -> list[str | Table]:
  return [f'{found.where}.', report.table(found), *first_look.sentences(found)]


# Kind of a record -> the paragraphs that show it.
_RENDERERS: dict[str, Callable[[Record], list[str | Table]]] = {
  'decode': _decode,
  'quality': _quality,
  'table': _table,
  'methods': _table,
  'benchmark': _benchmark,
  'calibration': _calibration,
  'alpha': _alpha,
  'throughput': _throughput,
  'serving': _serving,
  'gpu_check': _gpu_check,
  'beam_check': _beam_check,
  'try': _try,
}


def main(argv: Sequence[str]) -> int:
  """Returns the exit status: 1 if `--check` found an outdated block."""
  if unknown := set(argv) - {'--check'}:
    print(f'error: unknown arguments {sorted(unknown)}', file=sys.stderr)
    return 2
  check = '--check' in argv
  outdated = []
  for name in DOCUMENTS:
    path = ROOT / name
    before = path.read_text('utf-8')
    try:
      after = fill(before, ROOT, name)
    except ValueError as error:
      print(f'error: {error}', file=sys.stderr)
      return 2
    if after != before:
      outdated.append(name)
      if not check:
        files.write_atomically(path, after.encode('utf-8'))
  if check and outdated:
    print(
      f'Out of date: {", ".join(outdated)}; run'
      ' python scripts/update_readme.py',
      file=sys.stderr,
    )
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
