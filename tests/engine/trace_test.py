"""Figure 1: recorded rounds are those of the decode, and are shown safely."""

import html
import io
import itertools
import re
from xml.etree import ElementTree

import pytest
import rich.console

import toy_models
from specdec_jax.engine import trace
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.trace import Round

GAMMA, MAX_OUTPUT = 3, 12
TEXT = 'the old house sings'

ROUNDS = [
  Round(['Das', ' alte', ' Haus'], 3, ' singt'),
  Round([' <script>x</script>', ' & so'], 0, ' "laut"'),
  Round(['\x1b[31m', '\n'], 1, '\u202e!'),
  Round([' .', '</s>'], 2, None),
]


def make_engine(tokenizer, noise=0, gamma=GAMMA) -> Engine:
  limits = {'max_input_len': 16, 'max_decode_len': MAX_OUTPUT}
  return toy_models.chain_engine(tokenizer, noise, gamma=gamma, **limits)


def record(engine, text, **options) -> list[Round[int]]:
  request = engine.text_request([text], True, **options)
  return trace.rounds_of(engine.updates(request, shows_rounds=True))


def check(engine, text, **options) -> list[Round[int]]:
  """Rounds and the decode itself agree in tokens and in every count."""
  rounds = record(engine, text, **options)
  (want,) = engine.generate([text], **options)
  kept = list(itertools.chain.from_iterable(one.kept for one in rounds))
  assert kept == want.tokens and kept
  stats = want.stats
  assert len(rounds) == stats.num_target_calls
  as_block = engine.request([text], **options).judges_blocks
  assert all((one.num_passed is not None) == as_block for one in rounds)
  if as_block:
    assert all(one.num_judged == len(one.proposed) for one in rounds)
  # One acceptance rate, however drafts are judged.
  assert sum(one.passed for one in rounds) == stats.num_passed
  assert sum(one.num_tested for one in rounds) == stats.num_tested
  if stats.num_tested:
    rate = f'acceptance rate {stats.acceptance_rate:.3f}'
    assert rate in trace.summary(rounds)
  accepted = [one.num_accepted for one in rounds]
  counts = [accepted.count(number) for number in range(engine.gamma + 1)]
  assert counts == [*stats.histogram]
  return rounds


def test_sampled_rounds_are_those_of_the_decode(tokenizer):
  sampled = dict(temperature=1.0, verification='block', seed=1, stop_ids=[])
  rounds = check(make_engine(tokenizer, noise=1), TEXT, **sampled)
  # A seed that both accepts and rejects.
  assert len({one.num_accepted for one in rounds}) > 1


def test_a_stop_id_inside_a_draft_and_the_budget_end_it(tokenizer):
  engine = make_engine(tokenizer)  # drafts itself: everything is accepted
  rounds = check(engine, TEXT, stop_ids=[])
  assert all(one.num_accepted == len(one.proposed) for one in rounds)
  tokens = [token for one in rounds for token in one.kept]
  # 12 tokens by rounds of 4: then 2 of a budget of 10 are left for the last.
  last = check(engine, TEXT, stop_ids=[], max_length=10)[-1]
  assert len(last.proposed) == 1 and last.next_token == tokens[9]
  stop = next(t for t in tokens if tokens.index(t) % (GAMMA + 1) < GAMMA)
  last = check(engine, TEXT, stop_ids=[stop])[-1]
  assert last.proposed[-1] == stop and last.next_token is None


def test_no_tokens_no_drafter_and_gamma_0(tokenizer):
  engine = make_engine(tokenizer, gamma=0)
  rounds = check(engine, TEXT)
  assert all(not one.proposed and len(one.kept) == 1 for one in rounds)
  assert record(engine, '') == []
  with pytest.raises(ValueError, match='num_accepted: .* from 0 to 2'):
    Round([1, 2], 3, None)


def printed(**options) -> str:
  stream = io.StringIO()
  console = rich.console.Console(file=stream, width=200, **options)
  console.print(trace.Trace('', ROUNDS))
  return stream.getvalue()


def test_what_a_terminal_shows(monkeypatch):
  """Marks without colour, else colours; no control characters."""
  monkeypatch.delenv('FORCE_COLOR', raising=False)
  text = printed()
  assert '1  Das alte Haus {+singt+}' in text
  assert '2   [-<script>x</script>-] {+"laut"+} [~& so~]' in text
  assert '\x1b' not in text and '\u202e' not in text and '\u21b5' in text
  said = '6 of 8 judged proposals accepted, 1 more after a rejection'
  assert f'9 tokens in 4 calls of the target; {said}' in text
  text = printed(force_terminal=True, color_system='standard')
  assert '\x1b[9;31m<script>x</script>\x1b[0m' in text
  assert '\x1b[1;4;34msingt\x1b[0m' in text
  assert '{+' not in text and '\x1b[31m\x1b' not in text


def test_page_is_whole_escaped_and_self_contained():
  source = '<img src=x onerror=y> & "so"'
  text = trace.Trace(source, ROUNDS).page()
  for shown in (source, '<script>x</script>'):
    assert shown not in text and html.escape(shown) in text
  assert not re.search('<(script|img|link)', text)
  assert not re.search(r'https?:|url\(|@import|<[^>]* (src|href)=', text)
  kinds = [kind for one in ROUNDS for kind, _ in one.parts]
  for kind in trace.MEANING:  # and once more in the legend
    assert text.count(f'class="{kind}"') == kinds.count(kind) + 1 > 1
  rows = re.findall(r'<td>(\d+ of \d+)</td>', text)
  assert rows == ['3 of 3', '0 of 1', '1 of 2', '2 of 2']
  assert '6 of 8 judged' in text  # their sums


def test_picture_is_escaped_aligned_and_has_no_empty_margin():
  picture = ElementTree.fromstring(trace.Trace('<img> & \x1b', ROUNDS).svg())
  texts = list(picture.iter('{http://www.w3.org/2000/svg}text'))
  said = [text.text for text in texts]
  assert said[0] == '<img> & \ufffd' and '<script>x</script>' in said
  assert said[-4:] == list(trace.MEANING.values())
  kinds = [kind for one in ROUNDS for kind, _ in one.parts]
  classes = [text.get('class') for text in texts]
  assert [x for x in classes if x in kinds][:-4] == kinds
  names = 'x', 'textLength'
  starts, sizes = ([float(t.get(name)) for t in texts] for name in names)
  ends = map(sum, zip(starts, sizes, strict=True))
  assert 0 < float(picture.get('width')) - max(ends) < 40
  place = dict(zip(said, starts, strict=True))
  assert place[' 1'] == place[' 2'] and place['alte'] == place['"laut"']
