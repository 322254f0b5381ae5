"""Where the time of a file in batches goes, by JAX's profiler.

  python benchmarks/profile_batch.py FILE --rows 32 --output FILE.json

The demo's target decodes plainly. Each row of the table is a kind of XLA's
operations in one program, and the time that it is at work a token; operations
that call others, such as loops, are left out. The last row is the wall time.
An operation runs on several threads, so that the rows can add up to more.
"""

import argparse
import collections
import gzip
import json
import pathlib
import re
import tempfile
import time

import jax
from common import demo_pair, report

from specdec_jax import Engine
from specdec_jax.text.tasks import read_prompts

_MOST = 16  # kinds in the table
_CALLERS = ('while', 'call', 'conditional', 'tuple', 'Thunk')


def kinds_of(folder: pathlib.Path) -> collections.Counter[tuple[str, str]]:
  """Program and kind of operation -> microseconds."""
  (path,) = folder.rglob('*.trace.json.gz')
  events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
  found: collections.Counter[tuple[str, str]] = collections.Counter()
  for event in events:
    program = event.get('args', {}).get('hlo_module')
    kind = re.sub(r'[.\d]+$', '', event.get('name', ''))
    if program and not kind.startswith(_CALLERS):
      found[re.sub(r'[.\d]+$', '', program), kind] += event['dur']
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('file')
  parser.add_argument('--rows', type=int, default=32)
  parser.add_argument('--output')
  flags = parser.parse_args()
  texts = read_prompts(flags.file, lambda text: len(text.strip()))
  target, _ = demo_pair()
  engine = Engine(target, max_decode_len=120, batch_size=flags.rows)
  engine.generate(texts)
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      begin = time.perf_counter()
      done = engine.generate(texts)
      wall = time.perf_counter() - begin
    found = kinds_of(pathlib.Path(folder))
  tokens = sum(len(one.tokens) for one in done)
  listed = found.most_common(_MOST)
  listed.append((('others', ''), found.total() - sum(x for _, x in listed)))
  rows = [
    [program, kind, f'{time_us / tokens:.1f}', f'{time_us / 1e6 / wall:.0%}']
    for (program, kind), time_us in [*listed, (('wall', ''), 1e6 * wall)]
  ]
  title = f'{len(texts)} lines, {flags.rows} rows, demo target, {tokens} tokens'
  columns = ['program', 'operations', 'us a token', 'of the wall time']
  report(title, columns, rows, flags.output)


if __name__ == '__main__':
  main()
