"""Pictures of decoding, for notebooks and scripts.

Figures are matplotlib's (extra `plots`), made without pyplot: a notebook shows
what a cell ends with, a script calls `savefig`. None of them tells anything by
colour alone: bars have hatches, lines have markers, and words stand beside.
"""

from specjax.pictures.acceptance import heat_map
from specjax.pictures.overlay import laws
from specjax.pictures.slates import Slates
from specjax.pictures.steps import timeline
from specjax.pictures.style import curves

__all__ = ('Slates', 'curves', 'heat_map', 'laws', 'timeline')
