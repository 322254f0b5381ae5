"""Texts through a pool of slots, whatever their number."""

from specdec_jax.engine.scheduler import PoolSettings


class Pooled:
  """Decodes with an engine as a run with continuous batching does."""

  def __init__(self, engine, settings=None):
    self.engine, self._settings = engine, settings or PoolSettings()

  def _request(self, texts, options):
    self._scheduler = self.engine.scheduler(self._settings)
    options = {'on_too_long': 'report'} | options
    return self.engine.text_request(texts, **options)

  @property
  def rounds(self):
    """Those of the last call."""
    return self._scheduler.rounds

  def generate(self, texts, **options):
    request = self._request(texts, options)
    return self._scheduler.generate(request)

  def run(self, texts, **options):
    request = self._request(texts, options)
    for index, (done,) in self._scheduler.run(request):
      yield index, done

  def warmup(self, texts, **options):
    request = self._request(texts, options)
    return self._scheduler.warmup(request)
