"""Automata of what an output may be: one of some choices, a regex, JSON."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.checks.fields import package, unexpected
from specdec_jax.rules.automata import MOST_EDGES, Automaton

MOST_RECURSION = 3  # of a schema that refers to itself
_BOUNDS = re.compile(
  r'"((?:exclusive)?(?:[Mm]in|[Mm]ax)imum|multipleOf)":\s*-?[0-9]'
)


def of_choices(
  choices: Sequence[Sequence[int]], stop_ids: Sequence[int]
) -> Automaton:
  """A trie of outputs, each of which ends with a stop id.

  Args:
    choices: ids of each, without what ends it.
    stop_ids: ids that end an output.

  Raises:
    ValueError: a choice is empty, or there twice, or ends before its last id.
  """
  sizes = np.fromiter(map(len, choices), np.int64, len(choices))
  table = np.full((len(choices), int(sizes.max())), -1, np.int64)
  table[np.arange(table.shape[1]) < sizes[:, None]] = np.concatenate(
    [np.asarray(ids, np.int64) for ids in choices]
  )
  order = np.lexsort(table.T[::-1])
  rows, sizes = table[order], sizes[order]
  differs = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
  for index in np.flatnonzero(~differs[:, -1])[:1]:
    expected = 'each of them once (they are compared as ids)'
    raise unexpected('choices', expected, rows[index].tolist())
  is_last = np.isin(rows, stop_ids)
  if np.any(is_last) or np.any(sizes == 0):
    row = rows[np.argmax(np.any(is_last, axis=1) | (sizes == 0))]
    expected = 'ids before what ends an output'
    raise unexpected('choices', expected, row[row >= 0].tolist())
  # A node for each prefix, level by level, behind the root.
  is_new = np.pad(differs, ((1, 0), (0, 0)), constant_values=True) & (rows >= 0)
  before = np.cumsum([0, *is_new.sum(axis=0)])
  nodes = np.cumsum(is_new, axis=0) + before[:-1]
  parents = np.pad(nodes[:, :-1], ((0, 0), (1, 0)))
  leaves = nodes[np.arange(len(rows)), sizes - 1]
  end = int(before[-1]) + 1
  edges = np.stack([parents[is_new], rows[is_new], nodes[is_new]])
  return _automaton('choices', edges, np.append(leaves, end), stop_ids, end)


def of_regex(
  name: str,
  pattern: str,
  spellings: Mapping[bytes, Sequence[int]],
  begins_blank: bool,
  stop_ids: Sequence[int],
) -> Automaton:
  """An automaton of the outputs whose whole text a regex matches.

  Args:
    name: the option that it comes from, for messages.
    pattern: the regex, as the Rust package `regex` has them.
    spellings: the bytes of tokens -> the ids of these.
    begins_blank: whether outputs begin with a blank that is no text.
    stop_ids: ids that end an output.

  Raises:
    ValueError: the package outlines_core is not installed or does not take the
      regex, no sequence of tokens matches it, or its automaton is too large.
  """
  core = package('Constraints on text', 'outlines_core', 'rules')
  begin = ' ' if begins_blank else ''
  # Which id it takes for the end of sequence does not matter.
  vocabulary = core.Vocabulary(stop_ids[0], dict(spellings))
  try:
    index = core.Index(f'{begin}(?:{pattern})', vocabulary)
  except ValueError as error:
    expected = 'a regex that outlines_core takes and some tokens match'
    raise unexpected(name, expected, pattern, f'({error})') from error
  transitions = index.get_transitions()
  edges = np.fromiter(
    (
      (state, token, target)
      for state, following in transitions.items()
      for token, target in following.items()
    ),
    np.dtype((np.int64, 3)),
  ).T
  edges = edges[:, ~np.isin(edges[1], stop_ids)]
  finals = np.fromiter(index.get_final_states(), np.int64)
  edges = edges[:, np.isin(edges[2], _alive(edges, finals))]
  start = index.get_initial_state()
  if start not in edges[0] and start not in finals:
    expected = 'a regex that some sequence of tokens matches'
    raise unexpected(name, expected, pattern)
  return _automaton(name, edges, finals, stop_ids, None, start)


def pattern_of(schema: Mapping[str, Any] | str) -> str:
  """The regex of JSON that a schema describes.

  A schema that refers to itself is followed `MOST_RECURSION` levels deep;
  bounds of numbers are not followed. Both are said in the log.

  Args:
    schema: the schema, or JSON of it.

  Raises:
    ValueError: it is none that the package outlines_core takes.
  """
  core = package('Constraints on text', 'outlines_core', 'rules')
  try:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    pattern, deeper = (
      core.json_schema.build_regex_from_schema(text, None, MOST_RECURSION + i)
      for i in (0, 1)
    )
  except (TypeError, ValueError) as error:
    expected = 'a JSON schema that outlines_core takes'
    raise unexpected('json_schema', expected, schema, f'({error})') from error
  if pattern != deeper:
    logging.getLogger(__name__).warning(
      'json_schema refers to itself: %d levels are taken.', MOST_RECURSION
    )
  if bounds := _BOUNDS.findall(text):
    logging.getLogger(__name__).warning(
      'json_schema: %s of numbers are not followed.', ', '.join(bounds)
    )
  return pattern


def _alive(edges: np.ndarray, finals: np.ndarray) -> np.ndarray:
  """The states from which an output can still end."""
  size = 1 + int(max(edges.max(initial=0), finals.max(initial=0)))
  is_alive = np.zeros((size,), bool)
  is_alive[finals] = True
  count: Any = -1
  while count < (count := np.count_nonzero(is_alive)):
    is_alive[edges[0, is_alive[edges[2]]]] = True
  return np.flatnonzero(is_alive)


def _automaton(
  name: str,
  edges: np.ndarray,
  finals: np.ndarray,
  stop_ids: Sequence[int],
  end: int | None,
  start: int = 0,
) -> Automaton:
  """An automaton in whose final states alone an output may end.

  Args:
    name: the option that it comes from, for the message.
    edges: int[3, E], state, token and the state after it, of any numbers.
    finals: the final states.
    stop_ids: ids that end an output.
    end: the state after the end; None is the final state itself.
    start: the state in which it begins.

  Raises:
    ValueError: it is too large.
  """
  sources = np.repeat(finals, len(stop_ids))
  tokens = np.tile(stop_ids, finals.size)
  targets = sources if end is None else np.full_like(sources, end)
  edges = np.append(edges, [sources, tokens, targets], axis=1)
  if edges.shape[1] > MOST_EDGES:
    expected = f'an automaton of at most {MOST_EDGES} edges'
    raise unexpected(name, expected, edges.shape[1])
  states = np.unique(np.append(edges[[0, 2]], start))
  # The first state is the one in which it begins.
  states = np.append(start, states[states != start])
  order = np.argsort(states)
  sources, targets = (
    order[np.searchsorted(states, of, sorter=order)] for of in edges[[0, 2]]
  )
  by_state = np.lexsort((edges[1], sources))
  counts = np.bincount(sources, minlength=states.size)
  first = np.cumsum([0, *counts]).astype(np.int32)
  table = np.stack([edges[1], targets]).astype(np.int32)[:, by_state]
  return Automaton(first, *table)
