"""Texts through a pool of slots, whatever their number."""

from specdec_jax.engine.scheduler import PoolSettings


class Pooled:
  """Decodes with an engine as a run with continuous batching does."""

  def __init__(self, engine, settings=None):
    self.engine, self._settings = engine, settings or PoolSettings()
    self.rounds = {}

  def _begun(self, texts, options):
    options = {'on_too_long': 'report'} | options
    return self.engine.scheduler(self._settings), self.engine.text_request(
      texts, **options
    )

  def generate(self, texts, **options):
    scheduler, request = self._begun(texts, options)
    done = scheduler.generate(request)
    self.rounds = scheduler.rounds
    return done

  def run(self, texts, **options):
    scheduler, request = self._begun(texts, options)
    for index, (done,) in scheduler.run(request):
      self.rounds = scheduler.rounds
      yield index, done

  def warmup(self, texts, **options):
    scheduler, request = self._begun(texts, options)
    return scheduler.warmup(request)
