"""Tables and records: every form shows the same, and files are checked."""

import io
import json
import re
import time

import pytest
import rich.console

from specdec_jax.engine.completion import CompletionStats, total
from specdec_jax.report import console as consoles
from specdec_jax.report import record
from specdec_jax.report.record import finish
from specdec_jax.report.table import Column, Table

NUMBERS = Column('call, ms', '.2f'), Column('rate', '.1%')
TABLE = Table(
  'Costs [bold]',
  ['drafter', *NUMBERS, 'paper', 'notes'],
  [['a | b', 1.23456, 0.5, None, ''], ['[red]<c>', 20, None, None, 'x\ny']],
  ['A note.'],
)


def shown(table: Table, width: int) -> str:
  stream = io.StringIO()
  rich.console.Console(file=stream, width=width).print(table)
  return stream.getvalue()


def test_markdown():
  assert TABLE.markdown().splitlines() == [
    '| drafter | call, ms | rate | paper | notes |',
    '| :-- | --: | --: | --: | :-- |',
    '| a \\| b | 1.23 | 50.0% | - |  |',
    '| [red]&lt;c> | 20.00 | - | - | x y |',
  ]


def test_a_console_gets_what_says_something():
  text = shown(TABLE, 100)
  assert 'Costs [bold]' in text and '[red]<c>' in text
  assert 'paper' not in text and '20.00' in text
  assert text.rstrip().endswith('A note.')
  many = Table('', ['text', *['some number'] * 5], [['x' * 60, *[1.25] * 5]])
  narrow = shown(many, 60)
  assert max(map(len, narrow.splitlines())) <= 60
  assert narrow.count(' 1.25 ') == 5, 'texts give way, numbers are whole'


def test_json_and_back():
  back = Table.from_json(json.loads(json.dumps(TABLE.to_json())))
  assert back.markdown() == TABLE.markdown()
  assert back.title == TABLE.title and list(back.notes) == ['A note.']
  with pytest.raises(ValueError, match=r"'t': expected 2 cells, got \[3\]"):
    Table('t', ['a', 'b'], [[1, 2], [3]])


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch):
  monkeypatch.delenv('FORCE_COLOR', raising=False)
  monkeypatch.setenv('COLUMNS', '70')
  assert consoles.console().width == 70
  monkeypatch.delenv('COLUMNS')
  piped = consoles.console()
  with piped.capture() as captured:
    piped.print(Table('t', ['a', 'b'], [['x' * 200, 'y' * 200]]))
  (row,) = (line for line in captured.get().splitlines() if 'x' in line)
  assert 'x' * 200 in row and 'y' * 200 in row and len(row) < 420


def test_a_record_and_its_file(tmp_path):
  path = tmp_path / 'new' / 'a.json'
  made = record.new('alpha', {'rows': [1]})
  table = Table('', [], [])
  finish(str(path), rich.console.Console(quiet=True), made, table)
  assert made == json.loads(path.read_text()) == record.load(path, 'alpha')
  assert made['rows'] == [1] and made['machine']['cores'] > 0


def test_what_is_no_record_is_named(tmp_path):
  path = tmp_path / 'x.json'
  for text, words in (
    (None, 'cannot be read'),
    ('{"kind": "al', 'is not JSON'),
    ('[]', r'\[\]'),
    ('{"kind": "decode"}', 'kind.*decode'),
    ('{"kind": "alpha", "version": 2}', 'version.*2'),
  ):
    if text is not None:
      path.write_text(text)
    with pytest.raises(ValueError, match=f'x.json.*{words}'):
      record.load(path, 'alpha')
  for text in ('', '{"kind": "alpha", "settings": 1}'):
    path.write_text(text)
    with pytest.raises(ValueError, match='x.json.*Remove it'):
      record.earlier(path, 'alpha', {'a': 1})


@pytest.mark.parametrize('is_terminal', [True, False])
def test_a_bar_is_for_a_terminal(is_terminal, capsys, monkeypatch):
  """Elsewhere a line comes now and then, of what takes some time."""
  monkeypatch.setattr(consoles, 'EVERY_S', 0.02)
  options = {'file': io.StringIO(), 'width': 100}
  console = rich.console.Console(**options, force_terminal=is_terminal)
  with consoles.bar(console, 'Loading'):
    time.sleep(0.1)
  with consoles.bar(console, 'Costs', 9, 3) as advance:
    time.sleep(0.1)
    advance(0.5)
    advance(0.5)
    time.sleep(0.2)
    advance()
    time.sleep(0.1)
  shown, err = options['file'].getvalue(), capsys.readouterr().err
  assert ('Costs' in shown) == is_terminal
  if not is_terminal:
    assert 'Loading, 0 s\n' in err and 'Costs: 3 of 9, 0 s\n' in err
  # What was made before, and what came together at first, is no pace.
  pace = r'5 of 9, (\d+(\.\d+)?) a second, 0:00:\d\d left'
  (rate, _), *_ = re.findall(pace, shown if is_terminal else err)
  assert 0.1 < float(rate) <= 1 / 0.2  # three digits: 4.998 is shown as 5


def test_totals_of_outputs():
  first = CompletionStats(5, 2, 4, 3, (0, 1, 1), 3)
  found = total([first, CompletionStats(3, 3, 2, 0, (2,))])
  assert found == CompletionStats(8, 5, 6, 3, (2, 1, 1), 3)
  assert total([]) == CompletionStats()
  assert total([]).acceptance_rate is total([]).tokens_per_call is None
