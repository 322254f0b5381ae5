"""Long measurements say what goes on, where someone sees it."""

import io

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


def test_a_phase_is_named_on_a_terminal_alone():
  assert 'Compiling, batch 1' in shown(force_terminal=True)
  assert shown(force_terminal=False) == ''


def test_totals_of_outputs():
  found = total(
    [CompletionStats(5, 2, 4, 3, (0, 1, 1)), CompletionStats(3, 3, 2, 0, (2,))]
  )
  assert found == CompletionStats(8, 5, 6, 3, (2, 1, 1))
  assert (found.acceptance_rate, found.tokens_per_call) == (0.5, 1.6)
  assert total([]) == CompletionStats()
  assert total([]).acceptance_rate is total([]).tokens_per_call is None
