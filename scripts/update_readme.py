"""Fills the result blocks of documents with measurements.

  python scripts/update_readme.py          rewrites the blocks
  python scripts/update_readme.py --check  fails if a block is out of date

A block begins with `<!-- results: FILE | COMMAND -->`, where COMMAND writes
FILE, and ends with `<!-- /results -->`. FILE is JSON of one of these kinds:

  'decode'       the summary of `specdec decode` and `specdec try`
  'benchmark'    the record of gin/runs/benchmark_base.gin
  'calibration'  the file of `specdec calibrate`
  'alpha'        the record of gin/runs/alpha_demo.gin
  'pair_check'   the record of `specdec compile-check`
  'methods'      the record of gin/runs/methods.gin and gamma_demo.gin
  'table'   {"title": text, "columns": [text], "rows": [[text]], "machine": {}},
            the output of benchmarks/peers.py and benchmarks/serve.py

Several FILEs of gin/runs/gamma_demo.gin, with commas between them, become one
table with a row per machine. tests/support.toml, which the tests check, becomes
the table of docs/models.md. A page of docs/api/ becomes a table of its names.
"""

import dataclasses
import inspect
import json
import pathlib
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence

from specdec_jax import files
from specdec_jax.checkpoints import families
from specdec_jax.engine import calibration
from specdec_jax.infer import report
from specdec_jax.measure import acceptance, calibrate, calls, compare
from specdec_jax.measure import pair_check as pairs
from specdec_jax.report import Record, Table, record
from specdec_jax.report.record import where

ROOT = pathlib.Path(__file__).resolve().parent.parent
_BLOCK = re.compile(
  r'(?s)(<!-- results: (?P<file>\S+) \| (?P<command>.+?) -->\n)'
  r'.*?(?P<end><!-- /results -->)'
)
# The documents with a block of results, which this script writes.
DOCUMENTS = [
  path.relative_to(ROOT).as_posix()
  for folder in ('', 'benchmarks', 'demo', 'docs', 'docs/api')
  for path in sorted((ROOT / folder).glob('*.md'))
  if '<!-- results:' in path.read_text('utf-8')
]
_NUM_EXAMPLES = 3


def fill(document: str, root: pathlib.Path, name: str = 'README.md') -> str:
  """Returns `document` with new blocks from the files under `root`.

  Args:
    document: the text of a Markdown file.
    root: folder that paths in blocks are relative to.
    name: name of the file, for messages.

  Raises:
    ValueError: there is no block, or a file is missing or of no known kind.
  """
  if not _BLOCK.search(document):
    raise ValueError(f'{name} has no line <!-- results: FILE | COMMAND -->')

  def block(match: re.Match[str]) -> str:
    text = _render(*(root / name for name in match['file'].split(',')))
    return f'{match[1]}\n{text}\n\n{match["end"]}'

  return _BLOCK.sub(block, document)


def _render(path: pathlib.Path, *others: pathlib.Path) -> str:
  if others:
    hosts = [record.load(host, compare.KIND) for host in (path, *others)]
    return compare.side_by_side(hosts).markdown()
  if path.suffix == '.toml':
    return _support(path).markdown()
  if path.suffix == '.md':
    return _names(path).markdown()
  results = record.load(path, *_RENDERERS)
  parts = _RENDERERS[results['kind']](results, path)
  texts = [x.markdown() if isinstance(x, Table) else x for x in parts]
  return '\n\n'.join(texts)


_FEATURES = ('greedy', 'samples', 'beams', 'trees', 'int8', 'lora', 'server')


def _support(path: pathlib.Path) -> Table:
  """Returns a table of the features of each family that the tests run."""
  header = ['family', '`model_type`', 'target, drafter', 'tested']
  rows = []
  for family, row in families.read_tables(path).items():
    words = [[f'`{word}`' for word in row[x]] for x in ('model_type', 'pair')]
    types, pair = map(', '.join, words)
    tested = ', '.join(name for name in _FEATURES if name in row['features'])
    tested = 'all' if tested == ', '.join(_FEATURES) else tested
    rows.append([family, types, pair, tested, ', '.join(row['compared'])])
  return Table('', [*header, 'as transformers'], rows)


