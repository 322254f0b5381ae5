"""A server: requests that come at any time share the slots of one engine.

`serve` runs one as `ServeConfig` says. `scheduler` decodes and knows no HTTP;
`protocol` knows OpenAI's requests, `answer` its answers; `app` puts them
together.
"""

from specdec_jax.serving.run import ServeConfig, serve
from specdec_jax.serving.settings import ServeSettings

__all__ = ['ServeConfig', 'ServeSettings', 'serve']
