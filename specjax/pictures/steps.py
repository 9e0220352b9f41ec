"""What happens when: drafts, verifications, and the tokens they yield."""

from collections.abc import Sequence

import numpy as np

from specjax.pictures import style


def timeline(
  num_drafted: Sequence[int],
  num_accepted: Sequence[int],
  num_emitted: Sequence[int],
  *,
  draft_cost: float,
  verify_cost: float = 1.0,
  title: str = 'Steps in time',
) -> style.Figure:
  """Steps along a time axis, above plain decoding of the same tokens.

  Time is counted in passes of plain decoding, by the costs that are given: the
  figure shows the argument, not a measurement.

  Args:
    num_drafted: int [S], drafts of each step.
    num_accepted: int [S].
    num_emitted: int [S], tokens of each step, correction or bonus included.
    draft_cost: of one draft, over one plain pass.
    verify_cost: of one verification, over one plain pass.
    title: of the figure.

  Raises:
    ValueError: no step, unequal lengths, or a cost that is not above 0.
  """
  counts = [np.asarray(x) for x in (num_drafted, num_accepted, num_emitted)]
  if not len(counts[0]) or len({x.shape for x in counts}) != 1:
    raise ValueError(
      'a timeline needs the same number of entries for drafted, accepted and '
      f'emitted, one or more, got shapes {[x.shape for x in counts]}.'
    )
  if not (draft_cost >= 0 and verify_cost > 0):
    raise ValueError(
      f'draft_cost must be >= 0 and verify_cost > 0, got {draft_cost} and '
      f'{verify_cost}.'
    )
  drafted, accepted, emitted = counts
  total = int(emitted.sum())
  spent = drafted * draft_cost + verify_cost
  begin = np.concatenate([[0.0], np.cumsum(spent)])
  figure, axes = style.figure(
    title, 'time, in passes of plain decoding', size=(7.6, 2.8)
  )
  box = {'edgecolor': 'black', 'linewidth': 0.8}
  kinds = (
    (
      'draft',
      [
        (start + i * draft_cost, draft_cost)
        for start, num in zip(begin, drafted)
        for i in range(num)
      ],
      {'facecolor': style.ORANGE, 'hatch': '//'},
    ),
    (
      'verify',
      [(end - verify_cost, verify_cost) for end in begin[1:]],
      {'facecolor': style.SKY, 'hatch': '..'},
    ),
  )
  for label, spans, look in kinds:
    axes.broken_barh(spans, (1.6, 0.8), label=label, **look, **box)
  # A step's tokens are there when its verification ends.
  for label, marker, colour, first, number in (
    ('accepted', 'o', style.GREEN, 0 * accepted, accepted),
    ('rejected', 'x', style.VERMILION, accepted, drafted - accepted),
    (
      "target's own",
      'D',
      style.BLUE,
      np.maximum(drafted, accepted),
      emitted - accepted,
    ),
  ):
    points = [
      (end, 2.6 + 0.16 * (low + i))
      for end, low, num in zip(begin[1:], first, number)
      for i in range(num)
    ]
    xs, ys = zip(*points) if points else ((), ())
    axes.plot(
      xs,
      ys,
      linestyle='none',
      marker=marker,
      color=colour,
      label=label,
      markersize=5,
    )
  plain = [(float(i), 1.0) for i in range(total)]
  axes.broken_barh(plain, (0.2, 0.8), facecolor='white', **box)
  axes.set_yticks([0.6, 2.0], ['plain', 'speculative'])
  most = int(np.max(drafted)) + 1
  axes.set(xlim=(0, max(total, begin[-1]) * 1.02), ylim=(0, 2.8 + 0.16 * most))
  axes.grid(False, axis='y')
  style.legend(axes, loc='upper center', bbox_to_anchor=(0.5, -0.22), ncols=5)
  axes.annotate(
    f'{total} tokens: {begin[-1]:.1f} instead of {total} passes of time',
    (begin[-1], 2.0),
    xytext=(6, 0),
    textcoords='offset points',
    va='center',
    fontsize=8,
  )
  return figure
