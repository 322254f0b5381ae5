"""Cases of sharded_decode_test.py: they need 8 devices, so it runs them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import collectives
from compilations import nothing_compiles
from small_vocabulary import VOCAB_SIZE, weights
from specdec_jax import checkpoints, partitioning
from specdec_jax.checkpoints import disk_arrays
from specdec_jax.decoding.resting import guessed
from specdec_jax.engine.engine import Engine
from specdec_jax.engine.loading import load
from specdec_jax.engine.scheduler import PoolSettings
from specdec_jax.measure.calls import make_request
from specdec_jax.models import backend, families
from specdec_jax.models.bart import M2M100Config
from specdec_jax.models.causal_lm import CausalLMConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.model import Model
from specdec_jax.models.t5 import T5Config
from specdec_jax.models.t5gemma import T5GemmaConfig
from specdec_jax.partitioning import Following, LogicalAxes, Placement
from specdec_jax.request import Drafting
from toy_pools import Pooled
from toy_workers import Heard, started

SIZES = dict(
  vocab_size=VOCAB_SIZE, emb_dim=48, num_heads=8, head_dim=4, mlp_dim=80
)
STACKS = dict(num_encoder_layers=1, num_decoder_layers=2)
_GEMMA = CausalLMConfig(
  **SIZES,
  num_kv_heads=4,
  num_layers=2,
  qk_norm=True,
  layer_kinds=('local', 'global'),
  window=9,
)
CONFIGS = {
  't5': T5Config(**SIZES, **STACKS),
  'gpt': GPTConfig(**SIZES, num_layers=2, num_positions=128),
  'causal': _GEMMA,
  # Scaled, its drafter would always be right.
  'm2m100': M2M100Config(**SIZES, **STACKS, scale_embeddings=False),
  't5gemma': T5GemmaConfig(_GEMMA, _GEMMA),
  't5gemma2': T5GemmaConfig(_GEMMA, _GEMMA, merged_attention=True),
}
# Each ends with a product that is split by its inputs.
BLOCKS_A_LAYER = dict(t5=3, gpt=2, causal=2, m2m100=3, t5gemma=3, t5gemma2=2)
PRESETS = {
  'tensor parallel': Placement(model=8),
  'data parallel': Placement(data=8),
  'both': Placement(data=2, model=0),
}
TEXTS = [
  'the red dog runs',
  'a cat',
  [5, 6, 7],
  'the old house sings here',
  'blue tree',
  'here there the a',
  'dog cat dog cat dog',
  'sleeps',
]
LENGTH = 24
GREEDY = dict(min_length=LENGTH)  # random models stop too soon to show much
SAMPLED = GREEDY | dict(temperature=1.0, top_k=20, seed=3)
WAYS = {'plain': False, 'speculative': True}
# The quick run has each way of splitting, and both loops.
presets_and_ways = pytest.mark.parametrize(
  ('preset', 'way'),
  [
    ('tensor parallel', 'speculative'),
    ('both', 'plain'),
    pytest.param('data parallel', 'speculative', marks=pytest.mark.slow),
  ],
)


@pytest.fixture(scope='module', params=['t5'])
def family(request):
  return request.param


def network_of(family, **changes):
  config = CONFIGS[family]
  if isinstance(config, T5GemmaConfig):
    changes = {'decoder': dataclasses.replace(config.decoder, **changes)}
  return families.network_of(dataclasses.replace(config, **changes))


@functools.cache
def models(family):
  """A target, and a drafter that often agrees with it, but not always."""
  network = network_of(family)
  # Biases as large as the rest would give one token for ever.
  params = jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf * (0.1 if path[-1].key == 'bias' else 1.0),
    weights(network, 0),
  )
  # Its first layer alone.
  layers = 'num_decoder_layers'
  if not hasattr(network.config, layers):
    layers = 'num_layers'
  shallow = dict(params, decoder=dict(params['decoder']))
  del shallow['decoder']['layers_1']
  draft = Model(network_of(family, **{layers: 1}), shallow)
  return Model(network, params), draft


def begin(family):
  """What texts begin with; T5 does by itself."""
  if family.startswith('t5gemma'):
    return 2
  return None if family in ('t5', 'm2m100') else 0


def make_engine(family, tokenizer, placement=None):
  return Engine(
    *models(family),
    tokenizer=tokenizer,
    gamma=3,
    max_input_len=32,
    max_decode_len=LENGTH,
    bos_id=begin(family),
    placement=placement,
  )


@pytest.fixture(scope='module')
def engines(family, tokenizer):
  """Name of a preset, None for one device, -> engine, made once."""

  @functools.cache
  def make(preset=None):
    return make_engine(family, tokenizer, preset and PRESETS[preset])

  return make


@pytest.fixture(scope='module')
def alone(engines):
  """What one device gives: way -> completions."""
  return {
    way: engines().generate(TEXTS, speculative=speculative, **GREEDY)
    for way, speculative in WAYS.items()
  }


def tokens_of(completions):
  return [completion.tokens for completion in completions]


@presets_and_ways
def test_greedy_tokens_are_those_of_one_device(preset, way, engines, alone):
  engine = engines(preset)
  found = engine.generate(TEXTS, speculative=WAYS[way], **GREEDY)
  assert tokens_of(found) == tokens_of(alone[way]) == tokens_of(alone['plain'])
  assert [c.stats for c in found] == [c.stats for c in alone[way]]
  np.testing.assert_allclose(
    [c.log_probs for c in found],
    [c.log_probs for c in alone[way]],
    rtol=1e-4,
    atol=1e-4,
  )
  if WAYS[way]:
    accepted = sum(c.stats.num_accepted for c in found)
    assert 0 < accepted < sum(c.stats.num_tested for c in found)


@pytest.mark.slow
def test_samples_are_those_of_one_device(engines):
  want = engines().generate(TEXTS, **SAMPLED)
  have = engines('both').generate(TEXTS, **SAMPLED)
  assert tokens_of(have) == tokens_of(want)


def program(engine, speculative=True, name='decode', **options):
  """The compiled program that `generate` runs, or `stream`."""
  gamma = engine.gamma if speculative else 0
  request = engine.request(TEXTS, gamma, **(GREEDY | options))
  return engine.programs._program(name, request).func


def exchanges(engine, speculative=True):
  return collectives.find(program(engine, speculative).as_text())


def gathered_weights(engine, found):
  """Whole shapes of the parameters that are split and put together."""
  shapes = {
    collectives.trimmed(shape)
    for exchange in found
    for shape in exchange.shapes
    if exchange.op != 'all-reduce'
  }
  return shapes & {
    collectives.trimmed(leaf.shape)
    for leaf in jax.tree.leaves(engine.params.target)
    if not leaf.is_fully_replicated
  }


@presets_and_ways
def test_exchanges_of_a_round_are_few(preset, way, family, engines):
  engine = engines(preset)
  found = exchanges(engine, WAYS[way])
  kinds = collectives.of_a_round(found)
  split = PRESETS[preset].model != 1
  over_rows = PRESETS[preset].data != 1
  layers = 2 * BLOCKS_A_LAYER[family] if split else 0
  # One each for the embedding's rows and for whether all rows are finished.
  assert kinds['all-reduce']['count'] == layers + split + over_rows
  # The logits, and nothing else of any kind.
  gathered = kinds.get('all-gather', {'count': 0})['count']
  assert set(kinds) <= {'all-reduce', 'all-gather'} and gathered == split
  tokens = 4 if WAYS[way] else 1
  rows = len(TEXTS) // (1 if not over_rows else 2 if split else 8)
  width = SIZES['emb_dim'] * (layers + 1) + SIZES['vocab_size']
  at_most = 4 * rows * tokens * width if split else 0
  assert sum(kind['bytes'] for kind in kinds.values()) <= at_most + over_rows
  assert not gathered_weights(engine, found)


@pytest.mark.slow
@pytest.mark.parametrize('family', [*CONFIGS][1:], indirect=True)
def test_another_family(family, engines, alone):
  """One preset and way of the two tests above."""
  test_greedy_tokens_are_those_of_one_device(
    'both', 'speculative', engines, alone
  )
  test_exchanges_of_a_round_are_few('both', 'speculative', family, engines)


def test_the_count_sees_a_rule_that_exchanges_more(family, tokenizer):
  """M split over 'data': every product of a layer is added up."""
  bad = Placement(data=2, model=4, axes=LogicalAxes(embed='data'))
  engine = make_engine(family, tokenizer, bad)
  kinds = collectives.of_a_round(exchanges(engine, speculative=False))
  assert kinds['all-reduce']['count'] > 2 * 2 * BLOCKS_A_LAYER[family]


@pytest.mark.parametrize('family', ['gpt'], indirect=True)
def test_the_check_sees_a_gathered_weight(family, tokenizer, monkeypatch):
  """Logits asked for whole at once: XLA gathers the output layer's kernel."""

  def head(self, params, features):
    with backend.split(True):
      logits = self.network.head(params, features)
    return self._at(logits, ('batch', None, None))

  monkeypatch.setattr(Following, 'head', head)
  engine = make_engine(family, tokenizer, PRESETS['tensor parallel'])
  found = exchanges(engine, speculative=False)
  assert gathered_weights(engine, found) == {(SIZES['emb_dim'], VOCAB_SIZE)}


