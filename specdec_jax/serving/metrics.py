"""What /metrics says: vLLM's names with a prefix of our own."""

import time
from typing import Any

import jax.monitoring

from specdec_jax.checks.packages import package
from specdec_jax.serving.rows import News
from specdec_jax.serving.scheduler import Scheduler

_COMPILED = '/jax/core/compile/backend_compile_duration'
_SECONDS = (
  *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
  *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Metrics:
  """Counters, gauges and histograms of one server.

  Attributes:
    requests: by the status of their answers.
  """

  def __init__(self, scheduler: Scheduler):
    """
    Raises:
      ValueError: prometheus_client is not installed.
    """
    self._client = client = package('A server', 'prometheus_client', 'serve')
    self.registry = client.CollectorRegistry()
    self._scheduler = scheduler
    # CPU seconds and resident bytes of the process, where the system says them.
    client.ProcessCollector(registry=self.registry)

    def made(kind: str, name: str, text: str, *labels: str, **more) -> Any:
      cls = getattr(client, kind)
      name = f'specdec:{name}'
      return cls(name, text, labels, registry=self.registry, **more)

    self._drafts = made('Counter', 'spec_decode_num_drafts', 'Drafts.')
    self._drafted = made(
      'Counter', 'spec_decode_num_draft_tokens', 'Tokens that were proposed.'
    )
    self._accepted = made(
      'Counter', 'spec_decode_num_accepted_tokens', 'Those that were accepted.'
    )
    self._tested = made(
      'Counter', 'spec_decode_num_tested_tokens', 'Those that were judged.'
    )
    self._passed = made(
      'Counter',
      'spec_decode_num_passed_tokens',
      'Those that passed; by those that were judged, the acceptance rate.',
    )
    self._by_place = made(
      'Counter',
      'spec_decode_num_accepted_tokens_per_pos',
      'Tokens accepted at each place of a draft.',
      'position',
    )
    self._rested = made(
      'Counter', 'fallback_rounds', 'Rounds in which the drafter rested.'
    )
    self._tokens = made('Counter', 'generation_tokens', 'Tokens of outputs.')
    self._prompts = made('Counter', 'prompt_tokens', 'Tokens of prompts.')
    self.requests = made('Counter', 'requests', 'Answered.', 'status')
    self._compiled = made(
      'Counter', 'compilations', 'Programs compiled after the start.'
    )
    running = made('Gauge', 'num_requests_running', 'Outputs in slots.')
    running.set_function(lambda: scheduler.num_running)
    waiting = made('Gauge', 'num_requests_waiting', 'Outputs in the queue.')
    waiting.set_function(lambda: scheduler.num_waiting)

    def seconds(name: str, text: str) -> Any:
      return made('Histogram', f'{name}_seconds', text, buckets=_SECONDS)

    self.first = seconds('time_to_first_token', 'Until the first text.')
    self.between = seconds('inter_token_latency', 'Between tokens of a stream.')
    self.whole = seconds('e2e_request_latency', 'Until the last token.')
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    if event == _COMPILED and self._scheduler.is_compiled:
      self._compiled.inc()

  def close(self) -> None:
    """Stops counting compilations."""
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def asked(self, num_prompt_tokens: int) -> None:
    """A request was taken."""
    self._prompts.inc(num_prompt_tokens)

  def ended(self, news: News) -> None:
    """An output is whole."""
    if news.completion is None:
      return
    stats = news.completion.stats
    self._tokens.inc(len(news.completion.tokens))
    if news.num_drafted:
      rested = stats.fallback_rounds
      self._drafts.inc(stats.num_target_calls - rested)
      self._rested.inc(rested)
      self._drafted.inc(news.num_drafted)
      self._accepted.inc(stats.num_accepted)
      self._tested.inc(stats.num_tested)
      self._passed.inc(stats.passed)
      for place in range(len(stats.histogram) - 1):
        rounds = sum(stats.histogram[place + 1 :])
        self._by_place.labels(position=str(place)).inc(rounds)

  def text(self) -> bytes:
    """All of it, as Prometheus reads it."""
    found: bytes = self._client.generate_latest(self.registry)
    return found


class Stopwatch:
  """Times of one request."""

  def __init__(self, metrics: Metrics):
    self._metrics = metrics
    self._begin = time.perf_counter()
    self._last: float | None = None

  def heard(self, news: News) -> None:
    """News of one of its outputs."""
    if not news.tokens:
      return
    now = time.perf_counter()
    if self._last is None:
      self._metrics.first.observe(now - self._begin)
    else:
      self._metrics.between.observe((now - self._last) / len(news.tokens))
    self._last = now

  def ended(self) -> None:
    """All of its outputs are whole."""
    self._metrics.whole.observe(time.perf_counter() - self._begin)
