"""Figure 1: which proposals of one generation were accepted, round by round.

`record` decodes one text and keeps what the drafter proposed, `spell` turns the
ids into text, `print_trace` shows them on a terminal and `trace_page` in a
browser. No mark is by colour alone: rejected tokens are struck through, the
target's own are underlined, and without colour there are brackets.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax
import rich.console
import rich.table
import rich.text

from specdec_jax.decoding import speculative
from specdec_jax.decoding import state as decode_state
from specdec_jax.drafters.base import check_chain
from specdec_jax.engine.completion import Text, decode, from_generation
from specdec_jax.engine.options import options_of
from specdec_jax.text.tokenizer import Tokenizer
from specdec_jax.types import FinishReason

Token = TypeVar('Token')

ACCEPTED, REJECTED, UNUSED, TARGET = 'accepted', 'rejected', 'unused', 'target'
MEANING = {
  ACCEPTED: 'proposed by the drafter and accepted',
  REJECTED: 'proposed and rejected',
  UNUSED: 'proposed after a rejection, so not judged',
  TARGET: "the target's own token",
}
_STYLE = {
  ACCEPTED: 'green',
  REJECTED: 'red strike',
  UNUSED: 'dim strike',
  TARGET: 'bold blue underline',
}
# Without colour: the notation of wdiff, and one mark more.
_MARKS = {
  ACCEPTED: ('', ''),
  REJECTED: ('[-', '-]'),
  UNUSED: ('[~', '~]'),
  TARGET: ('{+', '+}'),
}
_INCOMPLETE = '\ufffd'  # stands for bytes that form no whole character


@dataclasses.dataclass(frozen=True)
class Round(Generic[Token]):
  """One round of Algorithm 1, as ids (`record`) or as text (`spell`).

  Attributes:
    proposed: x_1..x_gamma; fewer if the drafter or the row's budget ended.
    num_accepted: n, the leading proposals that were kept.
    next_token: t, the target's own token; None after an accepted stop id.
    num_passed: of a draft that was judged as a whole: the leading proposals
      that pass Algorithm 1's test; None elsewhere: `num_accepted`.
  """

  proposed: Sequence[Token]
  num_accepted: int
  next_token: Token | None
  num_passed: int | None = None

  def __post_init__(self):
    if not 0 <= self.num_accepted <= len(self.proposed):
      raise ValueError(
        f'num_accepted must lie in [0, {len(self.proposed)}], the number of'
        f' proposals, got {self.num_accepted}.'
      )

  @property
  def kept(self) -> list[Token]:
    """The tokens that the round added to the output."""
    kept = list(self.proposed[: self.num_accepted])
    if self.next_token is not None:
      kept.append(self.next_token)
    return kept

  @property
  def passed(self) -> int:
    """Proposals that pass Algorithm 1's test, as in `CompletionStats`."""
    return self.num_accepted if self.num_passed is None else self.num_passed

  @property
  def num_tested(self) -> int:
    """Those and the first that fails, if any, as in `CompletionStats`."""
    return min(self.passed + 1, len(self.proposed))

  @property
  def num_judged(self) -> int:
    """Proposals that verification judged: all, if it did as a whole."""
    as_block = self.num_passed is not None
    return len(self.proposed) if as_block else self.num_tested

  @property
  def parts(self) -> list[tuple[str, Token]]:
    """Each token with what became of it, in the order of the figure."""
    num_rejected = self.num_judged - self.num_accepted
    kinds = [ACCEPTED] * self.num_accepted + [REJECTED] * num_rejected
    kinds += [UNUSED] * (len(self.proposed) - self.num_judged)
    found = list(zip(kinds, self.proposed, strict=True))
    # Tokens that were not judged come last: a line reads as text up to there.
    judged, unused = found[: self.num_judged], found[self.num_judged :]
    if self.next_token is not None:
      judged.append((TARGET, self.next_token))
    return judged + unused


def record(
  engine: Any,
  text: str | Sequence[int],
  gamma: int | None = None,
  **options: Any,
) -> list[Round[int]]:
  """Decodes one text speculatively and returns its rounds, as ids.

  The rounds are those of the engine's loop. Compiles programs of its own,
  which return the draft as well.

  Args:
    engine: an `Engine` with a drafter.
    text: the input, as text or as ids.
    gamma: proposals per round; None is the engine's.
    **options: as for `Engine.request`. With `stop_strings` the last round
      keeps the tokens that it produced past the string.

  Returns:
    The rounds; their `kept` tokens, put together, are the output, a stop id
    included. Empty for an input without tokens.

  Raises:
    ValueError: as for `Engine.request`, there is no drafter, or the target's
      logits were invalid.
  """
  asked = options_of(options)
  if asked.num_beams is not None:
    raise ValueError(
      'trace shows the proposals of one output, and a beam search has several:'
      ' leave num_beams out.'
    )
  sides = (engine.target, engine.drafter)
  check_chain(engine.drafter, 'trace')
  if not engine.num_input_tokens(text):
    return []
  request = engine.request([text], gamma, **options)
  stop_strings = asked.stop_strings
  start = jax.jit(functools.partial(speculative.start, *sides))
  step = jax.jit(functools.partial(speculative.step, *sides), donate_argnums=2)
  state = start(engine.params, request)
  first = length = int(state.length[0])
  num_accepted = num_passed = 0  # so far
  rounds: list[Round[int]] = []
  while True:
    state, draft = step(engine.params, request, state)
    seen = jax.device_get(
      {
        'tokens': state.tokens[0],
        'length': state.length[0],
        'num_accepted': state.stats.num_accepted[0],
        'num_passed': state.stats.num_passed,
        'reason': state.finish_reason[0],
        'proposed': draft.tokens[0],
        'num_proposed': draft.length[0],
      }
    )
    if seen['reason'] == FinishReason.INVALID:
      found = jax.device_get(decode_state.generation(request, state))
      raise ValueError(from_generation(found, 0, engine.tokenizer).error)
    accepted = int(seen['num_accepted']) - num_accepted
    passed = None
    if seen['num_passed'] is not None:
      passed = int(seen['num_passed'][0]) - num_passed
      num_passed += passed
    output = seen['tokens'][: seen['length']].tolist()
    new = output[length:]
    rounds.append(
      Round(
        seen['proposed'][: seen['num_proposed']].tolist(),
        accepted,
        new[accepted] if len(new) > accepted else None,
        passed,
      )
    )
    length, num_accepted = len(output), int(seen['num_accepted'])
    shown = Text(engine.tokenizer, output[first:], stop_strings)
    if seen['reason'] != FinishReason.RUNNING or shown.has_stop_string:
      return rounds


