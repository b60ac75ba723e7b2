"""Which files a GPU decodes, which Pillow, and whether they show the same."""

from dataclasses import replace
from io import BytesIO

import pytest
import torch

import cenet.data.cuda_decoding as cuda_decoding
from _files import decode_here, jpeg, photograph, photographs, write_files
from _training import TINY, stop_at
from cenet.data.cuda_decoding import as_tensor, choose, decode_jpegs, jpeg_size
from cenet.data.datasets import Split, input_spec_of
from cenet.data.loaders import evaluation_batches, training_loader
from cenet.data.order import Shard
from cenet.distributed import Processes
from cenet.train import RECIPES, checkpoint
from cenet.train.classifier import Trainer
from cenet.train.loop import Interrupted
from cenet.train.options import Options

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def saved(image, kind, **options):
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"subsampling": 0},
        {"subsampling": 1},
        {"progressive": True},
        {"optimize": True, "quality": 30},
        {"exif": b"Exif\0\0" + jpeg(photograph(20, 20))},  # a thumbnail is an image of its own
        {"comment": b"\xff\xc0 this is no frame"},
    ],
)
def test_whole_files_in_colour_and_grey_are_for_the_gpu(options):
    image = photograph(45, 70)
    assert jpeg_size(jpeg(image, **options)) == (45, 70)
    grey = {name: value for name, value in options.items() if name != "subsampling"}
    assert jpeg_size(jpeg(image.convert("L"), **grey)) == (45, 70)


def test_all_others_are_not():
    image = photograph(45, 70)
    whole = jpeg(image)
    others = {
        "truncated": whole[:-2],
        "cut in its header": whole[:100],
        "with something behind it": whole + b"\0",
        "CMYK": jpeg(image.convert("CMYK")),
        "RGB without YCbCr": jpeg(image, keep_rgb=True),
        "RGB by its names alone": jpeg(image, keep_rgb=True).replace(b"Adobe", b"Other"),
        "grey with factors of colours": jpeg(image.convert("L"), subsampling=2),
        "4:1:1": whole.replace(b"\x01\x22\x00", b"\x01\x41\x00", 1),
        "colours larger than brightness": whole.replace(b"\x02\x11\x01", b"\x02\x22\x01", 1),
        "PNG": saved(image, "PNG"),
        "text": b"no image",
        "empty": b"",
        "no more than its ends": b"\xff\xd8\xff\xd9",
        "a segment without length": b"\xff\xd8\xff\xe0\0\0\xff\xd9",
        "12 bits": whole.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
        "arithmetic codes": whole.replace(b"\xff\xc0\0\x11", b"\xff\xc9\0\x11"),
    }
    assert {name: jpeg_size(content) for name, content in others.items()} == dict.fromkeys(others)
    assert jpeg_size(whole.replace(b"\xff\xc0", b"\xff\xff\xff\xc0", 1)) == (45, 70)  # filled up


def test_what_decodes(monkeypatch):
    assert [choose(asked, CPU, 2) for asked in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match="--decode cuda is not possible: this run is on cpu; use"):
        choose("cuda", CPU, 2)
    monkeypatch.setattr(cuda_decoding, "decode_jpegs", decode_here)
    for workers, found in ((0, "cuda"), (11, "cuda"), (12, "cpu"), (64, "cpu")):
        chosen = [choose(asked, GPU, workers) for asked in ("auto", "cpu", "cuda")]
        assert chosen == [found, "cpu", "cuda"]

    def broken(contents, device):
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support\nat …")

    def wrong(contents, device):
        return [image + 9 for image in decode_here(contents)]

    for decoder, reason in ((broken, "not compiled with nvJPEG support"), (wrong, "other pixels")):
        monkeypatch.setattr(cuda_decoding, "decode_jpegs", decoder)
        assert choose("auto", GPU, 2) == "cpu"
        with pytest.raises(ValueError, match=f"^--decode cuda is not .*{reason}.*--decode cpu$"):
            choose("cuda", GPU, 2)


@pytest.mark.gpu
def test_pixels_are_pillows_but_for_the_upsampling_of_colours():
    """Colours of half the width and height are repeated there, and interpolated by Pillow.

    Patches of random colours differ by 4.1 to 4.9 of 255 for that (computed without a GPU); of 256
    of COCO's photographs, the one that differs most by 1.97.
    """
    assert choose("auto", GPU, 2) == "cuda"
    for mode, options, most, mean in (
        ("L", {}, 2, 0.5),
        ("L", {"progressive": True}, 2, 0.5),
        ("RGB", {"subsampling": 0}, 2, 0.5),
        ("RGB", {"subsampling": 1}, 255, 5.5),
        ("RGB", {"subsampling": 2}, 255, 5.5),
        ("RGB", {"subsampling": 2, "progressive": True}, 255, 5.5),
    ):
        images = [photograph(51 + 9 * i, 97 - 5 * i, seed=i).convert(mode) for i in range(8)]
        contents = [as_tensor(jpeg(image, **options)) for image in images]
        for image, content in zip(decode_jpegs(contents, GPU), contents, strict=True):
            assert jpeg_size(content.numpy().tobytes()) is not None
            (expected,) = decode_here([content])
            difference = (image.cpu().int() - expected.int()).abs()
            assert difference.max() <= most
            assert difference.float().mean() <= mean
            assert (luma(image.cpu()) - luma(expected)).abs().mean() <= 1.2


