"""Ahead-of-time compilation: what is found, what is refused, what fails."""

import contextlib
import importlib.metadata
import io
import json
import pathlib
import re
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

import tests.setup_jax  # noqa: F401
from experiments import (
  chips,
  compile_for,
  compile_table,
  forecast,
  forecast_report,
  hlo,
  programs,
  script,
)
from specjax.models import presets

# Wide enough that a device's part of the logits is no list of candidates.
TINY = {
  'model_type': 'llama',
  'vocab_size': 1000,
  'hidden_size': 64,
  'intermediate_size': 128,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 256,
  'tie_word_embeddings': False,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-5,
  'rope_theta': 10000.0,
}
NARROW = {**TINY, 'vocab_size': 999, 'max_position_embeddings': 64}
FLAGS = (
  '--topology=cpu:8',
  '--target=tiny',
  '--head=1',
  '--mesh=data:2,model:4',
  '--batch_size=4',
  '--context=48',
  '--num_draft_tokens=3',
)


def run(*argv):
  """Exit code, stdout and stderr without progress."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = script.run_main(compile_for.main, compile_for.FLAG_GROUPS, argv)
  progress = re.compile(r'^(compiling|lowering).* \.\.\. \d+\.\d s\n', re.M)
  return code, out.getvalue(), progress.sub('', err.getvalue())


def pair(**changes):
  options = compile_for.Options(
    **{
      'topology': 'cpu:8',
      'target': 'tiny',
      'head': 1,
      'mesh': 'data:2,model:4',
      'batch_size': 4,
      'context': 48,
      'num_draft_tokens': 3,
      **changes,
    }
  )
  return compile_for.make_pair(options, jax.devices()[:8])


class Case(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    shapes = {'tiny': TINY, 'narrow': NARROW}
    self.enterContext(mock.patch.dict(presets.PRESETS, shapes))


class CompileTest(Case):
  def test_the_whole_of_it_on_fake_devices(self):
    path = self.folder / 'result.json'
    code, out, err = run(*FLAGS, f'--json_out={path}')
    self.assertEqual((code, err), (0, ''), out)
    self.assertIn('no problem found', out)
    self.assertIn('GiB per device, compiled for cpu:8', out)
    found = json.loads(path.read_text(encoding='utf-8'))
    self.assertEqual(found['config']['num_draft_tokens'], 3)
    result = found['result']
    self.assertEqual(
      result['placement']['target'],
      {'batch': 2, 'heads': 4, 'kv_heads': 2, 'ffn': 4, 'vocab': 4},
    )

    # Two per layer, and one for the embedding.
    def wide(name, part):
      return {
        x['kind']: x['count']
        for x in result[name]['collectives']
        if (x['part'], x['class']) == (part, 'wide')
      }

    self.assertEqual(wide('draft', 'step'), {'all-reduce': 2 * 1 + 1})
    self.assertEqual(wide('verify', 'step'), {'all-reduce': 2 * 2 + 1})
    self.assertEqual(wide('loop', 'scan'), {'all-reduce': 2 * 1 + 1})
    self.assertEqual(wide('loop', 'turn'), {'all-reduce': 3 + 5})

    # By hand, in bfloat16; norms are float32 and not split.
    layer = 2 * (64 * 64 // 4 * 2 + 32 * 64 // 2 * 2 + 3 * 128 * 64 // 4)
    vocab, norm = 2 * 2 * 1000 * 64 // 4, 4 * 64
    memory = result['bytes_per_device']
    self.assertEqual(memory['target_weights'], 2 * layer + vocab + 5 * norm)
    self.assertEqual(memory['draft_weights'], layer + vocab + 3 * norm)
    # Two sides, two rows, one key-value head, slots, head size, in float32 as
    # on any CPU; and lengths.
    self.assertEqual(
      memory['target_cache'], 2 * (2 * 2 * 1 * (48 + 4) * 16) * 4 + 2 * 4
    )
    self.assertGreater(memory['temporaries'], 0)
    self.assertGreater(result['verify']['flops'], result['draft']['flops'])

  @parameterized.parameters('cuda', 'tpu')
  def test_lowering_needs_no_such_device(self, platform):
    code, out, err = run(
      '--topology=h100:8', *FLAGS[1:], f'--lower_only={platform}'
    )
    self.assertEqual((code, err), (0, ''), out)
    for name in programs.PROGRAMS:
      self.assertRegex(out, rf'{name}: lowers for {platform}, \d+ bytes')
    self.assertIn('bound by hand', out)
    self.assertNotIn('compiled for', out)

  def test_a_draft_over_fewer_rows_gathers_no_activations(self):
    small = pair(draft_mesh='model:4')
    compiled = programs.compile_program('draft', small, 'cpu')
    self.assertEqual(forecast.check('draft', small, compiled.collectives), [])

  def test_gathered_logits_are_a_problem(self):
    small = pair()
    placement = small.target.placement

    def f(x_BV):
      whole = placement.sharding('batch', None)
      return jnp.flip(jax.lax.with_sharding_constraint(x_BV, whole), axis=1)

    x_BV = jax.ShapeDtypeStruct(
      (4, 1000), jnp.float32, sharding=placement.sharding('batch', 'vocab')
    )
    text = jax.jit(f).lower(x_BV).compile().as_text()
    problems = forecast.check('verify', small, hlo.collectives(text))
    self.assertRegex(problems[0], r'^verify: logits.* all-gather of .*1000')

  def test_what_does_not_fit_fails(self):
    devices = jax.devices()[:1]
    with mock.patch.object(compile_for, 'find_devices', lambda *_: devices):
      code, out, _ = run('--topology=v5e:1x1', '--target=qwen3-8b', '--head=1')
    self.assertEqual(code, 1)
    # The device that stands in is a CPU, where caches are float32.
    self.assertRegex(
      out,
      r'PROBLEM: does not fit: 19\.\d\d GiB per device, 3\.\d\d GiB more than '
      r'the 15\.75 GiB of a v5e\.',
    )


def collective(kind, *shapes, path=()):
  return hlo.Collective(
    kind=kind,
    arrays=tuple(hlo.Array('f32', shape) for shape in shapes),
    op_name='x',
    path=path,
  )


class CheckTest(Case):
  def test_what_is_asked_for_is_no_problem(self):
    layer = [collective('all-reduce', (2, 1, 64))] * 2
    embed = [collective('all-reduce', (2, 1, 64))]
    small = [collective('all-gather', (2, 4)), collective('all-reduce', (2,))]
    found = [*layer, *embed, *small]
    self.assertEqual(forecast.check('draft', pair(), found), [])
    in_scan = [
      collective(c.kind, *(a.shape for a in c.arrays), path=('while', 'while'))
      for c in found
    ]
    self.assertEqual(forecast.check('loop', pair(), in_scan), [])

  @parameterized.parameters(
    ('all-reduce', r'^draft: 4 all-reduce .* step of 1 layers, .* asks for 3'),
    ('all-gather', r'^draft: 1 all-gather, 3 all-reduce of activations'),
  )
  def test_one_more_is_a_problem(self, kind, message):
    found = [collective('all-reduce', (2, 1, 64))] * 3
    problems = forecast.check(
      'draft', pair(), [*found, collective(kind, (2, 1, 64))]
    )
    self.assertRegex(' '.join(problems), message)

  def test_a_turn_is_a_draft_and_a_verification(self):
    scan = [collective('all-reduce', (2, 1, 64), path=('while', 'while'))]
    turn = [collective('all-reduce', (2, 4, 64), path=('while',))] * 8
    self.assertEqual(forecast.check('loop', pair(), scan + turn), [])
    problems = forecast.check('loop', pair(), scan + turn + turn[:1])
    self.assertRegex(problems[0], '9 all-reduce .* 2 and 1 layers, .* for 8')
    # Three drafts in the open.
    self.assertEqual(forecast.check('loop', pair(), turn + turn[:6]), [])

  def test_a_draft_on_every_device_needs_none(self):
    whole = pair(
      mesh='model:8', draft_mesh='model:1', batch_size=1, num_draft_tokens=2
    )
    self.assertEqual(forecast.check('draft', whole, []), [])
    problems = forecast.check('draft', whole, [collective('all-reduce', (1,))])
    self.assertRegex(problems[0], '1 collectives in a step, where the draft is')
    # Around the drafts stands a verification, whose target is split.
    turn = [collective('all-reduce', (1, 3, 64), path=('while',))] * 5
    self.assertEqual(forecast.check('loop', whole, turn), [])

  @parameterized.parameters(
    ('all-gather', (2, 1000), True),
    ('all-reduce', (2, 1000), True),
    ('all-to-all', (2, 250), True),
    ('collective-permute', (2, 1, 250), True),
    ('all-gather', (2, 4, 4), False),  # Candidates, one from each device.
    ('all-reduce', (2, 4, 64), False),
  )
  def test_logits_and_candidates(self, kind, shape, is_moved):
    found = forecast.moves_logits(pair(), collective(kind, shape))
    self.assertEqual(found, is_moved)

  def test_bound_by_hand(self):
    chip = chips.CHIPS['v5e']
    small = pair(batch_size=2)
    seconds = forecast.bound_seconds(small, chip, is_int8=False)
    size = forecast.sizes(small)
    table = 1000 * 64 // 4 * 2  # The embedding looks rows up.
    self.assertAlmostEqual(
      seconds['verify'],
      (size.target_weights - table + size.target_cache) / 819e9,
    )
    many = pair(batch_size=4000)
    compute = forecast.bound_seconds(many, chip, is_int8=False)['verify']
    self.assertGreater(compute, seconds['verify'])

  def test_speed(self):
    found = forecast.speed(pair(), {'draft': 1e-3, 'verify': 7e-3}, 0.5)
    self.assertAlmostEqual(found['step_seconds'], 10e-3)
    self.assertAlmostEqual(found['tokens_per_step'], 1.875)
    self.assertAlmostEqual(found['tokens_per_second'], 4 * 1.875 / 10e-3)


class BadInputTest(Case):
  @parameterized.parameters(
    ((), '--topology must be given.'),
    (('--topology=v5e:8x8',), '--target must be given.'),
    ((*FLAGS, '--topology=v9:2'), '--topology must be a chip and a shape'),
    ((*FLAGS, '--topology=v5e:8'), 'must have 2 sizes, as in v5e:2x2'),
    ((*FLAGS, '--topology=cpu:16'), 'at most 8 devices in this process'),
    ((*FLAGS, '--topology=h100:8'), 'add --lower_only=cuda.'),
    ((*FLAGS, '--target=gpt-9'), "preset must be one of .* got 'gpt-9'."),
    ((*FLAGS, '--draft=tiny'), 'either --draft or --head must be given'),
    (FLAGS[:2], 'either --draft or --head must be given'),
    ((*FLAGS, '--head=0'), '--head must be in 1..64, got 0.'),
    ((*FLAGS, '--head=3'), '--head must be at most 2, .* got 3.'),
    (
      (*FLAGS[:2], '--draft=narrow'),
      "--draft must have the target's vocabulary of 1000, got 999 of narrow.",
    ),
    ((*FLAGS, '--mesh=model:3'), '--mesh must have the 8 devices of cpu:8'),
    ((*FLAGS, '--mesh=rows:8'), '--mesh must be sizes of the axes'),
    ((*FLAGS, '--draft_mesh=model:3'), '--draft_mesh must divide .* 8 devices'),
    ((*FLAGS, '--batch_size=3'), '--batch_size must be a multiple of 2'),
    ((*FLAGS, '--batch_size=0'), '--batch_size must be in 1..65536, got 0.'),
    (
      (*FLAGS, '--context=300'),
      '--context must be at most 256, that of tiny, got 300.',
    ),
    ((*FLAGS, '--num_draft_tokens=65'), '--num_draft_tokens must be in 1..64'),
    ((*FLAGS, '--acceptance=1.5'), r'--acceptance must be in \[0, 1\], got'),
    ((*FLAGS, '--acceptance=nan'), r'--acceptance must be in \[0, 1\], got'),
    ((*FLAGS, '--quantize=int3'), '--quantize must be one of none, int8'),
    ((*FLAGS, '--lower_only=npu'), '--lower_only must be one of cuda, tpu'),
    ((*FLAGS, '--json_out=/no/such/folder/x'), 'is not an existing folder'),
  )
  def test_one_sentence(self, argv, message):
    code, out, err = run(*argv)
    self.assertEqual((code, out), (2, ''), err)
    self.assertRegex(err, r'^compile_for\.py: [^\n]+\.\n$')
    self.assertRegex(err, message)

  def test_without_libtpu(self):
    missing = importlib.metadata.PackageNotFoundError('libtpu')
    with mock.patch.object(importlib.metadata, 'version', side_effect=missing):
      code, out, err = run(*FLAGS, '--topology=v5e:2x4')
    self.assertEqual((code, out), (2, ''))
    self.assertRegex(err, r'^compile_for\.py: .* needs libtpu.*\.\n$')


class TableTest(Case):
  def test_rows_cover_what_was_asked(self):
    rows = compile_table.ROWS
    large = [row for row in rows if row.target == 'llama-3.1-70b']
    self.assertContainsSubset(
      ('v5e:2x4', 'v5e:8x8', 'v5p:4x4x4', 'v6e:8x8'),
      {row.topology for row in large},
    )
    self.assertContainsSubset((1, 64), {row.batch_size for row in large})
    self.assertContainsSubset((4, 8), {row.num_draft_tokens for row in large})
    for row in rows:
      with self.subTest(compile_table.words(row)):
        self.assertIsNotNone(chips.parse_topology(row.topology).chip)

  def test_a_program_that_is_too_large_for_the_compiler(self):
    error = jax.errors.JaxRuntimeError(
      'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required '
      'for HLO temporaries (19.50G) exceeds available HBM (15.75G).'
    )
    devices = jax.devices()[:8]
    options = compile_for.Options(
      topology='v5e:2x4', target='tiny', head=1, context=48
    )
    with (
      mock.patch.object(compile_for, 'find_devices', lambda *_: devices),
      mock.patch.object(programs, 'compile_program', side_effect=error),
    ):
      result = compile_for.forecast_for(options)
    self.assertRegex(result['problems'][0], r'^draft does not fit: .*15\.75G')
    row = forecast_report.row(options, result)
    self.assertIn('does not fit, by 3.75', row)

  def test_a_row(self):
    options = compile_table.chosen('70b .*8b v5e:2x4 .* none')[0]
    result = {
      'topology': 'v5e:2x4',
      'num_devices': 8,
      'hbm_bytes': 16 * 2**30,
      'bytes_per_device': {
        'target_weights': 17 * 2**30,
        'draft_weights': 2**30,
        'target_cache': 0,
        'draft_cache': 0,
        'total': 18 * 2**30,
      },
      'bound': {'tokens_per_second': 99.6},
      'problems': ['does not fit'],
    }
    row = forecast_report.row(options, result)
    self.assertLen(row, len(forecast_report.COLUMNS))
    self.assertIn('does not fit, by 2.00', row)
    self.assertEqual((row[6], row[-1]), ('18.00', '100'))

  @parameterized.parameters(
    ('gpt', '--only must match one of '), ('(', '--only must be a regular')
  )
  def test_what_selects_nothing(self, pattern, message):
    with self.assertRaisesRegex(ValueError, message):
      compile_table.chosen(pattern)


if __name__ == '__main__':
  absltest.main()
