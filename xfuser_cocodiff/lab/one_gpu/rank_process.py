"""One rank of a case: python -m xfuser_cocodiff.lab.one_gpu.rank_process CASE RESULT"""

import argparse
import json
import os
from pathlib import Path

import torch.distributed as dist

from xfuser_cocodiff import install

install()  # before xfuser is imported, also where the package is not installed and has no entry point

from xfuser_cocodiff.lab.one_gpu.rank_cases import CASES  # noqa: E402


def main() -> None:
    """Run the case on this rank; rank 0 writes its result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("result", type=Path)
    parser.add_argument("--arguments", type=json.loads, default={})
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    result = CASES[options.case](options.dry_run, **options.arguments)
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # without destructors, which wait for the other ranks


if __name__ == "__main__":
    main()
