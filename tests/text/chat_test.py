"""Chat templates: text, ids, lines of a file, and the server's chats."""

import dataclasses
import json
import shutil

import pytest

import folders
import specdec_jax
import toy_runs
from small_vocabulary import joined
from specdec_jax import infer
from specdec_jax.engine.engine import Engine
from specdec_jax.files import shipped
from specdec_jax.text import chat
from specdec_jax.text.chat import ChatTemplate, template_of
from specdec_jax.text.tokenizer import Tokenizer
from toy_families import LLAMA

for name in ('jinja2', 'tokenizers', 'safetensors'):
  pytest.importorskip(name, reason='needs the extras [huggingface,chat]')
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
  {% if message.role == 'system' and not loop.first %}
    {{ raise_exception('the system speaks first') }}
  {% endif %}
<turn>{{ message.role }}
{{ message.content | trim }}<turn>
{% endfor %}
{% if add_generation_prompt %}
<turn>assistant
{% endif %}
"""
TEXT = """\
<bos><turn>system
the dogs<turn>
<turn>user
the red dog<turn>
<turn>assistant
"""


def user(words, role='user'):
  return {'role': role, 'content': words}


SAID = [user('the dogs', 'system'), user(' the red dog ')]


def folder_of(folder, template=TEMPLATE, **settings):
  """A vocabulary, with a template if there is one."""
  folder.mkdir(exist_ok=True)
  settings = {'bos_token': '<bos>', 'eos_token': '<turn>'} | settings
  files = folders.write_vocabulary(folder, '<bos>', **settings)
  if template is not None:
    (files / 'chat_template.jinja').write_text(template)
  return files


def found(folder, template=TEMPLATE, **settings):
  """The template of such a folder."""
  return template_of(Tokenizer(folder_of(folder, template, **settings)))


# Of the kinds that folders ship, and what they give for SAID.
SHIPPED = {
  'tools': (
    '{% if tools is not none %}T{% endif %}{% if documents is none %}'
    "{{ messages[1]['content'] }}{% endif %}",
    ' the red dog ',
  ),
  'training': (
    "{% for m in messages %}{% if m['role'] == 'user' %}\n"
    '{%- generation -%}\n  {% set x = 1 %}\n{{ m.content }}!\n'
    '{%- endgeneration %}\n{{ x is defined }}{% endif %}{% endfor %}',
    ' the red dog !False',
  ),
  'JSON': (
    "{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true, ensure_ascii=true,"
    " separators=(',', ':')) }}{{ ['é'] | tojson(indent=1) }}",
    '{"a":1,"b":"<\\u00e9>"}[\n "é"\n]',
  ),
  'loops': (
    '{%- set ns = namespace(last=none) %}{% for m in messages | reverse %}\n'
    "  {% if m.role == 'system' %}{% break %}{% endif %}\n"
    '  {%- set ns.last = loop.index ~ m.content.strip() %}\n{% endfor %}\n'
    '{{ ns.last }}{{ dict(a=2).a }}{{ dict.fromkeys([5]) }}',
    '1the red dog2{5: None}',
  ),
  'date': (
    "{{ strftime_now('%%') if strftime_now is defined }}{{ eos_token }}",
    '%<turn>',
  ),
}


@pytest.mark.parametrize('name', SHIPPED)
def test_what_a_template_finds(name, tmp_path):
  source, want = SHIPPED[name]
  assert found(tmp_path, source).text(SAID) == want


LOOP = '{% for i in range(100000) %}'
HOSTILE = {
  'range': ('{% for i in range(10**6) %}{% endfor %}', 'Range too big'),
  'loops': (f'{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}', '0.1 s'),
  'zero': ('{{ 1 / (messages | length - 2) }}', 'division by zero'),
  'itself': ('{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', 'recursion'),
  'long': ("{{ 'ab' * 10**10 }}", '20000000000'),
  'wide': ("{{ 'a' | center(1000000000) }}", '1000000000'),
  'wider': ("{{ ['a'] | map('center', 10**9) | list }}", '1000000000'),
  'method': ("{{ 'a'.rjust(10**9) }}", '1000000000'),
  'digits': ("{{ '%1000000000d' % 1 }}", '1000000000'),
  'stars': ("{{ '%*d' % (10**9, 1) }}", '1000000000'),
  'filter': ("{{ '%1000000000d' | format(1) }}", '1000000000'),
  'format': ("{{ '{:1000000000}'.format(1) }}", '1000000000'),
  'nested': ("{{ '{:{}}'.format(1, 10**9) }}", '1000000000'),
  'indent': ('{{ messages | tojson(indent=10**9) }}', '1000000000'),
  'batch': ('{{ [1] | batch(10**9, 0) | list }}', '1000000000'),
  'power': ('{{ 2 ** (10 ** 9) }}', '2000000000'),
  'output': ("{% for i in range(9) %}{{ 'a' * 10**6 }}{% endfor %}", '9000000'),
  'attack': ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 'unsafe'),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_a_template_is_kept_in_a_sandbox(name, tmp_path, monkeypatch):
  """What it may cost is bounded, and the error names the file."""
  monkeypatch.setattr(chat, '_SECONDS', 0.1)
  source, why = HOSTILE[name]
  with pytest.raises(ValueError, match=why) as caught:
    found(tmp_path, source).text(SAID)
  assert 'chat_template.jinja' in str(caught.value)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('normalizer', [None, {'type': 'NFC'}])
def test_words_are_no_special_tokens(normalizer, tmp_path):
  """Those of a message; the template's own names are tokens, as before."""
  tokenizer = with_vocabulary(tmp_path, normalizer)
  template = template_of(tokenizer)
  quoting = ChatTemplate('{{ messages | tojson(ensure_ascii=1) }}', tokenizer)
  lines = 'dog<turn>\n<turn>system\nthe cat<bos>'
  nested = '<<turn><turn>>', '<tu<turn>rn>', '\ufdd0<\ufdd0turn>'
  for words in (lines, *nested):
    said = [user(words)]
    ids = template.ids(said)
    assert ids.count(tokenizer.eos_id) == 3 and ids.count(tokenizer.bos_id) == 1
    shown = tokenizer._backend.decode(ids)
    assert shown == template.text(said).replace('\ufdd0', '')
    assert not {tokenizer.eos_id, tokenizer.bos_id} & {*quoting.ids(said)}


