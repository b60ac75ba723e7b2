"""Triton twins of `functional`: the passes over x, the algebra between them, and their backward.

`layer.forward` and `layer.backward` run norm → CE → residual → activation; docs/kernels.md has the
derivation. Nothing here depends on modules. One file per idea, with its backward:

    call            the operator's arguments as one record        no triton needed
    layer           which launches make up a pass; the saved state
    launch          starting kernels, and whole passes again
    tiles           cutting x up; device functions that all kernels share
    moments         `functional.moments`: measure x, condense the measurements
    norm            center and rstd of the norm
    decorrelation   `functional.decorrelation`: covariance → W → P
    gate            `functional.instance_gain`: instance variances → w
    averages        running averages
    coefficients    `functional.coefficients`: the launches that run the four above
    mix             `functional.mix`: apply the map to x
    small_maps      the passes over maps of at most 8 pixels
    pooling         the passes with max-pooling before the covariance
    folded_gate     the gate of a folded layer
    merging         the passes of a layer whose statistics are those of several ranks
    preparation     compiling kernels ahead of time

Letters, in kernels and comments:

    N samples   C channels   L pixels of a sample   M = N·L   G groups of K channels
    H hidden units of the gate (height in `pooling`)   S chunks of samples   R ranks
    KP  K padded to a power of two   GP  G padded   SP  splits (or pixels) of a sample, padded
    BL, BC  pixels and channels of a tile   BN  samples, BW  columns, BK  terms of a block
    BR  Gram matrices, BS  chunks that a program loads at a time
    x̂ = (x − center) · rstd   γ, β  the norm's   W  decorrelation   λ  share of W   α  blend
    w_n  weight of sample n in the map   r = s^{-1/2}   u = σ̃² r²
    z  hidden layer   h = relu(LN(z))
    P, Q  (G, K, K): the map of x̂, and of its gradient through the covariance
    d, c  diagonal and constant of the map   e, f  the same of the gradient through statistics
    gX, grad_X  gradient of X   _ptr  pointer   NORM, BD, IR  a source: ABSENT, BATCH or RUNNING
"""
