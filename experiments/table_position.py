"""Table integrationstra: CE behind the second or the third convolution of a block, ResNet-50.

    python experiments/table_position.py --data IMAGENET --device cuda
    python experiments/table_position.py --scale smoke

Claim of the paper: the third, with four times the channels, is better by 0.4.
Expected cost: 2 runs on ImageNet, days each on eight GPUs; about 10 s of a CPU core with
--scale smoke (where both rows are the same run).
"""

from _experiment import study

ROWS = (("CE2-ResNet-50", 2, 77.9), ("CE3-ResNet-50", 3, 78.3))


def main() -> None:
    """Train what is missing, measure, draw."""
    found = study(__doc__, "table_position")
    rows = []
    for label, position, paper in ROWS:
        place = {} if found.smoke else {"ce_position": position}
        run = found.run("resnet50_ce", **place)
        rows.append({"row": label, "top1": run.top1, "top5": run.top5, "paper_top1": paper / 100})
    found.write(rows)


if __name__ == "__main__":
    main()
