"""The version of the installed package, which pyproject.toml decides."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("cenet")
except PackageNotFoundError:  # torch.hub runs a checkout that is not installed
    VERSION = "unknown"
