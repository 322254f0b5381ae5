"""Languages of translation models, as NLLB-200 and M2M-100 have them.

The vocabulary has a token for each language. That of the source stands before a
text that the encoder reads; that of the target is what the decoder is made to
begin with, behind its start token: it is a prompt, and no part of the output.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.checks.names import nearest

_EXAMPLES = 3
_ALIKE = 3  # letters


class Languages(NamedTuple):
  """Languages of a call.

  Attributes:
    known: name -> token, of all languages; empty if the model has none.
    source: token of the texts' language; None if it was not said.
    target: token of the outputs' language; None if it was not said.
  """

  known: Mapping[str, int]
  source: int | None
  target: int | None

  def before_text(self, ids: Sequence[int]) -> list[int]:
    """Tokens to put before the ids of a text.

    Raises:
      ValueError: `source_lang` is missing, and the ids do not begin with a
        language.
    """
    return self._before(ids, self.source, 'source_lang', 'the texts')

  def before_output(self, ids: Sequence[int]) -> list[int]:
    """Tokens to put before the ids that an output is to begin with.

    Raises:
      ValueError: `target_lang` is missing, and the ids do not begin with a
        language.
    """
    return self._before(ids, self.target, 'target_lang', 'the outputs')

  def _before(self, ids, token, name, whose) -> list[int]:
    if not self.known or (len(ids) and ids[0] in self.known.values()):
      return []
    if token is None:
      some = ', '.join(map(repr, list(self.known)[:_EXAMPLES]))
      raise ValueError(
        f'{name} is missing: this model translates between {len(self.known)}'
        f' languages; name that of {whose}, such as {some} ({name} of a call'
        f' or a request, --{name.replace("_", "-")}, in gin {name.upper()}).'
      )
    return [token]


def _alike(language: str, known: Mapping[str, int]) -> str:
  """Names that begin as an English word does: 'eng_Latn' for 'English'."""
  first = language[:_ALIKE].lower()
  found = [name for name in known if first and name.lower().startswith(first)]
  return f' Nearest known: {", ".join(found[:_EXAMPLES])}.' if found else ''


def languages_of(
  tokenizer: Any,
  has_encoder: bool,
  source_lang: str | None,
  target_lang: str | None,
) -> Languages:
  """Looks up the languages of a call.

  Args:
    tokenizer: the engine's; one of somebody's own need not have `languages`.
    has_encoder: whether the target has an encoder; a model that has none has no
      use for languages.
    source_lang: name of the texts' language, such as 'eng_Latn'.
    target_lang: that of the outputs.

  Raises:
    ValueError: a language is not known (the message has the nearest names), or
      the model has none.
  """
  known = getattr(tokenizer, 'languages', {}) if has_encoder else {}
  found = []
  for name, language in (
    ('source_lang', source_lang),
    ('target_lang', target_lang),
  ):
    if not isinstance(language, str | None):
      raise ValueError(
        f"{name} is {language!r}, expected a language's name, the same for all"
        ' texts of a call.'
      )
    if language is not None and not known:
      raise ValueError(
        f'{name} is {language!r}, but this model has no tokens of languages;'
        ' leave it out. (T5s are told in the text what to do.)'
      )
    if language is not None and language not in known:
      near = nearest(language, known, or_all=False) or _alike(language, known)
      raise ValueError(
        f'{name} is {language!r}, which is none of the {len(known)} languages'
        f' of {tokenizer.path!r}.{near or f" One is {next(iter(known))!r}."}'
      )
    found.append(None if language is None else known[language])
  return Languages(known, *found)
