"""Verification: which drafts are kept, and which token comes after them.

`chain` has the rules, `batch` runs one over rows, `widths` the pass before it.
"""
