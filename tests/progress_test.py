"""Long measurements say what goes on, where someone sees it."""

import io
import time

import rich.console

from specdec_jax.engine.completion import CompletionStats, total
from specdec_jax.measure import progress


def shown(**options) -> str:
  stream = io.StringIO()
  console = rich.console.Console(file=stream, width=100, **options)

  with progress.bar(console, 'Costs', 2) as bar:
    bar.say('Compiling, batch 1')
    bar._progress.refresh()  # or no time would have passed
    bar(2)
  return stream.getvalue()


def test_a_phase_is_named_on_a_terminal(capsys):
  assert 'Compiling, batch 1' in shown(force_terminal=True)
  assert shown(force_terminal=False) == ''
  assert capsys.readouterr().err == ''  # of what takes no time


def test_elsewhere_a_line_comes_now_and_then(capsys, monkeypatch):
  monkeypatch.setattr(progress, 'EVERY_S', 0.02)
  console = rich.console.Console(file=io.StringIO())
  with progress.status(console, 'Loading'):
    time.sleep(0.1)
  with progress.bar(console, 'Costs', 3) as bar:
    bar(2)
    bar.say('Compiling')
    time.sleep(0.1)
  assert console.file.getvalue() == ''
  err = capsys.readouterr().err
  assert 'Loading, 0 s\n' in err and 'Compiling: 2 of 3, 0 s\n' in err


def test_totals_of_outputs():
  found = total(
    [CompletionStats(5, 2, 4, 3, (0, 1, 1)), CompletionStats(3, 3, 2, 0, (2,))]
  )
  assert found == CompletionStats(8, 5, 6, 3, (2, 1, 1))
  assert (found.acceptance_rate, found.tokens_per_call) == (0.5, 1.6)
  assert total([]) == CompletionStats()
  assert total([]).acceptance_rate is total([]).tokens_per_call is None
