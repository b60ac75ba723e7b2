"""Images and labels: where they are stored, how they are decoded, in which order they are shown."""

from cenet.extras import require

require("train")
