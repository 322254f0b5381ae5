"""The kernel that draws tokens, interpreted, beside the plain code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backend_test
from attention_kernel_test import (  # noqa: F401
  NEAR,
  _long_inputs,
  network,
  traced,
)
from gpu_check_test import _nothing_is_kept, check, compiles_kernels, settings  # noqa: F401
from specdec_jax import probs
from specdec_jax.measure.compiled import devices, gpu
from specdec_jax.measure.compiled.compiler import Compiler
from specdec_jax.models import (
  backend,
  base,
  kernel_parts,
  products,
  token_kernel,
)
from specdec_jax.models.base import Draws, Ends
from specdec_jax.models.norms import Unnormed
from toy_requests import quick_jit

INTERPRETED = 'interpreted layers'
EPSILON = 1e-6
CASES = [  # rows, tokens read, M, V, dtype, of the kernel
  (1, 2, 48, 96, 'float32', 'float32'),
  (3, 1, 64, 250, 'float32', 'int8'),  # no multiple of any tile
  (8, 2, 96, 2240, 'bfloat16', 'bfloat16'),
]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
  monkeypatch.setattr(backend, 'gpu_cores', lambda: 2)


def case(rows, num_read, size, vocab_size, dtype, kernel_dtype):
  """A head; x [B, S, M]; which of the S counts; and lengths."""
  rng = np.random.default_rng(rows)
  scale = None
  if kernel_dtype == 'int8':
    kernel = jnp.asarray(rng.integers(-127, 128, (vocab_size, size)), 'int8')
    scale = jnp.asarray(rng.uniform(0.5, 1, vocab_size) / 500, jnp.float32)
  else:
    kernel = jnp.asarray(rng.normal(size=(vocab_size, size)), kernel_dtype)
  head = token_kernel.Head(
    jnp.asarray(rng.normal(size=size), jnp.float32),
    kernel,
    scale,
    jnp.asarray(rng.normal(size=(vocab_size, size)), jnp.float32),
  )
  x = jnp.asarray(rng.normal(size=(rows, num_read, size)) * 3, dtype)
  place = jnp.asarray(np.arange(rows) % num_read, jnp.int32)
  return head, x, place, jnp.arange(3, 3 + rows, dtype=jnp.int32)


def logits_of(head, x, place):
  normed = Unnormed(x, head.norm, EPSILON, str(x.dtype)).applied()
  normed = jnp.take_along_axis(normed, place[:, None, None], 1)
  kernel = head.kernel.astype(x.dtype)
  return products.dense_out_in(kernel, normed, 'float32', head.scale)


def by_kernel(head, x, place, length, column=1, ends=None, draws=None):
  tokens = jnp.full((len(x), 4), -7, jnp.int32)
  rows = None
  if draws is not None:
    rows = jnp.full((len(x), 4, len(head.kernel)), -7, jnp.float32)
  drafted = token_kernel.Drafted(tokens, length, kernel_parts.no_turns(), rows)
  given = head, x, place, length + place + 1 - column, drafted
  with backend.kernels('interpreted'):
    return token_kernel.draw(*given, ends, draws, EPSILON)


@pytest.mark.parametrize('sizes', CASES)
def test_it_is_the_likeliest_token(sizes):
  given = case(*sizes)
  head, x, place, length = given
  logits = logits_of(head, x, place)[:, 0]
  embedded, drafted = by_kernel(*given)
  want = probs.greedy_token(logits)
  if x.dtype == 'bfloat16':  # which of two is larger rounding may decide
    want = drafted.tokens[:, 1]
    have = jnp.take_along_axis(logits, want[:, None], 1)[:, 0]
    np.testing.assert_allclose(have, jnp.max(logits, 1), rtol=NEAR[sizes[4]])
  np.testing.assert_array_equal(drafted.tokens[:, 1], want)
  assert (np.delete(drafted.tokens, 1, axis=1) == -7).all()
  np.testing.assert_array_equal(drafted.length, length + place + 1)
  assert embedded.dtype == x.dtype
  np.testing.assert_array_equal(
    embedded[:, 0], head.embedding[want].astype(x.dtype)
  )
  # Controls: another place, no factors, no norm.
  others = [logits_of(head, x, place * 0 + (x.shape[1] - 1) - place)]
  others += [logits_of(head._replace(norm=jnp.roll(head.norm, 1)), x, place)]
  if head.scale is not None:
    others.append(logits_of(head._replace(scale=None), x, place))
  for other in others[x.shape[1] == 1 :]:
    assert (probs.greedy_token(other)[:, 0] != want).any()


def test_the_first_of_the_likeliest():
  head, x, place, length = case(3, 1, 64, 250, 'float32', 'float32')
  _, drafted = by_kernel(head, x, place, length)
  (token,) = np.unique(drafted.tokens[:1, 1])
  # The same logit in other tiles, before and behind; and in the same one.
  for others in ([token - 1], [3, 249], [token + 1, 200]):
    rows = jnp.asarray([*others, token])
    same = head.kernel.at[rows].set(head.kernel[token])
    _, again = by_kernel(head._replace(kernel=same), x, place, length)
    assert again.tokens[0, 1] == min([*others, token])


@pytest.mark.parametrize('by_row', [False, True])
def test_a_short_row_does_not_stop(by_row):
  given = case(4, 2, 48, 96, 'float32', 'float32')
  head, x, place, length = given
  logits = logits_of(head, x, place)
  first = np.asarray(probs.greedy_token(logits)[:, 0])
  stops = np.asarray([*first, -1, 99999], np.int32)
  if by_row:
    stops = np.stack([stops, stops * 0 - 1, stops, np.roll(stops, 1)])
  stops = jnp.asarray(stops)
  # A row has produced `length` + `place` tokens: one row is long enough.
  least = length + place + jnp.asarray([1, 1, 0, 5])
  want = probs.forbid_early_stops(logits, stops, length + place, least)
  want = np.asarray(probs.greedy_token(want)[:, 0])
  _, drafted = by_kernel(*given, ends=Ends(stops, least))
  np.testing.assert_array_equal(drafted.tokens[:, 1], want)
  # Control: some would have stopped, and some may.
  assert (want == first).tolist() == [False, by_row, True, False]


def test_what_is_no_number_is_some_token_of_its_row():
  given = head, x, place, length = case(*CASES[2])
  _, want = by_kernel(*given)
  spoilt = x.at[2].set(jnp.nan)
  embedded, drafted = by_kernel(head, spoilt, place, length)
  others = np.arange(len(x)) != 2
  np.testing.assert_array_equal(drafted.tokens[others], want.tokens[others])
  assert 0 <= drafted.tokens[2, 1] < 2240 and np.isfinite(embedded).all()


@pytest.mark.parametrize(
  'sizes',
  [
    pytest.param(CASES[1], marks=pytest.mark.slow),
    (4, 2, 32, 50, *2 * ('float32',)),
  ],
)
def test_it_is_drawn_from_the_distribution_that_it_gives(sizes):
  head, x, place, length = case(*sizes)
  head = head._replace(norm=head.norm / 8)  # several tokens are likely
  rows, vocab_size = len(x), len(head.kernel)
  temperature = jnp.asarray([0.7, 0.0, 1.5, 1.0][:rows], jnp.float32)
  ends = Ends(jnp.arange(vocab_size // 2), length + place + 1)
  logits = probs.forbid_early_stops(
    logits_of(head, x, place),
    ends.stop_ids,
    length + place,
    ends.min_length,
  )
  sampling = probs.SamplingParams(temperature, None, None)
  want = probs.standardise_batch(logits, sampling)[:, 0]
  rng = np.random.default_rng(0)
  seen = set()
  for column in range(4):
    uniforms = jnp.asarray(rng.uniform(size=(4, rows, 2)), jnp.float32)
    draws = Draws(temperature, uniforms)
    given = head, x, place, length, column, ends, draws
    embedded, drafted = by_kernel(*given)
    tokens = jax.vmap(probs.inverse_cdf)(want, uniforms[column])
    np.testing.assert_array_equal(drafted.tokens[:, column], tokens)
    np.testing.assert_array_equal(embedded[:, 0], head.embedding[tokens])
    np.testing.assert_allclose(drafted.probs[:, column], want, rtol=1e-5)
    others = np.delete(drafted.probs, column, axis=1)
    assert (others == -7).all()
    seen |= {tuple(np.asarray(tokens))}
  # Control: the random numbers matter, if the row is not greedy.
  assert len(seen) > 1 and len({row[1] for row in seen}) == 1
  wrong = jax.vmap(probs.inverse_cdf)(want, uniforms[0])
  assert (wrong != tokens).any()


def drawn(model, setting, batch, count, ends, draws):
  """A draft of `count` tokens behind two, by `extend` or by itself."""
  params = backend_test.on('gpu', model)
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(2, 60, (batch, 7)).astype(np.int32))
  inputs = jnp.asarray([backend_test.INPUTS] * batch, jnp.int32)
  place = jnp.asarray(np.arange(batch) % 2, jnp.int32)

  def draw(logits, i):
    if draws is None:
      return probs.greedy_token(logits), None
    sampling = probs.SamplingParams(draws.temperature, None, None)
    rows = probs.standardise_batch(logits, sampling)
    found = jax.vmap(probs.inverse_cdf)(rows[:, 0], draws.uniforms[i])
    return found[:, None], rows

  def plainly(params, cache):
    at = cache.length + place
    logits, cache = model.extend(params, cache, tokens[:, 5:])
    logits = jnp.take_along_axis(logits, place[:, None, None], 1)
    cache = model.rewind(cache, at + 1)
    found = []
    for i in range(count):
      if ends is not None:
        logits = probs.forbid_early_stops(logits, *ends[:1], at + i, ends[1])
      found.append(draw(logits, i))
      if i < count - 1:
        logits, cache = model.extend(params, cache, found[-1][0])
    drawn, rows = zip(*found, strict=True)
    rows = None if draws is None else jnp.concatenate(rows, 1)
    return base.Drawn(jnp.concatenate(drawn, 1), rows, cache)

  def draft(params, inputs):
    cache = model.prefill(params, inputs, 40)
    _, cache = model.extend(params, cache, tokens[:, :5])
    if setting == 'off':
      return plainly(params, cache)
    fed = tokens[:, 5:]
    return base.draft(model, params, cache, fed, place, count, ends, draws)

  with backend.kernels(setting), backend.compiled_for('gpu'):
    return quick_jit(draft)(params, inputs)


@pytest.mark.usefixtures('_long_inputs')
@pytest.mark.parametrize(
  ('name', 'layers', 'batch', 'count', 'stops', 'sampled'),
  [
    ('t5_1_1', 1, 3, 3, True, False),
    ('t5_1_0', 1, 2, 2, False, True),
    pytest.param('t5_1_1', 2, 3, 4, True, True, marks=pytest.mark.slow),
    pytest.param('t5_1_0', 2, 2, 4, False, False, marks=pytest.mark.slow),
    pytest.param('own_bias', 2, 1, 1, False, False, marks=pytest.mark.slow),
  ],
)
def test_a_draft_is_the_same_as_by_calls(
  name, layers, batch, count, stops, sampled
):
  model = network(name, layers)
  ends, draws = None, None
  if sampled:
    uniforms = np.random.default_rng(1).uniform(size=(count, batch, 2))
    temperature = jnp.asarray([1.0, 0.0, 0.5][:batch], jnp.float32)
    draws = Draws(temperature, jnp.asarray(uniforms, jnp.float32))
  if stops:
    free = drawn(model, 'off', batch, count, None, draws).tokens
    ends = Ends(jnp.unique(free), jnp.asarray([99, 0, 7], jnp.int32))
  want = drawn(model, 'off', batch, count, ends, draws)
  if stops:
    differ = (np.asarray(free) != want.tokens).any(1)
    assert differ.tolist() == [True, False, True]
  have = drawn(model, INTERPRETED, batch, count, ends, draws)
  np.testing.assert_array_equal(have.tokens, want.tokens)
  near = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
  jax.tree.map(near, have.probs, want.probs)
  length = np.asarray(want.cache.length)
  np.testing.assert_array_equal(have.cache.length, length)
  pairs = zip(have.cache.joined, want.cache.joined, strict=True)
  for one, other in pairs:
    for row, end in enumerate(length):
      near(one[:, row, :, :end], other[:, row, :, :end])


@pytest.mark.usefixtures('_long_inputs')
def test_where_it_cannot_be_had_calls_draw():
  for name, batch, has_kernel in (
    ('t5_1_1', 8, True),
    ('t5_1_1', 9, False),  # two tokens of each row are too many at once
    ('gpt_t5x', 2, False),  # other families have no such kernel
  ):
    model = network(name)
    params = backend_test.on('gpu', model)
    fed = jnp.ones((batch, 2), jnp.int32)

    def draft(model=model, params=params, fed=fed):
      inputs = jnp.ones((len(fed), 20), jnp.int32)
      cache = model.prefill(params, inputs, 40)
      place = cache.length
      return base.draft(model, params, cache, fed, place, 3)

    with backend.kernels('layers'), backend.compiled_for('gpu'):
      assert (jax.eval_shape(draft) is not None) == has_kernel
      if has_kernel:  # no logits are in memory
        program = str(jax.make_jaxpr(draft)())
        assert program.count('name=draw') == 2
        assert f'f32[{batch},1,{model.vocab_size}]' not in program
    with backend.compiled_for('gpu'):  # off
      assert jax.eval_shape(draft) is None


@compiles_kernels
@pytest.mark.usefixtures('_nothing_is_kept')
def test_compiled_a_draft_step_is_its_layers_and_two_kernels_more(tmp_path):
  results, _ = check(settings(tmp_path, kernels='forced layers'))
  (record,) = results['rows']
  step = record['costs']['step']
  assert step['layer_kernels'] == 1
  # One that draws, and one that counts the steps.
  assert step['kernels'] == step['layer_kernels'] + 2
  assert step['waits'] == 7 * step['layer_kernels'] + 1
  assert step['copied_bytes'] == step['rewritten_bytes'] == 0


@compiles_kernels
@pytest.mark.usefixtures('_nothing_is_kept')
@pytest.mark.parametrize('sampled', [False, True])
def test_compiled_a_draw_is_one_kernel_that_writes_what_it_must(sampled):
  compiler = Compiler(gpu.describe(devices.find('h200')), counts_kernels=True)
  size, vocab_size, gamma = 512, 32128, 7  # T5-small's
  shape = jax.ShapeDtypeStruct
  embedding = shape((vocab_size, size), 'bfloat16')
  ids, numbers = shape((1,), 'int32'), shape((1,), 'float32')
  head = token_kernel.Head(
    shape((size,), 'float32'), embedding, None, embedding
  )
  rows = shape((1, gamma, vocab_size), 'float32') if sampled else None
  tokens = shape((1, gamma), 'int32')
  drafted = token_kernel.Drafted(tokens, ids, ids, rows)
  x = shape((1, 1, size), 'bfloat16')
  uniforms = shape((gamma, 1, 2), 'float32')
  draws = Draws(numbers, uniforms) if sampled else None
  given = compiler.place((drafted, head, x, ids, draws))

  def call(drafted, head, x, place, draws):
    read = head, x, place, place + 5
    return token_kernel.draw(*read, drafted, None, draws, EPSILON)

  with backend.compiled_for('gpu'), backend.kernels('forced'):
    drafted, *others = given
    record, _ = compiler.compile('draw', call, drafted, *others, donated=0)
  once = record['launched']['once']
  assert once['kernels'] == 1 + 1  # and what is added to `place`
  assert once['waits'] == (2 if sampled else 1)
  # Of 502 tiles the largest logit and its id; an embedding; `place` + 5.
  written = 502 * 8 + size * 2 + 4
  updated = 4 + 4
  if sampled:
    # Logits; of 32 pieces of 128 columns sums and totals; a number.
    written += 4 * (vocab_size + 32 * 128 + 32 + 1)
    updated += 4 * vocab_size
  assert (once['written_bytes'], once['updated_bytes']) == (written, updated)
  # What has to be read, and what this is beside it.
  assert written + updated <= 0.1 * vocab_size * size * 2
