"""Compiles row after row into a folder, and goes on where it was stopped."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import rich.console

from specdec_jax import files
from specdec_jax.measure.progress import bar
from specdec_jax.measure.record import Record, earlier


def compile_rows(
  config: Any,
  kind: str,
  compiled_for: Mapping[str, str],
  rows: Mapping[str, Callable[[], dict[str, Any]]],
  name_of: Callable[[Mapping[str, Any]], str],
  markdown: Callable[[Mapping[str, Any]], str],
  console: rich.console.Console,
) -> Record:
  """Compiles what has no result yet; writes results.json and report.md.

  Args:
    config: a dataclass with an `output_dir`; all else of it decides the
      results.
    kind: of the record.
    compiled_for: a device by that name, and versions of what compiles; they
      decide as well.
    rows: name -> what compiles a row and returns its result.
    name_of: the name of a result.
    markdown: the report of a record.
    console: shows progress.

  Returns:
    What is in results.json: 'settings', 'rows' and 'missing', names.

  Raises:
    ValueError: the folder holds results of other settings.
  """
  settings = dataclasses.asdict(config) | dict(compiled_for)
  folder = settings.pop('output_dir')
  settings = json.loads(json.dumps(settings))  # tuples as they are read back
  os.makedirs(folder, exist_ok=True)
  path = os.path.join(folder, 'results.json')
  done: dict[str, dict[str, Any]] = {}

  def had(found: Record) -> dict[str, Any]:
    done.update((name_of(row), row) for row in found['rows'])
    return found['settings']

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
      # First, too: a run that goes on shows at once what there is.
      write()
      if name not in done:
        done[name] = compile_row()
      advance()
  return write()
