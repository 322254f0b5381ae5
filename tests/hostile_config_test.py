"""Configurations that nobody should write: one line each, and nothing run."""

import dataclasses
import sys

import pytest

import gin_cli


@dataclasses.dataclass(frozen=True)
class Held:
  value: object = None


GIN = """
from __gin__ import dynamic_registration
import hostile_config_test as hostile
VALUE = None
hostile.Held.value = %VALUE
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """A working folder that holds run.gin."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'run.gin').write_text(GIN)
  (tmp_path / 'hostile_other.py').write_text('')
  monkeypatch.syspath_prepend(tmp_path)
  return tmp_path


def build(*flags, gin_file='run.gin'):
  gin_cli.load(gin_cli.parse_flags([f'--gin_file={gin_file}', *flags]))
  return gin_cli.build(Held)


def one_line(capsys, flags, function=lambda: None):
  """The error of a script that is given these flags, checked to be a line."""
  assert gin_cli.main(function, flags) == 2
  printed = capsys.readouterr().err
  assert printed.startswith('error: ') and printed.count('\n') == 1
  return printed


STATEMENTS = 'from __gin__ import dynamic_registration\nimport hostile_other'


@pytest.mark.parametrize(
  'value',
  [
    f"'a'\n{STATEMENTS}",
    f"'a'\n\n  # c\n{STATEMENTS}",
    f'"a"\r\n{STATEMENTS}',
    f'(1,)\n{STATEMENTS}',
    f'%VALUE\n{STATEMENTS}',
    f'@Held\n{STATEMENTS}',
    "'a'\nRun.value = 3",
    "'a'\nVALUE = 3",
    "'a'\ninclude 'other.gin'",
    "'a'\nRun:\n  value = 3",
    "'a' 3",
    "'a'; 3",
    '[1] [2]',
    '%VALUE %VALUE',
    '[' * 100_000,
    '[' * 100_000 + ']' * 100_000,
  ],
  ids=lambda value: value[:40].encode('unicode_escape').decode(),
)
def test_a_value_is_one_value(folder, capsys, value):
  (folder / 'other.gin').write_text(STATEMENTS)
  flags = ['--gin_file=run.gin', f'--gin.VALUE={value}']
  assert 'VALUE' in one_line(capsys, flags)
  assert 'hostile_other' not in sys.modules


@pytest.mark.parametrize(
  ('text', 'value'),
  [
    ("'''a\nb'''", 'a\nb'),
    ("'a' 'b'", 'ab'),
    ('[1,\n 2]', [1, 2]),
    ("{'a': (1, -2)}  # ids", {'a': (1, -2)}),
    ('import os', 'import os'),
    ('a\nimport os', 'a\nimport os'),
    ('%VALUE\\n', None),
  ],
)
def test_what_is_one_value(text, value):
  if value is None:
    with pytest.raises(ValueError):
      build(f'--gin.VALUE={text}')
  else:
    assert build(f'--gin.VALUE={text}').value == value
