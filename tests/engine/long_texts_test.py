"""Long texts: split, decoded by sentence, and put together; nothing is lost."""

import functools
import gzip
import itertools
import json
import pathlib
import random
import re
import sys
import time
import warnings

import pytest
import rich.console

from repository import SHARED, TEST_SPLIT
from specdec_jax import Engine, infer, load
from specdec_jax.cli import main
from specdec_jax.engine.long_texts import splitter
from specdec_jax.infer.resume import Folder
from specdec_jax.text import sentences
from specdec_jax.text.sentences import language_of, split
from toy_models import chain_engine

sentencex = pytest.importorskip('sentencex', reason='needs the extra [split]')
ABSTRACTS = SHARED / 'data/summ/acl_title.test.jsonl.gz'
DOCUMENTS = pathlib.Path(__file__).with_name('split_documents.txt')
# Each line has a language and a text that sentencex alone splits wrongly; bars
# mark where its sentences should end.
SENTENCES = DOCUMENTS.with_name('split_sentences.txt')
RULED = SENTENCES.read_text('utf-8').splitlines()
# Between the sentences of a document.
GAPS = [' ', '  ', '\n', '\n\n  ', '\n- ', '\n\n## 1.2. ', '\n| ', ' | ', '\t']
DOCUMENT = '  a b! A c.\n\n\td e? A b.  \r\n \nc, a.'


def words(text):
  return len(text.split())


def test_any_text_comes_back():
  chance = random.Random(0)
  alphabet = [
    *'ab C.?!,; \n\t"“”()é…。你\u3000\u2028-1👍|>#*`[]@।' + 'e' * 9,
    *('https://a.b/C ', '](', '1. ', '\n- ', '\nII. ', 'M. ', '\r\n', '...'),
  ]
  for size in [*range(40)] * 20 + [5000] * 6:
    text = ''.join(chance.choices(alphabet, k=size))
    whole = split(text, chance.choice(['en', 'fr', 'de', 'zh']), len, 30)
    assert whole.joined(whole.parts) == text
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(whole.spans))
    assert all(0 < len(part) <= 30 for part in whole.parts)
    assert not any(set(part) & set('\n\u2028') for part in whole.parts)


def test_ten_documents():
  """What was marked by hand is translated, all else comes back as it is."""
  pieces = re.split(r'(?m)^%% (\w+) .*\n', DOCUMENTS.read_text('utf-8'))[1:]
  assert len(pieces) == 20
  for language, marked in zip(pieces[::2], pieces[1::2], strict=True):
    text = re.sub('[⟦⟧]', '', marked)
    whole = split(text, language, len, 999)
    assert whole.parts == re.findall('⟦(.*?)⟧', marked)
    assert whole.joined(whole.parts) == text
    # Where sentences had no blank between them, there is one.
    blanks = re.sub('⟧(?=⟦)', '⟧ ', marked)
    outputs = whole.joined(['X'] * len(whole.parts))
    assert outputs == re.sub('⟦.*?⟧', 'X', blanks)


@pytest.mark.parametrize('line', RULED, ids=lambda line: line[:24])
def test_sentences_of_a_language(line):
  """A language, and sentences with a bar between them."""
  language, text = line.split(' ', 1)
  want = [part.strip() for part in text.split('|')]
  assert split(text.replace('|', ''), language, len, 999).parts == want


KINDS = 'a ', ' "a', '- a ', '`a ', 'a@', '[[a', '>', 'a.b ', '](', '1. ', '|'


