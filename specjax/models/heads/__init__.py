"""Draft heads on a frozen target: networks, and the files they come in.

`base` has the two protocols; `medusa`, `eagle`, `eagle3` and `mtp` implement
them, `build` makes a head by kind, `files` reads and writes published ones.
"""
