"""Begins and ends measurements, whose records are JSON files.

A record is a dict with `kind`, `version`, settings, results and `machine`.
"""

import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax
import rich.console

from specdec_jax import files
from specdec_jax.checks.fields import unexpected
from specdec_jax.files import same_run
from specdec_jax.models import backend
from specdec_jax.report import console as consoles
from specdec_jax.report import plot
from specdec_jax.report.table import Table
from specdec_jax.text.tasks import reading

Record = dict[str, Any]
# Version of the file format; a file without a version has version 1.
VERSION = 1


def describe() -> dict[str, Any]:
  """Returns device, cores, versions and load of this machine."""
  kind = jax.default_backend()
  return {
    'device': backend.device_name(),
    'platform': kind,
    'devices': jax.device_count(),
    'cores': backend.num_cores(),
    **({'isa': backend.instruction_set()} if kind == 'cpu' else {}),
    'jax': jax.__version__,
    'python': platform.python_version(),
    # The mean number of running processes in the last minute.
    'load_average': (
      round(os.getloadavg()[0], 2) if hasattr(os, 'getloadavg') else None
    ),
  }


def seconds_since_start() -> float | None:
  """Returns the time since this process began; None if it is unknown."""
  stat, uptime = pathlib.Path('/proc/self/stat'), pathlib.Path('/proc/uptime')
  if not (stat.exists() and uptime.exists()):
    return None  # only Linux has these files
  # Field 22 of the file is the time at which the process began. Its index is 19
  # after the process's name, which is in brackets and may hold blanks.
  fields = stat.read_text().rpartition(')')[2].split()
  began = int(fields[19]) / os.sysconf('SC_CLK_TCK')
  return float(uptime.read_text().split()[0]) - began


def new(kind: str, values: Mapping[str, Any], has_run: bool = True) -> Record:
  """Makes the record of a measurement.

  Args:
    kind: kind of the record, such as 'alpha'.
    values: results and settings, as name -> JSON value.
    has_run: whether anything ran on this machine; the record then describes the
      machine.
  """
  head = {'kind': kind, 'version': VERSION}
  return head | dict(values) | ({'machine': describe()} if has_run else {})


def where(record: Mapping[str, Any]) -> str:
  """Returns a line with the device and the versions of a record's machine."""
  machine = record['machine']
  isa = f'{machine["isa"]}, ' if 'isa' in machine else ''
  cores = f'{machine["cores"]} core{"" if machine["cores"] == 1 else "s"}'
  return (
    f'{machine["device"]}, {isa}{cores}, JAX {machine["jax"]}, Python'
    f' {machine["python"]}'
  )


def load(path: str | os.PathLike[str], *kinds: str) -> Record:
  """Reads the record in a file.

  Args:
    path: the file.
    *kinds: the expected kinds; without these arguments, any kind is accepted.

  Raises:
    ValueError: the file is missing or broken, or has another kind or version.
  """
  path = os.fspath(path)
  record = files.read_json(path)
  kind = record.get('kind')
  if kind is None or (kinds and kind not in kinds):
    expected = f'one of {sorted(kinds)}' if kinds else 'a name'
    raise unexpected(f'{path}: kind', expected, kind)
  if (version := record.get('version', VERSION)) != VERSION:
    raise unexpected(
      f'{path}: version', str(VERSION), version, 'Measure it again.'
    )
  return record


def earlier(
  path: str | os.PathLike[str] | None, kind: str, settings: Mapping[str, Any]
) -> Record | None:
  """Returns the record of an earlier run with the same settings, or None.

  Args:
    path: the file of the record; None: there is no earlier record.
    kind: the kind that the record must have.
    settings: the settings of this run; others in the record are ignored.

  Raises:
    ValueError: the file is not a record of this kind, or has other settings.
  """
  if path is None or not os.path.exists(path):
    return None
  advice = 'Remove it, or name another output_file.'
  try:
    record = load(path, kind)
  except ValueError as error:
    raise ValueError(f'{error} {advice}') from error
  before = record.get('settings')
  if not isinstance(before, dict):
    raise unexpected(f'{path}: settings', 'those of a run', before, advice)
  before = {name: before.get(name) for name in settings}
  what = f'{os.fspath(path)!r} was measured with other settings'
  same_run.check(before, settings, what, advice)
  return record


def begin(
  console: rich.console.Console | None,
  output_file: str | None,
  input_file: object = None,
  plot_file: str | None = None,
) -> rich.console.Console:
  """Begins a measurement: checks its files, and prints how its input is read.

  Args:
    console: shows the measurement; None: standard output.
    output_file: file of the record; None: no record will be written.
    input_file: the input; if this is a path, a line says how the file is read.
    plot_file: file of a picture; None: no picture will be drawn.

  Returns:
    The console.

  Raises:
    ValueError: a file cannot be written, or matplotlib is not installed.
  """
  for path in filter(None, (output_file, plot_file)):
    files.check_writable(path)
  if plot_file:
    plot.load_matplotlib()
  console = console or consoles.console()
  if isinstance(input_file, str) and (sentence := reading(input_file)):
    consoles.say(console, sentence)
  return console


def finish(
  output_file: str | None,
  console: rich.console.Console,
  record: Mapping[str, Any],
  *parts: Table | str,
) -> None:
  """Ends a measurement: writes its record, then shows it.

  The file is written first, because a reader may close the output early.

  Args:
    output_file: file of the record; None: no record is written.
    console: shows the tables and sentences.
    record: the record.
    *parts: tables and sentences to show.

  Raises:
    OSError: the file cannot be written.
  """
  try:
    if output_file:
      files.write_json(output_file, record)
  finally:
    for part in parts:
      if isinstance(part, str):
        consoles.say(console, part)
      else:
        console.print(part)
