"""Fetches a model from the Hugging Face hub to a local folder.

The package huggingface_hub is optional; it keeps files that it has fetched in
its own cache, and needs the network only for files that are not there.
"""

import pathlib
from typing import Any

from specdec_jax.checkpoints.huggingface_arrays import CONFIG, INDEX, WEIGHTS

# The files that are fetched; weights for other frameworks are not.
PATTERNS = (
  CONFIG,
  'generation_config.json',
  'model*.safetensors',
  INDEX,
  'spiece.model',
  'sentencepiece.bpe.model',  # M2M-100's
  'tokenizer*',
  'vocab.json',
  'merges.txt',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template*',
)


def fetch(hub_id: str, revision: str | None = None) -> pathlib.Path:
  """Returns a local folder with a model from the hub.

  `huggingface.load_huggingface` reads such a folder.

  Args:
    hub_id: such as 'google/flan-t5-small'.
    revision: a branch, tag or commit; None is the main branch.

  Raises:
    ValueError: the package huggingface_hub is not installed, the hub cannot
      be reached, it has no such model or revision or wants a login for it, or
      the model has no safetensors.
  """
  hub, errors = _import_hub()
  at = f'{hub_id!r}' + (f' at {revision!r}' if revision else '')
  try:
    found = hub.snapshot_download(
      hub_id, revision=revision, allow_patterns=list(PATTERNS)
    )
  except errors.GatedRepoError as error:
    raise ValueError(
      f'The hub gives {at} only to users who have agreed to its terms: agree on'
      " the model's page, then run `hf auth login`."
    ) from error
  except errors.RepositoryNotFoundError as error:
    raise ValueError(
      f'The hub has no public model {at}; expected an id such as'
      " 'google/flan-t5-small', or `hf auth login` for a private one."
    ) from error
  except errors.RevisionNotFoundError as error:
    raise ValueError(
      f'The model {hub_id!r} of the hub has no revision {revision!r}; expected'
      ' a branch, a tag or a commit.'
    ) from error
  except errors.HFValidationError as error:
    raise ValueError(
      f"{hub_id!r} is not an id of the hub, such as 'google/flan-t5-small', and"
      f' not a folder here ({error}).'
    ) from error
  except Exception as error:  # errors of its HTTP client have no common base
    why = next(iter(str(error).splitlines()), '')
    raise ValueError(
      f'{at} could not be fetched: the hub cannot be reached'
      f' ({type(error).__name__}: {why}). Try again with a network, or give a'
      ' folder that was fetched before.'
    ) from error
  folder = pathlib.Path(found)
  if not (folder / WEIGHTS).exists() and not (folder / INDEX).exists():
    raise ValueError(
      f'The model {at} of the hub has no {WEIGHTS} and no {INDEX}. Load it with'
      ' transformers, `save_pretrained(folder, safe_serialization=True)`, and'
      ' give that folder.'
    )
  return folder


def _import_hub() -> tuple[Any, Any]:
  try:
    import huggingface_hub
    import huggingface_hub.errors
  except ImportError as error:
    raise ValueError(
      'To fetch a model from the Hugging Face hub, install its package: pip'
      ' install huggingface_hub. Or give a local folder.'
    ) from error
  return huggingface_hub, huggingface_hub.errors
