"""The server's page in a real browser without a screen."""

import shutil

import pytest

from toy_workers import wait_until

selenium = pytest.importorskip('selenium', reason='needs selenium')
webdriver = pytest.importorskip('selenium.webdriver')
CHROMIUM, DRIVER = shutil.which('chromium'), shutil.which('chromedriver')
_WHY = "needs Debian's packages chromium and chromium-driver"
_needs = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=_WHY)
pytestmark = [pytest.mark.slow, _needs]


@pytest.fixture
def browser(tmp_path, url):
  """The page, ready, on a telephone."""
  options = webdriver.ChromeOptions()
  options.binary_location = CHROMIUM
  for flag in (
    'headless', 'no-sandbox', 'disable-gpu', 'disable-quic', 'no-first-run',
    'disable-background-networking', 'disable-component-update',
    'disable-sync', f'user-data-dir={tmp_path}',
  ):  # fmt: skip
    options.add_argument(f'--{flag}')
  options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
  service = webdriver.ChromeService(executable_path=DRIVER)
  with webdriver.Chrome(options=options, service=service) as made:
    made.set_window_size(390, 844)
    made.get(url)
    wait_until(lambda: 'ready' in at(made, 'state').text)
    yield made


def at(browser, name):
  return browser.find_element('id', name)


def write(browser, name, text):
  field = at(browser, name)
  field.clear()
  field.send_keys(text)


def cells(browser):
  rows = at(browser, 'rows').find_elements('tag name', 'tr')
  every = [row.find_elements('tag name', 'td') for row in rows]
  return [[cell.text for cell in row] for row in every]


def test_an_output_with_its_rounds(browser, engine, mixed):
  write(browser, 'text', mixed)
  write(browser, 'most', '20')
  at(browser, 'go').click()
  wait_until(lambda: cells(browser))
  (done,) = engine.generate([mixed], max_length=20)
  rounds = engine.trace(mixed, max_length=20).rounds
  want = [part for one in rounds for part in one.parts]
  spans = at(browser, 'output').find_elements('tag name', 'span')
  kinds = [one.get_attribute('class') for one in spans]
  assert kinds == [kind for kind, _ in want]
  (row,) = cells(browser)
  assert row[1:3] == [str(len(done.tokens)), str(done.stats.num_target_calls)]
  at(browser, 'show').click()
  shown = at(browser, 'output').text
  assert at(browser, 'output').get_attribute('class') == 'hide'
  at(browser, 'show').click()
  assert len(at(browser, 'output').text) > len(shown)
  # Nothing but the server was asked, and nothing failed.
  assert not browser.get_log('browser')

  at(browser, 'compare').click()
  wait_until(lambda: len(cells(browser)) == 2)
  fast, slow = cells(browser)
  assert int(slow[2]) == int(slow[1]) == int(fast[1]) > int(fast[2])
  assert 'times as fast' in at(browser, 'verdict').text


def test_an_error_is_shown(browser):
  write(browser, 'text', 'Q' * 99)
  at(browser, 'go').click()
  wait_until(lambda: at(browser, 'message').text)
  assert '32 at most' in at(browser, 'message').text
  assert at(browser, 'go').is_enabled()
  script = 'return document.documentElement.scrollWidth - innerWidth'
  assert browser.execute_script(script) <= 0, 'it is too wide'
  # Nothing makes a telephone zoom, and a finger meets each field.
  for field in browser.find_elements('css selector', '.row *, textarea'):
    is_field = field.tag_name in ('input', 'textarea', 'button')
    if is_field and field.is_displayed():
      assert float(field.value_of_css_property('font-size')[:-2]) >= 16
      assert field.rect['height'] >= 44
  assert not at(browser, 'key').is_displayed()  # none is needed
  browser.set_window_size(1280, 844)  # the legend's boxes are as high as words
  spans = browser.find_elements('css selector', '.legend span')
  assert all(span.rect['height'] < 30 for span in spans)
