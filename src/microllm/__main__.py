"""``python -m microllm``: the same as the ``microllm`` command."""

import sys

from microllm.cli import main

sys.exit(main())
