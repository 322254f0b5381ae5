"""Lines in, records out: `infer` with an engine of plain Python."""

import errno
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import types

import numpy as np
import pytest
import rich.console

from specdec_jax import files, infer
from specdec_jax.decoding.speculative import PairParams
from specdec_jax.engine.completion import Completion, CompletionStats
from specdec_jax.infer import acceptance_picture, results
from specdec_jax.probs import SamplingConfig
from specdec_jax.text import lines as lines_lib

MAX_INPUT_LEN = 9
COMPLETED = f'{results.PREDICTIONS}.COMPLETED'


class WordTokenizer:
  """One token a word."""

  fingerprint = 'words'

  def __init__(self):
    self.words: list[str] = []

  def encode(self, text):
    for word in text.split():
      if word not in self.words:
        self.words.append(word)
    return [self.words.index(word) for word in text.split()]

  def decode(self, ids):
    return ' '.join(self.words[i] for i in ids)


class ReversingEngine:
  """Reverses each text; a word is a token, a plain call makes one of them.

  Speculatively, each call makes two. `differ` names texts whose speculative
  output is wrong, `fail` texts that give an error.
  """

  max_input_len = MAX_INPUT_LEN
  max_decode_len = 32
  bos_id = rule = usual = source_lang = target_lang = None
  has_drafter = False
  kernel_layout, chooses_gamma = 'in_out', False
  fallback = False
  gamma = 1
  drafter = None
  fingerprints = types.MappingProxyType({'target': 'reversal'})
  models = types.MappingProxyType({})
  params = PairParams({'w': np.zeros(1, np.float32)}, None)

  def __init__(self, differ=(), fail=()):
    self.tokenizer = WordTokenizer()
    self.differ, self.fail = differ, fail
    self.calls: list[tuple[bool, list[str], list[int]]] = []
    self.warm: list[tuple[bool, int]] = []

  def num_input_tokens(self, text):
    words = len(self.tokenizer.encode(text))
    return words and words + 1  # its end

  def warmup(self, texts, *, speculative, **options):
    shape = (speculative, len(texts))
    if shape in self.warm:
      return 0.0
    self.warm.append(shape)
    return 0.5

  def generate(
    self,
    texts,
    *,
    speculative,
    seed,
    example_ids,
    on_too_long,
    batch_size,
    lenience=1.0,
    **sampling,
  ):
    assert batch_size == len(texts)
    SamplingConfig(**sampling)
    self.lenience = lenience
    self.lossless = lenience == 1 or not speculative
    self.calls.append((speculative, list(texts), list(example_ids)))
    return [self._complete(text, speculative) for text in texts]

  def _complete(self, text, speculative):
    if text in self.fail:
      return Completion('', [], [], 'error', error='NaN')
    tokens = self.tokenizer.encode(text)[: MAX_INPUT_LEN - 1][::-1]
    if speculative and text in self.differ:
      tokens[-1] += 1000
    count = len(tokens)
    calls = (count + 1) // 2 if speculative else count
    accepted = count - calls
    return Completion(
      text=text[::-1],
      tokens=tokens,
      log_probs=[-0.5] * count,
      finish_reason='stop',
      lossless=self.lossless,
      stats=CompletionStats(
        num_tokens=count,
        num_target_calls=calls,
        num_tested=calls if speculative else 0,
        num_accepted=accepted,
        histogram=(calls - accepted, accepted),
      ),
    )


def run(tmp_path, data: bytes, engine=None, console=None, **options):
  """Decodes `data`; returns (summary, records, printed text)."""
  source = tmp_path / 'input.txt'
  source.write_bytes(data)
  engine = engine or ReversingEngine()
  out = tmp_path / 'out'
  printed = io.StringIO()
  options = {'output_dir': str(out), 'input_file': str(source)} | options
  summary = infer.decode(
    infer.DecodeConfig(engine=lambda: engine, **options),
    beside={'operative_config.gin': lambda: 'A = 1\n'},
    console=console or rich.console.Console(file=printed, width=100),
  )
  records = [
    json.loads(line)
    for line in (out / results.PREDICTIONS).read_text('utf-8').splitlines()
  ]
  return summary, records, printed.getvalue()


