"""Data sets: built-in digits, CIFAR-10, folders, tar and parquet files, and their input spec.

A data set is images and labels. Its input spec, the classes and the normalization of pixels, is
stored with a network trained on it.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from cenet.data.decoding import decode, read, read_all
from cenet.data.parquet import parquet_images
from cenet.data.sources import SUFFIXES, Folder, Source, Subset, mark, read_names, sample
from cenet.data.tar_shards import tar_images
from cenet.extras import require
from cenet.files import check_regular

Dataset = Literal["imagenet", "tinyimagenet", "cifar10", "digits", "folder"]
CorruptionTo = Literal["other", "any"]
Augment = Literal["none", "crop_flip", "imagenet", "imagenet_colour", "imagenet_colour_released"]
TRAIN = ("train",)
TEST = ("test", "val", "validation")
FORMS: tuple[Literal["tar", "parquet"], ...] = ("tar", "parquet")
# patterns of the files of a part {0} with ending {1}; the first one that matches is used
PATTERNS = ("{0}/*.{1}", "{0}-*.{1}", "*-{0}-*.{1}", "data/{0}-*.{1}")
COMPRESSED = ("tar.gz", "tgz", "tar.bz2", "tar.xz", "tar.zst", "tar.lz4")
# a constant, so that all runs hold out the same images and can be compared
HOLDOUT_SEED = 2020
DIGITS_TEST = 450  # number of test images
NAMED = 10  # classes of a set that a message lists
CIFAR10_FOLDER = "cifar-10-batches-py"  # the folder in which torchvision stores it
# largest number of bytes of decoded pixels that are held in memory
FITS = 4 * 2**30
# statistics of ImageNet, for values from 0 to 255
FILES_MEAN = (123.675, 116.28, 103.53)
FILES_STD = (58.395, 57.12, 57.375)


class Resident(NamedTuple):
    """Images in memory."""

    images: Tensor  # (N, C, H, W), uint8
    labels: Tensor  # (N,)
    classes: tuple[str, ...]


class Encoded(NamedTuple):
    """Images in files, which are decoded when they are needed."""

    source: Source
    labels: Tensor  # (N,)
    classes: tuple[str, ...]


class InputSpec(NamedTuple):
    """Classes and normalization that a network was trained with.

    Attributes:
        classes: names of the classes in the order of the logits.
        mean: mean of each channel, for values from 0 to 255.
        std: standard deviation of each channel.
        normalization: where mean and standard deviation come from, in words.
        in_memory: whether training images were held in memory. Such images are tested as they are;
            of image files, the central crop is tested.
    """

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    normalization: str = ""
    in_memory: bool = False

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return len(self.mean)

    def statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation as tensors."""
        return torch.tensor(self.mean, device=device), torch.tensor(self.std, device=device)

    def as_dict(self) -> dict[str, Any]:
        """The fields, in types of JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._asdict().items()
        }

    def agrees_with(self, values: dict[str, Any]) -> bool:
        """Whether `as_dict` of a network with the same classes and normalization gave `values`."""
        own = self.as_dict()
        return all(own[name] == values.get(name) for name in ("classes", "mean", "std"))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "InputSpec":
        """The input spec that `as_dict` wrote; KeyError, TypeError or ValueError if it is not."""
        classes, mean, std = (tuple(values[name]) for name in ("classes", "mean", "std"))
        # files of earlier versions lack it; there, only images in memory had their own statistics
        in_memory = values.get("in_memory", (mean, std) != (FILES_MEAN, FILES_STD))
        found = cls(classes, mean, std, str(values.get("normalization", "")), bool(in_memory))
        numbers = all(type(value) is float for value in (*found.mean, *found.std))
        if not numbers or not all(type(name) is str for name in found.classes):
            raise TypeError("classes are names, and mean and std are numbers")
        usable = all(map(isfinite, mean)) and all(0 < value < inf for value in std)
        if not usable or not 0 < len(mean) == len(std):
            raise ValueError(f"mean={mean} and std={std} need a value for each channel, std > 0")
        return found


class Normalization:
    """Turns pixels on a device into normalized images in a memory layout."""

    def __init__(self, inputs: InputSpec, device: torch.device, *, channels_last: bool) -> None:
        """Move mean and standard deviation to the device."""
        mean, std = inputs.statistics(device)
        self.mean, self.std = mean[:, None, None], std[:, None, None]
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize images (N, C, H, W) with values from 0 to 255."""
        return ((images.float() - self.mean) / self.std).contiguous(memory_format=self.layout)