_SHOWN = re.compile(
  r'(?ms)^::: specdec_jax\.(\S+)(?:\n    options:\n      members: \[(.*?)\])?'
)


def _names(page: pathlib.Path) -> Table:
  """Returns a table of the names on a page of the reference, with links."""
  rows = []
  for name, members in _SHOWN.findall(page.read_text('utf-8')):
    named = pkgutil.resolve_name(f'specdec_jax.{name}')
    module = named.__module__.replace('.', '/') + '.py'
    for member in ('', *re.findall(r'\w+', members)):
      value = getattr(named, member) if member else named
      text = f'[`{name}{"." * bool(member)}{member}`](../../{module})'
      rows.append([text, (inspect.getdoc(value) or '').partition('\n')[0]])
  return Table('', ['name', 'what it is'], rows)


# Names of rows whose numbers depend on the machine, not only on the models,
# begin with one of these.
_TIMES = ('ms/', 'compile', 'start')


def _decode(summary: Record, path: pathlib.Path) -> list[str | Table]:
  table = report.table(summary)
  if 'speed_up' not in summary:  # the run measured quality alone
    rows = [x for x in table.rows if not str(x[0]).startswith(_TIMES)]
    table = dataclasses.replace(table, rows=rows)
  parts: list[str | Table] = [
    f'{summary.get("input_file") or summary["task"]}, {summary["examples"]:,}'
    f' examples, batch {summary["batch_size"]}, gamma {summary["gamma"]},'
    f' temperature {summary["sampling"]["temperature"]:g}; {where(summary)}.',
    table,
  ]
  if agreement := summary.get('agreement'):
    compared = agreement['compared']
    equal = compared - len(agreement['disagreements'])
    parts.append(f'Outputs that agree token for token: {equal} of {compared}.')
  predictions = path.with_name('predictions.jsonl')
  if predictions.exists():
    lines = predictions.read_text('utf-8').rstrip('\n').split('\n')
    outputs = map(json.loads, lines)
    rows = [[r['inputs'], r['prediction']] for r in outputs if r['prediction']]
    parts.append(Table('', ['input', 'output'], rows[:_NUM_EXAMPLES]))
  return parts


def _benchmark(benchmark: Record, _: pathlib.Path) -> list[str | Table]:
  table = calls.table(benchmark)
  return [f'{table.title}; {where(benchmark)}.', table, *table.notes]


def _calibration(saved: Record, path: pathlib.Path) -> list[str | Table]:
  parts = calibrate.report(calibration.load(str(path)))
  return [f'{where(saved["record"])}.', *parts]


def _table(saved: Record, _: pathlib.Path) -> list[str | Table]:
  table = Table.from_json(saved)
  return [f'{table.title} ({where(saved)}):', table, *table.notes]


# Kind of a record -> the function that makes its paragraphs and tables.
_RENDERERS: dict[str, Callable[..., list[str | Table]]] = {
  'decode': _decode,
  **dict.fromkeys(('table', 'methods'), _table),
  'benchmark': _benchmark,
  'calibration': _calibration,
  'alpha': lambda saved, _: [f'{where(saved)}.', acceptance.table(saved)],
  'pair_check': lambda saved, _: [pairs.conditions(saved), pairs.table(saved)],
}


def main(argv: Sequence[str]) -> int:
  """Rewrites the blocks, or checks them if `argv` has `--check`.

  Returns:
    The exit status: 1 if `--check` found an outdated block, 2 for an error.
  """
  if unknown := set(argv) - {'--check'}:
    print(f'error: unknown arguments {sorted(unknown)}', file=sys.stderr)
    return 2
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
      if not argv:
        files.write_atomically(path, after.encode('utf-8'))
  if argv and outdated:
    names, command = ', '.join(outdated), 'python scripts/update_readme.py'
    print(f'Out of date: {names}; run {command}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
