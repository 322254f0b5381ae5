"""Tables and a picture of what `bench` measured."""

import os
from collections.abc import Mapping
from typing import Any

from specdec_jax.measure.canvas import PALETTE, save
from specdec_jax.measure.table import Column, Table


def tables(record: Mapping[str, Any]) -> list[Table]:
  """Tables of one client, many clients, and rates of requests."""
  ways: Mapping[str, Any] = record['ways']
  one: list[list[Any]] = []
  many: list[list[Any]] = []
  rates: list[list[Any]] = []
  for name, way in ways.items():
    alone, busy, others = way['one_client'], way['clients'], way['openai'] or {}
    times = (alone[key] for key in ('server', 'library', 'more', 'first'))
    equal = f'{alone["equal"]} of {record["texts_in_turn"]}'
    one.append([name, *(1e3 * seconds for seconds in times), equal])
    many.append(
      [
        name,
        busy['requests_per_second'],
        busy['tokens_per_second'],
        busy['offline'],
        busy['ratio'],
        busy['server_cores'],
        busy['client_cores'],
        f'{busy["equal"]} of {record["texts"]}',
        others.get('tokens_per_second'),
        others.get('client_cores'),
      ]
    )
    for row in way['rates']:
      rates.append(
        [
          name,
          f'{row["share"]:.0%}',
          row['rate'],
          row['tokens_per_second'],
          *(_times(row[key]) for key in ('first', 'between', 'whole')),
          row['goodput'],
          100 * row['good_share'],
          row['errors'],
        ]
      )
  clients = f'{record["clients"]} clients'
  found = [
    Table(
      '',
      [
        'one client',
        Column('server', '.1f', 'ms'),
        Column('library', '.1f', 'ms'),
        Column('more', '.1f', 'ms'),
        Column('first token', '.1f', 'ms'),
        'equal outputs',
      ],
      one,
    ),
    Table(
      '',
      [
        clients,
        Column('requests/s', '.1f'),
        Column('tokens/s', '.1f'),
        Column('offline, tokens/s', '.1f'),
        Column('of it', '.2f'),
        Column('server, cores', '.2f'),
        Column('clients, cores', '.2f'),
        'equal outputs',
        Column('`openai`, tokens/s', '.1f'),
        Column('`openai`, cores', '.2f'),
      ],
      many,
    ),
    Table(
      '',
      [
        'decoding',
        Column('load', align='right'),
        Column('requests/s', '.1f'),
        Column('tokens/s', '.1f'),
        Column('first token', unit='ms', align='right'),
        Column('between tokens', unit='ms', align='right'),
        Column('end to end', unit='ms', align='right'),
        Column('goodput, requests/s', '.1f'),
        Column('good', '.0f', '%'),
        'errors',
      ],
      rates,
    ),
  ]
  return [table for table in found if table.rows]


def _times(seconds: Mapping[str, float | None]) -> str:
  """Percentiles in milliseconds."""
  known = [one for one in seconds.values() if one is not None]
  return ' / '.join(
    f'{1e3 * one:.1f}' if one < 0.1 else f'{1e3 * one:.0f}' for one in known
  )


def plot_serving(
  path: str | os.PathLike[str], record: Mapping[str, Any]
) -> None:
  """Draws the time to the first token, and the goodput, over the rate.

  Args:
    path: path of the PNG; replaced whole or not at all.
    record: of `bench.bench_serve`.

  Raises:
    ValueError: matplotlib is not installed, or no rates were measured.
    OSError: the file cannot be written.
  """
  ways = {name: way['rates'] for name, way in record['ways'].items()}
  if not any(ways.values()):
    raise ValueError('There are no rates of requests to draw.')

  def draw(figure):
    times, good = figure.subplots(1, 2)
    for (name, rows), color in zip(ways.items(), PALETTE, strict=False):
      rates = [row['rate'] for row in rows]
      for percent, style in (('50', '-'), ('99', '--')):
        found = [1e3 * (row['first'][percent] or 0.0) for row in rows]
        label = f'{name}, {"median" if percent == "50" else "99 %"}'
        times.plot(rates, found, style, color=color, marker='o', label=label)
      goodput = [row['goodput'] for row in rows]
      good.plot(rates, goodput, color=color, marker='o', label=name)
    times.set_yscale('log')
    times.yaxis.set_major_formatter('{x:g}')
    times.set_ylabel('time to the first token, ms')
    good.set_ylabel('good answers a second')
    good.set_ylim(bottom=0)
    for axes in (times, good):
      axes.set_xlabel('requests a second')
      axes.set_xlim(left=0)
      axes.legend(fontsize='small')
    figure.suptitle(
      f'specdec serve, {record["rows"]} rows: {record["machine"]["device"]},'
      f' {record["machine"]["cores"]} cores, with its clients',
      fontsize='medium',
    )

  save(path, draw, (9.0, 4.0))
