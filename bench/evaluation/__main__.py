"""``python bench/evaluation``: see ``command``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # A folder that is run as a script puts itself on the path; its modules are named from the folder above.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from evaluation.command import main

    main()
