"""What kernels and bytes of a GPU's programs predict of their time."""

import dataclasses
from typing import Any

from specdec_jax import analysis
from specdec_jax.checks.arguments import check_at_least
from specdec_jax.measure import memory
from specdec_jax.measure.compiled import devices
from specdec_jax.paper import printed


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnGpu:
  """For which GPU a program is compiled, and what is taken for its costs.

  Attributes:
    device: name of a GPU in `devices.KNOWN`.
    gb_per_s: bandwidth of its memory, 1e9 bytes per second; None is what
      `devices.KNOWN` says.
    kernel_us: microseconds per kernel, beside the time of its bytes.
    conditional_us: microseconds per conditional, which waits for the host.
    wait_us: microseconds that a kernel's programs wait for each other.

  Raises:
    ValueError: a number is negative, or the device is no GPU that is known.
  """

  device: str = 'h200'
  gb_per_s: float | None = None
  kernel_us: float = 2.5
  conditional_us: float = 10.0
  wait_us: float = 1.5

  def __post_init__(self):
    check_at_least(self, kernel_us=0.0, conditional_us=0.0, wait_us=0.0)
    if self.gb_per_s is None:
      object.__setattr__(self, 'gb_per_s', self.gpu.bytes_per_s / 1e9)

  @property
  def gpu(self) -> devices.Gpu:
    """The device."""
    found = devices.find(self.device)
    if not isinstance(found, devices.Gpu):
      raise ValueError(
        f'{type(self).__name__}.device = {self.device!r} is no GPU, and only'
        " kernels of a GPU are counted. Take 'h200'."
      )
    return found


def predict(
  config: Any, row: printed.Table2Row, params, request, programs
) -> dict[str, Any]:
  """Times of a token and of a round, and the factor that follows.

  A time is bytes over bandwidth, and a cost for each kernel, conditional and
  wait of a kernel's programs for each other.
  What a kernel writes is counted once: the next one finds it in the cache.

  Args:
    config: a `PairCheckConfig`.
    row: of Table 2.
    params: shapes of the parameters of both models.
    request: likewise of the speculative loop's request.
    programs: records of 'plain_run' and 'speculative_run'.

  Returns:
    The row's 'costs': of a 'token' of the plain loop, of a 'round', of a draft
    'step' (its kernels alone; None where the program has no loop of them) and
    of a token of 'T5X', None unless it is known; the 'walltime_factor' over the
    plain loop, over T5X, and by bytes alone.
  """
  draft = config.drafts[row.draft]
  one, several = (
    memory.call_bytes(config.target, params.target, request, size).total
    for size in (1, row.gamma + 1)
  )
  proposals = memory.draft_round_bytes(draft, params.draft, request)
  plain, spec = (
    programs[name]['launched'] for name in ('plain_run', 'speculative_run')
  )
  costs: dict[str, Any] = {
    'token': cost(config, one, plain['round']),
    'round': cost(config, several + proposals, spec['round']),
    'step': spec.get('step'),
    'T5X': None,
  }
  if costs['step']:
    costs['step'] = cost(config, proposals / row.gamma, costs['step'])
  if config.t5x_kernels:
    costs['T5X'] = cost(config, one, {'kernels': config.t5x_kernels})
  tokens = float(analysis.expected_tokens(row.acceptance_rate, row.gamma))
  round_ms = costs['round']['ms']
  factors = {'plain': tokens * costs['token']['ms'] / round_ms}
  if costs['T5X']:
    factors['T5X'] = tokens * costs['T5X']['ms'] / round_ms
  factors['bytes'] = tokens * one / (several + proposals)
  return {'costs': costs, 'walltime_factor': factors}


def cost(config: Any, read: float, launched: dict[str, Any]) -> dict[str, Any]:
  """What some kernels take, in milliseconds, and of what that is made.

  Args:
    config: a `PairCheckConfig`.
    read: bytes of weights and caches that they read.
    launched: `kernels.summary` of them.
  """
  count = launched['kernels'] + launched.get('branch_kernels', 0)
  conditionals = launched.get('conditionals', 0)
  waits = launched.get('waits', 0)
  written = launched.get('written_bytes', 0) + launched.get('updated_bytes', 0)
  starting = count * config.kernel_us + conditionals * config.conditional_us
  starting += waits * config.wait_us
  moving = (read + written) / config.gb_per_s / 1e3
  return dict(launched) | {
    'read_bytes': read,
    'bytes_ms': moving / 1e3,
    'ms': (starting + moving) / 1e3,
  }
