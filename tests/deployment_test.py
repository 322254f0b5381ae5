"""docs/Dockerfile and docs/specdec.service, by running what they run.

There is neither Docker nor systemd where tests run: below a folder that stands
for / the Dockerfile's files are copied and its commands run, and what both of
them start is started, asked, and told to end as they do.
"""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from served import Served
from specdec_jax.serving import ServeSettings

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / 'docs' / 'Dockerfile'
UNIT = ROOT / 'docs' / 'specdec.service'
# Folders of a machine, of which there is another below the test's.
_OURS = re.compile(r'(?<![\w/.])/(src|opt/specdec|var/cache/specdec)\b')
_FREE = 8000  # the port that both take; another may have it here


@dataclasses.dataclass(frozen=True)
class Instruction:
  """A line of a Dockerfile, with what it was continued by."""

  name: str
  text: str

  @property
  def words(self) -> list[str]:
    """Of the exec form the words, of others those between spaces."""
    text = self.text[self.text.find('[') :]
    return json.loads(text) if text[:1] == '[' else shlex.split(self.text)


def dockerfile() -> list[Instruction]:
  text = re.sub(r'^#.*\n', '', DOCKERFILE.read_text(), flags=re.M)
  lines = re.sub(r'\\\n', ' ', text).splitlines()
  return [Instruction(*line.split(None, 1)) for line in lines if line]


def of(name: str) -> list[Instruction]:
  return [one for one in dockerfile() if one.name == name]


def only(name: str) -> Instruction:
  (found,) = of(name)
  return found


def unit() -> dict[str, list[str]]:
  """Key -> its values."""
  values: dict[str, list[str]] = {}
  for key, value in re.findall(r'^(\w+)=(.*)', UNIT.read_text(), re.M):
    values.setdefault(key, []).append(value)
  return values


def test_the_dockerfile_runs_as_nobody_and_asks_whether_it_is_well():
  user, _, group = only('USER').text.partition(':')
  assert int(user) > 0 and int(group) > 0, 'a number needs no /etc/passwd'
  assert only('STOPSIGNAL').text == 'SIGTERM'
  assert '/health' in only('HEALTHCHECK').text
  names = [one.name for one in dockerfile()]
  assert set(names) <= {
    *('FROM', 'COPY', 'RUN', 'ENV', 'VOLUME', 'WORKDIR', 'USER', 'EXPOSE'),
    *('STOPSIGNAL', 'HEALTHCHECK', 'ENTRYPOINT'),
  }, 'an instruction that this test does not run'
  assert 'RUN' not in names[names.index('USER') :]
  for one in of('COPY'):
    for source in one.words[:-1]:
      assert (ROOT / source).exists(), source


def test_the_unit_starts_what_the_image_starts_and_gives_it_time():
  found = unit()
  flags = found['ExecStart'][0].split()
  assert flags[0] == only('ENTRYPOINT').words[0]
  assert flags[1] == 'serve' and '$SPECDEC_FLAGS' in flags
  (seconds,) = found['TimeoutStopSec']
  assert float(seconds) > ServeSettings().end_seconds
  for key in ('DynamicUser', 'NoNewPrivileges', 'ProtectHome', 'PrivateTmp'):
    assert found[key] == ['yes'], key
  assert found['ProtectSystem'] == ['strict']


def moved(text: str, root: pathlib.Path) -> str:
  """The text, with the machine's folders below another root."""
  return _OURS.sub(lambda found: f'{root}{found[0]}', text)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """The file system after the Dockerfile's COPY and RUN."""
  made = tmp_path_factory.mktemp('root')
  made.chmod(0o755)
  for one in dockerfile():
    if one.name == 'COPY':
      *sources, target = one.words
      to = made / target.lstrip('/')
      for source in sources:
        path = ROOT / source
        if path.is_dir():
          shutil.copytree(path, to, ignore=lambda *_: {'__pycache__'})
        else:
          to.mkdir(parents=True, exist_ok=True)
          shutil.copy(path, to)
    if one.name == 'RUN':
      command = moved(one.text, made)
      if os.geteuid():  # only root gives files away
        command = command.replace('chown', 'test -n')
      done = subprocess.run(
        ['bash', '-c', command], capture_output=True, text=True, cwd=made
      )
      if 'No matching distribution' in done.stderr:
        pytest.skip('needs a package index')
      assert done.returncode == 0, done.stderr
  assert not (made / 'src').exists()
  return made


def is_open_to(user, root):
  """Whether that user can be had here, and sees Python and this folder."""
  if os.geteuid():
    return False
  for folder in root.parents[:2]:  # pytest's own, which it lets nobody see
    folder.chmod(folder.stat().st_mode | 0o011)
  python = [root / 'opt/specdec/bin/python', '-c', '']
  try:
    return subprocess.run(python, user=user, cwd=root).returncode == 0
  except PermissionError:  # its Python is one of root's own
    return False


@pytest.mark.slow
def test_what_the_dockerfile_runs(root):
  pairs = [one.partition('=') for line in of('ENV') for one in line.words]
  environment = {key: moved(value, root) for key, _, value in pairs}
  command = [moved(word, root) for word in only('ENTRYPOINT').words]
  probe = [moved(word, root) for word in only('HEALTHCHECK').words]
  user = int(only('USER').text.partition(':')[0])
  user = user if is_open_to(user, root) else None
  with Served(
    *('--port', '0', '--rows', '1', '--max-input-length', '8'),
    command=command,
    env={'PATH': os.environ['PATH']} | environment,
    cwd=root / 'var/cache/specdec',
    user=user,
  ) as served:
    port = served.url.rpartition(':')[2]
    probe = [word.replace(f':{_FREE}/', f':{port}/') for word in probe]
    assert subprocess.run(probe).returncode == 0
    assert served.ask('Good!')
    assert served.end() == 0
    # The control: it is well no more.
    stopped = subprocess.run(probe, stderr=subprocess.DEVNULL)
    assert stopped.returncode != 0
  assert served.said('stopped')
  assert any((root / 'var/cache/specdec/xla').iterdir()), 'nothing was kept'
