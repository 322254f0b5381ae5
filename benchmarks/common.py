"""What the scripts beside this file have in common."""

import concurrent.futures
import json
import multiprocessing
import pathlib
import resource

from specdec_jax import files, load
from specdec_jax.report import record
from specdec_jax.report.console import bar, console


def peak() -> float:
  """Returns the most megabytes that this process has had."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def alone(label: str, function, *args):
  """Calls a function in a process of its own, whose memory is then free."""
  spawn = multiprocessing.get_context('spawn')
  with (
    bar(console(), label),
    concurrent.futures.ProcessPoolExecutor(1, spawn) as pool,
  ):
    try:
      return pool.submit(function, *args).result()
    except concurrent.futures.BrokenExecutor as error:
      raise ValueError(f'{label}: its process ended: no memory?') from error


def kept(path: pathlib.Path, function, *args):
  """Returns what is in a JSON file, which a function makes if it is missing."""
  if not path.exists():
    files.write_json(path, alone(path.stem, function, *args))
  return json.loads(path.read_text())


def demo_pair():
  """The demo's target and its drafter, with their vocabulary."""
  return load('demo'), load('demo-draft')


def report(title, columns, rows, output=None) -> None:
  """Prints a table, and writes it for `scripts/update_readme.py` to show."""
  print('\n'.join(' | '.join(row) for row in [columns, *rows]))
  if output:
    content = {'title': title, 'columns': columns, 'rows': rows}
    files.write_json(output, record.new('table', content))
