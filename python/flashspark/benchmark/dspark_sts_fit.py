"""Fits the calibration file of a confidence head (STS) to records that a server has collected.

    SGLANG_DSPARK_STS_COLLECT_PATH=out/records python -m flashspark.launch_server … --ragged-verify-mode cap-accept
    python -m flashspark.benchmark.dspark_sts_fit --records out/records --out out/sts.json

Serve what will be served later: the temperatures are those of the traffic that they were fitted to. The errors that
are printed are on the fitted records themselves, and a little too good for others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from flashspark.speculative.calibration import StsCalibration, load_sts
from flashspark.speculative.sts_records import load_records

from .sts_fit import fit, is_saturated

LEAST_BLOCKS = 1000


def show(calibration: StsCalibration, prefix: Tensor) -> None:
    """A line per draft position; what the grid could not reach is warned about."""
    print("draft  temperature  accepted so far  error before  error after")
    lines = zip(
        calibration.temperatures, prefix.double().mean(0), calibration.ece_before, calibration.ece_after,
        strict=True,
    )  # fmt: skip
    for k, (temperature, accepted, before, after) in enumerate(lines, 1):
        print(f"{k:5d}  {temperature:11.4f}  {accepted:15.4f}  {before:12.4f}  {after:11.4f}")
    for k, temperature in enumerate(calibration.temperatures, 1):
        if is_saturated(temperature):
            print(
                f"warning: the temperature of draft {k} is {temperature:g}, the end of what is tried: the head's "
                "logit says little there, or too few drafts got as far",
                file=sys.stderr,
            )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="dspark_sts_fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", required=True, metavar="STEM", help="fit STEM.<number>.pt")
    parser.add_argument("--out", type=Path, required=True, help="the calibration file to write")
    parser.add_argument("--dataset", default="", help="what was served, for the file")
    parser.add_argument(
        "--min-samples", type=int, default=LEAST_BLOCKS, help=f"blocks, at least (default {LEAST_BLOCKS})"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 with a reason on stderr where nothing can be fitted or written."""
    args = parse(argv)
    try:
        logits, prefix = load_records(args.records)
        if len(logits) < max(1, args.min_samples):
            raise ValueError(
                f"{len(logits)} blocks are too few for temperatures that hold for others: serve more, "
                f"{args.min_samples} at least (--min-samples)"
            )
        calibration = fit(logits, prefix, args.dataset or f"{len(logits)} blocks of {args.records}")
        args.out.write_text(calibration.to_json(), encoding="utf-8")
        show(load_sts(args.out), prefix)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.out}, fitted to {len(logits)} blocks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