def test_caches_follow_their_models(engines):
  """Over rows and heads the target's, over rows the drafter's."""
  engine = engines('both')
  state = program(engine, name='start', stop_strings=['!?']).output_shardings
  shape = (len(TEXTS), SIZES['num_heads'], SIZES['head_dim'], 64)
  for cache, part in (
    (state.target_cache, (4, 2, 4, 64)),
    (state.drafter_state, (4, 8, 4, 64)),
  ):
    for sharding in (*cache.keys, *cache.values):
      assert sharding.shard_shape(shape) == part


@pytest.mark.slow
def test_a_state_is_passed_on(engines, alone):
  """From program to program, as each takes it."""
  engine = engines('both')
  have = engine.generate(TEXTS, stop_strings=['!?'], **GREEDY)
  assert tokens_of(have) == tokens_of(alone['speculative'])
  # The state left each program as the next takes it: nothing was compiled anew.
  count = engine.num_programs
  assert list(engine.generate(TEXTS, stop_strings=['!?'], **GREEDY))
  assert engine.num_programs == count


@pytest.mark.slow
def test_slots(engines, alone):
  """Pools of one row and of three, which two devices do not divide."""
  settings = PoolSettings(gammas={3: Drafting(), 1: Drafting(2)})
  decoder = Pooled(engines('both'), settings)
  texts = TEXTS[:6]  # all outputs are equally long: two are left
  found = decoder.generate(texts, **GREEDY)
  assert tokens_of(found) == tokens_of(alone['plain'])[:6]
  assert set(decoder.rounds) == {0, 2}
  with nothing_compiles():
    decoder.generate(texts, **GREEDY)


