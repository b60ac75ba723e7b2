"""Triton twins of `functional`: the passes over x, the algebra between them, and their backward.

`layer.forward` and `layer.backward` run the whole of norm → CE → activation; docs/kernels.md has
the derivation. Nothing here knows modules.
"""
