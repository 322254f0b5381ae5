"""mkdocs reads the documents under the paths that they have in the repository.

So a link such as ../benchmarks/README.md leads to the same document on a page
of the repository and in the site. The page of examples shows the files too, and
pages of the reference show what a repository's viewer would not understand.
"""

import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parent.parent
BESIDE_DOCS = (
  '*.md',
  'CITATION.cff',
  'benchmarks/README.md',
  'benchmarks/results/*/*.md',
  'benchmarks/results/*/*.png',
  'demo/README.md',
)


def on_files(files: Files, config: MkDocsConfig) -> None:
  """Puts docs/ under docs/, and documents of other folders beside it."""
  for file in [one for one in files if one.src_dir == config.docs_dir]:
    files.remove(file)
    name = f'docs/{file.src_uri}'
    path = file.abs_src_path
    files.append(File.generated(config, name, abs_src_path=path))
  for pattern in BESIDE_DOCS:
    for path in sorted(ROOT.glob(pattern)):
      name = path.relative_to(ROOT).as_posix()
      files.append(File.generated(config, name, abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Page, **_) -> str | None:
  """Shows the files of examples/, and the docstrings of the reference."""
  # Or it would be the first result of most searches.
  page.meta['search'] = {'exclude': page.file.src_uri == 'CHANGELOG.md'}
  if page.file.src_uri.startswith('docs/api/'):
    markdown = re.sub(
      r'<!-- site\n(.*?\n)-->', r'\1', markdown, flags=re.DOTALL
    )
    module = re.compile(r'(\[`(\S+)`\])\(\.\./\.\./specdec_jax/\S+\.py\)')
    return module.sub(r'\1(#specdec_jax.\2)', markdown)
  if page.file.src_uri != 'docs/examples.md':
    return None
  link = re.compile(r'\(\.\./examples/(\w+)\.py\)')
  for name in link.findall(markdown):
    text = (ROOT / 'examples' / f'{name}.py').read_text('utf-8')
    markdown += f'\n## {name}.py {{ #{name} }}\n\n```python\n{text}```\n'
  return link.sub(r'(#\1)', markdown)