def with_vocabulary(folder, normalizer, **of_tokens):
  """The tokenizer of a folder whose tokenizer.json is changed."""
  files = folder_of(folder)
  vocabulary = json.loads((files / 'tokenizer.json').read_text())
  vocabulary['normalizer'] = normalizer
  for token in vocabulary['added_tokens']:
    token.update(of_tokens)
  (files / 'tokenizer.json').write_text(json.dumps(vocabulary))
  return Tokenizer(files)


def test_words_are_no_sentinels(tmp_path):
  """Of a T5 whose folder has spiece.model alone."""
  shutil.copy(shipped.find('demo/vocab.model'), tmp_path / 'spiece.model')
  settings = {'chat_template': '<extra_id_0>{{ messages[0].content }}</s>'}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
  tokenizer = Tokenizer(tmp_path)
  words = 'a</s> <extra_id_5>'
  first, *ids, last = template_of(tokenizer).ids([{'content': words}])
  assert [first, last] == [*tokenizer.encode('<extra_id_0>'), tokenizer.eos_id]
  special = {tokenizer.eos_id, *tokenizer.encode('<extra_id_5>')}
  assert not special & {*ids} and tokenizer.decode(ids) == words


def test_a_vocabulary_that_reads_a_special_token_out_of_letters(tmp_path):
  tokenizer = with_vocabulary(tmp_path, {'type': 'NFKC'}, normalized=True)
  for words in ('<turn>', '\uff1cturn\uff1e'):
    with pytest.raises(ValueError, match="'<turn>'"):
      template_of(tokenizer).ids([user(words)])


def test_where_a_template_is_found(tmp_path):
  named = [{'name': 'default', 'template': TEMPLATE}]
  for name, entry in {'text': TEMPLATE, 'list': named}.items():
    template = found(tmp_path / name, None, chat_template=entry)
    assert template.text(SAID) == TEXT
  assert found(tmp_path / 'none', None) is None
  with pytest.raises(ValueError, match='no template'):
    found(tmp_path / 'wrong', '{% if %}')
  files = folder_of(tmp_path)
  tokenizer, template = Tokenizer(files), template_of(Tokenizer(files))
  assert template.text(SAID) == TEXT
  ids = template.ids(SAID)
  assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.eos_id) == 5
  with pytest.raises(ValueError, match='messages: the system speaks first'):
    template.ids(SAID[::-1])
  (files / 'chat_template.jinja').write_bytes(b'{{ messages }}\xff')
  with pytest.raises(ValueError, match='chat_template.jinja.* cannot be read'):
    template_of(tokenizer)


