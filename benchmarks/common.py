"""What the scripts beside this file have in common."""

from specdec_jax import files, load
from specdec_jax.report import record


def demo_pair():
  """The demo's target and its drafter, with their vocabulary."""
  return load('demo'), load('demo-draft')


def report(title, columns, rows, output=None) -> None:
  """Prints a table, and writes it for `scripts/update_readme.py` to show."""
  print('\n'.join(' | '.join(row) for row in [columns, *rows]))
  if output:
    content = {'title': title, 'columns': columns, 'rows': rows}
    files.write_json(output, record.new('table', content))
