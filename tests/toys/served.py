"""`specdec serve` in a process of its own, and what it says."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from repository import ROOT

_SECONDS = 1200  # in which programs are compiled on any machine


class Served:
  """A process of a server.

  Attributes:
    lines: what it has said so far on stderr.
  """

  def __init__(self, *flags, command=None, **options):
    paths = [str(ROOT), *filter(None, sys.path)]
    environment = os.environ | {
      'PYTHONPATH': os.pathsep.join(paths),
      'RAY_USAGE_STATS_ENABLED': '0',
      'RAY_DEDUP_LOGS': '0',  # lines that differ in numbers are one else
    }
    self.process = subprocess.Popen(
      [*(command or (sys.executable, '-m', 'specdec_jax', 'serve')), *flags],
      stderr=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      text=True,
      **({'env': environment, 'cwd': ROOT} | options),
    )
    self.lines = []
    self._reader = threading.Thread(target=self._read)
    self._reader.start()

  def _read(self):
    for line in self.process.stderr:
      self.lines.append(line)

  def said(self, event):
    """The object of an event; None if it has not happened."""
    found = (json.loads(line) for line in self.lines if line.startswith('{'))
    return next((one for one in found if one['event'] == event), None)

  def until(self, condition):
    """Waits for a condition while it runs."""
    end = time.monotonic() + _SECONDS
    while not condition():
      assert time.monotonic() < end, ''.join(self.lines)
      assert self.process.poll() is None, ''.join(self.lines)
      time.sleep(0.1)

  @property
  def url(self):
    """Its address, once it is ready."""
    self.until(lambda: self.said('ready'))
    return self.said('listening')['url'].replace('0.0.0.0', '127.0.0.1')

  def ask(self, prompt, **options):
    """The text of an answer, or the status of an error."""
    body = {'prompt': prompt, 'temperature': 0, 'max_tokens': 12} | options
    try:
      request = urllib.request.Request(
        f'{self.url}/v1/completions',
        json.dumps(body).encode(),
        {'content-type': 'application/json'},
      )
      with urllib.request.urlopen(request) as answer:
        return json.load(answer)['choices'][0]['text']
    except urllib.error.HTTPError as error:
      with error:
        return error.code

  def end(self):
    """Tells it to end, and waits; its exit status."""
    self.process.send_signal(signal.SIGTERM)
    return self.process.wait(120)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.process.kill()
    self.process.wait()
    self._reader.join()
    self.process.stderr.close()