@pytest.mark.slow
def test_a_server(family, tokenizer):
  """Programs compiled ahead serve a target that two devices share."""
  engine = make_engine(family, tokenizer, Placement(model=2))
  kinds = {'stop_ids': ()}, {'stop_ids': (), 'temperature': 1.0, 'seed': 2}
  asked = [(text, kind) for kind in kinds for text in TEXTS[:3]]
  want = [engine.generate([text], **kind)[0].tokens for text, kind in asked]
  with started(engine, rows=2) as scheduler, nothing_compiles():
    heard = [Heard(scheduler, text, **kind) for text, kind in asked]
    scheduler.take([one.row for one in heard])
    assert [one.last.outputs[0].tokens for one in heard] == want


def test_a_checkpoint_goes_straight_to_its_shards(family, tmp_path):
  target, _ = models(family)
  path = tmp_path / 'checkpoint'
  checkpoints.save_orbax(path, target.params)
  placement = PRESETS['both']
  loaded = partitioning.read_parts(load(path, target.network), placement)
  jax.tree.map(np.testing.assert_array_equal, loaded, target.params)
  # Placing them then moves nothing.
  pointers = []
  for params in (loaded, partitioning.place(loaded, placement)):
    kernel = params['decoder']['layers_0']['mlp']['wo']['kernel']
    parts = [part.data for part in kernel.addressable_shards]
    assert parts[0].shape == (80 // 4, 48)
    pointers.append([part.unsafe_buffer_pointer() for part in parts])
  assert pointers[0] == pointers[1]


@pytest.mark.parametrize('kind', ['orbax', 'file'])
def test_each_device_reads_its_part(kind, tmp_path, monkeypatch):
  """Each shard is read once, not the array, and not once a device."""
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('a', 'b'))
  wide = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
  rows, both, columns = (
    NamedSharding(mesh, P(*axes)) for axes in (('a',), ('a', 'b'), (None, 'b'))
  )
  saved = {'x': {'w': jax.device_put(wide, both)}, 's': np.ones(3)}
  if kind == 'orbax':
    checkpoints.save_orbax(tmp_path / kind, saved)
  else:
    checkpoints.save_t5x(tmp_path / kind, saved, step=0)
  reads, read = [], disk_arrays._read

  def counted(array, index, dtype):
    if array.shape == wide.shape:
      reads.append([part.stop - part.start for part in index])
    return read(array, index, dtype)

  monkeypatch.setattr(disk_arrays, '_read', counted)
  for sharding, parts in (
    (rows, 2 * [[4, 12]]),
    (both, 4 * [[4, 6]]),
    (columns, 2 * [[8, 6]]),
  ):
    reads.clear()
    loaded = checkpoints.load(tmp_path / kind, sharding={'x/w': sharding}.get)
    np.testing.assert_array_equal(loaded['x']['w'], wide)
    assert reads == parts
  with pytest.raises(ValueError, match=r's \[3\] cannot be laid out by'):
    checkpoints.load(tmp_path / kind, sharding=lambda _: rows)


