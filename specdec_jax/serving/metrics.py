"""What /metrics says: vLLM's names with a prefix of our own."""

from typing import Any

import jax.monitoring
import prometheus_client as client

from specdec_jax.engine.completion import Completion
from specdec_jax.serving.worker import Worker

_COMPILED = '/jax/core/compile/backend_compile_duration'
_SECONDS = (
  *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
  *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)

_COUNTERS = {
  'spec_decode_num_drafts': 'Drafts.',
  'spec_decode_num_draft_tokens': 'Tokens that were proposed.',
  'spec_decode_num_accepted_tokens': 'Those that were accepted.',
  'spec_decode_num_tested_tokens': 'Those that were judged.',
  'spec_decode_num_passed_tokens': 'Those that passed, each by itself.',
  'fallback_rounds': 'Rounds in which the drafter rested.',
  'generation_tokens': 'Tokens of outputs.',
  'prompt_tokens': 'Tokens of prompts.',
  'compilations': 'Programs compiled after the start.',
}


class Metrics:
  """Counters, gauges and histograms of one server.

  Attributes:
    requests: by the status of their answers.
  """

  def __init__(self, worker: Worker):
    self.registry = client.CollectorRegistry()
    self._worker = worker
    # CPU seconds and resident bytes of the process, where the system says them.
    client.ProcessCollector(registry=self.registry)

    def made(kind: str, name: str, text: str, *labels: str, **more) -> Any:
      cls = getattr(client, kind)
      name = f'specdec:{name}'
      return cls(name, text, labels, registry=self.registry, **more)

    self._counters = {
      name: made('Counter', name, text) for name, text in _COUNTERS.items()
    }
    self._by_place = made(
      'Counter',
      'spec_decode_num_accepted_tokens_per_pos',
      'Tokens accepted at each place of a draft.',
      'position',
    )
    self.requests = made('Counter', 'requests', 'Answered.', 'status')
    running = made('Gauge', 'num_requests_running', 'Outputs in slots.')
    running.set_function(lambda: worker.num_running)
    waiting = made('Gauge', 'num_requests_waiting', 'Outputs in the queue.')
    waiting.set_function(lambda: worker.num_waiting)

    def seconds(name: str, text: str) -> Any:
      return made('Histogram', f'{name}_seconds', text, buckets=_SECONDS)

    self.first = seconds('time_to_first_token', 'Until the first text.')
    self.between = seconds('inter_token_latency', 'Between tokens of a stream.')
    self.whole = seconds('e2e_request_latency', 'Until the last token.')
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    if event == _COMPILED and self._worker.is_compiled:
      self._counters['compilations'].inc()

  def close(self) -> None:
    """Stops counting compilations."""
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def taken(self, num_prompt_tokens: int) -> None:
    """A request was taken."""
    self._counters['prompt_tokens'].inc(num_prompt_tokens)

  def ended(self, done: Completion) -> None:
    """An output is whole."""
    stats = done.stats
    rested = stats.fallback_rounds
    counts = {'generation_tokens': len(done.tokens)}
    if stats.num_drafted:
      counts |= {
        'spec_decode_num_drafts': stats.num_target_calls - rested,
        'fallback_rounds': rested,
        'spec_decode_num_draft_tokens': stats.num_drafted,
        'spec_decode_num_accepted_tokens': stats.num_accepted,
        'spec_decode_num_tested_tokens': stats.num_tested,
        'spec_decode_num_passed_tokens': stats.num_passed,
      }
      for place in range(len(stats.histogram) - 1):
        rounds = sum(stats.histogram[place + 1 :])
        self._by_place.labels(position=str(place)).inc(rounds)
    for name, count in counts.items():
      self._counters[name].inc(count)

  def text(self) -> bytes:
    """All of it, as Prometheus reads it."""
    return client.generate_latest(self.registry)
