"""Print the files whose tests failed, from a report of pytest (`--junitxml FILE -o junit_family=xunit1`).

Nothing is printed if a failure has no file.
"""

from __future__ import annotations

import sys
from xml.etree import ElementTree

cases = ElementTree.parse(sys.argv[1]).iter("testcase")
failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
files = {case.get("file") or "" for case in failed}
if files and "" not in files:
    print("\n".join(sorted(files)))