class Part(NamedTuple):
    """The training or the test images of a folder, not read yet."""

    name: str
    form: Literal["folder", "tar", "parquet"]
    paths: list[Path]  # the files, or the one folder
    names: tuple[str, ...] | None  # class names from a file beside them


class DataSettings(Protocol):
    """The fields of a recipe that decide which images a run sees; `Recipe` documents them."""

    @property
    def dataset(self) -> Dataset:
        """Name of the data set."""

    @property
    def image_size(self) -> int:
        """Height and width of the images that a network sees."""

    @property
    def augment(self) -> Augment:
        """Augmentation of the training images."""

    @property
    def holdout(self) -> float:
        """Share of the training images to hold out."""

    @property
    def label_corruption(self) -> float:
        """Share of the training labels to replace by random ones."""

    @property
    def label_corruption_to(self) -> CorruptionTo:
        """Classes that those labels are drawn from."""

    @property
    def in_colour(self) -> bool:
        """Whether images of one channel are repeated to have three."""

    @property
    def epochs(self) -> int:
        """Passes over the training images."""

    @property
    def seed(self) -> int:
        """Seed of the run."""


class Split(NamedTuple):
    """Training and test images; with `holdout`, the test images are held-out training images."""

    train: Resident | Encoded
    test: Resident | Encoded


def is_for_files(augment: Augment) -> bool:
    """Whether an augmentation crops a random part of an image, which only image files allow."""
    return augment.startswith("imagenet")


def digest(data: Split) -> str:
    """A digest of images and labels that does not depend on the folder of the files.

    For image files, it has all names and, after a colon for each set, marks of the contents of a
    sample.
    """
    found, marks = blake2b(digest_size=16), ""
    for part in data:
        found.update(part.labels.numpy().tobytes())
        if isinstance(part, Encoded):
            found.update("".join(f"{key}|" for key in part.source.names()).encode())
            places = sample(len(part.source))
            marks += ":" + "".join(mark(read(part.source, place)) for place in places)
        else:
            found.update(part.images.contiguous().numpy().data)
    return found.hexdigest() + marks


def load(recipe: DataSettings, folder: Path | None) -> Split:
    """The data of a recipe; ValueError if it cannot be trained on.

    Args:
        recipe: the data settings. With `holdout`, the test images are held-out training images
            with uncorrupted labels, and the test images of the folder are not read.
        folder: training and test images as `image_folders` takes them, or CIFAR-10 as torchvision
            stores it; None for the digits.
    """
    split = _load(recipe, folder) if recipe.holdout == 0 else _load_held_out(recipe, folder)
    train = split.train
    if len(train.classes) < 2:
        raise ValueError(f"{folder} has one class, {train.classes[0]!r}; there is nothing to learn")
    if recipe.label_corruption > 0:
        labels = corrupt(
            train.labels, recipe.label_corruption, len(train.classes), recipe.seed,
            to=recipe.label_corruption_to,
        )  # fmt: skip
        split = split._replace(train=train._replace(labels=labels))
    return split


def load_test(recipe: DataSettings, folder: Path | None) -> Resident | Encoded:
    """The test images of a recipe; `folder` need not hold training images."""
    if folder is not None and folder.is_dir() and find_part(folder, TRAIN) is None:
        test = find_part(folder, TEST)
        if test is not None:
            return _in_memory(encoded(test), recipe.image_size, resident=_is_resident(recipe))
    return _load(recipe, folder).test


