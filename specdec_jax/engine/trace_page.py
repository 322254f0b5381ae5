"""The trace of one generation as a self-contained HTML page.

It has no script and loads nothing from elsewhere; its security policy forbids
both. All text of a model is escaped.
"""

import html
from collections.abc import Sequence

from specdec_jax.engine.trace import (
  ACCEPTED,
  MEANING,
  REJECTED,
  TARGET,
  UNUSED,
  Round,
  shown,
  summary,
)


def html_page(
  rounds: Sequence[Round[str]],
  *,
  title: str = 'Accepted and rejected proposals',
  source: str = '',
  note: str = '',
) -> str:
  """Returns the page, for a light or a dark screen.

  Args:
    rounds: the rounds as text, from `spell`.
    title: heading and title of the page.
    source: the input text; shown if given.
    note: shown under the heading if given, such as how it was decoded.
  """
  output = ''.join(piece for one in rounds for piece in one.kept)
  facts = [('Input', source)] if source else []
  facts.append(('Output', output.removesuffix('</s>')))
  body = [
    f'<h1>{html.escape(title)}</h1>',
    *([f'<p>{html.escape(note)}</p>'] if note else []),
    '<dl>',
    *(f'<dt>{name}</dt><dd>{html.escape(text)}</dd>' for name, text in facts),
    '</dl>',
    f'<p>{html.escape(summary(rounds))}</p>',
    '<h2>Legend</h2>',
    '<ul>',
    *(f'<li>{_token(kind, text)}</li>' for kind, text in MEANING.items()),
    '</ul>',
    '<h2>Rounds</h2>',
    '<table>',
    '<thead><tr><th scope="col">round</th>'
    '<th scope="col">accepted of judged</th>'
    '<th scope="col">tokens</th></tr></thead>',
    '<tbody>',
    *(_row(number, one) for number, one in enumerate(rounds, start=1)),
    '</tbody></table>',
  ]
  return _PAGE.format(
    title=html.escape(title), style=_CSS, body='\n'.join(body)
  )


def _row(number: int, one: Round[str]) -> str:
  tokens = ''.join(_token(*part) for part in one.parts)
  return (
    f'<tr><th scope="row">{number}</th>'
    f'<td>{one.num_accepted} of {one.num_judged}</td>'
    f'<td class="tokens">{tokens}</td></tr>'
  )


_TAGS = {ACCEPTED: 'span', REJECTED: 'del', UNUSED: 'del', TARGET: 'ins'}


def _token(kind: str, piece: str) -> str:
  blank, word = shown(piece)
  tag = _TAGS[kind]
  return f'{blank}<{tag} class="{kind}">{html.escape(word)}</{tag}>'


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

# The text before <del> and <ins> is only for screen readers.
_CSS = """:root {
  --paper: #ffffff; --ink: #1b1f24; --line: #d0d7de; --quiet: #59636e;
  --accepted: #116329; --rejected: #b3141d; --target: #0a4bb5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --ink: #e6edf3; --line: #3d444d; --quiet: #9aa4af;
    --accepted: #6fdd8b; --rejected: #ff9a94; --target: #8ec2ff;
  }
}
body { background: var(--paper); color: var(--ink); margin: 0;
  font: 1rem/1.6 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem; overflow-wrap: anywhere; }
ul { list-style: none; padding: 0; }
table { border-collapse: collapse; width: 100%; }
th, td { border-top: 1px solid var(--line); padding: .3rem .8rem .3rem 0;
  text-align: left; vertical-align: top; }
tbody th, td:nth-child(2) { font-weight: 400; color: var(--quiet);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.tokens { width: 100%; white-space: pre-wrap; overflow-wrap: anywhere; }
.accepted { color: var(--accepted); }
.rejected { color: var(--rejected); }
.unused { color: var(--quiet); }
.target { color: var(--target); font-weight: 600; }
del::before, ins::before { position: absolute; width: 1px; height: 1px;
  overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
del.rejected::before { content: " rejected: "; }
del.unused::before { content: " not judged: "; }
ins::before { content: " target: "; }
"""