def test_results_are_in_order_and_complete(tmp_path):
  data = 'eins zwei\n\nÄpfel für drei'.encode()
  summary, records, _ = run(tmp_path, data)
  assert [r['inputs'] for r in records] == ['eins zwei', '', 'Äpfel für drei']
  assert [r['prediction'] for r in records] == [
    'iewz snie',
    '',
    'ierd rüf lefpÄ',
  ]
  assert [r['finish_reason'] for r in records] == ['stop', 'empty', 'stop']
  assert records[0]['prediction_tokens'] == [1, 0]
  assert records[0]['log_prob'] == -1.0
  assert records[0]['stats']['speculative']['num_target_calls'] == 1
  assert records[0]['stats']['plain']['num_target_calls'] == 2
  assert summary['finish_reasons'] == {'empty': 1, 'stop': 2}
  names = {path.name for path in (tmp_path / 'out').iterdir()}
  assert names == {
    'predictions.jsonl',
    'predictions.jsonl.COMPLETED',
    'predictions.jsonl.config.json',
    'operative_config.gin',
    'summary.json',
  }


def test_summary_counts_what_the_engine_reports(tmp_path):
  summary, records, printed = run(tmp_path, b'a b c d\ne f\n')
  assert summary['plain']['tokens'] == summary['speculative']['tokens'] == 6
  assert summary['plain']['target_calls'] == 6
  assert summary['speculative']['target_calls'] == 3
  assert summary['speculative']['tokens_per_call'] == 2.0
  assert summary['speculative']['acceptance_rate'] == 1.0
  assert summary['speculative']['histogram'] == [0, 3]
  assert summary['plain']['compile_seconds'] == 0.5
  assert summary['agreement'] == {'compared': 2, 'disagreements': []}
  assert summary['speed_up'] == pytest.approx(
    summary['plain']['ms_per_token'] / summary['speculative']['ms_per_token']
  )
  assert 'agree token for token: 2 of 2' in printed
  assert json.loads((tmp_path / 'out' / 'summary.json').read_text()) == summary
  assert records[0]['stats']['plain']['batch_ms_per_token'] > 0


def test_both_ways_take_turns_and_the_last_batch_keeps_its_shape(tmp_path):
  engine = ReversingEngine()
  _, records, _ = run(tmp_path, b'a\nb\n\nc\n', engine, batch_size=2)
  assert engine.warm == [(False, 2), (True, 2)]
  assert engine.calls == [
    *[(False, ['a', 'b'], [0, 1])] * 2,  # once to warm up, once measured
    *[(True, ['a', 'b'], [0, 1])] * 2,
    (False, ['c', 'c'], [3, 3]),
    (True, ['c', 'c'], [3, 3]),
  ]
  assert [r['prediction'] for r in records] == ['a', 'b', '', 'c']


@pytest.mark.parametrize(
  ('dtypes', 'words'),
  [
    ({'target': 'float32', 'draft': 'int8'}, 'int8, which changes no output'),
    ({'target': 'int4', 'draft': 'int8'}, 'int4: it is another model'),
    ({'target': None, 'draft': 'bfloat16'}, ''),
  ],
)
def test_it_is_said_whose_kernels_are_integers(dtypes, words, tmp_path):
  engine = ReversingEngine()
  engine.models = {
    name: types.SimpleNamespace(dtype=one) for name, one in dtypes.items()
  }
  summary, _, text = run(tmp_path, b'a b\n', engine)
  assert summary['dtypes'] == dtypes
  assert words in ' '.join(text.split()) and bool(words) == (
    'kernels are' in text
  )