def _load_held_out(recipe: DataSettings, folder: Path | None) -> Split:
    """The training images, split into those to train on and those that are held out."""
    data = _load_train(recipe, folder)
    held = held_out(data.labels, recipe.holdout, data.classes)
    return Split(_selected(data, ~held), _selected(data, held))


def _load_train(recipe: DataSettings, folder: Path | None) -> Resident | Encoded:
    """The training images of a recipe; `folder` need not hold test images."""
    if recipe.dataset == "digits" or folder is None:
        return _load(recipe, folder).train
    check_place(folder)
    if (folder / CIFAR10_FOLDER).is_dir():
        return _fitted(_cifar10(folder, train=True), recipe)
    train = find_part(folder, TRAIN)
    if train is None:
        raise ValueError(f"{folder} must have the folder train, or train-*.tar, or train-*.parquet")
    return _in_memory(encoded(train), recipe.image_size, resident=_is_resident(recipe))


def _selected(data: Resident | Encoded, mask: Tensor) -> Resident | Encoded:
    """The images where the mask is True, in the same order."""
    if isinstance(data, Resident):
        return data._replace(images=data.images[mask], labels=data.labels[mask])
    source = Subset(data.source, mask.nonzero().flatten().tolist())
    return data._replace(source=source, labels=data.labels[mask])


def _load(recipe: DataSettings, folder: Path | None) -> Split:
    if recipe.dataset == "digits":
        if folder is not None:
            raise ValueError(f"the digits dataset is built in; remove --data {folder}")
        return _fitted_split(digits(), recipe)
    if folder is None:
        what = "it is" if recipe.dataset != "folder" else "the images are"
        name = "" if recipe.dataset == "folder" else f"{recipe.dataset} is not built in; "
        raise ValueError(f"{name}say where {what} with --data FOLDER")
    check_place(folder)
    if (folder / CIFAR10_FOLDER).is_dir():
        return _fitted_split(cifar10(folder), recipe)
    return image_folders(folder, recipe.image_size, resident=_is_resident(recipe))


def _is_resident(recipe: DataSettings) -> bool:
    return not is_for_files(recipe.augment)


def digits() -> Split:
    """Scikit-learn's 1,797 digits of 8×8 pixels: 1,347 training and 450 test images."""
    require("demo")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16 * 255).to(torch.uint8)
    labels = torch.tensor(bunch.target, dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:-DIGITS_TEST], order[-DIGITS_TEST:]
    names = tuple(str(digit) for digit in range(10))
    return Split(
        Resident(images[train], labels[train], names), Resident(images[test], labels[test], names)
    )


def _fitted_split(split: Split, recipe: DataSettings) -> Split:
    return Split(*(_fitted(part, recipe) for part in split if isinstance(part, Resident)))


def _fitted(data: Resident, recipe: DataSettings) -> Resident:
    """Images in memory with the size and the channels that the network takes."""
    images, size = data.images, recipe.image_size
    if images.shape[-1] != size:
        if images.shape[0] * images.shape[1] * size * size > FITS:
            raise ValueError(
                f"{len(images)} images of {size}×{size} are more than the {FITS // 2**30} GiB that "
                "are held in memory; lower --image-size, or give the images as files"
            )
        parts = (
            interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True)
            for part in torch.split(images, 1000)
        )
        images = torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in parts])
    if recipe.in_colour and images.shape[1] == 1:
        images = images.repeat(1, 3, 1, 1)
    return data._replace(images=images)


def cifar10(folder: Path) -> Split:
    """CIFAR-10 as torchvision stores it, checked against its checksums."""
    return Split(_cifar10(folder, train=True), _cifar10(folder, train=False))


def _cifar10(folder: Path, *, train: bool) -> Resident:
    """The training or the test images of CIFAR-10; files of the other part are not opened."""
    from torchvision import datasets

    whole: Any = datasets.CIFAR10
    lists: dict[str, Any] = {"test_list": []} if train else {"train_list": []}
    part: Any = type("Part", (whole,), lists)
    try:
        found = part(str(folder), train=train)
    except RuntimeError as error:
        raise ValueError(f"CIFAR-10 in {folder} is damaged or incomplete: {error}") from error
    images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
    return Resident(images, torch.tensor(found.targets), tuple(found.classes))


