"""Drafting token by token, whatever network it is done with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax.proposers.base import Proposal
from specjax.sampling import Counts, Sampling
from specjax.shapes import Array, Key
from specjax.sharding import Placement, constrain

# A token and what was fed before it, to the token's hidden and the same grown.
Feed = Callable[[Array, Any], tuple[Array, Any]]
# The logits that draft i was drawn from, and i, to whether another is made.
GoesOn = Callable[[Array, Array], Array]


class Laws(NamedTuple):
  """How a draft's logits come about.

  Attributes:
    unembed: a hidden [B, 1, D] to logits [B, 1, R].
    vocab_size: V, the target's.
    placement: where the laws lie.
    widen: logits over R ids of the draft's own to those over the target's V,
      -inf where there is none; None: they are the same.
  """

  unembed: Callable[[Array], Array]
  vocab_size: int
  placement: Placement | None
  widen: Callable[[Array], Array] | None = None


@flax.struct.dataclass
class _Chain:
  """What the loop over drafts carries.

  Attributes:
    i: int32 [], drafts so far.
    is_going_B: bool [B], whether the row may make draft i.
    last_B1D: the hiddens behind which draft i is drawn; None: draft i - 1 is
      fed for them.
    memory: what `feed` carries.
    counts: of the committed text and the drafts, or None.
    draft_KB: int32; the one fed next stands at (i - 1) % K.
    log_weights_KBV: float32.
    num_draft_B: int32 [B].
  """

  i: Array
  is_going_B: Array
  last_B1D: Array | None
  memory: Any
  counts: Counts | None
  draft_KB: Array
  log_weights_KBV: Array
  num_draft_B: Array


def draw_chain(
  laws: Laws,
  keys_BK: Key,
  feed: Feed,
  memory: Any,
  pending_B: Array,
  last_B1D: Array | None,
  counts: Counts | None,
  sampling: Sampling,
  *,
  most_B: Array,
  goes_on: GoesOn,
) -> tuple[Proposal, Any]:
  """Draws up to K drafts, each from the law behind the one before it.

  A row ends before draft `most`, behind the first that `goes_on` does not want
  to be followed, before a law that is not finite, and before one that is empty,
  because the request bans all ids that the draft has. The loop ends with the
  last row, and nothing is fed for a draft that no row may make:

    most 3      draw, feed, draw, feed, draw
    most 0      nothing at all

  Args:
    laws: from hiddens to logits.
    keys_BK: typed keys [B, K]; consumed.
    feed: `(token_B1, memory)` to `(last_B1D, memory)`.
    memory: what `feed` carries.
    pending_B: int32 [B], the last committed token.
    last_B1D: its hiddens; None if `feed` is still to be called for it.
    counts: of the committed text, [B, 1, V]; None without penalties.
    sampling: the rows' settings.
    most_B: int32 [B], at most K.
    goes_on: `(logits_BV, i)` to bool [B], see `StoppingRule.goes_on`.

  Returns:
    The proposal, and the memory, which has absorbed at least what stands before
    each row's last draft. Laws of drafts that were not made are zeros or junk.
  """
  b, k = keys_BK.shape
  pin = lambda x, *axes: constrain(x, laws.placement, *axes)
  pin_laws = lambda x_KBV: pin(x_KBV, None, 'batch', 'vocab')
  put = jax.lax.dynamic_update_index_in_dim  # Where a scatter may copy.

  def fed(chain: _Chain) -> tuple[Array, Any]:
    token_B = chain.draft_KB[(chain.i - 1) % k]
    if last_B1D is None:
      return feed(token_B[:, None], chain.memory)
    if k == 1:
      return last_B1D, chain.memory
    # None or one pass: a loop works in place where a branch would copy.
    return jax.lax.fori_loop(
      0,
      jnp.where(chain.i > 0, 1, 0),
      lambda _, carry: feed(token_B[:, None], carry[1]),
      (chain.last_B1D, chain.memory),
    )

  def extend(chain: _Chain) -> _Chain:
    i = chain.i
    last_B1D, memory = fed(chain)
    logits_B1V, is_finite_B1 = sampling_lib.blank_broken(laws.unembed(last_B1D))
    is_going_B = chain.is_going_B & is_finite_B1[:, 0]
    own_logits_BR = logits_B1V[:, 0]
    if laws.widen is not None:
      logits_B1V = laws.widen(logits_B1V)
    # Pinned, or the target's split of the laws would enter the draft loop.
    log_weights_B1V = pin(
      sampling_lib.transform(sampling, logits_B1V, chain.counts),
      'batch',
      None,
      'vocab',
    )
    if laws.widen is not None:
      # Not a number where nothing is left; never so over all the target's ids.
      has_id_B = jnp.max(log_weights_B1V[:, 0], axis=-1) > -jnp.inf
      is_going_B &= has_id_B
      log_weights_B1V = jnp.where(has_id_B[:, None, None], log_weights_B1V, 0.0)
    draft_B = pin(
      sampling_lib.draw(log_weights_B1V[:, 0], keys_BK[:, i], sampling), 'batch'
    )
    # A draft is never negative: on a mesh, what the rule communicates is thus
    # ordered behind the drawing.
    own_logits_BR = jnp.where(draft_B[:, None] >= 0, own_logits_BR, 0.0)
    wants_more_B = goes_on(own_logits_BR, i)
    counts = chain.counts
    if counts is not None:
      counts = jax.tree.map(
        lambda counts_B2V: counts_B2V[:, 1:],
        sampling_lib.count_drafts(counts, draft_B[:, None]),
      )
    return _Chain(
      i=i + 1,
      is_going_B=is_going_B & wants_more_B & (i + 1 < most_B),
      last_B1D=None if chain.last_B1D is None else last_B1D,
      memory=memory,
      counts=counts,
      draft_KB=put(chain.draft_KB, draft_B, i, 0),
      # Pinned on both sides, or the carry takes the layout of its later use.
      log_weights_KBV=pin_laws(
        put(pin_laws(chain.log_weights_KBV), log_weights_B1V[:, 0], i, 0)
      ),
      num_draft_B=chain.num_draft_B + is_going_B,
    )

  chain = jax.lax.while_loop(
    lambda chain: jnp.any(chain.is_going_B),
    extend,
    _Chain(
      i=jnp.int32(0),
      is_going_B=most_B > 0,
      last_B1D=last_B1D,
      memory=memory,
      counts=counts,
      # Before the first draft the pending token is the one fed next.
      draft_KB=jnp.zeros((k, b), jnp.int32).at[-1].set(pending_B),
      log_weights_KBV=pin_laws(jnp.zeros((k, b, laws.vocab_size))),
      num_draft_B=jnp.zeros(b, jnp.int32),
    ),
  )
  proposal = Proposal(
    draft_BK=chain.draft_KB.T,
    log_weights_BKV=jnp.swapaxes(pin_laws(chain.log_weights_KBV), 0, 1),
    num_draft_B=chain.num_draft_B,
  )
  return proposal, chain.memory


def row_of(x_BT: Array, index_B: Array) -> Array:
  """x[b, index[b]] for every row."""
  index_B1 = index_B.reshape(-1, *(1,) * (x_BT.ndim - 1))
  return jnp.take_along_axis(x_BT, index_B1, axis=1)[:, 0]
