"""`python -m plnode`: the same program as the `plnode` command."""

from __future__ import annotations

import sys

from plnode.cli import main

sys.exit(main())
