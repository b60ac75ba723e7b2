"""Fig. 1a: inhibited channels and test error of batch norm and layer norm, without and with CE.

    python experiments/fig1a_normalizers.py --data CIFAR10 --device cuda
    python experiments/fig1a_normalizers.py --scale smoke

Claim of the paper: CE leaves fewer channels inhibited behind either norm, and errs less.
Expected cost: 4 runs of VGG-16, 160 epochs, three minutes each on an H200; about 20 s of a CPU
core with --scale smoke.
"""

from _comparisons import inhibited_and_error
from _experiment import study

ROWS = (
    ("BN", "vgg16_plain"),
    ("BN+CE", "vgg16_ce"),
    ("LN", "vgg16_ln"),
    ("LN+CE", "vgg16_ln_ce"),
)

if __name__ == "__main__":
    inhibited_and_error(study(__doc__, "fig1a_normalizers"), ROWS)
