"""Lines in, records out: `infer` with an engine of plain Python."""

import errno
import io
import json
import os
import sys
from unittest import mock

import pytest

import toy_models
from specdec_jax import files, infer
from specdec_jax.infer import report
from specdec_jax.infer import run as infer_run
from specdec_jax.infer.data import PREDICTIONS
from toy_runs import MAX_INPUT_LEN, ReversingEngine, records_of, run

COMPLETED = f'{PREDICTIONS}.COMPLETED'


@pytest.mark.parametrize('few, programs', [(3, 2), (2, 4)])
def test_a_short_file_has_a_program_for_each_mode(
  tokenizer, tmp_path, monkeypatch, few, programs
):
  """In a longer one, inputs of another width have programs of their own."""
  monkeypatch.setattr(infer_run, '_FEW_ITEMS', few)
  engine = toy_models.chain_engine(tokenizer, max_decode_len=8)
  texts = ['one', ' '.join(['two'] * 5), 'three']
  widths = [len(engine.text_request([x]).rows[0].inputs) for x in texts]
  assert widths[0] <= 16 < widths[1] <= 32
  data = '\n'.join(texts).encode()
  summary, *_ = run(tmp_path, data, engine, require_agreement=True)
  assert engine.num_programs == programs
  parts = summary['plain'], summary['speculative']
  assert all(part['compile_seconds'] > 0 for part in parts)
  want = [engine.generate([x], speculative=False)[0].tokens for x in texts]
  assert parts[0]['tokens'] == parts[1]['tokens'] == sum(map(len, want))


def test_records_are_in_order_and_files_complete(tmp_path):
  data = 'eins [bold]zwei\n\nÄpfel für drei'.encode()
  summary, records, printed = run(tmp_path, data)
  assert [r['inputs'] for r in records] == data.decode().split('\n')
  outputs = ['iewz]dlob[ snie', '', 'ierd rüf lefpÄ']
  assert [r['prediction'] for r in records] == outputs
  reasons = [record['aux']['finish_reason'] for record in records]
  assert reasons == ['stop', 'empty', 'stop']
  assert records[0]['prediction_tokens'] == [1, 0]
  assert records[0]['score'] == -1.0
  assert records[0]['aux']['speculative']['num_target_calls'] == 1
  assert records[0]['aux']['plain']['num_target_calls'] == 2
  assert summary['finish_reasons'] == {'empty': 1, 'stop': 2}
  # The summary has the counts of the engine.
  kept = json.loads((tmp_path / 'out' / 'summary.json').read_text())
  assert kept == summary
  plain, fast = summary['plain'], summary['speculative']
  assert plain['tokens'] == fast['tokens'] == 5
  assert (plain['target_calls'], fast['target_calls']) == (5, 3)
  assert fast['histogram'] == [1, 2] and plain['compile_seconds'] == 0.5
  assert summary['agreement'] == {'compared': 2, 'disagreements': []}
  ratio = plain['ms_per_token'] / fast['ms_per_token']
  assert summary['speed_up'] == pytest.approx(ratio)
  # What is piped is plain text; markup in an input is shown as it is.
  assert '\x1b' not in printed and 'Decoding ━' not in printed
  assert '[bold]zwei' in printed


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
  # No more rows than there are lines; one way alone has nothing beside it.
  engine, options = ReversingEngine(), {'batch_size': 32, 'overwrite': True}
  options['mode'] = 'speculative'
  summary, records, _ = run(tmp_path, b'a\n\nb\n', engine, **options)
  assert {(way, len(texts)) for way, texts, _ in engine.calls} == {(True, 2)}
  assert summary['batch_size'] == 2
  assert not {'agreement', 'speed_up'} & set(summary)
  assert run(tmp_path, b'', overwrite=True)[1] == []


