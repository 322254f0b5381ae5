"""`specdec bench-serve`: its clients, its tables, and all of it once."""

import json
import os
import pathlib
import subprocess
import sys
import time

import gin
import numpy as np
import pytest
import rich.console

from scheduler_test import TEXTS, engine, wait_until
from specdec_jax.cli import commands, gin_flags
from specdec_jax.serving import ServeConfig, ServeSettings, bench, bench_report
from specdec_jax.serving.scheduler import Scheduler

_WHY = 'needs the extras [serve] and [load], and openai'
for needed in ('aiohttp', 'openai', 'uvicorn', 'starlette', 'httpx'):
  pytest.importorskip(needed, reason=_WHY)
from serve_test import serving  # noqa: E402
from specdec_jax.serving import load  # noqa: E402
from specdec_jax.serving.run import Server  # noqa: E402

__all__ = ['engine']  # a fixture
ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope='module')
def scheduler(engine):
  return Scheduler(engine, ServeSettings(port=0, rows=1, max_waiting=99))


@pytest.fixture(scope='module')
def url(scheduler):
  with serving(Server(scheduler, 'toy')) as made:
    wait_until(lambda: scheduler.is_compiled)
    yield f'http://127.0.0.1:{made.port}'


@pytest.fixture(scope='module')
def want(engine):
  return engine.generate(TEXTS[:6], max_length=16)


@pytest.mark.parametrize('send', [load.closed, load.by_openai])
def test_clients_that_wait(url, want, send):
  """Each reply is that of its request, in their order."""
  run = send(url, [load.body(text) for text in TEXTS[:6]], 3)
  assert not run.errors
  assert [one.text for one in run.replies] == [one.text for one in want]
  assert run.num_tokens == sum(len(one.tokens) for one in want)
  assert 0 < run.cpu_seconds
  assert all(0 < one.seconds <= run.seconds for one in run.replies)
  assert {one.first for one in run.replies} == {None}


def test_streams_are_timed(url, want):
  bodies = [load.body(text, True) for text in TEXTS[:6]]
  run = load.closed(url, bodies, 1)
  assert [one.text for one in run.replies] == [one.text for one in want]
  long = [one for one in run.replies if one.num_tokens > 4]
  assert long
  for one in long:
    assert 0 < one.first < one.seconds
    assert one.between == (one.seconds - one.first) / (one.num_tokens - 1)


def test_clients_that_come_do_not_wait_for_others(url, scheduler, monkeypatch):
  """Time is counted from when they were to come, whatever holds the server."""
  monkeypatch.setattr(scheduler, '_fill', lambda: time.sleep(0.001))
  sent_by = []
  submit = scheduler.submit

  def note(rows):
    sent_by.append(time.perf_counter())
    submit(rows)
    if len(sent_by) == 12:
      monkeypatch.undo()

  monkeypatch.setattr(scheduler, 'submit', note)
  run = load.arriving(url, [load.body(TEXTS[0])] * 12, 100.0, seed=3)
  assert not run.errors and len(sent_by) == 12
  gaps = np.random.default_rng(3).exponential(0.01, 12)
  due = np.cumsum(gaps)
  # Nobody was answered before the last one had come; the first waited longest.
  assert run.replies[0].seconds > due[-1] - due[0]
  assert all(
    one.seconds + at >= due[-1]
    for one, at in zip(run.replies, due, strict=True)
  )
  assert run.seconds >= due[-1]


def test_errors_are_replies(url):
  run = load.closed(url, [load.body('', n=0), load.body(TEXTS[0])], 2)
  assert [one.error is None for one in run.replies] == [False, True]
  assert run.errors[0].startswith('400') and '"n"' in run.errors[0]
  with pytest.raises(ValueError, match='1 of 2 requests were not.*400'):
    bench._check_replies(run.replies)
  lost = load.closed('http://127.0.0.1:9', [load.body('a', True)], 1)
  assert 'Connect' in lost.errors[0]


def test_counters(url):
  before = load.counters(url)
  load.closed(url, [load.body(TEXTS[0])], 1)
  after = load.counters(url)
  assert after['specdec:generation_tokens_total'] > before.get(
    'specdec:generation_tokens_total', 0
  )
  assert after['process_resident_memory_bytes'] > 1 << 20
  cpu = 'process_cpu_seconds_total'
  assert after[cpu] > 0 and after[cpu] >= before[cpu]


def settings(engine, **changes):
  serve = ServeConfig(lambda: engine, ServeSettings(rows=1))
  return bench.BenchServeConfig(
    serve,
    **{
      'input_file': 'demo/input.txt',
      'texts': 4,
      'texts_in_turn': 2,
      'clients': 2,
      'openai_clients': 2,
      'repeats': 2,
      'shares': (0.5, 0.9),
      'seconds': 0.5,
    }
    | changes,
  )


@pytest.fixture(scope='module')
def record(engine, url, folder):
  (folder / 'texts').write_text('\n'.join(TEXTS))
  config = settings(
    engine,
    input_file=str(folder / 'texts'),
    url=url,
    output_file=str(folder / 'serving.json'),
  )
  console = rich.console.Console(record=True, width=200)
  found = bench.bench_serve(config, ['not run'], console)
  return found, console.export_text()


