"""What was measured, with the machine that it holds for: JSON files of it."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specdec_jax import files
from specdec_jax.files import same_run
from specdec_jax.measure import environment

# Of the form of a file; those of before there were versions are read as 1.
VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Record(Mapping[str, Any]):
  """One measurement; a mapping of all that its file holds.

  Attributes:
    kind: what was measured, such as 'alpha'.
    content: name -> number, or whatever JSON has; settings are among them.
    machine: `environment.describe()` of where.
  """

  kind: str
  content: Mapping[str, Any]
  machine: Mapping[str, Any] = dataclasses.field(
    default_factory=environment.describe
  )

  def to_json(self) -> dict[str, Any]:
    """All of it, as its file has it."""
    machine = {'machine': dict(self.machine)} if self.machine else {}
    head = {'kind': self.kind, 'version': VERSION}
    return head | dict(self.content) | machine

  def __getitem__(self, name: str) -> Any:
    return self.to_json()[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self.to_json())

  def __len__(self) -> int:
    return len(self.to_json())

  @property
  def where(self) -> str:
    """Device and versions on one line."""
    of = self.machine
    return (
      f'{of["device"]}, {of["cores"]} cores, JAX {of["jax"]}, Python'
      f' {of["python"]}'
    )

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes it as JSON, whole or not at all; makes its folder.

    Raises:
      OSError: the folder cannot be made or written.
      TypeError: a value is not JSON.
    """
    files.write_json(path, self.to_json())


def load(path: str | os.PathLike[str], *kinds: str) -> Record:
  """Reads what `Record.save` wrote.

  Args:
    path: the file.
    *kinds: those that are expected; none expects any.

  Raises:
    ValueError: it is missing or broken, or of another kind or version.
  """
  path = os.fspath(path)
  try:
    with open(path, encoding='utf-8') as stream:
      found = json.load(stream)
  except (OSError, ValueError) as error:
    raise ValueError(f'The record {path!r} cannot be read: {error}.') from error
  kind = found.pop('kind', None) if isinstance(found, dict) else None
  if kind is None or (kinds and kind not in kinds):
    expected = f'a kind of {sorted(kinds)}' if kinds else 'a kind'
    raise ValueError(
      f'{path!r} is no such record: expected {expected}, got {kind!r}.'
    )
  if (version := found.pop('version', VERSION)) != VERSION:
    raise ValueError(
      f'{path!r} is of version {version!r}, this program reads {VERSION}.'
      ' Measure it again, or read it with the program that wrote it.'
    )
  machine = found.pop('machine', {})
  return Record(kind, found, machine)


def earlier(
  path: str | os.PathLike[str],
  kind: str,
  settings: Mapping[str, Any],
  had: Callable[[Record], Mapping[str, Any]],
  what_to_do: str,
) -> Record | None:
  """The record that an earlier run of these settings left, if there is one.

  Args:
    path: where it would be.
    kind: that it must have.
    settings: of this run.
    had: the settings that a record was made with; further ones do not count.
    what_to_do: a sentence for the user whose file is another one.

  Raises:
    ValueError: the file is no such record, or one of other settings.
  """
  path = os.fspath(path)
  if not os.path.exists(path):
    return None
  try:
    found = load(path, kind)
    before = had(found)
    before = {name: before.get(name) for name in settings}
  except (ValueError, TypeError, LookupError, AttributeError) as error:
    raise ValueError(
      f'{path!r} is no record of such a run ({error!r}). {what_to_do}'
    ) from error
  what = f'{path!r} was measured with other settings'
  same_run.check(before, settings, what, what_to_do)
  return found
