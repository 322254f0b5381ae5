"""Metadata of specdec_jax; tool settings are in pyproject.toml."""

import pathlib

import setuptools

# Tried: 0.10.1, the last for Python 3.11 but one, and 0.12 on 3.12 and 3.13.
# 0.10.2 gives wrong numbers on CPUs, jax-ml/jax issue 39103; 0.11.0 crashes
# there, 39257; 0.11 gives wrong numbers on some GPUs, 40633.
JAX = 'jax>=0.10.1,!=0.10.2,!=0.11.*'
PLOTS = ['matplotlib>=3.8']
HUGGINGFACE = ['safetensors>=0.4.3']
SPLIT = ['sentencex>=1.0']
METRICS = ['sacrebleu>=2.4', 'rouge_score>=0.1.2']
PARITY = [*HUGGINGFACE, 'torch>=2.4', 'transformers>=4.46']
SERVE = [
  'httptools>=0.6',  # uvicorn takes it where it is there
  'prometheus_client>=0.20',
  'starlette>=0.40',
  'uvicorn>=0.30',
]
TEST = [
  *(
    'pytest>=8',
    'pytest-xdist>=3.5',
    *METRICS,
    *PLOTS,
    *HUGGINGFACE,
    *SPLIT,
    'jsonschema>=4.20',
  ),
  # The server and its clients.
  *('aiohttp>=3.10', 'httpx>=0.27', 'openai>=1.40', *SERVE),
]

# In the wheel -> here. No package `gin` at the top: that is gin-config's.
SHIPPED = {f'specdec_jax.shipped.{name}': name for name in ('gin', 'demo')}

setuptools.setup(
  name='specdec_jax',
  version='0.3.0',
  description='Lossless speculative decoding for T5-style models in JAX.',
  long_description=pathlib.Path(__file__)
  .with_name('README.md')
  .read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  author='The specdec_jax authors',
  license='Apache-2.0',
  license_files=['LICENSE'],
  classifiers=[
    'Development Status :: 3 - Alpha',
    'Intended Audience :: Science/Research',
    'Programming Language :: Python :: 3',
    # .ci/run tests the newest and the oldest of these that it finds.
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
  python_requires='>=3.11',
  packages=[
    *setuptools.find_packages(include=['specdec_jax', 'specdec_jax.*']),
    *SHIPPED,
  ],
  # The folders gin/ and demo/, as specdec_jax/files/shipped.py finds them.
  package_dir=SHIPPED,
  package_data={
    **{name: ['**/*'] for name in SHIPPED},
    'specdec_jax': ['py.typed', '*.pyi'],
    'specdec_jax.checkpoints': ['*.toml'],
    'specdec_jax.engine': ['trace.html', 'trace.svg'],
    'specdec_jax.measure': ['devices.toml'],
    'specdec_jax.paper': ['printed.json'],
    'specdec_jax.serving': ['page.html'],
    'specdec_jax.text': ['*.toml'],
  },
  entry_points={
    'console_scripts': [
      f'{name}=specdec_jax.cli.main:main'
      # PyPI has another `specdec`, whose command has the shorter name too.
      for name in ('specdec', 'specdec-jax')
    ]
  },
  install_requires=[
    'flax>=0.12',
    'gin-config>=0.5',
    JAX,
    'msgpack>=1.0',
    'numpy>=2.0',
    'optax>=0.2.5',
    'orbax-checkpoint>=0.11',
    'rich>=13',
    'scipy>=1.11',  # which JAX brings
    'sentencepiece>=0.2',
    'tensorstore>=0.1.70',
    'tokenizers>=0.20',
  ],
  extras_require={
    # seqio brings TensorFlow (about 3 GB); only text/tasks.py needs it.
    'tasks': ['seqio>=0.0.18', 'tensorflow>=2.16', 'tensorflow-text>=2.16'],
    'tpu': ['jax[tpu]'],
    'cuda': ['jax[cuda12]'],
    'plots': PLOTS,
    'split': SPLIT,  # texts as sentences
    'huggingface': HUGGINGFACE,
    'chat': ['jinja2>=3.1'],  # chat templates
    'hub': [*HUGGINGFACE, 'huggingface_hub>=0.25'],
    'metrics': METRICS,
    'serve': SERVE,
    'ray': [*SERVE, 'ray[data,serve]>=2.54'],
    'parity': PARITY,
    'peers': [*PARITY, 'ctranslate2>=4.5'],
    # benchmarks/published_pair.py
    'published': [
      *('accelerate>=1.0', 'aiohttp>=3.10', 'gguf>=0.17', 'jinja2>=3.1'),
      *('transformers>=5.24', *PARITY, *SERVE),
    ],
    # The documents as a site, see mkdocs.yml; Ruff formats signatures.
    'docs': ['mkdocs-material>=9.7', 'mkdocstrings[python]>=1.0', 'ruff>=0.6'],
    # The server's page in Debian's Chromium.
    'browser': ['selenium>=4.20'],
    'test': TEST,
    'dev': [*TEST, 'mypy>=1.10', 'ruff>=0.6'],
  },
)
