"""The object of notebooks: what it loads, refuses, answers and shows."""

import dataclasses
import html.parser
import importlib.util
import io
import itertools
import json
import shutil

import jax
import pytest
import rich.console

import small_vocabulary
from specdec_jax import notebook
from specdec_jax.checkpoints import (
  huggingface,
  huggingface_names,
  save_t5x,
)
from specdec_jax.checks.memory import DoesNotFitError, gib
from specdec_jax.engine.trace_view import Trace
from specdec_jax.models.t5 import T5
from specdec_jax.notebook import Interactive
from specdec_jax.partitioning import Placement
from specdec_jax.text.tokenizer import train_tokenizer

TEXTS = ['the old house sings', 'a red dog', 'the tree']
LENGTHS = {'max_input_len': 32, 'max_decode_len': 12}

needs_safetensors = pytest.mark.skipif(
  importlib.util.find_spec('safetensors') is None,
  reason="needs safetensors: pip install 'specdec_jax[huggingface]'",
)


def draw(network: T5, seed: int):
  return network.init(jax.random.key(seed))


def save_folder(
  folder, network, seed, vocabulary=None, ids=huggingface_names.T5_IDS
):
  """A Hugging Face folder, with its vocabulary as its authors leave it."""
  params = draw(network, seed)
  huggingface.save_huggingface(folder, network.config, params, ids=ids)
  if vocabulary is not None:
    shutil.copy(vocabulary, folder / 'spiece.model')
  return str(folder)


@pytest.fixture(scope='module')
def networks():
  return small_vocabulary.network(2), small_vocabulary.network(1)


@pytest.fixture(scope='module')
def files(folder, networks):
  """The pair as T5X's files, which do not describe themselves."""
  names = ('target.msgpack', 'draft.msgpack')
  for seed, (network, name) in enumerate(zip(networks, names, strict=True)):
    save_t5x(folder / name, draw(network, seed), step=1)
  return [folder / name for name in names]


@pytest.fixture(scope='module')
def model(files, networks, tokenizer) -> Interactive:
  return notebook.load(
    *files,
    network=networks[0],
    draft_network=networks[1],
    tokenizer=tokenizer.path,
    gamma=3,
    **LENGTHS,
  )


@needs_safetensors
@pytest.mark.parametrize('dtype', [None, 'bfloat16'])
def test_folders_describe_themselves(
  tmp_path, networks, tokenizer, model, dtype
):
  paths = [
    save_folder(tmp_path / name, network, seed, tokenizer.path)
    for seed, (name, network) in enumerate(
      zip(('large', 'small'), networks, strict=True)
    )
  ]
  found = notebook.load(*paths, dtype=dtype, gamma=3, **LENGTHS)
  want = dtype or 'float32'
  for side, network in zip(('target', 'draft'), networks, strict=True):
    config = dataclasses.replace(network.config, dtype=want)
    assert found.models[side].network == T5(config)
  leaves = jax.tree.leaves(found.params)
  assert {str(leaf.dtype) for leaf in leaves} == {want}
  assert found.tokenizer.fingerprint == tokenizer.fingerprint
  if dtype is None:  # the same weights as T5X's files
    outputs = found.generate(TEXTS)
    assert outputs == model.generate(TEXTS)
    assert len(outputs) == len(TEXTS) and all(done.tokens for done in outputs)


def test_a_placement_may_say_the_dtype(files, networks, tokenizer):
  found = notebook.load(
    files[0],
    network=networks[0],
    tokenizer=tokenizer,
    placement=Placement('bfloat16'),
    **LENGTHS,
  )
  leaves = jax.tree.leaves(found.params)
  assert {str(leaf.dtype) for leaf in leaves} == {'bfloat16'}
  assert found.models['target'].network.config.dtype == 'bfloat16'


@needs_safetensors
def test_a_drafter_of_another_vocabulary(tmp_path, networks, tokenizer):
  target = save_folder(tmp_path / 'large', networks[0], 0, tokenizer.path)
  size = small_vocabulary.VOCAB_SIZE + 2000
  wider = small_vocabulary.network(1, size)
  small = save_folder(tmp_path / 'small', wider, 1, tokenizer.path)
  with pytest.raises(ValueError, match=f'model has a vocabulary of {size}'):
    notebook.load(target, small)

  # As many ids, and other pieces.
  words = itertools.permutations('lorem ipsum dolor sit amet'.split(), 3)
  other = train_tokenizer(map(' '.join, words), tmp_path / 'other.model', 272)
  small = save_folder(tmp_path / 'same', networks[1], 1, other.path)
  with pytest.raises(
    ValueError, match="same/spiece.model' differs from .*large/spiece"
  ):
    notebook.load(target, small)
  # Those of one vocabulary come as far as the weights.
  (tmp_path / 'large' / 'model.safetensors').write_bytes(b'broken')
  shutil.copy(tokenizer.path, tmp_path / 'same' / 'spiece.model')
  with pytest.raises(ValueError, match='model.safetensors'):
    notebook.load(target, small)


