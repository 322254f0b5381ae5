"""Translates a file, eight lines together.

Each line goes at its own pace, and a finished one makes room for the next.

  python examples/batch_a_file.py

For large files there is a command that goes on where it was stopped:

  specdec demo --batch-size 8 --batching continuous --output-dir outputs/a FILE
"""

import pathlib
import time

import specdec_jax as sd

lines = pathlib.Path('demo/input.txt').read_text('utf-8').splitlines()
engine = sd.Engine(
  sd.load('demo'), sd.load('demo-draft'), batch_size=8, gamma=2
)

print(f'compiled in {engine.warmup(lines):.1f} s')
start = time.perf_counter()
done = engine.generate(lines)
seconds = time.perf_counter() - start

german = pathlib.Path('outputs/german.txt')
german.parent.mkdir(exist_ok=True)
german.write_text(''.join(f'{one.text}\n' for one in done), 'utf-8')
tokens = sum(one.stats.num_tokens for one in done)
calls = sum(one.stats.num_target_calls for one in done)
print(f'{german}: {len(done)} lines in {seconds:.2f} s, the first one:')
print(done[0].text)
print(f'{tokens / calls:.2f} tokens a call of the large model')
