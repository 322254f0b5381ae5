"""Holds JSON schemas against the official JSON Schema Test Suite.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python benchmarks/json_schema.py JSON-Schema-Test-Suite/tests/draft2020-12

An instance counts as the text that `json.dumps` writes, with `ensure_ascii` and
without. `format` is followed, while the suite's file `format` takes it for an
annotation; what it is to be is in `optional/format`.
"""

import argparse
import collections
import json
import pathlib
import re
import sys

from specdec_jax.rules import languages
from specdec_jax.rules.schema import language_of

_SECONDS = 60.0
_KINDS = ('as the suite', 'refused', 'valid, but not written', 'wrong')


def main() -> None:
  """Prints what is followed or refused whole, and a table of the rest."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path)
  folder = parser.parse_args().folder
  whole, refused, rows = [], [], []
  total = collections.Counter[str]()
  for path in sorted(folder.rglob('*.json')):
    counts, reasons = collections.Counter[str](), collections.Counter[str]()
    for group in json.loads(path.read_text()):
      for kind, reason in _outcomes(group):
        counts[kind] += 1
        reasons.update([reason] if kind == 'refused' else [])
        if kind in _KINDS[2:]:
          print(kind, path.stem, group['description'], reason, sep=' | ')
    total += counts
    name = f'`{path.relative_to(folder).with_suffix("")}`'
    causes = ', '.join(f'`{reason}` {n}' for reason, n in reasons.items())
    if [*counts] == [_KINDS[0]]:
      whole.append(f'{name} {counts.total()}')
    elif [*counts] == ['refused']:
      refused.append(f'{name} {counts.total()}')
    else:
      rows.append([name, *(counts[kind] for kind in _KINDS), causes])
  print('Followed whole:', ', '.join(whole) + '.\n')
  print('Refused whole:', ', '.join(refused) + '.\n')
  rows.append(['all files', *(total[kind] for kind in _KINDS), ''])
  print('| file |', ' | '.join(_KINDS), '| refused for |')
  print('| :-- |', '--: | ' * len(_KINDS) + ':-- |')
  for row in rows:
    print('|', ' | '.join(map(str, row)), '|')
  sys.exit(total['wrong'] > 0)


def _outcomes(group):
  """The kind of each instance of a group, and the reason if there is one."""
  tests = group['tests']
  try:
    with languages.deadline(_SECONDS):
      language = language_of(group['schema'])
  except ValueError as error:
    if 'a schema that has a value' in str(error):
      return [(_KINDS[2 if test['valid'] else 0], '') for test in tests]
    keyword = re.match(r'json_schema: (\S+) at #', str(error))
    return [('refused', keyword[1] if keyword else str(error)[:60])] * len(
      tests
    )
  outcomes = []
  for test in tests:
    texts = (json.dumps(test['data'], ensure_ascii=x) for x in (True, False))
    answers = {language.matches(text.encode()) for text in texts}
    is_right = answers == {test['valid']}
    kind = 0 if is_right else 2 if test['valid'] else 3
    outcomes.append((_KINDS[kind], '' if is_right else test['description']))
  return outcomes


if __name__ == '__main__':
  main()