@needs_safetensors
def test_special_ids_of_a_folder(tmp_path, networks, tokenizer):
  """As MADLAD-400 has them: 0 is unknown, 1 pads, 2 ends."""
  vocabulary = tmp_path / 'madlad.model'
  small_vocabulary.train_as_madlad(vocabulary)
  ids = huggingface_names.SpecialIds(decoder_start=0, eos=(2,), pad=1)
  paths = [
    save_folder(tmp_path / name, network, seed, vocabulary, ids)
    for seed, (name, network) in enumerate(
      zip(('large', 'small'), networks, strict=True)
    )
  ]
  found = notebook.load(*paths, gamma=3, **LENGTHS)
  assert found.input_ids(TEXTS[0])[-1] == 2
  fast = [one.tokens for one in found.generate(TEXTS)]
  (score,) = found.score(TEXTS[:1], ['the tree'])
  ends = [*found.tokenizer.encode('the tree'), 2]
  assert found.score(TEXTS[:1], [ends]) == [score]

  # With T5's vocabulary nothing would ever end.
  with pytest.raises(
    ValueError, match=r'with id 1, .*large.* with 2 .*another'
  ):
    notebook.load(paths[0], tokenizer=tokenizer)

  # Where several ids end an output, each does.
  tokens = fast[0]
  stop = next(t for t in tokens[1:] if t != tokens[0])
  settings = tmp_path / 'large' / huggingface.GENERATION
  settings.write_text(json.dumps({'eos_token_id': [2, stop]}))
  found = notebook.load(paths[0], **LENGTHS)
  done = found.generate(TEXTS)[0]
  assert done.tokens == tokens[: tokens.index(stop) + 1]
  assert done.finish_reason == 'stop'
  plain = found.generate(TEXTS, stop_ids=[2])
  assert [one.tokens for one in plain] == fast


@needs_safetensors
def test_a_folder_without_its_vocabulary(tmp_path, networks, tokenizer):
  folder = save_folder(tmp_path / 'alone', networks[0], 0)
  with pytest.raises(ValueError, match=r'no vocabulary .spiece.model.*alone'):
    notebook.load(folder)
  model = notebook.load(folder, tokenizer=tokenizer, **LENGTHS)
  assert model.tokenizer is tokenizer
  # Without a drafter, decoding is plain unless it is asked for.
  (done,) = model.generate(TEXTS[:1])
  assert done.stats.num_target_calls == done.stats.num_tokens
  with pytest.raises(ValueError, match='needs a drafter'):
    model.generate(TEXTS, speculative=True)
  with pytest.raises(ValueError, match='needs a drafter'):
    model.trace(TEXTS[0])


def test_bad_input(files, networks, tokenizer, tmp_path, monkeypatch):
  target, draft = networks
  given = {'network': target, 'tokenizer': tokenizer}
  missing = tmp_path / 'missing.msgpack'
  with pytest.raises(ValueError, match='No checkpoint .*missing.msgpack'):
    notebook.load(missing, **given)
  with pytest.raises(ValueError, match='No checkpoint .*missing.msgpack'):
    notebook.load(files[0], missing, draft_network=draft, **given)
  with pytest.raises(ValueError, match=r'target.msgpack.* network=T5'):
    notebook.load(files[0], tokenizer=tokenizer)
  with pytest.raises(ValueError, match=r'draft.msgpack.* network=T5'):
    notebook.load(*files, **given)
  with pytest.raises(ValueError, match='draft_network was given without'):
    notebook.load(files[0], draft_network=draft, **given)
  with pytest.raises(ValueError, match='num_decoder_layers is 1, expected 2'):
    notebook.load(files[1], **given)
  with pytest.raises(ValueError, match='no vocabulary'):
    notebook.load(files[0], network=target)
  monkeypatch.setattr(notebook.loading, 'device_bytes', lambda: 1 << 10)
  with pytest.raises(DoesNotFitError, match='target parameters'):
    notebook.load(files[0], **given)


