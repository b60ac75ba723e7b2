"""Channel equilibrium for convolutional networks."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cenet.version import VERSION

if TYPE_CHECKING:
    from cenet import functional
    from cenet.analysis.diagnose import diagnose
    from cenet.calibration import update_ce_stats
    from cenet.checkpoints import load_released_ce_
    from cenet.folding import fold_ce, fold_conv_norm_ce
    from cenet.nn import (
        BatchDecorrelation2d,
        ChannelEquilibrium2d,
        InstanceReweighting2d,
        NormCE2d,
        convert_sync_ce,
        param_groups,
        revert_sync_ce,
    )
    from cenet.sharing import load, save
    from cenet.surgery import CESite, ce_sites, freeze_ce_, insert_ce_, remove_ce_, unfreeze_ce_

__version__ = VERSION

__all__ = [
    "BatchDecorrelation2d",
    "CESite",
    "ChannelEquilibrium2d",
    "InstanceReweighting2d",
    "NormCE2d",
    "ce_sites",
    "convert_sync_ce",
    "diagnose",
    "fold_ce",
    "fold_conv_norm_ce",
    "freeze_ce_",
    "functional",
    "insert_ce_",
    "load",
    "load_released_ce_",
    "param_groups",
    "remove_ce_",
    "revert_sync_ce",
    "save",
    "unfreeze_ce_",
    "update_ce_stats",
]

# modules that define the public names
_HOMES = ("nn", "surgery", "folding", "calibration", "checkpoints", "analysis", "sharing")


def __getattr__(name: str) -> Any:
    """A public name or a module, imported at its first use.

    Torch takes seconds to import, during which the command line would print nothing.
    """
    if name in __all__ and name != "functional":
        homes = (import_module(f"cenet.{home}") for home in _HOMES)
        found = globals()[name] = next(getattr(home, name) for home in homes if hasattr(home, name))
        return found
    if name.isidentifier() and not name.startswith("__") and find_spec(f"cenet.{name}") is not None:
        return import_module(f"cenet.{name}")
    raise AttributeError(f"module 'cenet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
