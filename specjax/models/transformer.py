"""One decoder-only transformer for every family; families differ in settings.

  x = embed(token) * embed_scale
  x = x + post_norm(attention(norm(x)))      windows, rope, qk norms per layer
  x = x + post_norm(down(act(gate(norm(x))) * up(norm(x))))
  logits = head(final_norm(x))

The object is static and prints its settings; parameters are a plain tree of
dicts and tuples that `param_specs` declares.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import sharding
from specjax.kernels import products as kernels
from specjax.models import (
  base,
  block,
  layers,
  quantize,
  rope,
  slots,
  transformer_specs,
)
from specjax.models.attention import Memory
from specjax.shapes import Array, Key, Params, check_shape
from specjax.sharding import Placement, constrain

DTYPES = ('float32', 'bfloat16')
CACHE_DTYPES = (*DTYPES, 'int8')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
  """A causal transformer; implements `base.LanguageModel`.

  Attributes:
    vocab_size: true token ids; logits have this width.
    padded_vocab_size: rows of the embedding, >= `vocab_size`.
    context_length: positions the model was made for.
    embed_dim: D.
    ffn_dim: F.
    num_heads: H, a multiple of G.
    num_kv_heads: G.
    head_dim: C, even; H * C need not be D.
    windows: one per layer: how many positions a token sees, its own counted;
      None sees all.
    ropes: one per layer.
    activation: of the gate, a key of `layers.ACTIVATIONS`.
    norm_eps: of every norm.
    score_scale: multiplies attention scores.
    qk_norm: queries and keys are normed per head before they are rotated.
    post_norms: the outputs of attention and feed-forward are normed too.
    qkv_bias: biases on queries, keys and values.
    out_bias: a bias on attention's output product.
    ffn_bias: biases on the three feed-forward products.
    input_norm: attention reads the normed stream; False: the stream itself.
    side_dim: width of what attention reads before the stream, given to
      `run_layers`; 0 is nothing.
    embed_scale: multiplies embeddings, rounded to the dtype first; None is 1.
    tied: the output head is the embedding.
    logit_softcap: logits become cap * tanh(logits / cap); None leaves them.
    dtype: of weights and activations, 'float32' or 'bfloat16'; norms are
      computed, and their scales stored, in float32.
    cache_dtype: of keys and values, 'float32', 'bfloat16' or 'int8' (rounded
      with a scale per slot and head). None is `dtype`, except on a CPU, where
      it is 'float32': narrow floats are written by a copy of the whole cache.
    quantize: 'int8' if every matrix is a `quantize.Int8Weight`, else 'none'.
    placement: where it lies; None is one device.
    is_fused: q, k, v and gate, up are one matrix each (`fused.fuse`).

  Raises:
    ValueError: naming the setting, the rule and the value.
  """

  vocab_size: int
  padded_vocab_size: int
  context_length: int
  embed_dim: int
  ffn_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  windows: tuple[int | None, ...]
  ropes: tuple[rope.Rope, ...]
  activation: str
  norm_eps: float
  score_scale: float
  qk_norm: bool = False
  post_norms: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  ffn_bias: bool = False
  input_norm: bool = True
  side_dim: int = 0
  embed_scale: float | None = None
  tied: bool = False
  logit_softcap: float | None = None
  dtype: str = 'bfloat16'
  cache_dtype: str | None = None
  quantize: str = 'none'
  placement: Placement | None = None
  is_fused: bool = False

  def __post_init__(self):
    for name in (
      'vocab_size',
      'context_length',
      'embed_dim',
      'ffn_dim',
      'num_heads',
      'num_kv_heads',
      'head_dim',
    ):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name} must be > 0, got {getattr(self, name)}.')
    if self.vocab_size > self.padded_vocab_size:
      raise ValueError(
        f'vocab_size must be at most {self.padded_vocab_size}, the rows of '
        f'the embedding, got {self.vocab_size}.'
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, '
        f'got {self.num_heads}.'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim must be even, got {self.head_dim}.')
    if not self.windows or len(self.windows) != len(self.ropes):
      raise ValueError(
        'windows and ropes must have one entry per layer, got '
        f'{len(self.windows)} and {len(self.ropes)}.'
      )
    for window in self.windows:
      if window is not None and not window > 0:
        raise ValueError(f'a window must be > 0 or None, got {window}.')
    if self.activation not in layers.ACTIVATIONS:
      raise ValueError(
        f'activation must be one of {", ".join(layers.ACTIVATIONS)}, '
        f'got {self.activation!r}.'
      )
    if self.dtype not in DTYPES:
      raise ValueError(
        f'dtype must be one of {", ".join(DTYPES)}, got {self.dtype!r}.'
      )
    if self.cache_dtype not in (None, *CACHE_DTYPES):
      raise ValueError(
        f'cache_dtype must be one of {", ".join(CACHE_DTYPES)}, '
        f'got {self.cache_dtype!r}.'
      )
    quantize.check_scheme('quantize', self.quantize)

  @property
  def num_layers(self) -> int:
    """How many blocks there are."""
    return len(self.windows)

  @property
  def has_independent_rows(self) -> bool:
    """Whether a token's logits have the same bits in a pass of any width.

    So it is on one CPU in int8, whose sums are exact, and in bfloat16 where
    the kernels multiply. tests/models/widths_test.py looks.
    """
    if self.placement is not None or jax.default_backend() != 'cpu':
      return False
    is_bfloat16 = self.dtype == 'bfloat16'
    return self.quantize == 'int8' or (is_bfloat16 and kernels.is_available())

  def param_specs(self) -> Params:
    """{'embed', 'layers': one dict per layer, 'final_norm', 'head'?}."""
    return transformer_specs.param_specs(self)

  def init(self, key: Key) -> Params:
    """Random parameters; `key` is consumed."""
    if self.quantize == 'int8':
      plain = dataclasses.replace(self, quantize='none')
      return quantize.quantize_params(plain.init(key))
    return sharding.init_params(self.param_specs(), key, self.placement)

  def init_cache(
    self, batch_size: int, num_slots: int, max_rewind: int
  ) -> base.KVCache:
    """An empty cache that can go back to any length.

    Windows are masks over full-length slots, so nothing a rejection could
    want back is ever evicted and `max_rewind` sets no limit.
    """
    del max_rewind
    return base.init_kv_cache(
      num_layers=self.num_layers,
      batch_size=batch_size,
      num_kv_heads=self.num_kv_heads,
      num_slots=num_slots,
      head_dim=self.head_dim,
      dtype=self._cache_dtype(),
      placement=self.placement,
    )

  def _cache_dtype(self) -> str:
    if self.cache_dtype is not None:
      return self.cache_dtype
    if self.placement is None:
      platform = jax.default_backend()
    else:
      platform = self.placement.mesh.devices.flat[0].platform
    return 'float32' if platform == 'cpu' else self.dtype

  def apply(
    self,
    params: Params,
    tokens_BT: Array,
    cache: base.KVCache,
    *,
    num_tokens_B: Array | None = None,
    positions_BT: Array | None = None,
    mask_BTT: Array | None = None,
    capture: tuple[int, ...] = (),
  ) -> tuple[base.Hidden, base.KVCache]:
    """`LanguageModel.apply`; layer 0 of `capture` is the scaled embedding.

    Raises:
      ValueError: at trace time, if a shape does not fit, or `capture` names a
        layer that is not there.
    """
    b = cache.length_B.shape[0]
    check_shape('tokens_BT', tokens_BT, (b, 'T'))
    num_new = tokens_BT.shape[1]
    if num_tokens_B is not None:
      check_shape('num_tokens_B', num_tokens_B, (b,))
    if positions_BT is not None:
      check_shape('positions_BT', positions_BT, (b, num_new))
    if mask_BTT is not None:
      check_shape('mask_BTT', mask_BTT, (b, num_new, num_new))
    for layer in capture:
      if not 0 <= layer <= self.num_layers:
        raise ValueError(
          f'capture must name layers 0..{self.num_layers}, got {layer}.'
        )

    streams, cache = self._append(
      params,
      self.embed(params, tokens_BT),
      cache,
      num_tokens_B,
      positions_BT,
      mask_BTT=mask_BTT,
    )
    features_BTE = None
    if capture:
      features_BTE = jnp.concatenate([streams[i] for i in capture], axis=-1)
    return base.Hidden(streams[-1], features_BTE), cache

  def run_layers(
    self,
    params: Params,
    x_BTD: Array,
    cache: base.KVCache,
    *,
    num_tokens_B: Array | None = None,
    positions_BT: Array | None = None,
    side_BTX: Array | None = None,
    visible_BTS: Array | None = None,
  ) -> tuple[Array, base.KVCache]:
    """`apply` from a stream on, for networks that make their own.

    Args:
      params: {'layers'}; the rest of the model's is not looked at.
      x_BTD: what stands for the embeddings.
      cache, num_tokens_B, positions_BT: as for `apply`.
      side_BTX: what attention reads before the stream, [B, T, side_dim].
      visible_BTS: bool [B, T, S], which slots are seen; None: causal.

    Returns:
      The stream behind the last layer, and the cache.

    Raises:
      ValueError: at trace time, if the stream has another shape.
    """
    check_shape('x_BTD', x_BTD, (cache.length_B.shape[0], 'T', self.embed_dim))
    streams, cache = self._append(
      params,
      x_BTD,
      cache,
      num_tokens_B,
      positions_BT,
      visible_BTS=visible_BTS,
      side_BTX=side_BTX,
    )
    return streams[-1], cache

  def _append(
    self,
    params: Params,
    x_BTD: Array,
    cache: base.KVCache,
    num_tokens_B: Array | None,
    positions_BT: Array | None,
    *,
    mask_BTT: Array | None = None,
    visible_BTS: Array | None = None,
    side_BTX: Array | None = None,
  ) -> tuple[list[Array], base.KVCache]:
    """The layers' streams, and the cache with their keys and values."""
    num_new = x_BTD.shape[1]
    cache = base.pin_cache(cache, self.placement)
    positions_BT = base.new_positions(cache, num_new, positions_BT)
    if visible_BTS is None:
      visible = self._masks(
        lambda window: base.visible_slots(
          cache.length_B, cache.num_slots, positions_BT, mask_BTT, window
        )
      )
    else:
      visible = self._masks(lambda window: visible_BTS)
    length_B = base.advance(cache, num_new, num_tokens_B)
    streams, ks, vs = self._blocks(
      params,
      x_BTD,
      cache,
      positions_BT,
      base.append_slots(cache, num_new, num_tokens_B),
      visible,
      jnp.max(length_B),
      side_BTX=side_BTX,
    )
    cache = cache.replace(k=ks, v=vs, length_B=length_B)
    return streams, base.pin_cache(cache, self.placement)

  def apply_beside(
    self,
    params: Params,
    tokens_BT: Array,
    cache: base.KVCache,
    side: base.KVCache,
  ) -> tuple[base.Hidden, base.KVCache]:
    """`apply` that leaves the cache alone: what it appends goes to `side`.

    Tokens stand behind those of `cache` and of `side`, and see both:

      cache  a b c . . . .     length 3
      side   d e .             length 2: d, e have positions 3, 4
      new    f                 position 5, goes to slot 2 of the side

    Args:
      params: the model's parameters.
      tokens_BT: int32 [B, T].
      cache: read only, one entry per layer of this model.
      side: a cache of few slots, empty at first.

    Returns:
      The hiddens, and `side` with T entries more.

    Raises:
      ValueError: at trace time, if `tokens_BT` has another number of rows.
    """
    check_shape('tokens_BT', tokens_BT, (cache.length_B.shape[0], 'T'))
    num_new = tokens_BT.shape[1]
    cache = base.pin_cache(cache, self.placement)
    side = base.pin_cache(side, self.placement)
    # Windows look at differences of positions, so `side` may count from 0.
    offset_BT = base.new_positions(side, num_new, None)
    positions_BT = cache.length_B[:, None] + offset_BT
    earlier = self._masks(
      lambda window: base.earlier_slots(
        cache.length_B, cache.num_slots, positions_BT, window
      )
    )
    visible = self._masks(
      lambda window: base.visible_slots(
        side.length_B, side.num_slots, offset_BT, None, window
      )
    )
    length_B = base.advance(side, num_new, None)
    num_earlier = jnp.max(cache.length_B)
    streams, ks, vs = self._blocks(
      params,
      self.embed(params, tokens_BT),
      side,
      positions_BT,
      base.append_slots(side, num_new, None),
      visible,
      jnp.max(length_B),
      [
        (Memory(k, v, earlier[window], num_earlier),)
        for k, v, window in zip(cache.k, cache.v, self.windows)
      ],
    )
    side = side.replace(k=ks, v=vs, length_B=length_B)
    return base.Hidden(streams[-1]), base.pin_cache(side, self.placement)

  def _masks(self, make: Callable[[int | None], Array]) -> dict:
    """By window: layers share few settings, so each is computed once."""
    return {window: make(window) for window in dict.fromkeys(self.windows)}

  def _blocks(
    self,
    params,
    x_BTD,
    cache,
    positions_BT,
    slot_BT,
    visible,
    num_used,
    past=None,
    side_BTX=None,
  ) -> tuple[list[Array], tuple[slots.Slots, ...], tuple[slots.Slots, ...]]:
    """All layers: the residual streams, and the keys and values they leave.

    `past` has, per layer, the memories that are read beside the cache's;
    `side_BTX` is read before the stream in all of them.
    """
    angles = {
      r: r.angles(positions_BT, self.head_dim)
      for r in dict.fromkeys(self.ropes)
    }
    streams = [x_BTD]
    ks, vs = [], []
    for i, layer_params in enumerate(params['layers']):
      own = Memory(cache.k[i], cache.v[i], visible[self.windows[i]], num_used)
      x_BTD, own = self._layer(
        layer_params,
        x_BTD,
        own,
        slot_BT,
        angles[self.ropes[i]],
        past[i] if past else (),
        side_BTX,
      )
      ks.append(own.k)
      vs.append(own.v)
      streams.append(x_BTD)
    return streams, tuple(ks), tuple(vs)

  # Layers of the same shapes are traced once. Inlined, so that the program is
  # the one that it would be without: no calls, and every layer its own code.
  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def _layer(
    self,
    params: Params,
    x_BTD: Array,
    own: Memory,
    slot_BT: Array,
    angles: tuple[Array, Array],
    past: tuple[Memory, ...],
    side_BTX: Array | None,
  ) -> tuple[Array, Memory]:
    """One block: the stream behind it, and its memory with the new entries."""
    attn_BTD, own = block.attend(
      self, params, x_BTD, own, slot_BT, angles, past, side_BTX
    )
    x_BTD = self._pin(x_BTD + attn_BTD, 'batch')
    ffn_BTD = block.feed_forward(self, params, x_BTD)
    return self._pin(x_BTD + ffn_BTD, 'batch'), own

  def _pin(self, x: Array, *logical_axes: str | None) -> Array:
    return constrain(x, self.placement, *logical_axes)

  def embed(self, params: Params, tokens_BT: Array) -> Array:
    """The stream before the first layer, [B, T, D]."""
    # Ids outside the vocabulary occur in padding only; any row will do.
    x_BTD = layers.lookup(
      params['embed'], tokens_BT, self.dtype, is_local=self.placement is None
    )
    if self.embed_scale is not None:
      x_BTD = x_BTD * jnp.asarray(self.embed_scale, x_BTD.dtype)
    return self._pin(x_BTD, 'batch')

  def final_norm(self, params: Params, last_BTD: Array) -> Array:
    """The last norm, for heads that read the hidden after it, [B, T, D]."""
    return block.norm(self, params, 'final_norm', last_BTD)

  def unembed(self, params: Params, last_BTD: Array) -> Array:
    """float32 logits [B, T, vocab_size]; includes the final norm."""
    return self.logits(params, self.final_norm(params, last_BTD))

  def logits(self, params: Params, normed_BTD: Array) -> Array:
    """`unembed` of what has been through the final norm, float32 [B, T, V]."""
    head = 'embed' if self.tied else 'head'
    logits_BTV = block.dense(self, params, head, normed_BTD, dtype=jnp.float32)
    # Rows beyond the true ids exist to round the size; they name no token.
    logits_BTV = logits_BTV[:, :, : self.vocab_size]
    if self.logit_softcap is not None:
      cap = self.logit_softcap
      logits_BTV = cap * jnp.tanh(logits_BTV / cap)
    return self._pin(logits_BTV, 'batch', None, 'vocab')

  def keep(
    self,
    cache: base.KVCache,
    start_B: Array,
    path_BM: Array | None,
    num_B: Array,
  ) -> base.KVCache:
    """`LanguageModel.keep`: windows and lengths are masks, nothing is lost."""
    return base.keep_kv(cache, start_B, path_BM, num_B, self.placement)
