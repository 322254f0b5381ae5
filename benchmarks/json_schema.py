"""Holds JSON schemas against the official JSON Schema Test Suite.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python benchmarks/json_schema.py JSON-Schema-Test-Suite/tests/draft2020-12

For each keyword the number of instances whose text, as `json.dumps` writes it,
is accepted if and only if it is valid, and of those whose schema is refused,
with what it is refused for. Each wrong one is named.
"""

import argparse
import collections
import json
import pathlib
import re

from specdec_jax.rules import languages
from specdec_jax.rules.schema import language_of

_SECONDS = 20.0


def main() -> None:
  """Prints the table of a folder of the suite."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path)
  folder = parser.parse_args().folder
  rows = ['| keyword | as the suite | refused | wrong | refused for |']
  rows.append('| :-- | --: | --: | --: | :-- |')
  total = collections.Counter[str]()
  for path in sorted(folder.rglob('*.json')):
    counts, reasons = collections.Counter[str](), collections.Counter[str]()
    for group in json.loads(path.read_text()):
      outcome = outcomes(group['schema'], [t['data'] for t in group['tests']])
      for test, accepted in zip(group['tests'], outcome, strict=True):
        if isinstance(accepted, str):
          reasons[accepted] += 1
        good = 'right' if accepted == test['valid'] else 'wrong'
        kind = 'refused' if isinstance(accepted, str) else good
        counts[kind] += 1
        if kind == 'wrong':
          print(path.stem, '|', group['description'], '|', test['description'])
    total += counts
    name = path.relative_to(folder).with_suffix('')
    why = ', '.join(f'{key} {n}' for key, n in reasons.most_common())
    rows.append(_row(name, counts, why))
  print(*rows, _row('all', total, ''), sep='\n')


def _row(name, counts, why):
  numbers = (counts[kind] for kind in ('right', 'refused', 'wrong'))
  return f'| {name} | {" | ".join(map(str, numbers))} | {why} |'


def outcomes(schema, instances) -> list[bool | str]:
  """Whether each instance is accepted, or what its schema is refused for."""
  try:
    with languages.deadline(_SECONDS):
      language = language_of(schema)
  except ValueError as error:
    message = str(error)
    named = re.match(r'json_schema: (\S+) at #', message)
    if 'a schema that has a value' in message:
      return [False] * len(instances)
    return [named[1] if named else message[:60]] * len(instances)
  return [
    'spelling' if len(answers) > 1 else answers.pop()
    for instance in instances
    for answers in [
      {
        language.matches(json.dumps(instance, ensure_ascii=flag))
        for flag in (True, False)
      }
    ]
  ]


if __name__ == '__main__':
  main()