@pytest.mark.parametrize('kind', KINDS)
def test_time_is_linear(kind):
  around = 'a' if kind == '|' else ''  # else the bars begin a table
  text = around + kind * (1_000_000 // len(kind)) + around
  begin = time.process_time()
  whole = split(text, 'de', len, 1 << 30)
  assert time.process_time() - begin < 9  # of one that is quadratic: hours
  assert whole.joined(whole.parts) == text


def test_sentences_and_cuts():
  text = 'Mr. A came. He saw.\n  "No!" he said. It is 5 p.m. now.'
  found = ['Mr. A came.', 'He saw.', '"No!" he said.', 'It is 5 p.m. now.']
  assert split(text, 'en', words, 9).parts == found
  long = 'One, two; three and four five six, seven: eight. Nine.'
  whole = split(long, 'en', words, 3)
  cut = 'One, two;|three and four|five six,|seven: eight.|Nine.'.split('|')
  assert whole.parts == cut and whole.num_cut == 1
  assert split('abcdefgh', 'en', len, 3).parts == ['ab', 'cd', 'ef', 'gh']
  # What sentencex reads at once neither ends nor begins a sentence.
  far = 'x ' * sentences._BLOCK + 'end. Mr. B. ' + 'y ' * sentences._BLOCK
  parts = split(far, 'en', words, 1 << 20).parts
  assert parts == [far[: far.index(' Mr.')], far[far.index('Mr.') :].strip()]
  assert len(split('a' + '—' * 100_000, 'en', len, 64).parts) > 1500
  # No accent is cut off.
  assert split('e\u0301' * 4, 'en', len, 3).parts == ['e\u0301'] * 4
  assert len(split('e' + '\u0301' * 5000, 'en', len, 3).parts) > 1600
  # Where nothing stands between two parts, outputs have a blank if others do.
  chinese = split('你好。今天很好!', 'zh', len, 9)
  assert chinese.joined(['Hello.', 'Nice!']) == 'Hello. Nice!'
  assert chinese.joined(chinese.parts) == chinese.text
  # Line breaks of an output are none of the text.
  assert whole.joined(['1\n2', ' 3 ', '4', '5', '6']) == '1 2 3 4 5 6'


def test_languages():
  names = None, 'deu_Latn', 'FR', 'de-AT', 'tur_Latn', 'nb'
  assert [*map(language_of, names)] == ['en', 'de', 'fr', 'de', 'tr', 'no']


def test_an_unknown_language_is_said_once():
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter('default')
    assert [language_of('tlh_Latn') for _ in range(3)] == ['tlh'] * 3
  (one,) = said
  assert "'tlh'" in str(one.message) and 'English' in str(one.message)
  assert split('Hi. You!', 'tlh', len, 9).parts == ['Hi.', 'You!']


@pytest.fixture(scope='module')
def toy(tokenizer):
  return chain_engine(tokenizer, max_input_len=8, max_decode_len=12)


def expected(text, alone):
  """The text with each part replaced by what came of it alone."""
  pieces = []
  for part, done in alone:
    before, text = text.split(part, 1)  # fails where a part is not in the text
    pieces += before, done.text
  return ''.join(pieces) + text


def test_outputs_are_those_of_the_sentences(toy):
  (whole,) = toy.generate([DOCUMENT], split='sentences')
  parts = ['a b!', 'A c.', 'd e?', 'A b.', 'c, a.']
  alone = toy.generate(parts)
  assert whole.num_sentences == 5 and not whole.num_cut
  pairs = [*zip(parts, alone, strict=True)]
  assert whole.text == expected(DOCUMENT, pairs)
  assert whole.tokens == [token for one in alone for token in one.tokens]
  assert len(whole.log_probs) == len(whole.tokens) == whole.stats.num_tokens
  calls = [one.stats.num_target_calls for one in alone]
  assert whole.stats.num_target_calls == sum(calls)
  reasons = {one.finish_reason for one in alone}
  assert (whole.finish_reason == 'length') == ('length' in reasons)
  # A sentence that is lost is seen.
  assert whole.text != expected(DOCUMENT, pairs[:2] + pairs[3:])


def test_each_sentence_gets_the_prefix(toy):
  ask = {'split': 'sentences', 'split_prefix': 'd '}
  (whole,) = toy.generate(['a b!\n c.'], **ask)
  parts = toy.generate(['d a b!', 'd c.'])
  assert whole.text == '\n '.join(one.text for one in parts)
  (other,) = toy.generate(['d a b!\n c.'], split='sentences')
  assert whole.text != other.text
  # As many tokens fewer fit beside it, and it is cut off from no part.
  (long,) = toy.generate(['a ' * 30], **ask)
  (short,) = toy.generate(['a ' * 30], split='sentences')
  assert long.num_sentences > short.num_sentences


@pytest.mark.parametrize(
  'prefix, said',
  [('<2de> ', '<2...>'), ('Translate to German: ', 'Translate ...:')],
)
def test_a_prefix_of_the_first_sentence_alone_is_said(tokenizer, prefix, said):
  ask = {'split': 'sentences'}
  engine = chain_engine(tokenizer, max_input_len=99, max_decode_len=12)
  split_up = splitter(engine.codec, engine.config, infer.Options(**ask))
  with pytest.warns(UserWarning, match=f"'{said}'.*split_prefix"):
    split_up(f'{prefix}a! b!')
  split_up(f'{prefix}a!')  # has no other sentence
  with_prefix = infer.Options(**ask, split_prefix=prefix)
  splitter(engine.codec, engine.config, with_prefix)('a! b!')


def test_samples_beams_and_texts_without_a_word(toy):
  ask = {'split': 'sentences', 'temperature': 1.0, 'seed': 4, 'num_samples': 2}
  texts = ['', DOCUMENT, ' \n', 'c.', 'a ' * 30]
  many = toy.generate(texts, **ask)
  assert [one.text for one in many[:2] + many[4:6]] == ['', '', ' \n', ' \n']
  assert {one.finish_reason for one in many[:2]} == {'empty'}
  few = toy.generate(texts[1:2], batch_size=1, example_ids=[1], **ask)
  assert [x.tokens for x in many[2:4]] == [x.tokens for x in few]
  assert few[0].text != few[1].text
  del ask['split']  # a text of one sentence is decoded as ever
  (one, two) = toy.generate(['c.'], example_ids=[3], **ask)
  assert [one.tokens, two.tokens] == [x.tokens for x in many[6:8]]
  assert many[8].num_cut == 1 and many[8].num_sentences > 1
  best = toy.generate(['a b! c.'], split='sentences', num_beams=2, n=2)
  apart = toy.generate(['a b!', 'c.'], num_beams=2, n=2)
  for whole, *parts in zip(best, apart[:2], apart[2:], strict=True):
    assert whole.text == ' '.join(part.text for part in parts)
    assert whole.score == sum(part.score for part in parts)


@pytest.mark.parametrize(
  'field, text, more',
  [
    ('split', 'a', {'split': 'words'}),
    ('split_lang', 'a', {'split': None, 'split_lang': 'de'}),
    ('split_lang', 'a', {'split_lang': 'German'}),
    ('split_prefix', 'a', {'split': None, 'split_prefix': 'd '}),
    ('prompts', 'a', {'prompts': [[5]]}),
    ('texts', [5, 6], {}),
    ('text', 'a \ud800', {}),
    ('example_ids', 'a', {'example_ids': [1, 2]}),
    ('temperature', 'a', {'temperature': [1.0]}),
  ],
)
def test_what_does_not_go_together(toy, field, text, more):
  with pytest.raises(ValueError, match=rf'^(Options\.)?{field}'):
    toy.generate([text], **{'split': 'sentences'} | more)
  with pytest.raises(ValueError, match='^split: expected None'):
    next(toy.stream('a', split='sentences'))


def test_without_the_package(toy, monkeypatch):
  monkeypatch.setitem(sys.modules, 'sentencex', None)
  with pytest.raises(ValueError, match=r'specdec_jax\[split\]'):
    toy.generate(['a. b.'], split='sentences')


def decoded(engine, folder, name, **settings):
  """Decodes in.txt into the folder of that name; returns the predictions."""
  paths = str(folder / 'in.txt'), str(folder / name)
  config = infer.DecodeConfig(lambda: engine, *paths, **settings)
  infer.decode(config, console=rich.console.Console(quiet=True))
  return (folder / name / 'predictions.jsonl').read_text()


def test_a_killed_run_goes_on(toy, tmp_path, monkeypatch):
  """Finished sentences are kept; a record stays one line of the file."""
  lines = ['a b! c.', '', ' d e? A b. a c.', 'c']
  asked = {'split': 'sentences', 'temperature': 1.0, 'num_samples': 2}
  (tmp_path / 'in.txt').write_text('\n'.join(lines) + '\n')

  settings = {'options': infer.Options(**asked), 'mode': 'speculative'}
  settings |= {'batch_size': 2, 'prefix': 'e '}
  run = functools.partial(decoded, toy, tmp_path, **settings)
  whole, kept = run('whole'), []
  append = Folder.append

  def killed(folder, content):
    append(folder, content)
    kept.append(content)
    if len(kept) == 2:
      raise KeyboardInterrupt

  monkeypatch.setattr('specdec_jax.infer.run._KEEP_SECONDS', 0.0)
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(Folder, 'append', killed)
    run('killed')
  assert run('killed') == whole
  records = [*map(json.loads, whole.splitlines())]
  assert [one['inputs'] for one in records] == lines
  want = toy.generate(lines, **asked, split_prefix='e ')
  have = [text for one in records for text in one['prediction']]
  assert have == [one.text for one in want]
  sources, outputs = zip(*records[2]['parts'], strict=True)
  assert sources == ('e d e?', 'e A b.', 'e a c.')
  assert '  '.join(outputs).split() == have[5].split()
  assert [one['sentences'] for one in records] == [2, 0, 3, 1]


def test_a_run_of_other_sentences_is_another_run(toy):
  example = infer.data.Example('a b. c', 'a b. c')
  splits = [split('a b. c', 'en', words, most) for most in (1, 9)]
  examples = [example._replace(sentences=one) for one in [None, *splits]]
  runs = [infer.data.DataSet([one], None, None) for one in examples]
  assert len({str(run.identity()) for run in runs}) == 3


def test_a_prefix_of_lines(toy, tmp_path):
  (tmp_path / 'in.txt').write_text('a b\n\nc\n')
  written = decoded(toy, tmp_path, 'out', mode='plain', prefix='d ')
  have = [json.loads(line)['prediction'] for line in written.splitlines()]
  first, last = toy.generate(['d a b', 'd c'], speculative=False)
  assert have == [first.text, '', last.text]


@pytest.mark.slow
@pytest.mark.skipif(not TEST_SPLIT.exists(), reason='needs ../shared/data')
def test_no_sentence_of_300_documents_is_missing():
  """Each sentence's translation stands in the output, in order."""
  with gzip.open(TEST_SPLIT, 'rt', encoding='utf-8') as stream:
    gold = [line.split('\t')[0] for line in stream]
  chance, source = random.Random(1), iter(gold)
  documents, inside = [], []
  for _ in range(300):
    own = [*itertools.islice(source, chance.randint(1, 9))]
    gaps = chance.choices(GAPS, k=len(own))
    documents.append(''.join(map(''.join, zip(own, gaps, strict=True))))
    inside.append(own)
  engine = Engine(load('demo'), load('demo-draft'), max_decode_len=48)
  done = engine.generate(documents, split='sentences')
  wholes = [split(text, 'en', words, 99) for text in documents]
  parts = [whole.parts for whole in wholes]
  flat = [part for one in parts for part in one]
  of = dict(zip(flat, engine.generate(flat), strict=True))
  for text, own, one in zip(documents, parts, done, strict=True):
    assert len(one.text.splitlines()) == len(text.splitlines())
    pairs = [(part, of[part]) for part in own]
    assert one.text == expected(text, pairs)
    if len(own) > 1:
      assert one.text != expected(text, pairs[1:])
  for whole in wholes:
    assert whole.joined(whole.parts) == whole.text
  known = [x in own for x, own in zip(inside, parts, strict=True) for x in x]
  assert sum(known) > 0.95 * len(known)


@pytest.mark.skipif(not ABSTRACTS.exists(), reason='needs ../shared/data')
def test_abstracts_lose_nothing():
  with gzip.open(ABSTRACTS, 'rt', encoding='utf-8') as stream:
    texts = [json.loads(line)['source'] for line in stream][:300]
  for text in texts:
    whole = split(text, 'en', words, 20)
    assert whole.joined(whole.parts) == text
    assert max(map(words, whole.parts)) <= 20


@pytest.mark.slow
def test_a_file_of_documents(tmp_path, capsys):
  """Lines stay lines; one that is not UTF-8, or endless, stops no other."""
  lines = ['Hello! I am here.', '', '  Who? Me.', '\t', 'x' * 300 + '. Bye!']
  data = b'\xff\xfe\n' + '\n'.join(lines).encode() + b'\n'
  (tmp_path / 'in.txt').write_bytes(data)
  out = tmp_path / 'out'
  flags = '--mode speculative --split sentences --gamma 3 --batch-size 2'
  path = str(tmp_path / 'in.txt')
  main.main(['demo', *flags.split(), '--output-dir', str(out), path])
  lines_out = (out / 'predictions.jsonl').read_text().splitlines()
  records = [*map(json.loads, lines_out)]
  assert [x['inputs'] for x in records[1:]] == lines
  assert 'UTF-8' in records[0]['error'] and records[0]['prediction'] is None
  first, empty, indented, blank, cut = (x['prediction'] for x in records[1:])
  assert re.fullmatch(r'\S.*[!.] \S.*', first) and indented.startswith('  ')
  assert (empty, blank) == ('', '\t') and cut
  assert [x['cut'] for x in records] == [0, 0, 0, 0, 0, 1]
  assert records[1]['sentences'] == 2
  said = ' '.join(capsys.readouterr().err.split())
  assert 'were split: 3, into' in said and 'and were cut: 1.' in said
