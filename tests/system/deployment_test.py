"""docs/Dockerfile and docs/specdec.service, by running what they run.

There is neither Docker nor systemd where tests run: the Dockerfile becomes a
script, below a folder that stands for /, and what both of them start is
started, asked, and told to end as they do.
"""

import json
import os
import re
import shlex
import subprocess

import pytest

from repository import ROOT
from served import Served
from specdec_jax.serving import ServeSettings

DOCKERFILE = ROOT / 'docs' / 'Dockerfile'
UNIT = ROOT / 'docs' / 'specdec.service'
# Folders of a machine, of which there is another below the test's.
_OURS = re.compile(r'(?<![\w/.])/(src|opt/specdec|var/cache/specdec)\b')
_FREE = 8000  # the port that both take; another may have it here


_TEXT = re.sub(r'^#.*\n', '', DOCKERFILE.read_text(), flags=re.M)
_LINES = re.sub(r'\\\n', ' ', _TEXT).splitlines()
# Name and text of each instruction of the Dockerfile.
INSTRUCTIONS = [tuple(line.split(None, 1)) for line in _LINES if line]


def words(name: str) -> list[str]:
  """The words of all instructions of a name, whose form is exec or shell."""
  every = []
  for other, text in INSTRUCTIONS:
    if other == name:
      form = text[text.find('[') :]
      every += json.loads(form) if form[:1] == '[' else shlex.split(text)
  return every


def test_the_image_and_the_unit_start_the_same_as_nobody():
  names = [name for name, _ in INSTRUCTIONS]
  assert set(names) <= {
    *('FROM', 'COPY', 'RUN', 'ENV', 'VOLUME', 'WORKDIR', 'USER', 'EXPOSE'),
    *('STOPSIGNAL', 'HEALTHCHECK', 'ENTRYPOINT'),
  }, 'an instruction that these tests do not run'
  assert 'RUN' not in names[names.index('USER') :]
  for name, text in INSTRUCTIONS:
    if name == 'COPY':
      assert all((ROOT / path).exists() for path in shlex.split(text)[:-1])
  (user,) = words('USER')
  assert all(int(number) > 0 for number in user.split(':')), 'no /etc/passwd'
  assert words('STOPSIGNAL') == ['SIGTERM']
  unit = dict(re.findall(r'^(\w+)=(.*)', UNIT.read_text(), re.M))
  command, verb, *flags = unit['ExecStart'].split()
  assert [command, verb] == [words('ENTRYPOINT')[0], 'serve']
  assert '$SPECDEC_FLAGS' in flags
  assert float(unit['TimeoutStopSec']) > ServeSettings().end_seconds
  for key in ('DynamicUser', 'NoNewPrivileges', 'ProtectHome', 'PrivateTmp'):
    assert unit[key] == 'yes', key
  assert unit['ProtectSystem'] == 'strict'


@pytest.mark.slow
def test_what_the_dockerfile_runs(tmp_path):
  def below(text):
    """The text, with the machine's folders below another root."""
    return _OURS.sub(lambda found: f'{tmp_path}{found[0]}', text)

  steps = []
  for name, text in INSTRUCTIONS:
    if name == 'COPY':
      folder = os.path.dirname(text.split()[-1])
      steps.append(f'mkdir -p {folder} && cp -r {text}')
    if name == 'RUN':  # only root gives files away; the test's user starts it
      steps.append(text.replace('chown', 'true'))
  done = subprocess.run(
    ['bash', '-c', below(' && '.join(steps))],
    capture_output=True,
    text=True,
    cwd=ROOT,
  )
  if 'No matching distribution' in done.stderr:
    pytest.skip('needs a package index')
  assert done.returncode == 0, done.stderr
  assert not (tmp_path / 'src').exists()
  pairs = [below(pair).partition('=') for pair in words('ENV')]
  with Served(
    *('--port', '0', '--rows', '1', '--max-input-length', '8'),
    command=[below(word) for word in words('ENTRYPOINT')],
    env={'PATH': os.environ['PATH']} | {key: value for key, _, value in pairs},
    cwd=tmp_path / 'var/cache/specdec',
  ) as served:
    port = served.url.rpartition(':')[2]
    probe = [below(word) for word in words('HEALTHCHECK')]
    probe = [word.replace(f':{_FREE}/', f':{port}/') for word in probe]
    assert subprocess.run(probe).returncode == 0
    assert served.ask('Good!')
    assert served.end() == 0
  kept = tmp_path / 'var/cache/specdec/xla'
  assert any(kept.iterdir()), 'nothing was kept'