def test_shards_of_lines_are_the_whole_in_turn(tmp_path):
  """Side by side in one folder, also where there are more than lines."""
  lines = ['a b', 'c d', '', ' '.join('long' for _ in range(MAX_INPUT_LEN))]
  data, engine = '\n'.join(lines).encode(), ReversingEngine(differ=['c d'])
  _, whole, _ = run(tmp_path / 'whole', data, engine)
  for number in (0, 1):
    shard = {'num_shards': 2, 'shard_id': number}
    summary, records, _ = run(tmp_path, data, engine, **shard)
    assert records == whole[number::2]
  assert summary['agreement']['disagreements'][0]['line'] == 2
  assert records[1]['error'].startswith('line 4: ')
  assert run(tmp_path, data, engine, num_shards=5, shard_id=4)[1] == []
  assert len(list((tmp_path / 'out').glob(f'{PREDICTIONS}-*.COMPLETED'))) == 3


def test_a_file_that_another_process_changes(tmp_path, monkeypatch):
  """While it is read, while it is decoded, and before a run goes on."""
  data, path = b'a b\nc d\n', tmp_path / 'input.txt'

  class Changed(ReversingEngine):
    def generate(self, *request):
      path.write_bytes(b'a b\nc d\ne\n')
      return super().generate(*request)

  with pytest.raises(ValueError, match="input.txt' was changed while it was d"):
    run(tmp_path, data, Changed())
  assert len(records_of(tmp_path / 'out' / PREDICTIONS)) == 2
  with pytest.raises(ValueError, match='another input.*examples was 2, is 3'):
    run(tmp_path, path.read_bytes())
  assert (tmp_path / 'out' / COMPLETED).exists()
  states = iter([(1, 2), (3, 4)])
  monkeypatch.setattr(files, 'state', lambda _: next(states))
  with pytest.raises(ValueError, match="input.txt' was changed while it was r"):
    list(files.lines(path))


def test_a_bar_moves_by_what_is_decoded(tmp_path, monkeypatch):
  """By sentences, each way in turn; what was done before is done."""
  bar = mock.MagicMock()
  monkeypatch.setattr(infer_run, 'bar', bar)
  run(tmp_path, b'a\nb\n\nc', batch_size=2)
  assert bar.call_args.args[1:] == ('Decoding', 3, 0)
  moves = bar.return_value.__enter__.return_value.call_args_list
  assert moves == [mock.call(0.5)] * 6


def test_disagreement_is_listed_and_can_fail_the_run(tmp_path):
  engine = ReversingEngine(differ=['c d'])
  data = b'a b\nc d\n'
  summary, _, printed = run(tmp_path, data, engine)
  (item,) = summary['agreement']['disagreements']
  assert (item['line'], item['position']) == (2, 1)
  assert '1 of 2' in printed and 'line 2 differs' in printed
  for overwrite in (True, False):  # a finished run fails again
    with pytest.raises(ValueError, match='1 greedy outputs differ.* line 2'):
      run(tmp_path, data, engine, overwrite=overwrite, require_agreement=True)
    assert (tmp_path / 'out' / COMPLETED).exists()
  sampled = {'temperature': 1.0, 'overwrite': True}
  assert 'agreement' not in run(tmp_path, data, engine, **sampled)[0]
  # Outputs of a lossy run need not agree; it says what it is.
  lossy = {'lenience': 0.25, 'overwrite': True, 'require_agreement': True}
  summary, records, printed = run(tmp_path, data, engine, **lossy)
  assert summary['lossless'] is records[0]['lossless'] is False
  assert 'lenience 0.25' in printed


def test_bad_paths_are_refused_before_the_engine_is_made(tmp_path):
  path = str(tmp_path / 'none.txt')
  with pytest.raises(ValueError, match='none.txt.*could not be read'):
    run(tmp_path, b'', mock.Mock(spec=[]), input_file=path)
  (tmp_path / 'file').mkdir()
  (tmp_path / 'file' / 'out').write_text('')
  with pytest.raises(ValueError, match='cannot be written'):
    run(tmp_path / 'file', b'', mock.Mock(spec=[]))


def test_finished_results_are_kept(tmp_path, capsys):
  """Another start says so and prints them; another input is refused."""
  summary, before, _ = run(tmp_path, b'a b\n')
  engine = ReversingEngine()
  again, records, said = run(tmp_path, b'a b\n', engine, stdout='outputs')
  assert (again, records) == (summary, before) and not engine.calls
  assert 'predictions.jsonl is finished' in said
  assert capsys.readouterr().out == 'b a\n'
  with pytest.raises(ValueError, match='finished results of another'):
    run(tmp_path, b'c d\n')


