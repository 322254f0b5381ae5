"""Figure 1: which proposals of one generation were accepted, round by round.

`rounds_of` collects the rounds as ids, `spell` turns the ids into text, and a
`Trace` can be shown on a terminal, as an HTML page, or as an SVG picture.
Marks do not depend on colour alone: rejected tokens are struck through, the
target's own tokens are underlined, and without colour there are brackets.
"""

import dataclasses
import html
import itertools
import pathlib
import string
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import rich.cells
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text as Line

from specdec_jax.checks.fields import unexpected
from specdec_jax.engine.completion import Text
from specdec_jax.text.tokenizer import Vocabulary

Token = TypeVar('Token')

ACCEPTED, REJECTED, UNUSED, TARGET = 'accepted', 'rejected', 'unused', 'target'
MEANING = {
  ACCEPTED: 'proposed and kept',
  TARGET: "the target's own",
  REJECTED: 'proposed and rejected',
  UNUSED: 'not judged',
}
# Kind of token -> opening and closing mark without colour (as in wdiff), style
# with colour, and tag in an HTML page.
_MARKS = {
  ACCEPTED: ('', '', 'green', 'span'),
  REJECTED: ('[-', '-]', 'red strike', 'del'),
  UNUSED: ('[~', '~]', 'dim strike', 'del'),
  TARGET: ('{+', '+}', 'bold blue underline', 'ins'),
}
_INCOMPLETE = '\ufffd'  # this character stands for incomplete bytes
_PAGE, _PICTURE = (
  string.Template(pathlib.Path(__file__).with_name(name).read_text('utf-8'))
  for name in ('trace.html', 'trace.svg')
)
# Sizes of a picture in pixels: a character, a line, and the margin.
_CHARACTER, _LINE, _MARGIN = 8.4, 30, 16
# Heights of a trace's frame, in rem: a row, all above and below the rows, and
# the maximum.
_ROW_REM, _AROUND_REM, _MOST_REM = 2.2, 22, 40


@dataclasses.dataclass(frozen=True)
class Round(Generic[Token]):
  """One round of Algorithm 1, as ids (`rounds_of`) or as text (`spell`).

  Attributes:
    proposed: the proposals x_1..x_gamma; fewer if the drafter stopped early or
      the output had no room for more.
    num_accepted: n, the leading proposals that were kept.
    next_token: t, the target's own token; None after an accepted stop id.
    num_passed: for a draft judged as a block, the leading proposals that pass
      Algorithm 1's test; None for other drafts, where it is `num_accepted`.
  """

  proposed: Sequence[Token]
  num_accepted: int
  next_token: Token | None
  num_passed: int | None = None

  def __post_init__(self):
    if not 0 <= self.num_accepted <= len(self.proposed):
      expected = f'from 0 to {len(self.proposed)}, the number of proposals'
      raise unexpected('num_accepted', expected, self.num_accepted)

  @property
  def kept(self) -> list[Token]:
    """The tokens that the round added to the output."""
    last = () if self.next_token is None else (self.next_token,)
    return [*self.proposed[: self.num_accepted], *last]

  @property
  def passed(self) -> int:
    """The number of proposals that pass Algorithm 1's test."""
    return self.num_accepted if self.num_passed is None else self.num_passed

  @property
  def num_tested(self) -> int:
    """The number of proposals that Algorithm 1 tests.

    It tests none after the first that fails.
    """
    return min(self.passed + 1, len(self.proposed))

  @property
  def num_judged(self) -> int:
    """The number of proposals judged; a block is judged as a whole."""
    as_block = self.num_passed is not None
    return len(self.proposed) if as_block else self.num_tested

  @property
  def parts(self) -> list[tuple[str, Token]]:
    """Pairs of a token's kind and the token, in the order of the display."""
    num_rejected = self.num_judged - self.num_accepted
    kinds = [ACCEPTED] * self.num_accepted + [REJECTED] * num_rejected
    judged = [*zip(kinds, self.proposed, strict=False)]
    if self.next_token is not None:
      judged.append((TARGET, self.next_token))
    # Tokens that were not judged come last, so that the tokens before them read
    # as text.
    return judged + [(UNUSED, x) for x in self.proposed[self.num_judged :]]


