"""Chat templates: text, ids, lines of a file, and the server's chats."""

import dataclasses
import importlib.util
import json

import pytest

import causal_folder_test
import specdec_jax
from causal_lm_test import LLAMA
from specdec_jax import infer
from specdec_jax.engine.engine import Engine
from specdec_jax.text.chat import template_of
from specdec_jax.text.tokenizer_bpe import BpeTokenizer

_NEEDED = ('jinja2', 'tokenizers', 'safetensors')
pytestmark = pytest.mark.skipif(
  any(importlib.util.find_spec(name) is None for name in _NEEDED),
  reason="needs all of: pip install 'specdec_jax[huggingface,bpe]'",
)
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
SAID = [
  {'role': 'system', 'content': 'the dogs'},
  {'role': 'user', 'content': ' the red dog '},
]
TEXT = (
  '<bos><turn>system\nthe dogs<turn>\n<turn>user\nthe red dog<turn>\n'
  '<turn>assistant\n'
)


def folder_of(folder, template=TEMPLATE, **settings):
  """A vocabulary, with a template if there is one."""
  settings = {'bos_token': '<bos>', 'eos_token': '<turn>'} | settings
  files = causal_folder_test.vocabulary(folder, '<bos>', **settings)
  if template is not None:
    (files / 'chat_template.jinja').write_text(template)
  return files


def test_text_and_ids(tmp_path):
  tokenizer = BpeTokenizer(folder_of(tmp_path))
  template = template_of(tokenizer)
  assert template.text(SAID) == TEXT
  ids = template.ids(SAID)
  assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.eos_id) == 5
  assert template.ids(SAID, tokenizer.bos_id) == ids[1:]
  # As text the names of these tokens are letters.
  assert tokenizer.eos_id not in tokenizer.encode(TEXT)
  with pytest.raises(ValueError, match='messages: the system speaks first'):
    template.ids(SAID[::-1])


@pytest.mark.parametrize(
  'entry', [TEMPLATE, [{'name': 'default', 'template': TEMPLATE}]]
)
def test_a_template_in_the_settings(entry, tmp_path):
  tokenizer = BpeTokenizer(folder_of(tmp_path, None, chat_template=entry))
  assert template_of(tokenizer).text(SAID) == TEXT


def test_what_is_no_template(tmp_path):
  tokenizer = BpeTokenizer(folder_of(tmp_path, None))
  assert template_of(tokenizer) is None
  folder = tmp_path / 'other'
  folder.mkdir()
  tokenizer = BpeTokenizer(folder_of(folder, '{% if %}'))
  with pytest.raises(ValueError, match='chat template of .* is none'):
    template_of(tokenizer)


def test_a_template_is_kept_in_a_sandbox(tmp_path):
  attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
  template = template_of(BpeTokenizer(folder_of(tmp_path, attack)))
  with pytest.raises(ValueError, match='unsafe|access'):
    template.text(SAID)


@pytest.mark.skipif(
  importlib.util.find_spec('transformers') is None,
  reason="needs transformers: pip install 'specdec_jax[parity]'",
)
@pytest.mark.filterwarnings('ignore')  # those of transformers
def test_ids_are_those_of_transformers(tmp_path):
  import transformers

  files = folder_of(tmp_path)
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(files / 'tokenizer.json'),
    bos_token='<bos>',
    eos_token='<turn>',
    chat_template=TEMPLATE,
  )
  want = theirs.apply_chat_template(
    SAID, add_generation_prompt=True, tokenize=True, return_dict=False
  )
  assert template_of(BpeTokenizer(files)).ids(SAID) == want


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
  folder = tmp_path_factory.mktemp('chat')
  files = folder_of(folder)
  size = BpeTokenizer(files).vocab_size
  config = dataclasses.replace(LLAMA, vocab_size=size)
  causal_folder_test.write_folder(
    files, 'llama', config=config, vocab_size=size, eos_token_id=[267, 3]
  )
  model = specdec_jax.load(files)
  return Engine(model, model, gamma=2, max_input_len=64, max_decode_len=8)


