"""`python -m tests.what_may_i_do` writes docs/what-may-i-do.md; given columns or operations, it prints those only."""

from __future__ import annotations

import sys
from collections import Counter

from tests.support.ranks import Ranks
from tests.what_may_i_do.operations import OPERATIONS
from tests.what_may_i_do.page import PAGE, failures, found, written
from tests.what_may_i_do.performing import COLUMNS


def main(words: list[str]) -> int:
    columns = [word for word in words if word in COLUMNS] or list(COLUMNS)
    names = [word for word in words if word not in COLUMNS]
    operations = [one for one in OPERATIONS if not names or any(word in one.name for word in names)]
    pool = Ranks()
    try:
        results = {}
        for column in columns:
            results[column] = found(pool, column, operations)
            kinds = Counter(result.kind for result in results[column].values())
            print(f"{column}: {dict(kinds)}", flush=True)
    finally:
        pool.close()
    if words:
        for column in columns:
            for name, result in results[column].items():
                print(f"{column:8} {result.kind:7} {name}: {result.sentence}")
    else:
        PAGE.write_text(written(results))
    failed = failures(results)
    print("\n".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