def rounds_of(updates: Iterable[Any]) -> list[Round[int]]:
  """Returns the round of each `Update` of a request, with tokens as ids.

  The `kept` tokens of all rounds are the output, a stop id included.
  """
  # An update of plain decoding has no round. It becomes a round of one token,
  # without proposals.
  return [x.round or Round((), 0, next(iter(x.tokens), None)) for x in updates]


def spell(
  rounds: Sequence[Round[int]],
  tokenizer: Vocabulary,
  context: Sequence[int] = (),
  is_whole: bool = True,
) -> list[Round[str]]:
  """Returns the same rounds with each token as the text that it adds.

  The texts of all kept tokens together are the text of the output. A token that
  ends inside a character adds '', which is later shown as U+FFFD; the end of
  sequence and padding become '</s>' and '<pad>'.

  Args:
    rounds: the rounds as ids, from `rounds_of`.
    tokenizer: the engine's vocabulary.
    context: the ids before the first round, whose text has been shown.
    is_whole: whether no rounds follow. Otherwise the last tokens add '' while
      later tokens may still change their text.
  """
  names = {tokenizer.pad_id: '<pad>', tokenizer.eos_id: '</s>'}

  def named(ids: Sequence[int], is_end: bool = True) -> list[str]:
    texts = [piece.text for piece in before.pieces_of(ids, is_end=is_end)]
    texts += [''] * (len(ids) - len(texts))
    return [names.get(i, text) for i, text in zip(ids, texts, strict=True)]

  before = Text(tokenizer)
  for token in context:  # one by one, so that text is settled early
    before.extend([token])
  output = iter(named([i for step in rounds for i in step.kept], is_whole))
  spelled = []
  for step in rounds:
    kept = list(itertools.islice(output, len(step.kept)))
    proposed = kept[: step.num_accepted]
    proposed += named(step.proposed)[step.num_accepted :]
    last = None if step.next_token is None else kept[-1]
    spelled.append(Round(proposed, step.num_accepted, last, step.num_passed))
    for token in step.kept:
      before.extend([token])
  return spelled


def summary(rounds: Sequence[Round]) -> str:
  """Returns a sentence with the counts of tokens, calls and proposals."""
  tokens = sum(len(step.kept) for step in rounds)
  accepted = sum(step.num_accepted for step in rounds)
  judged = sum(step.num_judged for step in rounds)
  unused = sum(len(step.proposed) for step in rounds) - judged
  behind = f', {unused} more after a rejection not judged' if unused else ''
  tested = sum(step.num_tested for step in rounds)
  passed = sum(step.passed for step in rounds)
  last = f'; acceptance rate {passed / tested:.3f}' if tested else ''
  begin = f'{tokens} tokens in {len(rounds)} calls of the target; {accepted}'
  return f'{begin} of {judged} judged proposals accepted{behind}{last}.'


def shown(piece: str) -> tuple[str, str]:
  """Splits off a piece's leading blank, and makes the rest printable.

  Control characters become U+FFFD, since they would control the terminal.
  """
  text = piece.replace('\n', '\u21b5').replace('\t', ' ') or _INCOMPLETE
  text = ''.join(c if c.isprintable() else _INCOMPLETE for c in text)
  word = text.lstrip(' ')
  if not word:
    return '', '\u2423'  # a blank that is a token by itself
  return text[: len(text) - len(word)], word


