"""Lines of a file as the examples of a run; see `run`."""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from specdec_jax import files
from specdec_jax.decoding.state import BLOCK
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.options import example_id
from specdec_jax.infer import batches, report, results
from specdec_jax.infer.settings import DecodeConfig, as_blocks, by_rows
from specdec_jax.text.chat import ChatTemplate, template_of
from specdec_jax.text.lines import check_some, count_tokens, read_lines
from specdec_jax.text.local_tasks import reading


class Lines:
  """The lines of a file.

  Attributes:
    config: the run; `run` sets its mode to plain if drafting does not pay.
    broken_off: why the file could not be read to its end, or None.
    prefix: prefix of the names of all files except the results' file.
  """

  prefix = ''

  def __init__(self, config: DecodeConfig):
    """Reads the lines.

    Raises:
      ValueError: the file cannot be read, or none of its lines is text.
    """
    self.config = config
    lines, self.broken_off = files.until_broken(read_lines(config.input_file))
    check_some(config.input_file, lines)
    self._lines, self._limit = lines, 0
    self._read: Callable[[str], str | Sequence[int]] = str  # as it is

  @property
  def broken(self) -> list[str]:
    """The errors of lines that cannot be decoded."""
    return [line.error for line in self._lines if line.error]

  def engine(self) -> Engine:
    """Makes the engine, and counts the lines' tokens with it."""
    config, options = self.config, {}
    if config.drafter is not None and report.SPECULATIVE in config.ways:
      # First: if it was left out, the target need not be read.
      options['drafter'] = config.drafter()
    engine = config.engine(**options)
    self._limit = engine.max_input_len
    most = self._limit if self.config.on_too_long == 'error' else None
    if config.chat:
      self._read = functools.partial(_chat_ids, _template_of(engine), engine)
    self._lines = count_tokens(
      self._lines, lambda text: engine.num_input_tokens(self._read(text)), most
    )
    return engine

  def items(self) -> list[batches.Item]:
    """All lines that have something to read and no error."""
    count = self.config.num_outputs
    return [
      batches.Item(
        index * count + sample,
        self._read(line.text),
        example_id=example_id(index, sample),
      )
      for index, line in enumerate(self._lines)
      if line.num_tokens and not line.error
      for sample in range(count)
    ]

  def identity(
    self, engine: Engine, gammas: Mapping[int, int] | None
  ) -> dict[str, Any]:
    """Everything that decides the results, as JSON values."""
    config = self.config
    texts = repr([(line.text, line.error) for line in self._lines])
    return {
      'lines': len(self._lines),
      'lines_sha256': hashlib.sha256(texts.encode()).hexdigest(),
      'mode': config.mode,
      'batch_size': config.batch_size,
      'batching': config.batching,
      'sampling': dataclasses.asdict(config.sampling),
      'lenience': config.lenience,
      'seed': config.seed,
      'on_too_long': config.on_too_long,
      'gammas': by_rows(gammas),
      'num_samples': config.num_samples,
      'stop_strings': list(config.stop_strings),
      'beams': config.beams.identity,
      'verification': BLOCK if as_blocks(config, engine) else None,
      'chat': config.chat,
      **batches.engine_identity(engine),
    }

  def records(self, modes: Mapping[str, report.Mode]) -> list[dict[str, Any]]:
    """One record per line; see `results`."""
    return results.make_records(
      self._lines, modes, self._limit, self.config.num_outputs
    )

  def context(
    self,
    records: Sequence[Mapping[str, Any]],
    modes: Mapping[str, report.Mode],
  ) -> dict[str, Any]:
    """The summary's entries about the lines."""
    reasons = [
      reason
      for record in records
      for reason in results.as_list(record['finish_reason'])
    ]
    return {
      'input_file': self.config.input_file,
      'reading': reading(self.config.input_file),
      'lines': len(records),
      'finish_reasons': dict(sorted(collections.Counter(reasons).items())),
      'errors': [record['error'] for record in records if record['error']],
    }

  def show(
    self, console: rich.console.Console, modes: Mapping[str, report.Mode]
  ) -> None:
    """Prints some of the decoded lines."""
    count = self.config.num_outputs
    texts = [line.text for line in self._lines for _ in range(count)]
    report.print_examples(console, texts, modes, self.config.num_shown)

  def complaint(self, summary: Mapping[str, Any]) -> str | None:
    """Why the run fails after its results are written, or None."""
    differing = summary.get('agreement', {}).get('disagreements')
    required = self.config.require_agreement and self.config.lenience == 1
    if not (required and differing):
      return None
    return (
      f'{len(differing)} greedy outputs differ between plain and speculative'
      f' decoding, first at line {differing[0]["line"]}'
    )


def _template_of(engine: Engine) -> ChatTemplate:
  template = template_of(engine.tokenizer)
  if template is None:
    raise ValueError(
      f'{engine.tokenizer.path!r} has no chat template (chat_template.jinja, or'
      ' an entry of tokenizer_config.json) beside its vocabulary. Leave --chat'
      ' out (gin: CHAT), or take a model that was trained on chats.'
    )
  return template


def _chat_ids(template: ChatTemplate, engine: Engine, text: str) -> list[int]:
  """The ids of a chat of one message."""
  return template.ids([{'role': 'user', 'content': text}], engine.bos_id)
