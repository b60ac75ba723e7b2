"""Images with boxes and masks: folders in the layout of COCO, or synthetic shapes."""

from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from cenet.data.datasets import (
    FILES_MEAN,
    FILES_STD,
    HOLDOUT_SEED,
    InputSpec,
    different_classes,
)
from cenet.data.decoding import read, read_image
from cenet.data.sources import Folder, mark, sample
from cenet.detection.coco import Faults, Record, clean
from cenet.detection.recipes import DetectionRecipe
from cenet.detection.synthetic import draw_shapes
from cenet.files import read_json

SHAPES = (400, 100)  # number of synthetic training and test images
SHOWN = 3  # names that a message lists for a fault
MOST_ELONGATED = 20  # longer images would have a shorter side of 0 when resized
# last bytes of a complete JPEG and of a complete PNG
ENDINGS = (b"\xff\xd9", b"IEND\xaeB`\x82")


class Scenes(NamedTuple):
    """Images and their objects."""

    name: str
    images: list[Record]
    objects: list[list[Record]]  # by image
    coco: Record  # images and objects in the format of COCO, for the evaluation
    classes: tuple[str, ...]
    labels: dict[int, int]  # from ids of categories, which may have gaps; 0 is the background
    root: Path | None  # folder of the image files, or None with `pixels`
    pixels: list[Tensor] | None  # (3, H, W) in uint8
    faults: Faults

    def read(self, index: int) -> Tensor:
        """An image, (3, H, W) in uint8."""
        if self.pixels is not None:
            return self.pixels[index]
        assert self.root is not None
        pixels: Tensor = pil_to_tensor(read_image(self.root / self.images[index]["file_name"]))
        return pixels

    def digest(self) -> str:
        """A digest of images and objects that does not depend on the folder of the files.

        After a colon, it has marks of a sample of images: of their pixels or files, and of the
        masks on them.
        """
        found, marks = blake2b(digest_size=16), ""
        for record in (*self.images, *self.coco["annotations"]):
            text = [value for key, value in record.items() if key != "segmentation"]
            found.update(repr(text).encode())
        for number in sample(len(self.images)):
            masks = [record.get("segmentation") for record in self.objects[number]]
            marks += mark(self._content(number) + repr(masks).encode())
        return f"{found.hexdigest()}:{marks}"

    def _content(self, index: int) -> bytes:
        """The bytes of the file or of the pixels of an image."""
        if self.pixels is not None:
            return self.pixels[index].numpy().tobytes()
        assert self.root is not None
        return read(Folder([self.root / self.images[index]["file_name"]]), 0)

    def report(self) -> str:
        """Numbers of images and objects, and of those that were left out, for the terminal."""
        count = sum(map(len, self.objects))
        empty = sum(not objects for objects in self.objects)
        text = f"{self.name}: {len(self.images)} images ({empty} empty), {count} objects"
        left = [
            f"{fault}: {len(names)} ({', '.join(names[:SHOWN])}{', …' * (len(names) > SHOWN)})"
            for fault, names in sorted(self.faults.items())
        ]
        return "\n  left out: ".join([text, *left])


class SceneSplit(NamedTuple):
    """Training and test images."""

    train: Scenes
    test: Scenes

    def inputs(self) -> InputSpec:
        """The input spec of a network trained on these images."""
        return InputSpec(self.train.classes, FILES_MEAN, FILES_STD)


def load(recipe: DetectionRecipe, folder: Path | None) -> SceneSplit:
    """The data of a recipe.

    Raises:
        ValueError: the folder is missing or not laid out as COCO, nothing in it is usable, train
            and test have different categories, or too few images are left when some are held out.
    """
    masks = recipe.detector == "mask_rcnn"
    if recipe.dataset == "shapes":
        if folder is not None:
            raise ValueError(f"shapes are drawn, not read from files; remove --data {folder}")
        drawn = [draw_shapes(count, seed) for seed, count in enumerate(SHAPES)]
        parts = [
            scenes(name, coco, pixels=pixels, masks=masks)
            for name, (pixels, coco) in zip(("train", "test"), drawn, strict=True)
        ]
    else:
        parts = [_part(*place, masks=masks) for place in _places(folder, recipe.dataset)]
        if len(parts) == 1:
            parts *= 2
    if recipe.holdout > 0:
        parts = hold_out(parts[0], recipe.holdout)
    split = SceneSplit(*parts)
    if split.train.labels != split.test.labels or split.train.classes != split.test.classes:
        differ = "their ids"
        if {*split.train.classes} != {*split.test.classes}:
            differ = different_classes("train", split.train.classes, "test", split.test.classes)
        raise ValueError(f"train and test have different categories: {differ}")
    return split