@dataclasses.dataclass(frozen=True)
class Trace:
  """Shows the accepted and rejected proposals of one decoded text.

  Attributes:
    source: the input text.
    rounds: the rounds in order, as text.
    lenience: lenience of the decoding; below 1 the output is lossy.
  """

  source: str
  rounds: Sequence[Round[str]]
  lenience: float = 1.0

  @property
  def _lossy(self) -> str:
    return '' if self.lenience == 1 else f', lossy (lenience {self.lenience:g})'

  @property
  def _title(self) -> str:
    return f'Accepted and rejected proposals{self._lossy}'

  def __repr__(self) -> str:
    return f'Trace({self.source!r}: {summary(self.rounds)}{self._lossy})'

  def __rich_console__(
    self, console: Console, options: ConsoleOptions
  ) -> RenderResult:
    """Yields a line for each round; marks replace colours if there are none."""
    coloured = console.color_system is not None and not console.no_color

    def show(kind: str, piece: str) -> Line:
      blank, word = shown(piece)
      opening, closing, style, _ = _MARKS[kind]
      if coloured:
        return Line(blank).append(word, style=style)
      return Line(f'{blank}{opening}{word}{closing}')

    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify='right')
    grid.add_column(overflow='fold')
    for number, step in enumerate(self.rounds, start=1):
      line = Line().join(show(*part) for part in step.parts)
      grid.add_row(str(number), line)
    yield Line(self._title, style='bold')
    yield Line('  ').join(show(*part) for part in MEANING.items())
    yield grid
    yield Line(summary(self.rounds))

  def page(self) -> str:
    """Returns a self-contained HTML page, for a light or a dark screen.

    It has no script and loads nothing from elsewhere; its security policy
    forbids both. All text of a model is escaped.
    """
    output = ''.join(piece for step in self.rounds for piece in step.kept)
    legend = [f'<li>{_tagged(*part)}</li>' for part in MEANING.items()]
    rows = [
      f'<tr><th scope="row">{number}</th>'
      f'<td>{step.num_accepted} of {step.num_judged}</td><td class="tokens">'
      f'{"".join(_tagged(*part) for part in step.parts)}</td></tr>'
      for number, step in enumerate(self.rounds, start=1)
    ]
    texts = {'title': self._title, 'source': self.source}
    texts['output'] = output.removesuffix('</s>')
    texts['summary'] = summary(self.rounds)
    escaped = {name: html.escape(text) for name, text in texts.items()}
    lists = {'legend': '\n'.join(legend), 'rows': '\n'.join(rows)}
    return _PAGE.substitute(escaped | lists)

  def svg(self) -> str:
    """Returns an SVG picture with a line per round, for light or dark pages.

    Tokens at the same position in their round are aligned in a column.
    """
    lines = [
      [('quiet', f'{n:>2}'), *((kind, shown(x)[1]) for kind, x in step.parts)]
      for n, step in enumerate(self.rounds, start=1)
    ]
    columns = itertools.zip_longest(*lines, fillvalue=(UNUSED, ''))
    longest = [max(x, key=lambda part: _width(part[1])) for x in columns]
    # The summary without the acceptance rate.
    counted = summary(self.rounds).partition(';')[0]
    source, body, right = shown(self.source)[1], list[str](), 0.0
    header = [[('', source)], [('quiet', f'{counted}{self._lossy}')]]
    legend = len(lines) + 2.4, [*MEANING.items()]
    for row, parts in [*enumerate([*header, *lines]), legend]:
      measured = longest if parts in lines else parts
      widths = [_width(text) for _, text in measured]
      places = itertools.accumulate(widths, initial=_MARGIN)
      body += map(_drawn, parts, places, itertools.repeat(row))
      right = max(right, sum(widths))
    return _PICTURE.substitute(
      title=html.escape(f'{self._title}: {source}'),
      width=round(right + _MARGIN),
      height=round(_LINE * (len(lines) + 3.6)) + _MARGIN,
      body='\n'.join(body),
    )

  def _repr_html_(self) -> str:
    """Returns the page in a frame, so that its style does not leak."""
    height = min(_AROUND_REM + _ROW_REM * len(self.rounds), _MOST_REM)
    return (
      f'<iframe sandbox title="Trace" srcdoc="{html.escape(self.page())}"'
      f' style="width: 100%; height: {height:g}rem; border: 0"></iframe>'
    )


def _width(text: str) -> float:
  """Returns a text's width in a picture, in pixels, with the gap after it."""
  return _CHARACTER * rich.cells.cell_len(text) + _MARGIN


def _drawn(part: tuple[str, str], x: float, row: float) -> str:
  """Returns the SVG of a token; only the kinds in `MEANING` have a box."""
  kind, text = part
  y, width = _MARGIN + _LINE * row, _width(text) - _MARGIN
  size = f'width="{width + 8:g}" height="22" rx="4"'
  box = f'<rect x="{x - 4:g}" y="{y:g}" {size}/>'
  return (
    f'<g class="{kind}">{box if kind in MEANING else ""}<text class="{kind}"'
    f' x="{x:g}" y="{y + 16:g}" textLength="{width:g}"'
    f' lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text></g>'
  )


def _tagged(kind: str, piece: str) -> str:
  blank, word = shown(piece)
  tag = _MARKS[kind][-1]
  return f'{blank}<{tag} class="{kind}">{html.escape(word)}</{tag}>'