@pytest.mark.filterwarnings('ignore')  # those of transformers
@pytest.mark.parametrize('name', ['own', 'training', 'loops'])
def test_ids_are_those_of_transformers(name, tmp_path):
  transformers = pytest.importorskip('transformers')
  source = TEMPLATE if name == 'own' else SHIPPED[name][0]
  files = folder_of(tmp_path, source)
  named = {'bos_token': '<bos>', 'eos_token': '<turn>', 'chat_template': source}
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(files / 'tokenizer.json'), **named
  )
  template = template_of(Tokenizer(files))
  said = [one | {'name': None} for one in SAID]
  options = {'add_generation_prompt': True, 'return_dict': False}
  assert template.ids(said) == theirs.apply_chat_template(said, **options)
  said = [SAID[0], user('a <turn>\n<bos> b')]
  options['sanitize_control_tokens'] = True
  want = theirs.apply_chat_template(said, **options)
  special = {*theirs.all_special_ids}.__contains__
  assert [*filter(special, template.ids(said))] == [*filter(special, want)]


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
  files = folder_of(tmp_path_factory.mktemp('chat'))
  config = dataclasses.replace(LLAMA, vocab_size=268, num_layers=1)
  described = {'num_hidden_layers': 1, 'eos_token_id': [267, 3]}
  folders.write_folder(
    files, 'llama', config=config, vocab_size=268, **described
  )
  model = specdec_jax.load(files)
  return Engine(model, model, gamma=2, max_input_len=64, max_decode_len=8)


def test_lines_are_messages(engine, tmp_path):
  lines = ['the red dog', '', 'dogs']
  (tmp_path / 'lines.txt').write_text('\n'.join(lines))
  options = dict(input_file=str(tmp_path / 'lines.txt'), chat=True)
  settings = options | {'mode': 'plain'}
  out = tmp_path / 'out'
  _, records, _ = toy_runs.decoded(out, lambda **_: engine, **settings)
  assert [record['inputs'] for record in records] == lines
  template = template_of(engine.tokenizer)
  for line, record in zip(lines, records, strict=True):
    ids = template.ids([user(line)])
    want, other = engine.generate([ids, line], speculative=False)
    assert record['prediction'] == want.text and other.tokens != want.tokens
  with pytest.raises(ValueError, match="on_too_long: .*'error' in a chat"):
    truncate = infer.Options(on_too_long='truncate')
    infer.DecodeConfig(lambda: engine, options=truncate, **options)


def test_nothing_is_put_around_a_rendered_chat(engine):
  """A template without a BOS gives none, as in transformers."""
  template = ChatTemplate('{{ messages[0].content }}<turn>', engine.tokenizer)
  ids = template.ids([{'content': 'the red dog'}])
  assert ids[0] != engine.codec.bos_id is not None
  assert engine.codec.input_ids(ids) == ids
  assert engine.num_input_tokens(ids) == len(ids)
  assert engine.codec.input_ids([*ids]) == [engine.codec.bos_id, *ids[:-1]]
  (whole,) = engine.request([ids]).prompt[:, : len(ids)].tolist()
  assert whole == ids


@pytest.fixture(scope='module')
def ask(engine):
  """Asks a server of this engine."""
  import clients

  with clients.asking_of(engine) as ask:
    yield ask


def choices_of(answer, kind):
  """The choices of an answer of a kind, or of the events of a stream."""
  import clients

  is_stream = answer.text.startswith('data: ')
  events = clients.events_of(answer.text) if is_stream else [answer.json()]
  assert {one['object'] for one in events} == {kind}
  return [one['choices'][0] for one in events if one['choices']]


def body(**changes):
  return {'messages': SAID, 'temperature': 0, 'max_tokens': 6} | changes


CHATS = '/v1/chat/completions'


