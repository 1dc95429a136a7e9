"""`python -m infer COMMAND ...` starts here; `command.py` has the table of commands."""

import sys
from pathlib import Path

# Launched as a folder, Python puts infer/ itself on the path: put the checkout there instead.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from infer.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
