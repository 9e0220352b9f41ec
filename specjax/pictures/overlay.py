"""p, q and what is left of p: why a correction has the law it has."""

from collections.abc import Sequence

import numpy as np

from specjax.pictures import style


def laws(
  p_V: Sequence[float],
  q_V: Sequence[float],
  labels: Sequence[str],
  *,
  title: str = '',
) -> style.Figure:
  """Bars of p and q side by side, with what they share and what is left.

  The shared part, min(p, q), is filled in both bars: its sum is the
  probability that a draft is accepted. What p has above it is the residual,
  before it is normalised: only there may a correction come from. What q has
  above it is what gets rejected. The third bar is the normalised residual.

  Args:
    p_V: probabilities of the target; they need not add up to 1 if only some ids
      are shown.
    q_V: probabilities of the draft.
    labels: a word for each.
    title: of the figure.

  Raises:
    ValueError: the lengths differ, or there are none.
  """
  p_V, q_V = np.asarray(p_V, np.float64), np.asarray(q_V, np.float64)
  if not len(labels) or not p_V.shape == q_V.shape == (len(labels),):
    raise ValueError(
      'p, q and labels must have the same length, one or more, got shapes '
      f'{p_V.shape} and {q_V.shape} and {len(labels)} labels.'
    )
  fonts = style.families()
  shared_V = np.minimum(p_V, q_V)
  excess_V = p_V - shared_V
  total = excess_V.sum()
  residual_V = excess_V / total if total > 0 else p_V
  size = (max(4.8, 0.9 * len(labels) + 1.5), 3.8)
  figure, axes = style.figure(title, y='probability', size=size)
  x_V = np.arange(len(labels))
  width = 0.26
  edge = {'width': width, 'edgecolor': 'black', 'linewidth': 0.8}
  for offset, colour in ((-width, style.BLUE), (0.0, style.ORANGE)):
    label = 'min(p, q): accepted' if offset else None
    axes.bar(x_V + offset, shared_V, color='0.8', label=label, **edge)
    over_V = (p_V if offset else q_V) - shared_V
    name = 'p above q: the residual' if offset else 'q above p: rejected'
    axes.bar(
      x_V + offset,
      over_V,
      bottom=shared_V,
      color=colour,
      hatch='//' if offset else 'xx',
      label=name,
      **edge,
    )
  axes.bar(
    x_V + width,
    residual_V,
    color='white',
    hatch='..',
    label='residual, normalised',
    **edge,
  )
  for i in range(len(labels)):
    for offset, name, height in (
      (-width, 'p', p_V[i]),
      (0.0, 'q', q_V[i]),
      (width, 'r', residual_V[i]),
    ):
      axes.text(
        x_V[i] + offset,
        height + 0.01,
        name,
        ha='center',
        va='bottom',
        fontsize=8,
        style='italic',
      )
  shown = [
    style.spelled(label, fonts).replace('\u2423', ' ') for label in labels
  ]
  axes.set_xticks(x_V, shown, family=fonts)
  axes.grid(False, axis='x')
  axes.set_ylim(0, 1.08)
  style.legend(axes)
  return figure