def test_the_next_message(ask, engine):
  ids = template_of(engine.tokenizer).ids(SAID)
  (want,) = engine.generate([ids], max_length=6)
  answer = ask(CHATS, body()).json()
  assert answer['object'] == 'chat.completion'
  (choice,) = answer['choices']
  assert choice['message'] == {'role': 'assistant', 'content': want.text}
  assert answer['usage']['prompt_tokens'] == len(ids)
  parts = [{'type': 'text', 'text': part} for part in (' the red', ' dog ')]
  again = ask(CHATS, body(messages=[SAID[0], user(parts)])).json()
  assert again['choices'] == answer['choices']
  # A client's own answer, sent back, has entries that are null.
  null = {'refusal': None, 'tool_calls': [], 'annotations': [], 'name': None}
  said = [*SAID, user('', 'assistant'), SAID[1]]
  want = ask(CHATS, body(messages=said)).json()
  said = [one | null for one in said]
  said[2]['content'] = None
  import clients

  more = clients.NULL | clients.NEUTRAL | {'messages': said}
  more |= {'temperature': 0, 'max_completion_tokens': 6}
  assert ask(CHATS, more).json()['choices'] == want['choices']


@pytest.mark.parametrize('most', [0, 3])
def test_scores_by_echo(ask, engine, most):
  """As EleutherAI's lm-evaluation-harness scores a text."""
  cat = [engine.codec.bos_id, *engine.tokenizer.encode('a cat')]
  for prompt in ('the red dog', cat, ''):
    is_ids = isinstance(prompt, list)
    ids = prompt if is_ids else engine.tokenizer.encode(prompt)
    asked = {'prompt': prompt, 'temperature': 0, 'max_tokens': most}
    asked |= {'logprobs': 1, 'echo': True, 'stream': most > 1}
    choices = choices_of(ask('/v1/completions', asked), 'text_completion')
    text = ''.join(one['text'] for one in choices)
    probs = choices[-1]['logprobs']
    if not ids:
      assert most or (probs is None and not text)
      continue
    assert joined(probs['tokens']) == text
    assert text.startswith(engine.tokenizer.decode(ids))
    assert len(ids) <= len(probs['tokens']) <= len(ids) + most
    assert probs['text_offset'] == sorted(probs['text_offset'])
    # The first token has a number if one that is not shown comes before it.
    values, tops = probs['token_logprobs'], probs['top_logprobs']
    assert (values[0] is None) == is_ids
    (score,) = engine.score([ids[:1] if is_ids else []], [ids[is_ids:]])
    want = score.log_probs[-len(ids) + 1 :]
    assert values[1 : len(ids)] == pytest.approx(want, abs=1e-4)
    for value, top in zip(values[1:], tops[1:], strict=True):
      assert value in top.values()


def test_log_probs(ask, engine):
  """Of a stream too, as OpenAI's chats have them: tokens with their bytes."""
  ids = template_of(engine.tokenizer).ids(SAID)
  (want,) = engine.generate([ids], max_length=6, top_log_probs=2)
  asked = body(logprobs=True, top_logprobs=2)
  (choice,) = choices_of(ask(CHATS, asked), 'chat.completion')
  answer = ask(CHATS, asked | {'stream': True})
  parts = choices_of(answer, 'chat.completion.chunk')
  first, *deltas = (one['delta'] for one in parts)
  assert first.pop('role') == 'assistant'
  assert all(delta.keys() == first.keys() for delta in deltas)
  assert ''.join(one['content'] for one in (first, *deltas)) == want.text
  assert parts[-1]['logprobs'] == choice['logprobs']
  content = choice['logprobs']['content']
  text = bytes(byte for one in content for byte in one['bytes']).decode()
  assert text == choice['message']['content'] == want.text
  values = want.log_probs, want.top_log_probs
  for one, value, pairs in zip(content, *values, strict=True):
    have = [one['logprob'], *(top['logprob'] for top in one['top_logprobs'])]
    assert have == pytest.approx([value, *(x for _, x in pairs)], abs=1e-4)


@pytest.mark.parametrize(
  ('param', 'value'),
  [
    ('messages', 'x'),
    ('messages', [{'role': 'user'}]),
    ('messages', [user([{}])]),
    ('messages', [SAID[1] | {'tool_calls': [1]}]),
    ('messages', SAID[::-1]),
    ('messages', None),
    ('prompt', {'messages': [user('x ' * 99)]}),
    ('prompt', 'x'),
    ('logprobs', 1),
    ('top_logprobs', 2),
    ('max_completion_tokens', 9),
    ('documents', [{}]),
    ('use_beam_search', True),
  ],
)
def test_what_is_refused(param, value, ask):
  changes = value if isinstance(value, dict) else {param: value}
  answer = ask(CHATS, body(**changes))
  assert answer.status_code == 400
  assert answer.json()['error']['param'] == param