def test_lenience_is_marked_as_lossy(tmp_path):
  engine = ReversingEngine(differ=['a b'])
  # Outputs differ, and need not agree.
  summary, records, text = run(
    tmp_path, b'a b\n', engine, lenience=0.25, require_agreement=True
  )
  assert engine.lenience == 0.25
  assert summary['lenience'] == 0.25 and summary['lossless'] is False
  assert 'speculative, lossy' in text and records[0]['lossless'] is False
  assert "0.25 a token may have 0.25 of the best one's probability" in text
  _, _, text = run(
    tmp_path,
    b'a b\n',
    engine,
    lenience=0.25,
    sampling=SamplingConfig(1.0),
    overwrite=True,
  )
  assert '0.25 a token may come up to 4 times as often as it should' in text
  _, _, text = run(
    tmp_path, b'a b\n', lenience=0.25, mode='plain', overwrite=True
  )
  assert 'ossy' not in text
  summary, records, text = run(tmp_path, b'a b\n', overwrite=True)
  assert summary['lossless'] is records[0]['lossless'] is True
  assert 'ossy' not in text
  with pytest.raises(ValueError, match=r'lenience must be in .* got 1.5'):
    run(tmp_path, b'a b\n', lenience=1.5)


@pytest.mark.parametrize('mode', ['plain', 'speculative'])
def test_one_mode_alone(tmp_path, mode):
  engine = ReversingEngine()
  summary, records, _ = run(tmp_path, b'a b\n', engine, mode=mode)
  assert {speculative for speculative, *_ in engine.calls} == {
    mode == 'speculative'
  }
  assert 'agreement' not in summary and 'speed_up' not in summary
  assert list(records[0]['stats']) == [mode]


def test_sampled_outputs_are_not_compared(tmp_path):
  engine = ReversingEngine(differ=['a b'])
  sampling = SamplingConfig(temperature=1.0)
  summary, *_ = run(tmp_path, b'a b\n', engine, sampling=sampling)
  assert 'agreement' not in summary


def test_disagreement_is_listed_and_can_fail_the_run(tmp_path):
  engine = ReversingEngine(differ=['c d'])
  summary, _, printed = run(tmp_path, b'a b\nc d\n', engine)
  (item,) = summary['agreement']['disagreements']
  assert (item['line'], item['position']) == (2, 1)
  assert 'agree token for token: 1 of 2' in printed
  assert 'line 2 differs from token 1 on' in printed
  with pytest.raises(ValueError, match='1 greedy outputs differ.* line 2'):
    run(tmp_path, b'a b\nc d\n', engine, overwrite=True, require_agreement=True)
  assert (tmp_path / 'out' / COMPLETED).exists()


def test_bad_lines_do_not_stop_ten_thousand(tmp_path):
  lines = [b'w%d x' % (i % 7) for i in range(10_000)]
  lines[4] = b'ab\xffcd'
  lines[17] = b' '.join(b'%d' % i for i in range(MAX_INPUT_LEN))
  lines[9_998] = b'broken'
  lines[9_999] = b'  '
  engine = ReversingEngine(fail=['broken'])
  summary, records, printed = run(
    tmp_path, b'\n'.join(lines), engine, batch_size=64
  )
  assert len(records) == 10_000
  assert summary['finish_reasons'] == {'empty': 1, 'error': 3, 'stop': 9_996}
  utf8, long, broken = (r for r in records if r['error'])
  assert utf8['error'].startswith(
    'line 5: not valid UTF-8 (byte 0xff at byte 3'
  )
  assert utf8['inputs'] == 'ab�cd'
  assert utf8['prediction'] is None
  assert long['error'].startswith('line 18: 10 tokens (its end included)')
  assert broken['error'] == 'line 9999: NaN'
  assert summary['errors'] == [r['error'] for r in records if r['error']]
  assert 'could not be decoded: 3' in printed


