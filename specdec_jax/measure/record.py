"""Records: JSON files of measurements, with the machine that was measured."""

import dataclasses
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from specdec_jax import files
from specdec_jax.checks.fields import unexpected
from specdec_jax.files import same_run
from specdec_jax.models import backend

# Version of the file format; files without a version are read as 1.
VERSION = 1


def describe() -> dict[str, Any]:
  """Returns device, cores, versions and load, to be kept with a measurement."""
  device = jax.devices()[0]
  is_cpu = device.platform == 'cpu'
  return {
    'device': backend.cpu_name() if is_cpu else device.device_kind,
    'platform': device.platform,
    'devices': jax.device_count(),
    'cores': backend.num_cores(),
    **({'isa': backend.instruction_set()} if is_cpu else {}),
    'jax': jax.__version__,
    'python': platform.python_version(),
    # Processes that wanted a core in the last minute, this one included.
    'load_average': (
      round(os.getloadavg()[0], 2) if hasattr(os, 'getloadavg') else None
    ),
  }


def seconds_since_start() -> float | None:
  """Seconds since this process began, imports included; None if unknown."""
  stat, uptime = pathlib.Path('/proc/self/stat'), pathlib.Path('/proc/uptime')
  if not (stat.exists() and uptime.exists()):
    return None  # not a Linux
  # Field 22 of the file. Counted from after the process's name, which is in
  # brackets and may hold blanks.
  fields = stat.read_text().rpartition(')')[2].split()
  began = int(fields[19]) / os.sysconf('SC_CLK_TCK')
  return float(uptime.read_text().split()[0]) - began


@dataclasses.dataclass(frozen=True, eq=False)
class Record(Mapping[str, Any]):
  """One measurement; a mapping of everything in its file.

  Attributes:
    kind: what was measured, such as 'alpha'.
    content: name -> JSON value: results and settings.
    machine: `describe()` of the machine.
  """

  kind: str
  content: Mapping[str, Any]
  machine: Mapping[str, Any] = dataclasses.field(default_factory=describe)

  def to_json(self) -> dict[str, Any]:
    """The whole record, as in its file."""
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
    isa = f'{of["isa"]}, ' if 'isa' in of else ''
    cores = f'{of["cores"]} core{"" if of["cores"] == 1 else "s"}'
    return (
      f'{of["device"]}, {isa}{cores}, JAX {of["jax"]}, Python {of["python"]}'
    )

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the record as JSON, whole or not at all; makes its folder.

    Raises:
      OSError: the folder cannot be made or written.
      TypeError: a value is not JSON.
    """
    files.write_json(path, self.to_json())


def load(path: str | os.PathLike[str], *kinds: str) -> Record:
  """Reads a record that `Record.save` wrote.

  Args:
    path: the file.
    *kinds: the kinds that are expected; without them any kind is.

  Raises:
    ValueError: the file is missing or broken, or of another kind or version.
  """
  path = os.fspath(path)
  try:
    found = files.read_json(path)
  except (OSError, ValueError) as error:
    raise ValueError(f'The record {path!r} cannot be read: {error}.') from error
  kind = found.pop('kind', None) if isinstance(found, dict) else None
  if kind is None or (kinds and kind not in kinds):
    expected = f'one of {sorted(kinds)}' if kinds else 'one'
    raise unexpected(f'{path}: kind', expected, kind)
  if (version := found.pop('version', VERSION)) != VERSION:
    raise unexpected(
      f'{path}: version', str(VERSION), version, 'Measure it again.'
    )
  machine = found.pop('machine', {})
  return Record(kind, found, machine)


def earlier(
  path: str | os.PathLike[str],
  kind: str,
  settings: Mapping[str, Any],
  advice: str,
) -> Record | None:
  """The record that an earlier run with these settings left, or None.

  Args:
    path: where the record would be.
    kind: the kind that it must have.
    settings: settings of this run; others of the record are ignored.
    advice: a sentence that tells the user what to do with another file.

  Raises:
    ValueError: the file is not such a record, or has other settings.
  """
  path = os.fspath(path)
  if not os.path.exists(path):
    return None
  try:
    record = load(path, kind)
  except ValueError as error:
    raise ValueError(f'{error} {advice}') from error
  before = record.get('settings')
  if not isinstance(before, dict):
    raise unexpected(f'{path}: settings', 'those of a run', before, advice)
  before = {name: before.get(name) for name in settings}
  what = f'{path!r} was measured with other settings'
  same_run.check(before, settings, what, advice)
  return record
