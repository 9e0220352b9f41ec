"""The roofline against numbers worked out by hand."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import chips, measure_chip, roofline, script
from specjax.models import presets

H100 = chips.CHIPS['h100']
# Llama 3.1 8B, a layer: q and o 4096 x 4096, k and v 1024 x 4096, three of
# 14336 x 4096; the head 128256 x 4096; norms of 4096 float32.
LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
ELEMENTS = 32 * LAYER + 128256 * 4096
NORMS = 65 * 4096 * 4
# Keys and values of 8 heads of 128 in bfloat16.
PER_TOKEN = 2 * 8 * 128 * 2


def run(*argv):
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = script.run_main(roofline.main, roofline.FLAG_GROUPS, argv)
  return code, out.getvalue(), err.getvalue()


def roof(batch_size=1, context=1024, name='llama-3.1-8b', scheme='none'):
  return roofline.Roof(
    model=roofline.make_model(name, 'bfloat16', scheme),
    chip=H100,
    batch_size=batch_size,
    context=context,
  )


class CountTest(absltest.TestCase):
  def test_a_plain_step(self):
    work = roof().work(1)
    self.assertEqual(ELEMENTS, 7504658432)
    self.assertEqual(work.weight_bytes, 2 * ELEMENTS + NORMS + 4096 * 2)
    self.assertEqual(work.cache_bytes, 32 * PER_TOKEN * (1024 + 1))
    self.assertEqual(work.matrix_flops, 2 * ELEMENTS)
    self.assertEqual(work.attention_flops, 4 * 32 * 1024 * 4096)

  def test_rows_add_products_and_little_memory(self):
    one, six = roof(4).work(1), roof(4).work(6)
    self.assertEqual(six.matrix_flops, 6 * one.matrix_flops)
    self.assertEqual(
      six.num_bytes - one.num_bytes, 4 * 5 * (32 * PER_TOKEN + 4096 * 2)
    )

  def test_int8(self):
    work = roof(scheme='int8').work(1)
    channels = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096) + 128256
    self.assertEqual(work.weight_bytes, ELEMENTS + 4 * channels + NORMS + 4096)

  def test_a_tied_embedding_is_read_as_the_head(self):
    work = roof(name='smollm2-135m').work(1)
    layer = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576
    elements = 30 * layer + 49152 * 576
    self.assertEqual(work.weight_bytes, 2 * elements + 61 * 576 * 4)

  def test_windows_bound_what_is_read(self):
    work = roof(name='mistral-7b-v0.1', context=8192).work(1)
    self.assertEqual(work.cache_bytes, 32 * PER_TOKEN * (4096 + 1))


class RoofTest(absltest.TestCase):
  def test_a_step_takes_what_reading_takes(self):
    expected = (2 * ELEMENTS + NORMS + 8192 + 32 * PER_TOKEN * 1025) / 3350e9
    self.assertAlmostEqual(roof().step(1), expected)
    self.assertAlmostEqual(1e3 * roof().step(1), 4.521, places=3)

  def test_the_curve_is_flat_up_to_the_ridge(self):
    one = roof(context=1)
    # Operations per byte of the chip, 989.5e12 / 3350e9 = 295.4: a weight of
    # two bytes is used twice a row, and each row adds a little to the bytes.
    self.assertBetween(one.flat_width(), 293, 300)
    flat = roof()
    width = flat.flat_width()
    memory, compute = flat.parts(width)
    self.assertLessEqual(compute, memory)
    memory, compute = flat.parts(width + 1)
    self.assertGreater(compute, memory)
    self.assertLess(flat.step(width) / flat.step(1), 1.01)
    self.assertGreater(flat.step(4 * width) / flat.step(1), 3)

  def test_batches_leave_it_earlier(self):
    self.assertBetween(roof(64).flat_width(), 5, 8)
    self.assertEqual(roof(1024, context=16).flat_width(), 0)

  def test_the_best_draft_length(self):
    # Free drafts over a flat curve: as many as are allowed.
    free = roofline.best(roof(), None, 0.8, 8)
    self.assertEqual(free['K'], 8)
    tokens = (1 - 0.8**9) / 0.2
    self.assertAlmostEqual(free['speedup'], tokens, delta=0.01)
    # A draft as dear as the target never pays.
    dear = roofline.best(roof(), roof(), 0.5, 8)
    self.assertEqual((dear['K'], dear['speedup']), (0, 1))


class MainTest(parameterized.TestCase):
  def test_a_table_and_a_file(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      config = path / 'config.json'
      config.write_text(json.dumps(presets.PRESETS['smollm2-135m']))
      code, out, err = run(
        '--target=llama-3.1-8b',
        f'--draft={config}',
        '--device=v5e',
        '--batch_sizes=1,16',
        '--contexts=1024',
        '--acceptance=0.7',
        '--quantize=int8',
        f'--json_out={path / "x.json"}',
      )
      self.assertEqual(code, 0, err)
      report = json.loads((path / 'x.json').read_text())
    self.assertLen(report['rows'], 2)
    self.assertEqual(report['chip']['name'], 'v5e')
    row = report['rows'][0]
    self.assertTrue(row['fits'])
    self.assertGreater(row['best'][0]['speedup'], 1)
    self.assertLen([x for x in out.splitlines() if x.startswith('| ')], 3)

  def test_measuring_gives_a_chip(self):
    chip, rates = measure_chip.measure(num_bytes=2**16, size=16, num_calls=2)
    self.assertGreater(chip.hbm_bandwidth, 0)
    self.assertGreater(chip.hbm_bytes, 2**20)
    self.assertEqual(set(rates), {'float32', 'bfloat16', 'int8'})
    self.assertGreater(min(rates.values()), 0)

  @parameterized.parameters(
    ((), '--target must name a model'),
    (('--target=gpt-9',), "a config.json or one of .*'gpt-9'"),
    (('--target=llama-3.1-8b', '--device=z80'), '--device must be one of'),
    (('--target=llama-3.1-8b', '--device=h100', '--measure'), 'exclude each'),
    (('--target=llama-3.1-8b', '--acceptance=2'), '--acceptance must be in'),
    (('--target=llama-3.1-8b', '--acceptance=x'), 'must be numbers joined'),
    (('--target=llama-3.1-8b', '--contexts=0'), '--contexts must be in 1'),
    (('--target=llama-3.1-8b', '--max_draft_tokens=0'), 'must be in 1..64'),
    (('--target=llama-3.1-8b', '--draft_quantize=int8'), 'needs --draft'),
  )
  def test_bad_input(self, argv, message):
    code, out, err = run(*argv)
    self.assertEqual((code, out), (2, ''), err)
    self.assertRegex(err, rf'^roofline\.py: .*{message}.*\.$')


if __name__ == '__main__':
  absltest.main()
