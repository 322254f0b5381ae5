"""Compiles row after row; results go to a folder, so that it can be resumed."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import rich.console

from specdec_jax import files
from specdec_jax.measure.progress import bar
from specdec_jax.measure.record import Record, earlier

# What settings were before they could be chosen.
_BEFORE = {'kernels': 'off'}


def compile_rows(
  config: Any,
  kind: str,
  compiled_for: Mapping[str, str],
  rows: Mapping[str, Callable[[], dict[str, Any]]],
  name_of: Callable[[Mapping[str, Any]], str],
  markdown: Callable[[Mapping[str, Any]], str],
  console: rich.console.Console,
) -> Record:
  """Compiles rows that have no result yet; writes results.json and report.md.

  Args:
    config: a dataclass with an `output_dir`; all its other fields decide the
      results.
    kind: kind of the record.
    compiled_for: the device, under that name, and versions of the packages that
      compile; part of the settings.
    rows: name -> function that compiles a row and returns its result.
    name_of: returns the name of a result.
    markdown: returns the report of a record.
    console: shows progress.

  Returns:
    The contents of results.json: 'settings', 'rows' and 'missing', the names of
    rows without results.

  Raises:
    ValueError: the folder holds results of other settings.
  """
  settings = dataclasses.asdict(config) | dict(compiled_for)
  folder = settings.pop('output_dir')
  settings = json.loads(json.dumps(settings))  # tuples become lists
  files.make_folder(folder)
  path = os.path.join(folder, 'results.json')
  done: dict[str, dict[str, Any]] = {}

  def had(found: Record) -> dict[str, Any]:
    done.update((name_of(row), row) for row in found['rows'])
    return _BEFORE | found['settings']

  what_to_do = 'Choose another output folder, or move that file away.'
  earlier(path, kind, settings, had, what_to_do)

  def write() -> Record:
    values = {
      'settings': settings,
      'rows': [done[name] for name in rows if name in done],
      'missing': [name for name in rows if name not in done],
    }
    record = Record(kind, values, {})  # nothing ran on this machine
    record.save(path)
    report = os.path.join(folder, 'report.md')
    files.write_atomically(report, markdown(record).encode())
    return record

  with bar(console, 'Compiling', len(rows)) as advance:
    for name, compile_row in rows.items():
      # Also before the first row, so that a resumed run shows what it has.
      write()
      if name not in done:
        done[name] = compile_row()
      advance()
  return write()