def test_joined_kernels_are_not_split(family, engines):
  """Over rows alone they are joined as on one device."""
  joined = {
    preset: 'qkv'
    in engines(preset).params.target['decoder']['layers_0']['self_attention']
    for preset in PRESETS
  }
  assert joined == dict(zip(PRESETS, (False, True, False), strict=True))
  params = partitioning.place(models(family)[0].params)
  with pytest.raises(ValueError, match=r'/(qkv|wi_joined)/\w+: expected'):
    PRESETS['both'].partition().place(params)


def test_meshes_that_do_not_fit():
  for sizes in ({'model': 3}, {'data': 0, 'model': 16}):
    with pytest.raises(ValueError, match='the 8 devices'):
      Placement(**sizes).partition()
  assert Placement(model=2).partition().mesh.size == 2


def test_arrays_that_do_not_fit(family):
  for name, changes, message in (
    ('t5', {'num_heads': 6}, 'num_heads: .* 8 devices .* got 6'),
    ('t5', {'mlp_dim': 90}, r'mlp/wi.*: .* 8 devices .* got 90'),
    ('causal', {}, 'num_kv_heads: .* 8 devices .*, got 4'),
    ('t5gemma', {}, 'num_kv_heads: .* 8 devices .*, got 4'),
  ):
    odd = network_of(name, **changes)
    with pytest.raises(ValueError, match=message):
      partitioning.follow(odd, Placement(model=8).partition())
  network = models(family)[0].network
  request = make_request(network, 3, 16, LENGTH, 0.0, 0, 3)
  with pytest.raises(ValueError, match='Request.inputs: .* 2 devices .* got 3'):
    PRESETS['both'].partition().request(request)


def test_what_all_rows_share_is_on_each_device(family):
  request = make_request(models(family)[0].network, 4, 16, LENGTH, 0.0, 0, 3)
  request = request.with_drafting(rests=guessed(3, False))
  placed = PRESETS['both'].partition().request(request)
  assert placed.inputs.sharding.spec == P('data')
  for shared in (placed.stop_ids, *vars(placed.drafting.rests).values()):
    assert shared.sharding.spec == P()
