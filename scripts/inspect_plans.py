"""Look at a plan store: python scripts/inspect_plans.py [list [--html FILE]]|show KEY|verify|diff A B|clear [--json] [--store DIR]"""

from __future__ import annotations

import sys

import cudnn_graphs.ops  # noqa: F401 - registers every signature type
from cudnn_graphs.planning.inspect import main
from cudnn_graphs.planning.tables import until_the_reader_leaves

if __name__ == "__main__":
    sys.exit(until_the_reader_leaves(main))