def test_truncation_decodes_the_beginning(tmp_path):
  data = b'1 2 3 4 5 6 7 8 9 10\n1 2 3 4 5 6 7 8\n'
  _, records, _ = run(tmp_path, data, on_too_long='truncate')
  assert records[0]['inputs'] == '1 2 3 4 5 6 7 8 9 10'
  assert records[0]['prediction_tokens'] == [7, 6, 5, 4, 3, 2, 1, 0]
  assert [r['truncated'] for r in records] == [True, False]
  assert [r['error'] for r in records] == [None, None]


@pytest.mark.parametrize(
  'data, expected',
  [
    (b'', []),
    (b'\n', ['']),
    (b'a', ['a']),
    (b'a\n', ['a']),
    (b'a\r\nb\r\n', ['a', 'b']),
    (b'\xef\xbb\xbfa\n', ['a']),
    ('a\u2028b\x0bc\x85\n'.encode(), ['a\u2028b\x0bc\x85']),
    (b'a\x00b\n', ['a\x00b']),
  ],
)
def test_only_newlines_end_lines(tmp_path, data, expected):
  source = tmp_path / 'input.txt'
  source.write_bytes(data)
  assert [line.text for line in lines_lib.read_lines(str(source))] == expected


def test_reads_stdin(monkeypatch):
  monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'a\n\xff\n')))
  first, second = lines_lib.read_lines('-')
  assert first == lines_lib.Line('a')
  assert second.error and second.error.startswith('line 2: not valid UTF-8')


def test_file_without_lines(tmp_path):
  summary, records, printed = run(tmp_path, b'')
  assert records == [] and summary['lines'] == 0
  assert summary['speed_up'] is None
  assert (tmp_path / 'out' / COMPLETED).exists()


def refuse_to_build():
  raise AssertionError('the engine was made before the input was checked')


def test_missing_input_is_refused_before_the_engine_is_made(tmp_path):
  config = infer.DecodeConfig(
    engine=refuse_to_build, input_file=str(tmp_path / 'none.txt')
  )
  with pytest.raises(ValueError, match='none.txt.*could not be read'):
    infer.decode(config)


def test_finished_results_are_kept(tmp_path, capsys):
  """Another start says so and prints them; other settings are refused."""
  summary, before, _ = run(tmp_path, b'a b\n')
  engine = ReversingEngine()
  again, records, said = run(tmp_path, b'a b\n', engine, stdout='outputs')
  assert (again, records) == (summary, before) and not engine.calls
  assert 'predictions.jsonl is finished' in said
  assert capsys.readouterr().out == 'b a\n'
  with pytest.raises(ValueError, match='finished results of another'):
    run(tmp_path, b'c d\n')
  assert run(tmp_path, b'c d\n', overwrite=True)[1][0]['inputs'] == 'c d'
  # What failed at the end fails again.
  engine = ReversingEngine(differ=['c d'])
  for overwrite in (True, False):
    with pytest.raises(ValueError, match='1 greedy outputs differ'):
      run(
        tmp_path,
        b'c d\n',
        engine,
        overwrite=overwrite,
        require_agreement=True,
      )


def test_a_kill_costs_a_minute_at_most(tmp_path, monkeypatch):
  """A batch takes 20 s; before, nothing was kept for 100 batches."""
  data = b''.join(b'w%d\n' % i for i in range(80))
  clock = [0.0]
  monkeypatch.setattr(time, 'monotonic', lambda: clock[0])

  class Slow(ReversingEngine):
    left = 50

    def generate(self, texts, **options):
      if not self.left:
        raise KeyboardInterrupt
      self.left -= 1
      clock[0] += 20.0
      return super().generate(texts, **options)

  options = {'mode': 'plain', 'batch_size': 1}
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path, data, Slow(), **options)
  engine = ReversingEngine()
  _, records, _ = run(tmp_path, data, engine, **options)
  done = [text for _, texts, _ in engine.calls for text in texts]
  assert 30 <= len(set(done)) <= 30 + 3
  assert [record['prediction'] for record in records] == [
    f'w{i}'[::-1] for i in range(80)
  ]


