"""Writes small models under the names of the real ones: `python -m small_models --out DIR [NAME ...]`."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from small_models import hub


def main() -> int:
    """Write the models that the command line names, print how to use them, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m small_models",
        description="Writes small models, under the names of the real ones, as a Hugging Face cache.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder of the cache, for HF_HOME")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(hub.REGISTRY)} (default: all of them)")
    options = parser.parse_args()
    try:
        written = hub.write_cache(options.out, options.names or None)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    out = options.out.resolve()
    for name, folder in written.items():
        print(f"{name}: {folder}")
    print(f"To use them: HF_HOME={out} HF_HUB_OFFLINE=1 xdit --model {next(iter(written))} ...")
    if editing_models := [name for name in written if hub.REGISTRY[name].takes_image]:
        print(f"{', '.join(editing_models)} also need: --input_images {out / hub.INPUT_IMAGE}")
    video_models = [name for name in written if hub.REGISTRY[name].makes_video]
    if video_models and not find_spec("imageio_ffmpeg"):
        print(f"To save the videos of {', '.join(video_models)}: pip install imageio imageio-ffmpeg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
