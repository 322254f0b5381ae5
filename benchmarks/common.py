"""What the scripts beside this file have in common."""

import gin

from specdec_jax import files, load
from specdec_jax.cli import gin_flags
from specdec_jax.measure import record


def demo_pair():
  """The demo's target and its drafter, with their vocabulary."""
  gin_flags.load(['--gin_file=gin/models/demo_pair.gin'])
  models = []
  for scope in ('target', 'draft'):
    with gin.config_scope(scope):
      models.append(gin.get_configurable(load)(tokenizer='demo/vocab.model'))
  gin.clear_config()
  return models


def report(title, columns, rows, output=None) -> None:
  """Prints a table, and writes it for `scripts/update_readme.py` to show."""
  print('\n'.join(' | '.join(row) for row in [columns, *rows]))
  if output:
    content = {'title': title, 'columns': columns, 'rows': rows}
    files.write_json(output, record.new('table', content))
