"""One of the two loops with its models: what an engine and a pool run."""

from typing import NamedTuple

import jax

from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.decoding.state import DecodeState, Request
from specdec_jax.drafters.base import Drafter
from specdec_jax.models.base import LanguageModel
from specdec_jax.types import Generation


class Loop(NamedTuple):
  """Calls the speculative loop, or without a drafter the plain one.

  Attributes:
    target: whose distribution the output has.
    drafter: None for the plain loop, to which the parameters' `draft` is
      nothing.
  """

  target: LanguageModel
  drafter: Drafter | None = None

  def start(self, params: PairParams, request: Request) -> DecodeState:
    """The state before the first round."""
    if self.drafter is None:
      return autoregressive.start(self.target, params.target, request)
    return speculative.start(self.target, self.drafter, params, request)

  def step(
    self, params: PairParams, request: Request, state: DecodeState
  ) -> DecodeState:
    """One round."""
    if self.drafter is None:
      return autoregressive.step(self.target, params.target, request, state)
    return speculative.step(self.target, self.drafter, params, request, state)

  def run(
    self,
    params: PairParams,
    request: Request,
    state: DecodeState,
    max_rounds: jax.Array | int,
  ) -> DecodeState:
    """Rounds until every row is finished or `max_rounds` (int32[]) ran."""
    if self.drafter is None:
      return autoregressive.run(
        self.target, params.target, request, state, max_rounds
      )
    return speculative.run(
      self.target, self.drafter, params, request, state, max_rounds
    )

  def decode(self, params: PairParams, request: Request) -> Generation:
    """The whole generation."""
    if self.drafter is None:
      return autoregressive.decode(self.target, params.target, request)
    return speculative.decode(self.target, self.drafter, params, request)
