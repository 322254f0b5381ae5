"""Configurations that gin makes, as the library's are."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
  """A frozen dataclass, as all of the library's configurations are."""

  width: int = 1
  depth: int = 1

  def __post_init__(self):
    if self.width < 0:
      raise ValueError(f'width: expected >= 0, got {self.width}')


@dataclasses.dataclass(frozen=True)
class Run:
  target: Size
  draft: Size
  path: object = 'none'
  flag: bool = False
