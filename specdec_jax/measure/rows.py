"""The arithmetic of a benchmark's rows."""

from typing import Any

from specdec_jax import analysis


def row(
  decode_len: int, median: dict[str, float], counted: dict[str, Any]
) -> dict[str, Any]:
  """One gamma: measured, predicted from its calls, predicted from its rate.

  Args:
    decode_len: tokens of a run.
    median: times in ms: call_1, call_{gamma + 1}, draft_, round_,
      speculative_{gamma}, and plain_loop, of one token.
    counted: gamma, rounds, histogram, acceptance_rate of the timed run.

  Returns:
    `counted` and: cost_ratio, c as one proposal costs it inside a round, in
    calls of the target over one token; cost_ratio_alone, with the drafter
    alone on the machine; speculative_ms and predicted_ms, rounds times what
    one costs; expected_speed_up by E(gamma, alpha) / (v(gamma + 1) + gamma c),
    for independent acceptance; speed_up as measured against the plain loop;
    t5x_style_speed_up against the one in T5X's style, None if it was not timed.
  """
  gamma = counted['gamma']
  one, verify = median['call_1'], median[f'call_{gamma + 1}']
  a_round = median[f'round_{gamma}']
  # A drafter that hides in the target's noise costs nothing, never less.
  cost_ratio = max(a_round - verify, 0.0) / gamma / one
  measured = median[f'speculative_{gamma}']
  predicted = counted['rounds'] * a_round
  stock = median.get('t5x_style_loop')
  # v is in calls; the plain loop's token costs its bookkeeping too.
  factor = analysis.measured_walltime_factor(
    counted['acceptance_rate'], gamma, cost_ratio, verify / one
  )
  return {
    **counted,
    'cost_ratio': cost_ratio,
    'cost_ratio_alone': median[f'draft_{gamma}'] / gamma / one,
    'speculative_ms': measured,
    'predicted_ms': predicted,
    'measured_over_predicted': measured / predicted,
    'expected_speed_up': float(factor),
    'speed_up': median['plain_loop'] * decode_len / measured,
    't5x_style_speed_up': stock and stock * decode_len / measured,
  }
