"""Proposers: what guesses tokens for the target to verify.

`base` has the protocol, `drafting` the loop that draws a chain, `stopping` the
rules that end one.
"""
