"""Progress of a training run: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping

import rich.console
import rich.progress


class Reporter:
  """Collects step metrics between lines. Use it as a context manager."""

  def __init__(
    self,
    steps: int,
    log: Callable[[str], None] | None = None,
  ):
    """
    Args:
      steps: steps of the whole run.
      log: gets each line; by default standard error.
    """
    self._steps = steps
    self._log = log
    self._console = rich.console.Console(stderr=True)
    self._bar = None
    if log is None and self._console.is_terminal:
      self._bar = rich.progress.Progress(
        rich.progress.TextColumn('{task.description}'),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=self._console,
      )
      self._task = self._bar.add_task('training', total=1.0)
    self._reset()

  def __enter__(self) -> 'Reporter':
    if self._bar is not None:
      self._bar.start()
    return self

  def __exit__(self, *unused) -> None:
    if self._bar is not None:
      self._bar.stop()

  def say(self, text: str) -> None:
    """Writes one line."""
    if self._log is not None:
      self._log(text)
    elif self._bar is not None:
      self._bar.console.print(text, highlight=False)
    else:
      print(text, file=sys.stderr, flush=True)

  def step(
    self,
    step: int,
    sums: Mapping[str, float],
    rate: float,
    norm: float,
    progress: float,
  ) -> None:
    """Adds one step's sums over tokens."""
    for name, value in sums.items():
      self._sums[name] = self._sums.get(name, 0.0) + value
    self._rate, self._norm = rate, norm
    if self._bar is not None:
      loss = sums['loss'] / max(sums['tokens'], 1.0)
      self._bar.update(
        self._task,
        completed=progress,
        description=f'step {step}/{self._steps} loss {loss:.3f}',
      )

  def line(self, step: int, elapsed_s: float, epochs: float) -> None:
    """Reports the means over all steps since the last line."""
    tokens = max(self._sums.get('tokens', 0.0), 1.0)
    seconds = max(time.monotonic() - self._since, 1e-9)
    means = ' '.join(
      f'{name} {value / tokens:.4f}'
      for name, value in self._sums.items()
      if name != 'tokens'
    )
    self.say(
      f'step {step}/{self._steps} {means} lr {self._rate:.2e}'
      f' grad_norm {self._norm:.2f} tokens/s {tokens / seconds:.0f}'
      f' epoch {epochs:.2f} min {elapsed_s / 60:.1f}'
    )
    self._reset()

  def evaluation(self, step: int, means: Mapping[str, float]) -> None:
    """Reports held-out means."""
    values = ' '.join(f'{name} {value:.4f}' for name, value in means.items())
    self.say(f'eval step {step} {values}')

  def _reset(self) -> None:
    self._sums: dict[str, float] = {}
    self._rate = self._norm = 0.0
    self._since = time.monotonic()
