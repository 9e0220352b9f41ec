"""Prints whether a token has the same bits at every width of a pass.

  python -m tests.models.widths BATCH_SIZE SCHEME    logits of a model
  python -m tests.models.widths attention            attention alone

A program of its own, without the tests' compiler flags: they change the order
of sums.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import attention, base, config

WIDTHS = (9, 5, 2, 1)
LENGTH, NUM_NEW = 290, 18


def check(batch_size: int, scheme: str):
  """Prints whether logits of all widths are those of the widest."""
  # Sizes at which XLA:CPU has been seen to sum narrow passes otherwise.
  model = config.config_from_hf(
    {
      'model_type': 'llama',
      'vocab_size': 2000,
      'hidden_size': 576,
      'intermediate_size': 1536,
      'num_hidden_layers': 2,
      'num_attention_heads': 9,
      'num_key_value_heads': 3,
      'max_position_embeddings': 1024,
      'rms_norm_eps': 1e-5,
      'hidden_act': 'silu',
      'rope_theta': 10000.0,
      'tie_word_embeddings': True,
    },
    None,
    'bfloat16',
    scheme,
  )
  model = dataclasses.replace(model, is_fused=True)
  if not model.has_independent_rows:
    print('rows depend on the width')
    return
  params = model.init(jax.random.key(0))
  tokens_BT = np.random.default_rng(0).integers(
    0, model.vocab_size, (batch_size, LENGTH + NUM_NEW), np.int32
  )
  # Ragged: row b is b tokens shorter.
  start_B = LENGTH - jnp.arange(batch_size, dtype=jnp.int32)
  prefilled = base.prefill(
    model,
    params,
    model.init_cache(batch_size, 600, 0),
    jnp.asarray(tokens_BT),
    start_B,
    chunk=64,
  )

  @functools.partial(jax.jit, static_argnames='width')
  def run(width: int) -> jax.Array:
    def feed(cache, i):
      index_BT = start_B[:, None] + i + jnp.arange(width)
      new_BT = jnp.take_along_axis(jnp.asarray(tokens_BT), index_BT, axis=1)
      hidden, cache = model.apply(params, new_BT, cache)
      return cache, model.unembed(params, hidden.last_BTD)

    _, logits_XBTV = jax.lax.scan(
      feed, prefilled, jnp.arange(0, NUM_NEW, width)
    )
    logits_BXTV = jnp.swapaxes(logits_XBTV, 0, 1)
    return logits_BXTV.reshape(batch_size, -1, model.vocab_size)[:, :NUM_NEW]

  want = np.asarray(run(WIDTHS[0]))
  for width in WIDTHS[1:]:
    got = np.asarray(run(width))
    if not np.array_equal(got, want):
      differing = np.any(got != want, axis=2)
      print(f'width {width}: {differing.sum()} of {differing.size} rows differ')
      return
  print('equal')


@functools.partial(jax.jit, static_argnames='width')
def attend(
  q_BTHC: jax.Array, memory: attention.Memory, width: int
) -> jax.Array:
  """What the first `width` tokens get."""
  memory = memory._replace(visible_BTS=memory.visible_BTS[:, :width])
  return attention.attend(q_BTHC[:, :width], (memory,), 0.1, by_block=True)


def check_attention():
  """Prints whether it depends on the width, by slots, heads and rows.

  Heads of the first are those of SmolLM2, of the second of Gemma 3 270M. A
  model's logits hide a bit that is off as often as they show it.
  """
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
  most = WIDTHS[0]
  for b, g, r, c in (
    (1, 3, 3, 64),
    (1, 1, 4, 256),
    (1, 2, 6, 128),
    (1, 1, 1, 64),
    (4, 3, 3, 64),
    (4, 1, 1, 64),
  ):
    for s in (16, 192, 250, 600):
      last_T1 = min(50, s - most) + jnp.arange(most)[:, None]
      memory = attention.Memory(
        draw(0, b, g, s, c),
        draw(1, b, g, s, c),
        jnp.repeat((jnp.arange(s) <= last_T1)[None], b, axis=0),
        jnp.int32(s),
      )
      q_BTHC = draw(2, b, most, g * r, c)
      want = attend(q_BTHC, memory, most)
      for width in (1, 2, 3, 5):
        if not np.array_equal(attend(q_BTHC, memory, width), want[:, :width]):
          print(f'width {width} of {b, g, r, c} over {s} slots differs')
          return
  print('equal')


if __name__ == '__main__':
  if sys.argv[1] == 'attention':
    check_attention()
  else:
    check(int(sys.argv[1]), sys.argv[2])
