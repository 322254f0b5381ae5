"""Shows results on a console, and stores them as tables, records and plots."""

from specdec_jax.report.console import bar, say
from specdec_jax.report.record import Record
from specdec_jax.report.table import Column, Table

__all__ = ['Column', 'Record', 'Table', 'bar', 'say']
