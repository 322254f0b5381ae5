"""What `t5x_plugin.InteractiveModel` adds to T5X's class of that name."""

import functools
import os
from typing import Any

from specdec_jax.t5x_plugin.drafter import restore_drafter


class RestoresDrafter:
  """T5X's `InteractiveModel`, which restores the drafter as well.

  The base of `t5x_plugin.InteractiveModel`, whose other base is T5X's class.
  That class makes its `RestoreCheckpointConfig` itself, where gin cannot reach
  it, and leaves no place for a transformation: it is added to what is made.
  """

  def __init__(
    self,
    *args: Any,
    model: Any,
    draft_checkpoint: str | os.PathLike[str],
    **kwargs: Any,
  ):
    """T5X's arguments, and where the drafter's parameters are.

    Args:
      *args: T5X's.
      model: a `t5x_plugin.EncoderDecoderModel`.
      draft_checkpoint: see `restore_drafter`.
      **kwargs: T5X's.
    """
    self._restore_drafter = functools.partial(
      restore_drafter,
      checkpoint=draft_checkpoint,
      module=model.draft_module,
      dtype=kwargs.get('dtype'),
    )
    super().__init__(*args, model=model, **kwargs)  # type: ignore[call-arg]

  @property
  def _restore_checkpoint_cfg(self) -> Any:
    return self._restore_config

  @_restore_checkpoint_cfg.setter
  def _restore_checkpoint_cfg(self, config: Any) -> None:
    if config is not None:
      config.state_transformation_fns = (
        *config.state_transformation_fns,
        self._restore_drafter,
      )
    self._restore_config = config
