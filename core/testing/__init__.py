"""Laws that every resumable loader must satisfy, for your own loaders and adapters as for midepoch's.

    from midepoch.testing import check_resumable
    check_resumable(make_loader)     # a function that builds a fresh loader; raises LawError

With pytest, subclass `ResumableTests`: one test for each law. The functions need no pytest.
"""

from __future__ import annotations

from .items import digest
from .laws import LAWS, check_resumable
from .report import Law, LawError, Outcome, Report, Verdict
from .suite import ResumableTests

__all__ = [
    "LAWS",
    "Law",
    "LawError",
    "Outcome",
    "Report",
    "ResumableTests",
    "Verdict",
    "check_resumable",
    "digest",
]