def test_the_ending_says_what_a_line_is(tmp_path):
  """Not 'a b TAB c' as one text; a line of another format has an error."""
  path = tmp_path / 'pairs.tsv'
  path.write_text('a b\tc\nd\ne\tf\tg\n')
  summary, records, said = run(tmp_path, b'', input_file=str(path))
  assert [record['inputs'] for record in records] == ['a b', 'd', 'e\tf\tg']
  assert [record['prediction'] for record in records] == ['b a', 'd', None]
  assert records[2]['error'].startswith('line 3 has 3 columns')
  assert 'inputs<TAB>targets' in summary['reading'] in ' '.join(said.split())
  assert run(tmp_path, b'a\tb\n', overwrite=True)[0]['reading'] is None


def test_no_more_rows_than_there_are_lines(tmp_path):
  engine = ReversingEngine()
  summary, *_ = run(tmp_path, b'a\n\nb\n', engine, batch_size=32)
  assert {len(texts) for _, texts, _ in engine.calls} == {2}
  assert summary['batch_size'] == 2


def test_unwritable_output_is_refused_before_the_engine_is_made(tmp_path):
  (tmp_path / 'file').write_text('')
  config = infer.DecodeConfig(
    engine=refuse_to_build, output_dir=str(tmp_path / 'file' / 'out')
  )
  with pytest.raises(ValueError, match='cannot be written'):
    infer.decode(config)


