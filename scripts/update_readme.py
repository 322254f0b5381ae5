"""Fills the result blocks of README.md and of the demo's model card from
measurements; no number in them is typed.

  python scripts/update_readme.py          rewrites the blocks
  python scripts/update_readme.py --check  fails if a block is out of date

A block begins with `<!-- results: FILE | COMMAND -->`, where COMMAND is what
writes FILE, and ends with `<!-- /results -->`. FILE is JSON of one kind:

  'decode'  the summary as `specdec decode` and `specdec try` write it
  'benchmark'    as gin/runs/benchmark_base.gin has it written
  'calibration'  as `specdec calibrate` writes it
  'alpha'        as gin/runs/alpha_demo.gin has it written
  'pair_check'   as `specdec compile-check` writes it
  'methods'      as gin/runs/methods.gin and gamma_demo.gin have it written
  'table'   {"title": text, "columns": [text], "rows": [[text]], "machine": {}},
            as benchmarks/peers.py and benchmarks/serve.py write it

Several FILEs of gin/runs/gamma_demo.gin, with commas between them, become one
table; a row has the machine. tests/support.toml, through which the tests go, is
the table of docs/models.md. A page of docs/api/ is a table of its own names.
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
from specdec_jax.measure import (
  acceptance,
  calibrate,
  calls,
  compare,
  pair_check,
)
from specdec_jax.report import record
from specdec_jax.report.record import Record, where
from specdec_jax.report.table import Table

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = (
  'README.md',
  'demo/README.md',
  'benchmarks/README.md',
  'docs/api/decode.md',
  'docs/api/drafters.md',
  'docs/api/networks.md',
  'docs/api/round.md',
  'docs/decode-your-data.md',
  'docs/models.md',
  'docs/your-own-drafter.md',
)
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
  found = record.load(path, *_RENDERERS)
  parts = _RENDERERS[found['kind']](found, path)
  return '\n\n'.join(
    part.markdown() if isinstance(part, Table) else part for part in parts
  )


_FEATURES = ('greedy', 'samples', 'beams', 'trees', 'int8', 'lora', 'server')


def _support(path: pathlib.Path) -> Table:
  """The features of each family that the tests run."""
  header = ['family', '`model_type`', 'target, drafter', 'tested']
  rows = []
  for family, row in families.read_tables(path).items():
    types, pair = (
      ', '.join(f'`{word}`' for word in row[name])
      for name in ('model_type', 'pair')
    )
    tested = ', '.join(name for name in _FEATURES if name in row['features'])
    tested = 'all' if tested == ', '.join(_FEATURES) else tested
    rows.append([family, types, pair, tested, ', '.join(row['compared'])])
  return Table('', [*header, 'as transformers'], rows)


_SHOWN = re.compile(
  r'^::: specdec_jax\.(\S+)(?:\n    options:\n      members: \[(.*?)\])?',
  re.DOTALL | re.MULTILINE,
)


def _names(page: pathlib.Path) -> Table:
  """The names that a page of the reference shows, and where they are."""
  rows = []
  for name, members in _SHOWN.findall(page.read_text('utf-8')):
    whole = pkgutil.resolve_name(f'specdec_jax.{name}')
    module = whole.__module__.replace('.', '/') + '.py'
    for member in ('', *re.findall(r'\w+', members)):
      value = getattr(whole, member) if member else whole
      text = f'[`{name}{"." * bool(member)}{member}`](../../{module})'
      rows.append([text, (inspect.getdoc(value) or '').partition('\n')[0]])
  return Table('', ['name', 'what it is'], rows)


# Rows of a table that are of the machine, not of the models.
_TIMES = ('ms/', 'compile', 'start')


def _decode(summary: Record, path: pathlib.Path) -> list[str | Table]:
  table = report.table(summary)
  if 'speed_up' not in summary:  # quality, of one way
    rows = [x for x in table.rows if not str(x[0]).startswith(_TIMES)]
    table = dataclasses.replace(table, rows=rows)
  parts: list[str | Table] = [
    f'{summary.get("input_file") or summary["task"]}, {summary["examples"]:,}'
    f' examples, batch {summary["batch_size"]}, gamma {summary["gamma"]},'
    f' temperature {summary["sampling"]["temperature"]:g}; {where(summary)}.',
    table,
  ]
  if agreement := summary.get('agreement'):
    equal = agreement['compared'] - len(agreement['disagreements'])
    parts.append(
      f'Outputs that agree token for token: {equal} of {agreement["compared"]}.'
    )
  predictions = path.with_name('predictions.jsonl')
  if predictions.exists():
    lines = predictions.read_text('utf-8').rstrip('\n').split('\n')
    outputs = map(json.loads, lines)
    rows = [[r['inputs'], r['prediction']] for r in outputs if r['prediction']]
    parts.append(Table('', ['input', 'output'], rows[:_NUM_EXAMPLES]))
  return parts


def _benchmark(found: Record, _: pathlib.Path) -> list[str | Table]:
  table = calls.table(found)
  return [f'{table.title}; {where(found)}.', table, *table.notes]


def _calibration(found: Record, path: pathlib.Path) -> list[str | Table]:
  parts = calibrate.report(calibration.load(str(path)))
  return [f'{where(found["record"])}.', *parts]


def _table(found: Record, _: pathlib.Path) -> list[str | Table]:
  shown = Table.from_json(found)
  return [f'{shown.title} ({where(found)}):', shown, *shown.notes]


def _alpha(found: Record, _: pathlib.Path) -> list[str | Table]:
  return [f'{where(found)}.', acceptance.table(found)]


def _pair_check(found: Record, _: pathlib.Path) -> list[str | Table]:
  return [pair_check.conditions(found), pair_check.table(found)]


# Kind of a record -> the paragraphs that show it.
_RENDERERS: dict[str, Callable[..., list[str | Table]]] = {
  'decode': _decode,
  'table': _table,
  'methods': _table,
  'benchmark': _benchmark,
  'calibration': _calibration,
  'alpha': _alpha,
  'pair_check': _pair_check,
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