def luma(image):
    """Brightness, which is never subsampled; colours that leave 0 to 255 are clipped, though."""
    return (torch.tensor([0.299, 0.587, 0.114])[:, None, None] * image).sum(0)


def kinds():
    """Files that the GPU's decoder must not be given, among others."""
    contents = photographs(16)
    image = photograph(60, 70, seed=50)
    contents[4] = jpeg(image.convert("CMYK"))
    contents[5] = jpeg(image, keep_rgb=True)
    contents[6] = jpeg(image) + b"\0\0"
    return contents


def loader(files, device, decode, augment="imagenet", **options):
    recipe = replace(RECIPES["resnet18_ce"], image_size=32, epochs=2, augment=augment)
    return training_loader(
        recipe, files, input_spec_of(files), Shard(len(files.labels), 8), device=device,
        decode=decode, **{"workers": 2, **options},
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_are_those_of_the_cpu(tmp_path, channels_last):
    files = write_files(tmp_path, kinds())
    options = {"channels_last": channels_last}
    on_gpu = loader(files, GPU, "cuda", **options)
    on_cpu = loader(files, CPU, "cpu", **options)
    for epoch in range(2):
        pairs = zip(on_gpu.epoch(epoch), on_cpu.epoch(epoch), strict=True)
        for (images, labels), (expected, own) in pairs:
            assert torch.equal(labels.cpu(), own)
            assert images.stride() == expected.stride()
            # 57 levels are a standard deviation
            assert 57 * (images.cpu() - expected).abs().mean() < 5.5
    shared = {"size": 32, "batch": 5, "channels_last": channels_last, "workers": 1}
    spec = input_spec_of(files)
    one, other = (
        list(evaluation_batches(files, spec, device=device, decode=decode, **shared))
        for device, decode in ((GPU, "cuda"), (CPU, "cpu"))
    )
    for (images, labels), (expected, own) in zip(one, other, strict=True):
        assert torch.equal(labels.cpu(), own)
        assert 57 * (images.cpu() - expected).abs().mean() < 5.5


@pytest.mark.gpu
@pytest.mark.parametrize("augment", ["imagenet", "imagenet_colour", "crop_flip"])
def test_files_decoded_by_processes_are_resized_on_the_gpu(tmp_path, augment):
    files = write_files(tmp_path, kinds())
    pairs = zip(
        loader(files, GPU, "cpu", augment=augment).epoch(0),
        loader(files, CPU, "cpu", augment=augment).epoch(0),
        strict=True,
    )
    for (images, labels), (expected, own) in pairs:
        assert torch.equal(labels.cpu(), own)
        assert 57 * (images.cpu() - expected).abs().max() < 1.3  # float16, and rounded once
        assert 57 * (images.cpu() - expected).abs().mean() < 0.4


@pytest.mark.gpu
@pytest.mark.parametrize("content", [b"no image", jpeg(photograph(60, 80))[:-900]])
def test_a_damaged_file_is_named(tmp_path, content):
    files = write_files(tmp_path, [*photographs(15), content])
    with pytest.raises(ValueError, match=r"^.*15\.jpg is not an image that can be read: [^\n]*$"):
        list(loader(files, GPU, "cuda").epoch(0))


@pytest.mark.gpu
def test_batches_are_not_overwritten_while_a_network_reads_them(tmp_path):
    """Each stream reuses memory when it is done with it, not when others are."""
    files = write_files(tmp_path, photographs(64))
    expected = [images.double().sum().item() for images, _ in loader(files, GPU, "cuda").epoch(0)]
    busy = torch.randn(4096, 4096, device=GPU)
    sums = []
    for images, _ in loader(files, GPU, "cuda").epoch(0):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        sums.append(images.double().sum())  # queued behind it
        del images
    assert [value.item() for value in sums] == pytest.approx(expected, rel=1e-6, abs=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_an_interrupted_run_goes_on_at_the_same_image(tmp_path, cuda_graphs):
    files = write_files(tmp_path, photographs(64))
    recipe = replace(TINY, augment="imagenet", image_size=32, dataset="imagenet", batch_size=8)

    def trainer(name):
        options = Options(tmp_path / name, cuda_graphs=cuda_graphs, decode="cuda")
        made = Trainer(recipe, Split(files, files), options, Processes(0, 1, GPU))
        seen, real = [], made.add_gradients

        def noted(batch):
            seen.append((made.position.epoch, batch[0].double().sum().item(), batch[1].tolist()))
            real(batch)

        made.add_gradients = noted
        return made, seen

    whole, expected = trainer("whole")
    assert whole.loader.decoding == "cuda"
    whole.run()
    first, seen = trainer("cut")
    stop_at(first, 5)
    with pytest.raises(Interrupted):
        first.run()
    assert checkpoint.newest(tmp_path / "cut")[2]["position"]["step"] == 5
    second, rest = trainer("cut")
    assert second.resume()
    second.run()
    assert [*seen, *rest] == expected
    last = second.run_log.rows[-1]
    assert last["train_loss"] == pytest.approx(whole.run_log.rows[-1]["train_loss"], rel=1e-2)
