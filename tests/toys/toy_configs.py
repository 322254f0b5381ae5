"""Configurations that gin makes, as the library's are."""

import dataclasses

from specdec_jax.checks.fields import Checked
from specdec_jax.types import Count


@dataclasses.dataclass(frozen=True)
class Size(Checked):
  """A frozen dataclass, as all of the library's configurations are."""

  width: Count = 1
  depth: int = 1


@dataclasses.dataclass(frozen=True)
class Run:
  target: Size
  draft: Size
  path: object = 'none'
  flag: bool = False
