"""Parity: the conformance checks run on backends in one process, as records that can be merged and read later.

``run`` makes a report, ``merge`` joins reports from machines that never meet, ``show`` turns one into tables. Whatever
else reads evidence (an HTML page, a badge) starts from a report and from ``show.summarise``, never from live objects.
"""

from kvcore.parity.merge import merge
from kvcore.parity.records import Record, Report, Run, read, write
from kvcore.parity.run import run
from kvcore.parity.show import Summary, summarise

__all__ = ["Record", "Report", "Run", "Summary", "merge", "read", "run", "summarise", "write"]
