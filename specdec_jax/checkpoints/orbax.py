"""Training states in a folder, saved by Orbax: the last few of a run.

Each state is saved whole or not at all. Orbax is imported only when a store is
opened: the import takes seconds, and decoding does not need it.
"""

import os
from typing import Any

import jax


class StateStore:
  """The saved states of one run."""

  def __init__(self, folder: str | os.PathLike[str], keep: int = 2):
    """
    Args:
      folder: made if needed; holds one folder per saved step.
      keep: how many of the latest states are kept.
    """
    import orbax.checkpoint as ocp

    self._ocp = ocp
    self._folder = os.path.abspath(os.fspath(folder))
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=True,
        # A state that was cut short by a kill is removed, not restored.
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
      ),
      item_names=('state', 'extra'),
    )

  def latest_step(self) -> int | None:
    """The last step that was saved completely; None if there is none."""
    return self._manager.latest_step()

  def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
    """Saves a pytree of arrays, and a small dict of plain values."""
    self._manager.save(
      step,
      args=self._ocp.args.Composite(
        state=self._ocp.args.StandardSave(state),
        extra=self._ocp.args.JsonSave(extra),
      ),
      force=True,
    )
    self._manager.wait_until_finished()

  def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
    """The latest state, and the dict that was saved with it.

    Args:
      like: a state with the same structure, shapes and dtypes.

    Raises:
      ValueError: no state is saved, or one with another structure.
    """
    step = self.latest_step()
    if step is None:
      raise ValueError(f'{self._folder!r} holds no saved training state.')
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      like,
    )
    try:
      found = self._manager.restore(
        step,
        args=self._ocp.args.Composite(
          state=self._ocp.args.StandardRestore(shapes),
          extra=self._ocp.args.JsonRestore(),
        ),
      )
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f'The state of step {step} in {self._folder!r} belongs to another model'
        ' or optimiser; continue it with its own configuration, or train in'
        f' another folder. ({error})'
      ) from error
    return found['state'], found['extra']

  def close(self) -> None:
    """Frees Orbax's resources."""
    self._manager.close()
