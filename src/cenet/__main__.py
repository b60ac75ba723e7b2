"""`python -m cenet`, for torchrun."""

from cenet.cli import main

main()
