"""The metrics of a server, with vLLM's names but the prefix `specdec:`."""

from typing import Any, TypeVar

import jax.monitoring
import prometheus_client as client

from specdec_jax.engine.completion import Completion
from specdec_jax.serving.worker import Worker

_Metric = TypeVar('_Metric', client.Counter, client.Gauge, client.Histogram)
_COMPILED = '/jax/core/compile/backend_compile_duration'
_BELOW_ONE = 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5
_SECONDS = *_BELOW_ONE, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0

_COUNTERS = {
  'spec_decode_num_drafts': 'Drafts.',
  'spec_decode_num_draft_tokens': 'Tokens that were proposed.',
  'spec_decode_num_accepted_tokens': 'Proposals that were accepted.',
  'spec_decode_num_tested_tokens': 'Proposals that were judged.',
  'spec_decode_num_passed_tokens': 'Proposals that passed by themselves.',
  'fallback_rounds': 'Rounds in which the drafter rested.',
  'generation_tokens': 'Tokens of outputs.',
  'prompt_tokens': 'Tokens of prompts.',
  'compilations': 'Programs compiled after the start.',
}


class Metrics:
  """Counters, gauges and histograms of one server.

  Attributes:
    requests: counts requests by the status of their answers.
    first_token: seconds until the first token of a stream.
    between_tokens: seconds between tokens of a stream.
    end_to_end: seconds until the last token.
  """

  def __init__(self, worker: Worker):
    """Makes the metrics of a worker."""
    self._registry = client.CollectorRegistry()
    self._worker = worker
    # CPU seconds and resident bytes of the process, on systems that have them.
    client.ProcessCollector(registry=self._registry)

    def add(
      kind: type[_Metric], name: str, text: str, *labels: str, **more: Any
    ) -> _Metric:
      more['registry'] = self._registry
      return kind(f'specdec:{name}', text, labels, **more)

    def seconds(name: str, text: str) -> client.Histogram:
      return add(client.Histogram, f'{name}_seconds', text, buckets=_SECONDS)

    self._counters = {
      name: add(client.Counter, name, text) for name, text in _COUNTERS.items()
    }
    name = 'spec_decode_num_accepted_tokens_per_pos'
    text = 'Tokens accepted at each place of a draft.'
    self._by_place = add(client.Counter, name, text, 'position')
    text = 'Requests answered.'
    self.requests = add(client.Counter, 'requests', text, 'status')
    running = add(client.Gauge, 'num_requests_running', 'Outputs in slots.')
    running.set_function(lambda: worker.scheduler.num_running)
    waiting = add(client.Gauge, 'num_requests_waiting', 'Outputs in the queue.')
    waiting.set_function(lambda: worker.scheduler.num_waiting)
    self.first_token = seconds('time_to_first_token', 'Until the first text.')
    text = 'Between tokens of a stream.'
    self.between_tokens = seconds('inter_token_latency', text)
    self.end_to_end = seconds('e2e_request_latency', 'Until the last token.')
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
    if event == _COMPILED and self._worker.is_compiled:
      self._counters['compilations'].inc()

  def close(self) -> None:
    """Stops counting compilations."""
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def taken(self, num_prompt_tokens: int) -> None:
    """Counts the prompt tokens of a request that was queued."""
    self._counters['prompt_tokens'].inc(num_prompt_tokens)

  def ended(self, done: Completion) -> None:
    """Counts an output that has ended."""
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
    """Returns all metrics in the format of Prometheus."""
    return client.generate_latest(self._registry)
