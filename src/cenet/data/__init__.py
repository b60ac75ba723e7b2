"""Images and labels: where they are stored, how they are decoded, in which order they are used."""

from cenet.extras import require

require("train")