def test_a_picture_costs_no_output(tmp_path, monkeypatch, capsys):
  """What cannot be written is refused at once; what fails, fails last."""
  (tmp_path / 'file').write_text('')
  for place, what in (('file/x.png', 'cannot be written'), ('', 'a folder')):
    engine, path = ReversingEngine(), str(tmp_path / place)
    with pytest.raises(ValueError, match=f'{what}.*') as caught:
      run(tmp_path, b'a b\n', engine, plot_file=path)
    assert str(path.removesuffix('/x.png')) in str(caught.value)
    assert not engine.warm

  def full_disk(path, *_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

  monkeypatch.setattr(acceptance_picture, 'plot', full_disk)
  options = {'stdout': 'outputs', 'plot_file': str(tmp_path / 'new' / 'x.png')}
  with pytest.raises(OSError, match='No space left'):
    run(tmp_path, b'a b\n', **options)
  assert capsys.readouterr().out == 'b a\n'
  assert (tmp_path / 'out' / COMPLETED).exists()


@pytest.mark.parametrize('failing', [results.PREDICTIONS, results.SUMMARY])
def test_full_disk_leaves_no_broken_output(tmp_path, monkeypatch, failing):
  run(tmp_path, b'old\n')
  write_atomically = files.write_atomically

  def no_space(handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def write(path, data):
    with monkeypatch.context() as patch:
      if pathlib.Path(path).name == failing:
        # The temporary file exists by then and holds the data.
        patch.setattr(os, 'fsync', no_space)
      write_atomically(path, data)

  monkeypatch.setattr(files, 'write_atomically', write)
  monkeypatch.setattr(files.writing, 'write_atomically', write)
  with pytest.raises(OSError, match='could not be written.*No space') as caught:
    run(tmp_path, b'new\n', overwrite=True)
  assert caught.value.errno == errno.ENOSPC
  out = tmp_path / 'out'
  assert not (out / COMPLETED).exists()
  record = json.loads((out / results.PREDICTIONS).read_text())
  old = failing == results.PREDICTIONS
  assert record['inputs'] == ('old' if old else 'new')
  assert not [path for path in out.iterdir() if path.suffix == '.tmp']


def test_kill_half_way_leaves_no_result_and_goes_on(tmp_path):
  script = tmp_path / 'slow.py'
  script.write_text(
    textwrap.dedent("""
    import sys, time
    sys.path[:0] = [sys.argv[1]]
    import infer_test
    from specdec_jax import infer

    class Slow(infer_test.ReversingEngine):
      def generate(self, texts, **options):
        if 'stop' in texts:
          print('half way', flush=True)
          time.sleep(60)
        return super().generate(texts, **options)

    infer.decode(infer.DecodeConfig(
      engine=Slow, input_file=sys.argv[2], output_dir=sys.argv[3],
      checkpoint_period=1))
    """)
  )
  (tmp_path / 'input.txt').write_text('a\nb\nstop\nc\n')
  out = tmp_path / 'out'
  folder = pathlib.Path(__file__).parent
  root = str(folder.parent)
  process = subprocess.Popen(
    [sys.executable, script, folder, tmp_path / 'input.txt', out],
    stdout=subprocess.PIPE,
    env=os.environ | {'PYTHONPATH': root},
  )
  with process:
    assert process.stdout is not None
    assert process.stdout.readline() == b'half way\n'
    process.send_signal(signal.SIGKILL)
  # Nobody holds the lock any more.
  assert {path.name for path in out.iterdir()} == {
    '.predictions.jsonl.lock',
    'predictions.jsonl.parts',
  }
  engine = ReversingEngine()
  data = b'a\nb\nstop\nc\n'
  summary, records, _ = run(tmp_path, data, engine, checkpoint_period=1)
  assert {text for _, texts, _ in engine.calls for text in texts} == {
    'stop',
    'c',
  }
  assert [r['prediction'] for r in records] == ['a', 'b', 'pots', 'c']
  assert summary['plain']['tokens'] == 4


def test_unfinished_run_of_other_lines_is_refused(tmp_path):
  engine = ReversingEngine()

  def full_disk(items, **options):
    raise OSError(errno.ENOSPC, 'No space left')

  engine.generate = full_disk
  with pytest.raises(OSError):
    run(tmp_path, b'a b\n', engine)
  with pytest.raises(ValueError, match='lines_sha256 was .*; seed was 0, is 1'):
    run(tmp_path, b'c d\n', seed=1)
  assert run(tmp_path, b'a b\n')[1][0]['prediction'] == 'b a'


def test_piped_output_is_plain_text(tmp_path):
  _, _, printed = run(tmp_path, b'[bold]a b[/bold]\n' * 30)
  assert '\x1b' not in printed and '\r' not in printed
  assert 'Decoding ━' not in printed
  # Markup in a text is shown as it is.
  assert '[bold]a b[/bold]' in printed


def test_terminal_shows_progress(tmp_path):
  screen = io.StringIO()
  console = rich.console.Console(file=screen, force_terminal=True, width=100)

  class Slow(ReversingEngine):
    def generate(self, texts, **options):
      time.sleep(0.02)
      return super().generate(texts, **options)

  run(tmp_path, b'a b\n' * 10, Slow(), console)
  assert 'Decoding' in screen.getvalue() and '10/10' in screen.getvalue()


@pytest.mark.parametrize(
  'name, value',
  [
    ('engine', None),
    ('input_file', 3),
    ('input_file', ''),
    ('output_dir', 7),
    ('output_dir', 'gs://bucket/out'),
    ('overwrite', 'false'),
    ('mode', 'fast'),
    ('batch_size', 0),
    ('batch_size', 1.5),
    ('batch_size', True),
    ('seed', -1),
    ('on_too_long', 'cut'),
    ('sampling', 0.0),
    ('sampling', SamplingConfig(temperature=[0.0, 1.0])),
    ('num_shown', -1),
    ('require_agreement', 1),
  ],
)
def test_config_names_what_is_wrong(name, value):
  values = {'engine': ReversingEngine, name: value}
  with pytest.raises(ValueError, match=f'DecodeConfig.{name}: expected'):
    infer.DecodeConfig(**values)
