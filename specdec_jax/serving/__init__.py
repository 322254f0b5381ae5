"""A server, in which requests that come at any time share an engine's slots.

`serve` runs a server by its `ServeConfig`. `worker` decodes without HTTP;
`protocol` reads OpenAI's requests, `answer` makes OpenAI's answers, and `app`
puts them together. With `ReplicaSettings` several servers share one address.
"""

from specdec_jax.serving.run import ReplicaSettings, ServeConfig, serve
from specdec_jax.serving.settings import ServeSettings

__all__ = ['ReplicaSettings', 'ServeConfig', 'ServeSettings', 'serve']
