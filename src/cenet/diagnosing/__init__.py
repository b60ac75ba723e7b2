"""The command `cenet diagnose`: a network and images by name, its diagnosis on the terminal.

The diagnosis itself is `cenet.diagnose`. This package cannot have that name: importing it would
replace the function.
"""

from cenet.extras import require

require("report")