def image_folders(folder: Path, size: int, *, resident: bool) -> Split:
    """Training and test images of a folder; test images may be called `val` or `validation`.

    Args:
        folder: holds folders of classes, `train/CLASS/*`; or tar files as WebDataset writes them,
            `train/*.tar` or `train-*.tar`; or parquet files of the Hugging Face hub,
            `train-*.parquet` or `data/train-*.parquet`.
        size: height and width of images in training.
        resident: hold the images in memory if they have that size and fit into it.

    Raises:
        ValueError: a part is missing or empty, the classes differ, or an image cannot be read.
    """
    train, test = find_part(folder, TRAIN), find_part(folder, TEST)
    if train is None or test is None:
        raise ValueError(
            f"{folder} must have the folders train and test (or val), or train-*.tar and "
            "test-*.tar, or train-*.parquet and test-*.parquet"
        )
    parts = [encoded(train), encoded(test)]
    if parts[0].classes != parts[1].classes:
        differ = different_classes(TRAIN[0], parts[0].classes, test.name, parts[1].classes)
        raise ValueError(f"{folder} has different classes: {differ}")
    count = sum(len(part.labels) for part in parts)
    fits = resident and count * 3 * size * size <= FITS
    if not fits or not all(_has_size(part, size) for part in parts):
        return Split(*parts)
    return Split(*(decoded(part, size) for part in parts))


def different_classes(one: str, has: Sequence[str], other: str, other_has: Sequence[str]) -> str:
    """The classes that only one of two sets of images has, for an error message."""
    sides = ((one, has, other, other_has), (other, other_has, one, has))
    lacking = []
    for owner, own, without, others in sides:
        if only := sorted({*own} - {*others}):
            more = f" and {len(only) - NAMED} more" if len(only) > NAMED else ""
            lacking.append(f"{owner} has {', '.join(only[:NAMED])}{more}, which {without} has not")
    return "; ".join(lacking) or "their order differs"


def check_place(folder: Path) -> None:
    """Raise ValueError unless `folder` is a folder on this machine."""
    if re.match(r"[a-z][a-z0-9+.-]+:", str(folder)):
        raise ValueError(
            f"--data {folder} is not on this machine; images are read in any order, so download "
            "the files and give their folder"
        )
    if not folder.is_dir():
        raise ValueError(f"--data {folder} is not a folder")


def find_part(folder: Path, names: tuple[str, ...]) -> Part | None:
    """The first of the named parts that a folder has, or None.

    A part is folders of classes, or tar or parquet files.

    Raises:
        ValueError: the part is in compressed tar files, which cannot be read in any order.
    """
    for name in names:
        own = folder / name
        if own.is_dir() and any(entry.is_dir() for entry in own.iterdir()):
            return Part(name, "folder", [own], None)
        for form in FORMS:
            if paths := _files(folder, name, form):
                return Part(name, form, paths, read_names((paths[0].parent, folder)))
        for ending in COMPRESSED:
            if paths := _files(folder, name, ending):
                raise ValueError(
                    f"{paths[0]} is compressed, and images are read in any order; decompress all "
                    "of them into files that end with .tar"
                )
        if own.is_dir():
            return Part(name, "folder", [own], None)
    return None


def _files(folder: Path, part: str, ending: str) -> list[Path]:
    found = (sorted(folder.glob(pattern.format(part, ending))) for pattern in PATTERNS)
    paths = next((paths for paths in found if paths), [])
    for path in paths:
        check_regular(path)
    return paths


def encoded(part: Part) -> Encoded:
    """The images of a part; ValueError if it is damaged, empty or without usable labels."""
    if part.form == "tar":
        return Encoded(*tar_images(part.paths, part.names))
    if part.form == "parquet":
        return Encoded(*parquet_images(part.paths, part.names))
    return image_files(part.paths[0])


