"""Another name of ``kvcore.testing.plugin``, for installed entry points and command lines that say it."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("kvcore.testing.plugin")
