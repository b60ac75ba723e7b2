"""Measurements of what channels do: numbers, not pictures."""

from cenet.analysis.channels import inhibited_ratio

__all__ = ["inhibited_ratio"]