def test_lines_are_messages(engine, tmp_path):
  lines = tmp_path / 'lines.txt'
  lines.write_text('the red dog\n\ndogs\n')
  config = dict(
    engine=lambda **_: engine, input_file=str(lines), mode='plain', num_shown=0
  )
  infer.decode(
    infer.DecodeConfig(**config, chat=True, output_dir=str(tmp_path / 'out'))
  )
  rows = (tmp_path / 'out' / 'predictions.jsonl').read_text().splitlines()
  rows = [json.loads(row) for row in rows]
  assert [row['inputs'] for row in rows] == ['the red dog', '', 'dogs']
  template = template_of(engine.tokenizer)
  for row in rows:
    said = [{'role': 'user', 'content': row['inputs']}]
    asked = template.ids(said, engine.bos_id)
    (want,) = engine.generate([asked], speculative=False)
    assert row['prediction'] == want.text
    (other,) = engine.generate([row['inputs']], speculative=False)
    assert other.tokens != want.tokens
  with pytest.raises(ValueError, match="on_too_long: .*'error' in a chat"):
    infer.DecodeConfig(**config, chat=True, on_too_long='truncate')


@pytest.fixture(scope='module')
def ask(engine):
  import serve_test  # which needs the packages below

  with serve_test.asking_of(engine) as ask:
    yield ask


@pytest.mark.skipif(
  any(
    importlib.util.find_spec(name) is None
    for name in ('starlette', 'httpx', 'openai', 'uvicorn')
  ),
  reason="needs pip install 'specdec_jax[test]'",
)
class TestServer:
  def body(self, **changes):
    return {'messages': SAID, 'temperature': 0, 'max_tokens': 6} | changes

  def test_the_next_message(self, ask, engine):
    template = template_of(engine.tokenizer)
    ids = template.ids(SAID, engine.bos_id)
    (want,) = engine.generate([ids], max_length=6)
    answer = ask('/v1/chat/completions', self.body()).json()
    assert answer['object'] == 'chat.completion'
    (choice,) = answer['choices']
    assert choice['message'] == {'role': 'assistant', 'content': want.text}
    assert answer['usage']['prompt_tokens'] == len(ids) + 1
    parts = [{'type': 'text', 'text': part} for part in (' the red', ' dog ')]
    said = [SAID[0], {'role': 'user', 'content': parts}]
    again = ask('/v1/chat/completions', self.body(messages=said)).json()
    assert again['choices'] == answer['choices']

  def test_a_stream(self, ask):
    whole = ask('/v1/chat/completions', self.body()).json()
    sent = ask('/v1/chat/completions', self.body(stream=True)).text
    events = [
      json.loads(line.removeprefix('data: '))
      for line in sent.splitlines()
      if line.startswith('data: {')
    ]
    deltas = [event['choices'][0]['delta'] for event in events]
    assert deltas[0]['role'] == 'assistant'
    assert all('role' not in delta for delta in deltas[1:])
    text = ''.join(delta['content'] for delta in deltas)
    assert text == whole['choices'][0]['message']['content']
    assert {event['object'] for event in events} == {'chat.completion.chunk'}

  @pytest.mark.parametrize(
    ('changes', 'param', 'words'),
    [
      ({'messages': []}, 'messages', 'a list of'),
      ({'messages': 'x'}, 'messages', 'a list of'),
      ({'messages': [{'role': 'user'}]}, 'messages', 'as message 0'),
      (
        {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
        'messages',
        'Only text',
      ),
      (
        {'messages': [{'role': 'user', 'content': 'x', 'tool_calls': []}]},
        'messages',
        'tool_calls',
      ),
      ({'messages': SAID[::-1]}, 'messages', 'the system speaks first'),
      (
        {'messages': [{'role': 'user', 'content': 'x ' * 99}]},
        'prompt',
        '64 at most',
      ),
      ({'prompt': 'x'}, 'prompt', 'in a chat'),
      ({'logprobs': True}, 'logprobs', 'false in a chat'),
      ({'max_completion_tokens': 9}, 'max_completion_tokens', 'from 1 to 8'),
      ({'tools': []}, 'tools', 'no field'),
    ],
  )
  def test_what_is_refused(self, changes, param, words, ask):
    answer = ask('/v1/chat/completions', self.body(**changes))
    assert answer.status_code == 400
    error = answer.json()['error']
    assert error['param'] == param and words in error['message']
