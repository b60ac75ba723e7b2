"""Optional packages: `pip install cenet` brings torch alone, extras bring the rest."""

from importlib.util import find_spec

CLI = ("tyro", "rich")
MODELS = ("timm", "torchvision", "safetensors")
TRAIN = (*CLI, *MODELS, "numpy", "pillow")
REPORT = (*TRAIN, "jinja2")
# packages that the code of an extra cannot run without, by their names on PyPI
PACKAGES = {
    "cli": CLI,
    "models": MODELS,
    "train": TRAIN,
    "report": REPORT,
    "demo": (*REPORT, "scikit-learn"),
    "detection": (*REPORT, "pycocotools"),
    "data": ("pyarrow",),
    "export": ("onnx", "onnxruntime", "onnxscript", "pillow", "scikit-learn"),
    "gradcam": ("grad-cam",),
    "lightning": ("lightning",),
}
# packages that are imported under another name
MODULES = {"pillow": "PIL", "scikit-learn": "sklearn", "grad-cam": "pytorch_grad_cam"}


class MissingExtraError(ModuleNotFoundError):
    """Packages are not installed; the message is one line with the pip command that brings them."""


def require(*extras: str) -> None:
    """Raise MissingExtraError unless the packages of these extras are installed.

    Nothing is imported.
    """
    missing = {
        extra: [name for name in PACKAGES[extra] if find_spec(MODULES.get(name, name)) is None]
        for extra in extras
    }
    names = list(dict.fromkeys(name for found in missing.values() for name in found))
    if not names:
        return
    wanted = ",".join(extra for extra, found in missing.items() if found)
    verb = "is" if len(names) == 1 else "are"
    raise MissingExtraError(
        f"{', '.join(names)} {verb} not installed; pip install 'cenet[{wanted}]'"
    )
