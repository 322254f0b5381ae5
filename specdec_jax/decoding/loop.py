"""One of the loops with its models, as engines and pools run it.

The plain loop is here: one call of the target per token. It is the baseline
that every speed-up is measured against, so it is as fast as this library can
make it. The tests compare other outputs with its output.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import probs
from specdec_jax.decoding import beam_search, speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import Judge
from specdec_jax.decoding.state import DecodeState, PairParams, Request
from specdec_jax.drafters.base import Drafter
from specdec_jax.models.base import LanguageModel, Params, read_prompt, start_id
from specdec_jax.types import Draft, Generation


class Loop(NamedTuple):
  """The speculative loop, or the plain loop if there is no drafter.

  A request for beams is a beam search: its states are `beam_search.BeamState`s.

  Attributes:
    target: the model whose distribution the output has.
    drafter: the drafter; None for the plain loop, which ignores
      `PairParams.draft`.
    judge: decides which proposals are accepted; another function than the
      default is for measurements that force the acceptance.
  """

  target: LanguageModel
  drafter: Drafter | None = None
  judge: Judge = speculative.judge

  def start(self, params: PairParams, request: Request) -> Any:
    """Reads the inputs and returns the state before the first round."""
    if request.beams is not None:
      return beam_search.start(self.target, self._network, params, request)
    if self.drafter is None:
      return start_plain(self.target, params.target, request)
    return speculative.start(self.target, self.drafter, params, request)

  def step(
    self, params: PairParams, request: Request, state: Any
  ) -> tuple[Any, Draft | None]:
    """Runs one round; returns the state, and the draft if one was judged."""
    if request.beams is not None:
      return beam_search.step(
        self.target, self._network, params, request, state
      ), None
    if self.drafter is None:
      return step_plain(self.target, params.target, request, state), None
    return speculative.step(
      self.target, self.drafter, params, request, state, self.judge
    )

  def run(
    self,
    params: PairParams,
    request: Request,
    state: Any,
    max_rounds: jax.Array | int = decode_state.NO_ROUND_LIMIT,
  ) -> Any:
    """Runs rounds until all rows are finished, or `max_rounds` (int32[])."""

    def one_round(state):
      return self.step(params, request, state)[0]

    return decode_state.run_rounds(one_round, state, max_rounds)

  def decode(self, params: PairParams, request: Request) -> Generation:
    """The whole generation: `start`, all rounds and the result together."""
    state = self.run(params, request, self.start(params, request))
    return generation(request, state)

  @property
  def _network(self) -> LanguageModel | None:
    """The drafter's network, whose beams a beam search is proposed."""
    return self.drafter and self.drafter.network


def generation(request: Request, state: Any) -> Generation:
  """What came of a request, from its last state."""
  if request.beams is not None:
    return beam_search.generation(request, state)
  return decode_state.generation(request, state)


def start_plain(
  target: LanguageModel, params: Params, request: Request
) -> DecodeState:
  """Reads the inputs and returns the state before the first token."""
  cache = read_prompt(
    target, params, request.inputs, request.cache_slots, request.prompt
  )
  return decode_state.start(
    request, start_id(target), cache, drafter_state=None
  )


def step_plain(
  target: LanguageModel, params: Params, request: Request, state: DecodeState
) -> DecodeState:
  """Produces one token in every running row."""
  cache = target.rewind(state.target_cache, state.visible_length - 1)
  logits, cache = target.extend(params, cache, state.last_token[:, None])
  adjusted = decode_state.forbid_early_stops(logits, request, state)
  if request.greedy:
    tokens = probs.greedy_token(adjusted[:, 0])
  else:
    keys = decode_state.round_keys(request, state)
    rows = probs.standardise_batch(adjusted, request.sampling)[:, 0]
    tokens = jax.vmap(probs.sample)(rows, jax.vmap(probs.resample_key)(keys))
  one = jnp.ones_like(tokens)
  running = state.running.astype(jnp.int32)
  state = decode_state.append(request, state, tokens[:, None], one, logits)
  num_rounds = state.stats.num_rounds + running
  return state.replace(
    target_cache=cache,
    stats=state.stats.replace(
      num_rounds=num_rounds, histogram=num_rounds[:, None]
    ),
  )