def spell(
  rounds: Sequence[Round[int]],
  tokenizer: Tokenizer,
  context: Sequence[int] = (),
) -> list[Round[str]]:
  """Returns the same rounds with each token as the text that it adds.

  A token that ends inside a character adds nothing, which is later shown as
  U+FFFD; the end of sequence and padding become '</s>' and '<pad>'.

  Args:
    rounds: the rounds as ids, from `record`.
    tokenizer: the engine's.
    context: the ids before the first round.
  """
  spelled = []
  before: list[int] = [*context]
  for one in rounds:
    proposed = _pieces(tokenizer, before, one.proposed)
    next_token = None
    if one.next_token is not None:
      kept = [*before, *one.proposed[: one.num_accepted]]
      next_token = _pieces(tokenizer, kept, [one.next_token])[0]
    spelled.append(
      Round(proposed, one.num_accepted, next_token, one.num_passed)
    )
    before += one.kept
  return spelled


def _pieces(
  tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]
) -> list[str]:
  special = {tokenizer.eos_id: '</s>', tokenizer.pad_id: '<pad>'}
  pieces = []
  text = decode(tokenizer, before).rstrip(_INCOMPLETE)
  for end, token in enumerate(ids, start=1):
    # Decodes the whole text: a piece alone would lose the blank before it.
    longer = decode(tokenizer, [*before, *ids[:end]]).rstrip(_INCOMPLETE)
    pieces.append(special.get(token, longer[len(text) :]))
    text = longer
  return pieces


def summary(rounds: Sequence[Round]) -> str:
  """Returns one sentence: tokens, calls of the target, acceptance."""
  tokens = sum(len(one.kept) for one in rounds)
  accepted = sum(one.num_accepted for one in rounds)
  judged = sum(one.num_judged for one in rounds)
  unused = sum(len(one.proposed) for one in rounds) - judged
  behind = f', {unused} more after a rejection not judged' if unused else ''
  tested = sum(one.num_tested for one in rounds)
  rate = sum(one.passed for one in rounds) / tested if tested else None
  last = '' if rate is None else f'; acceptance rate {rate:.3f}'
  return (
    f'{tokens} tokens in {len(rounds)} calls of the target; {accepted} of'
    f' {judged} judged proposals accepted{behind}{last}.'
  )


def print_trace(
  console: rich.console.Console,
  rounds: Sequence[Round[str]],
  title: str = 'Accepted and rejected proposals',
) -> None:
  """Prints one line per round; with marks if the console shows no colour."""
  coloured = console.color_system is not None and not console.no_color
  show = _coloured if coloured else _marked
  grid = rich.table.Table.grid(padding=(0, 2))
  grid.add_column(justify='right')
  grid.add_column(overflow='fold')
  for number, one in enumerate(rounds, start=1):
    line = rich.text.Text().join(show(*part) for part in one.parts)
    grid.add_row(str(number), line)
  legend = rich.text.Text('  ').join(
    show(kind, text) for kind, text in MEANING.items()
  )
  console.print(rich.text.Text(title, style='bold'))
  console.print(legend)
  console.print(grid)
  console.print(rich.text.Text(summary(rounds)))


def shown(piece: str) -> tuple[str, str]:
  """Returns the blank before a piece, and the rest made fit for one line.

  Control characters become U+FFFD: an output must not steer a terminal.
  """
  text = piece.replace('\n', '\u21b5').replace('\t', ' ') or _INCOMPLETE
  text = ''.join(c if c.isprintable() else _INCOMPLETE for c in text)
  word = text.lstrip(' ')
  if not word:
    return '', '\u2423'  # a blank of its own
  return text[: len(text) - len(word)], word


def _coloured(kind: str, piece: str) -> rich.text.Text:
  blank, word = shown(piece)
  return rich.text.Text(blank).append(word, style=_STYLE[kind])


def _marked(kind: str, piece: str) -> rich.text.Text:
  blank, word = shown(piece)
  opening, closing = _MARKS[kind]
  return rich.text.Text(f'{blank}{opening}{word}{closing}')
