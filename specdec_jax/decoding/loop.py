"""A decoding loop with its models, as engines and pools run it.

The plain loop is the speculative one without proposals: one call of the target
per token. It is the baseline that every speed-up is measured against.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding import beam_search, speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.decoding.speculative import Judge
from specdec_jax.decoding.state import PairParams
from specdec_jax.drafters.base import NO_DRAFTER, Drafter
from specdec_jax.models.base import LanguageModel
from specdec_jax.request import Request
from specdec_jax.types import Draft, Generation


class Loop(NamedTuple):
  """The speculative loop, or the plain loop if there is no drafter.

  For a request with beams it runs a beam search, whose states are
  `beam_search.BeamState`s.

  Attributes:
    target: the model whose distribution the output has.
    drafter: the drafter; None runs the plain loop, whose requests have a gamma
      of 0, and which ignores `PairParams.draft`.
    judge: the function that decides which proposals are accepted. Measurements
      with a forced acceptance rate give their own function.
  """

  target: LanguageModel
  drafter: Drafter | None = None
  judge: Judge = speculative.judge

  def start(self, params: PairParams, request: Request) -> Any:
    """Reads the inputs and returns the state before the first round."""
    if request.beams is not None:
      return beam_search.start(self.target, self._network, params, request)
    drafter = self.drafter or NO_DRAFTER
    return speculative.start(self.target, drafter, params, request)

  def step(
    self, params: PairParams, request: Request, state: Any
  ) -> tuple[Any, Draft | None]:
    """Runs one round; returns the new state and the draft.

    The draft is None for beams and for plain decoding.
    """
    target, drafter = self.target, self.drafter or NO_DRAFTER
    if request.beams is not None:
      network = self._network
      return beam_search.step(target, network, params, request, state), None
    state, draft = speculative.step(
      target, drafter, params, request, state, self.judge
    )
    return state, draft if self.drafter else None

  def run(
    self,
    params: PairParams,
    request: Request,
    state: Any,
    max_rounds: jax.Array | int = decode_state.NO_ROUND_LIMIT,
  ) -> Any:
    """Runs rounds until all rows are finished, or `max_rounds` (int32[])."""

    def unfinished(carry):
      num_rounds, state = carry
      return (num_rounds < max_rounds) & jnp.any(state.running)

    def one_round(carry):
      num_rounds, state = carry
      return num_rounds + 1, self.step(params, request, state)[0]

    return lax.while_loop(unfinished, one_round, (jnp.int32(0), state))[1]

  def decode(self, params: PairParams, request: Request) -> Generation:
    """Decodes a request from `start` to the end."""
    state = self.run(params, request, self.start(params, request))
    return generation(request, state)

  @property
  def _network(self) -> LanguageModel | None:
    """The network that proposes beams; None in a plain search."""
    return self.drafter and self.drafter.network


def generation(request: Request, state: Any) -> Generation:
  """Returns the outputs of a request from its last state."""
  if request.beams is not None:
    return beam_search.generation(request, state)
  return decode_state.generation(request, state)
