"""A server: requests that come at any time share the slots of one engine.

`serve` runs one as `ServeConfig` says. `worker` decodes and knows no HTTP;
`protocol` knows OpenAI's requests, `answer` its answers; `app` puts them
together. With `ReplicaSettings` there are several behind one address.
"""

from specdec_jax.serving.run import ReplicaSettings, ServeConfig, serve
from specdec_jax.serving.settings import ServeSettings

__all__ = ['ReplicaSettings', 'ServeConfig', 'ServeSettings', 'serve']
