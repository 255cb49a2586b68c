"""``python -m kvcore`` is the ``kvcore`` command."""

from kvcore.cli import main

raise SystemExit(main())