def hold_out(data: Scenes, share: float) -> list[Scenes]:
    """Split images into those to train on, and round(share · N) of them to test with.

    The N images are shuffled in an order that depends on N only; a larger share holds out the same
    images and more.

    Raises:
        ValueError: one of the two parts would have nothing to detect.
    """
    count = len(data.images)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(HOLDOUT_SEED)).tolist()
    held = round(share * count)
    kept = _selected(data, sorted(order[held:]))
    tested = _selected(data, sorted(order[:held]))._replace(
        name=f"{data.name}, held out", faults={}
    )
    parts = [kept, tested]
    for part in parts:
        if not any(part.objects):
            raise ValueError(
                f"holdout={share:g} of {count} images leaves no object: {part.report()}"
            )
    return parts


def _selected(data: Scenes, places: list[int]) -> Scenes:
    """Some of the images, with their objects."""
    images = [data.images[place] for place in places]
    kept = {image["id"] for image in images}
    annotations = [one for one in data.coco["annotations"] if one["image_id"] in kept]
    return data._replace(
        images=images,
        objects=[data.objects[place] for place in places],
        coco={**data.coco, "images": images, "annotations": annotations},
        pixels=None if data.pixels is None else [data.pixels[place] for place in places],
    )


def _places(folder: Path | None, dataset: str) -> list[tuple[Path, Path]]:
    """Annotation files and image folders of training and test images."""
    if folder is None:
        raise ValueError(f"{dataset} is not built in; say where it is with --data FOLDER")
    if (folder / "instances.json").is_file():
        return [(folder / "instances.json", folder / "images")]
    places = []
    for part in ("train", "val"):
        found = sorted((folder / "annotations").glob(f"instances_{part}*.json"))
        if not found:
            raise ValueError(
                f"{folder} must have annotations/instances_train2017.json with train2017/ and the "
                "same of val2017, or instances.json with images/ to train and test on the same"
            )
        places.append((found[-1], folder / found[-1].stem.removeprefix("instances_")))
    return places


def _part(path: Path, root: Path, *, masks: bool) -> Scenes:
    if not root.is_dir():
        raise ValueError(f"{path} is there, but its folder of images {root} is not")
    coco = read_json(path)
    try:
        return scenes(root.name, coco, root=root, masks=masks)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def scenes(
    name: str,
    coco: Record,
    *,
    root: Path | None = None,
    pixels: list[Tensor] | None = None,
    masks: bool = True,
) -> Scenes:
    """Check images and annotations, and keep those that can be used.

    Args:
        name: train, test or the like, for messages.
        coco: annotations in the format of COCO.
        root, pixels: folder of the images, or the images themselves.
        masks: drop objects without a mask.

    Raises:
        ValueError: these are not COCO annotations, or none of them can be used.
    """
    coco, faults = clean(
        coco, lambda record: None if root is None else _fault(root, record), masks=masks
    )
    by_image: dict[Any, list[Record]] = {record["id"]: [] for record in coco["images"]}
    for annotation in coco["annotations"]:
        # crowds are for the evaluation only, which does not count predictions on them
        if not annotation["iscrowd"]:
            by_image[annotation["image_id"]].append(annotation)
    ids = [record["id"] for record in coco["categories"]]
    found = Scenes(
        name, coco["images"], list(by_image.values()), coco,
        tuple(record["name"] for record in coco["categories"]),
        {number: index + 1 for index, number in enumerate(ids)},
        root, pixels, faults,
    )  # fmt: skip
    if not any(found.objects):
        raise ValueError(f"there is nothing to detect: {found.report()}")
    return found


def _fault(root: Path, record: Record) -> str | None:
    name = Path(record["file_name"])
    path = root / name
    if name.is_absolute() or ".." in name.parts:
        return "images whose file is outside of the folder of images"
    if max(size := (record["width"], record["height"])) > MOST_ELONGATED * min(size):
        return f"images more than {MOST_ELONGATED} times as long as wide"
    try:
        if not path.is_file():
            return "images whose file is missing"
        with Image.open(path) as image:  # reads the header only
            own = image.size
            if not _has_an_end(path):
                image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return "images whose file cannot be read"
    if own != size:
        return "images of another size than the annotations say"
    return None


def _has_an_end(path: Path) -> bool:
    """Whether a file ends like a complete JPEG or PNG; some complete files do not."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return file.read().rstrip(b"\0").endswith(ENDINGS)


def outline_mask(segmentation: Any, height: int, width: int, scale: tuple[float, float]) -> Tensor:
    """A mask (height, width) in uint8 from polygons scaled by (x, y), or from a run-length code."""
    from pycocotools import mask

    if isinstance(segmentation, list):
        stretched = [
            [value * scale[place % 2] for place, value in enumerate(polygon)]
            for polygon in segmentation
        ]
        return torch.from_numpy(mask.decode(mask.merge(mask.frPyObjects(stretched, height, width))))
    code = segmentation
    if isinstance(code["counts"], list):
        code = mask.frPyObjects(code, *code["size"])
    whole = torch.from_numpy(mask.decode(code))[None, None]
    return torch.nn.functional.interpolate(whole, size=(height, width))[0, 0]
