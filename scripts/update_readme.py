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
  'table'   {"title": text, "columns": [text], "rows": [[text]], "machine": {}},
            as scripts/reproduce.py and benchmarks/peers.py write it
"""

import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax import files
from specdec_jax.infer import quality, report
from specdec_jax.measure import throughput
from specdec_jax.measure.alpha import with_error

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = ('README.md', 'demo/README.md', 'benchmarks/README.md')
_BLOCK = re.compile(
  r'(<!-- results: (?P<file>\S+) \| (?P<command>.+?) -->\n)'
  r'.*?(?P<end><!-- /results -->)',
  re.DOTALL,
)
_NUMBER = re.compile(r'[-+\d.,%]+')
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
    path = root / match['file']
    if path.exists():
      text = _render(path)
    else:
      text = (
        f'Nothing has been measured yet; this fills it:\n`{match["command"]}`'
      )
    return f'{match[1]}\n{text}\n\n{match["end"]}'

  return _BLOCK.sub(block, document)


def _render(path: pathlib.Path) -> str:
  result = json.loads(path.read_text('utf-8'))
  kind = result.get('kind') if isinstance(result, dict) else None
  if kind == 'decode':
    return _render_decode(result, path.with_name('predictions.jsonl'))
  if kind == 'quality':
    return _render_quality(result)
  if kind == 'table':
    table = _table([result['columns'], *result['rows']])
    return f'{result["title"]} ({_machine(result["machine"])}):\n\n{table}'
  if kind in _RENDERERS:
    return _RENDERERS[kind](result)
  known = ['decode', 'quality', 'table', *_RENDERERS]
  raise ValueError(f'{path}: expected a kind of {known}, got {kind!r}')


def _render_decode(
  summary: Mapping[str, Any], predictions: pathlib.Path
) -> str:
  parts = [
    f'`{summary["input_file"]}`, {summary["lines"]} lines, batch'
    f' {summary["batch_size"]}, gamma {summary["gamma"]}, temperature'
    f' {summary["sampling"]["temperature"]:g}; {_machine(summary["machine"])}.',
    _table(report.rows(summary)),
  ]
  if agreement := summary.get('agreement'):
    equal = agreement['compared'] - len(agreement['disagreements'])
    parts.append(
      f'Outputs that agree token for token: {equal} of {agreement["compared"]}.'
    )
  if predictions.exists():
    with predictions.open(encoding='utf-8') as stream:
      records = [json.loads(line) for line in stream]
    decoded = [r for r in records if r['prediction']][:_NUM_EXAMPLES]
    rows = [[r['inputs'], r['prediction']] for r in decoded]
    parts.append(_table([['input', 'output'], *rows]))
  return '\n\n'.join(parts)


def _render_quality(summary: Mapping[str, Any]) -> str:
  several = summary['sources_with_several']
  intro = (
    f'`{summary["eval_file"]}`, {summary["sources"]:,} distinct sources with'
    f' {summary["references"]:,} references ({several:,} have several), gamma'
    f' {summary["gamma"]}; {_machine(summary["machine"])}.'
  )
  parts = [intro, _table([['', 'measured'], *quality.rows(summary)])]
  parts.append(
    'BLEU is of greedy outputs. Signatures of sacrebleu: with all references'
    f' `{summary["bleu"]["signature"]}`, with the first one'
    f' `{summary["bleu_single"]["signature"]}`.'
  )
  if errors := summary['errors']:
    parts.append(f'Sources that could not be decoded: {len(errors)}.')
  return '\n\n'.join(parts)


def _render_benchmark(record: Mapping[str, Any]) -> str:
  parts = []
  for setting in record['settings']:
    forced = record['forced_acceptance']
    note = '' if forced is None else f', acceptance forced to {forced}'
    parts.append(
      f'{record["name"]}: {record["weights"]} weights{note}; batch'
      f' {setting["batch"]}, input {setting["input_len"]}, output'
      f' {setting["decode_len"]} tokens, temperature'
      f' {setting["temperature"]:g}; {_machine(record["machine"])}.'
    )
    plain = setting['times_ms']['plain_loop']
    body = [
      ['plain loop, ms a token', f'{plain["median"]:.2f}'],
      [
        "of a matrix-vector product's bandwidth",
        f'{setting["bandwidth_fraction"]:.0%}',
      ],
      ['compile, plain loop, s', f'{setting["compile_seconds"]["plain"]:.1f}'],
    ]
    for size, cost in setting['call_cost'].items():
      if size != '1':
        body.append([f'v({size})', f'{cost:.2f}'])
    for row in setting['gammas']:
      name = f'gamma {row["gamma"]}: '
      excess = row['measured_over_predicted'] - 1
      body += [
        [f'{name}c inside a round', f'{row["cost_ratio"]:.3f}'],
        [f'{name}acceptance of the run', f'{row["acceptance_rate"]:.3f}'],
        [f'{name}loop over its rounds, as measured apart', f'{excess:+.1%}'],
        [f'{name}expected speed-up', f'{row["expected_speed_up"]:.2f}'],
        [f'{name}speed-up', f'{row["speed_up"]:.2f}'],
      ]
    parts.append(_table([['', 'measured'], *body]))
  return '\n\n'.join(parts)


def _render_calibration(found: Mapping[str, Any]) -> str:
  record = found['record']
  rate = record['acceptance_rate']
  parts = [
    f'Acceptance {rate["alpha"]:.3f} ± {rate["standard_error"]:.3f};'
    f' {_machine(record["machine"])}.'
  ]
  chosen = []
  num_gammas = len(found['choices'][0]['factors'])
  header, *body = [['gamma'], *([str(gamma)] for gamma in range(num_gammas))]
  for choice, costs in zip(found['choices'], record['costs'], strict=True):
    low, high = choice['interval']
    (row,) = costs['gammas']
    chosen.append(
      [
        str(choice['rows']),
        f'{row["cost_ratio"]:.3f}',
        str(choice['gamma']),
        f'{choice["expected_speed_up"]:.2f} ({low:.2f} to {high:.2f})',
      ]
    )
    name = f'{choice["rows"]} row{"s" * (choice["rows"] > 1)}'
    header += [f'v(gamma + 1), {name}', f'speed-up, {name}']
    for gamma, (line, factor) in enumerate(
      zip(body, choice['factors'], strict=True)
    ):
      cost = costs['call_cost'][str(gamma + 1)]
      line += [f'{cost:.2f}', f'{factor:.2f}']
  names = ['rows at once', 'c', 'gamma', 'expected speed-up']
  return '\n\n'.join(
    [*parts, _table([names, *chosen]), _table([header, *body])]
  )


def _render_alpha(record: Mapping[str, Any]) -> str:
  # Records of before there was lenience have none.
  lossy = any(row.get('lenience', 1) != 1 for row in record['rows'])
  silent = any(row.get('proposes', 1) != 1 for row in record['rows'])
  counted = all('tokens_per_call' in row for row in record['rows'])
  body = [
    [
      row['target'],
      row['draft'],
      f'{row["temperature"]:g}',
      *([f'{row["lenience"]:g}'] if lossy else []),
      with_error(row['alpha'], row['standard_error']),
      *([f'{row["proposes"]:.3f}'] if silent else []),
      with_error(row['observed'], row['observed_standard_error']),
      *([f'{row["tokens_per_call"]:.2f}'] if counted else []),
      f'{row["num_tokens"]:,}',
    ]
    for row in record['rows']
  ]
  columns = ['target', 'draft', 'T', 'alpha', 'observed', 'tokens']
  if counted:
    columns.insert(5, 'tokens a call')
  if silent:
    columns.insert(4, 'proposes')
  if lossy:
    columns.insert(3, 'lenience (below 1: lossy)')
  return f'{_machine(record["machine"])}.\n\n{_table([columns, *body])}'


def _render_throughput(record: dict[str, Any]) -> str:
  parts = [
    f'{record["examples"]:,} texts, batch {record["batch_size"]}, gamma'
    f' {record["gamma"]}, temperature {record["temperature"]:g};'
    f' {_machine(record["machine"])}.'
  ]
  tables = (
    throughput.way_rows,
    throughput.ratio_rows,
    throughput.look_rows,
    throughput.sweep_rows,
  )
  parts += [_table(made(record)) for made in tables if len(made(record)) > 1]
  if memory := record.get('memory'):
    early, late = memory['early'], memory['late']
    parts.append(
      f'Memory over {memory["examples"]:,} texts, early and late in the run:'
      f' {early["resident_bytes"] / 2**20:.0f} and'
      f' {late["resident_bytes"] / 2**20:.0f} MiB, {early["buffers"]} and'
      f' {late["buffers"]} arrays.'
    )
  return '\n\n'.join(parts)


_RENDERERS = {
  'benchmark': _render_benchmark,
  'calibration': _render_calibration,
  'alpha': _render_alpha,
  'throughput': _render_throughput,
}


def _machine(machine: Mapping[str, Any]) -> str:
  return (
    f'{machine["device"]}, {machine["cores"]} cores, JAX {machine["jax"]},'
    f' Python {machine["python"]}'
  )


def _table(rows: Sequence[Sequence[str]]) -> str:
  """Returns a Markdown table; columns of numbers are aligned to the right."""
  header, *body = [[cell.replace('|', r'\|') for cell in row] for row in rows]
  align = [
    '--:' if all(_NUMBER.fullmatch(row[column]) for row in body) else ':--'
    for column in range(len(header))
  ]
  return '\n'.join(f'| {" | ".join(row)} |' for row in (header, align, *body))


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