def test_a_measurement_of_a_server_that_runs(record, folder):
  found, shown = record
  assert json.loads((folder / 'serving.json').read_text()) == found.to_json()
  (way,) = found['ways'].values()
  alone, busy = way['one_client'], way['clients']
  assert alone['equal'] == 2 and busy['equal'] == 4
  assert alone['first'] < alone['server'] + 1
  ratios = [one['ratio'] for one in busy['rounds']]
  assert len(ratios) == 2 and busy['ratio'] == np.median(ratios)
  capacity = busy['requests_per_second']
  assert [row['rate'] for row in way['rates']] == [
    0.5 * capacity,
    0.9 * capacity,
  ]
  for row in way['rates']:
    assert row['errors'] == 0 and row['requests'] >= 1
    assert row['first']['50'] <= row['first']['95'] <= row['first']['99']
    assert row['first']['50'] <= row['whole']['50']
  assert way['openai']['tokens_per_second'] > 0
  assert 'as it is' in shown and '2 clients' in shown


def test_goodput_counts_what_is_in_time(engine, url):
  """All of it, or nothing: the limits decide."""
  for limit, good in ((600.0, 1.0), (1e-9, 0.0)):
    config = settings(engine, first_limit=limit, between_limit=600.0)
    one = bench._Bench(config, engine, bench.Way(), TEXTS, url, lambda: None)
    found = one._rate(0.5, 20.0)
    assert found['good_share'] == good and (found['goodput'] > 0) == bool(good)
    assert found['requests'] == 10 and found['errors'] == 0


def _numbers(way):
  return {'ways': {'x': way}, 'texts': 1, 'texts_in_turn': 1, 'clients': 1}


def test_the_picture(record, tmp_path):
  pytest.importorskip('matplotlib', reason='needs the extra [plots]')
  found, _ = record
  bench_report.plot_serving(tmp_path / 'a.png', found)
  assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
  (way,) = found['ways'].values()
  with pytest.raises(ValueError, match='no rates'):
    bench_report.plot_serving(tmp_path / 'b.png', _numbers(way | {'rates': []}))


def test_a_server_that_does_not_start_is_said(engine):
  code = 'import sys; sys.exit("no such model")'
  with pytest.raises(ValueError, match='before it was ready: no such model'):
    with bench._served(settings(engine), [sys.executable, '-c', code]):
      pytest.fail('it started')


@pytest.mark.parametrize(
  'wrong',
  [{'texts': 0}, {'seconds': 0.0}, {'shares': (0.0,)}, {'clients': 0}],
)
def test_bad_settings(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    settings(None, **wrong)


def test_gin_file():
  command = commands.COMMANDS['bench-serve']
  flags = ['--url=http://x/', '--rows=3', '--gin.SHARES=(0.1,)']
  gin_flags.load(
    gin_flags.parse_flags(flags, None, 'bench-serve', command.run_file)
  )
  try:
    config = gin_flags.build(bench.BenchServeConfig)
    assert config.url == 'http://x/' and config.shares == (0.1,)
    assert config.serve.settings.rows == 3
    again = gin_flags.whole_config()
  finally:
    gin.clear_config()
  # Another process is configured alike by it, and takes more flags.
  assert 'MAX_WAITING = 256' in again


def test_another_process_serves_the_same(tmp_path):
  """What `specdec bench-serve` gives its servers."""
  command = commands.COMMANDS['bench-serve']
  gin_flags.load(
    gin_flags.parse_flags(['--rows=3'], None, 'bench-serve', command.run_file)
  )
  try:
    first = gin_flags.build(bench.BenchServeConfig).serve
    (tmp_path / 'same.gin').write_text(gin_flags.whole_config())
    flags = [f'--gin_file={tmp_path / "same.gin"}', '--gin.SPECULATIVE=False']
    flags += ['--gin.GAMMAS={1: 4, 3: 2}']
    gin_flags.load(gin_flags.parse_flags(flags, None, 'serve'))
    second = gin_flags.build(ServeConfig)
  finally:
    gin.clear_config()
  assert first.settings.rows == second.settings.rows == 3
  assert second.settings.gammas == {1: 4, 3: 2}
  assert second.settings.speculative is False
  assert first.draft_path == second.draft_path == 'demo/draft.msgpack'


@pytest.mark.slow
def test_the_command(tmp_path):
  """With servers of its own, one for each way."""
  flags = {
    'TEXTS': 8, 'TEXTS_IN_TURN': 2, 'CLIENTS': 4, 'OPENAI_CLIENTS': 0,
    'REPEATS': 1, 'SHARES': '(0.5,)', 'SECONDS': 1.0, 'ROWS': 1,
    'PLOT_FILE': tmp_path / 'a.png', 'OUTPUT_FILE': tmp_path / 'a.json',
  }  # fmt: skip
  done = subprocess.run(
    [sys.executable, '-m', 'specdec_jax', 'bench-serve']
    + [f'--gin.{name}={value}' for name, value in flags.items()],
    cwd=ROOT,
    env=os.environ | {'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads((tmp_path / 'a.json').read_text())
  assert list(found['ways']) == ['plain', 'speculative']
  for way in found['ways'].values():
    assert way['one_client']['equal'] == 2 and way['clients']['equal'] == 8
    assert way['clients']['server_cores'] > 0
  assert (tmp_path / 'a.png').exists()
