"""Serves the demo pair by HTTP, and asks it with OpenAI's client.

  pip install -e '.[serve]' openai
  python examples/serve_and_ask.py

A server of yours runs by `specdec serve --target MODEL --draft SMALL_MODEL`.
"""

import socket
import subprocess
import sys
import time

import openai

with socket.socket() as free:
  free.bind(('127.0.0.1', 0))
  port = free.getsockname()[1]
server = subprocess.Popen(
  [sys.executable, '-m', 'specdec_jax', 'serve', '--port', str(port)],
  stderr=subprocess.DEVNULL,  # its log
)
client = openai.OpenAI(
  base_url=f'http://127.0.0.1:{port}/v1', api_key='none', max_retries=0
)
try:
  while True:
    try:
      print('serves', [model.id for model in client.models.list()])
      break
    except openai.APIConnectionError:  # it is starting
      if server.poll() is not None:
        raise
      time.sleep(0.2)

  client = client.with_options(max_retries=20)  # until it has compiled
  question = {'model': 'specdec-demo', 'temperature': 0, 'max_tokens': 60}
  answer = client.completions.create(prompt='Good morning!', **question)
  print(answer.choices[0].text)
  speculation = answer.model_extra['metrics']['speculative_decoding']
  print(f'acceptance rate: {speculation["acceptance_rate"]:.2f}')

  stream = client.completions.create(
    prompt='Where can I buy a ticket?', stream=True, **question
  )
  for piece in stream:
    print(piece.choices[0].text, end='|', flush=True)
  print()
finally:
  server.terminate()  # it finishes what it has taken
  server.wait()
