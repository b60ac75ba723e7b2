"""The `cenet` command: parse, then one call each."""

import sys
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from cenet import __version__

if TYPE_CHECKING:
    from torch import nn


def sites(model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]) -> None:
    """List where CE can go in a network, and where `insert_ce_` puts it by default.

    Args:
        model: a timm model name such as resnet50, or torchvision/NAME.
    """
    from cenet.surgery import ce_sites

    try:
        found = ce_sites(_create(model))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if not found:
        raise SystemExit(f"{model} has no norm that CE could follow")
    chosen = sum(site.default for site in found)
    table = Table(title=f"{model}: {chosen} of {len(found)} sites by default")
    table.add_column("site", overflow="fold")
    table.add_column("norm")
    table.add_column("channels", justify="right")
    table.add_column("default")
    for site in found:
        mark = "CE" if site.default else ""
        table.add_row(site.name, site.norm, str(site.num_features), mark)
    Console().print(table)


def demo(epochs: int = 40, seeds: int = 3) -> None:
    """Train a small VGG with and without CE on digits (CPU, about two minutes) and compare.

    Args:
        epochs: of training, per network.
        seeds: how many times, each with its own split, initial weights and order of the images.
    """
    from cenet.demo import run_demo

    run_demo(epochs, seeds)


def main() -> None:
    """Entry point of the `cenet` command."""
    if sys.argv[1:] == ["--version"]:
        print(f"cenet {__version__}")
        return
    tyro.extras.subcommand_cli_from_dict(
        {"demo": demo, "sites": sites},
        prog="cenet",
        description="Channel equilibrium for convolutional networks. --version prints the version.",
    )


def _create(name: str) -> "nn.Module":
    if name.startswith("torchvision/"):
        import torchvision

        short = name.removeprefix("torchvision/")
        if short not in torchvision.models.list_models(module=torchvision.models):
            raise SystemExit(
                f"{name} is not a classification network of torchvision; see "
                "torchvision.models.list_models(module=torchvision.models)"
            )
        network: nn.Module = torchvision.models.get_model(short, weights=None)
        return network
    import timm

    short = name.removeprefix("timm/")
    if not timm.is_model(short):
        raise SystemExit(f"{name} is not a timm model; use torchvision/NAME for torchvision's")
    model: nn.Module = timm.create_model(short, pretrained=False)
    return model


if __name__ == "__main__":
    main()
