"""JPEG files that the tests of decoding share."""

from io import BytesIO

import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from cenet.data.datasets import Encoded
from cenet.data.sources import Folder


def photograph(height, width, seed=0):
    """Smooth patches of colour, as photographs have them."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(256, (6, 8, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(few.numpy()).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image, **options):
    """The bytes of a file."""
    file = BytesIO()
    image.save(file, "JPEG", **{"quality": 90, **options})
    return file.getvalue()


def decode_here(contents, device=None):
    """What the GPU's decoder does, by Pillow; a file it cannot decode fails in the same way."""
    images = []
    for content in contents:
        try:
            image = Image.open(BytesIO(content.numpy().tobytes())).convert("RGB")
        except OSError as error:
            raise RuntimeError("Error while decoding JPEG images") from error
        images.append(pil_to_tensor(image))
    return images


def write_files(folder, contents):
    """Files of so many bytes each, in two classes."""
    paths = []
    for i, content in enumerate(contents):
        suffix = "png" if content.startswith(b"\x89PNG") else "jpg"
        paths.append(folder / f"{i}.{suffix}")
        paths[-1].write_bytes(content)
    return Encoded(Folder(paths), torch.arange(len(paths)) % 2, ("a", "b"))


def photographs(count):
    """Files of many sizes: most in colour, some grey or progressive, one a PNG."""
    shapes = [(60, 80), (80, 60), (45, 64), (51, 51), (33, 97)]
    images = [photograph(*shapes[i % len(shapes)], seed=i) for i in range(count)]
    contents = [jpeg(image, progressive=i % 5 == 3) for i, image in enumerate(images)]
    contents[1] = jpeg(images[1].convert("L"))
    file = BytesIO()
    images[2].save(file, "PNG")
    contents[2] = file.getvalue()
    return contents
