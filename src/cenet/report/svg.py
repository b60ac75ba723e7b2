"""The elements of a drawing. Text reaches it only through ElementTree, which escapes it."""

from xml.etree import ElementTree as Tree


def drawing(label: str, width: float, height: float) -> Tree.Element:
    """An empty drawing; `label` is what a reader who does not see it hears."""
    return Tree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width:g} {height:g}",
            "class": "drawing",
            "role": "img",
            "aria-label": label,
        },
    )


def put_picture(
    root: Tree.Element, uri: str, box: tuple[float, float, float, float], style: str = ""
) -> None:
    """A picture that fills a box: left, top, width, height."""
    place = dict(zip(("x", "y", "width", "height"), (f"{value:g}" for value in box), strict=True))
    look = {"preserveAspectRatio": "none"} | ({"style": style} if style else {})
    Tree.SubElement(root, "image", {"href": uri, **place, **look})


def put_text(
    root: Tree.Element,
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    of: str = "",
    *,
    turn: str = "",
) -> Tree.Element:
    """Text on a line; `of` is its class, `turn` how it is moved and rotated."""
    place = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    place |= {"class": of} if of else {}
    place |= {"transform": turn} if turn else {}
    element = Tree.SubElement(root, "text", place)
    element.text = text
    return element


def as_text(root: Tree.Element) -> str:
    """The drawing as SVG."""
    return Tree.tostring(root, encoding="unicode")