def test_full_disk_leaves_no_broken_output(tmp_path, monkeypatch):
  run(tmp_path, b'old\n')

  # The temporary file exists by then, with the data.
  full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  monkeypatch.setattr(os, 'fsync', mock.Mock(side_effect=full))
  with pytest.raises(OSError, match='could not be written.*No space') as caught:
    run(tmp_path, b'new\n', overwrite=True)
  assert caught.value.errno == errno.ENOSPC
  out = tmp_path / 'out'
  assert records_of(out / PREDICTIONS)[0]['inputs'] == 'old'
  assert not [*out.glob('*.tmp'), *out.glob('*.COMPLETED')]


def test_outputs_are_lines(tmp_path, monkeypatch, capsys):
  records = [{'prediction': ['a\nb', None]}, {'prediction': ''}, {'score': 1.5}]
  report.print_outputs(records)
  assert capsys.readouterr().out == 'a b\n\n\n1.5\n'
  engine = ReversingEngine()
  stream = io.TextIOWrapper(io.BytesIO(), 'ascii')
  with monkeypatch.context() as patch, pytest.raises(ValueError) as error:
    patch.setattr(sys, 'stdout', stream)
    run(tmp_path, 'Ä'.encode(), engine, stdout='outputs')
  assert "expected 'utf-8', got 'ascii'" in str(error.value)
  assert not engine.calls, 'before anything is decoded'
  # A reader that has seen enough, as `| head -1`: no error, no trace.
  reader, writer = os.pipe()
  os.close(reader)
  with open(writer, 'w') as closed:
    monkeypatch.setattr(sys, 'stdout', closed)
    report.print_outputs(records)


def test_a_run_of_which_nothing_came_is_no_success(tmp_path):
  """Another start tries again; bad lines alone stop no other."""
  engine, out = ReversingEngine(fail=['a', 'b']), tmp_path / 'out'
  for _ in range(2):
    with pytest.raises(ValueError, match='line 1: NaN'):
      run(tmp_path, b'a\n\nb\n', engine)
    assert not list(out.glob('*.COMPLETED')) + list(out.glob('*.partial*'))
    assert len((out / PREDICTIONS).read_text().splitlines()) == 3
  long = ' '.join(map(str, range(MAX_INPUT_LEN)))
  data = f'a\n{long}\n  \nc'.encode()
  summary, records, _ = run(tmp_path, data, engine, batch_size=2)
  assert summary['finish_reasons'] == {'empty': 1, 'error': 2, 'stop': 1}
  broken, too_long = (one['error'] for one in records if 'error' in one)
  assert broken == 'NaN' and too_long.startswith('line 2: 10 tokens')
  options = {'overwrite': True, 'on_too_long': 'truncate'}
  _, records, _ = run(tmp_path, data, engine, **options)
  assert len(records[1]['prediction_tokens']) == MAX_INPUT_LEN - 1


WRONG = [
  ('engine', None),
  ('input_file', ''),
  ('output_dir', 'gs://bucket/out'),
  ('overwrite', 'false'),
  ('task_mode', 'predicts'),
  ('batch_size', 1 << 40),
  ('checkpoint_period', 0),
  ('shard_id', 2),
  ('shard_id', None),
  ('num_shards', 0),
  ('task_feature_lengths', {'inputs': 5, 'targets': '8'}),
  ('task_feature_lengths', {'inputs': 1, 'targets': 8}),
  ('metrics', 'bleu'),
  ('temperature', infer.Options(temperature=[0.0, 1.0])),
  ('seed', infer.Options(seed=-1)),
  ('num_samples', infer.Options(num_samples=2)),
  ('example_ids', infer.Options(example_ids=[1])),
]


@pytest.mark.parametrize('field, value', WRONG)
def test_config_names_the_wrong_field(field, value):
  values = {'engine': ReversingEngine, 'num_shards': 2, 'shard_id': 1}
  values['options' if isinstance(value, infer.Options) else field] = value
  with pytest.raises(ValueError, match=f'^{field}: expected'):
    infer.DecodeConfig(**values)
