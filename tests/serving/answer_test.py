"""Long classifications give way to whoever else wants the target to read."""

import asyncio
import functools
import threading
import types

import numpy as np
import pytest

from specdec_jax.serving import answer
from specdec_jax.serving.answer import Turns
from specdec_jax.serving.protocol import ApiError

TEXTS = [[5 + i] * 300 for i in range(64)]
LABELS = ['no', [3, 4]]
END = 1


class Reader:
  """An engine that classifies as fast as a test lets it, and notes the order.

  Attributes:
    order: what has begun, in order.
    may_go_on: pieces wait for it.
  """

  def __init__(self):
    languages = types.SimpleNamespace(known={})
    self.languages, self.codec = lambda: languages, self
    sizes = {'vocab_size': 99, 'input_vocab_size': 99}
    self.target = types.SimpleNamespace(has_encoder=True, **sizes)
    self.order, self.may_go_on = [], threading.Event()
    self.has_begun, self._reads = threading.Event(), threading.Lock()
    self.sizes = []
    self.config = types.SimpleNamespace(max_input_len=4000)

  def input_ids(self, text, source_lang=None):
    return [*text, END]

  def ids_around(self, text):
    return [], [END]

  def label_ids(self, labels):
    return [[*([7, 8] if isinstance(x, str) else x), END] for x in labels]

  def classify(self, texts, labels):
    assert labels == [[7, 8], [3, 4]]
    self.sizes.append([len(text) for text in texts])
    self.read(texts[0][0])
    return np.array([[text[0], 0.0] for text in texts])

  def read(self, name):
    assert self._reads.acquire(blocking=False), 'two at a time'
    self.order.append(name)
    self.has_begun.set()
    assert self.may_go_on.wait(60)
    self._reads.release()


@pytest.fixture
def reader():
  return Reader()


@pytest.fixture
def made(reader):
  return Turns(reader, 60.0)


async def begun(reader):
  assert await asyncio.to_thread(reader.has_begun.wait, 60)
  reader.has_begun.clear()


def test_a_long_classification_gives_way_after_each_piece(reader, made):

  async def main():
    long = asyncio.create_task(made.classify(TEXTS, LABELS))
    await begun(reader)
    pieces = [functools.partial(reader.read, name) for name in 'abc']
    scores = [asyncio.create_task(made.run([piece])) for piece in pieces]
    await asyncio.sleep(0)  # they have asked for their turns
    reader.may_go_on.set()
    await asyncio.gather(*scores)
    return await long

  rows = asyncio.run(main())
  assert rows[:, 0].tolist() == [5 + i for i in range(64)]
  # They waited for the piece that had begun, and for no other.
  assert reader.order[1:4] == ['a', 'b', 'c'] and len(reader.order) > 10
  assert sum(reader.sizes, []) == [301] * 64
  assert all(512 * len(sizes) <= answer._PIECE for sizes in reader.sizes)


def test_two_long_ones_take_turns(reader, made):
  reader.may_go_on.set()

  def pieces(name):
    return [functools.partial(reader.read, (name, i)) for i in range(8)]

  async def main():
    await asyncio.gather(made.run(pieces('a')), made.run(pieces('b')))

  asyncio.run(main())
  assert reader.order == [(name, i) for i in range(8) for name in 'ab']


def test_a_piece_that_nobody_wants_any_more_keeps_its_turn(reader, made):
  """Else clients that leave would take the memory of many pieces."""

  async def main():
    gone = asyncio.create_task(made.classify(TEXTS, LABELS))
    await begun(reader)
    gone.cancel()
    score = asyncio.create_task(made.run([lambda: reader.read('score')]))
    await asyncio.sleep(0.05)
    assert reader.order == [5]  # the piece, which has not ended
    reader.may_go_on.set()
    await score
    assert gone.cancelled()

  asyncio.run(main())
  assert reader.order == [5, 'score']


def test_it_ends_with_the_time_of_the_request(reader):

  async def main():
    try:
      await Turns(reader, 0.05).classify(TEXTS, LABELS)
    finally:
      reader.may_go_on.set()

  with pytest.raises(ApiError, match='time of the request') as caught:
    asyncio.run(main())
  assert caught.value.status == 504


def test_what_cannot_be_read_is_refused_before_the_first_piece(reader, made):
  with pytest.raises(ApiError, match=r'inputs\[63\]'):
    asyncio.run(made.classify([*TEXTS[:63], [100]], LABELS))
  with pytest.raises(ApiError, match='input 1 has 4001 tokens'):
    asyncio.run(made.classify([TEXTS[0], [5] * 4000], LABELS))
  assert not reader.order