def _in_memory(files: Encoded, size: int, *, resident: bool) -> Resident | Encoded:
    """Read images into memory if they fit and have the size, as `image_folders` does."""
    fits = resident and len(files.labels) * 3 * size * size <= FITS
    return decoded(files, size) if fits and _has_size(files, size) else files


def image_files(folder: Path) -> Encoded:
    """The images of `folder/CLASS/*`, classes and files in alphabetical order."""
    classes = sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."
    )
    if not classes:
        raise ValueError(f"{folder} has no folders of classes, and no .tar or .parquet files")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(
            path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES
        )
        if not found:
            raise ValueError(f"{folder / name} has no images; remove the folder or fill it")
        paths += found
        labels += [label] * len(found)
    return Encoded(Folder(paths), torch.tensor(labels), tuple(classes))


def decoded(files: Encoded, size: int) -> Resident:
    """Decode all images; ValueError that lists images that are damaged or of another size."""
    return Resident(read_all(files.source, size), files.labels, files.classes)


def _has_size(files: Encoded, size: int) -> bool:
    """Whether the first image has this height and width."""
    return tuple(decode(files.source, 0).size) == (size, size)


def held_out(labels: Tensor, share: float, classes: Sequence[str]) -> Tensor:
    """A mask of the images to hold out, (N,) in bool.

    The N images are shuffled in an order that depends on N only. Of a class with n images, the
    first round(share · n) in that order are held out, and at least one. A larger share holds out
    the same images and more.

    Args:
        labels: class numbers of the training images, (N,).
        share: share of each class to hold out, more than 0 and less than 1.
        classes: names of the classes, for messages.

    Raises:
        ValueError: a class would have no image left to train on.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(HOLDOUT_SEED))
    by_class = order[labels[order].argsort(stable=True)]
    counts = labels.bincount(minlength=len(classes)).tolist()
    held = torch.zeros(len(labels), dtype=torch.bool)
    for name, places in zip(classes, torch.split(by_class, counts), strict=True):
        count = len(places)
        chosen = max(1, round(share * count))
        if 0 < count <= chosen:
            raise ValueError(
                f"holdout={share:g} would hold out all {count} training images of class {name!r} "
                "(at least one of each class is held out); lower it, or add images to the class"
            )
        held[places[:chosen]] = True
    return held


def corrupt(labels: Tensor, share: float, classes: int, seed: int, *, to: CorruptionTo) -> Tensor:
    """A copy of the labels in which round(share · N) are replaced by random ones.

    Args:
        labels: class numbers, (N,).
        share: share of the labels to replace.
        classes: number of classes.
        seed: seed of the choice; both values of `to` replace the same labels.
        to: draw new labels uniformly from the "other" classes, or from "any" class.
    """
    generator = torch.Generator().manual_seed(seed)
    count = round(share * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    first = 1 if to == "other" else 0
    moves = torch.randint(first, classes, (count,), generator=generator)
    corrupted = labels.clone()
    corrupted[chosen] = (labels[chosen] + moves) % classes
    return corrupted


def input_spec_of(train: Resident | Encoded, device: torch.device | None = None) -> InputSpec:
    """The input spec of a network that is trained on these images.

    Images in memory are normalized by their own statistics, computed on the device; image files by
    the statistics of ImageNet.
    """
    if isinstance(train, Encoded):
        return InputSpec(train.classes, FILES_MEAN, FILES_STD, "of ImageNet")
    # histograms of integers, so that the sums are exact
    values = train.images.to(device).transpose(0, 1).flatten(1)
    count = values.shape[1]
    counts = [torch.bincount(channel.int(), minlength=256) for channel in values]
    histogram = torch.stack(counts).cpu()
    levels = torch.arange(256, dtype=torch.float64)
    mean = (histogram @ levels.to(histogram.dtype)).double() / count
    square = (histogram.double() * (levels - mean[:, None]).square()).sum(1) / count
    std = square.sqrt().clamp_min(1)
    return InputSpec(
        train.classes, tuple(mean.float().tolist()), tuple(std.float().tolist()),
        "measured on the training images", in_memory=True,
    )  # fmt: skip
