"""The `cenet` command: parses its arguments and calls one function per subcommand."""

import csv
import os
import signal
import sys
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from cenet.extras import MissingExtraError, require

require("cli")

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from cenet.arguments import run_command

IMPORTS = "importing PyTorch and the networks"


def _waiting(what: str) -> Status:
    """Show a status line on the terminal while something slow runs; only in the first process."""
    return Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0").status(what)


def sites(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    size: int | None = None,
) -> None:
    """List the norms of a network that CE can follow, and mark those that `insert_ce_` chooses.

    Args:
        model: a timm model name such as resnet50, or torchvision/NAME.
        size: height and width of the images that are run through the network to trace its norms; by
            default 224, or the first common size that the network accepts.
    """
    if size is not None and size < 1:
        raise SystemExit(f"--size {size} must be at least 1")
    with _waiting(f"building {model} and running it once"):
        import torch

        from cenet.models.lookup import create_named, image_config
        from cenet.surgery import find_placement

        try:
            network = create_named(model)
            image = None
            if size is not None:
                image = torch.zeros(2, image_config(model)["input_size"][0], size, size)
            found = find_placement(network, image)
        except ValueError as error:
            if error.__cause__ is None:
                raise SystemExit(str(error)) from error
            tried = "the usual sizes" if size is None else f"{size}×{size}"
            reason = str(error.__cause__).strip().splitlines()[0]
            raise SystemExit(
                f"{model} does not run on images of {tried} ({reason}); choose another --size"
            ) from error
    chosen = sum(site.default for site in found.sites)
    if found.sites:
        table = Table(
            title=f"{model}: insert_ce_ puts CE after {chosen} of {len(found.sites)} norms"
        )
        table.add_column("norm", overflow="fold")
        table.add_column("class")
        table.add_column("channels", justify="right")
        table.add_column("insert_ce_")
        for site in found.sites:
            mark = "puts CE here" if site.default else site.note
            table.add_row(site.name, site.norm, str(site.num_features), mark)
        Console().print(table)
    for line in found.summary():
        print(line)
    others = [site.name for site in found.sites if not (site.default or site.note)]
    if others:
        print(f'To choose yourself: insert_ce_(model, lambda norm, name: name == "{others[0]}").')
    if not found.sites:
        raise SystemExit(f"{model} has no norm that CE could follow")


def models() -> None:
    """List the networks of the paper: CE sites, parameters, multiply-adds, the paper's figures."""
    counted = files("cenet").joinpath("models", "costs.csv").read_text()  # importing timm is slow
    table = Table(
        title="millions of parameters, and billions of multiply-adds for one image",
        caption="Counted: convolutions and matrix products. +SE: with squeeze-excite. +CE: with "
        "CE. train, folded: with CE, in training and after folding. paper: its figure with CE.",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("network", no_wrap=True)
    for column in ("sites", "params", "+SE", "+CE", "plain", "+SE", "train", "folded", "paper"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, sites, *counts, paper in list(csv.reader(counted.splitlines()))[1:]:
        parameters = (f"{int(value) / 1e6:.1f}" for value in counts[:3])
        multiply_adds = (f"{int(value) / 1e9:.3f}" for value in counts[3:])
        table.add_row(f"ce{name}", sites, *parameters, *multiply_adds, paper)
    Console().print(table)


def export(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|MODEL")],
    checkpoint: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="CKPT")] = None,
    *,
    out: Path,
    format: Literal["onnx", "safetensors", "folded"] | None = None,
    size: int | None = None,
    data: Path | None = None,
) -> None:
    """Export a trained network for deployment, for its own image size and any batch size.

    ONNX files and torch.export programs are run on images first. They are written only if their
    outputs match those of the network.

    Args:
        model: folder of a run of `cenet train` or of `cenet.save`, which also gives image size,
            normalization and classes; or, together with CKPT, the name of a CE network such as
            ceresnet50.
        checkpoint: only with a MODEL given by name: its weights. The weights file of a run, a .pth
            or .safetensors file of a network with default arguments (or start="identity"), or a
            folder of a run or of `cenet.save`.
        out: file to write, NAME.onnx or NAME.pt2, which is replaced if it exists; for safetensors a
            folder, which timm reads as local-dir:OUT.
        format: onnx; folded, a program that torch.export.load reads; or safetensors. By default
            onnx for NAME.onnx and folded for NAME.pt2; both are folded where that is possible.
        size: height and width of the images to export for; by default the network's own.
        data: folder of images on which the exported network is checked, in the layout for
            `cenet train` or any other; by default parts of two photographs.
    """
    source = Path(model) if checkpoint is None else checkpoint
    if out.exists() and source.exists() and out.samefile(source):
        raise SystemExit(f"--out {out} is the checkpoint itself; choose another --out")
    with _waiting(f"exporting {model} and running it on images"):
        from cenet.export import chosen_format, write_network
        from cenet.files import in_words

        try:
            chosen = chosen_format(out, format)
            said = write_network(model, checkpoint, out, chosen, size=size, data=data)
        except (ValueError, OSError, RuntimeError) as error:
            raise SystemExit(f"nothing was written to {out}: {in_words(error)}") from error
    print(f"wrote {out} ({chosen}): {said}")