def test_answers_are_the_engines(model):
  fast = model.generate(TEXTS)
  plain = model.generate(TEXTS, speculative=False)
  assert [one.tokens for one in fast] == [one.tokens for one in plain]
  assert sum(one.stats.num_tested for one in fast) > 0
  assert not sum(one.stats.num_tested for one in plain)
  pieces = list(model.stream(TEXTS[0]))
  assert ''.join(pieces) == fast[0].text and len(pieces) > 1


def test_score_is_what_decoding_reports(model):
  done = model.generate(TEXTS)
  scores = model.score(TEXTS, [one.tokens for one in done])
  for one, score in zip(done, scores, strict=True):
    assert score.log_probs == pytest.approx(one.log_probs, abs=1e-4)
  # Of strings the end counts; inputs are the same with or without theirs.
  tokenizer = model.tokenizer
  ids = [tokenizer.encode(text) for text in TEXTS]
  ended = [[*one, tokenizer.eos_id] for one in ids]
  by_text = model.score(TEXTS, TEXTS)
  assert by_text == model.score(ids, ended) == model.score(ended, ended)
  assert len(by_text[0].log_probs) == len(ids[0]) + 1
  assert by_text != model.score(TEXTS, ids)
  with pytest.raises(ValueError, match='targets must be a sequence'):
    model.score(TEXTS, TEXTS[0])
  with pytest.raises(ValueError, match='an output for each input'):
    model.score(TEXTS, ids[:1])


def printed(shown, **options) -> str:
  stream = io.StringIO()
  rich.console.Console(file=stream, width=100, **options).print(shown)
  return stream.getvalue()


class Page(html.parser.HTMLParser):
  """Checks that tags nest; collects them, the text and the frames."""

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.text, self.frames = [], [], '', []
    self.feed(text)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.open.append(tag)
    if tag == 'iframe':
      assert 'sandbox' in dict(attrs)
      self.frames.append(dict(attrs)['srcdoc'])

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data


def test_it_shows_what_is_loaded(model, files, networks, monkeypatch):
  monkeypatch.setattr(model, 'last_trace', None)
  config = networks[0].config
  count = sum(leaf.size for leaf in jax.tree.leaves(draw(networks[0], 0)))
  page = Page(model._repr_html_())
  assert not page.frames and page.tags.count('table') == 2
  for text in (printed(model), page.text):
    for part in (
      f'{config.num_encoder_layers} + {config.num_decoder_layers}',
      f'{config.num_heads} of {config.head_dim}',
      f'{count:,}',
      'float32',
      gib(4 * count),
      jax.default_backend(),
      f'{small_vocabulary.VOCAB_SIZE} pieces',
      'gamma',
    ):
      assert part in text, part
  assert 'target.msgpack' in repr(model) and 'gamma=3' in repr(model)


def test_it_shows_the_last_trace(model):
  text = '<b>the & tree'
  found = model.trace(text)
  assert isinstance(found, Trace) and model.last_trace is found
  done = model.generate([text, *TEXTS[1:]])[0]
  assert len(found.rounds) == done.stats.num_target_calls
  kept = sum(len(one.kept) for one in found.rounds)
  assert kept == done.stats.num_tokens
  summary = f'{kept} tokens in {len(found.rounds)} calls of the target'
  assert summary in repr(found)
  plain, coloured = (
    printed(found, **options)
    for options in (
      {'color_system': None},
      {'force_terminal': True, 'color_system': 'standard', 'no_color': False},
    )
  )
  assert summary in plain and summary in coloured
  assert '\x1b' not in plain and '{+' in plain  # marks in place of colours
  assert '\x1b[1;4;34m' in coloured and '{+' not in coloured
  assert printed(model).endswith(printed(found))
  page = Page(model._repr_html_())
  (inner,) = page.frames
  assert 'b' not in page.tags and '&lt;b&gt;the &amp; tree' in inner
  assert summary in inner and inner.startswith('<!DOCTYPE html>')
  assert 'lossy' not in repr(found) + plain + inner


def test_a_lenient_trace_is_marked_as_lossy(model):
  found = model.trace(TEXTS[0], lenience=0.5)
  (inner,) = Page(found._repr_html_()).frames
  for shown in (repr(found), printed(found), inner):
    assert 'lossy (lenience 0.5)' in shown
