"""`accelerate launch train CONFIG [section.key=value ...]` starts here."""

import sys
from pathlib import Path

# Launched as a folder, Python puts train/ itself on the path: put the checkout there instead.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from train.command import main  # noqa: E402

if __name__ == "__main__":  # spawned workers import this file again
    sys.exit(main())
