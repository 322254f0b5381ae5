"""`specdec serve`: its flags, what it needs, and how it ends."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request

import gin
import pytest

from specdec_jax import serving
from specdec_jax.cli import commands, gin_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUN_FILE = commands.COMMANDS['serve'].run_file


def macros(*flags):
  """The macros of the command with these flags."""
  parsed = gin_flags.parse_flags(flags, None, 'serve', RUN_FILE)
  gin_flags.load(parsed)
  names = ('CHECKPOINT_PATH', 'DRAFT_CHECKPOINT_PATH', 'VOCAB_PATH', 'TARGET',
           'DRAFT', 'MODEL_NAME', 'PORT')  # fmt: skip
  try:
    return {
      name: gin.query_parameter(f'{name}/gin.macro.value') for name in names
    }
  finally:
    gin.clear_config()


def test_without_arguments_it_is_the_demo_pair():
  found = macros()
  assert found['CHECKPOINT_PATH'] == 'demo/target.msgpack'
  assert found['DRAFT_CHECKPOINT_PATH'] == 'demo/draft.msgpack'
  assert found['MODEL_NAME'] == 'specdec-demo'


def test_a_target_brings_nothing_of_the_demo():
  found = macros('--target', 'mine', '--port', '99')
  assert found.pop('CHECKPOINT_PATH') == 'mine'
  assert found.pop('PORT') == 99
  assert set(found.values()) == {None}
  found = macros('--target', 'mine', '--draft', 'small', '--model-name', 'x')
  assert found['DRAFT_CHECKPOINT_PATH'] == 'small'
  assert found['MODEL_NAME'] == 'x' and found['DRAFT'] is None


def test_flags_of_drafts_and_of_replicas():
  flags = ('--gamma', 'adaptive', '--fallback', '--calibration', 'here.json')
  gin_flags.load(
    gin_flags.parse_flags((*flags, '--replicas', '3'), None, 'serve', RUN_FILE)
  )
  try:
    config = gin_flags.build(serving.ServeConfig)
    assert gin.query_parameter('GAMMA/gin.macro.value') == 'adaptive'
    assert gin.query_parameter('DRAFTER_RESTS/gin.macro.value') is True
  finally:
    gin.clear_config()
  assert config.calibration == 'here.json' and config.replicas.number == 3


def test_a_calibration_is_read_before_a_model(tmp_path):
  pytest.importorskip('uvicorn', reason='needs the extra [serve]')
  path = tmp_path / 'calibration.json'
  path.write_text('{}')

  def load(**_):
    pytest.fail('a model was loaded')

  config = serving.ServeConfig(load, calibration=str(path))
  with pytest.raises(ValueError, match='is not a calibration'):
    serving.serve(config)


@pytest.mark.parametrize('name', ['uvicorn', 'starlette', 'prometheus_client'])
def test_it_says_which_extra_is_missing(name, monkeypatch):
  """Before a model is loaded."""

  def load(**_):
    pytest.fail('a model was loaded')

  for known in ('uvicorn', 'starlette', 'prometheus_client'):
    found = None if known == name else types.ModuleType(known)
    monkeypatch.setitem(sys.modules, known, found)
  with pytest.raises(ValueError, match=rf'{name}.*specdec_jax\[serve\]'):
    serving.serve(serving.ServeConfig(load))


@pytest.mark.slow
def test_sigterm_finishes_what_was_taken():
  if importlib.util.find_spec('uvicorn') is None:
    pytest.skip('needs the extra [serve]')
  process = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'specdec_jax',
      'serve',
      '--port',
      '0',
      '--rows',
      '1',
    ],
    cwd=ROOT,
    env=os.environ | {'PYTHONPATH': str(ROOT), 'SPECDEC_API_KEYS': 'secret'},
    stderr=subprocess.PIPE,
    text=True,
  )
  answers, events = {}, []

  def until(event):
    for line in process.stderr:
      said = json.loads(line) if line.startswith('{') else {}
      events.append(said.get('event'))
      if said.get('event') == event:
        return said
    raise AssertionError(f'it never said {event!r}')

  def ask(index):
    request = urllib.request.Request(
      f'{url}/v1/completions',
      json.dumps(
        {'prompt': ['Good morning!'] * 9, 'temperature': 0, 'max_tokens': 60}
      ).encode(),
      {'Authorization': 'Bearer secret'},
    )
    try:
      with urllib.request.urlopen(request) as answer:
        answers[index] = json.load(answer)
    except urllib.error.HTTPError as error:
      assert error.code == 503, 'it came too late, or not at all'

  try:
    url = until('ready')['url']
    # It says what it compiles, and goes on with it while it answers.
    assert 'compiling' in events and 'compiled' not in events
    with pytest.raises(urllib.error.HTTPError, match='401'):
      urllib.request.urlopen(f'{url}/v1/models')
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
      thread.start()
    while b'waiting 0.0' in urllib.request.urlopen(f'{url}/metrics').read():
      pass
    process.send_signal(signal.SIGTERM)
    rows = until('stopping')['rows']
    for thread in threads:
      thread.join()
    until('stopped')
    assert process.wait(60) == 0
  finally:
    process.kill()
    process.wait()
    process.stderr.close()
  # Whoever was taken has all of the answer.
  assert 0 < rows <= 9 * len(answers)
  texts = [c['text'] for one in answers.values() for c in one['choices']]
  assert len(texts) == 9 * len(answers) and len(set(texts)) == 1 and texts[0]