def diagnose(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    data: Path | None = None,
    checkpoint: Path | None = None,
    pretrained: bool = False,
    limit: int | None = None,
    size: int | None = None,
    batch: int = 32,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layer: str | None = None,
    ablation_images: int | Literal["all"] | None = None,
    out: Path | None = None,
) -> None:
    """Measure what the channels of a network do, and say whether to prune, to try CE, or neither.

    Args:
        model: a timm model name such as resnet50, torchvision/NAME, or a folder of `cenet train` or
            `cenet.save`.
        data: folder of images: class folders, images without labels, or test images in tar or
            parquet files as for `cenet train`. A run on digits needs none.
        checkpoint: weights of the model, a .safetensors or .pth file. Folders
            have their own. A network given by name has random weights without this option or
            --pretrained.
        pretrained: download the weights that timm or torchvision have for the model.
        limit: largest number of images to use, chosen at random.
        size: height and width of the images; by default the network's own.
        batch: images per batch.
        device: device to run on; auto is cuda where there is one.
        layer: layer to ablate, by its own name or that of the norm before it; by default the layer
            that the paper ablates.
        ablation_images: number of labelled images for the ablation; all uses every image, 0 skips
            the ablation. By default 512, or 128 for images of more than 64×64 pixels on a CPU. The
            network runs on each about 60 times, and once more for each channel of the ablated
            layer.
        out: folder for diagnosis.json and the page diagnosis.html; by default MODEL itself if it is
            a folder, where `cenet report` finds the diagnosis, otherwise `diagnosis`.
    """
    with _waiting(IMPORTS):
        from cenet.diagnosing.command import run
        from cenet.files import in_words

    out = out or (Path(model) if Path(model).is_dir() else Path("diagnosis"))
    try:
        run(
            model, data, out, checkpoint=checkpoint, pretrained=pretrained, limit=limit, size=size,
            batch=batch, device=device, layer=layer, ablation_images=ablation_images,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise SystemExit(in_words(error)) from error


def demo(out: Path = Path("runs/demo"), epochs: int = 15, seeds: int = 3) -> None:
    """Train a small VGG without and with CE on digits (CPU, two to four minutes), and write a page.

    Args:
        out: folder of the runs and of report.html.
        epochs: epochs of training per network.
        seeds: number of training runs per network, each with its own seed.
    """
    with _waiting(IMPORTS):
        from cenet.demo import run_demo
        from cenet.files import in_words

    try:
        run_demo(out, epochs, seeds)
    except (ValueError, OSError) as error:
        raise SystemExit(in_words(error)) from error


def recipes() -> None:
    """List the recipes of `cenet train`: those of Appendix E, short ones, and digits for a CPU."""
    with _waiting(IMPORTS):
        from cenet.train.recipes import RECIPES, family_and_row

    table = Table(
        title="A recipe is named NETWORK_ROW. batch: per process. lr: rate / images per update",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    columns = ("network", "data", "epochs", "batch", "lr", "schedule", "decay")
    for column in columns:
        table.add_column(column, no_wrap=True)
    rows: dict[str, list[str]] = {}
    for name, recipe in RECIPES.items():
        network, row = family_and_row(name)
        rows.setdefault(network, []).append(row)
        if row == "ce":
            table.add_row(
                network, recipe.dataset, str(recipe.epochs), str(recipe.batch_size),
                f"{recipe.lr}/{recipe.lr_batch}", recipe.schedule,
                f"{recipe.weight_decay:.0e}".replace("e-0", "e-"),
            )  # fmt: skip
    console = Console()
    console.print(table)
    shared = [row for row in rows["digits"] if all(row in own for own in rows.values())]
    console.print(f"rows: {', '.join(shared)}")
    for network, own in rows.items():
        more = [row for row in own if row not in shared]
        if more:
            console.print(f"more rows of {network}: {', '.join(more)}")
    console.print("finetune trains any network of timm or torchvision: --model NAME --pretrained")
    console.print("cenet train digits_ce --help shows all fields; each can be changed.")


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Path = Path("report.html"),
) -> None:
    """Write a page that compares runs: training, channels, ablation, and λ and W of CE.

    Args:
        runs: folders of `cenet train` or `cenet diagnose`, or diagnosis.json files; at most eight.
        out: page to write; its figures also go into a folder beside it, as SVG and CSV.
    """
    with _waiting("writing the page"):
        from cenet.analysis.diagnosis import FILE
        from cenet.files import in_words
        from cenet.report import NOT_DIAGNOSED, write_page

        try:
            page = write_page(runs, out)
        except (ValueError, OSError) as error:
            raise SystemExit(in_words(error)) from error
    print(f"wrote {page}")
    for run in runs:
        if run.is_dir() and not (run / FILE).is_file():
            print(f"{run} {NOT_DIAGNOSED}".replace("RUN", str(run)))


def evaluate(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    data: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    recalibrate: int = 0,
    save: Path | None = None,
) -> None:
    """Print test loss, top-1 and top-5 accuracy of a run of `cenet train`.

    The test images are used even if the run was tested on held-out training images.

    Args:
        run: folder of the run.
        data: folder of the images, as for `cenet train`.
        device: device to run on; auto is cuda where there is one.
        recalibrate: number of training batches, at most those of an epoch, from which the running
            statistics of batch norm and CE are estimated again before the test; 0 keeps those of
            the run.
        save: file for the recalibrated weights, NAME.safetensors.
    """
    with _waiting(f"evaluating {run}"):
        from cenet.distributed import is_first_process
        from cenet.files import in_words
        from cenet.run_folder import WEIGHTS
        from cenet.train.command import results_in_words
        from cenet.train.job import evaluate_run
        from cenet.train.recipes import Recipe, read_run
        from cenet.train.weights import read_weights

        try:
            found = evaluate_run(run, data, device, recalibrate=recalibrate, save=save)
            source = read_weights(run)[1]
            share = read_run(run, Recipe)[0].holdout
        except (ValueError, OSError) as error:
            raise SystemExit(in_words(error) if is_first_process() else 1) from error
    if not is_first_process():
        return
    if source != WEIGHTS:
        print(f"the run is not finished; its checkpoint {source} is tested")
    if share > 0:
        print(
            "these results are for the test images; the metrics of the run itself are for training "
            f"images held out by holdout={share:g}"
        )
    print(results_in_words(found))
    if save is not None:
        print(f"wrote the recalibrated weights to {save}")


def train() -> None:
    """Train a classifier by a recipe: `cenet train RECIPE [--field value ...]`."""
    arguments = sys.argv[2:]
    with _waiting(IMPORTS):
        from cenet.train.recipes import find_recipe

        if arguments and not arguments[0].startswith("-"):
            try:
                find_recipe(arguments[0])  # before the imports that take seconds
            except ValueError as error:
                raise SystemExit(str(error)) from error
        from cenet.train.command import parse, run

    run(parse(arguments))


def detect() -> None:
    """Train, test and show detectors of objects: `cenet detect train|eval|show`."""
    with _waiting(IMPORTS):
        from cenet.detection.command import main as run

    run(sys.argv[2:])


def main() -> None:
    """Run the command of `sys.argv`; exit with one line if it cannot be run."""
    try:
        _main()
    except MissingExtraError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


def _check_arguments(arguments: list[str]) -> None:
    """Exit if an argument is empty: an empty path would be the current folder."""
    for before, argument in pairwise(arguments):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            option = argument.removesuffix("=") or before
            raise SystemExit(f"the value of {option} is empty; give one, or leave {option} out")


def _main() -> None:
    _check_arguments(sys.argv)
    if sys.argv[1:2] in (["train"], ["detect"]):
        from cenet.signals import exit_on_sigterm

        with exit_on_sigterm():
            (train if sys.argv[1] == "train" else detect)()  # their arguments depend on the recipe
        return
    run_command(
        {
            "demo": demo,
            "detect": detect,
            "diagnose": diagnose,
            "eval": evaluate,
            "export": export,
            "models": models,
            "recipes": recipes,
            "report": report,
            "sites": sites,
            "train": train,
        },
        prog="cenet",
        description="Channel equilibrium for convolutional networks. --version prints the version.",
    )


if __name__ == "__main__":
    main()
